"""Plans of writes: which rows of each piece each writer writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from qsync_opt.errors import ProblemError
from qsync_opt.io import (
    Document,
    Extras,
    Json,
    Name,
    check_fields,
    freeze,
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
class Plan(Document):
    """The parts of each piece by its name."""

    FORMAT: ClassVar = PLAN_FORMAT
    KIND: ClassVar = "plan"

    writes: Mapping[Name, tuple[Part, ...]]
    extras: Annotated[Extras, Json(stored=False)] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self, "plan")
        freeze(self, "writes", "extras")
