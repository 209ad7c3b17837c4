"""Plans of writes: which rows of each piece each writer writes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from qsync_opt.errors import ProblemError
from qsync_opt.io import (
    Extras,
    Json,
    Name,
    check_fields,
    decode,
    encode,
    freeze,
    merge_extras,
    split_extras,
    write_json,
)

PLAN_FORMAT = "qsync-writes-plan/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Rows ``begin`` (included) to ``end`` (excluded) of a piece, written by ``writer``."""

    writer: str
    begin: int
    end: int

    def __post_init__(self) -> None:
        check_fields(self, "part")
        if self.begin >= self.end:
            raise ProblemError(f"part of {self.writer!r}: rows {self.begin} to {self.end}, but it must have a row")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The parts of each piece by its name."""

    writes: Mapping[Name, tuple[Part, ...]]
    extras: Annotated[Extras, Json(stored=False)] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self, "plan")
        freeze(self, "writes", "extras")

    @classmethod
    def from_json(cls, data: Any, where: str = "plan") -> Plan:
        """The plan that the JSON data of a plan file describe; ``where`` names the data in errors."""
        clean, extras = split_extras(data)
        return decode(cls, clean, where, version=PLAN_FORMAT, extras=extras)

    def to_json(self) -> dict[str, Any]:
        """The plan as plain JSON data, extension keys included."""
        return merge_extras(encode(self, version=PLAN_FORMAT), self.extras)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan file, whole or not at all."""
        write_json(path, self.to_json(), digest=True)
