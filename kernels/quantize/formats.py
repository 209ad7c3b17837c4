"""The 8-bit formats: their largest values, and the scale of a slice from its largest magnitude."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qsync_opt.errors import UnsupportedError
from qsync_opt.kernels.quantize.random_bits import centred_noise, signed, stepped_key

SMALLEST_NORMAL = 2.0**-126
_PLAIN_TENSORS = (Tensor, torch.nn.Parameter)


@dataclass(frozen=True, slots=True, kw_only=True)
class EightBits:
    """One 8-bit format: its name in precisions, the type of its codes, and the value of the ``largest`` code.

    ``mantissa_bits`` are stored, ``min_exponent`` is that of the smallest normal number; both are 0 for INT8.
    Scales are ``amax / largest``.
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
# By precision, the format of operands and that of gradients, which need the range.
PRECISIONS: dict[str, tuple[EightBits, EightBits]] = {"INT8": (INT8, INT8), "FP8": (E4M3, E5M2)}


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
    largest, smallest = form.largest, SMALLEST_NORMAL
    if torch.compiler.is_compiling():  # with dynamic=True torch takes numbers that it reads anywhere for variables
        largest = 127.0 if form.dtype is torch.int8 else torch.finfo(form.dtype).max
        smallest = torch.finfo(torch.float32).tiny
    divisor = largest_magnitude.new_full((), largest)
    scale = (largest_magnitude / divisor).clamp_min_(smallest)
    return scale + (scale - scale)  # an infinite amax becomes NaN, any other scale is unchanged


# On CPU, work in pieces that stay in the second-level cache (FP32 values, noise and codes together under 1 MiB).
CHUNK = 1 << 16


def factor_of(scale: Tensor, form: EightBits, rounding: str) -> Tensor:
    """The factor of values before they are rounded: ``1 / scale``, one unit less where noise is added."""
    inverse = scale.reciprocal()
    if form is not INT8 or rounding == "nearest":
        return inverse
    return (inverse.view(torch.int32) - 1).view(torch.float32)


def codes_of(
    dense: Tensor, factor: Tensor | None, form: EightBits, rounding: str, key: int, step: Tensor | None
) -> Tensor:
    """Codes of ``dense * factor``; element ``i`` in memory draws noise number ``i`` of the stream ``key``.

    Args:
        dense: Contiguous, any shape; without a factor it is FP32 and overwritten.
        factor: FP32, from :func:`factor_of`, broadcasts against ``dense``; None where that is scaled already.
        form: Of the codes.
        rounding: ``"nearest"`` (ties to even) or ``"stochastic"``.
        key: Of the random stream.
        step: Mixed into the key, see :func:`~qsync_opt.kernels.quantize.random_bits.stepped_key`.
    """
    stream = stepped_key(key, step) if rounding == "stochastic" else None
    if form is INT8:
        return _int8_codes(dense, factor, stream)
    return _fp8_codes(dense if factor is None else dense.to(torch.float32) * factor, form, stream)


@functools.cache
def _loops() -> Any:
    """The compiled loops; None if numba is missing."""
    if importlib.util.find_spec("numba") is None:
        return None
    return importlib.import_module("qsync_opt.kernels.quantize.loops")


def in_one_pass(values: Tensor) -> bool:
    """Whether numba can read a tensor: it is in the host's memory, and neither compiled nor without data."""
    return values.device.type == "cpu" and not torch.compiler.is_compiling() and type(values) in _PLAIN_TENSORS


def _host_values(values: Tensor) -> Any:
    # Not by .numpy(), after which torch never resizes a storage again: sharded parameters are freed so.
    return np.from_dlpack(values.detach().to(torch.float32).view(-1))


def _host_key(key: int | Tensor | None) -> tuple[Any, bool]:
    return np.uint64(0 if key is None else int(key) & ((1 << 64) - 1)), key is not None


