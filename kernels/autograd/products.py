"""Matrix products in 8 bits with gradients, in 16 or in 8 bits backward.

Forward: both operands are quantized and multiplied, exactly in INT8 and with FP32 sums in FP8; the result is scaled in
FP32 and rounded once to the 16-bit format. Gradients pass straight through the quantizer, as if it were the identity
(with stochastic rounding its expectation is), and are delivered in the element type of their operand.

``backward="half"`` saves the codes of both operands, dequantizes them and multiplies in the 16-bit format; devices
without 16-bit units multiply the dequantized values in FP32. The gradient of an FP32 weight keeps its FP32 sums.

``backward="eight"`` multiplies x (N, K) and a weight w (M, K) in 8 bits three times, each time codes that are
contiguous along the contraction:

    forward            x (N, K)    w (M, K)    scales per tensor, row of x, row of w
    input gradient     g (N, M)    w_T (K, M)  g per tensor, w_T per tensor or column of w
    weight gradient    g_T (M, N)  x_T (K, N)  g per tensor, x_T per tensor or column of x

The gradient g of the result is rounded stochastically, so that both gradients are unbiased given x and w. The
transposed codes of an operand with one scale are written in the pass that rounds it; else its columns are scaled
separately in a second pass, because a scale may not change along a contraction. Only x_T and w_T are saved; a compiled
graph saves no w_T, and forms it in the backward pass.

Axis letters: B batch, N rows, K contraction, M columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from qsync_opt.kernels.autograd.derivatives import EIGHT_BITS, differentiated_once
from qsync_opt.kernels.matmul import (
    activate,
    code_sums,
    half_matmul,
    integer,
    product_dtype,
    scaled_mm,
    scaled_mm_unchecked,
)
from qsync_opt.kernels.options import KernelOptions
from qsync_opt.kernels.quantize import (
    E4M3,
    INT8,
    PRECISIONS,
    Quantized,
    QuantizedMatrix,
    amax,
    dequantize,
    drawing,
    once_per_step,
    quantize_by_amax,
    quantize_fp8,
    quantize_int8,
    quantize_unchecked,
    rescaled,
)

# Numbers of the random streams of one call.
_INPUT, _WEIGHT, _GRADIENT, _INPUT_COLUMNS, _WEIGHT_COLUMNS = 0, 1, 2, 3, 4

Dims = tuple[int, ...] | None


def product(a: Tensor, b: Tensor, bias: Tensor | None, precision: str, options: KernelOptions) -> Tensor:
    """``a @ b + bias`` in 8 bits, with gradients.

    Args:
        a: (N, K), or (B, N, K) when ``b`` is batched.
        b: (K, M), scaled as a weight; or (B, K, M), INT8 only, scaled as an activation, 16-bit backward pass.
        bias: (M,) or None.
        precision: ``"INT8"`` or ``"FP8"`` (one scale per tensor).
        options: Rounding, granularity, 16-bit format, random stream, and in how many bits the backward pass runs.

    Returns:
        (N, M) or (B, N, M) in the 16-bit format.

    Source: Data flow of an INT8 operator as in QSync (INT8 forward, 16-bit backward, FP32 weight gradient); rounding
        unbiased instead of truncating, results in 16 bits instead of FP32. 8-bit backward pass: see `linear`.
    """
    if options.backward == "eight" and b.dim() == 2:
        return linear(a, b.t(), bias, precision, options)
    result: Tensor = _HalfBackward.apply(a, b, bias, precision, False, options)  # type: ignore[no-untyped-call]
    return result


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, precision: str, options: KernelOptions) -> Tensor:
    """``x @ weight.T + bias`` of (.., K), (M, K), (M,) in 8 bits, with gradients, as one autograd node; see `product`.

    Source: Unbiased 8-bit gradients as in R. Banner et al., "Scalable methods for 8-bit training of neural networks",
        NeurIPS 2018, and J. Chen et al., "A statistical framework for low-bitwidth training", NeurIPS 2020; scales per
        tensor and shared codes are ours. 8-bit gradients are in E5M2 where the codes are FP8, for its range.
    """
    if options.backward == "eight":
        result: Tensor = _EightBackward.apply(x, weight, bias, precision, options)  # type: ignore[no-untyped-call]
    else:
        result = _HalfBackward.apply(x, weight, bias, precision, True, options)  # type: ignore[no-untyped-call]
    return result


class _HalfBackward(torch.autograd.Function):
    """``a @ b + bias`` or, of a linear layer, ``a @ b.T + bias`` with ``a`` (.., K).

    A linear layer changes shapes in here, where that adds no autograd nodes: small layers wait for the host.
    """

    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, bias: Tensor | None, precision: str, is_linear: bool, options: KernelOptions
    ) -> Tensor:
        rows = flattened(a) if is_linear else a
        a_dims, b_dims = product_slices(rows, b, options, is_linear) if precision == "INT8" else (None, None)
        quantize, multiply = _FORMATS[precision]
        x = quantize(rows, a_dims, options, _INPUT)
        if b.dim() == 2:
            w = quantized_weight(b, b_dims, options, precision, is_linear)
        else:
            w = quantize(b, b_dims, options, _WEIGHT)
        ctx.save_for_backward(*x, *w)
        ctx.dtypes = (a.dtype, b.dtype, None if bias is None else bias.dtype)
        ctx.half, ctx.shape, ctx.is_linear = options.half_dtype, a.shape, is_linear
        compiled = a.is_cuda and options.backend != "reference" and activate()
        if compiled and is_linear:
            result = scaled_mm_unchecked(x.codes, w.codes, x.scale, w.scale, bias, ctx.half)
        elif compiled:  # codes that are not contiguous along K are copied once
            a_codes, b_codes = (c if c.stride(-1) == 1 else c.contiguous() for c in (x.codes, w.codes.mT))
            result = scaled_mm(a_codes, b_codes, x.scale, w.scale, bias, out_dtype=ctx.half)
        else:
            w = Quantized(w.codes.t(), w.scale.t()) if is_linear else w
            result = multiply(x, w, bias, ctx.half, options.backend)
        return result if result.dim() == a.dim() else result.view(*a.shape[:-1], b.shape[0])

    @staticmethod
    @differentiated_once(EIGHT_BITS)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a_codes, a_scale, b_codes, b_scale = ctx.saved_tensors
        a_dtype, b_dtype, bias_dtype = ctx.dtypes
        grad_a = grad_b = grad_bias = None
        if ctx.is_linear:
            grad = flattened(grad)
        dtype = product_dtype(grad.device, ctx.half)
        values = converted(grad, dtype)
        if ctx.needs_input_grad[0]:
            b = dequantize(Quantized(b_codes, b_scale), dtype)
            grad_a = converted(half_matmul(values, b if ctx.is_linear else b.mT, ctx.half), a_dtype)
            if grad_a.dim() != len(ctx.shape):
                grad_a = grad_a.view(ctx.shape)
        if ctx.needs_input_grad[1]:
            a = dequantize(Quantized(a_codes, a_scale), dtype)
            if a.dim() == 3:
                grad_b = converted(half_matmul(a.mT, values, ctx.half), b_dtype)
            else:
                grad_b = half_product(values, a, b_dtype) if ctx.is_linear else half_product(a, values, b_dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = bias_gradient(grad, bias_dtype)
        return grad_a, grad_b, grad_bias, None, None, None


class _EightBackward(torch.autograd.Function):
    """``x @ weight.T + bias`` of (.., K), (M, K), (M,) with three products in 8 bits."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, precision: str, options: KernelOptions
    ) -> Tensor:
        codes, ctx.gradient_codes = (form.dtype for form in PRECISIONS[precision])
        a = quantize_operand(flattened(x), codes, options.activation_granularity, options, ctx.needs_input_grad[1])
        ctx.waits = ctx.needs_input_grad[0] and _can_wait(codes, options)
        if ctx.waits:
            b = _transposed_later(weight, codes, options)
        else:
            b = weight_operand(weight, codes, options, ctx.needs_input_grad[0])
        ctx.codes = codes
        ctx.save_for_backward(a.transposed, a.transposed_scale, b.transposed, b.transposed_scale)
        ctx.options, ctx.shape = options, x.shape
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        result = scaled_mm_unchecked(a.codes, b.codes, a.scale, b.scale, bias, options.half_dtype)
        return result if x.dim() == 2 else result.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @differentiated_once(EIGHT_BITS)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, x_scale, weight, weight_scale = ctx.saved_tensors
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        options: KernelOptions = ctx.options
        grad_x = grad_weight = grad_bias = None
        grad = flattened(grad)
        if x is not None or weight is not None:
            g = quantize_gradient(grad, ctx.gradient_codes, options, _GRADIENT, x is not None)
            if weight is not None:
                if ctx.waits:
                    weight, weight_scale = _transposed_weight(weight, weight_scale, ctx.codes, options, g)
                # FP32 at once where it is wanted; a compiled graph fuses the cast with what reads it, and moves half.
                wide = x_dtype is torch.float32 and not torch.compiler.is_compiling()
                dtype = torch.float32 if wide else options.half_dtype
                grad_x = converted(scaled_mm_unchecked(g.codes, weight, g.scale, weight_scale, None, dtype), x_dtype)
                if len(ctx.shape) != 2:
                    grad_x = grad_x.view(ctx.shape)
            if x is not None:
                grad_weight = weight_gradient(g, x, x_scale, weight_dtype, options)
        if ctx.needs_input_grad[2]:
            grad_bias = bias_gradient(grad, bias_dtype)
        return grad_x, grad_weight, grad_bias, None, None


