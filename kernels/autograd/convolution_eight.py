"""INT8 convolutions whose backward pass reads the gradient of the result in INT8 too, rounded stochastically.

With x (N, C, spatial), a weight w (K, C, taps) and the codes g (N, K, spatial) of the gradient of the result:

    input gradient     a convolution of g with w, input and output channels exchanged and taps reversed: exact integer
                       sums. A stride s splits it into s phases per dimension, each with every s-th tap: no work is
                       spent on the zeros that a stride would put between the elements of g.
    weight gradient    taps of size 1 without stride or padding: the product g_T (K, pixels) x_T (C, pixels) of
                       transposed codes, x_T written in the pass that rounds x. Else a 16-bit convolution of the
                       dequantized codes, because the contraction runs over pixels, which no channels-last copy of the
                       codes has next to each other.

What the integer kernels do not take (groups; dilation with a stride) runs on dequantized codes in 16 bits as well. So
the rounding errors are the same whichever way a gradient is computed: those of the codes, and of 16-bit operands or
results.

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

from qsync_opt.kernels.autograd.float_modes import EIGHT_BITS, differentiated_once
from qsync_opt.kernels.autograd.products_half import (
    convolution_slices,
    quantized_weight,
    runs_compiled,
    scaled_convolution,
)
from qsync_opt.kernels.matmul import scaled_mm_unchecked
from qsync_opt.kernels.options import KernelOptions
from qsync_opt.kernels.quantize import (
    INT8,
    Quantized,
    dequantize,
    once_per_version,
    quantize_int8,
    quantize_matrix,
    stream_key,
)

# Numbers of the random streams of one call, as in eight_bit.py.
_INPUT, _GRADIENT, _WEIGHT_COLUMNS = 0, 2, 4


class Phase(NamedTuple):
    """Every ``stride``-th element of one dimension of an input gradient, and the convolution that computes it.

    Attributes:
        first: Of the elements.
        elements: How many.
        tap: First of the taps that reach them, every ``stride``-th from there on.
        taps: How many; 0: these elements are zero.
        padding: Zeros around the gradient of the result.
        begin: Where the elements begin in the result of the convolution.
    """

    first: int
    elements: int
    tap: int
    taps: int
    padding: int
    begin: int


def phases(size: int, result: int, taps: int, stride: int, padding: int, dilation: int) -> list[Phase]:
    """Phases of one dimension.

    Args:
        size: Of the input.
        result: Size of the result.
        taps: Of the weight.
        stride: Of the forward convolution; with a dilation it must be 1.
        padding: Of the forward convolution.
        dilation: Of the forward convolution.

    Source: ours. Element ``stride * i + first`` of the input meets tap ``tap + stride * t`` in element
        ``i + offset - dilation * t`` of the result.
    """
    found = []
    for first in range(min(stride, size)):
        tap = (first + padding) % stride
        count, own = -(-(size - first) // stride), -(-(taps - tap) // stride) if tap < taps else 0
        reach = dilation * (own - 1)
        begin = (first + padding - tap) // stride - reach
        edge = max(0, -begin, count + begin + reach - result)
        found.append(Phase(first, count, tap, own, edge, begin + edge))
    return found


def _rows(x: Tensor) -> Tensor:
    """(N, C, spatial) as a matrix of pixels and channels, a view of a channels-last tensor."""
    return x.movedim(1, -1).reshape(-1, x.shape[1])


def _image(rows: Tensor, like: Sequence[int]) -> Tensor:
    """The inverse of :func:`_rows`; ``like`` is a shape (N, C, spatial)."""
    return rows.view(like[0], *like[2:], rows.shape[1]).movedim(-1, 1)


def _shaped(scale: Tensor, dims: int) -> Tensor:
    return scale.reshape(1, *(1,) * (dims - 1))


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
    turned: Quantized,
    sizes: Sequence[int],
    geometry: tuple[Any, ...],
    dtype: torch.dtype,
    backend: str,
) -> Tensor:
    """Gradient of the input of a convolution, (N, C, spatial) of the given spatial ``sizes``, in ``dtype``.

    Args:
        grad: Codes (N, K, spatial) of the gradient of the result, one scale.
        turned: Codes (C, K, taps) of the weight, one scale or one per input channel.
        sizes: Spatial sizes of the input.
        geometry: Of the forward convolution, one that :func:`takes_input_gradient`.
        dtype: Of the result.
        backend: As for products.
    """
    stride, padding, dilation, *_ = geometry
    taps = turned.codes.shape[2:]
    per_dim = [
        phases(*facts) for facts in zip(sizes, grad.codes.shape[2:], taps, stride, padding, dilation, strict=True)
    ]
    whole: Tensor | None = None
    for phase in itertools.product(*per_dim):
        part: Tensor | None = None
        if min(p.taps for p in phase) > 0:
            picked = (slice(None), slice(None), *(slice(p.tap, None, s) for p, s in zip(phase, stride, strict=True)))
            weight = Quantized(turned.codes[picked].flip(tuple(range(2, 2 + len(taps)))), turned.scale)
            edges = tuple(p.padding for p in phase)
            plain = ((1,) * len(taps), edges, tuple(dilation), False, (0,) * len(taps), 1)
            part = scaled_convolution(grad, weight, None, plain, dtype, backend)
            part = part[(slice(None), slice(None), *(slice(p.begin, p.begin + p.elements) for p in phase))]
            if math.prod(stride) == 1:
                return part
        if whole is None:
            shape = (grad.codes.shape[0], *sizes, turned.codes.shape[0])
            whole = torch.zeros(shape, dtype=dtype, device=grad.codes.device).movedim(-1, 1)
        if part is not None:
            places = (slice(p.first, None, s) for p, s in zip(phase, stride, strict=True))
            whole[(slice(None), slice(None), *places)] = part
    assert whole is not None  # a stride has at least one phase
    return whole


def _turned_weight(weight: Tensor, codes: Quantized, options: KernelOptions) -> Quantized:
    """Codes (C, K, taps) whose scale does not change along output channels and taps."""
    if codes.scale.numel() == 1:
        return Quantized(codes.codes.transpose(0, 1), codes.scale)
    plain = weight.detach()
    if plain.dim() == 4:
        plain = plain.contiguous(memory_format=torch.channels_last)
    dims = (0, *range(2, weight.dim()))

    def make() -> Quantized:
        return quantize_int8(plain, dims, options, stream=_WEIGHT_COLUMNS)

    facts = ("INT8", "input channels", options.rounding, options.seed, options.backend)
    made = make() if options.weights == "call" else once_per_version(weight, facts, make)
    return Quantized(made.codes.transpose(0, 1), made.scale.transpose(0, 1))


class _EightBitConvolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: tuple[Any, ...], options: KernelOptions
    ) -> Tensor:
        x_dims, weight_dims = convolution_slices(x, weight, options)
        wanted = ctx.needs_input_grad
        ctx.product = wanted[1] and x_dims is None and is_product(weight, geometry)
        ctx.native = wanted[0] and takes_input_gradient(geometry)
        x_turned = None
        if ctx.product:
            both = quantize_matrix(
                _rows(x),
                INT8.dtype,
                rounding=options.rounding,
                key=stream_key(options.seed, options.offset, _INPUT),
                step=options.step,
                transposed=True,
                backend=options.backend,
            )
            x_turned = both.transposed
            x_codes = Quantized(_image(both.codes, x.shape), _shaped(both.scale, x.dim()))
        else:
            x_codes = quantize_int8(x, x_dims, options, stream=_INPUT)
            if x.dim() == 4 and runs_compiled(x, options.backend):
                x_codes = Quantized(x_codes.codes.contiguous(memory_format=torch.channels_last), x_codes.scale)
        codes = quantized_weight(weight, weight_dims, options)
        kept = _turned_weight(weight, codes, options) if ctx.native else codes if wanted[0] else None
        saved_x = (x_turned, x_codes.scale) if ctx.product else x_codes if wanted[1] else (None, None)
        ctx.save_for_backward(*saved_x, *(kept or (None, None)))
        ctx.geometry, ctx.options, ctx.shapes = geometry, options, (x.shape, weight.shape)
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        return scaled_convolution(x_codes, codes, bias, geometry, options.half_dtype, options.backend)

    @staticmethod
    @differentiated_once(EIGHT_BITS)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        options: KernelOptions = ctx.options
        wanted = ctx.needs_input_grad
        grad_x = grad_weight = grad_bias = None
        if wanted[0] or wanted[1]:
            made = quantize_matrix(
                _rows(grad),
                INT8.dtype,
                rounding="stochastic",
                key=stream_key(options.seed, options.offset, _GRADIENT),
                step=options.step,
                transposed=ctx.product,
                backend=options.backend,
            )
            g = Quantized(_image(made.codes, grad.shape), _shaped(made.scale, grad.dim()))
            x, x_scale, weight, weight_scale = ctx.saved_tensors
            if ctx.native:
                turned, sizes = Quantized(weight, weight_scale), ctx.shapes[0][2:]
                grad_x = input_gradient(g, turned, sizes, ctx.geometry, options.half_dtype, options.backend)
            if ctx.product and made.transposed is not None:
                sums = torch.float32 if weight_dtype is torch.float32 else options.half_dtype
                grad_weight = scaled_mm_unchecked(made.transposed, x, made.scale, x_scale, None, sums)
                grad_weight = grad_weight.view(ctx.shapes[1])
            in_half = (wanted[0] and grad_x is None, wanted[1] and grad_weight is None)
            if any(in_half):
                half_x = dequantize(Quantized(x, x_scale), options.half_dtype) if in_half[1] else None
                half_weight = dequantize(Quantized(weight, weight_scale), options.half_dtype) if in_half[0] else None
                first, second = _half_gradients(ctx, dequantize(g, options.half_dtype), half_x, half_weight)
                grad_x, grad_weight = first if in_half[0] else grad_x, second if in_half[1] else grad_weight
        if wanted[2]:
            grad_bias = grad.sum([0, *range(2, grad.dim())], dtype=torch.float32).to(bias_dtype)
        return (
            None if grad_x is None else grad_x.to(x_dtype),
            None if grad_weight is None else grad_weight.to(weight_dtype),
            grad_bias,
            None,
            None,
        )


def _half_gradients(
    ctx: Any, grad: Tensor, x: Tensor | None, weight: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of 16-bit operands: that of the weight if ``x`` is given, that of the input if ``weight`` is."""
    mask = [weight is not None, x is not None, False]
    # An operand that its own gradient alone depends on is not read: anything of its shape stands for it.
    x = grad.new_empty(ctx.shapes[0]) if x is None else x
    weight = grad.new_empty(ctx.shapes[1]) if weight is None else weight
    found = torch.ops.aten.convolution_backward(grad, x, weight, None, *ctx.geometry, mask)
    return (found[0] if mask[0] else None, found[1] if mask[1] else None)


def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, geometry: tuple[Any, ...], options: KernelOptions
) -> Tensor:
    """INT8 convolution with both gradients from INT8 codes of the gradient of the result.

    Args:
        x: (N, C, spatial).
        weight: (K, C / groups, taps).
        bias: (K,) or None.
        geometry: As ``torch.convolution`` takes it after the bias.
        options: Rounding, granularity, 16-bit format and random stream.

    Source: Unbiased 8-bit gradients as in R. Banner et al., "Scalable methods for 8-bit training of neural networks",
        NeurIPS 2018; the phases of a strided input gradient and which gradient runs where are ours.
    """
    result: Tensor = _EightBitConvolution.apply(x, weight, bias, geometry, options)  # type: ignore[no-untyped-call]
    return result
