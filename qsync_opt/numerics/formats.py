"""Number formats: width, mantissa and exponent bits, order of precision, and the formats at operators' borders."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from qsync_opt.errors import ProblemError, UnsupportedError
from qsync_opt.io import near_match


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberFormat:
    """A number format that operators can compute in.

    ``bits`` is the storage width of one element, ``mantissa_bits`` the number of explicit mantissa bits (0 for
    integers), so that ``2**-mantissa_bits`` is the relative step at a power of two. ``rank`` orders formats from the
    coarsest to the finest; operands of two formats are promoted to the higher rank.
    """

    name: str
    bits: int
    mantissa_bits: int
    exponent_bits: int
    rank: int

    @property
    def num_bytes(self) -> int:
        """Bytes of one element."""
        return self.bits // 8

    @property
    def is_integer(self) -> bool:
        """True for fixed-point formats, whose step is a scale."""
        return self.exponent_bits == 0


# Ranks follow relative precision: TF32 (10 mantissa bits, stored in 32) is just below FP32, and BF16 below FP16.
FORMATS: dict[str, NumberFormat] = {
    f.name: f
    for f in (
        NumberFormat(name="INT8", bits=8, mantissa_bits=0, exponent_bits=0, rank=0),
        NumberFormat(name="FP8", bits=8, mantissa_bits=3, exponent_bits=4, rank=1),
        NumberFormat(name="BF16", bits=16, mantissa_bits=7, exponent_bits=8, rank=2),
        NumberFormat(name="FP16", bits=16, mantissa_bits=10, exponent_bits=5, rank=3),
        NumberFormat(name="TF32", bits=32, mantissa_bits=10, exponent_bits=8, rank=4),
        NumberFormat(name="FP32", bits=32, mantissa_bits=23, exponent_bits=8, rank=5),
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
    others = {"INT8": half_format, "FP8": half_format, "TF32": "FP32"}
    return {
        name: PrecisionFormats(output=border, gradient_input=border, gradient_output=border)
        for name in precisions
        for border in [others.get(name, name)]
    }
