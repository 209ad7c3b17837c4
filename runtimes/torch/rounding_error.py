"""What rounding a given tensor to a format really costs: the expected squared error of each element, without drawing.

An element at position ``f`` between two grid points a step ``s`` apart errs by ``f * (1 - f) * s**2`` in expectation
under stochastic rounding and by ``min(f, 1 - f)**2 * s**2`` under rounding to nearest. No distribution is assumed.
"""

from __future__ import annotations

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


class ElementErrors(NamedTuple):
    """Expected squared error of each element, of the tensor's shape and in its squared units."""

    stochastic: Tensor
    nearest: Tensor


def _errors(steps: Tensor, step: Tensor) -> ElementErrors:
    """Errors of numbers given in units of the grid step, and that step."""
    fraction = steps - steps.floor()
    square = step.square()
    return ElementErrors(
        stochastic=fraction * (1 - fraction) * square,
        nearest=torch.minimum(fraction, 1 - fraction).square() * square,
    )


def cast_errors(x: Tensor, format_name: str) -> ElementErrors:
    """Errors of casting FP32 elements to a floating format, subnormal range included.

    Args:
        x: FP32, any shape, finite.
        format_name: ``BF16``, ``FP16``, ``TF32``, or ``FP8`` and ``E5M2`` (elements then in units of the scale).

    Source:
        Ours.
    """
    if format_name == WIDE_FP8:
        return _floating_errors(x, WIDE_FP8_MANTISSA_BITS, WIDE_FP8_SMALLEST_EXPONENT)
    return _floating_errors(x, number_format(format_name).mantissa_bits, smallest_exponent(format_name))


def _floating_errors(x: Tensor, mantissa_bits: int, least_exponent: int) -> ElementErrors:
    _, exponent = torch.frexp(x)  # |x| in [2**(exponent - 1), 2**exponent)
    step_exponent = (exponent - 1).clamp_(min=least_exponent) - mantissa_bits
    step = torch.ldexp(torch.ones_like(x), step_exponent)
    return _errors(x / step, step)


def scaled_errors(x: Tensor, format_name: str, amax: Tensor) -> ElementErrors:
    """Errors of quantizing to a format with scales.

    Args:
        x: FP32, any shape, finite.
        format_name: ``INT8``, ``FP8`` or ``E5M2``.
        amax: Largest magnitude per slice, broadcasting against ``x``.

    Source:
        Ours.
    """
    largest = WIDE_FP8_LARGEST if format_name == WIDE_FP8 else LARGEST[format_name]
    scale = (amax / largest).clamp(min=_SMALLEST_NORMAL)
    if format_name != WIDE_FP8 and number_format(format_name).is_integer:
        return _errors(x / scale, scale)
    errors = cast_errors(x / scale, format_name)
    return ElementErrors(*(error * scale.square() for error in errors))


def kind_errors(x: Tensor, kind: str, amaxes: dict[Granularity, Tensor]) -> ElementErrors:
    """Errors of one noise kind (``BF16``, ``INT8/row``, ...) given the largest magnitudes per granularity."""
    name, _, granularity = kind.partition("/")
    if not granularity:
        return cast_errors(x, name)
    return scaled_errors(x, name, amaxes[Granularity(granularity)])
