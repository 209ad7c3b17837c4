"""The codec on CPUs: loops that numba compiles, with the bits of `reference`.

They release the GIL and run in one thread: a training process has as many workers as it has processors to spare. Inner
loops count from zero over slices, or LLVM would not vectorize them: an index that may be negative wraps around. Nothing
is allocated or called per block but drawing, which would cost as much as the block itself. The machine code is kept in
``NUMBA_CACHE_DIR`` or beside the source.
"""

import math
from typing import Any

import numba
import numpy as np
from numba.extending import intrinsic

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER = np.uint64(0xD6E8FEB86659FD93)
_SHIFT = np.uint64(32)
_ODD = np.uint64(0x0001_0001_0001_0001)
_SMALLEST = np.float32(2.0**-100)
_MAGIC = np.float32(12582912.0)
"""1.5 * 2**23: a number of magnitude below 2**22 that is added to it is rounded to nearest, ties to even."""
_MAGIC_BITS = np.int32(0x4B400000)
"""The bits of that number, of which the lowest eight are 0: the lowest eight of a rounded number are its INT8 code."""
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


def _cast(context: Any, builder: Any, signature: Any, values: Any) -> Any:
    return builder.bitcast(values[0], context.get_value_type(signature.return_type))


_as_float: Any = intrinsic(lambda typing, bits: (numba.float32(numba.int32), _cast))
"""The FP32 number with these bits, an int32."""
_as_bits: Any = intrinsic(lambda typing, value: (numba.int32(numba.float32), _cast))
"""The bits of an FP32 number, as int32."""


@jit
def _scale(bits: Any) -> Any:
    """Largest magnitude, +inf where there is NaN or an infinity, and not too small to divide by."""
    most = np.int32(0)
    for i in range(len(bits)):
        most = max(most, bits[i] & np.int32(0x7FFFFFFF))
    scale = _as_float(min(most, np.int32(0x7F800000)))
    return _SMALLEST if scale > 0 and scale < _SMALLEST else scale


@jit
def sum_scales(bits: Any, block: int, scales: Any) -> None:
    """Scales (BF16 as int16) of the blocks of a gradient, given as int32 bits."""
    for b in range(len(scales)):
        scales[b] = np.int16((_as_bits(_scale(bits[b * block : (b + 1) * block])) + np.int32(0xFFFF)) >> 16)


@jit
def _rounded(x: Any, inverse: Any, noise: Any, levels: Any) -> Any:
    """The bits of 1.5 * 2**23 plus a code."""
    y = x * inverse + np.float32(noise) * _NOISE_UNIT
    return _as_bits(min(max(y, -levels), levels) + _MAGIC)


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
    elements = len(x)
    top = np.float32(levels)
    if lanes > 1:
        out[min(elements, lane_words) :] = 0
    for lane in range(lanes):
        start = lane * lane_words
        stop = min(elements, start + lane_words)
        shift = np.uint32(lane * width)
        while start < stop:
            end = min(stop, (start // block + 1) * block, start // 4 * 4 + _PIECE)
            inverse = _inverse(scales[start // block], levels)
            skipped = start % 4
            base = start - lane * lane_words
            own, part = x[start:end], out[base : base + end - start]
            if inverse > 0:
                _draw(key, start // 4, words, (skipped + end - start + 3) // 4, _ODD)
            drawn = noise[skipped : skipped + end - start]
            if lanes == 1:
                if inverse > 0:
                    for i in range(len(part)):
                        part[i] = np.int8(_rounded(own[i], inverse, drawn[i], top))
                else:
                    part[:] = 0
            else:
                if lane == 0:
                    part[:] = 0
                if inverse > 0:
                    for i in range(len(part)):
                        code = _rounded(own[i], inverse, drawn[i], top) - _MAGIC_BITS
                        part[i] |= np.int32(np.uint32(code + levels) << shift)
                else:
                    for i in range(len(part)):
                        part[i] |= np.int32(np.uint32(levels) << shift)
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
def _int8_block(x: Any, bits: Any, first: int, key: Any, words: Any, noise: Any, out: Any) -> Any:
    """Codes of one block that begins at element ``first``, a multiple of four; returns its scale.

    ``noise`` are the ``words`` as int16.
    """
    scale = _scale(bits)
    inverse, top = _inverse(scale, 127), np.float32(127)
    if inverse > 0:
        for start in range(0, len(x), _PIECE):
            own, part = x[start : start + _PIECE], out[start : start + _PIECE]
            _draw(key, (first + start) // 4, words, (len(own) + 3) // 4, _ODD)
            for i in range(len(own)):
                part[i] = np.int8(_rounded(own[i], inverse, noise[i], top))
    else:
        out[:] = 0
    return scale


@jit
def encode_int8(x: Any, bits: Any, block: int, key: Any, codes: Any, scales: Any) -> None:
    """INT8 codes with a scale per block; ``block`` is a multiple of four."""
    words = np.empty(_PIECE // 4, np.uint64)
    noise = words.view(np.int16)
    for b in range(len(scales)):
        first, last = b * block, (b + 1) * block
        scales[b] = _int8_block(x[first:last], bits[first:last], first, key, words, noise, codes[first:last])


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
    noise = words.view(np.int16)
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
        out_scales[b] = _int8_block(mean[:size], bits[:size], first, key, words, noise, out[first : first + size])
