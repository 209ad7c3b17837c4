"""Packing and unpacking of rows on a CPU, compiled by numba; the contract is that of `rows`, bit for bit."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER = np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)
_ONE = np.uint64(1)
_LOW = np.uint32(0xFFFF)
_HIGH = np.uint32(0xFFFF0000)
_SIGN = np.uint32(0x80000000)
_UNIT = np.float32(2.0**-16)
_NAN = np.uint32(0x7FC00000)
_NONE = np.float32(0.0)
_LOW16 = np.uint64(0xFFFF)
_ODD = np.int32(1)
_EXPONENT = np.int32(0x7F800000)
_ORDER = np.int32(0x7FFFFFFF)
_NAN16 = np.int16(0x7FC0)
_jit: Any = numba.njit(cache=True, error_model="numpy", nogil=True)


@_jit
def _word(key: Any, number: Any) -> Any:
    """A random word, as `rows` draws it."""
    word = key + (number + _ONE) * _GOLDEN
    word = (word ^ (word >> _HALF)) * _MULTIPLIER
    word = (word ^ (word >> _HALF)) * _MULTIPLIER
    return word ^ (word >> _HALF)


@_jit
def _draw(start: int, count: int, key: Any, drawn: Any) -> None:
    """16 random bits for each of ``count`` entries from ``start`` on, and for those before in the first one's word."""
    first = start // 4
    for number in range((start + count + 3) // 4 - first):
        word = _word(key, np.uint64(first + number))
        for part in range(4):
            drawn[4 * number + part] = np.int32((word >> np.uint64(16 * part)) & _LOW16)


@_jit
def _join(codes: Any, bits: int, packed: Any) -> None:
    """Codes into bytes; a loop of its own for each width, since only then do they run many bytes at a time."""
    if bits == 8:
        for k in range(len(packed)):
            packed[k] = codes[k]
    elif bits == 4:
        for k in range(len(packed)):
            packed[k] = codes[2 * k] | (codes[2 * k + 1] << np.uint8(4))
    elif bits == 2:
        for k in range(len(packed)):
            low = codes[4 * k] | (codes[4 * k + 1] << np.uint8(2))
            packed[k] = low | (codes[4 * k + 2] << np.uint8(4)) | (codes[4 * k + 3] << np.uint8(6))
    else:
        for k in range(len(packed)):
            value = np.uint8(0)
            for part in range(8):
                value |= np.uint8(codes[8 * k + part] << np.uint8(part))
            packed[k] = value


@_jit
def _split(packed: Any, bits: int, codes: Any) -> None:
    """The reverse of `_join`."""
    if bits == 4:
        for k in range(len(packed)):
            codes[2 * k] = packed[k] & np.uint8(15)
            codes[2 * k + 1] = packed[k] >> np.uint8(4)
    elif bits == 2:
        for k in range(len(packed)):
            codes[4 * k] = packed[k] & np.uint8(3)
            codes[4 * k + 1] = (packed[k] >> np.uint8(2)) & np.uint8(3)
            codes[4 * k + 2] = (packed[k] >> np.uint8(4)) & np.uint8(3)
            codes[4 * k + 3] = packed[k] >> np.uint8(6)
    else:
        for k in range(len(packed)):
            for part in range(8):
                codes[8 * k + part] = (packed[k] >> np.uint8(part)) & np.uint8(1)


@_jit
def _pack(x: Any, index: Any, bits: int, key: Any, out: Any) -> None:
    dim = x.shape[1]
    levels = np.float32((1 << bits) - 1)
    per_byte = 8 // bits
    header = np.empty(2, np.float32)
    raw = header.view(np.uint32)
    ends = np.empty(2, np.int32)
    limits = ends.view(np.float32)
    codes = np.zeros((dim + per_byte - 1) // per_byte * per_byte, np.uint8)
    drawn = np.empty(dim + 6, np.int32)
    entries = x.view(np.int32)
    # Several plain loops over a row: each of them runs many entries at a time, which one loop of all does not.
    for k in range(index.size):
        row, target = x[index[k]], out[k]
        least, most = _ORDER, -_ORDER
        for c in range(dim):
            entry = entries[index[k], c]
            ordered = entry ^ ((entry >> np.int32(31)) & _ORDER)  # rises with the entry; NaN lies beyond infinity
            least, most = min(least, ordered), max(most, ordered)
        bad = most >= _EXPONENT or least < -_EXPONENT
        ends[0] = least ^ ((least >> np.int32(31)) & _ORDER)
        ends[1] = most ^ ((most >> np.int32(31)) & _ORDER)
        header[0], high = limits[0], limits[1]
        if raw[0] & _SIGN:
            raw[0] += _LOW
        raw[0] &= _HIGH
        zero = header[0]
        header[1] = np.float32(np.float32(high - zero) / levels)
        if not (raw[1] & _SIGN):
            raw[1] += _LOW
        raw[1] &= _HIGH
        step = header[1]
        if bad or not np.isfinite(np.float32(high - zero)) or not np.isfinite(step):
            raw[0] = raw[1] = _NAN
            step = _NONE
        target[0], target[1] = (raw[0] >> np.uint32(16)) & np.uint32(0xFF), raw[0] >> np.uint32(24)
        target[2], target[3] = (raw[1] >> np.uint32(16)) & np.uint32(0xFF), raw[1] >> np.uint32(24)
        if not step > _NONE:
            target[4:] = 0
            continue
        _draw(k * dim, dim, key, drawn)
        own = drawn[k * dim % 4 :]
        for c in range(dim):
            noise = np.float32(np.float32(own[c] | _ODD) * _UNIT)
            scaled = np.float32(np.float32(np.float32(row[c] - zero) / step) + noise)
            codes[c] = np.uint8(np.int32(min(np.floor(scaled), levels)))  # never below 0: zero is rounded down
        _join(codes, bits, target[4:])


@_jit
def _pack_bf16(x: Any, index: Any, key: Any, out: Any) -> None:
    dim = x.shape[1]
    drawn = np.empty(dim + 6, np.int32)
    for k in range(index.size):
        row, target = x[index[k]], out[k]
        _draw(k * dim, dim, key, drawn)
        own = drawn[k * dim % 4 :]
        for c in range(dim):
            is_finite = (row[c] & _EXPONENT) != _EXPONENT
            target[c] = np.int16((row[c] + own[c]) >> np.int32(16)) if is_finite else _NAN16


@_jit
def _unpack(wire: Any, index: Any, bits: int, out: Any) -> None:
    dim = out.shape[1]
    per_byte = 8 // bits
    header = np.empty(2, np.float32)
    raw = header.view(np.uint32)
    codes = np.zeros((dim + per_byte - 1) // per_byte * per_byte, np.uint8)
    for k in range(index.size):
        source, row = wire[k], out[index[k]]
        raw[0] = (np.uint32(source[0]) << np.uint32(16)) | (np.uint32(source[1]) << np.uint32(24))
        raw[1] = (np.uint32(source[2]) << np.uint32(16)) | (np.uint32(source[3]) << np.uint32(24))
        zero, step = header[0], header[1]
        packed = source[4:]
        if bits == 8:
            for c in range(dim):
                row[c] = np.float32(np.float32(np.float32(packed[c]) * step) + zero)
            continue
        _split(packed, bits, codes)
        for c in range(dim):
            row[c] = np.float32(np.float32(np.float32(codes[c]) * step) + zero)


def pack_loop(x: Any, index: Any, bits: int, key: int, out: Any) -> None:
    """Pack rows of ``x`` into ``out``; an index outside raises IndexError."""
    _check_index(index, x.shape[0])
    if x.shape[1] and index.size:
        _pack(x, index, bits, np.uint64(key), out)


def pack_bf16_loop(x: Any, index: Any, key: int, out: Any) -> None:
    """Round rows of ``x``, given as int32 bits, to BF16 in ``out`` (int16); an index outside raises IndexError."""
    _check_index(index, x.shape[0])
    _pack_bf16(x, index, np.uint64(key), out)


def unpack_loop(wire: Any, index: Any, bits: int, out: Any) -> None:
    """Unpack ``wire`` into rows of ``out``; an index outside raises IndexError."""
    _check_index(index, out.shape[0])
    _unpack(wire, index, bits, out)


def _check_index(index: Any, rows: int) -> None:
    if index.size and not (index.min() >= 0 and index.max() < rows):
        raise IndexError(f"a row's index is outside 0 to {rows - 1}")
