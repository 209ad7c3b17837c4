"""Host memory that files are written from: aligned to pages, pinned where a GPU copies into it, and kept."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from qsync_opt.checkpoints import CHUNK_BYTES
from qsync_opt.errors import NotReadyError
from qsync_opt.runtimes.torch.checkpoints.storage import IN_FLIGHT, RankFile, bytes_of


class HostBuffer:
    """Bytes that begin at a page, in large pages where the system has them.

    Raises:
        NotReadyError: So much cannot be pinned.
    """

    def __init__(self, num_bytes: int, *, pinned: bool) -> None:
        self.pinned = pinned
        memory = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]
        if pinned:
            self._pin()

    def _pin(self) -> None:
        # Registered memory, as torch's own pinned memory is rounded up to a power of two.
        self.bytes.zero_()  # by several threads; pinning alone would touch the pages by one
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        place = self.bytes.data_ptr()
        status = int(runtime.cudaHostRegister(place, max(1, self.bytes.numel()), 0))
        if status:
            raise NotReadyError(
                f"{self.bytes.numel()} bytes of host memory cannot be pinned (CUDA error {status}): free some, or "
                "raise the limit of locked memory (ulimit -l)"
            )
        weakref.finalize(self, runtime.cudaHostUnregister, place).atexit = False

    def view(self, begin: int, end: int) -> memoryview:
        """Some of the bytes, for files."""
        data: memoryview = self.bytes[begin:end].numpy().data
        return data


def chunks_of(buffer: HostBuffer, num_bytes: int) -> Iterator[memoryview]:
    """The first bytes of a buffer, chunk by chunk."""
    for begin in range(0, num_bytes, CHUNK_BYTES):
        yield buffer.view(begin, min(num_bytes, begin + CHUNK_BYTES))


class Ring:
    """A few chunks of host memory through which any file passes; kept from save to save."""

    def __init__(self) -> None:
        self._buffer: HostBuffer | None = None

    @property
    def num_bytes(self) -> int:
        """Host memory that is held."""
        return 0 if self._buffer is None else self._buffer.bytes.numel()

    def chunks(self, file: RankFile, parts: Sequence[Tensor]) -> Iterator[memoryview]:
        """The chunks of a file with the boxes ``parts``; one is overwritten when `IN_FLIGHT` later ones are taken."""
        pinned = any(part.is_cuda for part in parts)
        if self._buffer is None or (pinned and not self._buffer.pinned):
            self._buffer = HostBuffer(IN_FLIGHT * CHUNK_BYTES, pinned=pinned)
        buffer, end = self._buffer, self._buffer.bytes.numel()
        place = begin = 0
        for data in _file_bytes(file, parts):
            done = 0
            while done < data.numel():
                amount = min(begin + CHUNK_BYTES - place, data.numel() - done)
                buffer.bytes[place : place + amount].copy_(data[done : done + amount])
                place, done = place + amount, done + amount
                if place == begin + CHUNK_BYTES:
                    yield buffer.view(begin, place)
                    place = begin = place % end
        if place > begin:
            yield buffer.view(begin, place)


def _file_bytes(file: RankFile, parts: Iterable[Tensor]) -> Iterator[Tensor]:
    yield torch.frombuffer(bytearray(file.header), dtype=torch.uint8)
    for part in parts:
        yield bytes_of(part)
