"""Rounding to INT8 on CPUs: loops that numba compiles, with the bits of `formats.scale_from` and `codes_of`.

They release the GIL and run in one thread. The machine code is kept in ``NUMBA_CACHE_DIR`` or beside the source.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

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
_PIECE = 1024
"""Elements that are worked on at a time, in the first-level cache; a multiple of four."""

jit: Any = numba.njit(nogil=True, cache=True, error_model="numpy")


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
        count = min(_PIECE, len(values) - start)
        if noisy:
            for i in range((count + 3) // 4):
                w = key + np.uint64(start // 4 + i) * _GOLDEN
                w = (w ^ (w >> _SHIFT)) * _MULTIPLIER
                w = (w ^ (w >> _SHIFT)) * _MULTIPLIER
                words[i] = (w ^ (w >> _SHIFT)) | _ODD
        piece, out = values[start : start + count], codes[start : start + count]
        begin = 0
        while begin < count:
            row = (start + begin) // columns
            end = min(count, (row + 1) * columns - start)
            factor = factors[row]
            for i in range(begin, end):
                rounded[i] = (piece[i] * factor + np.float32(noise[i]) * _NOISE_UNIT) + _MAGIC
            begin = end
        for i in range(count):
            out[i] = bits[i] - _MAGIC_BITS


@jit
def int8_rows(values: Any, key: Any, noisy: bool, codes: Any, scales: Any) -> None:
    """Codes of FP32 values, and the scale of every row; as many rows as there is room for scales."""
    rows = len(scales)
    columns = len(values) // rows
    factors = np.empty(rows, np.float32)
    raw, factor_bits = values.view(np.int32), factors.view(np.int32)
    for row in range(rows):
        # Magnitudes compare as their bits do, and NaN is above all of them.
        largest = np.int32(0)
        for i in range(row * columns, (row + 1) * columns):
            largest = max(largest, np.int32(raw[i] & _MAGNITUDE))
        factor_bits[row] = largest
        scale = max(factors[row] / _LARGEST, _SMALLEST) if largest < _INFINITE else np.float32(np.nan)
        scales[row] = scale
        factors[row] = np.float32(1.0) / scale
        if noisy:
            factor_bits[row] -= 1
    int8_codes(values, factors, key, noisy, codes)
