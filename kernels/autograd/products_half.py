"""INT8 products and convolutions with gradients: integer forward pass, 16-bit backward pass, INT8 saved for it.

Forward: both operands are quantized, multiplied exactly, scaled in FP32 and rounded once to the 16-bit format.
Backward: codes are dequantized to the 16-bit format; the gradients of the rounded operands pass straight through the
quantizer, as if it were the identity (with stochastic rounding its expectation is). A gradient is delivered in the
element type of its operand, FP32 for a master weight; on CUDA that of a matrix product keeps its FP32 sums, on CPU and
for convolutions it passes through the 16-bit result of the product.

Axis letters: B batch, N rows or samples, K contraction, M columns or output channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qsync_opt.kernels.autograd import products_eight as eight_bit
from qsync_opt.kernels.autograd.float_modes import EIGHT_BITS, differentiated_once
from qsync_opt.kernels.compilation import library
from qsync_opt.kernels.convolution import scaled_conv2d
from qsync_opt.kernels.matmul import exact_convolution, int8_bmm, int8_mm, scaled_mm
from qsync_opt.kernels.matmul import integer as onednn
from qsync_opt.kernels.matmul import tiles as matmul_choices
from qsync_opt.kernels.options import KernelOptions
from qsync_opt.kernels.quantize import INT8, Quantized, dequantize, once_per_version, quantize_int8

HALF_DTYPES: dict[str, torch.dtype] = {"BF16": torch.bfloat16, "FP16": torch.float16}


def _rescaled(sums: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``sums * scale + bias`` formed in FP32, rounded once to ``dtype``."""
    result = sums.to(torch.float32).mul_(scale)
    if bias is not None:
        result.add_(bias.to(torch.float32))
    return result.to(dtype)


def _contiguous_along_k(codes: Tensor) -> Tensor:
    return codes if codes.stride(-1) == 1 else codes.contiguous()


