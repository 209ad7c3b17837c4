"""How much error does rounding a number to a format make? Closed forms, per element.

A number format has a grid. Near a number the grid has a *step*: the same everywhere for fixed point (the scale), and
``2**(e - mantissa_bits)`` in the binade ``[2**e, 2**(e + 1))`` for floating point. With the position between two grid
points uniform, stochastic rounding errs with variance ``step**2 / 6`` and no bias; rounding to nearest with a mean
squared error of ``step**2 / 12``. Nearest rounding is deterministic: its mean squared error stands in for a variance.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping
from types import MappingProxyType

from qsync_opt.errors import UnsupportedError
from qsync_opt.numerics.formats import number_format


class Rounding(enum.StrEnum):
    """How a number between two grid points picks one."""

    STOCHASTIC = "stochastic"
    """Up or down at random, so that the expected result is the number itself."""
    NEAREST = "nearest"
    """Always the nearer one."""


class Granularity(enum.StrEnum):
    """Which elements of an operand share one scale.

    The first operand of a product has rows (one per row of the result; one per sample for a convolution) and channels
    (one per summed feature). The second has channels (one per column of the result, that is per output channel) and
    rows (one per summed feature).
    """

    TENSOR = "tensor"
    CHANNEL = "channel"
    ROW = "row"


# The largest number of a format. Scaled formats map the largest magnitude of a slice onto it, so it never overflows;
# unscaled ones overflow beyond it. Formats with eight exponent bits reach as far as FP32 and are not listed.
LARGEST: Mapping[str, float] = MappingProxyType({"INT8": 127.0, "FP8": 448.0, "FP16": 65504.0})

SCALED_FORMATS: tuple[str, ...] = ("INT8", "FP8")
CAST_FORMATS: tuple[str, ...] = ("BF16", "FP16", "TF32")
# How the gradient of a result is rounded where an 8-bit operator also runs backward in 8 bits. No operator is planned
# in E5M2, so it is no precision: two mantissa bits, five exponent bits.
WIDE_FP8 = "E5M2"
WIDE_FP8_MANTISSA_BITS, WIDE_FP8_SMALLEST_EXPONENT, WIDE_FP8_LARGEST = 2, -14, 57344.0
GRADIENT_KINDS: Mapping[str, str] = MappingProxyType({"INT8": "INT8/tensor", "FP8": f"{WIDE_FP8}/tensor"})


def smallest_exponent(format_name: str) -> int:
    """Exponent of the smallest normal number of a floating format; below it the step stays the same."""
    return 2 - (1 << (number_format(format_name).exponent_bits - 1))


@functools.cache
def noise_kinds(*, scaled: bool) -> tuple[str, ...]:
    """Names of the ways an element can be rounded.

    Args:
        scaled: Also the formats that need a scale, once per granularity (``INT8/tensor``, ``FP8/row``, ...).
    """
    if not scaled:
        return CAST_FORMATS
    return (*CAST_FORMATS, *(f"{name}/{granularity}" for name in SCALED_FORMATS for granularity in Granularity))


def noise_kind(format_name: str, granularity: Granularity) -> str:
    """Name of rounding to ``format_name``, with one scale per ``granularity`` if the format needs a scale."""
    return f"{format_name}/{granularity}" if format_name in SCALED_FORMATS else format_name


def fixed_point_variance(mean_square_step: float, rounding: Rounding) -> float:
    """Mean squared rounding error of one element on a uniform grid.

    Args:
        mean_square_step: Mean over the slices of the squared step (for INT8 the squared scale), in squared units.
        rounding: Stochastic or nearest.

    Returns:
        ``step**2 / 6`` or ``step**2 / 12``, in squared units.

    Source:
        Ours: the integral of ``f * (1 - f)``, or of ``min(f, 1 - f)**2``, over a uniform position ``f``.
    """
    return mean_square_step / (6.0 if rounding is Rounding.STOCHASTIC else 12.0)


def floating_point_variance(mantissa_bits: int, mean_square: float, rounding: Rounding) -> float:
    """Mean squared rounding error of one element in a floating format, away from its range limits.

    Args:
        mantissa_bits: Explicit mantissa bits k; the step in ``[2**e, 2**(e + 1))`` is ``2**(e - k)``.
        mean_square: Mean square of the elements, in squared units.
        rounding: Stochastic or nearest.

    Returns:
        ``4**-k * mean_square / 14`` for stochastic and half of it for nearest rounding, in squared units.

    Source:
        Ours: for uniform mantissas the mean of ``4**e`` is 3/7 of the mean square, and 3/7 / 6 = 1/14, 3/7 / 12 = 1/28.
    """
    return 4.0**-mantissa_bits * mean_square / (14.0 if rounding is Rounding.STOCHASTIC else 28.0)


def closed_form_variance(
    kind: str, rounding: Rounding, *, mean_square: float, mean_square_amax: Mapping[str, float]
) -> float:
    """Mean squared error per element of one kind of rounding, from the moments of the tensor alone.

    Args:
        kind: One of ``noise_kinds(scaled=True)``.
        rounding: Stochastic or nearest.
        mean_square: Mean square of the elements.
        mean_square_amax: Per granularity, the mean over slices of the squared largest magnitude.

    Returns:
        Squared units of the tensor, per element.

    Raises:
        UnsupportedError: ``kind`` is unknown, or needs a granularity that ``mean_square_amax`` lacks.
    """
    granularity, mantissa, levels, divisor = _closed_form(kind, rounding)
    if granularity is None:
        return mantissa * mean_square / divisor
    if granularity not in mean_square_amax:
        raise UnsupportedError(
            f"rounding {kind!r} needs scales per {granularity}, which were not collected for this tensor: "
            "only operands of products have them"
        )
    return mean_square_amax[granularity] / levels / divisor


@functools.cache
def _closed_form(kind: str, rounding: Rounding) -> tuple[str | None, float, float, float]:
    """What a kind's error grows with, None for the mean square, and by what that is multiplied and divided, twice."""
    name, _, granularity = kind.partition("/")
    if kind != GRADIENT_KINDS["FP8"] and kind not in noise_kinds(scaled=True):
        raise UnsupportedError(f"unknown rounding {kind!r}: allowed are {', '.join(noise_kinds(scaled=True))}")
    if kind != GRADIENT_KINDS["FP8"] and number_format(name).is_integer:
        return granularity, 1.0, LARGEST[name] ** 2, 1.0 / fixed_point_variance(1.0, rounding)
    bits = WIDE_FP8_MANTISSA_BITS if name == WIDE_FP8 else number_format(name).mantissa_bits
    return None, 4.0**-bits, 1.0, 1.0 / floating_point_variance(0, 1.0, rounding)
