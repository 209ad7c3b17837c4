"""Linear, GELU, Linear in 8 bits with all six products of a training step, as one operation.

Against three operations this saves passes over the hidden activations. INT8: GELU and its gradient find the largest
magnitude of what they write, so that the quantizer behind them reads it once. FP8: the product before finds that of
what it writes, which bounds GELU of it, and with the largest derivative of GELU its gradient; the quantizer forms GELU
or the gradient on its way and writes codes alone. A scale from a bound costs floating-point codes no precision, only
some of their smallest magnitudes; of INT8 it would cost part of a bit. Codes are scaled per tensor. Saved for the
backward pass are the transposed codes of the operands, and the 16-bit input of GELU, which its gradient needs.

Axis letters: N rows, K input features, H hidden features, M output features.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qsync_opt.errors import UnsupportedError
from qsync_opt.kernels.autograd.float_modes import EIGHT_BITS, differentiated_once
from qsync_opt.kernels.autograd.products_eight import Operand, quantize_operand, weight_operand
from qsync_opt.kernels.compilation import library
from qsync_opt.kernels.matmul import scaled_mm, scaled_mm_amax
from qsync_opt.kernels.options import KernelOptions
from qsync_opt.kernels.quantize import (
    E4M3,
    E5M2,
    INT8,
    UNIT,
    QuantizedMatrix,
    plain_by_amax,
    quantize_by_amax,
    quantize_matrix,
    signed,
    stream_key,
)

# Numbers of the random streams of one call; an operand's second is for columns, which are not scaled apart here.
_INPUT, _FIRST, _SECOND, _HIDDEN, _GRADIENT, _HIDDEN_GRADIENT = (0, 0), (1, 1), (2, 2), 3, 4, 5


def _with_amax(values: Tensor) -> tuple[Tensor, Tensor]:
    if values.numel() == 0:
        return values, values.new_zeros(1, dtype=torch.float32)
    return values, values.abs().amax().to(torch.float32).reshape(1)


def _gelu_amax(x: Tensor) -> tuple[Tensor, Tensor]:
    """Plain PyTorch: GELU formed in FP32, rounded once; and the largest magnitude of the result."""
    return _with_amax(F.gelu(x.to(torch.float32)).to(x.dtype).contiguous())


def _gelu_backward_amax(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Plain PyTorch: gradient of GELU at ``x``, formed in FP32, rounded once; and its largest magnitude."""
    exact = torch.ops.aten.gelu_backward(grad.to(torch.float32), x.to(torch.float32))
    return _with_amax(exact.to(x.dtype).contiguous())


