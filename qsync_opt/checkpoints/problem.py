"""The write balance: pieces whose rows may be written by some of the ranks, and how fast each rank and host writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from qsync_opt.errors import ProblemError
from qsync_opt.io import (
    Document,
    Extras,
    Json,
    Name,
    Optimum,
    check_fields,
    freeze,
    near_match,
)

PROBLEM_FORMAT = "qsync-writes/1"
MOST_BYTES = 2**53
"""Of all pieces: up to here sums of bytes are exact in floating-point numbers, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """A rank that writes, the host it shares with others, and its own rate."""

    host: str
    bytes_per_s: float

    def __post_init__(self) -> None:
        check_fields(self, "writer")
        _require_positive(self.bytes_per_s, "writer: bytes_per_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """``rows`` rows of ``row_bytes`` bytes each, which ``writers`` hold: any of them can write any of the rows."""

    name: Name
    row_bytes: Annotated[int, Json(minimum=1)]
    rows: Annotated[int, Json(minimum=1)]
    writers: tuple[str, ...]

    def __post_init__(self) -> None:
        check_fields(self, f"piece {self.name!r}")

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        return self.row_bytes * self.rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem(Document):
    """Pieces to be split by rows among their writers, so that the slowest writer or host is done soonest.

    ``hosts`` maps each host to the bytes per second that its writers share. The same problem balances reads: then
    ``writers`` are the ranks that may read a piece, at their rates of reading. The pieces have at most `MOST_BYTES`.

    Raises:
        ProblemError: Any rule of the format is broken; the text names the piece or writer.

    Source: the write plan of ByteCheckpoint (NSDI 2025), section 4, which assigns whole tensors; splitting them, rates
    and hosts are ours.
    """

    FORMAT: ClassVar = PROBLEM_FORMAT
    KIND: ClassVar = "problem"

    name: Name
    hosts: Mapping[Name, float]
    writers: Mapping[Name, Writer]
    pieces: tuple[Piece, ...]
    optimum: Annotated[Optimum | None, Json(optional=True)] = None
    extras: Annotated[Extras, Json(stored=False)] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self, "problem")
        for name, rate in self.hosts.items():
            _require_positive(rate, f"hosts {name!r}")
        for name, writer in self.writers.items():
            if writer.host not in self.hosts:
                raise ProblemError(
                    f"writer {name!r}: host is {writer.host!r}{near_match(writer.host, self.hosts)}; name one of hosts"
                )
        for name, count in Counter(piece.name for piece in self.pieces).items():
            if count > 1:
                raise ProblemError(f"pieces: the name {name!r} is used {count} times, but names must be unique")
        distinct = {id(piece.writers): piece for piece in self.pieces}  # pieces of one job share their writers
        for piece in distinct.values():
            if len(set(piece.writers)) != len(piece.writers):
                raise ProblemError(f"piece {piece.name!r}: writers names one twice; each may be named once")
            for name in piece.writers:
                if name not in self.writers:
                    raise ProblemError(
                        f"piece {piece.name!r}: writers names {name!r}{near_match(name, self.writers)}; name those of "
                        "the problem"
                    )
        if self.num_bytes > MOST_BYTES:
            raise ProblemError(f"pieces: {self.num_bytes} bytes in all, but at most 2**53 are allowed; split them")
        freeze(self, "hosts", "writers", "extras")

    @property
    def num_bytes(self) -> int:
        """Bytes of all pieces."""
        return sum(piece.num_bytes for piece in self.pieces)


def _require_positive(rate: float, what: str) -> None:
    if rate <= 0:
        raise ProblemError(f"{what} is {rate!r}, but a rate must be above 0 bytes per second")
