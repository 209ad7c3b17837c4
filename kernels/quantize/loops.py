"""Rounding to INT8 on CPUs and back: loops that numba compiles, with the bits of the formulas in PyTorch.

They release the GIL and run in one thread. Inner loops count from zero over slices, or LLVM would not vectorize them:
an index that may be negative wraps around. The machine code is kept in ``NUMBA_CACHE_DIR`` or beside the source.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba.extending import intrinsic

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER = np.uint64(0xD6E8FEB86659FD93)
_SHIFT = np.uint64(32)
_ODD = np.uint64(0x0001_0001_0001_0001)
_NOISE_UNIT = np.float32(2.0**-16)
_MAGIC = np.float32(12582912.0)
"""1.5 * 2**23: a number of magnitude below 2**22 that is added to it is rounded to nearest, ties to even."""
_MAGIC_BITS = np.int32(0x4B400000)
_LARGEST = np.float32(127.0)
_SMALLEST = np.float32(2.0**-126)
_MAGNITUDE, _INFINITE = np.int32(0x7FFFFFFF), np.int32(0x7F800000)
_HALF, _LAST, _NAN = np.int32(0x7FFF), np.int32(1), np.int16(0x7FC0)
"""Half a unit of BF16 less one, its last bit shifted down, and what is not a number, all for the bits of FP32."""
_PIECE = 1024
"""Elements that are worked on at a time, in the first-level cache; a multiple of four."""
_STEPS = np.arange(_PIECE // 4, dtype=np.uint64) * _GOLDEN

carray: Any = numba.carray  # type: ignore[attr-defined]
jit: Any = numba.njit(nogil=True, cache=True, error_model="numpy")


@jit
def _round(values: Any, factor: Any, noise: Any, rounded: Any) -> None:
    """Values times a factor plus noise, rounded to integers, to each of which `_MAGIC` is added."""
    for i in range(len(values)):
        rounded[i] = (values[i] * factor + np.float32(noise[i]) * _NOISE_UNIT) + _MAGIC


@jit
def int8_codes(values: Any, factors: Any, key: Any, noisy: bool, codes: Any) -> None:
    """Codes of FP32 values times a factor, with the noise of the stream ``key`` (uint64) if ``noisy``.

    The values are as many rows of equal length, one after another, as there are factors.
    """
    columns = len(values) // len(factors)
    words = np.zeros(_PIECE // 4, np.uint64)
    noise = words.view(np.int16)
    bits = np.empty(_PIECE, np.int32)
    rounded = bits.view(np.float32)
    for start in range(0, len(values), _PIECE):
        piece, out = values[start : start + _PIECE], codes[start : start + _PIECE]
        if noisy:
            first = key + np.uint64(start // 4) * _GOLDEN
            for i in range((len(piece) + 3) // 4):
                w = first + _STEPS[i]
                w = (w ^ (w >> _SHIFT)) * _MULTIPLIER
                w = (w ^ (w >> _SHIFT)) * _MULTIPLIER
                words[i] = (w ^ (w >> _SHIFT)) | _ODD
        begin = 0
        while begin < len(piece):
            row = (start + begin) // columns
            end = min(len(piece), (row + 1) * columns - start)
            _round(piece[begin:end], factors[row], noise[begin:end], rounded[begin:end])
            begin = end
        for i in range(len(out)):
            out[i] = bits[i] - _MAGIC_BITS


@jit
def _largest(raw: Any) -> Any:
    """Largest magnitude of numbers given as their bits, as int32: these compare as the numbers do, below NaN."""
    largest = np.int32(0)
    for i in range(len(raw)):
        largest = max(largest, np.int32(raw[i] & _MAGNITUDE))
    return largest


@jit
def int8_rows(values: Any, key: Any, noisy: bool, codes: Any, scales: Any) -> None:
    """Codes of FP32 values, and the scale of every row; as many rows as there is room for scales."""
    rows = len(scales)
    columns = len(values) // rows
    factors = np.empty(rows, np.float32)
    raw, factor_bits = values.view(np.int32), factors.view(np.int32)
    for row in range(rows):
        largest = _largest(raw[row * columns : (row + 1) * columns])
        factor_bits[row] = largest
        scale = max(factors[row] / _LARGEST, _SMALLEST) if largest < _INFINITE else np.float32(np.nan)
        scales[row] = scale
        factors[row] = np.float32(1.0) / scale
        if noisy:
            factor_bits[row] -= 1
    int8_codes(values, factors, key, noisy, codes)


def _as_pointer(context: Any, builder: Any, signature: Any, values: Any) -> Any:
    return builder.inttoptr(values[0], context.get_value_type(signature.return_type))


_at: Any = intrinsic(lambda typing, address: (numba.types.voidptr(numba.intp), _as_pointer))
"""The pointer to an address."""


def _cast(context: Any, builder: Any, signature: Any, values: Any) -> Any:
    return builder.bitcast(values[0], context.get_value_type(signature.return_type))


_bits_of: Any = intrinsic(lambda typing, value: (numba.int32(numba.float32), _cast))
"""The bits of an FP32 number, as int32."""


@jit
def int8_rows_at(values: int, count: int, key: int, noisy: bool, codes: int, scales: int, rows: int) -> None:
    """`int8_rows` of so many values and rows at addresses: arrays take longer to make than small ones to round.

    ``key`` is the int64 with the bits of the key.
    """
    int8_rows(
        carray(_at(values), (count,), np.float32),
        np.uint64(key),
        noisy,
        carray(_at(codes), (count,), np.int8),
        carray(_at(scales), (rows,), np.float32),
    )


@jit
def dequantize_at(codes: int, count: int, scales: int, rows: int, values: int) -> None:
    """FP32 values at an address from so many codes and the scales of as many equal rows."""
    source, target = carray(_at(codes), (count,), np.int8), carray(_at(values), (count,), np.float32)
    factors = carray(_at(scales), (rows,), np.float32)
    columns = count // rows
    for row in range(rows):
        factor, own = factors[row], target[row * columns : (row + 1) * columns]
        piece = source[row * columns : (row + 1) * columns]
        for i in range(len(own)):
            own[i] = np.float32(piece[i]) * factor


@jit
def _bf16(value: Any) -> Any:
    """Bits of the nearest BF16 number, ties to even, as int16."""
    bits = _bits_of(value)
    rounded = np.int32(np.int32(bits + _HALF) + np.int32(np.int32(bits >> np.int32(16)) & _LAST)) >> np.int32(16)
    return np.int16(rounded) if value == value else _NAN


@jit
def rescale_at(
    sums: int, shape: Any, x_scales: int, x_count: int, scales: int, scale_count: int, bias: int, result: int
) -> None:
    """BF16 of FP32 sums of codes, rounded to integers, times both scales, plus a bias unless its address is 0.

    The sums have the shape (samples, channels, elements); there are one or ``samples`` scales of the first operand, one
    or ``channels`` of the second, and a bias per channel.
    """
    samples, channels, elements = shape
    source = carray(_at(sums), (samples * channels * elements,), np.float32)
    target = carray(_at(result), (samples * channels * elements,), np.int16)
    x_factors = carray(_at(x_scales), (x_count,), np.float32)
    own_factors = carray(_at(scales), (scale_count,), np.float32)
    factors, added = np.empty(channels, np.float32), np.full(channels, np.float32(-0.0))  # which changes no number
    if bias:
        added[:] = carray(_at(bias), (channels,), np.float32)
    for sample in range(samples):
        x_factor = x_factors[sample if x_count > 1 else 0]
        if sample < x_count:
            for channel in range(channels):
                factors[channel] = x_factor * own_factors[channel if scale_count > 1 else 0]
        if elements == 1:
            row, out = source[sample * channels :][:channels], target[sample * channels :][:channels]
            for i in range(len(out)):
                out[i] = _bf16(np.rint(row[i]) * factors[i] + added[i])
            continue
        for channel in range(channels):
            first, factor, addend = (sample * channels + channel) * elements, factors[channel], added[channel]
            piece, own = source[first : first + elements], target[first : first + elements]
            for i in range(len(own)):
                own[i] = _bf16(np.rint(piece[i]) * factor + addend)
