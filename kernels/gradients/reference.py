"""The specification of the codec in plain PyTorch, on any device.

Gradients are flat FP32 tensors of d elements; blocks of `Layout.block` consecutive elements share a scale.

Sums: a block's scale M is its largest magnitude rounded up to BF16, at least 2**-100 unless it is 0, and +inf where the
block holds NaN or an infinity. After a MAX all-reduce of the scales all workers encode with the same step M / s: code
``round(x * (s / M) + noise)``, noise uniform in (-1/2, 1/2), so that the expected code is ``x s / M``. Sums of n codes
stay within n s. Codes travel as INT8, or with s added in lanes of INT32: lane l of word i holds element ``l W + i``.

Two-shot: a worker encodes with scales of its own (FP32), receives one part of every worker's codes, sums the values in
FP32 in the order of ranks, and encodes the mean again. Forms are ``int8`` (127 levels), ``fp8`` (E4M3, largest 448),
``bf16`` (no scale) and ``exponent`` (a scale for the whole gradient, the paper's exponent levels).

A block with scale 0 decodes to zeros, one with a scale that is not finite to NaN on every worker.

Noise of element e is 16 bits of word ``e // 4`` of the stream, so that a code misses the expectation by at most 2**-16
of a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from qsync_opt.kernels.quantize import random_words

SMALLEST_SCALE = 2.0**-100
"""Least scale of a block that is not zero: levels divided by it do not overflow."""
FORMS = ("int8", "fp8", "bf16", "exponent")
FP8_LARGEST = 448.0
LEAST_EXPONENT = 100


class Encoded(NamedTuple):
    """Codes, and scales of one FP32 number per block; forms without scales have none."""

    codes: Tensor
    scales: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How codes of a sum travel.

    ``width`` bits of each, ``lanes`` of them in an integer (1: INT8), and ``block`` elements to a scale.
    """

    width: int
    lanes: int
    block: int

    @property
    def dtype(self) -> torch.dtype:
        """Of the integers."""
        return torch.int8 if self.lanes == 1 else torch.int32

    def words(self, elements: int) -> int:
        """Integers that hold the codes of so many elements: lanes begin at multiples of four elements."""
        if self.lanes == 1:
            return elements
        return 4 * math.ceil(elements / (4 * self.lanes))


