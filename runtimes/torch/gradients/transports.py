"""How codes become the mean gradient on every worker: all-reduces of integers, or all-to-all and all-gather.

Every function works on the current stream and ends with identical bits on all ranks. On CPUs a large bucket is reduced
in pieces: while one is under way the next is encoded, and the last one's mean is decoded. There codes have buffers that
are kept, because touching fresh memory takes half as long again as encoding into it.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from qsync_opt.errors import UnsupportedError
from qsync_opt.gradients import Code, GradientScheme, Scheme, Transport
from qsync_opt.kernels.gradients import CODES, Codec, Encoded, Layout, reference
from qsync_opt.kernels.quantize import stream_key

FORMS = {Code.INTEGER: "int8", Code.SCALED_FLOAT: "fp8", Code.FLOAT: "bf16"}
_DRAWS = 2
"""Random streams of one piece and rank."""
_PIECE = 1 << 19
"""Least elements of a piece, about."""
_PIECES = 4
"""Most pieces of a bucket: each costs gloo half a millisecond of processor time."""


@dataclass(slots=True)
class Reducer:
    """Replaces a flat gradient by its mean over a process group, under a scheme.

    Args:
        group: Process group; None: the default one.
        seed: Of the random streams, equal on all ranks; each rank, step and bucket draws its own numbers.
        codec: Implementation of the codec.
    """

    group: Any = None
    seed: int = 0
    codec: Codec = field(default_factory=Codec)
    _kept: dict[tuple[str, int], Tensor] = field(default_factory=dict, repr=False)

    def reduce(self, gradient: Tensor, scheme: GradientScheme, step: int = 0, bucket: int = 0) -> None:
        """Replace ``gradient``, flat and contiguous, by the mean over all workers; every worker must call it.

        Element types other than FP32 are compressed by way of FP32; FP64 is reduced plainly.

        Raises:
            UnsupportedError: A scheme that has no transport here, or no level for so many workers.
        """
        workers = dist.get_world_size(self.group)
        if workers == 1 or not gradient.numel():
            return
        if scheme.transport is Transport.PLAIN or gradient.dtype is torch.float64:
            if gradient.is_cuda and "nccl" in dist.get_backend(self.group):
                dist.all_reduce(gradient, op=dist.ReduceOp.AVG, group=self.group)
            else:
                gradient.div_(workers)
                dist.all_reduce(gradient, group=self.group)
            return
        if not isinstance(scheme, Scheme):
            own = getattr(scheme, "reduce", None)  # of another package
            if own is None:
                raise UnsupportedError(
                    f"scheme {scheme.name!r} has no transport here: give it a method reduce(gradient, reducer, step, "
                    "bucket) that replaces the gradient by the mean"
                )
            own(gradient, self, step, bucket)
            return
        x = gradient.to(torch.float32)
        if scheme.code is Code.EXPONENT:
            gradient.copy_(self._exponential(x, self._keys(step, bucket, 0)))
            return
        if scheme.transport is Transport.SUM:
            self._sum(x, scheme, step, bucket)
        else:
            unit = (scheme.block or 4) * workers
            pieces = enumerate(_pieces(x, unit))
            _overlapped([self._two_shot(k, piece, scheme, self._keys(step, bucket, k)) for k, piece in pieces])
        if x.data_ptr() != gradient.data_ptr():
            gradient.copy_(x)

    def _keys(self, step: int, bucket: int, piece: int) -> list[int]:
        """Keys of this rank's random streams."""
        rank, workers = dist.get_rank(self.group), dist.get_world_size(self.group)
        own = stream_key(self.seed, step, bucket * workers + rank)
        return [stream_key(own, piece, draw) for draw in range(_DRAWS)]

    def _sum(self, x: Tensor, scheme: Scheme, step: int, bucket: int) -> None:
        block = scheme.block or x.numel()
        scales = self.codec.sum_scales(x, block)
        dist.all_reduce(scales, op=dist.ReduceOp.MAX, group=self.group)
        flights, first = [], 0
        for k, piece in enumerate(_pieces(x, block if block < _PIECE else 4)):
            own = scales[first // block : -(-(first + piece.numel()) // block)]
            flights.append(self._sum_piece(k, piece, own, scheme, self._keys(step, bucket, k)[0]))
            first += piece.numel()
        _overlapped(flights)

    def _sum_piece(self, piece: int, x: Tensor, scales: Tensor, scheme: Scheme, key: int) -> Iterator[Any]:
        """Replace one piece by its mean; gives the collective that it waits for."""
        workers, elements = dist.get_world_size(self.group), x.numel()
        levels = scheme.levels(workers)
        layout = Layout(width=scheme.width, lanes=scheme.lanes, block=scheme.block or elements)
        room = self._room("codes", piece, layout.words(elements), layout.dtype, x.device)
        codes = self.codec.encode_sum(x, scales, levels, layout, key, out=room)
        yield dist.all_reduce(codes, group=self.group, async_op=True)
        _put(self.codec.decode_sum(codes, scales, levels, workers, layout, elements, out=x), x)

    def _two_shot(self, piece: int, x: Tensor, scheme: Scheme, keys: list[int]) -> Iterator[Any]:
        """Replace one piece by its mean; gives the collectives that it waits for."""
        form, block = FORMS[scheme.code], scheme.block or 4
        workers, elements = dist.get_world_size(self.group), x.numel()
        part = -(-elements // (workers * block)) * block  # of one worker
        padded = x if part * workers == elements else torch.nn.functional.pad(x, (0, part * workers - elements))
        room = self._room("codes", piece, len(padded), CODES[form], x.device)
        sent = self.codec.encode(padded, form, block, keys[0], out=room)
        into = self._room("exchanged", piece, sent.codes.nbytes, torch.uint8, x.device)
        codes_ND, first = self._exchanging(sent.codes, workers, into)
        scales_NB, second = self._exchanging(sent.scales, workers)
        yield first
        yield second
        own = self.codec.reduce(codes_ND, scales_NB, form, block, keys[1])
        into = self._room("gathered", piece, own.codes.nbytes * workers, torch.uint8, x.device)
        codes, first = self._gathering(own.codes, workers, into)
        scales, second = self._gathering(own.scales, workers)
        yield first
        yield second
        out = x if len(padded) == elements else None
        _put(self.codec.decode(Encoded(codes, scales), form, block, out=out)[:elements], x)

    def _exponential(self, x: Tensor, keys: list[int]) -> Tensor:
        workers, elements = dist.get_world_size(self.group), x.numel()
        scale = self.codec.sum_scales(x, elements)
        dist.all_reduce(scale, op=dist.ReduceOp.MAX, group=self.group)
        scale = scale.to(torch.float32)
        part = -(-elements // workers)
        codes = reference.encode_exponential(x, scale, workers, keys[0])
        codes = torch.nn.functional.pad(codes, (0, part * workers - elements))
        exchanged, work = self._exchanging(codes, workers)
        _wait(work)
        gathered, work = self._gathering(reference.reduce_exponential(exchanged, keys[1]), workers)
        _wait(work)
        return reference.decode_exponential(gathered[:elements], scale, workers)

    def _room(self, what: str, piece: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """A buffer of a piece that is kept from reduction to reduction; None on cards, whose memory torch keeps."""
        if device.type != "cpu":
            return None
        size, kept = count * dtype.itemsize, self._kept.get((what, piece))
        if kept is None or len(kept) < size:
            kept = self._kept[what, piece] = torch.empty(size, dtype=torch.uint8)
        return kept[:size].view(dtype)

    def _exchanging(self, values: Tensor, workers: int, into: Tensor | None = None) -> tuple[Tensor, Any]:
        """Every worker's values for this one, shape (workers, len(values) / workers), once they are there.

        They go as bytes, for all backends, into a buffer of as many, if one is given.
        """
        sent, work = values.view(torch.uint8), None
        received = torch.empty_like(sent) if into is None else into
        if len(sent):
            work = dist.all_to_all_single(received, sent, group=self.group, async_op=True)
        return received.view(values.dtype).view(workers, -1), work

    def _gathering(self, values: Tensor, workers: int, into: Tensor | None = None) -> tuple[Tensor, Any]:
        """The values of all workers one after another, once they are there; ``into`` as of `_exchanging`."""
        sent, work = values.contiguous().view(torch.uint8), None
        received = sent.new_empty(workers * len(sent)) if into is None else into
        if len(sent):
            parts = list(received.view(workers, -1).unbind(0))
            work = dist.all_gather(parts, sent, group=self.group, async_op=True)
        return received.view(values.dtype), work


def _pieces(x: Tensor, unit: int) -> Sequence[Tensor]:
    """Views of ``x`` that end at multiples of ``unit``; on cards all of it, because launches would take longer."""
    if x.device.type != "cpu":
        return (x,)
    size = max(_PIECE, -(-len(x) // _PIECES))
    return torch.split(x, max(-(-size // unit), 1) * unit)


def _put(values: Tensor, x: Tensor) -> None:
    if values.data_ptr() != x.data_ptr():
        x.copy_(values)


def _wait(work: Any) -> None:
    if work is not None:
        work.wait()


def _overlapped(flights: Iterable[Iterator[Any]]) -> None:
    """Run all to their ends: each up to its first collective, then in turn as these are done, alike on all ranks."""
    under_way = collections.deque((flight, next(flight)) for flight in flights)
    while under_way:
        flight, work = under_way.popleft()
        _wait(work)
        for following in flight:
            under_way.append((flight, following))
            break
