"""FP8 (E4M3) products with gradients: FP8 forward pass on cards that have it, 16-bit backward pass.

Operands are scaled per tensor, which every card with FP8 multiplies. ``torch._scaled_mm`` wants both sizes of the
second operand in multiples of 16; they are padded with zeros.

Axis letters: N rows, K contraction, M columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qsync_opt.kernels.autograd import products_eight as eight_bit
from qsync_opt.kernels.autograd.float_modes import EIGHT_BITS, differentiated_once
from qsync_opt.kernels.autograd.products_half import HALF_DTYPES, fused_product, weight_gradient
from qsync_opt.kernels.matmul import tiles as matmul_choices
from qsync_opt.kernels.options import KernelOptions
from qsync_opt.kernels.quantize import E4M3, Quantized, dequantize, once_per_version, quantize_fp8


def scaled_product(
    a: Quantized, b: Quantized, bias: Tensor | None, dtype: torch.dtype, backend: str = "auto"
) -> Tensor:
    """``(a @ b) * scales + bias`` of E4M3 codes (N, K), (K, M) with one scale each, in ``dtype``."""
    if a.codes.device.type == "cuda" and backend != "reference" and matmul_choices.activate():
        return fused_product(a, b, bias, dtype)
    (n, k), m = a.codes.shape, b.codes.shape[1]
    if min(n, k, m) == 0:
        empty = torch.zeros((n, m), dtype=dtype, device=a.codes.device)
        return empty if bias is None else empty + bias.to(dtype)
    k_pad, m_pad = -k % 16, -m % 16
    # Bytes are padded: torch cannot pad FP8 itself, and the byte 0 is the value 0.
    a_bytes = torch.nn.functional.pad(a.codes.contiguous().view(torch.uint8), (0, k_pad))
    b_bytes = torch.nn.functional.pad(b.codes.t().contiguous().view(torch.uint8), (0, k_pad, 0, m_pad))
    result = torch._scaled_mm(
        a_bytes.view(torch.float8_e4m3fn),
        b_bytes.view(torch.float8_e4m3fn).t(),
        scale_a=a.scale.reshape(()),
        scale_b=b.scale.reshape(()),
        out_dtype=dtype,
    )[:, :m]
    return result if bias is None else result + bias.to(dtype)


def _weight_codes(b: Tensor, options: KernelOptions) -> Quantized:
    if options.weights == "call":
        return quantize_fp8(b, None, options, stream=1)
    facts = ("FP8", options.rounding, options.seed, options.backend)
    plain = b.detach()
    return once_per_version(b, facts, lambda: quantize_fp8(plain, None, options, stream=1))


class _Fp8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, bias: Tensor | None, options: KernelOptions) -> Tensor:
        a_codes = quantize_fp8(a, None, options, stream=0)
        b_codes = _weight_codes(b, options)
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
            grad_a = (grad @ dequantize(Quantized(b_codes, b_scale), ctx.half).mT).to(a_dtype)
        if ctx.needs_input_grad[1]:
            grad_b = weight_gradient(dequantize(Quantized(a_codes, a_scale), ctx.half), grad, b_dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = grad.sum(0, dtype=torch.float32).to(bias_dtype)
        return grad_a, grad_b, grad_bias, None


def product(a: Tensor, b: Tensor, bias: Tensor | None, options: KernelOptions) -> Tensor:
    """FP8 product of (N, K) and (K, M) plus bias, with gradients; the result is in the 16-bit format."""
    if options.backward == "eight":
        return eight_bit.product(a, b, bias, E4M3.dtype, options)
    result: Tensor = _Fp8Product.apply(a, b, bias, options)  # type: ignore[no-untyped-call]
    return result
