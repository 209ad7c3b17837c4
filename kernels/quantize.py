"""Quantizers: from floating point to codes and scales and back, unbiased or to nearest. The only place that rounds.

INT8: symmetric, zero point 0, codes in [-127, 127], ``scale = amax / 127`` of the slice that shares it.
FP8 (E4M3): codes are ``float8_e4m3fn``, ``scale = amax / 448``.

Special values: a slice of zeros gets the smallest normal scale and codes 0. A slice that holds NaN or an infinity gets
the scale NaN, so that everything computed from it is NaN and a gradient scaler notices; its codes mean nothing.
A slice so small that ``amax / 127`` is below the smallest normal number uses that number as its scale.

Axis letters: N rows, K contraction, M columns or output channels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qsync_opt.kernels.options import KernelOptions
from qsync_opt.kernels.random_bits import centred_noise, stream_key

INT8_MAX = 127
FP8_MAX = 448.0
_FP8_MANTISSA_BITS = 3
_FP8_MIN_EXPONENT = -6
_SMALLEST_NORMAL = 2.0**-126
_NOISE_STEP = 2.0**-16
# On CPU, work in pieces that stay in the second-level cache (FP32 values, noise and codes together under 1 MiB).
_CHUNK = 1 << 16


class Quantized(NamedTuple):
    """Codes and the FP32 scales that broadcast against them: ``value = codes * scale``."""

    codes: Tensor
    scale: Tensor


def _amax(x: Tensor, dims: tuple[int, ...] | None) -> Tensor:
    """Largest magnitude per slice, FP32, shaped to broadcast against ``x``; NaN where the slice holds NaN."""
    shape = [1] * x.dim() if dims is None else [1 if d in dims else s for d, s in enumerate(x.shape)]
    if x.numel() == 0:
        return x.new_zeros(shape, dtype=torch.float32)
    if dims is None:
        low, high = torch.aminmax(x)
        return torch.maximum(high, -low).to(torch.float32).reshape(shape)
    reduced = list(dims)
    return torch.maximum(x.amax(reduced, keepdim=True), -x.amin(reduced, keepdim=True)).to(torch.float32)


def _scale(amax: Tensor, largest: float) -> Tensor:
    scale = (amax / largest).clamp_min_(_SMALLEST_NORMAL)
    return scale + (scale - scale)  # an infinite amax becomes NaN, any other scale is unchanged


def _dense_order(x: Tensor) -> list[int]:
    """The dimensions of ``x`` from the slowest to the fastest in memory."""
    strides = x.stride()
    return sorted(range(x.dim()), key=lambda d: -strides[d])


def int8_scale(x: Tensor, dims: tuple[int, ...] | None) -> Tensor:
    """Scale of each slice of ``x`` that is spanned by ``dims`` (None: all), FP32, sizes 1 along ``dims``."""
    return _scale(_amax(x, dims), INT8_MAX)


def quantize_int8(
    x: Tensor, dims: tuple[int, ...] | None = None, options: KernelOptions | None = None, stream: int = 0
) -> Quantized:
    """INT8 codes of ``x`` and their scales.

    Args:
        x: Floating tensor of any shape and layout.
        dims: Dimensions that share a scale; None for one scale in all. For rows of (N, K): ``(1,)``.
        options: Rounding, seed and offset; the default rounds stochastically from seed 0.
        stream: Number of this draw among those of one operator call (input 0, weight 1).

    Returns:
        Codes of the shape and memory layout of ``x`` (dense), and FP32 scales that broadcast against them. The noise
        of an element depends on its place in memory order, on seed, offset and stream, and on nothing else.

    Source: Stochastic rounding as in S. Gupta et al., "Deep learning with limited numerical precision", ICML 2015;
        the counter-based noise is ours.
    """
    options = options or KernelOptions()
    order = _dense_order(x)
    dense = x.permute(order).contiguous()
    scale = int8_scale(x, dims)
    inverse = scale.reciprocal().permute(order)
    key = stream_key(options.seed, options.offset, stream) if options.rounding == "stochastic" else None
    codes = torch.empty(dense.shape, dtype=torch.int8, device=x.device)
    if inverse.numel() == 1 or dense.device.type != "cpu" or dense.numel() <= _CHUNK:
        _round_to(codes.view(-1), dense, inverse, key)
    else:
        _round_to(codes.view(-1), dense * inverse, None, key)
    back = [0] * x.dim()
    for position, dim in enumerate(order):
        back[dim] = position
    return Quantized(codes.permute(back), scale)


def _round_to(codes: Tensor, values: Tensor, inverse: Tensor | None, key: int | None) -> None:
    """Write ``round(values * inverse)`` to ``codes`` (flat), piece by piece on CPU."""
    count = codes.numel()
    if count == 0:
        return
    per_slice = inverse is not None and inverse.numel() > 1
    step = count if per_slice or values.device.type != "cpu" else _CHUNK
    factor = inverse if per_slice or inverse is None else inverse.reshape(1)
    flat = values if per_slice else values.view(-1)
    for start in range(0, count, step):
        piece = flat if per_slice else flat[start : start + step]
        # Without a factor the values are a temporary of the caller, free to be overwritten.
        scaled = (piece if factor is None else piece.to(torch.float32) * factor).view(-1)
        if key is not None:
            noise = centred_noise(key, start, scaled.numel(), codes.device)
            scaled.add_(noise.to(torch.float32), alpha=_NOISE_STEP)
        # A value of 127 with the largest noise may round to 128, hence the clamp.
        codes[start : start + scaled.numel()].copy_(scaled.round_().clamp_(-INT8_MAX, INT8_MAX))


def quantize_fp8(
    x: Tensor, dims: tuple[int, ...] | None = None, options: KernelOptions | None = None, stream: int = 0
) -> Quantized:
    """E4M3 codes of ``x`` and their scales; arguments and result as for :func:`quantize_int8`."""
    options = options or KernelOptions()
    scale = _scale(_amax(x, dims), FP8_MAX)
    scaled = x.to(torch.float32) / scale
    if options.rounding == "stochastic":
        key = stream_key(options.seed, options.offset, stream)
        noise = centred_noise(key, 0, x.numel(), x.device).to(torch.float32).view(x.shape)
        _, exponent = torch.frexp(scaled)  # |x| in [2**(e-1), 2**e)
        step_exponent = (exponent - 1).clamp_min_(_FP8_MIN_EXPONENT) - _FP8_MANTISSA_BITS
        scaled = torch.ldexp(torch.ldexp(scaled, -step_exponent).add_(noise, alpha=_NOISE_STEP).round_(), step_exponent)
    return Quantized(scaled.clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale)


def dequantize(quantized: Quantized, dtype: torch.dtype) -> Tensor:
    """Values of the codes in ``dtype``, rounded once (the product with the scale is formed in FP32)."""
    codes, scale = quantized
    if scale.numel() == 1 and scale.device.type == "cpu" and codes.dtype is torch.int8:
        # Codes are exact in 16 bits; the product with a Python number is formed in FP32 and rounded once.
        return codes.to(dtype).mul_(scale.item())
    return codes.to(torch.float32).mul_(scale).to(dtype)