def fused_product(a: Quantized, b: Quantized, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The same by the fused CUDA kernels; codes that are not contiguous along K are copied once."""
    a_codes, b_codes = _contiguous_along_k(a.codes), _contiguous_along_k(b.codes.mT)
    return scaled_mm(a_codes, b_codes, a.scale, b.scale, bias, out_dtype=dtype)


def scaled_product(a: Quantized, b: Quantized, bias: Tensor | None, dtype: torch.dtype, backend: str) -> Tensor:
    """``(a @ b) + bias`` of quantized operands: (N, K) (K, M) or (B, N, K) (B, K, M), in ``dtype``."""
    if a.codes.device.type == "cuda" and backend != "reference" and matmul_choices.activate():
        return fused_product(a, b, bias, dtype)
    if a.codes.dim() == 3:
        return _rescaled(int8_bmm(a.codes, b.codes, backend), a.scale * b.scale, bias, dtype)
    # oneDNN's packed weights cannot be traced.
    fused = backend != "reference" and a.codes.device.type == "cpu" and not torch.compiler.is_compiling()
    fused = fused and dtype is not torch.float16
    if fused and a.scale.numel() == 1 and min(a.codes.numel(), b.codes.numel()) > 0 and onednn.has_onednn_linear():
        return onednn.linear(a, b, bias, dtype)
    return _rescaled(int8_mm(a.codes, b.codes, backend), a.scale * b.scale, bias, dtype)


def scaled_convolution(
    x: Quantized, weight: Quantized, bias: Tensor | None, geometry: tuple[Any, ...], dtype: torch.dtype, backend: str
) -> Tensor:
    """Convolution of quantized operands plus bias, in ``dtype``."""
    if runs_compiled(x.codes, backend):
        return convolve_on_card(x, weight, bias, geometry, dtype)
    fused = backend != "reference" and x.codes.device.type == "cpu" and not torch.compiler.is_compiling()
    fused = fused and dtype is not torch.float16
    if fused and x.scale.numel() == 1 and x.codes.numel() > 0 and onednn.has_onednn_convolution():
        return onednn.convolution(x, weight, bias, geometry, dtype)
    spatial = (1,) * (x.codes.dim() - 2)
    scale = x.scale * weight.scale.reshape(1, -1, *spatial)
    shaped = None if bias is None else bias.reshape(1, -1, *spatial)
    return _rescaled(exact_convolution(x.codes, weight.codes, geometry, backend), scale, shaped, dtype)


def runs_compiled(x: Tensor, backend: str) -> bool:
    """Whether the fused CUDA kernels convolve ``x``: (N, C, H, W) or (N, C, W), where they are built."""
    return x.device.type == "cuda" and x.dim() in (3, 4) and backend != "reference" and library.activate("convolution")


def convolve_on_card(
    x: Quantized, weight: Quantized, bias: Tensor | None, geometry: tuple[Any, ...], dtype: torch.dtype
) -> Tensor:
    """Convolution of quantized operands plus bias by the fused CUDA kernels, in ``dtype``, channels-last."""
    stride, padding, dilation, _, _, groups = geometry
    x_codes, weight_codes, line = x.codes, weight.codes, x.codes.dim() == 3
    if line:
        # A sequence is an image of one row.
        x_codes, weight_codes = x_codes.unsqueeze(2), weight_codes.unsqueeze(2)
        stride, padding, dilation = (1, *stride), (0, *padding), (1, *dilation)
    result = scaled_conv2d(
        x_codes,
        weight_codes,
        x.scale,
        weight.scale,
        bias,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        out_dtype=dtype,
    )
    return result.squeeze(2) if line else result


def weight_gradient(a: Tensor, grad: Tensor, dtype: torch.dtype) -> Tensor:
    """``a.mT @ grad`` of 16-bit operands, in ``dtype``; of matrices with FP32 sums and result where that is FP32."""
    if dtype is torch.float32 and a.dim() == 2:
        if a.device.type == "cuda":
            return torch.mm(a.mT, grad, out_dtype=torch.float32)
        return a.float().mT @ grad.float()  # the same sums of the same products
    return (a.mT @ grad).to(dtype)


def product_slices(
    a: Tensor, b: Tensor, options: KernelOptions
) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Dimensions of (.., N, K) and (.., K, M) that share a scale; a second operand of two dimensions is a weight."""
    per_row = options.activation_granularity == "row"
    per_column = options.weight_granularity == "channel" if b.dim() == 2 else per_row
    return (a.dim() - 1,) if per_row else None, (b.dim() - 2,) if per_column else None


def convolution_slices(
    x: Tensor, weight: Tensor, options: KernelOptions
) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Dimensions of an input and a weight of a convolution that share a scale: per sample, per output channel."""
    per_sample = options.activation_granularity == "row"
    per_channel = options.weight_granularity == "channel"
    return (
        tuple(range(1, x.dim())) if per_sample else None,
        tuple(range(1, weight.dim())) if per_channel else None,
    )


def quantized_weight(b: Tensor, dims: tuple[int, ...] | None, options: KernelOptions) -> Quantized:
    """Codes of a weight with one scale per slice that ``dims`` span, computed once per step if the options say so."""
    if options.weights == "call":
        return quantize_int8(b, dims, options, stream=1)
    facts = ("INT8", dims, options.rounding, options.seed, options.backend)
    plain = b.detach()
    return once_per_version(b, facts, lambda: quantize_int8(plain, dims, options, stream=1))


class _Int8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, bias: Tensor | None, options: KernelOptions) -> Tensor:
        a_dims, b_dims = product_slices(a, b, options)
        a_codes = quantize_int8(a, a_dims, options, stream=0)
        b_codes = quantized_weight(b, b_dims, options) if b.dim() == 2 else quantize_int8(b, b_dims, options, stream=1)
        ctx.save_for_backward(*a_codes, *b_codes)
        ctx.dtypes = (a.dtype, b.dtype, None if bias is None else bias.dtype)
        ctx.half = HALF_DTYPES[options.half_format]
        return scaled_product(a_codes, b_codes, bias, ctx.half, options.backend)

    @staticmethod
    @differentiated_once(EIGHT_BITS)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a_codes, a_scale, b_codes, b_scale = ctx.saved_tensors
        a_dtype, b_dtype, bias_dtype = ctx.dtypes
        grad_a = grad_b = grad_bias = None
        if ctx.needs_input_grad[0]:
            b = dequantize(Quantized(b_codes, b_scale), ctx.half)
            grad_a = (grad @ b.mT).to(a_dtype)
        if ctx.needs_input_grad[1]:
            a = dequantize(Quantized(a_codes, a_scale), ctx.half)
            grad_b = weight_gradient(a, grad, b_dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = grad.sum(0, dtype=torch.float32).to(bias_dtype)
        return grad_a, grad_b, grad_bias, None


class _Int8Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: tuple[Any, ...], options: KernelOptions
    ) -> Tensor:
        x_dims, weight_dims = convolution_slices(x, weight, options)
        x_codes = quantize_int8(x, x_dims, options, stream=0)
        weight_codes = quantized_weight(weight, weight_dims, options)
        if x.dim() == 4 and runs_compiled(x, options.backend):
            # Once, in one byte per element: the kernel, and cuDNN in the backward pass, read channels-last tensors.
            x_codes = Quantized(x_codes.codes.contiguous(memory_format=torch.channels_last), x_codes.scale)
        ctx.save_for_backward(*x_codes, *weight_codes)
        ctx.geometry, ctx.half = geometry, HALF_DTYPES[options.half_format]
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        return scaled_convolution(x_codes, weight_codes, bias, geometry, ctx.half, options.backend)

    @staticmethod
    @differentiated_once(EIGHT_BITS)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_codes, x_scale, weight_codes, weight_scale = ctx.saved_tensors
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        x = dequantize(Quantized(x_codes, x_scale), ctx.half)
        weight = dequantize(Quantized(weight_codes, weight_scale), ctx.half)
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], False]
        grad_x, grad_weight, _ = torch.ops.aten.convolution_backward(grad, x, weight, None, *ctx.geometry, wanted)
        grad_bias = None
        if ctx.needs_input_grad[2]:
            grad_bias = grad.sum([0, *range(2, grad.dim())], dtype=torch.float32).to(bias_dtype)
        return (
            grad_x.to(x_dtype) if wanted[0] else None,
            grad_weight.to(weight_dtype) if wanted[1] else None,
            grad_bias,
            None,
            None,
        )


def product(a: Tensor, b: Tensor, bias: Tensor | None, options: KernelOptions) -> Tensor:
    """INT8 product with gradients.

    Args:
        a: (N, K), or (B, N, K) when ``b`` is batched.
        b: (K, M), scaled as a weight; or (B, K, M), scaled as an activation.
        bias: (M,) or None.
        options: Rounding, granularity, 16-bit format, random stream, and in how many bits the backward pass runs.

    Returns:
        (N, M) or (B, N, M) in the 16-bit format.

    Source: Data flow of an INT8 operator as in QSync (INT8 forward, 16-bit backward, FP32 weight gradient); rounding
        unbiased instead of truncating, results in 16 bits instead of FP32.
    """
    if options.backward == "eight" and b.dim() == 2:
        return eight_bit.product(a, b, bias, INT8.dtype, options)
    result: Tensor = _Int8Product.apply(a, b, bias, options)  # type: ignore[no-untyped-call]
    return result


def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, geometry: tuple[Any, ...], options: KernelOptions
) -> Tensor:
    """INT8 convolution with gradients; geometry as ``torch.convolution`` takes it after the bias."""
    result: Tensor = _Int8Convolution.apply(x, weight, bias, geometry, options)  # type: ignore[no-untyped-call]
    return result
