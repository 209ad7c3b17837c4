"""What rounding a given tensor to a format really costs: the expected squared error of each element, without drawing.

An element at position ``f`` between two grid points a step ``s`` apart errs by ``f * (1 - f) * s**2`` in expectation
under stochastic rounding and by ``min(f, 1 - f)**2 * s**2`` under rounding to nearest. No distribution is assumed.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qsync_opt.precision import number_format
from qsync_opt.rounding import (
    LARGEST,
    WIDE_FP8,
    WIDE_FP8_LARGEST,
    WIDE_FP8_MANTISSA_BITS,
    WIDE_FP8_SMALLEST_EXPONENT,
    Granularity,
    smallest_exponent,
)

# A slice whose largest magnitude is below this many times the largest code uses the smallest normal FP32 scale.
_SMALLEST_NORMAL = 2.0**-126
_SMALLEST_UNIT = _SMALLEST_NORMAL * 512
_LARGEST_EXPONENT = 127


class ElementErrors(NamedTuple):
    """Expected squared error of each element, of the tensor's shape and in its squared units."""

    stochastic: Tensor
    nearest: Tensor


_STACKED_AT_ONCE = 4
"""Dimensions from which a card stacks tensors one by one."""
_EXPONENT_BITS = 0x7F800000
"""Of an FP32 number; what they leave of it is the largest power of two that is not above its magnitude."""


class _Stack(NamedTuple):
    """A stack of kinds, as tensors that broadcast against a stack of tensors.

    ``slices`` says by which granularity each kind is scaled (None: by none), ``largest`` onto which number the largest
    magnitude goes, ``bits`` two to the minus mantissa bits, ``least`` and ``greatest`` the powers of two between which
    the step follows the number.
    """

    slices: tuple[Granularity | None, ...]
    one: Tensor
    largest: Tensor
    bits: Tensor
    least: Tensor
    greatest: Tensor


def _grid(format_name: str) -> tuple[float, float, float]:
    if format_name != WIDE_FP8 and number_format(format_name).is_integer:
        return 1.0, 1.0, 1.0
    wide = format_name == WIDE_FP8
    bits = WIDE_FP8_MANTISSA_BITS if wide else number_format(format_name).mantissa_bits
    least = WIDE_FP8_SMALLEST_EXPONENT if wide else smallest_exponent(format_name)
    # Steps that are subnormal themselves would be squared to zero anyway.
    return 2.0**-bits, 2.0 ** max(least, bits - 126), 2.0**_LARGEST_EXPONENT


@functools.lru_cache(maxsize=64)
def _stack(kinds: tuple[str, ...], dims: int, device: torch.device) -> _Stack:
    slices: list[Granularity | None] = []
    largest, grids = [], []
    for kind in kinds:
        name, _, granularity = kind.partition("/")
        slices.append(Granularity(granularity) if granularity else None)
        largest.append(WIDE_FP8_LARGEST if name == WIDE_FP8 else LARGEST[name] if granularity else 1.0)
        grids.append(_grid(name))
    columns = torch.tensor([largest, *zip(*grids, strict=True)], dtype=torch.float32)
    columns = columns.view(4, -1, *(1,) * dims).to(device)
    return _Stack(tuple(slices), torch.ones((1,) * dims, device=device), *columns)


@functools.lru_cache(maxsize=64)
def _places(slices: tuple[Granularity | None, ...], amaxes: tuple[Granularity, ...], device: torch.device) -> Tensor:
    """Where each kind's unit stands behind 1 and the largest magnitudes in their order."""
    return torch.tensor([0 if g is None else 1 + amaxes.index(g) for g in slices]).to(device)


def _broadcast(dims: int, *tensors: Tensor) -> Tensor:
    """Tensors of so many dimensions or fewer, stacked."""
    shape = torch.broadcast_shapes((1,) * dims, *(x.shape for x in tensors))  # type: ignore[no-untyped-call]
    return torch.stack([x.expand(shape) for x in tensors])


def paired_errors(x: Tensor, kinds: tuple[str, ...], amaxes: Mapping[Granularity, Tensor]) -> Tensor:
    """What ``stacked_errors`` has, as one tensor of shape (2, kinds, *shape of x): stochastic, then nearest."""
    stack = _stack(kinds, x.dim(), x.device)
    units: Tensor | None = None
    values = x
    if any(stack.slices):
        # What x is held in before the format's own largest number comes in: 1, or a largest magnitude.
        amax = [stack.one if g is None else amaxes[g] for g in stack.slices]
        if x.dim() < _STACKED_AT_ONCE:
            units = _broadcast(x.dim(), *amax)
        else:
            units = _broadcast(x.dim(), stack.one, *amaxes.values())[_places(stack.slices, tuple(amaxes), x.device)]
        units.clamp_(min=_SMALLEST_UNIT)
        values = (x / units).mul_(stack.largest)
    binade = torch.bitwise_and(values.view(torch.int32), _EXPONENT_BITS).view(torch.float32)
    step = torch.clamp(binade, stack.least, stack.greatest).mul_(stack.bits)
    del binade
    below = torch.remainder(values, step)  # from the grid point below, up to the step
    del values
    above = step.sub_(below)
    found = below.new_empty((2, *below.shape))
    torch.mul(below, above, out=found[0])
    torch.minimum(below, above, out=found[1]).square_()
    return found if units is None else found.mul_(units.div_(stack.largest).square_())


def stacked_errors(x: Tensor, kinds: tuple[str, ...], amaxes: Mapping[Granularity, Tensor]) -> ElementErrors:
    """Errors of several noise kinds at once, in few kernels.

    Args:
        x: FP32, any shape, finite.
        kinds: Noise kinds (``BF16``, ``INT8/row``, ...).
        amaxes: Largest magnitude per slice and granularity, for the kinds with scales; broadcasting against ``x``.

    Returns:
        Errors of shape (kinds, *shape of x), subnormal ranges included.

    Source:
        Ours.
    """
    return ElementErrors(*paired_errors(x, kinds, amaxes))


def fixed_point_errors(x: Tensor, amaxes: Sequence[Tensor]) -> Tensor:
    """Expected squared error of each element in INT8 under stochastic rounding, for several ways to scale.

    Args:
        x: FP32, any shape, finite.
        amaxes: Largest magnitude per slice, broadcasting against ``x``, one tensor for each way.

    Returns:
        Shape (ways, *shape of x): what ``stacked_errors`` has for INT8, in half of the kernels.

    Source:
        Ours.
    """
    step = _broadcast(x.dim(), *amaxes).clamp_(min=_SMALLEST_UNIT).div_(LARGEST["INT8"])
    fraction = (x / step).frac_().abs_()
    return torch.addcmul(fraction, fraction, fraction, value=-1).mul_(step.square_())
