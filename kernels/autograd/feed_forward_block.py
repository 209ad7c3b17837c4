"""Linear, GELU, Linear in 8 bits with all six products of a training step, as one operation.

Against three operations this saves passes over the hidden activations. INT8: GELU and its gradient find the largest
magnitude of what they write, so that the following quantizer reads it once. FP8: the preceding product finds that of
its result, which bounds GELU of it and, times the largest derivative of GELU, its gradient; the quantizer computes GELU
or the gradient itself and writes only codes. A scale from a bound costs floating-point codes no precision, only some of
their smallest magnitudes; of INT8 it would cost part of a bit. Codes are scaled per tensor. Saved for the backward pass
are the transposed codes of the operands, and the 16-bit input of GELU, which its gradient needs.

Axis letters: N rows, K input features, H hidden features, M output features.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qsync_opt.errors import UnsupportedError
from qsync_opt.kernels.autograd.derivatives import EIGHT_BITS, differentiated_once
from qsync_opt.kernels.autograd.products import (
    bias_gradient,
    quantize_gradient,
    quantize_operand,
    weight_gradient,
    weight_operand,
)
from qsync_opt.kernels.compilation import library
from qsync_opt.kernels.matmul import scaled_mm, scaled_mm_amax, scaled_mm_unchecked
from qsync_opt.kernels.options import KernelOptions
from qsync_opt.kernels.quantize import (
    INT8,
    PRECISIONS,
    UNIT,
    QuantizedMatrix,
    amax,
    drawing,
    plain_by_amax,
    quantize_by_amax,
    signed,
)

# Numbers of the random streams of one call; an operand's second is for columns, which are not scaled apart here.
_INPUT, _FIRST, _SECOND, _HIDDEN, _GRADIENT, _HIDDEN_GRADIENT = (0, 0), (1, 1), (2, 2), 3, 4, 5
# Above the largest derivative of GELU, 1.1289 at the square root of 2, by more than rounding to 16 bits adds.
_STEEPEST = 1.14


def feed_forward(
    x: Tensor,
    first: Tensor,
    first_bias: Tensor | None,
    second: Tensor,
    second_bias: Tensor | None,
    precision: str,
    options: KernelOptions | None = None,
) -> Tensor:
    """``linear(gelu(linear(x, first, first_bias)), second, second_bias)`` in 8 bits, forward and backward.

    Args:
        x: (.., K).
        first: (H, K).
        first_bias: (H,) or None.
        second: (M, H).
        second_bias: (M,) or None.
        precision: ``"INT8"`` or ``"FP8"`` (E4M3; gradients E5M2).
        options: Rounding, random stream, 16-bit format; scales are per tensor and the backward pass is in 8 bits,
            whatever they say.

    Returns:
        (.., M) in the 16-bit format.

    Raises:
        UnsupportedError: Another precision.

    Source: ours.
    """
    if precision not in PRECISIONS:
        raise UnsupportedError(f"feed_forward precision {precision!r}: allowed are {', '.join(PRECISIONS)}")
    options = replace(
        options or KernelOptions(), activation_granularity="tensor", weight_granularity="tensor", backward="eight"
    )
    rows = x.reshape(-1, x.shape[-1])
    arguments = (rows, first, first_bias, second, second_bias, precision, options)
    result: Tensor = _FeedForward.apply(*arguments)  # type: ignore[no-untyped-call]
    return result.view(*x.shape[:-1], second.shape[0])


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        first: Tensor,
        first_bias: Tensor | None,
        second: Tensor,
        second_bias: Tensor | None,
        precision: str,
        options: KernelOptions,
    ) -> Tensor:
        dtype, ctx.gradient_dtype = (form.dtype for form in PRECISIONS[precision])
        half, draws = options.half_dtype, drawing(options, _HIDDEN)
        a = quantize_operand(x, dtype, "tensor", options, ctx.needs_input_grad[1], _INPUT)
        w = weight_operand(first, dtype, options, ctx.needs_input_grad[0], _FIRST)
        operands = (a.codes, w.codes, a.scale, w.scale, first_bias)
        if dtype is INT8.dtype:
            hidden = scaled_mm(*operands, out_dtype=half)
            activate = library.operator(UNIT, "gelu_amax", hidden.device, options.backend)
            activated, largest = activate(hidden)
            h = quantize_by_amax(activated, largest, dtype, transposed=True, **draws)
        else:
            hidden, largest = scaled_mm_amax(*operands, out_dtype=half)
            h, _ = _quantized_gelu(hidden, None, largest, dtype, draws, False)
        v = weight_operand(second, dtype, options, True, _SECOND)
        ctx.save_for_backward(
            a.transposed, a.scale, w.transposed, w.scale, hidden, h.transposed, h.scale, v.transposed, v.scale
        )
        ctx.options = options
        ctx.dtypes = [None if t is None else t.dtype for t in (x, first, first_bias, second, second_bias)]
        return scaled_mm(h.codes, v.codes, h.scale, v.scale, second_bias, out_dtype=half)

    @staticmethod
    @differentiated_once(EIGHT_BITS)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, a_scale, w, w_scale, hidden, h, h_scale, v, v_scale = ctx.saved_tensors
        options: KernelOptions = ctx.options
        dtype, half, wanted = ctx.gradient_dtype, options.half_dtype, ctx.needs_input_grad
        x_dtype, first_dtype, first_bias_dtype, second_dtype, second_bias_dtype = ctx.dtypes
        grad_x = grad_first = grad_first_bias = None
        g = quantize_gradient(grad, dtype, options, _GRADIENT, True)
        grad_second = weight_gradient(g, h, h_scale, second_dtype, options) if wanted[3] else None
        grad_second_bias = bias_gradient(grad, second_bias_dtype) if wanted[4] else None
        if wanted[0] or wanted[1] or wanted[2]:
            operands = (g.codes, v, g.scale, v_scale)
            draws = drawing(options, _HIDDEN_GRADIENT, rounding="stochastic")
            if dtype is INT8.dtype:
                grad_gelu = scaled_mm_unchecked(*operands, None, half)
                differentiate = library.operator(UNIT, "gelu_backward_amax", hidden.device, options.backend)
                grad_hidden, largest = differentiate(grad_gelu, hidden)
                if wanted[2]:
                    grad_first_bias = bias_gradient(grad_hidden, first_bias_dtype)
                e = quantize_by_amax(grad_hidden, largest, dtype, transposed=True, **draws)
            else:
                grad_gelu, largest = scaled_mm_amax(*operands, out_dtype=half)
                e, total = _quantized_gelu(hidden, grad_gelu, largest, dtype, draws, wanted[2])
                grad_first_bias = total.to(first_bias_dtype) if wanted[2] else None
            if wanted[0]:
                grad_x = scaled_mm_unchecked(e.codes, w, e.scale, w_scale, None, half).to(x_dtype)
            if wanted[1]:
                grad_first = weight_gradient(e, a, a_scale, first_dtype, options)
        return grad_x, grad_first, grad_first_bias, grad_second, grad_second_bias, None, None


def _quantized_gelu(
    x: Tensor, grad: Tensor | None, largest: Tensor, dtype: torch.dtype, draws: dict[str, Any], sums: bool
) -> tuple[QuantizedMatrix, Tensor]:
    rounding, key, step, backend = draws.values()
    quantize = library.operator(UNIT, "gelu_quantize", x.device, backend)
    *codes, total = quantize(x, grad, largest, dtype, rounding, signed(key), step, sums)
    return QuantizedMatrix(*codes), total


def _gelu_amax(x: Tensor) -> tuple[Tensor, Tensor]:
    """Plain PyTorch: GELU formed in FP32, rounded once; and the largest magnitude of the result."""
    values = F.gelu(x.to(torch.float32)).to(x.dtype).contiguous()
    return values, amax(values, None).reshape(1)


def _gelu_backward_amax(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Plain PyTorch: gradient of GELU at ``x``, formed in FP32, rounded once; and its largest magnitude."""
    values = torch.ops.aten.gelu_backward(grad.to(torch.float32), x.to(torch.float32)).to(x.dtype).contiguous()
    return values, amax(values, None).reshape(1)


