"""Weights in few bits: round to nearest in groups along the input, and a product that widens them again.

Source: ours; symmetric codes -(2**(bits-1) - 1) ... 2**(bits-1) - 1, one scale per output row and group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from qsync_opt.errors import UnsupportedError

GROUP = 128
"""Inputs that share a scale."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Codes of 8 bits, or two of 4 bits in a byte (even inputs in the low half), with scales; or plain numbers.

    ``codes`` is (out, in) for 8 bits and (out, in / 2) for 4; ``scales`` is (out, in / group).
    """

    bits: int
    codes: torch.Tensor
    scales: torch.Tensor | None
    shape: tuple[int, int]

    @property
    def bytes(self) -> int:
        """Memory of codes and scales."""
        tensors = (self.codes,) if self.scales is None else (self.codes, self.scales)
        return sum(t.numel() * t.element_size() for t in tensors)


def group_size(inputs: int) -> int:
    """Inputs that share a scale: the largest even divisor of ``inputs`` that is at most `GROUP`."""
    return next(
        size for size in range(min(GROUP, inputs), 0, -1) if inputs % size == 0 and (size % 2 == 0 or size == 1)
    )


def pack(
    weight: torch.Tensor, bits: int, group: int | None = None, *, dtype: torch.dtype | None = None
) -> PackedWeight:
    """Pack a matrix (out, in) into 4 or 8 bits, or keep it in ``dtype`` for 16 and 32.

    Raises:
        UnsupportedError: Other widths, or a number of inputs that groups do not divide.
    """
    rows, inputs = weight.shape
    if bits in (16, 32):
        return PackedWeight(bits, weight.to(dtype or weight.dtype).contiguous(), None, (rows, inputs))
    if bits not in (4, 8):
        raise UnsupportedError(f"weights are asked for in {bits} bits, but allowed are 4, 8, 16 and 32")
    group = group or group_size(inputs)
    if inputs % group or (bits == 4 and inputs % 2):
        raise UnsupportedError(
            f"a weight has {inputs} inputs, which groups of {group} do not divide; give another group"
        )
    most = 2 ** (bits - 1) - 1
    blocks = weight.float().view(rows, inputs // group, group)
    scales = blocks.abs().amax(-1) / most
    codes = torch.round(blocks / scales.clamp_min(1e-30)[..., None]).clamp_(-most, most).to(torch.int8)
    codes = codes.view(rows, inputs)
    if bits == 4:
        codes = ((codes[:, 0::2] & 15) | (codes[:, 1::2] << 4)).to(torch.int8)
    return PackedWeight(bits, codes, scales.to(torch.float32), (rows, inputs))


def unpack(packed: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """The numbers that a packed weight stands for, (out, in)."""
    if packed.scales is None:
        return packed.codes.to(dtype)
    codes = packed.codes
    if packed.bits == 4:
        low, high = (codes << 4) >> 4, codes >> 4  # arithmetic shifts keep the sign
        codes = torch.stack([low, high], dim=-1).view(packed.shape)
    rows, inputs = packed.shape
    groups = packed.scales.shape[1]
    wide = codes.view(rows, groups, inputs // groups).to(dtype) * packed.scales[..., None].to(dtype)
    return wide.view(rows, inputs)


def linear(x: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias`` with the weight widened to the type of ``x``."""
    return F.linear(x, unpack(packed, x.dtype), bias)
