"""Tensors in files: one safetensors file per rank, hashed while it is written, and read back by boxes.

What a rank writes follows from what all ranks hold: replicas are shared out by the system ``checkpoints``, so that all
ranks write equally much. Any rank reads the boxes that it holds now, whoever wrote them.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import socket
import struct
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from qsync_opt.checkpoints import (
    Box,
    FileFact,
    Manifest,
    SavedPiece,
    SavedTensor,
    Shard,
    assign_boxes,
    replica_problem,
)
from qsync_opt.errors import ModelError, ProblemError
from qsync_opt.runtimes.torch.ddp import gather_json
from qsync_opt.systems import solve

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
"""Types by their names in safetensors."""
TYPES = {dtype: name for name, dtype in DTYPES.items()}
"""Name in safetensors of every type that it can store."""
BLOCK_BYTES = 4096
"""To a multiple of which memory and places in files are aligned that are written past the system's cache."""
WRITING_THREADS = 8
IN_FLIGHT = 12
"""Chunks that are being written at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFile:
    """What one rank writes: the boxes in the order of its file, and the header before them."""

    name: str
    header: bytes
    boxes: tuple[tuple[str, Box], ...]
    num_bytes: int
    """Of the whole file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WritePlan:
    """The files of all ranks that write, and where each tensor then lies."""

    files: tuple[RankFile | None, ...]
    tensors: Mapping[str, SavedTensor]


def local_part(tensor: Tensor) -> tuple[Tensor, Box]:
    """The values that this rank holds of a tensor, and their place in it.

    Raises:
        ModelError: The tensor is a sum that is not reduced yet.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach(), Box.whole(tensor.shape)
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise ModelError(f"a tensor of placements {tensor.placements} is not reduced yet; redistribute it first")
    lengths, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local = tensor.to_local().detach()
    if tuple(local.shape) != tuple(lengths):
        raise ModelError(
            f"a tensor of placements {tensor.placements} has the local shape {tuple(local.shape)}, but "
            f"{tuple(lengths)} follows from them"
        )
    return local, Box(tuple(offsets), tuple(lengths))


Entry = list[Any]
"""What a rank holds of a tensor, as JSON: name, type, shape, and offsets and lengths of its box."""


def held_part(name: str, tensor: Tensor) -> tuple[Tensor, Entry]:
    """The values that this rank holds of a tensor, and what plans need to know of it.

    Raises:
        ModelError: Files cannot hold such a tensor, or it is a sum that is not reduced yet.
    """
    local, box = local_part(tensor)
    if (kind := _unsupported(local)) is not None:
        raise ModelError(
            f"{name!r} is {kind}, which a checkpoint cannot hold: make it a dense one of another type, or leave it "
            "out of state_dict() (a buffer with persistent=False)"
        )
    return local, [name, TYPES[local.dtype], [*tensor.shape], [*box.offsets], [*box.lengths]]


def _unsupported(tensor: Tensor) -> str | None:
    """Why safetensors cannot store a tensor, None if it can."""
    if tensor.layout is not torch.strided:
        return "sparse"
    if tensor.is_meta:
        return "on the device meta, without values"
    return None if tensor.dtype in TYPES else f"of type {tensor.dtype}"  # quantized ones have types of their own


class WritePlanner:
    """Plans of who writes what, computed anew only when a rank holds other boxes than before."""

    def __init__(self) -> None:
        self._entries: Sequence[Entry] | None = None
        self._plan: WritePlan | None = None
        self._cuts: list[tuple[str, tuple[slice, ...] | None]] = []

    def knows(self, entries: Sequence[Entry]) -> bool:
        """Whether the last plan is for what this rank holds now."""
        return self._plan is not None and entries == self._entries

    def plan(self, entries: Sequence[Entry], rank: int, *, known: bool, group: Any = None) -> WritePlan:
        """The plan for what all ranks hold; every rank must call it.

        Args:
            entries: Of what this rank holds.
            rank: This one.
            known: Whether all ranks know what they hold.
            group: Process group; None: the default one.

        Raises:
            ModelError: Shapes or types differ between ranks.
            ProblemError: The boxes of a tensor do not cover it.
        """
        if self._plan is None or not known:
            self._plan = None
            of_ranks = gather_json({"host": socket.gethostname(), "tensors": entries}, group)
            plan = plan_writes([each["tensors"] for each in of_ranks], [each["host"] for each in of_ranks])
            places = {name: Box(tuple(offsets), tuple(lengths)) for name, _, _, offsets, lengths in entries}
            file = plan.files[rank]
            self._cuts = [
                (name, None if box.lengths == places[name].lengths else box.relative_to(places[name]))
                for name, box in (() if file is None else file.boxes)
            ]
            self._entries, self._plan = entries, plan
        return self._plan

    def parts(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """The values of each box of this rank's file, as views of what it holds."""
        return [tensors[name] if cut is None else tensors[name][cut] for name, cut in self._cuts]