def flattened(x: Tensor) -> Tensor:
    """A tensor (.., K) as a matrix (N, K)."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x.to(dtype)`` without a call of the host where nothing changes."""
    return x if x.dtype is dtype else x.to(dtype)


def bias_gradient(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum of the gradient of a result over all dimensions but that of the bias: columns, or channels (dimension 1)."""
    return converted(grad.sum([0, *range(2, grad.dim())], dtype=torch.float32), dtype)


class Operand(NamedTuple):
    """Codes of a matrix, and of its transposition if it is needed, each with scales along the rows of the codes."""

    codes: Tensor
    scale: Tensor
    transposed: Tensor | None
    transposed_scale: Tensor | None


def product_slices(a: Tensor, b: Tensor, options: KernelOptions, is_linear: bool = False) -> tuple[Dims, Dims]:
    """Dimensions of operands that share a scale: along the contraction, or all (None).

    A second operand of two dimensions is a weight: (K, M), of a linear layer (M, K).
    """
    per_row = options.activation_granularity == "row"
    per_column = options.weight_granularity == "channel" if b.dim() == 2 else per_row
    return (a.dim() - 1,) if per_row else None, (b.dim() - (1 if is_linear else 2),) if per_column else None


def quantized_weight(
    weight: Tensor, dims: Dims, options: KernelOptions, precision: str = "INT8", is_linear: bool = False
) -> Quantized:
    """Codes of a weight with one scale per slice that ``dims`` span, computed once per step if the options say so."""
    quantize, _ = _FORMATS[precision]
    facts = (precision, dims, is_linear)
    return once_per_step(weight, facts, options, lambda plain: quantize(plain, dims, options, _WEIGHT))


def quantize_operand(
    x: Tensor,
    codes: torch.dtype,
    granularity: str,
    options: KernelOptions,
    transposed: bool,
    streams: tuple[int, int] = (_INPUT, _INPUT_COLUMNS),
) -> Operand:
    """Codes of ``x`` (N, K) with scales per ``"tensor"`` or ``"row"``; if wanted, codes of its transposition (K, N)."""
    if granularity == "tensor" or not transposed:
        rows = quantize_unchecked(x, codes, granularity, transposed=transposed, **drawing(options, streams[0]))
        return Operand(*rows, rows.scale if transposed else None)
    rows = quantize_unchecked(x, codes, "row", **drawing(options, streams[0]))
    columns = quantize_unchecked(x, codes, "channel", transposed=True, **drawing(options, streams[1]))
    return Operand(rows.codes, rows.scale, columns.transposed, columns.scale)


def _granularity(codes: torch.dtype, options: KernelOptions) -> str:
    """Of a weight's scales: FP8 codes have one, whatever the options say, and so do their products on every card."""
    return "row" if options.weight_granularity == "channel" and codes is INT8.dtype else "tensor"


def weight_operand(
    weight: Tensor,
    codes: torch.dtype,
    options: KernelOptions,
    transposed: bool,
    streams: tuple[int, int] = (_WEIGHT, _WEIGHT_COLUMNS),
) -> Operand:
    """`quantize_operand` of a weight (M, K), computed once per step if the options say so."""
    granularity = _granularity(codes, options)
    facts = (codes, granularity, transposed, streams)
    return once_per_step(
        weight, facts, options, lambda plain: quantize_operand(plain, codes, granularity, options, transposed, streams)
    )


def _transposed_later(weight: Tensor, codes: torch.dtype, options: KernelOptions) -> Operand:
    """`weight_operand` in a compiled graph: the weight itself in place of its transposed codes, which are formed later.

    `_transposed_weight` forms them in the backward pass, so that the graph need not keep them until then. In place of
    their scales is the weight's largest magnitude, or None where columns have scales of their own.
    """
    if _granularity(codes, options) == "row":
        return weight_operand(weight, codes, options, False)._replace(transposed=weight)
    largest = amax(weight, None).reshape(1)
    rows = quantize_by_amax(weight, largest, codes, **drawing(options, _WEIGHT))
    return Operand(rows.codes, rows.scale, weight, largest)


def _transposed_weight(
    weight: Tensor, largest: Tensor | None, codes: torch.dtype, options: KernelOptions, grad: QuantizedMatrix
) -> tuple[Tensor, Tensor]:
    """Transposed codes of a weight (M, K), and their scales, as `weight_operand` has them.

    They are made to depend on a gradient: compilers form in the forward pass, and keep, whatever does not.
    """
    never = grad.scale.reshape(1) < 0
    if largest is not None:
        largest = torch.where(never, grad.scale.reshape(1), largest)
        columns = quantize_by_amax(weight, largest, codes, transposed=True, **drawing(options, _WEIGHT))
    else:
        step = torch.zeros_like(never, dtype=torch.int64) if options.step is None else options.step
        draws = {**drawing(options, _WEIGHT_COLUMNS), "step": step + never.view(step.shape)}
        columns = quantize_unchecked(weight, codes, "channel", transposed=True, **draws)
    assert columns.transposed is not None
    return columns.transposed, columns.scale


def _can_wait(codes: torch.dtype, options: KernelOptions) -> bool:
    """Whether this is a compiled graph in which `_transposed_later` draws the noise that `weight_operand` does."""
    if not torch.compiler.is_compiling():
        return False
    return options.step is not None or options.rounding == "nearest" or _granularity(codes, options) == "tensor"


def quantize_gradient(
    grad: Tensor, codes: torch.dtype, options: KernelOptions, stream: int, transposed: bool
) -> QuantizedMatrix:
    """Codes of a gradient (N, M) with one scale, rounded stochastically whatever the options say."""
    return quantize_unchecked(
        grad, codes, "tensor", transposed=transposed, **drawing(options, stream, rounding="stochastic")
    )


def runs_onednn(x: Quantized, dtype: torch.dtype, backend: str) -> bool:
    """Whether oneDNN's fused operators take an input: one scale, no FP16, not traced (packed weights cannot be)."""
    on_host = backend != "reference" and x.codes.device.type == "cpu" and not torch.compiler.is_compiling()
    return on_host and dtype is not torch.float16 and x.scale.numel() == 1 and x.codes.numel() > 0


def _int8_product(a: Quantized, b: Quantized, bias: Tensor | None, dtype: torch.dtype, backend: str) -> Tensor:
    """``(a @ b) + bias`` of INT8 operands: (N, K) (K, M) or (B, N, K) (B, K, M), in ``dtype``."""
    is_matrix = a.codes.dim() == 2
    if is_matrix and runs_onednn(a, dtype, backend) and b.codes.numel() > 0 and integer.has_onednn_linear():
        return integer.linear(a, b, bias, dtype)
    sums = code_sums(a.codes, b.codes, backend)
    return rescaled(sums, a.scale, b.scale, bias, dtype, sums.dim() - 1)


def _fp8_product(a: Quantized, b: Quantized, bias: Tensor | None, dtype: torch.dtype, backend: str) -> Tensor:
    """``(a @ b) + bias`` of E4M3 operands (N, K), (K, M) with one scale each, in ``dtype``."""
    (n, k), m = a.codes.shape, b.codes.shape[1]
    if min(n, k, m) == 0:
        result = torch.zeros((n, m), dtype=dtype, device=a.codes.device)
    else:
        # torch._scaled_mm wants K and M in multiples of 16. Torch cannot pad FP8, hence bytes: byte 0 is the value 0.
        k_pad, m_pad = -k % 16, -m % 16
        a_bytes = F.pad(a.codes.contiguous().view(torch.uint8), (0, k_pad))
        b_bytes = F.pad(b.codes.t().contiguous().view(torch.uint8), (0, k_pad, 0, m_pad))
        result = torch._scaled_mm(
            a_bytes.view(E4M3.dtype),
            b_bytes.view(E4M3.dtype).t(),
            scale_a=a.scale.reshape(()),
            scale_b=b.scale.reshape(()),
            out_dtype=dtype,
        )[:, :m]
    return result if bias is None else result + bias.to(dtype)


# By precision, the quantizer of operands, and the product of codes without the fused CUDA kernels.
_FORMATS: dict[str, tuple[Callable[..., Quantized], Callable[..., Tensor]]] = {
    "INT8": (quantize_int8, _int8_product),
    "FP8": (quantize_fp8, _fp8_product),
}


def half_product(a: Tensor, grad: Tensor, dtype: torch.dtype, total: Tensor | None = None) -> Tensor:
    """``a.mT @ grad`` of 16-bit matrices, or their values in FP32, in ``dtype``; with FP32 sums where that is FP32.

    With ``total``, of that type, the product is added to it in place.
    """
    if dtype is torch.float32 and a.device.type == "cuda":
        if total is not None:  # by the kernel that multiplies
            return torch.addmm(total, a.mT, grad, out_dtype=dtype, out=total)
        return torch.mm(a.mT, grad, out_dtype=dtype)
    if dtype is torch.float32:
        a, grad = a.float(), grad.float()  # the same sums of the same products
        product = a.mT @ grad
    else:
        product = half_matmul(a.mT, grad, grad.dtype).to(dtype)
    return product if total is None else total.add_(product)


_PARTS, _ALIGNED = 4, 128
"""Parts in which a product is added to a total, so that it takes a part of that one's memory; their rows are a multiple
of this, which 8-bit products like."""


def weight_gradient(
    grad: QuantizedMatrix,
    x: Tensor,
    x_scale: Tensor,
    dtype: torch.dtype,
    options: KernelOptions,
    total: Tensor | None = None,
) -> Tensor:
    """Gradient (M, K) of a weight from the transposed codes of the result's gradient and the input, in ``dtype``.

    With ``total``, of that type, it is added to that in place.
    """
    codes = grad.transposed
    assert codes is not None
    sums = torch.float32 if dtype is torch.float32 else options.half_dtype

    def product(rows: Tensor) -> Tensor:
        return converted(scaled_mm_unchecked(rows, x, grad.scale, x_scale, None, sums), dtype)

    if total is None:
        return product(codes)
    size = _ALIGNED * math.ceil(total.shape[0] / _PARTS / _ALIGNED)
    for first in range(0, total.shape[0], size):
        total[first : first + size].add_(product(codes[first : first + size]))
    return total
