"""Which number formats exist, and what one element of each costs and resolves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from qsync_opt.errors import UnsupportedError


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberFormat:
    """A number format an operator can compute in.

    ``bits`` is the storage width of one element; ``mantissa_bits`` counts explicit mantissa bits (0 for integers),
    so that ``2**-mantissa_bits`` is the relative step at a power of two. ``rank`` orders formats from the coarsest
    to the finest: a join of two formats runs in the one of higher rank.
    """

    name: str
    bits: int
    mantissa_bits: int
    exponent_bits: int
    rank: int

    @property
    def num_bytes(self) -> int:
        """Bytes that one element occupies."""
        return self.bits // 8

    @property
    def is_integer(self) -> bool:
        """True for fixed-point formats, whose step is set by a scale."""
        return self.exponent_bits == 0


# Ranks follow relative precision, so TF32 (10 mantissa bits, stored in 32) stands just below FP32 and BF16 below FP16.
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


def closest_precision(available: Iterable[str], wanted: str) -> str:
    """The coarsest available precision that is at least as fine as ``wanted``, else the finest."""
    ladder = sorted(available, key=lambda name: number_format(name).rank)
    return next((name for name in ladder if number_format(name).rank >= number_format(wanted).rank), ladder[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionFormats:
    """The three formats at the borders of an operator that computes in some precision on some device.

    ``output``: of its result; ``gradient_input``: in which its backward wants the gradient of its result;
    ``gradient_output``: in which its backward delivers the gradient of its input.
    """

    output: str
    gradient_input: str
    gradient_output: str


def formats_for(precisions: Iterable[str], half_format: str) -> dict[str, PrecisionFormats]:
    """Border formats of some precisions, given the 16-bit format of 8-bit operators.

    An operator in 16 or 32 bits answers, wants and delivers its own format (TF32: FP32 tensors). An 8-bit operator
    answers in the 16-bit format and runs backward in it.
    """
    borders = {"INT8": half_format, "FP8": half_format, "TF32": "FP32"}
    return {
        name: PrecisionFormats(
            output=borders.get(name, name),
            gradient_input=borders.get(name, name),
            gradient_output=borders.get(name, name),
        )
        for name in precisions
    }