def _fake_amax(*tensors: Tensor) -> tuple[Tensor, Tensor]:
    x = tensors[-1]
    return x.new_empty(x.shape), x.new_empty((1,), dtype=torch.float32)


def _gelu_quantize(
    x: Tensor, grad: Tensor | None, largest: Tensor, format: torch.dtype, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Plain PyTorch: codes of GELU of ``x``, or of its gradient, rounded as by the operators above, by a bound.

    The last result is the gradient's sum over rows, if wanted.
    """
    values = (_gelu_amax(x) if grad is None else _gelu_backward_amax(grad, x))[0]
    bound = largest if grad is None else largest * torch.tensor(_STEEPEST, dtype=torch.float32, device=x.device)
    *draws, sums = others
    total = values.sum(0, dtype=torch.float32) if sums else values.new_empty(0, dtype=torch.float32)
    return *plain_by_amax(values, bound, format, *draws, True), total


def _fake_quantize(
    x: Tensor, grad: Tensor | None, largest: Tensor, format: torch.dtype, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, columns = x.shape
    total = x.new_empty((columns if others[-1] else 0,), dtype=torch.float32)
    scale = x.new_empty((1, 1), dtype=torch.float32)
    return x.new_empty((rows, columns), dtype=format), scale, x.new_empty((columns, rows), dtype=format), total


for _schema, _plain, _fake in (
    ("gelu_amax(Tensor x) -> (Tensor, Tensor)", _gelu_amax, _fake_amax),
    ("gelu_backward_amax(Tensor grad, Tensor x) -> (Tensor, Tensor)", _gelu_backward_amax, _fake_amax),
    (
        "gelu_quantize(Tensor x, Tensor? grad, Tensor largest, ScalarType format, str rounding, int key, "
        "Tensor? step, bool sums) -> (Tensor, Tensor, Tensor, Tensor)",
        _gelu_quantize,
        _fake_quantize,
    ),
):
    library.define(_schema, unit=UNIT, plain=_plain, fake=_fake)
