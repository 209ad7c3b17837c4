"""What a plan of writes costs, by code that knows no method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qsync_opt.checkpoints.plan import Part, Plan
from qsync_opt.checkpoints.problem import Piece, Problem
from qsync_opt.errors import ProblemError
from qsync_opt.io import near_match


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Seconds until the slowest writer or host is done, and the bytes that each of them writes.

    ``violations`` name the pieces whose rows are not each written once, by a writer that holds them.
    """

    objective: float
    violations: tuple[str, ...]
    writer_bytes: Mapping[str, int]
    host_bytes: Mapping[str, int]

    @property
    def feasible(self) -> bool:
        """Whether each row is written once, by a writer that holds it."""
        return not self.violations

    def to_json(self) -> dict[str, Any]:
        """As plain JSON data."""
        return {
            "objective": self.objective,
            "feasible": self.feasible,
            "violations": list(self.violations),
            "seconds": self.objective,
            "writer_bytes": dict(self.writer_bytes),
            "host_bytes": dict(self.host_bytes),
        }


def evaluate(problem: Problem, plan: Plan) -> Evaluation:
    """Evaluate a plan: seconds = max over writers and over hosts of bytes / rate.

    Raises:
        ProblemError: The plan names a piece or writer that the problem lacks.

    Source: ours.
    """
    known = {piece.name for piece in problem.pieces}
    for name in plan.writes:
        if name not in known:
            raise ProblemError(f"the plan names the piece {name!r}{near_match(name, known)}, which the problem lacks")
    writers = dict.fromkeys(problem.writers, 0)
    hosts = dict.fromkeys(problem.hosts, 0)
    violations = []
    holders: dict[tuple[str, ...], frozenset[str]] = {}  # thousands of pieces share thousands of writers
    for piece in problem.pieces:
        parts = plan.writes.get(piece.name, ())
        if (own := holders.get(piece.writers)) is None:
            own = holders[piece.writers] = frozenset(piece.writers)
        if not (len(parts) == 1 and _is_whole(piece, parts[0]) and parts[0].writer in own):
            violations += _faults(piece, parts, own)
        for part in parts:
            if part.writer not in writers:
                raise ProblemError(
                    f"the plan names the writer {part.writer!r}{near_match(part.writer, writers)}, which the problem "
                    "lacks"
                )
            writers[part.writer] += (part.end - part.begin) * piece.row_bytes
    for name, num_bytes in writers.items():
        hosts[problem.writers[name].host] += num_bytes
    seconds = [count / problem.writers[name].bytes_per_s for name, count in writers.items()]
    seconds += [count / problem.hosts[name] for name, count in hosts.items()]
    return Evaluation(
        objective=max(seconds, default=0.0),
        violations=tuple(violations),
        writer_bytes=writers,
        host_bytes=hosts,
    )


def _is_whole(piece: Piece, part: Part) -> bool:
    return part.begin == 0 and part.end == piece.rows


def _faults(piece: Piece, parts: tuple[Part, ...], allowed: frozenset[str]) -> list[str]:
    faults = [
        f"piece {piece.name!r}: {name!r} writes rows that it does not hold"
        for name in dict.fromkeys(part.writer for part in parts)
        if name not in allowed
    ]
    place = 0
    for part in sorted(parts, key=lambda part: part.begin):
        if part.begin != place:
            kind = "are written by nobody" if part.begin > place else "are written twice"
            rows = sorted((place, part.begin))
            return [*faults, f"piece {piece.name!r}: rows {rows[0]} to {rows[1]} {kind}"]
        place = part.end
    if place != piece.rows:
        faults.append(f"piece {piece.name!r}: its parts end at row {place}, but it has {piece.rows} rows")
    return faults
