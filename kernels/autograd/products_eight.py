"""Matrix products with all three products in 8 bits: forward, input gradient and weight gradient.

Every product reads codes that are contiguous along its contraction. With x (N, K) and a weight w (M, K):

    forward            x (N, K)    w (M, K)    scales per tensor, row of x, row of w
    input gradient     g (N, M)    w_T (K, M)  g per tensor, w_T per tensor or column of w
    weight gradient    g_T (M, N)  x_T (K, N)  g per tensor, x_T per tensor or column of x

The gradient g of the result is rounded stochastically, so that both gradients are unbiased given x and w. Where an
operand has one scale for the whole tensor its transposed codes are written in the pass that rounds it; else its
columns are scaled by themselves in a second pass, because a scale may not change along a contraction. Saved for the
backward pass are the codes x_T and w_T alone.

Axis letters: N rows, K contraction of the forward pass, M columns.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qsync_opt.kernels.autograd.float_modes import EIGHT_BITS, differentiated_once
from qsync_opt.kernels.matmul import scaled_mm_unchecked
from qsync_opt.kernels.options import KernelOptions
from qsync_opt.kernels.quantize import E5M2, INT8, once_per_version, quantize_unchecked, stream_key

# Numbers of the random streams of one call.
_INPUT, _WEIGHT, _GRADIENT, _INPUT_COLUMNS, _WEIGHT_COLUMNS = 0, 1, 2, 3, 4


class Operand(NamedTuple):
    """Codes of a matrix along its rows and along its columns, each with its scales; what nobody needs is None."""

    codes: Tensor
    scale: Tensor
    turned: Tensor | None
    turned_scale: Tensor | None


def quantize_operand(
    x: Tensor, dtype: torch.dtype, granularity: str, options: KernelOptions, streams: tuple[int, int], turned: bool
) -> Operand:
    """Codes of ``x`` (N, K) with scales per ``"tensor"`` or ``"row"``; if wanted, codes of its transposition (K, N)."""
    seed, offset, rounding, step, backend = (
        options.seed,
        options.offset,
        options.rounding,
        options.step,
        options.backend,
    )
    key = stream_key(seed, offset, streams[0])
    if granularity == "tensor":
        codes, scale, columns = quantize_unchecked(x, dtype, granularity, rounding, key, step, turned, backend)
        return Operand(codes, scale, columns, scale if turned else None)
    codes, scale, _ = quantize_unchecked(x, dtype, granularity, rounding, key, step, False, backend)
    if not turned:
        return Operand(codes, scale, None, None)
    key = stream_key(seed, offset, streams[1])
    _, column_scale, columns = quantize_unchecked(x, dtype, "channel", rounding, key, step, True, backend)
    return Operand(codes, scale, columns, column_scale)


def weight_operand(
    weight: Tensor,
    dtype: torch.dtype,
    options: KernelOptions,
    turned: bool,
    streams: tuple[int, int] = (_WEIGHT, _WEIGHT_COLUMNS),
) -> Operand:
    """:func:`quantize_operand` of a weight (M, K), computed once per step if the options say so.

    Codes of FP8 have one scale for the tensor, whatever the options say: so do their products on every card.
    """
    channels = options.weight_granularity == "channel" and dtype is INT8.dtype
    granularity = "row" if channels else "tensor"
    if options.weights == "call":
        return quantize_operand(weight, dtype, granularity, options, streams, turned)
    facts = (dtype, granularity, options.rounding, options.seed, options.backend, turned, streams)
    plain = weight.detach()
    return once_per_version(
        weight, facts, lambda: quantize_operand(plain, dtype, granularity, options, streams, turned)
    )


class _EightBitProduct(torch.autograd.Function):
    """``x @ weight.T + bias`` of (.., K), (M, K), (M,): shapes are changed in here, where that makes no graph nodes."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, options: KernelOptions
    ) -> Tensor:
        granularity = "row" if options.activation_granularity == "row" else "tensor"
        streams = (_INPUT, _INPUT_COLUMNS)
        a = quantize_operand(flattened(x), dtype, granularity, options, streams, ctx.needs_input_grad[1])
        b = weight_operand(weight, dtype, options, ctx.needs_input_grad[0])
        ctx.save_for_backward(a.turned, a.turned_scale, b.turned, b.turned_scale)
        ctx.options, ctx.gradient_dtype = options, dtype if dtype is INT8.dtype else E5M2.dtype
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.shape = x.shape
        result = scaled_mm_unchecked(a.codes, b.codes, a.scale, b.scale, bias, options.half_dtype)
        return result if x.dim() == 2 else result.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @differentiated_once(EIGHT_BITS)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_turned, x_scale, weight_turned, weight_scale = ctx.saved_tensors
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        options: KernelOptions = ctx.options
        grad_x = grad_weight = grad_bias = None
        grad = flattened(grad)
        if x_turned is not None or weight_turned is not None:
            key = stream_key(options.seed, options.offset, _GRADIENT)
            codes, scale, turned = quantize_unchecked(
                grad,
                ctx.gradient_dtype,
                "tensor",
                "stochastic",
                key,
                options.step,
                x_turned is not None,
                options.backend,
            )
            if weight_turned is not None:
                # FP32 at once where it is wanted; a compiled graph fuses the cast with what reads it, and moves half.
                wide = x_dtype is torch.float32 and not torch.compiler.is_compiling()
                wanted = torch.float32 if wide else options.half_dtype
                grad_x = scaled_mm_unchecked(codes, weight_turned, scale, weight_scale, None, wanted)
                if x_dtype is not wanted:
                    grad_x = grad_x.to(x_dtype)
                if len(ctx.shape) != 2:
                    grad_x = grad_x.view(ctx.shape)
            if x_turned is not None and turned is not None:
                wanted = torch.float32 if weight_dtype is torch.float32 else options.half_dtype
                grad_weight = scaled_mm_unchecked(turned, x_turned, scale, x_scale, None, wanted)
                if weight_dtype is not wanted:
                    grad_weight = grad_weight.to(weight_dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = grad.sum(0, dtype=torch.float32)
            if bias_dtype is not torch.float32:
                grad_bias = grad_bias.to(bias_dtype)
        return grad_x, grad_weight, grad_bias, None, None


def flattened(x: Tensor) -> Tensor:
    """A tensor (.., K) as a matrix (N, K)."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, options: KernelOptions) -> Tensor:
    """``x @ weight.T + bias`` of (.., K), (M, K), (M,) with codes of ``dtype``, both gradients in 8 bits too.

    Gradients are in E5M2 where the codes are FP8, for its range. The result is in the 16-bit format.

    Source: Unbiased 8-bit gradients as in R. Banner et al., "Scalable methods for 8-bit training of neural networks",
        NeurIPS 2018, and J. Chen et al., "A statistical framework for low-bitwidth training", NeurIPS 2020; scales per
        tensor and shared codes are ours.
    """
    result: Tensor = _EightBitProduct.apply(x, weight, bias, dtype, options)  # type: ignore[no-untyped-call]
    return result


def product(a: Tensor, b: Tensor, bias: Tensor | None, dtype: torch.dtype, options: KernelOptions) -> Tensor:
    """``a @ b + bias`` of (N, K), (K, M), as :func:`linear`."""
    return linear(a, b.t(), bias, dtype, options)
