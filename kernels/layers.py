"""Trainable layers in 8 bits: Linear, FeedForward and Embedding as modules, matmul and embedding as functions.

Their parameters are FP32 or 16-bit master weights with the names that torch's layers have in ``state_dict``. Rounding
noise follows ``options``: raise ``options.step`` in place between training steps (or pass options with another offset)
for new noise in every step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qsync_opt.errors import UnsupportedError
from qsync_opt.kernels import ops
from qsync_opt.kernels.autograd import EIGHT_BITS, check_loss_arguments, differentiated_once, feed_forward
from qsync_opt.kernels.autograd import linear_cross_entropy as chunked
from qsync_opt.kernels.options import KernelOptions
from qsync_opt.kernels.quantize import PRECISIONS, dequantize_matrix, drawing, quantize_matrix
from qsync_opt.numerics import is_eight_bit

_NAMES = {torch.bfloat16: "BF16", torch.float16: "FP16"}


def _codes_dtype(precision: str) -> torch.dtype:
    if precision not in PRECISIONS:
        raise UnsupportedError(f"layer precision {precision!r}: allowed are {', '.join(PRECISIONS)}")
    return PRECISIONS[precision][0].dtype


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    shift: bool = False,
    precision: str | None = None,
    options: KernelOptions | None = None,
) -> Tensor:
    """Cross-entropy of the logits ``x @ weight.T + bias``, which are never held for all tokens at once.

    Loss and gradients are those of the layer and ``F.cross_entropy`` in FP32, up to rounding.

    Args:
        x: (.., K).
        weight: (classes, K).
        target: Classes, (..) int64.
        bias: (classes,) or None.
        ignore_index: As in ``F.cross_entropy``.
        label_smoothing: As in ``F.cross_entropy``.
        reduction: ``"mean"`` over the targets that count, or ``"sum"``.
        shift: Position ``n`` of the last dimension of ``target`` is the target of position ``n - 1`` of ``x``, as in a
            causal language model; the last position has none.
        precision: Of the products; None: the element type of ``x``, or that of ``torch.autocast`` where it is on.
        options: Of products in 8 bits.

    Returns:
        The loss, FP32 (FP64 if ``x`` is).

    Raises:
        UnsupportedError: Shapes, element types or options that are not as above.
    """
    check_loss_arguments(x, weight, target, reduction, label_smoothing)
    if shift:
        target = F.pad(target, (0, 1), value=ignore_index)[..., 1:]
    if precision is None:
        kind = x.device.type
        precision = _NAMES.get(torch.get_autocast_dtype(kind), "") if torch.is_autocast_enabled(kind) else ""
    else:
        ops.require("linear", precision, x.device)
        if is_eight_bit(precision):
            precision, options = ops.eight_bit(precision, options or KernelOptions())
    return chunked(
        x.reshape(-1, x.shape[-1]),
        weight,
        bias,
        target.reshape(-1),
        precision,
        options or KernelOptions(),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )


class LinearCrossEntropy(nn.Linear):
    """The last layer of a classifier with its loss: `linear_cross_entropy` of its parameters.

    Parameters and ``state_dict`` are those of ``nn.Linear(features, classes)``; `logits` gives what that would. To
    whoever exports or intercepts a model's operators the module is a linear layer and a cross-entropy; a plan that is
    applied gives the layer's precision, and computes the loss in chunks.
    """

    choice: Callable[[], tuple[str | None, KernelOptions | None]] | bool | None = None
    """Under a plan: what returns precision and options of the products, or False: not in chunks."""

    def __init__(
        self,
        features: int,
        classes: int,
        bias: bool = True,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        shift: bool = False,
    ) -> None:
        super().__init__(features, classes, bias)
        self.loss_options: dict[str, Any] = {
            "ignore_index": ignore_index,
            "label_smoothing": label_smoothing,
            "reduction": reduction,
            "shift": shift,
        }

    def forward(self, x: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        """The loss of (.., features) and targets (..)."""
        choice, options = self.choice, dict(self.loss_options)
        watched = not torch.compiler.is_compiling() and torch._C._len_torch_function_stack() > 0
        if choice is False or (choice is None and (watched or torch.compiler.is_exporting())):
            if options.pop("shift"):
                target = F.pad(target, (0, 1), value=options["ignore_index"])[..., 1:]
            return F.cross_entropy(self.logits(x).flatten(0, -2), target.flatten(), **options)
        if not callable(choice):
            return linear_cross_entropy(x, self.weight, target, self.bias, **options)
        precision, kernels = choice()
        with contextlib.nullcontext() if torch.compiler.is_compiling() else torch._C.DisableTorchFunction():
            return linear_cross_entropy(
                x, self.weight, target, self.bias, precision=precision, options=kernels, **options
            )

    def logits(self, x: Tensor) -> Tensor:
        """(.., classes) of (.., features)."""
        return super().forward(x)


class _RoundTrip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, options: KernelOptions) -> Tensor:
        ctx.dtype = x.dtype
        rows = x.reshape(-1, x.shape[-1])
        codes, scale, _ = quantize_matrix(rows, dtype, granularity="row", **drawing(options, stream=0))
        return dequantize_matrix(codes, scale, options.half_dtype, backend=options.backend).view(x.shape)

    @staticmethod
    @differentiated_once(EIGHT_BITS)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad.to(ctx.dtype), None, None


def embedding(
    index: Tensor,
    table: Tensor,
    precision: str,
    options: KernelOptions | None = None,
    *,
    padding_idx: int | None = None,
) -> Tensor:
    """Rows of a table after rounding to 8 bits, each with a scale of its own, in the 16-bit format.

    Only the rows that are looked up are rounded. The gradient passes straight to the master rows.

    Args:
        index: Integers, any shape.
        table: (rows, columns).
        precision: ``"INT8"`` or ``"FP8"``.
        options: Rounding, random stream, 16-bit format.
        padding_idx: Row without gradient.
    """
    rows = F.embedding(index, table, padding_idx)
    options = options or KernelOptions()
    result: Tensor = _RoundTrip.apply(rows, _codes_dtype(precision), options)  # type: ignore[no-untyped-call]
    return result


def matmul(a: Tensor, b: Tensor, precision: str, options: KernelOptions | None = None) -> Tensor:
    """``torch.matmul`` in 8 bits: activation times activation, or times a weight of two dimensions."""
    _codes_dtype(precision)
    result: Tensor = ops.execute("matmul", precision, torch.matmul, (a, b), {}, options)
    return result


class Linear(nn.Linear):
    """``torch.nn.Linear`` that computes in 8 bits: ``precision`` is ``"INT8"`` or ``"FP8"``.

    ``options`` say how to round and scale, and in how many bits the backward pass runs.

    Raises:
        UnsupportedError: Another precision; at the call, a device that has no products in it.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        precision: str = "INT8",
        options: KernelOptions | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        _codes_dtype(precision)
        self.precision = precision
        self.options = options or KernelOptions()

    def forward(self, input: Tensor) -> Tensor:
        """Result in the 16-bit format of the options."""
        arguments = (input, self.weight, self.bias)
        result: Tensor = ops.execute("linear", self.precision, F.linear, arguments, {}, self.options)
        return result