def _gelu_amax_fake(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty((1,), dtype=torch.float32)


def _gelu_backward_amax_fake(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return _gelu_amax_fake(x)


_GELU_AMAX = library.define(
    "gelu_amax(Tensor x) -> (Tensor, Tensor)", unit=UNIT, plain=_gelu_amax, fake=_gelu_amax_fake
)
_GELU_BACKWARD_AMAX = library.define(
    "gelu_backward_amax(Tensor grad, Tensor x) -> (Tensor, Tensor)",
    unit=UNIT,
    plain=_gelu_backward_amax,
    fake=_gelu_backward_amax_fake,
)


# Above the largest derivative of GELU, 1.1289 at the square root of 2, by more than rounding to 16 bits adds.
_STEEPEST = 1.14


def _gelu_quantize(
    x: Tensor,
    grad: Tensor | None,
    largest: Tensor,
    format: torch.dtype,
    rounding: str,
    key: int,
    step: Tensor | None,
    sums: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Plain PyTorch: codes of GELU of ``x``, or of its gradient, rounded as by the operators above, by a bound.

    The last result is the gradient's sum over rows, if wanted.
    """
    values = (_gelu_amax(x) if grad is None else _gelu_backward_amax(grad, x))[0]
    bound = largest if grad is None else largest * torch.tensor(_STEEPEST, dtype=torch.float32, device=x.device)
    total = values.sum(0, dtype=torch.float32) if sums else values.new_empty(0, dtype=torch.float32)
    return *plain_by_amax(values, bound, format, rounding, key, step, True), total


def _gelu_quantize_fake(
    x: Tensor,
    grad: Tensor | None,
    largest: Tensor,
    format: torch.dtype,
    rounding: str,
    key: int,
    step: Tensor | None,
    sums: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, columns = x.shape
    scale, total = (x.new_empty(shape, dtype=torch.float32) for shape in ((1, 1), (columns if sums else 0,)))
    return x.new_empty((rows, columns), dtype=format), scale, x.new_empty((columns, rows), dtype=format), total


_GELU_QUANTIZE = library.define(
    "gelu_quantize(Tensor x, Tensor? grad, Tensor largest, ScalarType format, str rounding, int key, Tensor? step,"
    " bool sums) -> (Tensor, Tensor, Tensor, Tensor)",
    unit=UNIT,
    plain=_gelu_quantize,
    fake=_gelu_quantize_fake,
)


def _operator(compiled: Any, plain: Any, device: torch.device, backend: str) -> Any:
    if backend == "reference":
        return plain
    if device.type == "cuda":
        library.activate(UNIT)
    return compiled


def _hidden_codes(
    a: Operand, w: Operand, bias: Tensor | None, dtype: torch.dtype, options: KernelOptions
) -> tuple[Tensor, QuantizedMatrix]:
    """Input of GELU, and the codes of its result."""
    key = stream_key(options.seed, options.offset, _HIDDEN)
    if dtype is not INT8.dtype:
        hidden, largest = scaled_mm_amax(a.codes, w.codes, a.scale, w.scale, bias, out_dtype=options.half_dtype)
        return hidden, _by_bound(hidden, None, largest, dtype, options.rounding, key, options)[0]
    hidden = scaled_mm(a.codes, w.codes, a.scale, w.scale, bias, out_dtype=options.half_dtype)
    activated, largest = _operator(_GELU_AMAX, _gelu_amax, hidden.device, options.backend)(hidden)
    return hidden, quantize_by_amax(
        activated,
        largest,
        dtype,
        rounding=options.rounding,
        key=key,
        step=options.step,
        transposed=True,
        backend=options.backend,
    )


def _by_bound(
    x: Tensor,
    grad: Tensor | None,
    largest: Tensor,
    dtype: torch.dtype,
    rounding: str,
    key: int,
    options: KernelOptions,
    sums: bool = False,
) -> tuple[QuantizedMatrix, Tensor]:
    quantize = _operator(_GELU_QUANTIZE, _gelu_quantize, x.device, options.backend)
    *codes, total = quantize(x, grad, largest, dtype, rounding, signed(key), options.step, sums)
    return QuantizedMatrix(*codes), total


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        first: Tensor,
        first_bias: Tensor | None,
        second: Tensor,
        second_bias: Tensor | None,
        dtype: torch.dtype,
        options: KernelOptions,
    ) -> Tensor:
        a = quantize_operand(x, dtype, "tensor", options, _INPUT, ctx.needs_input_grad[1])
        w = weight_operand(first, dtype, options, ctx.needs_input_grad[0], _FIRST)
        hidden, h = _hidden_codes(a, w, first_bias, dtype, options)
        v = weight_operand(second, dtype, options, True, _SECOND)
        ctx.save_for_backward(a.turned, a.scale, w.turned, w.scale, hidden, h.transposed, h.scale, v.turned, v.scale)
        ctx.options, ctx.gradient_dtype = options, dtype if dtype is INT8.dtype else E5M2.dtype
        ctx.dtypes = [None if t is None else t.dtype for t in (x, first, first_bias, second, second_bias)]
        return scaled_mm(h.codes, v.codes, h.scale, v.scale, second_bias, out_dtype=options.half_dtype)

    @staticmethod
    @differentiated_once(EIGHT_BITS)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, a_scale, w, w_scale, hidden, h, h_scale, v, v_scale = ctx.saved_tensors
        options: KernelOptions = ctx.options
        x_dtype, first_dtype, first_bias_dtype, second_dtype, second_bias_dtype = ctx.dtypes
        wanted = ctx.needs_input_grad

        def choices(stream: int) -> dict[str, Any]:
            key = stream_key(options.seed, options.offset, stream)
            common = {"rounding": "stochastic", "key": key, "step": options.step, "backend": options.backend}
            return {**common, "transposed": True}

        def weight_gradient(g: Any, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
            result = torch.float32 if dtype is torch.float32 else options.half_dtype
            return scaled_mm(g.transposed, codes, g.scale, scale, out_dtype=result).to(dtype)

        g = quantize_matrix(grad, ctx.gradient_dtype, **choices(_GRADIENT))
        grad_second = weight_gradient(g, h, h_scale, second_dtype) if wanted[3] else None
        grad_second_bias = grad.sum(0, dtype=torch.float32).to(second_bias_dtype) if wanted[4] else None
        grad_x = grad_first = grad_first_bias = None
        if wanted[0] or wanted[1] or wanted[2]:
            if ctx.gradient_dtype is not INT8.dtype:
                grad_gelu, largest = scaled_mm_amax(g.codes, v, g.scale, v_scale, out_dtype=options.half_dtype)
                key = stream_key(options.seed, options.offset, _HIDDEN_GRADIENT)
                common = (largest, ctx.gradient_dtype, "stochastic", key, options, wanted[2])
                e, total = _by_bound(hidden, grad_gelu, *common)
                grad_first_bias = total.to(first_bias_dtype) if wanted[2] else None
            else:
                grad_gelu = scaled_mm(g.codes, v, g.scale, v_scale, out_dtype=options.half_dtype)
                backward = _operator(_GELU_BACKWARD_AMAX, _gelu_backward_amax, grad.device, options.backend)
                grad_hidden, largest = backward(grad_gelu, hidden)
                if wanted[2]:
                    grad_first_bias = grad_hidden.sum(0, dtype=torch.float32).to(first_bias_dtype)
                e = quantize_by_amax(grad_hidden, largest, ctx.gradient_dtype, **choices(_HIDDEN_GRADIENT))
            if wanted[0]:
                grad_x = scaled_mm(e.codes, w, e.scale, w_scale, out_dtype=options.half_dtype).to(x_dtype)
            if wanted[1]:
                grad_first = weight_gradient(e, a, a_scale, first_dtype)
        return grad_x, grad_first, grad_first_bias, grad_second, grad_second_bias, None, None


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
    dtypes = {"INT8": INT8.dtype, "FP8": E4M3.dtype}
    if precision not in dtypes:
        raise UnsupportedError(f"feed_forward precision {precision!r}: allowed are {', '.join(dtypes)}")
    options = replace(
        options or KernelOptions(), activation_granularity="tensor", weight_granularity="tensor", backward="eight"
    )
    rows = x.reshape(-1, x.shape[-1])
    arguments = (rows, first, first_bias, second, second_bias, dtypes[precision], options)
    result: Tensor = _FeedForward.apply(*arguments)  # type: ignore[no-untyped-call]
    return result.view(*x.shape[:-1], second.shape[0])
