"""The linear layer in 8 bits: one autograd node for the layer, whatever the shape of its input.

The products of `int8` and `fp8` see a weight through a transposition and an input through a change of shape, each of
which is a call of the host and a node of the graph, forward and backward. Most of a transformer's operators are linear
layers, and in eager mode the host is what small ones wait for.

Axis letters: N rows, K contraction, M columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qsync_opt.kernels.autograd import fp8
from qsync_opt.kernels.autograd import products_eight as eight_bit
from qsync_opt.kernels.autograd import products_half as int8
from qsync_opt.kernels.autograd.float_modes import EIGHT_BITS, differentiated_once
from qsync_opt.kernels.autograd.products_eight import flattened
from qsync_opt.kernels.matmul import scaled_mm_unchecked
from qsync_opt.kernels.matmul import tiles as matmul_choices
from qsync_opt.kernels.options import KernelOptions
from qsync_opt.kernels.quantize import E4M3, INT8, Quantized, dequantize, once_per_version, quantize_fp8, quantize_int8


def _codes(x: Tensor, is_int8: bool, per_row: bool, options: KernelOptions, stream: int) -> Quantized:
    dims = (1,) if per_row and is_int8 else None
    return (quantize_int8 if is_int8 else quantize_fp8)(x, dims, options, stream)


def _weight_codes(weight: Tensor, is_int8: bool, options: KernelOptions) -> Quantized:
    per_row = options.weight_granularity == "channel"
    if options.weights == "call":
        return _codes(weight, is_int8, per_row, options, 1)
    facts = (is_int8, per_row, options.rounding, options.seed, options.backend)
    plain = weight.detach()
    return once_per_version(weight, facts, lambda: _codes(plain, is_int8, per_row, options, 1))


class _Linear(torch.autograd.Function):
    """8-bit forward, 16-bit backward: ``x @ weight.T + bias`` of (.., K), (M, K), (M,)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, is_int8: bool, options: KernelOptions
    ) -> Tensor:
        per_row = options.activation_granularity == "row"
        a = _codes(flattened(x), is_int8, per_row, options, 0)
        b = _weight_codes(weight, is_int8, options)
        half = options.half_dtype
        ctx.save_for_backward(*a, *b)
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.half, ctx.shape = half, x.shape
        if x.is_cuda and options.backend != "reference" and matmul_choices.activate():
            result = scaled_mm_unchecked(a.codes, b.codes, a.scale, b.scale, bias, half)
        else:
            turned = Quantized(b.codes.t(), b.scale.t())
            result = (int8 if is_int8 else fp8).scaled_product(a, turned, bias, half, options.backend)
        return result if x.dim() == 2 else result.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @differentiated_once(EIGHT_BITS)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_codes, x_scale, weight_codes, weight_scale = ctx.saved_tensors
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        grad_x = grad_weight = grad_bias = None
        grad = flattened(grad)
        if ctx.needs_input_grad[0]:
            grad_x = grad @ dequantize(Quantized(weight_codes, weight_scale), ctx.half)
            if x_dtype is not ctx.half:
                grad_x = grad_x.to(x_dtype)
            if len(ctx.shape) != 2:
                grad_x = grad_x.view(ctx.shape)
        if ctx.needs_input_grad[1]:
            x = dequantize(Quantized(x_codes, x_scale), ctx.half)
            grad_weight = int8.weight_gradient(grad, x, weight_dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = grad.sum(0, dtype=torch.float32)
            if bias_dtype is not torch.float32:
                grad_bias = grad_bias.to(bias_dtype)
        return grad_x, grad_weight, grad_bias, None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, precision: str, options: KernelOptions) -> Tensor:
    """A linear layer with gradients, in 8 bits forward and in 16 or 8 bits backward.

    Args:
        x: (.., K).
        weight: (M, K).
        bias: (M,) or None.
        precision: ``"INT8"`` or ``"FP8"`` (one scale per tensor).
        options: Rounding, granularity, 16-bit format, random stream, and in how many bits the backward pass runs.

    Returns:
        (.., M) in the 16-bit format.

    Source: As `int8.product` and `eight_bit.linear`.
    """
    is_int8 = precision == "INT8"
    if options.backward == "eight":
        return eight_bit.linear(x, weight, bias, INT8.dtype if is_int8 else E4M3.dtype, options)
    result: Tensor = _Linear.apply(x, weight, bias, is_int8, options)  # type: ignore[no-untyped-call]
    return result
