"""Statistics of gradients that variances of schemes depend on, sampled while training goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from qsync_opt.gradients import BLOCK, BucketStatistics, Moments


def bucket_statistics(gradient: Tensor, mean: Tensor | None = None, *, group: Any = None) -> BucketStatistics:
    """Statistics of one bucket at one step; every worker of the group must call it.

    Args:
        gradient: This worker's gradient, before it is reduced, of any shape.
        mean: The mean over workers; computed if it is not given.
        group: Process group; None: the default one.
    """
    x = gradient.detach().reshape(-1).to(torch.float32)
    workers = dist.get_world_size(group) if dist.is_initialized() else 1
    if mean is None:
        mean = x / workers
        if workers > 1:
            dist.all_reduce(mean, group=group)
    mean = mean.detach().reshape(-1).to(torch.float32)
    largest = _largest(x)
    if workers > 1 and len(largest):
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    sums = _sums(x, largest)
    if workers > 1:
        dist.all_reduce(sums, group=group)
        sums /= workers
    of_mean = _sums(mean, _largest(mean))
    noise = 0.0
    if workers > 1:  # between workers, as they draw their batches independently
        noise = max(0.0, float(sums[0] - of_mean[0])) / (workers - 1)
    return BucketStatistics(elements=len(x), local=_moments(sums), mean=_moments(of_mean), noise=noise)


def averaged(samples: Sequence[BucketStatistics]) -> BucketStatistics:
    """The mean of a bucket's statistics over steps."""
    share = 1 / len(samples)

    def mean(moments: Sequence[Moments]) -> Moments:
        names = Moments.__dataclass_fields__
        return Moments(**{name: sum(getattr(each, name) for each in moments) * share for name in names})

    return BucketStatistics(
        elements=samples[0].elements,
        local=mean([sample.local for sample in samples]),
        mean=mean([sample.mean for sample in samples]),
        noise=sum(sample.noise for sample in samples) * share,
    )


def _largest(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x.abs(), (0, -len(x) % BLOCK)).view(-1, BLOCK).amax(1) if len(x) else x


def _sums(x: Tensor, largest: Tensor) -> Tensor:
    """The sums of `Moments` in the order of its fields, in FP64."""
    if not len(x):
        return torch.zeros(5, dtype=torch.float64, device=x.device)
    padded = torch.nn.functional.pad(x, (0, -len(x) % BLOCK)).view(-1, BLOCK)
    largest = largest.to(torch.float64)
    absolute = padded.abs().sum(1, dtype=torch.float64)
    counts = torch.full_like(largest, BLOCK)
    counts[-1] = len(x) - BLOCK * (len(largest) - 1)
    most = largest.max()
    return torch.stack(
        [
            padded.to(torch.float64).square().sum(),
            (largest.square() * counts).sum(),
            (largest * absolute).sum(),
            most.square() * len(x),
            most * absolute.sum(),
        ]
    )


def _moments(sums: Tensor) -> Moments:
    return Moments(**dict(zip(Moments.__dataclass_fields__, sums.tolist(), strict=True)))
