"""From scaled values to 8-bit codes, to nearest or stochastically: the only place of plain PyTorch that rounds.

With ``u`` the 16-bit noise of an element (odd, symmetric around zero; random_bits.py):

- INT8: ``round_half_even(y + u / 65536)``. The factor is one unit in the last place below ``1 / scale``, so that the
  largest value with the largest noise stays below 127.5 (two roundings of FP32 could lift it there).
- FP8: the fraction of ``|y|`` below the last bit of its code is cut after ``(u + 32768) / 65536`` of the bit was added;
  subnormal codes have the step of the smallest normal. Codes beyond the largest become the largest.

Both leave exact values alone and miss the expectation of any other by at most 2**-16 of a step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qsync_opt.kernels.quantize.formats import INT8, EightBits
from qsync_opt.kernels.quantize.random_bits import centred_noise

# On CPU, work in pieces that stay in the second-level cache (FP32 values, noise and codes together under 1 MiB).
CHUNK = 1 << 16


def factor_of(scale: Tensor, form: EightBits, rounding: str) -> Tensor:
    """What values are multiplied by before they are rounded: ``1 / scale``, one unit less where noise is added."""
    inverse = scale.reciprocal()
    if form is not INT8 or rounding == "nearest":
        return inverse
    return (inverse.view(torch.int32) - 1).view(torch.float32)


def int8_codes(codes: Tensor, values: Tensor, inverse: Tensor | None, key: int | Tensor | None) -> None:
    """Write the codes of ``values * inverse`` to ``codes``, piece by piece on CPU.

    Args:
        codes: int8, flat.
        values: Dense, any shape; overwritten if ``inverse`` is None.
        inverse: FP32, from :func:`factor_of`, broadcasts against ``values``; None where they are scaled already.
        key: Of the random stream; None rounds to nearest.
    """
    count = codes.numel()
    if count == 0:
        return
    per_slice = inverse is not None and inverse.numel() > 1
    # A graph that is compiled for any size cannot say how many pieces there are.
    whole = per_slice or values.device.type != "cpu" or torch.compiler.is_compiling()
    factor = inverse if per_slice or inverse is None else inverse.reshape(1)
    flat = values if per_slice else values.view(-1)
    for start in (0,) if whole else range(0, count, CHUNK):
        piece = flat if whole else flat[start : start + CHUNK]
        # Without a factor the values are a temporary of the caller, free to be overwritten.
        scaled = (piece if factor is None else piece.to(torch.float32) * factor).view(-1)
        if key is not None:
            noise = centred_noise(key, start, scaled.numel(), codes.device)
            # Written out: compiled with dynamic=True, a number that has a name elsewhere is a variable.
            scaled.add_(noise.to(torch.float32), alpha=2.0**-16)
        codes[start : start + scaled.numel()].copy_(scaled.round_())


def fp8_codes(scaled: Tensor, form: EightBits, key: int | Tensor | None) -> Tensor:
    """FP8 codes of values in units of their scale.

    Args:
        scaled: FP32, dense, any shape.
        form: E4M3 or E5M2.
        key: Of the random stream; None rounds to nearest even.
    """
    if key is None:
        return scaled.clamp(-form.largest, form.largest).to(form.dtype)
    noise = centred_noise(key, 0, scaled.numel(), scaled.device).to(torch.int32).view(scaled.shape)
    dropped = 23 - form.mantissa_bits
    magnitude = scaled.abs()
    # Lifted by the smallest normal number, subnormals have its exponent, and the same bits below their last.
    smallest = 2.0**form.min_exponent
    tiny = magnitude < smallest
    bits = torch.where(tiny, magnitude + smallest, magnitude).view(torch.int32)
    bits = (bits + ((noise + 32768) << (dropped - 16))) >> dropped
    first_normal = 1 << form.mantissa_bits
    lowest = (127 + form.min_exponent) << form.mantissa_bits
    largest = int(torch.tensor(form.largest).to(form.dtype).view(torch.uint8))
    codes = (bits - torch.where(tiny, lowest, lowest - first_normal)).clamp_(0, largest)
    codes = codes | torch.where(scaled.signbit(), 0x80, 0)
    return codes.to(torch.uint8).view(form.dtype)
