"""Reproducible random signs: tensors of +1 and -1 from a seed or a key."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


class RandomSigns:
    """Tensors of +1 and -1 with equal chance; the same for the same seed on the same kind of device."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def like(self, x: Tensor) -> Tensor:
        """Signs of the shape, type and device of a tensor."""
        generator = self._generators.get(x.device)
        if generator is None:
            generator = torch.Generator(device=x.device).manual_seed(self._seed)
            self._generators[x.device] = generator
        return torch.empty_like(x).bernoulli_(0.5, generator=generator).mul_(2).sub_(1)


_MULTIPLIER = 6364136223846793005
_generators: dict[torch.device, torch.Generator] = {}


def signs_like(x: Tensor, key: tuple[int, ...], count: int | None = None) -> Tensor:
    """Signs of the type and device of a tensor that depend on the key alone.

    Args:
        x: The tensor.
        key: Determines the signs.
        count: Length of the vector of signs; None for the shape of ``x``.
    """
    generator = _generators.get(x.device)
    if generator is None:
        generator = _generators[x.device] = torch.Generator(device=x.device)
    mixed = 0
    for part in key:
        mixed = (mixed + part + 2) * _MULTIPLIER % (1 << 63)
    generator.manual_seed(mixed)
    signs = torch.empty(x.shape if count is None else (count,), dtype=x.dtype, device=x.device)
    return torch.add(_minus_one(x.dtype, x.device), signs.bernoulli_(0.5, generator=generator), alpha=2, out=signs)


@functools.lru_cache(maxsize=16)
def _minus_one(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), -1.0, dtype=dtype, device=device)
