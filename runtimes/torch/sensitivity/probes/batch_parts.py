"""Equal parts of a batch, for passes that would need too much memory for all of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

PARTS = 4
"""Number of parts of a batch: a step that is differentiated twice needs several times the memory."""
_NORMALIZED = 8
"""Smallest part for a model that normalizes over samples: means over fewer would differ too much."""


class Part(NamedTuple):
    """Some samples of a batch, their share of it, and their indices."""

    batch: Any
    share: float
    chosen: range


def parts_of(model: nn.Module, batch: Any) -> tuple[Part, Part] | None:
    """Two of the equal parts of a batch, of interleaved samples; None if the batch cannot be divided.

    Samples are the first dimension of all tensors of a batch, of one size.
    """
    leaves = [x for x in tree_leaves(batch) if isinstance(x, Tensor) and x.dim()]
    sizes = {int(x.shape[0]) for x in leaves}
    if len(sizes) != 1:
        return None
    (samples,) = sizes
    least = _NORMALIZED if _couples_samples(model) else 1
    size = max(samples // PARTS, least)
    if 2 * size > samples:
        return None
    step = samples // size

    def part(start: int) -> Part:
        def some(x: Any) -> Any:
            if not isinstance(x, Tensor) or not x.dim():
                return x
            chosen = x.detach()[torch.arange(size, device=x.device) * step + start]
            return chosen.requires_grad_(x.requires_grad)

        return Part(tree_map(some, batch), size / samples, range(start, start + size * step, step))

    return part(0), part(1)


def _couples_samples(model: nn.Module) -> bool:
    normalization = nn.modules.batchnorm._NormBase
    return any(
        isinstance(module, normalization) and (module.training or not module.track_running_stats)
        for module in model.modules()
    )
