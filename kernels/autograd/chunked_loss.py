"""Cross-entropy of a linear layer's result, whose logits exist only for some rows at a time.

The logits of N tokens and V classes, their FP32 copies and their gradient are the largest tensors of a language model's
step. Here the forward pass goes through the rows in chunks: logits, their softmax in FP32, the loss, and at once the
gradient of the logits, in their place, and its products with the weight and the input. What is kept for the backward
pass are the gradients themselves, dx (N, K) and dW (V, K), which it multiplies by the gradient of the loss.

Operations and roundings are those of the layer followed by ``F.cross_entropy`` in FP32: logits and their gradient are
rounded to the format of the products, sums are FP32. The gradient of the logits is rounded before it is divided by the
number of tokens, so that FP16 does not underflow. In 8 bits each chunk has scales of its own.

Axis letters: N rows, K features, V classes.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qsync_opt.errors import UnsupportedError
from qsync_opt.kernels.autograd.derivatives import differentiated_once
from qsync_opt.kernels.autograd.float_modes import fp32_mode
from qsync_opt.kernels.autograd.products import (
    converted,
    half_product,
    quantize_gradient,
    quantize_operand,
    weight_gradient,
    weight_operand,
)
from qsync_opt.kernels.compilation import library
from qsync_opt.kernels.cross_entropy import cross_entropy_rows
from qsync_opt.kernels.matmul import half_matmul, product_dtype, scaled_mm_unchecked
from qsync_opt.kernels.options import KernelOptions
from qsync_opt.kernels.quantize import PRECISIONS, QuantizedMatrix, dequantize_matrix, signed

CHUNK_BYTES = 256 * 2**20
"""Bytes of a chunk's logits in FP32; about two and a half times as many are needed for a time."""
_ALIGNED = 128
"""Rows of a chunk are a multiple of this, which 8-bit products like."""
_STREAMS = 8
"""Random streams of each chunk; those of an operator are fewer."""
_HALF = {"BF16": torch.bfloat16, "FP16": torch.float16}
_TWICE = "the gradient of a chunked cross-entropy cannot be differentiated again: use F.cross_entropy for such a loss"

Chunk = tuple[Tensor, Callable[[Tensor, Tensor | None], tuple[Tensor | None, Tensor | None]]]
"""Logits of some rows, and the products of their gradient: dx, and dW added to that of earlier rows, if there were."""


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    precision: str,
    options: KernelOptions,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    rows: int | None = None,
) -> Tensor:
    """``F.cross_entropy(F.linear(x, weight, bias).float(), target, ...)`` without all logits at once.

    Args:
        x: (N, K).
        weight: (V, K).
        bias: (V,) or None.
        target: (N,) int64.
        precision: ``"BF16"``, ``"FP16"``, ``"FP32"``, ``"TF32"``, ``"INT8"`` or ``"FP8"`` products, or ``""`` for those
            of the element type of ``x``, which FP64 is allowed for too.
        options: Of 8-bit products.
        ignore_index: As in ``F.cross_entropy``.
        label_smoothing: As in ``F.cross_entropy``.
        reduction: ``"mean"`` or ``"sum"``.
        rows: Of a chunk; None: as many as `CHUNK_BYTES` allow.

    Returns:
        The loss, FP32 (FP64 if ``x`` is).

    Source: Gradients in the forward pass as in P.-L. Hsu et al., "Liger Kernel" (2024); products in 8 bits and the
        place of the division are ours.
    """
    mean = reduction == "mean"
    arguments = (x, weight, bias, target, precision, options, ignore_index, label_smoothing, mean, rows or 0)
    result: Tensor = _LinearCrossEntropy.apply(*arguments)  # type: ignore[no-untyped-call]
    return result


