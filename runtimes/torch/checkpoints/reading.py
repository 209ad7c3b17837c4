"""Loading: what ranks need of a checkpoint is read once per host, verified, exchanged, and copied into tensors."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from qsync_opt.checkpoints import (
    CHUNK_BYTES,
    Box,
    ChunkRead,
    Copy,
    Manifest,
    assign_reads,
    copies_into,
    read_chunk,
    read_problem,
)
from qsync_opt.errors import ProblemError
from qsync_opt.runtimes.torch.checkpoints.memory import HostBuffer
from qsync_opt.runtimes.torch.checkpoints.storage import DTYPES, local_part
from qsync_opt.runtimes.torch.ddp import gather_json, naming_lost_ranks, world
from qsync_opt.systems import solve

READING_THREADS = 8
ROUND = 16
"""Chunks that each rank gives to others at a time."""


class Reader:
    """What this rank needs of a checkpoint, first in host memory, then in its tensors.

    Nothing of the tensors is changed until all that is read was compared with its hashes.

    Raises:
        ProblemError: The saved pieces do not hold a tensor.
    """

    def __init__(self, path: Path, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
        self._path, self._manifest = path, manifest
        self._copies: list[tuple[str, Tensor, Box, Copy]] = []
        for name, tensor in tensors.items():
            local, box = local_part(tensor)
            for copy in copies_into(box, manifest.tensors[name].pieces, f"tensor {name!r}"):
                self._copies.append((name, local, box, copy))
        self._needed = self._chunks()
        self._memory = {
            name: HostBuffer((last - first) * CHUNK_BYTES, pinned=False)
            for name, numbers in self._needed.items()
            for first, last in [(numbers[0], numbers[-1] + 1)]
        }

    def _chunks(self) -> dict[str, list[int]]:
        """Numbers of the chunks that are needed of each file, ascending."""
        chunks: dict[str, set[int]] = {}
        for name, _, _, copy in self._copies:
            first, last = _byte_range(copy, self._dtype(name).itemsize)
            numbers = range(first // CHUNK_BYTES, (last - 1) // CHUNK_BYTES + 1)
            chunks.setdefault(copy.piece.file, set()).update(numbers)
        return {file: sorted(chunks[file]) for file in sorted(chunks)}

    def _dtype(self, name: str) -> torch.dtype:
        return DTYPES[self._manifest.tensors[name].dtype]

    def plan(self) -> list[ChunkRead]:
        """Who reads which chunk for whom: each once per host, equally many bytes by each rank. Every rank calls it."""
        needs = gather_json({"host": socket.gethostname(), "chunks": self._needed})
        problem, groups = read_problem([need["chunks"] for need in needs], [need["host"] for need in needs])
        plan = solve(problem).plan
        assert plan is not None  # every chunk has a rank that needs it
        return assign_reads(groups, plan)

    def fetch(self, reads: list[ChunkRead], group: Any = None) -> None:
        """Read this rank's share, verify it, and exchange it with the other ranks of the host; every rank calls it.

        Args:
            reads: From `plan`.
            group: Of all ranks, for messages between processors; None: the default one.

        Raises:
            ProblemError: A chunk was changed after it was written, or cannot be read. The exchange was completed all
                the same, so that no rank waits.
        """
        rank, _ = world()
        by_reader: dict[int, list[ChunkRead]] = {}
        for read in reads:
            by_reader.setdefault(read.reader, []).append(read)
        failures: list[ProblemError] = []
        with ThreadPoolExecutor(READING_THREADS, "checkpoint-reading") as pool, naming_lost_ranks():
            own = [pool.submit(self._read, read) for read in by_reader.get(rank, [])]
            for begin in range(0, max(map(len, by_reader.values()), default=0), ROUND):
                failures += _failures(own[begin : begin + ROUND])
                messages = [
                    message
                    for several in by_reader.values()
                    for read in several[begin : begin + ROUND]
                    for message in self._exchange(read, rank, group)
                ]
                for message in messages:
                    message.wait()
        if failures:
            raise failures[0]

    def _exchange(self, read: ChunkRead, rank: int, group: Any) -> Iterator[Any]:
        if read.reader == rank:
            for other in read.ranks:
                if other != rank:
                    yield dist.isend(self._place(read), other, group)
        elif rank in read.ranks:
            yield dist.irecv(self._place(read), read.reader, group)

    def _place(self, read: ChunkRead) -> Tensor:
        """Where the bytes of a chunk are kept."""
        begin = (read.chunk - self._needed[read.file][0]) * CHUNK_BYTES
        size = min(CHUNK_BYTES, self._manifest.files[read.file].bytes - read.chunk * CHUNK_BYTES)
        return self._memory[read.file].bytes[begin : begin + size]

    def _read(self, read: ChunkRead) -> None:
        data: memoryview = self._place(read).numpy().data
        read_chunk(self._path, read.file, self._manifest.files[read.file], read.chunk, data)

    def copy(self) -> None:
        """Copy what was fetched into the tensors."""
        with torch.no_grad():
            for name, local, box, copy in self._copies:
                piece, dtype = copy.piece, self._dtype(name)
                first, last = _byte_range(copy, dtype.itemsize)
                memory, base = self._memory[piece.file].bytes, self._needed[piece.file][0] * CHUNK_BYTES
                raw = memory[first - base : last - base]
                if (first - base) % dtype.itemsize:
                    raw = raw.clone()
                saved = raw.view(dtype).as_strided(copy.box.lengths, _strides(piece.lengths))
                local[copy.box.relative_to(box)].copy_(saved)


def _failures(futures: list[Future[None]]) -> list[ProblemError]:
    failures = []
    for future in futures:
        try:
            future.result()
        except ProblemError as failure:
            failures.append(failure)
    return failures


def _strides(lengths: tuple[int, ...]) -> list[int]:
    return [math.prod(lengths[k + 1 :]) for k in range(len(lengths))]


def _byte_range(copy: Copy, itemsize: int) -> tuple[int, int]:
    """Bytes of a file from the first to behind the last that a copy needs."""
    piece, box = copy.piece, copy.box
    strides = _strides(piece.lengths)
    low = sum((o - base) * s for o, base, s in zip(box.offsets, piece.offsets, strides, strict=True))
    high = sum((e - 1 - base) * s for e, base, s in zip(box.ends, piece.offsets, strides, strict=True))
    return piece.begin + low * itemsize, piece.begin + (high + 1) * itemsize
