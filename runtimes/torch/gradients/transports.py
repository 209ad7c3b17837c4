"""How codes become the mean gradient on every worker: all-reduces of integers, or all-to-all and all-gather.

Every function works on the current stream and ends with identical bits on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from qsync_opt.errors import UnsupportedError
from qsync_opt.gradients import Code, GradientScheme, Scheme, Transport
from qsync_opt.kernels.gradients import Codec, Encoded, Layout, reference
from qsync_opt.kernels.quantize import stream_key

_FORMS = {Code.INTEGER: "int8", Code.SCALED_FLOAT: "fp8", Code.FLOAT: "bf16"}
_DRAWS = 4
"""Random streams of one bucket and rank."""


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
        keys = [self.key(step, bucket, draw) for draw in range(_DRAWS)]
        if scheme.code is Code.EXPONENT:
            mean = self._exponential(x, keys)
        elif scheme.transport is Transport.SUM:
            mean = self._sum(x, scheme, keys[0])
        else:
            mean = self._two_shot(x, scheme, keys)
        if mean.data_ptr() != gradient.data_ptr():
            gradient.copy_(mean)

    def key(self, step: int, bucket: int, draw: int) -> int:
        """Key of one random stream of this rank."""
        rank, workers = dist.get_rank(self.group), dist.get_world_size(self.group)
        return stream_key(self.seed, step, (bucket * workers + rank) * _DRAWS + draw)

    def _sum(self, x: Tensor, scheme: Scheme, key: int) -> Tensor:
        workers, elements = dist.get_world_size(self.group), x.numel()
        levels = scheme.levels(workers)
        layout = Layout(width=scheme.width, lanes=scheme.lanes, block=scheme.block or elements)
        scales = self.codec.sum_scales(x, layout.block)
        dist.all_reduce(scales, op=dist.ReduceOp.MAX, group=self.group)
        codes = self.codec.encode_sum(x, scales, levels, layout, key)
        dist.all_reduce(codes, group=self.group)
        return self.codec.decode_sum(codes, scales, levels, workers, layout, elements, out=x)

    def _two_shot(self, x: Tensor, scheme: Scheme, keys: list[int]) -> Tensor:
        form, block = _FORMS[scheme.code], scheme.block or 4
        workers, elements = dist.get_world_size(self.group), x.numel()
        part = -(-elements // (workers * block)) * block  # of one worker
        padded = x if part * workers == elements else torch.nn.functional.pad(x, (0, part * workers - elements))
        codes, scales = self.codec.encode(padded, form, block, keys[0])
        codes_ND, scales_NB = self._exchanged(codes, workers), self._exchanged(scales, workers)
        codes, scales = self.codec.reduce(codes_ND, scales_NB, form, block, keys[1])
        whole = Encoded(self._gathered(codes, workers), self._gathered(scales, workers))
        out = x if len(padded) == elements else None
        return self.codec.decode(whole, form, block, out=out)[:elements]

    def _exponential(self, x: Tensor, keys: list[int]) -> Tensor:
        workers, elements = dist.get_world_size(self.group), x.numel()
        scale = self.codec.sum_scales(x, elements)
        dist.all_reduce(scale, op=dist.ReduceOp.MAX, group=self.group)
        scale = scale.to(torch.float32)
        part = -(-elements // workers)
        codes = reference.encode_exponential(x, scale, workers, keys[0])
        codes = torch.nn.functional.pad(codes, (0, part * workers - elements))
        reduced = reference.reduce_exponential(self._exchanged(codes, workers), keys[1])
        return reference.decode_exponential(self._gathered(reduced, workers)[:elements], scale, workers)

    def _exchanged(self, values: Tensor, workers: int) -> Tensor:
        """Every worker's values for this one: shape (workers, len(values) / workers). As bytes, for all backends."""
        sent = values.view(torch.uint8)
        received = torch.empty_like(sent)
        if len(sent):
            dist.all_to_all_single(received, sent, group=self.group)
        return received.view(values.dtype).view(workers, -1)

    def _gathered(self, values: Tensor, workers: int) -> Tensor:
        sent = values.contiguous().view(torch.uint8)
        received = torch.empty(workers * len(sent), dtype=torch.uint8, device=sent.device)
        if len(sent):
            dist.all_gather(list(received.view(workers, -1).unbind(0)), sent, group=self.group)
        return received.view(values.dtype)
