"""The 8-bit formats: their largest values, and the scale of a slice from its largest magnitude."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qsync_opt.errors import UnsupportedError

SMALLEST_NORMAL = 2.0**-126


@dataclass(frozen=True, slots=True, kw_only=True)
class EightBits:
    """One 8-bit format.

    Attributes:
        name: As precisions name it, with the variant of FP8.
        dtype: Element type of its codes.
        largest: Value of the largest code; ``scale = amax / largest``.
        mantissa_bits: Stored bits of the significand; 0 for INT8.
        min_exponent: Exponent of the smallest normal number; 0 for INT8.
    """

    name: str
    dtype: torch.dtype
    largest: float
    mantissa_bits: int = 0
    min_exponent: int = 0


INT8 = EightBits(name="INT8", dtype=torch.int8, largest=127.0)
E4M3 = EightBits(name="FP8 E4M3", dtype=torch.float8_e4m3fn, largest=448.0, mantissa_bits=3, min_exponent=-6)
E5M2 = EightBits(name="FP8 E5M2", dtype=torch.float8_e5m2, largest=57344.0, mantissa_bits=2, min_exponent=-14)
FORMATS: dict[torch.dtype, EightBits] = {form.dtype: form for form in (INT8, E4M3, E5M2)}


def format_of(dtype: torch.dtype) -> EightBits:
    """The 8-bit format with codes of an element type.

    Raises:
        UnsupportedError: There is none.
    """
    if dtype not in FORMATS:
        raise UnsupportedError(f"codes of type {dtype}: allowed are {', '.join(map(str, FORMATS))}")
    return FORMATS[dtype]


def amax(x: Tensor, dims: tuple[int, ...] | None) -> Tensor:
    """Largest magnitude per slice, FP32, shaped to broadcast against ``x``; NaN where the slice holds NaN."""
    shape = [1] * x.dim() if dims is None else [1 if d in dims else s for d, s in enumerate(x.shape)]
    if x.numel() == 0:
        return x.new_zeros(shape, dtype=torch.float32)
    if dims is None:
        low, high = torch.aminmax(x)
        return torch.maximum(high, -low).to(torch.float32).reshape(shape)
    reduced = list(dims)
    return torch.maximum(x.amax(reduced, keepdim=True), -x.amin(reduced, keepdim=True)).to(torch.float32)


def scale_from(largest_magnitude: Tensor, form: EightBits) -> Tensor:
    """Scale of each slice: ``amax / largest``, at least the smallest normal number, NaN if a value is not finite."""
    # A tensor as divisor: by a number, cards multiply with its reciprocal, which rounds differently.
    largest, least = form.largest, SMALLEST_NORMAL
    if torch.compiler.is_compiling():  # with dynamic=True torch takes numbers that it reads anywhere for variables
        largest = 127.0 if form.dtype is torch.int8 else torch.finfo(form.dtype).max
        least = torch.finfo(torch.float32).tiny
    divisor = largest_magnitude.new_full((), largest)
    scale = (largest_magnitude / divisor).clamp_min_(least)
    return scale + (scale - scale)  # an infinite amax becomes NaN, any other scale is unchanged