def noise_lanes(key: int, count: int, device: torch.device) -> Tensor:
    """16 random bits for each of ``count`` elements: int16, shape (count,)."""
    return random_words(key, 0, -(-count // 4), device).view(torch.int16)[:count]


def _centred(key: int, count: int, device: torch.device) -> Tensor:
    """Noise in (-1/2, 1/2) for rounding to nearest: odd multiples of 2**-16."""
    return noise_lanes(key, count, device).bitwise_or_(1).to(torch.float32).mul_(2.0**-16)


def _uniform(key: int, count: int, device: torch.device) -> Tensor:
    """Integers from 0 to 65535: int32, shape (count,)."""
    return noise_lanes(key, count, device).to(torch.int32).bitwise_and_(0xFFFF)


def _block_amax(x: Tensor, block: int) -> Tensor:
    """Largest magnitude of each block, +inf where there is NaN or an infinity."""
    magnitudes = torch.nn.functional.pad(x.abs(), (0, -len(x) % block)).view(-1, block)
    return magnitudes.nan_to_num(nan=math.inf, posinf=math.inf).amax(1)


def _spread(values: Tensor, block: int, count: int) -> Tensor:
    return values.repeat_interleave(block)[:count] if len(values) > 1 else values.expand(count)


def _floored(largest: Tensor) -> Tensor:
    return torch.where(largest > 0, largest.clamp_min(SMALLEST_SCALE), largest)


def sum_scales(x: Tensor, block: int) -> Tensor:
    """Scales of a sum, before they are reduced by MAX: BF16, shape (ceil(d / block),)."""
    if not len(x):
        return torch.empty(0, dtype=torch.bfloat16, device=x.device)
    bits = _floored(_block_amax(x, block)).view(torch.int32)
    # Rounded up; the largest finite numbers become infinite, and with them the gradient NaN.
    return ((bits + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)


def _codes(x: Tensor, scales: Tensor, levels: int, block: int, key: int) -> Tensor:
    """Codes of x as FP32 integers in [-levels, levels]."""
    usable = (scales > 0) & scales.isfinite()
    inverse = torch.where(usable, torch.full_like(scales, levels) / scales, 0.0)
    inverse = _spread(inverse, block, len(x))
    codes = torch.round(x * inverse + _centred(key, len(x), x.device)).clamp_(-levels, levels)
    return torch.where(inverse > 0, codes, 0.0)


def encode_sum(x: Tensor, scales: Tensor, levels: int, layout: Layout, key: int) -> Tensor:
    """Codes under common scales: INT8, shape (d,), or INT32, shape (layout.words(d),)."""
    codes = _codes(x, scales.to(torch.float32), levels, layout.block, key)
    if layout.lanes == 1:
        return codes.to(torch.int8)
    words = layout.words(len(x))
    lanes = torch.nn.functional.pad(codes + levels, (0, words * layout.lanes - len(x))).to(torch.int64)
    shifts = torch.arange(layout.lanes, device=x.device)[:, None] * layout.width
    return (lanes.view(layout.lanes, words) << shifts).sum(0).to(torch.int32)


def decode_sum(codes: Tensor, scales: Tensor, levels: int, workers: int, layout: Layout, elements: int) -> Tensor:
    """The mean gradient from summed codes: FP32, shape (elements,)."""
    if layout.lanes > 1:
        shifts = torch.arange(layout.lanes, device=codes.device)[:, None] * layout.width
        lanes = (codes.to(torch.int64)[None, :] >> shifts) & ((1 << layout.width) - 1)
        codes = lanes.reshape(-1)[:elements] - workers * levels
    return _values(codes.to(torch.float32), scales.to(torch.float32), levels * workers, layout.block)


def _values(codes: Tensor, scales: Tensor, levels: int, block: int) -> Tensor:
    steps = torch.where(scales.isfinite(), scales / torch.full_like(scales, levels), math.nan)
    return codes * _spread(steps, block, len(codes))


def _to_fp8(x: Tensor, random: Tensor) -> Tensor:
    """E4M3 codes (as uint8) of values of magnitude up to 448, rounded stochastically."""
    bits = x.view(torch.int32)
    sign, magnitude = (bits >> 24) & 0x80, bits & 0x7FFFFFFF
    normal = ((magnitude + (random << 4)) >> 20) - ((127 - 7) << 3)
    small = torch.floor(x.abs() * 512.0 + random.to(torch.float32) * 2.0**-16).to(torch.int32)
    codes = torch.where(x.abs() < 2.0**-6, small, normal).clamp_(max=0x7E)
    return (codes | sign).to(torch.uint8)


def _from_fp8(codes: Tensor) -> Tensor:
    return codes.view(torch.float8_e4m3fn).to(torch.float32)


def _to_bf16(x: Tensor, random: Tensor) -> Tensor:
    """BF16 by stochastic rounding; infinities stay so, and NaN is 0x7FC0 everywhere."""
    bits = x.view(torch.int32)
    codes = torch.where(x.isfinite(), bits + random, bits) >> 16
    return torch.where(x.isnan(), 0x7FC0, codes).to(torch.int16).view(torch.bfloat16)


def encode_exponents(y: Tensor, random: Tensor) -> Tensor:
    """INT8 codes of numbers in [-1, 1]: 0, or the sign of ``1 + a`` for the magnitude ``2**-a``."""
    mantissa, exponent = torch.frexp(y.abs())  # mantissa in [1/2, 1)
    uniform = (random.to(torch.float32) + 0.5) * 2.0**-16
    up = uniform < 2 * mantissa - 1
    level = torch.where(up, exponent, exponent - 1)
    code = 1 - level
    tiny = y.abs() < 2.0**-LEAST_EXPONENT
    code = torch.where(tiny, torch.where(uniform < y.abs() * 2.0**LEAST_EXPONENT, 1 + LEAST_EXPONENT, 0), code)
    return (code * torch.sign(y).to(torch.int32)).to(torch.int8)


def add_exponents(left: Tensor, right: Tensor, random: Tensor) -> Tensor:
    """A code whose expected value is the sum of two codes' values.

    For ``2**-a`` and ``2**-b``, a <= b, d = b - a: of one sign the exponent a - 1 with probability ``2**-d``, else a;
    of opposite signs 0 where they are equal, else a + 1 with probability ``2**-(d - 1)``, else a.

    Args:
        left: INT8 codes.
        right: INT8 codes of the same shape.
        random: Uniform integers below 2**31.

    Source: the exponential reduction of Global-QSGD.
    """
    a, b = left.to(torch.int32), right.to(torch.int32)
    # The code of larger magnitude first; 0 is the smallest.
    rank_a, rank_b = (torch.where(c == 0, 255, c.abs()) for c in (a, b))
    large, small = torch.where(rank_a <= rank_b, a, b), torch.where(rank_a <= rank_b, b, a)
    distance = (small.abs() - large.abs()).clamp(0, 32)
    same = torch.sign(large) == torch.sign(small)
    chance = 2.0 ** (31 - distance.to(torch.float64) + torch.where(same, 0, 1))
    hit = random.to(torch.float64) < chance
    moved = large.abs() + torch.where(same, -1, 1) * hit.to(torch.int32)
    result = moved * torch.sign(large)
    result = torch.where(~same & (distance == 0), 0, result)
    return torch.where(small == 0, large, result).to(torch.int8)


def _exponent_values(codes: Tensor) -> Tensor:
    magnitude = torch.exp2(1.0 - codes.abs().to(torch.float32))
    return torch.where(codes == 0, 0.0, magnitude * torch.sign(codes))


def encode(x: Tensor, form: str, block: int, key: int) -> Encoded:
    """Codes with scales of this worker's own; the form ``exponent`` needs `encode_scaled`."""
    none = torch.empty(0, dtype=torch.float32, device=x.device)
    random = _uniform(key, len(x), x.device) if form in ("fp8", "bf16") else none
    if form == "bf16":
        return Encoded(_to_bf16(x, random), none)
    scales = _floored(_block_amax(x, block)) if len(x) else none
    if form == "int8":
        return Encoded(_codes(x, scales, 127, block, key).to(torch.int8), scales)
    usable = (scales > 0) & scales.isfinite()
    factor = torch.where(usable, torch.full_like(scales, FP8_LARGEST) / scales, 0.0)
    factor = _spread(factor, block, len(x))
    return Encoded(_to_fp8(torch.where(factor > 0, x * factor, 0.0), random), scales)


def decode(encoded: Encoded, form: str, block: int) -> Tensor:
    """Values of codes: FP32, shape of the codes."""
    codes, scales = encoded
    if form == "bf16":
        return codes.to(torch.float32)
    if form == "fp8":
        return _values(_from_fp8(codes), scales, int(FP8_LARGEST), block)
    return _values(codes.to(torch.float32), scales, 127, block)


def reduce(codes_ND: Tensor, scales_NB: Tensor, form: str, block: int, key: int) -> Encoded:
    """The mean of N workers' values, summed in FP32 in the order of workers, encoded again."""
    total = decode(Encoded(codes_ND[0], scales_NB[0]), form, block)
    for codes, scales in zip(codes_ND[1:], scales_NB[1:], strict=True):
        total = total + decode(Encoded(codes, scales), form, block)
    return encode(total * torch.full_like(total[:1], 1 / len(codes_ND)), form, block, key)


def headroom(workers: int) -> int:
    """Factor by which exponents leave room for a sum of so many: a power of two."""
    return 1 << (workers - 1).bit_length()


def encode_exponential(x: Tensor, scale: Tensor, workers: int, key: int) -> Tensor:
    """INT8 exponent codes of x divided by the common ``scale`` and by the headroom."""
    usable = bool((scale > 0) & scale.isfinite())
    if not usable:
        return torch.zeros(len(x), dtype=torch.int8, device=x.device)
    return encode_exponents(x / (scale * headroom(workers)), _uniform(key, len(x), x.device))


def reduce_exponential(codes_ND: Tensor, key: int) -> Tensor:
    """Codes of the sum of N workers' values: neighbours are added pairwise, level by level."""
    parts, draw = list(codes_ND.unbind(0)), 0
    while len(parts) > 1:
        added = []
        for left, right in zip(parts[::2], parts[1::2], strict=False):
            words = random_words(key, draw, len(left), left.device)
            added.append(add_exponents(left, right, words & 0x7FFFFFFF))
            draw += len(left)
        parts = added + ([parts[-1]] if len(parts) % 2 else [])
    total: Tensor = parts[0]
    return total


def decode_exponential(codes: Tensor, scale: Tensor, workers: int) -> Tensor:
    """The mean gradient from codes of the sum: FP32."""
    factor = torch.where(scale.isfinite(), scale * headroom(workers) / workers, math.nan)
    return _exponent_values(codes) * factor
