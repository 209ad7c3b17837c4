"""Rounding to INT8 on CPUs in one pass: a loop that numba compiles, with the bits of `formats.codes_of`.

It releases the GIL and runs in one thread. The machine code is kept in ``NUMBA_CACHE_DIR`` or beside the source.
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
_PIECE = 1024
"""Elements that are worked on at a time, in the first-level cache; a multiple of four."""

jit: Any = numba.njit(nogil=True, cache=True, error_model="numpy")


@jit
def int8_codes(values: Any, factor: Any, key: Any, noisy: bool, codes: Any) -> None:
    """Codes of ``values * factor`` (FP32), with the noise of the stream ``key`` (uint64) if ``noisy``."""
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
        for i in range(count):
            rounded[i] = (piece[i] * factor + np.float32(noise[i]) * _NOISE_UNIT) + _MAGIC
        for i in range(count):
            out[i] = bits[i] - _MAGIC_BITS
