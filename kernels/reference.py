"""The specification of the 8-bit operators in plain FP64 arithmetic, which tests compare them with.

An 8-bit operator multiplies the values of its codes exactly, adds the bias and rounds once to the 16-bit format; its
gradients are those of the same product of the values of the codes. Works on every device, FP8 on CPU included.

Axis letters: B batch, N rows or samples, K contraction, M columns or output channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qsync_opt.kernels.autograd import convolution_slices, product_slices
from qsync_opt.kernels.options import KernelOptions
from qsync_opt.kernels.quantize import Quantized, quantize_fp8, quantize_int8


def values(quantized: Quantized) -> Tensor:
    """Exact values of the codes: FP64, shape of the codes."""
    return quantized.codes.to(torch.float64) * quantized.scale.to(torch.float64)


def product_operands(a: Tensor, b: Tensor, precision: str, options: KernelOptions) -> tuple[Tensor, Tensor]:
    """Values that a product of (N, K) (K, M) or (B, N, K) (B, K, M) multiplies at ``"INT8"`` or ``"FP8"``: FP64."""
    if precision == "FP8":
        return values(quantize_fp8(a, None, options, 0)), values(quantize_fp8(b, None, options, 1))
    a_dims, b_dims = product_slices(a, b, options)
    return values(quantize_int8(a, a_dims, options, 0)), values(quantize_int8(b, b_dims, options, 1))


def product(a: Tensor, b: Tensor, bias: Tensor | None, precision: str, options: KernelOptions) -> Tensor:
    """Result of an 8-bit product before its rounding to 16 bits: FP64, shape (N, M) or (B, N, M)."""
    a_values, b_values = product_operands(a, b, precision, options)
    result = a_values @ b_values
    return result if bias is None else result + bias.to(torch.float64)


def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, geometry: tuple[Any, ...], options: KernelOptions
) -> Tensor:
    """Result of an INT8 convolution before its rounding to 16 bits: FP64."""
    x_dims, weight_dims = convolution_slices(x, weight, options)
    x_values = values(quantize_int8(x, x_dims, options, 0))
    weight_values = values(quantize_int8(weight, weight_dims, options, 1))
    return torch.convolution(x_values, weight_values, None if bias is None else bias.to(torch.float64), *geometry)