class FeedForward(nn.Module):
    """Linear, GELU, Linear as one 8-bit operation, `qsync_opt.kernels.autograd.feed_forward`.

    ``features`` are those of input and output, ``hidden`` those between; scales are per tensor and the backward pass is
    in 8 bits, whatever ``options`` say.
    """

    def __init__(
        self,
        features: int,
        hidden: int,
        bias: bool = True,
        *,
        precision: str = "INT8",
        options: KernelOptions | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _codes_dtype(precision)
        self.first = nn.Linear(features, hidden, bias, device, dtype)
        self.second = nn.Linear(hidden, features, bias, device, dtype)
        self.precision = precision
        self.options = options or KernelOptions()

    def forward(self, input: Tensor) -> Tensor:
        """Result in the 16-bit format of the options."""
        first, second = self.first, self.second
        parameters = (first.weight, first.bias, second.weight, second.bias)
        return feed_forward(input, *parameters, self.precision, self.options)


class Embedding(nn.Embedding):
    """``torch.nn.Embedding`` whose rows are rounded to 8 bits; without ``max_norm`` and sparse gradients."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        precision: str = "INT8",
        options: KernelOptions | None = None,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        _codes_dtype(precision)
        self.precision = precision
        self.options = options or KernelOptions()

    def forward(self, input: Tensor) -> Tensor:
        """Rows in the 16-bit format of the options."""
        return embedding(input, self.weight, self.precision, self.options, padding_idx=self.padding_idx)
