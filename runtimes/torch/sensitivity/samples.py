"""Samples with probability in proportion to size, and the weights that make their sums unbiased.

The gradient of a network that reads images is concentrated on few of their positions: of the 2,000 to 8,000 that a
convolution of ResNet-50 has in a batch, 11 to 160 hold most of it. Evenly spaced samples have a high variance there.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_UNITS = 1 << 40
"""Shares are integers, whose running sums do not depend on the order in which a card adds."""
_EVEN = 0.5
"""Part of the sample that is evenly spaced, so that elements of size 0 are sampled too."""


def places_by_size(sizes: Tensor, total: Tensor, count: int) -> Tensor:
    """A sample of the indices of a vector, with probability in proportion to its elements.

    Args:
        sizes: The vector, (N,), not negative.
        total: Sum of the sizes.
        count: Sample size; large elements may be repeated.

    Returns:
        Indices (n,), ascending; all of them if ``count`` is at least N; arbitrary ones if sizes are zero or not finite.
        Does not synchronize.

    Source:
        Systematic sampling with probability proportional to size, W. G. Madow, Annals of Mathematical Statistics 20
        (1949), mixed with an even one.
    """
    number = sizes.numel()
    if count >= number:
        return torch.arange(number, device=sizes.device)
    even = _constant(_EVEN * _UNITS / number, sizes.dtype, sizes.device)
    ends = torch.addcdiv(even, sizes, total, value=(1 - _EVEN) * _UNITS).cumsum(0, dtype=torch.int64)
    # Without the last end no index exceeds the vector, even with sizes that are not finite.
    return torch.searchsorted(ends[:-1], _middles(count, sizes.device), right=True)


def weights_by_size(sizes: Tensor, total: Tensor, number: int | Tensor, count: int) -> Tensor:
    """Weights of the indices from `places_by_size`: ``(weights * f[places]).sum()`` estimates ``f.sum()``.

    Args:
        sizes: Sizes of the sampled elements.
        total: Sum of all sizes, broadcasting against ``sizes``.
        number: Number of all elements; as a tensor, it broadcasts and is more than ``count``.
        count: Requested sample size.
    """
    if not isinstance(number, Tensor) and count >= number:
        return torch.ones_like(sizes)
    share = (sizes / total).nan_to_num_(0.0, 0.0, 0.0)
    return share.mul_((1 - _EVEN) * count).add_(_EVEN * count / number).reciprocal_()


@functools.lru_cache(maxsize=256)
def _constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), value, dtype=dtype, device=device)


@functools.lru_cache(maxsize=256)
def _middles(count: int, device: torch.device) -> Tensor:
    """Middles of ``count`` equal parts of all units."""
    return torch.arange(1, 2 * count, 2, device=device).mul_(_UNITS // 2).div_(count, rounding_mode="floor")


@dataclass(frozen=True, slots=True)
class Positions:
    """Some positions of images: the index of the image, and the index in it."""

    images: Tensor
    places: Tensor

    def of(self, x: Tensor) -> Tensor:
        """Elements there, (images, channels, ...) to (positions, channels); one image or place stands for all."""
        if x.shape[2:].numel() == 1 and x.shape[0] == 1:
            return x.view(1, -1).expand(self.places.numel(), -1)
        if x.shape[0] == 1:
            return x[0].flatten(1)[:, self.places].T
        return x.flatten(2)[self.images, :, self.places]


def even_positions(x: Tensor, count: int) -> Positions:
    """About ``count`` evenly spaced positions of all images of (images, channels, ...)."""
    places = x.shape[2:].numel()
    total = x.shape[0] * places
    step = max(1, total // max(1, count))
    while math.gcd(step, total) > 1 and step > 1:  # coprime, so that rows and images do not alias
        step += 1
    return _every(total, step, places, x.device)


@functools.lru_cache(maxsize=64)
def _every(total: int, step: int, places: int, device: torch.device) -> Positions:
    indices = torch.arange(0, total, step, device=device)
    return Positions(indices // places, indices % places)


class SizedPositions(NamedTuple):
    """Positions by size, ``requested`` of ``number``; ``indices`` count through all images."""

    positions: Positions
    indices: Tensor
    total: Tensor
    number: int
    requested: int


def positions_by_size(sizes: Tensor, count: int) -> SizedPositions:
    """A sample of positions of images, with probability in proportion to ``sizes`` (images, groups, ...)."""
    by_place = (sizes if sizes.shape[1] == 1 else sizes.sum(1)).reshape(-1)
    total, number, count = by_place.sum(), by_place.numel(), max(1, count)
    indices, places = places_by_size(by_place, total, count), sizes.shape[2:].numel()
    return SizedPositions(Positions(indices // places, indices % places), indices, total, number, count)


class SizedRuns(NamedTuple):
    """Short runs of a tensor's elements (n, length), ``requested`` of ``number``.

    They are chosen by their squares, whose sum over all runs is ``total``: ``(weights * f(runs).sum(1)).sum()``
    estimates the sum of ``f`` over all elements.
    """

    runs: Tensor
    total: Tensor
    number: int
    requested: int


_GOLDEN = (math.sqrt(5) - 1) / 2


@functools.lru_cache(maxsize=64)
def _even_runs(number: int, count: int, device: torch.device) -> Tensor:
    """One of each ``count`` equal parts of the runs, at places of a low-discrepancy sequence."""
    numbers = torch.arange(count, dtype=torch.float64)
    places = (numbers + (numbers * _GOLDEN).frac()) * (number / count)
    return places.long().clamp(max=number - 1).to(device)


def even_runs(x: Tensor, limit: int) -> Tensor:
    """About ``limit`` elements of a tensor in short runs that are spread evenly, (n,), with one kernel."""
    runs = _runs(x)
    count = max(1, limit // runs.shape[1])
    if count >= runs.shape[0]:
        return runs.flatten().clone()
    return runs[_even_runs(runs.shape[0], count, x.device)].view(-1)


def _runs(x: Tensor) -> Tensor:
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        x = x.permute(0, 2, 3, 1)
    return x.reshape(-1, math.gcd(x.numel(), 32))


def runs_by_size(x: Tensor, limit: int) -> SizedRuns:
    """About ``limit`` elements of a tensor in short runs, with probability in proportion to their squares."""
    runs = _runs(x)
    length = runs.shape[1]
    # Norms need one pass and no copy of the squares.
    sizes = torch.linalg.vector_norm(runs, dim=1).square_()
    total, count = sizes.sum(), max(1, limit // length)
    places = places_by_size(sizes, total, count)
    return SizedRuns(runs[places], total, runs.shape[0], count)
