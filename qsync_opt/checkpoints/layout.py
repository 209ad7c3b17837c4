"""From who holds what to who writes what, and from what is saved to what is copied where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qsync_opt.checkpoints.boxes import Box, boxes_of_interval, check_cover
from qsync_opt.checkpoints.folders import CHUNK_BYTES, SavedPiece
from qsync_opt.checkpoints.plan import Plan
from qsync_opt.checkpoints.problem import Piece, Problem, Writer
from qsync_opt.errors import ProblemError

FINE = 200
"""Rows are as short as it takes for this many of them in a writer's mean share: a cut is then off by 0.25 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A box of a tensor, and the ranks that hold it; ``itemsize`` is in bytes."""

    tensor: str
    shape: tuple[int, ...]
    itemsize: int
    box: Box
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """The indices ``box`` of a tensor, to be read from ``piece``."""

    piece: SavedPiece
    box: Box


def replica_problem(
    shards: Sequence[Shard],
    hosts: Sequence[str],
    *,
    rank_bytes_per_s: float = 1.0e9,
    host_bytes_per_s: Mapping[str, float] | None = None,
    name: str = "checkpoint",
) -> Problem:
    """The write balance of a job: each shard that is not empty is a piece, named by its number.

    Args:
        shards: All of the job, each (tensor, box) once.
        hosts: Of each rank.
        rank_bytes_per_s: At which each rank writes; only ratios to the hosts' rates matter for the plan.
        host_bytes_per_s: By host; None: hosts limit nothing.
        name: Of the problem.

    Raises:
        ProblemError: The boxes of a tensor do not cover it exactly.

    Source: ours.
    """
    by_tensor: dict[str, list[Shard]] = {}
    for shard in shards:
        by_tensor.setdefault(shard.tensor, []).append(shard)
    for tensor, own in by_tensor.items():
        check_cover(own[0].shape, (shard.box for shard in own), f"tensor {tensor!r}")
    sizes = [shard.box.size * shard.itemsize for shard in shards]
    share = sum(sizes) / max(1, len(hosts))
    pieces = []
    names = [str(rank) for rank in range(len(hosts))]
    several: dict[tuple[int, ...], tuple[str, ...]] = {}  # thousands of shards share thousands of ranks
    for number, (shard, num_bytes) in enumerate(zip(shards, sizes, strict=True)):
        if num_bytes:
            rows, row_bytes = _rows(shard.box.lengths, num_bytes, share)
            if (writers := several.get(shard.ranks)) is None:
                writers = several[shard.ranks] = tuple(names[rank] for rank in shard.ranks)
            pieces.append(Piece(name=str(number), row_bytes=row_bytes, rows=rows, writers=writers))
    free = len(hosts) * rank_bytes_per_s
    rates = dict.fromkeys(hosts, free) if host_bytes_per_s is None else dict(host_bytes_per_s)
    return Problem(
        name=name,
        hosts=rates,
        writers={names[rank]: Writer(host=host, bytes_per_s=rank_bytes_per_s) for rank, host in enumerate(hosts)},
        pieces=tuple(pieces),
    )


def _rows(lengths: Sequence[int], num_bytes: int, share: float) -> tuple[int, int]:
    """Number of rows of a box and their bytes: of its first dimension, or of more where these rows are coarse."""
    rows, row_bytes = 1, num_bytes
    for length in lengths:
        if rows > 1 and row_bytes * FINE <= share:
            break
        rows, row_bytes = rows * length, row_bytes // length
    return rows, row_bytes


def assign_boxes(shards: Sequence[Shard], problem: Problem, plan: Plan) -> list[list[tuple[str, Box]]]:
    """For each rank, the boxes that it writes by a plan of `replica_problem`, with their tensors.

    A part becomes one box if its rows are those of the first dimension, otherwise up to 2 ndim - 1.
    """
    result: list[list[tuple[str, Box]]] = [[] for _ in problem.writers]
    for piece in problem.pieces:
        shard = shards[int(piece.name)]
        elements = piece.row_bytes // shard.itemsize
        for part in plan.writes[piece.name]:
            for inner in boxes_of_interval(shard.box.lengths, part.begin * elements, part.end * elements):
                offsets = tuple(a + b for a, b in zip(shard.box.offsets, inner.offsets, strict=True))
                result[int(part.writer)].append((shard.tensor, Box(offsets, inner.lengths)))
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRead:
    """A chunk of a file, the rank that reads it, and those of its host that need it, the reader among them."""

    file: str
    chunk: int
    reader: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkGroup:
    """Chunks of a file that the same ranks of a host need."""

    file: str
    chunks: tuple[int, ...]
    ranks: tuple[int, ...]


def read_problem(
    needs: Sequence[Mapping[str, Sequence[int]]], hosts: Sequence[str], name: str = "reads"
) -> tuple[Problem, list[ChunkGroup]]:
    """The balance of reading each chunk once per host, by one of the ranks that need it.

    Args:
        needs: Of each rank, the chunks of each file.
        hosts: Of each rank.
        name: Of the problem.

    Returns:
        The problem, whose writers are the ranks that read, and the groups that its pieces stand for, by number.

    Source: ours.
    """
    ranks: dict[tuple[str, str, int], list[int]] = {}
    for rank, (host, files) in enumerate(zip(hosts, needs, strict=True)):
        for file, chunks in files.items():
            for chunk in chunks:
                ranks.setdefault((host, file, chunk), []).append(rank)
    members: dict[tuple[str, str, tuple[int, ...]], list[int]] = {}
    for (host, file, chunk), own in sorted(ranks.items()):
        members.setdefault((host, file, tuple(own)), []).append(chunk)
    groups = [ChunkGroup(file=file, chunks=tuple(chunks), ranks=own) for (_, file, own), chunks in members.items()]
    pieces = tuple(
        Piece(
            name=str(number), row_bytes=CHUNK_BYTES, rows=len(group.chunks), writers=tuple(str(r) for r in group.ranks)
        )
        for number, group in enumerate(groups)
    )
    problem = Problem(
        name=name,
        hosts=dict.fromkeys(hosts, float(len(hosts))),
        writers={str(rank): Writer(host=host, bytes_per_s=1.0) for rank, host in enumerate(hosts)},
        pieces=pieces,
    )
    return problem, groups


def assign_reads(groups: Sequence[ChunkGroup], plan: Plan) -> list[ChunkRead]:
    """Who reads each chunk by a plan of `read_problem`; in the same order on every rank."""
    return [
        ChunkRead(file=group.file, chunk=chunk, reader=int(part.writer), ranks=group.ranks)
        for number, group in enumerate(groups)
        for part in plan.writes[str(number)]
        for chunk in group.chunks[part.begin : part.end]
    ]


def copies_into(wanted: Box, pieces: Sequence[SavedPiece], what: str = "tensor") -> list[Copy]:
    """What to read for a box of a tensor whose saved pieces do not overlap; together it is the whole box.

    Raises:
        ProblemError: Some of the box is in no piece.
    """
    parts = ((piece, wanted.intersection(piece.box)) for piece in pieces)
    copies = [Copy(piece=piece, box=box) for piece, box in parts if box is not None]
    if sum(copy.box.size for copy in copies) != wanted.size:
        raise ProblemError(f"{what}: the saved pieces do not hold all of {wanted}; give a whole checkpoint")
    return copies