def chunk_rows(rows: int, classes: int) -> int:
    """Rows of each chunk, equal but for the last."""
    chunks = math.ceil(rows / max(_ALIGNED, CHUNK_BYTES // (4 * max(1, classes))))
    return max(1, rows) if chunks <= 1 else _ALIGNED * math.ceil(rows / chunks / _ALIGNED)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        precision: str,
        options: KernelOptions,
        ignore_index: int,
        label_smoothing: float,
        mean: bool,
        rows: int,
    ) -> Tensor:
        wanted = list(ctx.needs_input_grad[:3])
        how = (options.rounding, options.activation_granularity, options.weight_granularity, options.half_format)
        stream = (options.backward, options.backend, signed(options.seed), signed(options.offset), options.step)
        loss, factor, *gradients = _OPERATOR(
            x, weight, bias, target, precision, ignore_index, label_smoothing, mean, rows, wanted, *how, *stream
        )
        ctx.save_for_backward(factor, *(g if want else None for g, want in zip(gradients, wanted, strict=True)))
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        return loss  # type: ignore[no-any-return]

    @staticmethod
    @differentiated_once(_TWICE)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        factor, *gradients = ctx.saved_tensors
        scale = grad * factor
        # A scalar in FP32 would be rounded to the 16 bits of the tensor that it multiplies.
        results = (
            None if gradient is None else (converted(gradient, scale.dtype) * scale).to(dtype)
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        )
        return *results, None, None, None, None, None, None, None


def _sums(x: Tensor) -> torch.dtype:
    """Type of sums: FP64 for FP64, else FP32."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def _run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    precision: str,
    ignore_index: int,
    label_smoothing: float,
    mean: bool,
    rows: int,
    wanted: Sequence[bool],
    *how: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss, what its gradients are to be multiplied by, and the gradients of x, weight and bias (empty: not wanted)."""
    rows = rows or chunk_rows(x.shape[0], weight.shape[0])
    with _mode(precision, x.device):
        options = _options(*how)
        begin = _head(x, weight, bias, precision, options)
        sums = _sums(x)
        total = torch.zeros((), dtype=sums, device=x.device)
        valid = target != ignore_index
        factor = valid.sum().to(sums).reciprocal() if mean else torch.ones_like(total)
        pieces: list[Tensor] = []
        grad_weight = grad_bias = None
        for number, first in enumerate(range(0, x.shape[0], rows)):
            part = slice(first, first + rows)
            logits, products = begin(number, x[part], wanted)
            losses = cross_entropy_rows(
                logits,
                target[part],
                ignore_index=ignore_index,
                label_smoothing=label_smoothing,
                gradient=any(wanted),
                backend=options.backend,
            )
            total = total + losses.sum()
            if not any(wanted):
                continue
            gradient = logits  # overwritten by it
            del logits
            dx, grad_weight = products(gradient, grad_weight)
            if dx is not None:
                pieces.append(dx)
            if wanted[2]:
                grad_bias = _sum(grad_bias, gradient.sum(0, dtype=sums))
            del gradient, dx, products
        loss = total * factor if mean else total  # without a valid row 0 * infinity, which is NaN as torch's
        factor = torch.where(factor.isinf(), 0, factor)
        grad_x = torch.cat(pieces) if len(pieces) > 1 else pieces[0] if pieces else None
        return loss, factor, *_present(x, weight, precision, wanted, (grad_x, grad_weight, grad_bias), how[3])


def _sum(total: Tensor | None, more: Tensor) -> Tensor:
    """A sum that is added to in place, if there is one yet."""
    return more if total is None else total.add_(more)


def _present(
    x: Tensor,
    weight: Tensor,
    precision: str,
    wanted: Sequence[bool],
    gradients: Sequence[Tensor | None],
    half_format: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients; zeros for those of no rows, and empty tensors for what is not wanted."""
    half = _product_type(x, precision, half_format)
    shapes = ((x.shape, half), (weight.shape, _sums(x)), (weight.shape[:1], _sums(x)))
    first, second, third = (
        x.new_empty(0) if not want else gradient if gradient is not None else x.new_zeros(shape, dtype=dtype)
        for want, gradient, (shape, dtype) in zip(wanted, gradients, shapes, strict=True)
    )
    return first, second, third


def _product_type(x: Tensor, precision: str, half_format: str) -> torch.dtype:
    """Element type of the logits and of dx."""
    if precision in PRECISIONS:
        return _HALF[half_format]
    return x.dtype if not precision else _HALF.get(precision, torch.float32)


def _fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    x, weight, precision, wanted, half_format = (arguments[i] for i in (0, 1, 4, 9, 13))
    scalar = x.new_empty((), dtype=_sums(x))
    return scalar, torch.empty_like(scalar), *_present(x, weight, precision, wanted, (None, None, None), half_format)


def _options(
    rounding: str,
    activation_granularity: str,
    weight_granularity: str,
    half_format: str,
    backward: str,
    backend: str,
    seed: int,
    offset: int,
    step: Tensor | None,
) -> KernelOptions:
    return KernelOptions(
        rounding=rounding,
        activation_granularity=activation_granularity,
        weight_granularity=weight_granularity,
        half_format=half_format,
        backward=backward,
        backend=backend,
        seed=seed,
        offset=offset,
        step=step,
    )


def _mode(precision: str, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """How FP32 tensors are multiplied: as the precision says, if it does."""
    if device.type != "cuda" or precision not in ("FP32", "TF32"):
        return contextlib.nullcontext()
    return fp32_mode("matmul", "tf32" if precision == "TF32" else "ieee")


def _head(
    x: Tensor, weight: Tensor, bias: Tensor | None, precision: str, options: KernelOptions
) -> Callable[[int, Tensor, Sequence[bool]], Chunk]:
    """The linear layer, whose weight is cast or quantized once: gives the `Chunk` of rows with some number."""
    if precision in PRECISIONS:
        return _eight_bit_head(weight, bias, precision, options)
    dtype = _product_type(x, precision, options.half_format)
    if dtype in _HALF.values():
        operand = product_dtype(x.device, dtype)
        w = weight.to(dtype).to(operand)
    else:
        operand, w = dtype, weight.to(dtype)
    b = None if bias is None else bias.to(dtype)

    def begin(_: int, rows: Tensor, wanted: Sequence[bool]) -> Chunk:
        rows = rows.to(dtype)
        logits = F.linear(rows.to(operand), w, None if b is None else b.to(operand)).to(dtype)

        def products(gradient: Tensor, dw: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
            dx = (gradient.to(operand) @ w).to(dtype) if wanted[0] else None
            if wanted[1] and dtype in _HALF.values():
                dw = half_product(gradient, rows, _sums(rows), dw)
            elif wanted[1]:
                dw = _sum(dw, gradient.mT @ rows)
            return dx, dw

        return logits, products

    return begin


def _eight_bit_head(
    weight: Tensor, bias: Tensor | None, precision: str, options: KernelOptions
) -> Callable[[int, Tensor, Sequence[bool]], Chunk]:
    codes, gradient_codes = (form.dtype for form in PRECISIONS[precision])
    half, eight = options.half_dtype, options.backward == "eight"
    w = weight_operand(weight, codes, replace(options, weights="call"), eight)

    @functools.cache
    def weight_values() -> Tensor:
        return dequantize_matrix(w.codes, w.scale, half, backend=options.backend)

    def begin(number: int, rows: Tensor, wanted: Sequence[bool]) -> Chunk:
        streams = number * _STREAMS, number * _STREAMS + 3
        x = quantize_operand(rows, codes, options.activation_granularity, options, eight and wanted[1], streams)
        logits = scaled_mm_unchecked(x.codes, w.codes, x.scale, w.scale, bias, half)

        def in_half(gradient: Tensor, dw: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
            dx = None
            if wanted[0]:
                dx = half_matmul(gradient, weight_values(), half)
            if wanted[1]:
                values = dequantize_matrix(x.codes, x.scale, half, backend=options.backend)
                dw = half_product(gradient, values, torch.float32, dw)
            return dx, dw

        def in_eight(gradient: Tensor, dw: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
            dx = None
            g: QuantizedMatrix = quantize_gradient(
                gradient, gradient_codes, options, number * _STREAMS + 2, bool(wanted[1])
            )
            if wanted[0]:
                assert w.transposed is not None and w.transposed_scale is not None
                dx = scaled_mm_unchecked(g.codes, w.transposed, g.scale, w.transposed_scale, None, half)
            if wanted[1]:
                assert x.transposed is not None and x.transposed_scale is not None
                dw = weight_gradient(g, x.transposed, x.transposed_scale, torch.float32, options, dw)
            return dx, dw

        return logits, in_eight if eight else in_half

    return begin


_HOW = "str rounding, str activation_granularity, str weight_granularity, str half_format, str backward, str backend"
_OPERATOR = library.define(
    "linear_cross_entropy(Tensor x, Tensor weight, Tensor? bias, Tensor target, str precision, int ignore_index, "
    f"float label_smoothing, bool mean, int rows, bool[] wanted, {_HOW}, int seed, int offset, Tensor? step) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    unit=None,
    plain=_run,
    fake=_fake,
)


def check_loss_arguments(x: Tensor, weight: Tensor, target: Tensor, reduction: str, label_smoothing: float) -> None:
    """Refuse what `linear_cross_entropy` does not take.

    Raises:
        UnsupportedError: Shapes, element types, reduction or smoothing; the text names the argument.
    """
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise UnsupportedError(
            f"x is {tuple(x.shape)} and weight {tuple(weight.shape)}: needed are (.., K) and (classes, K)"
        )
    if target.shape != x.shape[:-1] or target.dtype is not torch.int64:
        raise UnsupportedError(
            f"target is {tuple(target.shape)} of {target.dtype}: needed are classes, {tuple(x.shape[:-1])} of int64; "
            "for probabilities use F.cross_entropy"
        )
    if reduction not in ("mean", "sum"):
        raise UnsupportedError(f"reduction={reduction!r}: allowed are mean, sum")
    if not 0.0 <= label_smoothing <= 1.0:
        raise UnsupportedError(f"label_smoothing={label_smoothing!r}: it is a share, from 0 to 1")