def plan_writes(held: Sequence[Sequence[Any]], hosts: Sequence[str]) -> WritePlan:
    """Share out what several ranks hold.

    Args:
        held: For each rank its tensors: name, type, shape, and offsets and lengths of its box.
        hosts: Of each rank.

    Raises:
        ModelError: Shapes or types of a tensor differ.
        ProblemError: The boxes of a tensor do not cover it.
    """
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    ranks: dict[tuple[str, Box], list[int]] = {}
    for rank, tensors in enumerate(held):
        for name, dtype, shape, offsets, lengths in tensors:
            kind = kinds.setdefault(name, (dtype, tuple(shape)))
            if kind != (dtype, tuple(shape)):
                raise ModelError(
                    f"{name!r} is {dtype} of shape {tuple(shape)} on rank {rank} and {kind[0]} of shape {kind[1]} "
                    "before; save the same model on all ranks"
                )
            ranks.setdefault((name, Box(tuple(offsets), tuple(lengths))), []).append(rank)
    shards = [
        Shard(tensor=name, shape=kinds[name][1], itemsize=DTYPES[kinds[name][0]].itemsize, box=box, ranks=tuple(own))
        for (name, box), own in ranks.items()
    ]
    problem = replica_problem(shards, hosts)
    plan = solve(problem).plan
    assert plan is not None  # every shard has a rank that holds it
    boxes = assign_boxes(shards, problem, plan)
    files: list[RankFile | None] = []
    pieces: dict[str, list[SavedPiece]] = {name: [] for name in kinds}
    for rank, unordered in enumerate(boxes):
        # The largest elements first: so every box begins at a multiple of its element's size.
        own = sorted(unordered, key=lambda each: -DTYPES[kinds[each[0]][0]].itemsize)
        files.append(_rank_file(rank, own, kinds) if own or rank == 0 else None)
        if (file := files[-1]) is not None:
            begin = len(file.header)
            for name, box in own:
                pieces[name].append(SavedPiece(file=file.name, begin=begin, offsets=box.offsets, lengths=box.lengths))
                begin += box.size * DTYPES[kinds[name][0]].itemsize
    return WritePlan(
        files=tuple(files),
        tensors={
            name: SavedTensor(dtype=dtype, shape=shape, pieces=tuple(pieces[name]))
            for name, (dtype, shape) in kinds.items()
        },
    )


