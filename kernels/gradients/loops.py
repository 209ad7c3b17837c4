"""The codec on CPUs: loops that numba compiles, with the bits of `reference`.

They release the GIL and run in one thread: a training process has as many workers as it has processors to spare. Inner
loops count from zero over slices, or LLVM would not vectorize them: an index that may be negative wraps around. The
machine code is kept in ``NUMBA_CACHE_DIR`` or beside the source.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER = np.uint64(0xD6E8FEB86659FD93)
_SHIFT = np.uint64(32)
_ODD = np.uint64(0x0001_0001_0001_0001)
_SMALLEST = np.float32(2.0**-100)
_MAGIC = np.float32(12582912.0)
"""1.5 * 2**23: a number of magnitude below 2**22 that is added to it is rounded to nearest, ties to even."""
_MAGIC_BITS = np.int32(0x4B400000)
_PIECE = 256
"""Elements whose noise is drawn at a time; a multiple of four."""
_NOISE_UNIT = np.float32(2.0**-16)

jit: Any = numba.njit(nogil=True, cache=True, error_model="numpy")


@jit
def _draw(key: Any, first: int, words: Any, count: int, odd: Any) -> None:
    """Words of the stream from word ``first`` on, as `qsync_opt.kernels.quantize` draws them."""
    for i in range(count):
        w = np.uint64(key) + np.uint64(first + i) * _GOLDEN
        w = (w ^ (w >> _SHIFT)) * _MULTIPLIER
        w = (w ^ (w >> _SHIFT)) * _MULTIPLIER
        words[i] = (w ^ (w >> _SHIFT)) | odd


@jit
def _largest(bits: Any) -> Any:
    """Largest magnitude as bits, +inf where there is NaN or an infinity."""
    most = np.int32(0)
    for i in range(len(bits)):
        most = max(most, bits[i] & np.int32(0x7FFFFFFF))
    return min(most, np.int32(0x7F800000))


@jit
def sum_scales(bits: Any, block: int, scales: Any) -> None:
    """Scales (BF16 as int16) of the blocks of a gradient, given as int32 bits."""
    value = np.empty(1, np.int32)
    floats = value.view(np.float32)
    for b in range(len(scales)):
        value[0] = _largest(bits[b * block : (b + 1) * block])
        if floats[0] > 0 and floats[0] < _SMALLEST:
            floats[0] = _SMALLEST
        scales[b] = np.int16((value[0] + np.int32(0xFFFF)) >> 16)


@jit
def _round_piece(x: Any, inverse: Any, levels: Any, noise: Any, codes: Any) -> None:
    """Rounded codes of a piece, as int32."""
    rounded = codes.view(np.float32)
    for i in range(len(x)):
        y = x[i] * inverse + np.float32(noise[i]) * _NOISE_UNIT
        y = min(max(y, -levels), levels)
        rounded[i] = y + _MAGIC
    for i in range(len(x)):
        codes[i] = codes[i] - _MAGIC_BITS


@jit
def _inverse(scale: Any, levels: Any) -> Any:
    if scale > 0 and scale < np.float32(math.inf):
        return np.float32(levels) / scale
    return np.float32(0.0)


@jit
def encode_sum(
    x: Any, scales: Any, levels: int, width: int, lanes: int, lane_words: int, block: int, key: Any, out: Any
) -> None:
    """Codes under common FP32 scales: ``out`` is INT8 for one lane, else INT32 of ``lane_words`` words.

    Lanes begin at multiples of four elements, blocks at multiples of ``block``: pieces end where either ends.
    """
    words = np.empty(_PIECE // 4, np.uint64)
    noise = words.view(np.int16)
    codes = np.empty(_PIECE, np.int32)
    elements = len(x)
    top = np.float32(levels)
    for lane in range(lanes):
        start = lane * lane_words
        stop = min(elements, start + lane_words)
        while start < stop:
            end = min(stop, (start // block + 1) * block, start // 4 * 4 + _PIECE)
            inverse = _inverse(scales[start // block], levels)
            size = end - start
            skipped = start % 4
            if inverse > 0:
                _draw(key, start // 4, words, (skipped + size + 3) // 4, _ODD)
                _round_piece(x[start:end], inverse, top, noise[skipped : skipped + size], codes[:size])
            else:
                codes[:size] = 0
            base = start - lane * lane_words
            part = out[base : base + size]
            if lanes == 1:
                for i in range(len(part)):
                    part[i] = codes[i]
            else:
                shift = np.uint32(lane * width)
                for i in range(len(part)):
                    part[i] |= np.int32(np.uint32(codes[i] + levels) << shift)
            start = end


@jit
def _step(scale: Any, levels: int) -> Any:
    if scale < np.float32(math.inf):
        return scale / np.float32(levels)
    return np.float32(math.nan)


@jit
def decode_sum(
    codes: Any, scales: Any, levels: int, workers: int, width: int, lanes: int, lane_words: int, block: int, out: Any
) -> None:
    """The mean gradient from summed codes and FP32 scales."""
    elements = len(out)
    mask = np.uint32((np.uint64(1) << np.uint64(width)) - np.uint64(1))
    offset = np.int32(workers * levels)
    for lane in range(lanes):
        start = lane * lane_words
        stop = min(elements, start + lane_words)
        shift = np.uint32(lane * width)
        while start < stop:
            end = min(stop, (start // block + 1) * block)
            step = _step(scales[start // block], levels * workers)
            base = lane * lane_words
            own, part = codes[start - base : end - base], out[start:end]
            if lanes == 1:
                for i in range(len(part)):
                    part[i] = np.float32(own[i]) * step
            else:
                for i in range(len(part)):
                    code = np.int32((np.uint32(own[i]) >> shift) & mask) - offset
                    part[i] = np.float32(code) * step
            start = end


@jit
def _block_scale(bits: Any) -> Any:
    value = np.empty(1, np.int32)
    value[0] = _largest(bits)
    scale = value.view(np.float32)[0]
    return _SMALLEST if scale > 0 and scale < _SMALLEST else scale


@jit
def _int8_block(x: Any, bits: Any, first: int, key: Any, words: Any, codes: Any, out: Any) -> Any:
    """Codes of one block that begins at element ``first``, a multiple of four; returns its scale."""
    scale = _block_scale(bits)
    inverse = _inverse(scale, 127)
    for start in range(0, len(x), _PIECE):
        size = min(_PIECE, len(x) - start)
        if inverse > 0:
            _draw(key, (first + start) // 4, words, (size + 3) // 4, _ODD)
            _round_piece(x[start : start + size], inverse, np.float32(127), words.view(np.int16)[:size], codes[:size])
        else:
            codes[:size] = 0
        part = out[start : start + size]
        for i in range(len(part)):
            part[i] = codes[i]
    return scale


@jit
def encode_int8(x: Any, bits: Any, block: int, key: Any, codes: Any, scales: Any) -> None:
    """INT8 codes with a scale per block; ``block`` is a multiple of four."""
    words = np.empty(_PIECE // 4, np.uint64)
    rounded = np.empty(_PIECE, np.int32)
    for b in range(len(scales)):
        part = slice(b * block, (b + 1) * block)
        scales[b] = _int8_block(x[part], bits[part], b * block, key, words, rounded, codes[part])


@jit
def decode_int8(codes: Any, scales: Any, block: int, out: Any) -> None:
    """Values of INT8 codes."""
    for b in range(len(scales)):
        step = _step(scales[b], 127)
        own, part = codes[b * block : (b + 1) * block], out[b * block : (b + 1) * block]
        for i in range(len(part)):
            part[i] = np.float32(own[i]) * step


@jit
def reduce_int8(codes: Any, scales: Any, block: int, key: Any, out: Any, out_scales: Any) -> None:
    """The mean of the workers' values, encoded again."""
    words = np.empty(_PIECE // 4, np.uint64)
    rounded = np.empty(_PIECE, np.int32)
    mean = np.empty(block, np.float32)
    bits = mean.view(np.int32)
    workers, elements = codes.shape
    share = np.float32(1 / workers)
    for b in range(len(out_scales)):
        first = b * block
        size = min(block, elements - first)
        for worker in range(workers):
            step = _step(scales[worker, b], 127)
            own, total = codes[worker, first : first + size], mean[:size]
            if worker == 0:
                for i in range(len(total)):
                    total[i] = np.float32(own[i]) * step
            else:
                for i in range(len(total)):
                    total[i] = total[i] + np.float32(own[i]) * step
        for i in range(size):
            mean[i] = mean[i] * share
        out_scales[b] = _int8_block(mean[:size], bits[:size], first, key, words, rounded, out[first : first + size])
