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


class _Grid(NamedTuple):
    """A format's grid: mantissa bits, and the least and greatest exponent whose step is still another."""

    mantissa_bits: int
    least: int
    greatest: int


def _grid(format_name: str) -> _Grid:
    if format_name == WIDE_FP8:
        return _Grid(WIDE_FP8_MANTISSA_BITS, WIDE_FP8_SMALLEST_EXPONENT, _LARGEST_EXPONENT)
    if number_format(format_name).is_integer:
        return _Grid(0, 0, 0)
    return _Grid(number_format(format_name).mantissa_bits, smallest_exponent(format_name), _LARGEST_EXPONENT)


class _Stack(NamedTuple):
    """A stack of kinds, as tensors that broadcast against a stack of tensors.

    ``slices`` says by which granularity each kind is scaled (0: by none, else one more than its place in
    ``Granularity``), ``largest`` onto which number the largest magnitude goes; the others are as in ``_Grid``.
    """

    slices: Tensor
    largest: Tensor
    mantissa_bits: Tensor
    least: Tensor
    greatest: Tensor


@functools.lru_cache(maxsize=64)
def _stack(kinds: tuple[str, ...], dims: int, device: torch.device) -> _Stack:
    slices, largest, grids = [], [], []
    for kind in kinds:
        name, _, granularity = kind.partition("/")
        slices.append(list(Granularity).index(Granularity(granularity)) + 1 if granularity else 0)
        scaled_to = WIDE_FP8_LARGEST if name == WIDE_FP8 else LARGEST[name] if granularity else 1.0
        largest.append(scaled_to)
        grids.append(_grid(name))
    shape = (-1, *(1,) * dims)
    columns = [torch.tensor(column, dtype=torch.int32).view(shape).to(device) for column in zip(*grids, strict=True)]
    floats = torch.tensor(largest, dtype=torch.float32).view(shape).to(device)
    return _Stack(torch.tensor(slices, device=device), floats, *columns)


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
    stack = _stack(kinds, x.dim(), x.device)
    factors: Tensor | None = None
    if amaxes:
        # Units in which x is held before the format's own largest number comes in: 1, or a largest magnitude.
        units = x.new_ones((1 + len(Granularity), *x.shape))
        for place, granularity in enumerate(Granularity, 1):
            if granularity in amaxes:
                units[place].copy_(amaxes[granularity])
        units.clamp_(min=_SMALLEST_UNIT)
        values = (x / units).index_select(0, stack.slices).mul_(stack.largest)
        factors = units.index_select(0, stack.slices).div_(stack.largest)
    else:
        values = x.expand(len(kinds), *x.shape).contiguous()
    exponent = torch.frexp(values).exponent.sub_(1)  # |x| in [2**exponent, 2**(exponent + 1))
    step = torch.pow(2.0, exponent.clamp_(stack.least, stack.greatest).sub_(stack.mantissa_bits))
    values.div_(step)
    if factors is not None:
        step.mul_(factors)
    step.square_()
    fraction = values.sub_(values.floor())
    rest = 1 - fraction
    nearest = torch.minimum(fraction, rest).square_().mul_(step)
    return ElementErrors(stochastic=fraction.mul_(rest).mul_(step), nearest=nearest)


def fixed_point_errors(x: Tensor, amaxes: Sequence[Tensor]) -> Tensor:
    """Expected squared error of each element in INT8 under stochastic rounding, for several ways to scale.

    Args:
        x: FP32, any shape, finite.
        amaxes: Largest magnitude per slice, broadcasting against ``x``, one tensor for each way.

    Returns:
        Shape (ways, *shape of x): what ``stacked_errors`` has for INT8, in a third of the kernels.

    Source:
        Ours.
    """
    step = torch.stack([amax.expand(x.shape) for amax in amaxes]).clamp_(min=_SMALLEST_UNIT).div_(LARGEST["INT8"])
    fraction = (x / step).frac_().abs_()
    return torch.addcmul(fraction, fraction, fraction, value=-1).mul_(step.square_())
