"""Samples that look where most of a sum is: probability in proportion to size, and weights that undo it.

The gradient of a network that reads images sits on few of their positions: of the 2,000 to 8,000 that a convolution of
ResNet-50 has in a batch, 11 to 160 hold most of it. Evenly spaced samples miss or catch them; these do neither.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

_UNITS = 1 << 40
"""Shares are counted in whole numbers, whose running sums do not depend on the order that a card adds in."""
_EVEN = 0.5
"""Part of the sample that is spread evenly, so that what has no size is looked at too."""


def sample_by_size(sizes: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Some places of a vector, the larger its elements the more likely, and with what weight each counts.

    Args:
        sizes: (N,), not negative.
        count: How many places, with repetition where one is large enough for several.

    Returns:
        Places (n,), ascending, and weights (n,), so that ``(weights * f[places]).sum()`` estimates ``f.sum()``, exactly
        if ``count`` is at least N. Waits for nothing.

    Source:
        Systematic sampling with probability proportional to size, W. G. Madow, Annals of Mathematical Statistics 20
        (1949), mixed with an even one.
    """
    number = sizes.numel()
    if count >= number:
        return torch.arange(number, device=sizes.device), torch.ones_like(sizes)
    # Nothing has a share if there is nothing, or if it is not finite, which is found and named elsewhere.
    share = ((1 - _EVEN) * _UNITS / sizes.sum(dtype=torch.float64) * sizes).nan_to_num_(0.0, 0.0, 0.0)
    units = share.add_(_EVEN * _UNITS / number).to(torch.int64)
    places = torch.searchsorted(units.cumsum(0), _middles(count, sizes.device), right=True).clamp_(max=number - 1)
    return places, (_UNITS / count) / units[places]


@functools.lru_cache(maxsize=256)
def _middles(count: int, device: torch.device) -> Tensor:
    """Middles of ``count`` equal parts of all units."""
    return torch.arange(1, 2 * count, 2, device=device).mul_(_UNITS // 2).div_(count, rounding_mode="floor")


@dataclass(frozen=True, slots=True)
class Positions:
    """Some positions of images: which image, where in it, and with what weight."""

    images: Tensor
    places: Tensor
    weights: Tensor

    def of(self, x: Tensor) -> Tensor:
        """What stands there: (images, channels, ...) to (positions, channels); one image or place stands for all."""
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
    while math.gcd(step, total) > 1 and step > 1:  # no distance that rows or images repeat at
        step += 1
    found = torch.arange(0, total, step, device=x.device)
    weights = torch.full(found.shape, total / found.numel(), dtype=x.dtype, device=x.device)
    return Positions(found // places, found % places, weights)


def positions_by_size(sizes: Tensor, count: int) -> Positions:
    """``count`` positions of images, the larger ``sizes`` (images, groups, ...) there, the more likely."""
    by_place = sizes.sum(1).flatten(1)
    found, weights = sample_by_size(by_place.reshape(-1), max(1, count))
    return Positions(found // by_place.shape[1], found % by_place.shape[1], weights)


def blocks_by_size(x: Tensor, limit: int) -> tuple[Tensor, Tensor, Tensor]:
    """About ``limit`` elements of a tensor in short runs, the larger their squares, the more likely.

    Returns:
        Runs (n, length); weights (n,) with which ``(weights * f(runs).mean(1)).mean()`` estimates the mean of ``f``;
        and the sums of squares of all runs of the tensor.
    """
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        x = x.permute(0, 2, 3, 1)
    length = math.gcd(x.numel(), 32)
    runs = x.reshape(-1, length)
    # As norms: one pass without a copy of squares.
    sizes = torch.linalg.vector_norm(runs, dim=1).square()
    places, weights = sample_by_size(sizes, max(1, limit // length))
    share = places.numel() / runs.shape[0]
    return runs[places], weights * share, sizes