def int8_rows(
    dense: Tensor, sizes: list[int], rounding: str, key: int, step: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    """Codes of a contiguous tensor in FP32 or 16 bits and the scales of its equal parts, of shape ``sizes``.

    The bits are those of :func:`scale_from` and :func:`codes_of`. None where no compiled loop can read a tensor that is
    `in_one_pass`.
    """
    if dense.element_size() > 4 or not dense.numel() or (loops := _loops()) is None:
        return None
    codes = torch.empty(dense.shape, dtype=torch.int8)
    scales = torch.empty(sizes, dtype=torch.float32)
    values = dense if dense.dtype is torch.float32 else dense.to(torch.float32)
    stream, noisy = signed(int(stepped_key(key, step))), rounding == "stochastic"
    places = codes.data_ptr(), scales.data_ptr()
    loops.int8_rows_at(values.data_ptr(), values.numel(), stream, noisy, *places, scales.numel())
    return codes, scales


_ONE_THREAD = 2**17
"""Elements up to which one thread is as fast as those of torch, which are started for each of its operators."""


def _loops_for(x: Tensor) -> Any:
    """The compiled loops if they can run over a tensor in its order, and are faster there than torch; else None."""
    if not in_one_pass(x) or not x.is_contiguous() or not x.numel():
        return None
    return _loops() if x.numel() <= _ONE_THREAD or torch.get_num_threads() == 1 else None


def int8_values(codes: Tensor, scale: Tensor) -> Tensor | None:
    """FP32 values of INT8 codes with one scale or one per row, in one call; None where no compiled loop can."""
    if codes.dtype is not torch.int8 or (loops := _loops_for(codes)) is None:
        return None
    rows = scale.numel()
    by_row = scale.dim() == codes.dim() and rows == codes.shape[0] == scale.shape[0] and scale.is_contiguous()
    if rows != 1 and not by_row:
        return None
    values = torch.empty(codes.shape, dtype=torch.float32)
    loops.dequantize_at(codes.data_ptr(), codes.numel(), scale.data_ptr(), rows, values.data_ptr())
    return values


def bf16_results(sums: Tensor, x_scale: Tensor, scale: Tensor, bias: Tensor | None, channel: int) -> Tensor | None:
    """`rescaled` of FP32 sums to BF16 in one call; None where no compiled loop can."""
    if (loops := _loops_for(sums)) is None or not (x_scale.is_contiguous() and scale.is_contiguous()):
        return None
    shape = sums.shape
    samples, channels = math.prod(shape[:channel]), shape[channel]
    if x_scale.numel() not in (1, samples) or scale.numel() not in (1, channels):
        return None
    if bias is not None and bias.shape != (channels,):
        return None
    wide = None if bias is None else bias.to(torch.float32).contiguous()
    result = torch.empty(shape, dtype=torch.bfloat16)
    loops.rescale_at(
        sums.data_ptr(),
        (samples, channels, sums.numel() // (samples * channels)),
        x_scale.data_ptr(),
        x_scale.numel(),
        scale.data_ptr(),
        scale.numel(),
        0 if wide is None else wide.data_ptr(),
        result.data_ptr(),
    )
    return result


def _int8_codes(values: Tensor, factor: Tensor | None, key: int | Tensor | None) -> Tensor:
    """INT8 codes, piece by piece on CPU; None as key rounds to nearest."""
    if factor is not None and factor.numel() != 1:
        values, factor = values * factor, None
    codes = torch.empty(values.shape, dtype=torch.int8, device=values.device)
    if in_one_pass(values) and (loops := _loops()) is not None:
        factors = np.full(1, 1.0 if factor is None else factor.item(), np.float32)
        loops.int8_codes(_host_values(values), factors, *_host_key(key), codes.view(-1).numpy())
        return codes
    flat, flat_codes, count = values.view(-1), codes.view(-1), values.numel()
    # A graph that is compiled for any size cannot say how many pieces there are.
    whole = values.device.type != "cpu" or torch.compiler.is_compiling()
    for start in (0,) if whole else range(0, count, CHUNK):
        piece = flat if whole else flat[start : start + CHUNK]
        scaled = piece if factor is None else piece.to(torch.float32) * factor.reshape(1)
        if key is not None:
            noise = centred_noise(key, start, scaled.numel(), codes.device)
            # Written out: compiled with dynamic=True, a number that has a name elsewhere is a variable.
            scaled.add_(noise.to(torch.float32), alpha=2.0**-16)
        flat_codes[start : start + scaled.numel()].copy_(scaled.round_())
    return codes


def _fp8_codes(scaled: Tensor, form: EightBits, key: int | Tensor | None) -> Tensor:
    """FP8 codes of FP32 values in units of their scale; None as key rounds to nearest even."""
    if key is None:
        return scaled.clamp(-form.largest, form.largest).to(form.dtype)
    noise = centred_noise(key, 0, scaled.numel(), scaled.device).to(torch.int32).view(scaled.shape)
    dropped = 23 - form.mantissa_bits
    magnitude = scaled.abs()
    # Lifted by the smallest normal number, subnormals have its exponent, and the same bits below their last.
    smallest = 2.0**form.min_exponent
    tiny = magnitude < smallest
    bits = torch.where(tiny, magnitude + smallest, magnitude).view(torch.int32)
    bits = (bits + ((noise + 32768) << (dropped - 16))) >> dropped
    first_normal = 1 << form.mantissa_bits
    lowest = (127 + form.min_exponent) << form.mantissa_bits
    largest = int(torch.tensor(form.largest).to(form.dtype).view(torch.uint8))
    codes = (bits - torch.where(tiny, lowest, lowest - first_normal)).clamp_(0, largest)
    codes = codes | torch.where(scaled.signbit(), 0x80, 0)
    return codes.to(torch.uint8).view(form.dtype)
