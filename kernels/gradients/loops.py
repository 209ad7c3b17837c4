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
_MAGNITUDE, _INFINITE = np.int32(0x7FFFFFFF), np.int32(0x7F800000)
"""Bits of an FP32 number without its sign, and those of infinity."""
_FP8_NORMAL, _FP8_MOST = np.int32((127 - 7) << 3), np.int32(0x7E)
"""How far exponents of FP32 and E4M3 are apart, in steps of codes, and the largest code."""
_INT8_LARGEST, _FP8_LARGEST = 127, 448
_ANY = np.uint64(0)
"""Random words as they are drawn."""

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
        most = max(most, bits[i] & _MAGNITUDE)
    scale = _as_float(min(most, _INFINITE))
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
def _int8_code(x: Any, factor: Any, noise: Any) -> Any:
    """The lowest byte is the code."""
    return np.uint8(_rounded(x, factor, np.int16(noise | np.uint16(1)), np.float32(127)))


@jit
def _int8_value(code: Any) -> Any:
    return np.float32(np.int8(code))


@jit
def _fp8_code(x: Any, factor: Any, noise: Any) -> Any:
    """E4M3 code, rounded stochastically by 16 random bits."""
    y = x * factor
    bits, magnitude = _as_bits(y), abs(y)
    normal = (((bits & _MAGNITUDE) + (np.int32(noise) << 4)) >> 20) - _FP8_NORMAL
    small = np.int32(math.floor(magnitude * np.float32(512.0) + np.float32(noise) * _NOISE_UNIT))
    code = min(small if magnitude < np.float32(2.0**-6) else normal, _FP8_MOST)
    return np.uint8(code | ((bits >> 24) & 0x80))


@jit
def _fp8_value(code: Any) -> Any:
    """The number of an E4M3 code, which is not NaN."""
    magnitude = _as_float(np.int32((np.int32(code) & 0x7F) << 20)) * np.float32(2.0**120)
    return -magnitude if code & 0x80 else magnitude


@jit
def _encode_block(x: Any, bits: Any, is_fp8: bool, first: int, key: Any, words: Any, out: Any) -> Any:
    """Codes (bytes) of one block that begins at element ``first``, a multiple of four; returns its scale."""
    noise = words.view(np.uint16)
    scale = _scale(bits)
    factor = _inverse(scale, _FP8_LARGEST if is_fp8 else _INT8_LARGEST)
    if factor > 0:
        for start in range(0, len(x), _PIECE):
            own, part = x[start : start + _PIECE], out[start : start + _PIECE]
            _draw(key, (first + start) // 4, words, (len(own) + 3) // 4, _ANY)
            if is_fp8:
                for i in range(len(own)):
                    part[i] = _fp8_code(own[i], factor, noise[i])
            else:
                for i in range(len(own)):
                    part[i] = _int8_code(own[i], factor, noise[i])
    else:
        out[:] = 0
    return scale


@jit
def encode(x: Any, bits: Any, is_fp8: bool, block: int, key: Any, codes: Any, scales: Any) -> None:
    """INT8 or FP8 codes (bytes) with a scale per block; ``block`` is a multiple of four."""
    words = np.empty(_PIECE // 4, np.uint64)
    for b in range(len(scales)):
        first, last = b * block, (b + 1) * block
        scales[b] = _encode_block(x[first:last], bits[first:last], is_fp8, first, key, words, codes[first:last])


@jit
def _decode_block(codes: Any, scale: Any, is_fp8: bool, adds: bool, out: Any) -> None:
    """The values of a block's codes in place of what ``out`` holds, or in addition to it."""
    step = _step(scale, _FP8_LARGEST if is_fp8 else _INT8_LARGEST)
    if is_fp8 and adds:
        for i in range(len(out)):
            out[i] = out[i] + _fp8_value(codes[i]) * step
    elif is_fp8:
        for i in range(len(out)):
            out[i] = _fp8_value(codes[i]) * step
    elif adds:
        for i in range(len(out)):
            out[i] = out[i] + _int8_value(codes[i]) * step
    else:
        for i in range(len(out)):
            out[i] = _int8_value(codes[i]) * step


@jit
def decode(codes: Any, scales: Any, is_fp8: bool, block: int, out: Any) -> None:
    """Values of INT8 or FP8 codes."""
    for b in range(len(scales)):
        first, last = b * block, (b + 1) * block
        _decode_block(codes[first:last], scales[b], is_fp8, False, out[first:last])


@jit
def reduce(codes: Any, scales: Any, is_fp8: bool, block: int, key: Any, out: Any, out_scales: Any) -> None:
    """The mean of the workers' values, encoded again."""
    words = np.empty(_PIECE // 4, np.uint64)
    buffer = np.empty(block, np.float32)
    buffer_bits = buffer.view(np.int32)
    workers, elements = codes.shape
    share = np.float32(1 / workers)
    for b in range(len(out_scales)):
        first = b * block
        last = min(first + block, elements)
        mean, bits = buffer[: last - first], buffer_bits[: last - first]
        for worker in range(workers):
            _decode_block(codes[worker, first:last], scales[worker, b], is_fp8, worker > 0, mean)
        for i in range(len(mean)):
            mean[i] = mean[i] * share
        out_scales[b] = _encode_block(mean, bits, is_fp8, first, key, words, out[first:last])


@jit
def _bf16_piece(bits: Any, first: int, key: Any, words: Any, codes: Any) -> None:
    """BF16 codes (int16) of FP32 bits, rounded stochastically, from element ``first`` on; NaN is 0x7FC0."""
    noise = words.view(np.uint16)
    _draw(key, first // 4, words, (len(bits) + 3) // 4, _ANY)
    for i in range(len(bits)):
        magnitude = bits[i] & _MAGNITUDE
        code = (bits[i] + (np.int32(noise[i]) if magnitude < _INFINITE else np.int32(0))) >> 16
        codes[i] = np.int16(0x7FC0 if magnitude > _INFINITE else code)


@jit
def encode_bf16(bits: Any, key: Any, codes: Any) -> None:
    """BF16 codes (int16) of FP32 bits."""
    words = np.empty(_PIECE // 4, np.uint64)
    for first in range(0, len(bits), _PIECE):
        _bf16_piece(bits[first : first + _PIECE], first, key, words, codes[first : first + _PIECE])


@jit
def reduce_bf16(codes: Any, key: Any, out: Any) -> None:
    """The mean of the workers' values (int16), encoded again."""
    words = np.empty(_PIECE // 4, np.uint64)
    mean = np.empty(_PIECE, np.float32)
    bits = mean.view(np.int32)
    workers, elements = codes.shape
    share = np.float32(1 / workers)
    for first in range(0, elements, _PIECE):
        size = min(_PIECE, elements - first)
        total = mean[:size]
        for worker in range(workers):
            own = codes[worker, first : first + size]
            if worker == 0:
                for i in range(len(total)):
                    total[i] = _as_float(np.int32(np.int32(own[i]) << 16))
            else:
                for i in range(len(total)):
                    total[i] = total[i] + _as_float(np.int32(np.int32(own[i]) << 16))
        for i in range(size):
            mean[i] = mean[i] * share
        _bf16_piece(bits[:size], first, key, words, out[first : first + size])
