"""Data classes that are whole files: problems, plans and measurements, with users' own extension keys."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from qsync_opt.io.codec import check_fields, decode, encode
from qsync_opt.io.json_files import Extras, merge_extras, split_extras, write_json


class Document:
    """Base of a frozen dataclass whose fields are the keys of a file, and whose field ``extras`` is not stored.

    Attributes:
        FORMAT: Its ``"format"``.
        KIND: What errors call it.
        DIGEST: Whether files hold a digest of themselves.
    """

    __slots__ = ()
    FORMAT: ClassVar[str]
    KIND: ClassVar[str]
    DIGEST: ClassVar[bool] = True
    extras: Extras

    @classmethod
    def from_json(cls, data: Any, where: str | None = None) -> Self:
        """The instance that the JSON data of a file describe; ``where`` names the data in errors.

        Raises:
            ProblemError: The data break a rule of the format.
        """
        clean, extras = split_extras(data)
        if own := {path: extras.pop(path) for path in [*extras] if cls.reads_extra(path)}:
            clean = merge_extras(clean, own)
        return decode(cls, clean, where or cls.KIND, version=cls.FORMAT, extras=extras)

    @classmethod
    def reads_extra(cls, path: tuple[str, ...]) -> bool:
        """Whether the extension key at a path is one that the class's own fields have; by default none is."""
        return False

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data, extension keys included."""
        return merge_extras(encode(self, version=self.FORMAT), self.extras)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file, whole or not at all."""
        write_json(path, self.to_json(), digest=self.DIGEST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """A recorded optimal objective, for tests and reports; never used in solving."""

    objective: float

    def __post_init__(self) -> None:
        check_fields(self, "optimum")
