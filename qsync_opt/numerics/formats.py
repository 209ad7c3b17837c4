"""Number formats, the formats at operators' borders, and the mean squared error of rounding to a format.

The step of a fixed-point grid is the scale; that of a floating-point grid is ``2**(e - mantissa_bits)`` in the binade
``[2**e, 2**(e + 1))``. For uniform positions between grid points the error of stochastic rounding has variance
``step**2 / 6`` and no bias, that of rounding to nearest a mean square of ``step**2 / 12``, used as its variance.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol

from qsync_opt.errors import ProblemError, UnsupportedError
from qsync_opt.io import near_match


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberFormat:
    """A number format that operators can compute in: a precision.

    ``bits`` is the storage width of one element, ``mantissa_bits`` the number of explicit mantissa bits (0 for
    integers), so that ``2**-mantissa_bits`` is the relative step at a power of two. ``rank`` orders formats from the
    coarsest to the finest; operands of two formats are promoted to the higher rank. An operator in 8 bits multiplies
    gradients in 16 bits, or, with ``eight_bit_backward``, in 8 bits too; ``operands`` is then the format of its
    operands, which has the rest in common.
    """

    name: str
    bits: int
    mantissa_bits: int
    exponent_bits: int
    rank: int
    operands: str = ""
    eight_bit_backward: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "operands", self.operands or self.name)

    @property
    def num_bytes(self) -> int:
        """Bytes of one element."""
        return self.bits // 8

    @property
    def is_integer(self) -> bool:
        """True for fixed-point formats, whose step is a scale."""
        return self.exponent_bits == 0


BACKWARD = "-BWD8"
"""End of the names of precisions with an 8-bit backward pass."""


def _eight_bits(operands: str, rank: int, mantissa_bits: int, exponent_bits: int) -> tuple[NumberFormat, NumberFormat]:
    """A format of 8 bits with an 8-bit and with a 16-bit backward pass."""
    half = NumberFormat(name=operands, bits=8, mantissa_bits=mantissa_bits, exponent_bits=exponent_bits, rank=rank + 1)
    return replace(half, name=operands + BACKWARD, rank=rank, eight_bit_backward=True), half


# Ranks follow relative precision: TF32 (10 mantissa bits, stored in 32) is just below FP32, and BF16 below FP16.
FORMATS: dict[str, NumberFormat] = {
    f.name: f
    for f in (
        *_eight_bits("INT8", 0, mantissa_bits=0, exponent_bits=0),
        *_eight_bits("FP8", 2, mantissa_bits=3, exponent_bits=4),
        NumberFormat(name="BF16", bits=16, mantissa_bits=7, exponent_bits=8, rank=4),
        NumberFormat(name="FP16", bits=16, mantissa_bits=10, exponent_bits=5, rank=5),
        NumberFormat(name="TF32", bits=32, mantissa_bits=10, exponent_bits=8, rank=6),
        NumberFormat(name="FP32", bits=32, mantissa_bits=23, exponent_bits=8, rank=7),
    )
}


def number_format(name: str) -> NumberFormat:
    """Return the format called ``name``.

    Raises:
        UnsupportedError: No such format; the text lists those that exist.
    """
    try:
        return FORMATS[name]
    except KeyError:
        raise UnsupportedError(f"unknown precision {name!r}: allowed are {', '.join(FORMATS)} (upper case)") from None


def is_eight_bit(precision: str) -> bool:
    """Whether operators multiply in 8 bits at a precision."""
    return number_format(precision).bits == 8


def check_precisions(names: Iterable[str], what: str) -> None:
    """Refuse names that are not in `FORMATS`; ``what`` has them."""
    for name in names:
        if name not in FORMATS:
            near = near_match(str(name), FORMATS)
            raise ProblemError(f"{what}: unknown precision {name!r}{near}; allowed are {', '.join(FORMATS)}")


def closest_precision(available: Iterable[str], wanted: str) -> str:
    """The coarsest available precision that is at least as fine as ``wanted``, else the finest."""
    ladder = sorted(available, key=lambda name: number_format(name).rank)
    return next((name for name in ladder if number_format(name).rank >= number_format(wanted).rank), ladder[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionFormats:
    """The formats at the borders of an operator that computes in some precision on some device.

    ``output`` is the format of its result, ``gradient_input`` the one in which its backward pass reads the gradient of
    the result, and ``gradient_output`` the one in which it delivers the gradient of the input.
    """

    output: str
    gradient_input: str
    gradient_output: str


def formats_for(precisions: Iterable[str], half_format: str) -> dict[str, PrecisionFormats]:
    """Border formats by precision, given the 16-bit format that 8-bit operators deliver and run backward in.

    The borders of 16- and 32-bit operators have their own format (of TF32: FP32).
    """
    return {
        name: PrecisionFormats(output=border, gradient_input=border, gradient_output=border)
        for name in precisions
        for border in [border_format(name, half_format)]
    }


def border_format(precision: str, half_format: str) -> str:
    """Format of the result of an operator in a precision, given the 16-bit format that 8-bit operators deliver."""
    if precision == "TF32":
        return "FP32"
    return half_format if is_eight_bit(precision) else precision


class Rounding(enum.StrEnum):
    """Choice between the two grid points around a number."""

    STOCHASTIC = "stochastic"
    """At random, so that the expected result is the number itself."""
    NEAREST = "nearest"
    """The nearer one."""


class Granularity(enum.StrEnum):
    """The elements of an operand that share one scale.

    Rows of the first operand of a product are those of the result (samples, for a convolution) and its channels the
    summed features. Channels of the second are columns of the result (output channels), its rows the summed features.
    """

    TENSOR = "tensor"
    CHANNEL = "channel"
    ROW = "row"


# The largest number of a format. Scaled formats map the largest magnitude of a slice onto it; others overflow beyond
# it. Formats with eight exponent bits have the range of FP32 and are not listed.
LARGEST: Mapping[str, float] = MappingProxyType({"INT8": 127.0, "FP8": 448.0, "FP16": 65504.0})

SCALED_FORMATS: tuple[str, ...] = ("INT8", "FP8")
CAST_FORMATS: tuple[str, ...] = ("BF16", "FP16", "TF32")
# E5M2 (five exponent and two mantissa bits) rounds gradients where 8-bit operators also run backward in 8 bits. No
# operator is planned in it, so that it is not among the precisions.
WIDE_FP8 = "E5M2"
WIDE_FP8_MANTISSA_BITS, WIDE_FP8_SMALLEST_EXPONENT, WIDE_FP8_LARGEST = 2, -14, 57344.0
GRADIENT_KINDS: Mapping[str, str] = MappingProxyType({"INT8": "INT8/tensor", "FP8": f"{WIDE_FP8}/tensor"})


def smallest_exponent(format_name: str) -> int:
    """Exponent of the smallest normal number of a floating format; below it the step stays the same."""
    return 2 - (1 << (number_format(format_name).exponent_bits - 1))


@functools.cache
def noise_kinds(*, scaled: bool) -> tuple[str, ...]:
    """Names of the kinds of rounding; ``scaled``: also ``INT8/tensor``, ``FP8/row``, ..., one per granularity."""
    if not scaled:
        return CAST_FORMATS
    return (*CAST_FORMATS, *(f"{name}/{granularity}" for name in SCALED_FORMATS for granularity in Granularity))


def noise_kind(format_name: str, granularity: Granularity) -> str:
    """Name of rounding to a format, with the granularity if it needs a scale."""
    return f"{format_name}/{granularity}" if format_name in SCALED_FORMATS else format_name


def fixed_point_variance(mean_square_step: float, rounding: Rounding) -> float:
    """Mean squared rounding error of one element on a uniform grid: ``step**2 / 6`` or ``step**2 / 12``.

    ``mean_square_step`` is the mean of the squared step (for INT8 the squared scale) over the slices, in squared units
    like the result.

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

    ``kind`` is one of ``noise_kinds(scaled=True)``, ``mean_square_amax`` maps a granularity to the mean over slices of
    the squared largest magnitude. The result is in squared units of the tensor.

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
    """Granularity that the error depends on (None: the mean square), and the factor and two divisors of that."""
    name, _, granularity = kind.partition("/")
    if kind != GRADIENT_KINDS["FP8"] and kind not in noise_kinds(scaled=True):
        raise UnsupportedError(f"unknown rounding {kind!r}: allowed are {', '.join(noise_kinds(scaled=True))}")
    if kind != GRADIENT_KINDS["FP8"] and number_format(name).is_integer:
        return granularity, 1.0, LARGEST[name] ** 2, 1.0 / fixed_point_variance(1.0, rounding)
    bits = WIDE_FP8_MANTISSA_BITS if name == WIDE_FP8 else number_format(name).mantissa_bits
    return None, 4.0**-bits, 1.0, 1.0 / floating_point_variance(0, 1.0, rounding)


