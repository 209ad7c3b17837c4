"""Quantizers of tensors of any shape: from floating point to codes and scales and back, unbiased or to nearest.

INT8: symmetric, zero point 0, codes in [-127, 127], ``scale = amax / 127`` of the slice that shares it.
FP8 (E4M3): codes are ``float8_e4m3fn``, ``scale = amax / 448``.

No scale is below the smallest normal number, which slices of zeros have. A slice that holds NaN or an infinity gets the
scale NaN, so that everything computed from it is NaN and a gradient scaler notices; its codes mean nothing.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from qsync_opt.kernels.compilation import library
from qsync_opt.kernels.options import KernelOptions
from qsync_opt.kernels.quantize.formats import (
    E4M3,
    INT8,
    EightBits,
    amax,
    bf16_results,
    codes_of,
    factor_of,
    in_one_pass,
    int8_rows,
    int8_values,
    scale_from,
)
from qsync_opt.kernels.quantize.operators import UNIT, dequantize_matrix, drawing, quantize_matrix, quantize_unchecked
from qsync_opt.kernels.quantize.random_bits import stream_key

INT8_MAX = 127


class Quantized(NamedTuple):
    """Codes and the FP32 scales that broadcast against them: ``value = codes * scale``."""

    codes: Tensor
    scale: Tensor


def _dense_order(x: Tensor) -> list[int]:
    """The dimensions of ``x`` from the slowest to the fastest in memory."""
    strides = x.stride()
    order: list[int] = []
    for dim in range(x.dim()):  # sorted() cannot be traced where a size is symbolic; comparisons can
        place = len(order)
        while place and strides[order[place - 1]] < strides[dim]:
            place -= 1
        order.insert(place, dim)
    return order


def _inverse(order: list[int]) -> list[int]:
    return [order.index(dim) for dim in range(len(order))]


def _on_card(
    x: Tensor, dims: tuple[int, ...] | None, form: EightBits, options: KernelOptions, stream: int
) -> Quantized | None:
    """Result of the quantizer of matrices, where memory order makes ``dims`` the rows or columns of one; else None."""
    if x.dim() == 2 and x.is_contiguous() and not torch.compiler.is_compiling():
        granularity = "tensor" if dims is None or len(dims) == 2 else "row" if dims == (1,) else "channel"
        return Quantized(*quantize_unchecked(x, form.dtype, granularity, **drawing(options, stream))[:2])
    order = _dense_order(x)
    dense = x.permute(order).contiguous()
    slices = _slices(order, dims)
    if slices is None:
        return None
    granularity, lead = slices
    matrix = dense.reshape(math.prod(dense.shape[:lead]), math.prod(dense.shape[lead:]))
    result = quantize_matrix(matrix, form.dtype, granularity=granularity, **drawing(options, stream))
    sizes = [1 if dims is None or dim in dims else x.shape[dim] for dim in order]
    back = _inverse(order)
    return Quantized(result.codes.view(dense.shape).permute(back), result.scale.view(sizes).permute(back))


def _slices(order: list[int], dims: tuple[int, ...] | None) -> tuple[str, int] | None:
    """Granularity of ``dims`` in the matrix of a tensor in memory order, and the leading dimensions that are its rows.

    None if they are neither the rows nor the columns of one.
    """
    shared = [dims is None or dim in dims for dim in order]
    count = sum(shared)
    if all(shared):
        return "tensor", 0
    if all(shared[-count:]) or count == 0:
        return "row", len(shared) - count
    return ("channel", count) if all(shared[:count]) else None


def _on_host(x: Tensor, dims: tuple[int, ...] | None, options: KernelOptions, stream: int) -> Quantized | None:
    """INT8 codes by one call of the compiled loops, where memory order makes ``dims`` the rows of a matrix."""
    plain = x.is_contiguous()
    order = list(range(x.dim())) if plain else _dense_order(x)
    slices = _slices(order, dims)
    if slices is None or slices[0] == "channel":
        return None
    dense = x if plain else x.permute(order).contiguous()
    key = stream_key(options.seed, options.offset, stream)
    sizes = [1 if dims is None or dim in dims else size for dim, size in enumerate(x.shape)]
    result = int8_rows(dense, sizes, options.rounding, key, options.step)
    if result is None:
        return None
    codes, scale = result
    return Quantized(codes if plain else codes.permute(_inverse(order)), scale)


def _quantize(
    x: Tensor, dims: tuple[int, ...] | None, form: EightBits, options: KernelOptions | None, stream: int
) -> Quantized:
    options = options or KernelOptions()
    if x.device.type == "cuda" and options.backend != "reference" and library.activate(UNIT):
        quantized = _on_card(x, dims, form, options, stream)
        if quantized is not None:
            return quantized
    elif form is INT8 and in_one_pass(x):
        quantized = _on_host(x, dims, options, stream)
        if quantized is not None:
            return quantized
    order = _dense_order(x)
    scale = scale_from(amax(x, dims), form)
    factor = factor_of(scale, form, options.rounding).permute(order)
    key = stream_key(options.seed, options.offset, stream)
    codes = codes_of(x.permute(order).contiguous(), factor, form, options.rounding, key, options.step)
    return Quantized(codes.permute(_inverse(order)), scale)


def quantize_int8(
    x: Tensor, dims: tuple[int, ...] | None = None, options: KernelOptions | None = None, stream: int = 0
) -> Quantized:
    """INT8 codes of ``x`` and their scales.

    Args:
        x: Floating tensor of any shape and layout; one that is not dense in any order of its dimensions is copied.
        dims: Dimensions that share a scale; None for one scale in all. For rows of (N, K): ``(1,)``.
        options: Rounding, seed and offset; the default rounds stochastically from seed 0.
        stream: Number of this draw among those of one operator call (input 0, weight 1).

    Returns:
        Codes of the shape and memory layout of ``x`` (dense), and FP32 scales that broadcast against them. The noise
        of an element depends on its place in memory order, on seed, offset and stream, and on nothing else.

    Source: Stochastic rounding as in S. Gupta et al., "Deep learning with limited numerical precision", ICML 2015;
        the counter-based noise is ours.
    """
    return _quantize(x, dims, INT8, options, stream)


def quantize_fp8(
    x: Tensor, dims: tuple[int, ...] | None = None, options: KernelOptions | None = None, stream: int = 0
) -> Quantized:
    """E4M3 codes of ``x`` and their scales; arguments and result as for :func:`quantize_int8`."""
    return _quantize(x, dims, E4M3, options, stream)


def dequantize(quantized: Quantized, dtype: torch.dtype) -> Tensor:
    """Values of the codes in ``dtype``, rounded once (the product with the scale is formed in FP32)."""
    codes, scale = quantized
    if dtype is torch.float32 and (values := int8_values(codes, scale)) is not None:
        return values
    on_host = scale.device.type == "cpu" and not torch.compiler.is_compiling()  # a number of the host breaks a graph
    if scale.numel() == 1 and on_host and codes.dtype is torch.int8:
        # Codes are exact in 16 bits; the product with a Python number is formed in FP32 and rounded once.
        return codes.to(dtype).mul_(scale.item())
    if codes.device.type == "cuda" and codes.dim() == 2:
        # A transposed matrix is dequantized in its own memory order.
        transposed = codes.stride(0) < codes.stride(1)
        matrix, factors = (codes.t(), scale.t()) if transposed else (codes, scale)
        values = dequantize_matrix(matrix, factors, dtype)
        return values.t() if transposed else values
    if codes.device.type == "cuda" and codes.dim() > 2:
        # In memory order a tensor is a matrix whose rows have a scale each, or one of a single row.
        order = _dense_order(codes)
        dense, factors = codes.permute(order), scale.permute(order)
        rows = 1 if scale.numel() == 1 else dense.shape[0]
        if dense.is_contiguous() and scale.numel() == factors.shape[0] == rows and dense.numel() > 0:
            values = dequantize_matrix(dense.reshape(rows, -1), factors.reshape(rows, 1), dtype)
            return values.view(dense.shape).permute(_inverse(order))
    return codes.to(torch.float32).mul_(scale).to(dtype)


def rescaled(
    sums: Tensor, x_scale: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype, channel: int
) -> Tensor:
    """``sums * (x_scale * scale) + bias`` formed in FP32, rounded once to ``dtype``; FP32 sums are overwritten.

    Args:
        sums: Of products of codes: INT32, or FP32 less than half a unit from the exact sums.
        x_scale: FP32 scales of the first operand, one or one per sample; broadcasts against ``sums``.
        scale: FP32 scales of the second operand, one or one per channel; broadcasts against ``sums``.
        bias: One number per channel, or None.
        dtype: Of the result.
        channel: Dimension of ``sums`` that is the channels; those before it are the samples.
    """
    if dtype is torch.bfloat16 and sums.dtype is torch.float32:
        result = bf16_results(sums, x_scale, scale, bias, channel)
        if result is not None:
            return result
    result = sums.round_() if sums.dtype is torch.float32 else sums.to(torch.float32)
    result.mul_(x_scale * scale)
    if bias is not None:
        result.add_(bias.to(torch.float32).reshape(-1, *(1,) * (sums.dim() - channel - 1)))
    return result.to(dtype)