def _rank_file(
    rank: int, boxes: Sequence[tuple[str, Box]], kinds: Mapping[str, tuple[str, tuple[int, ...]]]
) -> RankFile:
    """The header of safetensors, with the offsets of boxes as ``torch.distributed.checkpoint`` has them."""
    entries: dict[str, Any] = {}
    places = {}
    begin = 0
    for name, box in boxes:
        key, number = name, 1
        while key in entries:  # a second box of the same tensor
            number += 1
            key = f"{name}#{number}"
        dtype = kinds[name][0]
        end = begin + box.size * DTYPES[dtype].itemsize
        entries[key] = {"dtype": dtype, "shape": [*box.lengths], "data_offsets": [begin, end]}
        places[key] = {"saved_offsets": [*box.offsets]}
        begin = end
    metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(places)}
    text = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    name = f"rank-{rank:05d}.safetensors"
    return RankFile(
        name=name, header=struct.pack("<Q", len(text)) + text, boxes=tuple(boxes), num_bytes=8 + len(text) + begin
    )


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor on its device; a copy only if it is not contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def write_file(folder: Path, file: RankFile, chunks: Iterable[memoryview]) -> FileFact:
    """Write a rank's file from several threads and flush it to the disk; each chunk is hashed as it is written.

    Args:
        folder: Of the checkpoint.
        file: What is written.
        chunks: Its bytes, header included, by `CHUNK_BYTES`. Memory of a chunk may be used anew once `IN_FLIGHT` more
            were taken. Where it begins at a multiple of `BLOCK_BYTES`, it is written past the system's cache.

    Raises:
        OSError: The file cannot be written.
    """
    import xxhash

    path = folder / file.name
    plain = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    direct: int | None = None
    hashes: list[str] = []

    def write(chunk: memoryview, place: int) -> str:
        digest = xxhash.xxh3_128_hexdigest(chunk)
        if direct is not None:
            done = _write_blocks(direct, chunk, place)
            chunk, place = chunk[done:], place + done
        while len(chunk):
            done = os.pwrite(plain, chunk, place)
            chunk, place = chunk[done:], place + done
        return digest

    try:
        _reserve(plain, file.num_bytes, path)
        direct = _open_direct(path)
        with ThreadPoolExecutor(WRITING_THREADS, "checkpoint-chunks") as pool:
            running: deque[Future[str]] = deque()
            place = 0
            for chunk in chunks:
                running.append(pool.submit(write, chunk, place))
                place += len(chunk)
                if len(running) == IN_FLIGHT:
                    hashes.append(running.popleft().result())
            hashes += [future.result() for future in running]
        os.fsync(plain)
    finally:
        os.close(plain)
        if direct is not None:
            os.close(direct)
    return FileFact(bytes=place, chunks=tuple(hashes))


def _reserve(descriptor: int, num_bytes: int, path: Path) -> None:
    """Give a file its place on the disk before it is written, where the system can.

    Threads then write side by side: on ext4 and XFS a write that makes a file longer waits for the others. And a disk
    that is too full is known at once.

    Raises:
        OSError: There is not so much space.
    """
    try:
        # Not os.posix_fallocate: where a file system cannot do it, that writes into every block instead.
        fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    except (AttributeError, OSError, TypeError):  # not Linux
        return
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if fallocate(descriptor, 0, 0, num_bytes) and (number := ctypes.get_errno()) in (errno.ENOSPC, errno.EDQUOT):
        raise OSError(number, os.strerror(number), str(path))


def _open_direct(path: Path) -> int | None:
    """A descriptor that writes past the system's cache, which is steadier; None where the file system has none."""
    try:
        return os.open(path, os.O_WRONLY | os.O_DIRECT)
    except (AttributeError, OSError):
        return None


def _write_blocks(descriptor: int, chunk: memoryview, place: int) -> int:
    """Write the whole blocks of a chunk; returns how many bytes were written, 0 where the file system refuses."""
    whole = len(chunk) - len(chunk) % BLOCK_BYTES
    try:
        return os.pwrite(descriptor, chunk[:whole], place) if whole else 0
    except OSError as failure:
        if failure.errno == errno.EINVAL:  # memory or place is not aligned as this file system wants it
            return 0
        raise


def saved_sizes(manifest: Manifest, where: str) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shapes and types of the tensors of a checkpoint; its files must be large enough for each.

    Raises:
        ProblemError: A type is unknown, or a piece leaves its file.
    """
    sizes = {}
    for name, tensor in manifest.tensors.items():
        if tensor.dtype not in DTYPES:
            raise ProblemError(
                f"{where} says that {name!r} has the type {tensor.dtype!r}, which is unknown; nothing was loaded: give "
                "a checkpoint that this package wrote"
            )
        for piece in tensor.pieces:
            fact = manifest.files.get(piece.file)
            if fact is None or piece.begin + piece.box.size * DTYPES[tensor.dtype].itemsize > fact.bytes:
                raise ProblemError(
                    f"{where} says that a piece of {name!r} is in {piece.file!r} from byte {piece.begin} on, which "
                    "does not hold it; nothing was loaded: give a checkpoint that this package wrote"
                )
        sizes[name] = torch.Size(tensor.shape), DTYPES[tensor.dtype]
    return sizes