class Quantizer(Protocol):
    """What a planner must know of a quantizer; another package registers one as ``qsync_opt.quantizers``.

    The kernels that carry one out belong to a runtime.
    """

    @property
    def bits(self) -> int:
        """Bits of one quantized element, scales aside."""

    @property
    def unbiased(self) -> bool:
        """Whether the expected result is the value itself."""

    def variance(self, mean_square: float, mean_square_amax: Mapping[str, float]) -> float:
        """Mean squared error per element, in squared units of the tensor.

        ``mean_square_amax`` is, by granularity, the mean over slices of the squared largest magnitude.
        """


@dataclass(frozen=True, slots=True)
class FormatQuantizer:
    """Rounding to a number format, with one scale per ``granularity`` where the format needs scales.

    Raises:
        UnsupportedError: No such format.

    Source:
        `closed_form_variance`.
    """

    format_name: str
    rounding: Rounding = Rounding.STOCHASTIC
    granularity: Granularity = Granularity.TENSOR

    def __post_init__(self) -> None:
        number_format(self.format_name)

    @property
    def bits(self) -> int:
        """Bits of one element."""
        return number_format(self.format_name).bits

    @property
    def unbiased(self) -> bool:
        """True for stochastic rounding."""
        return self.rounding is Rounding.STOCHASTIC

    def variance(self, mean_square: float, mean_square_amax: Mapping[str, float]) -> float:
        """Mean squared error per element; see `Quantizer.variance`."""
        kind = noise_kind(self.format_name, self.granularity)
        return closed_form_variance(kind, self.rounding, mean_square=mean_square, mean_square_amax=mean_square_amax)


int8 = functools.partial(FormatQuantizer, "INT8")
fp8 = functools.partial(FormatQuantizer, "FP8")
bf16 = functools.partial(FormatQuantizer, "BF16")
fp16 = functools.partial(FormatQuantizer, "FP16")
