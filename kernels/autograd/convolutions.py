"""INT8 convolutions with gradients, from 16-bit values or from INT8 codes of the gradient of the result.

Forward as in `products`: both operands are quantized, convolved exactly, scaled in FP32 and rounded once to the 16-bit
format. ``backward="half"`` saves the codes of both operands and gives their values to a 16-bit convolution's gradients.

``backward="eight"`` rounds the gradient of the result to INT8 too, stochastically. With x (N, C, spatial), a weight
w (K, C, taps) and the codes g (N, K, spatial) of that gradient:

    input gradient     a convolution of g with w, input and output channels exchanged and taps reversed: exact integer
                       sums. A stride s splits it into s phases per dimension, each with every s-th tap: no work is
                       spent on the zeros that a stride would put between the elements of g.
    weight gradient    taps of size 1 without stride or padding: the product g_T (K, pixels) x_T (C, pixels) of
                       transposed codes, x_T written in the pass that rounds x. Else a 16-bit convolution of the
                       dequantized codes, because the contraction runs over pixels, which no channels-last copy of the
                       codes has next to each other.

What the integer kernels do not take (groups; dilation with a stride) runs on dequantized codes in 16 bits as well.

A scale may not change along a contraction: weights with a scale per output channel get codes of their own for the input
gradient, with a scale per input channel, and inputs with a scale per sample take the 16-bit weight gradient.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qsync_opt.kernels.autograd.convolution_parts import convolve_parts, forward_parts, gradients, parts_of
from qsync_opt.kernels.autograd.derivatives import EIGHT_BITS, differentiated_once
from qsync_opt.kernels.autograd.products import (
    Dims,
    bias_gradient,
    quantized_weight,
    runs_onednn,
    weight_gradient,
)
from qsync_opt.kernels.compilation import library
from qsync_opt.kernels.convolution import scaled_conv2d
from qsync_opt.kernels.matmul import convolution_sums, integer, product_dtype
from qsync_opt.kernels.options import KernelOptions
from qsync_opt.kernels.quantize import (
    INT8,
    Quantized,
    QuantizedMatrix,
    dequantize,
    drawing,
    once_per_step,
    quantize_int8,
    quantize_matrix,
    rescaled,
)

# Numbers of the random streams of one call, as in `products`.
_INPUT, _GRADIENT, _WEIGHT_COLUMNS = 0, 2, 4


def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, geometry: tuple[Any, ...], options: KernelOptions
) -> Tensor:
    """INT8 convolution with gradients.

    Args:
        x: (N, C, spatial).
        weight: (K, C / groups, taps).
        bias: (K,) or None.
        geometry: As ``torch.convolution`` takes it after the bias.
        options: Rounding, granularity, 16-bit format, random stream, and in how many bits the backward pass runs.

    Returns:
        In the 16-bit format.

    Source: Unbiased 8-bit gradients as in R. Banner et al., "Scalable methods for 8-bit training of neural networks",
        NeurIPS 2018; the phases of a strided input gradient and which gradient runs where are ours.
    """
    result: Tensor = _Convolution.apply(x, weight, bias, geometry, options)  # type: ignore[no-untyped-call]
    return result


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: tuple[Any, ...], options: KernelOptions
    ) -> Tensor:
        x_dims, weight_dims = convolution_slices(x, weight, options)
        eight, wanted = options.backward == "eight", ctx.needs_input_grad
        # Whether the weight gradient is a product of codes, and the input gradient an integer convolution.
        ctx.product = eight and wanted[1] and x_dims is None and is_product(weight, geometry)
        ctx.native = eight and wanted[0] and takes_input_gradient(geometry)
        saved_x: tuple[Tensor | None, ...]
        if ctx.product:
            x_codes, transposed = _quantized_pixels(x, options.rounding, options, _INPUT, True)
            saved_x = (transposed, x_codes.scale)
        else:
            x_codes = quantize_int8(x, x_dims, options, stream=_INPUT)
            if x.dim() == 4 and _runs_compiled(x, options.backend):
                # Once, in one byte per element: the kernel, and cuDNN in the backward pass, read channels-last tensors.
                x_codes = Quantized(x_codes.codes.contiguous(memory_format=torch.channels_last), x_codes.scale)
            saved_x = x_codes if wanted[1] or not eight else (None, None)
        codes = quantized_weight(weight, weight_dims, options)
        saved_weight: tuple[Tensor | None, ...] = codes if wanted[0] or not eight else (None, None)
        if ctx.native:
            saved_weight = _transposed_weight(weight, codes, options)
        ctx.save_for_backward(*saved_x, *saved_weight)
        ctx.geometry, ctx.options, ctx.shapes = geometry, options, (x.shape, weight.shape)
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        return scaled_convolution(x_codes, codes, bias, geometry, options.half_dtype, options.backend)

    @staticmethod
    @differentiated_once(EIGHT_BITS)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        options: KernelOptions = ctx.options
        half, wanted = options.half_dtype, ctx.needs_input_grad
        x, x_scale, weight, weight_scale = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        if options.backward == "half":
            dtype = product_dtype(grad.device, half)
            in_parts = dtype is torch.float32 and grad.device.type == "cpu"
            grad_x, grad_weight, _ = gradients(
                lambda part: (grad[part].to(dtype), dequantize(_part_of(x, x_scale, part), dtype)),
                dequantize(Quantized(weight, weight_scale), dtype),
                None,
                ctx.geometry,
                [wanted[0], wanted[1], False],
                x.shape[0],
                parts_of(x.shape[0], grad.numel() + x.numel() if in_parts else 0, weight),
                x_dtype if in_parts else dtype,
            )
        elif wanted[0] or wanted[1]:
            g, transposed = _quantized_pixels(grad, "stochastic", options, _GRADIENT, ctx.product)
            if ctx.native:
                sizes, exchanged = ctx.shapes[0][2:], Quantized(weight, weight_scale)
                grad_x = input_gradient(g, exchanged, sizes, ctx.geometry, half, options.backend)
            if ctx.product:
                rows = QuantizedMatrix(g.codes, g.scale, transposed)
                grad_weight = weight_gradient(rows, x, x_scale, weight_dtype, options).view(ctx.shapes[1])
            in_half = [wanted[0] and grad_x is None, wanted[1] and grad_weight is None, False]
            if any(in_half):
                # An operand that only its own gradient depends on is not read: anything of its shape stands for it.
                dtype = product_dtype(grad.device, half)
                half_grad = dequantize(g, dtype)
                stand_in = half_grad.new_empty
                half_x = dequantize(Quantized(x, x_scale), dtype) if in_half[1] else stand_in(ctx.shapes[0])
                half_w = dequantize(Quantized(weight, weight_scale), dtype) if in_half[0] else stand_in(ctx.shapes[1])
                first, second, _ = torch.ops.aten.convolution_backward(
                    half_grad, half_x, half_w, None, *ctx.geometry, in_half
                )
                grad_x, grad_weight = first if in_half[0] else grad_x, second if in_half[1] else grad_weight
        if wanted[2]:
            grad_bias = bias_gradient(grad, bias_dtype)
        grad_x = None if grad_x is None else grad_x.to(x_dtype)
        grad_weight = None if grad_weight is None else grad_weight.to(weight_dtype)
        return grad_x, grad_weight, grad_bias, None, None


def convolution_slices(x: Tensor, weight: Tensor, options: KernelOptions) -> tuple[Dims, Dims]:
    """Dimensions of operands that share a scale: those of a sample or an output channel, or all (None)."""
    per_sample, per_channel = options.activation_granularity == "row", options.weight_granularity == "channel"
    return tuple(range(1, x.dim())) if per_sample else None, tuple(range(1, weight.dim())) if per_channel else None


def scaled_convolution(
    x: Quantized, weight: Quantized, bias: Tensor | None, geometry: tuple[Any, ...], dtype: torch.dtype, backend: str
) -> Tensor:
    """Convolution of quantized operands plus bias, in ``dtype``."""
    if _runs_compiled(x.codes, backend):
        return _compiled_convolution(x, weight, bias, geometry, dtype)
    if runs_onednn(x, dtype, backend) and integer.has_onednn_convolution():
        return integer.convolution(x, weight, bias, geometry, dtype)
    weight_scale = weight.scale.reshape(1, -1, *(1,) * (x.codes.dim() - 2))

    def convolve(part: slice) -> Tensor:
        own = _part_of(*x, part)
        sums = convolution_sums(own.codes, weight.codes, geometry, backend)
        return rescaled(sums, own.scale, weight_scale, bias, dtype, 1)

    in_parts = x.codes.device.type == "cpu"
    parts = forward_parts(x.codes, weight.codes, geometry) if in_parts else [slice(None)]
    return convolve_parts(convolve, x.codes.shape[0], parts, dtype)


def _part_of(codes: Tensor, scale: Tensor, part: slice) -> Quantized:
    """Part of a batch with one scale, or one per sample."""
    return Quantized(codes[part], scale if scale.shape[0] == 1 else scale[part])


def _runs_compiled(x: Tensor, backend: str) -> bool:
    """Whether the fused CUDA kernels convolve ``x``: (N, C, H, W) or (N, C, W), where they are built."""
    return x.device.type == "cuda" and x.dim() in (3, 4) and backend != "reference" and library.activate("convolution")


def _compiled_convolution(
    x: Quantized, weight: Quantized, bias: Tensor | None, geometry: tuple[Any, ...], dtype: torch.dtype
) -> Tensor:
    """Convolution of quantized operands plus bias by the fused CUDA kernels, in ``dtype``, channels-last."""
    stride, padding, dilation, _, _, groups = geometry
    x_codes, weight_codes, is_line = x.codes, weight.codes, x.codes.dim() == 3
    if is_line:
        # A sequence is an image of one row.
        x_codes, weight_codes = x_codes.unsqueeze(2), weight_codes.unsqueeze(2)
        stride, padding, dilation = (1, *stride), (0, *padding), (1, *dilation)
    sizes = {"stride": stride, "padding": padding, "dilation": dilation}
    result = scaled_conv2d(x_codes, weight_codes, x.scale, weight.scale, bias, groups=groups, out_dtype=dtype, **sizes)
    return result.squeeze(2) if is_line else result


def _quantized_pixels(
    x: Tensor, rounding: str, options: KernelOptions, stream: int, transposed: bool
) -> tuple[Quantized, Tensor | None]:
    """Codes (N, C, spatial) with one scale, quantized as a matrix of pixels and channels, and of its transposition.

    The matrix is a view of a channels-last tensor.
    """
    result = quantize_matrix(
        x.movedim(1, -1).reshape(-1, x.shape[1]),
        INT8.dtype,
        transposed=transposed,
        **drawing(options, stream, rounding),
    )
    image = result.codes.view(x.shape[0], *x.shape[2:], x.shape[1]).movedim(-1, 1)
    return Quantized(image, result.scale.reshape(1, *(1,) * (x.dim() - 1))), result.transposed


def _transposed_weight(weight: Tensor, codes: Quantized, options: KernelOptions) -> Quantized:
    """Codes (C, K, taps) whose scale does not change along output channels and taps."""
    if codes.scale.numel() > 1:
        dims = (0, *range(2, weight.dim()))

        def quantize(plain: Tensor) -> Quantized:
            if plain.dim() == 4:
                plain = plain.contiguous(memory_format=torch.channels_last)
            return quantize_int8(plain, dims, options, stream=_WEIGHT_COLUMNS)

        codes = once_per_step(weight, ("INT8", "input channels"), options, quantize)
    return Quantized(codes.codes.transpose(0, 1), codes.scale.transpose(0, 1))


class Phase(NamedTuple):
    """Every ``stride``-th element of one dimension of an input gradient, and the convolution that computes it.

    The ``elements`` begin at ``first``; the ``taps`` that reach them begin at ``tap``, and without any they are zero.
    The gradient of the result has ``padding`` zeros around it; in the convolution's result they begin at ``begin``.
    """

    first: int
    elements: int
    tap: int
    taps: int
    padding: int
    begin: int


def phases(size: int, result: int, taps: int, stride: int, padding: int, dilation: int) -> list[Phase]:
    """Phases of one dimension, from the sizes of the input and the result of the forward convolution and its geometry.

    With a dilation the stride must be 1.

    Source: ours. Element ``stride * i + first`` of the input meets tap ``tap + stride * t`` in element
        ``i + offset - dilation * t`` of the result.
    """
    all_phases = []
    for first in range(min(stride, size)):
        tap = (first + padding) % stride
        count, own = -(-(size - first) // stride), -(-(taps - tap) // stride) if tap < taps else 0
        reach = dilation * (own - 1)
        begin = (first + padding - tap) // stride - reach
        edge = max(0, -begin, count + begin + reach - result)
        all_phases.append(Phase(first, count, tap, own, edge, begin + edge))
    return all_phases


def is_product(weight: Tensor, geometry: tuple[Any, ...]) -> bool:
    """Whether a convolution multiplies every pixel by one matrix and nothing else."""
    stride, padding, _, _, _, groups = geometry
    return weight[0, 0].numel() == 1 and groups == 1 and set(stride) == {1} and set(padding) == {0}


def takes_input_gradient(geometry: tuple[Any, ...]) -> bool:
    """Whether :func:`input_gradient` computes it: one group, and no dimension has both a stride and a dilation."""
    stride, _, dilation, transposed, _, groups = geometry
    return groups == 1 and not transposed and all(s == 1 or d == 1 for s, d in zip(stride, dilation, strict=True))


def input_gradient(
    grad: Quantized,
    exchanged: Quantized,
    sizes: Sequence[int],
    geometry: tuple[Any, ...],
    dtype: torch.dtype,
    backend: str,
) -> Tensor:
    """Gradient of the input of a convolution, (N, C, spatial) of the given spatial ``sizes``, in ``dtype``.

    ``grad`` has codes (N, K, spatial) of the gradient of the result and one scale, ``exchanged`` codes (C, K, taps) of
    the weight and one scale or one per input channel; ``geometry`` is that of the forward convolution.
    """
    stride, padding, dilation, *_ = geometry
    taps = exchanged.codes.shape[2:]
    per_dim = [
        phases(*facts) for facts in zip(sizes, grad.codes.shape[2:], taps, stride, padding, dilation, strict=True)
    ]
    shape = (grad.codes.shape[0], *sizes, exchanged.codes.shape[0])
    whole = None
    if math.prod(stride) > 1:
        whole = torch.zeros(shape, dtype=dtype, device=grad.codes.device).movedim(-1, 1)
    for phase in itertools.product(*per_dim):
        if min(p.taps for p in phase) == 0:
            continue
        picked = (slice(None), slice(None), *(slice(p.tap, None, s) for p, s in zip(phase, stride, strict=True)))
        weight = Quantized(exchanged.codes[picked].flip(tuple(range(2, 2 + len(taps)))), exchanged.scale)
        edges = tuple(p.padding for p in phase)
        plain = ((1,) * len(taps), edges, tuple(dilation), False, (0,) * len(taps), 1)
        part = scaled_convolution(grad, weight, None, plain, dtype, backend)
        part = part[(slice(None), slice(None), *(slice(p.begin, p.begin + p.elements) for p in phase))]
        if whole is None:
            return part
        places = (slice(p.first, None, s) for p, s in zip(phase, stride, strict=True))
        whole[(slice(None), slice(None), *places)] = part
    assert whole is not None  # without strides there is one phase, with every tap
    return whole
