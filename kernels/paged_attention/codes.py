"""Keys and values as codes of 8 bits in halves.

Byte j of the first half of a head has the upper four bits of the codes j and j + D / 2, byte j of the second half their
lower bits: who reads the first half alone has 4-bit keys and values, at half the bytes and in the same memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

MIDDLE = 7.5
"""Mean of the numbers that four bits can be."""


def to_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of 8 bits, int8, and a scale for each vector (..., 1), FP32: its largest magnitude over 127."""
    wide = x.float()
    # A tensor as divisor: by a number, cards multiply with its reciprocal, which rounds differently.
    scale = wide.abs().amax(-1, keepdim=True) / torch.full_like(wide[..., :1], 127.0)
    scale = scale.clamp_min(torch.finfo(torch.float32).tiny)
    return (wide / scale).round_().to(torch.int8), scale


def in_halves(codes: Tensor) -> Tensor:
    """Codes (..., D), int8, with upper and lower bits apart, uint8."""
    first, second = codes.view(torch.uint8).chunk(2, -1)
    return torch.cat([(first & 0xF0) | (second >> 4), (first << 4) | (second & 0x0F)], -1)


def from_halves(halves: Tensor, *, upper: bool = False) -> Tensor:
    """Integers that codes in halves (..., D) stand for, FP32.

    Of ``upper`` halves alone (..., D / 2), the middle of what they may be.
    """
    if upper:
        return torch.cat([halves & 0xF0, halves << 4], -1).view(torch.int8).float() + MIDDLE
    high, low = halves.chunk(2, -1)
    return torch.cat([(high & 0xF0) | (low >> 4), (high << 4) | (low & 0x0F)], -1).view(torch.int8).float()


def put_into_pages(pool: Tensor, scales: Tensor | None, slots_N: Tensor, keys: Tensor, values: Tensor) -> None:
    """Put keys and values (N, heads, D) at slots of pages (2, heads, slots, D): in their type, or codes with scales."""
    for which, new in enumerate((keys, values)):
        new = new.transpose(0, 1)
        if scales is not None:
            codes, scale = to_codes(new)
            scales[which].index_copy_(1, slots_N, scale)
            new = in_halves(codes)
        pool[which].index_copy_(1, slots_N, new.to(pool.dtype))
