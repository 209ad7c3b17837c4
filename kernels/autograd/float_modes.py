"""FP32 and TF32 as properties of one operator: set around its forward and its backward, then put back.

Whether CUDA multiplies FP32 tensors in TF32 is global state of torch, and convolutions do it by default. A plan wants
it per operator. The state is therefore set for the time of one call and restored, in the backward pass as well, where
the products run long after the call: hence autograd functions with explicit backward products instead of the
built-in ones, which would read the global state of that later time. A compiled graph cannot set the state; there the
products are operators of their own (``*_in_mode``), which set it when they run.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qsync_opt.kernels.compilation import define_opaque

_DelayedError: Any = torch._C._functions.DelayedError

EIGHT_BITS = (
    "the gradient of an operator in 8 bits cannot be differentiated again: keep INT8 and FP8 out of a plan for a loss "
    "that holds gradients, such as a gradient penalty (precisions=('FP32', 'BF16'))"
)
TF32 = (
    "the gradient of an operator cannot be differentiated again in TF32, nor in FP32 where torch is set to multiply in "
    "TF32: keep TF32 out of the plan and that setting at FP32 for a loss that holds gradients, such as a gradient "
    "penalty"
)


def differentiated_once(reason: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator for the ``backward`` of an autograd function whose derivative is not known.

    As ``torch.autograd.function.once_differentiable``, except that this one refuses always. Torch's lets gradients pass
    as constants where what arrives needs no gradient (the last layer under a sum): the second derivative then lacks
    that layer's part, silently.

    Args:
        reason: Text of the RuntimeError that a second differentiation ends in.
    """

    def decorated(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def once(ctx: Any, *gradients: Any) -> Any:
            with torch.no_grad():
                found = backward(ctx, *gradients)
            # A compiler differentiates nothing twice, and refuses by itself.
            if torch.compiler.is_compiling() or not torch.is_grad_enabled():
                return found
            many = found if isinstance(found, tuple) else (found,)
            refused = _DelayedError(reason.encode(), len(many))(*map(_needing_gradient, many))
            return refused if isinstance(found, tuple) else refused[0]

        return once

    return decorated


def _needing_gradient(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.detach().requires_grad_()


def _setting(family: str) -> Any:
    backends: Any = torch.backends
    return backends.cuda.matmul if family == "matmul" else backends.cudnn.conv


@torch.compiler.assume_constant_result
def current_mode(family: str) -> str:
    """``"ieee"`` or ``"tf32"``: how CUDA multiplies FP32 tensors now; family is ``"matmul"`` or ``"conv"``.

    A compiled graph takes what holds when it is traced.
    """
    return "tf32" if _setting(family).fp32_precision == "tf32" else "ieee"


class _Mode:
    """A class, because a generator takes several times as long to enter and leave, twice per operator and pass."""

    __slots__ = ("_before", "_mode", "_setting")

    def __init__(self, family: str, mode: str) -> None:
        self._setting, self._mode = _setting(family), mode
        self._before = ""

    def __enter__(self) -> None:
        self._before = self._setting.fp32_precision
        if self._before != self._mode:
            self._setting.fp32_precision = self._mode

    def __exit__(self, *_: object) -> None:
        if self._before != self._mode:
            self._setting.fp32_precision = self._before


def fp32_mode(family: str, mode: str) -> contextlib.AbstractContextManager[None]:
    """Multiply FP32 tensors in ``mode`` within the block; the setting found before is restored after it."""
    return _Mode(family, mode)


def _product_in_mode(a: Tensor, b: Tensor, mode: str) -> Tensor:
    with fp32_mode("matmul", mode):
        return torch.matmul(a, b).contiguous()


def _product_like(a: Tensor, b: Tensor, mode: str) -> Tensor:
    return a.new_empty(torch.matmul(a, b).shape)


def _convolution_in_mode(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    mode: str,
) -> Tensor:
    with fp32_mode("conv", mode):
        return torch.convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)


def _convolution_like(*args: Any) -> Tensor:
    return torch.convolution(*args[:-1])


def _convolution_backward_in_mode(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: list[int] | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    wanted: list[bool],
    mode: str,
) -> tuple[Tensor, ...]:
    geometry = (stride, padding, dilation, transposed, output_padding, groups)
    with fp32_mode("conv", mode):
        grads = torch.ops.aten.convolution_backward(grad, x, weight, bias_sizes, *geometry, wanted)
    return tuple(grad.new_empty(0) if g is None else g for g in grads)


def _convolution_backward_like(*args: Any) -> tuple[Tensor, ...]:
    grads = torch.ops.aten.convolution_backward(*args[:-1])
    return tuple(args[0].new_empty(0) if g is None else g for g in grads)


_GEOMETRY = "int[] stride, int[] padding, int[] dilation, bool transposed, int[] output_padding, int groups"
_PRODUCT_IN_MODE = define_opaque(
    "product_in_mode(Tensor a, Tensor b, str mode) -> Tensor", _product_in_mode, _product_like
)
_CONVOLUTION_IN_MODE = define_opaque(
    f"convolution_in_mode(Tensor x, Tensor weight, Tensor? bias, {_GEOMETRY}, str mode) -> Tensor",
    _convolution_in_mode,
    _convolution_like,
)
_CONVOLUTION_BACKWARD_IN_MODE = define_opaque(
    "convolution_backward_in_mode(Tensor grad, Tensor x, Tensor weight, int[]? bias_sizes, "
    f"{_GEOMETRY}, bool[] wanted, str mode) -> (Tensor, Tensor, Tensor)",
    _convolution_backward_in_mode,
    _convolution_backward_like,
)


def _matmul(a: Tensor, b: Tensor, mode: str) -> Tensor:
    if torch.compiler.is_compiling():
        result: Tensor = _PRODUCT_IN_MODE(a, b, mode)
        return result
    with fp32_mode("matmul", mode):
        return torch.matmul(a, b)


class _Product(torch.autograd.Function):
    """a @ b for two matrices or two batches of them, in one mode in both directions."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, mode: str) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.mode = mode
        return _matmul(a, b, mode)

    @staticmethod
    @differentiated_once(TF32)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        grad_a = _matmul(grad, b.mT, ctx.mode) if ctx.needs_input_grad[0] else None
        grad_b = _matmul(a.mT, grad, ctx.mode) if ctx.needs_input_grad[1] else None
        return grad_a, grad_b, None


class _Convolution(torch.autograd.Function):
    """A convolution of any dimension, transposed or not, in one mode in both directions."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: tuple[Any, ...], mode: str
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.geometry, ctx.mode, ctx.bias_sizes = geometry, mode, None if bias is None else list(bias.shape)
        if torch.compiler.is_compiling():
            result: Tensor = _CONVOLUTION_IN_MODE(x, weight, bias, *geometry, mode)
            return result
        with fp32_mode("conv", mode):
            return torch.convolution(x, weight, bias, *geometry)

    @staticmethod
    @differentiated_once(TF32)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[2]]
        if torch.compiler.is_compiling():
            found = _CONVOLUTION_BACKWARD_IN_MODE(grad, x, weight, ctx.bias_sizes, *ctx.geometry, wanted, ctx.mode)
            return (*(g if want else None for g, want in zip(found, wanted, strict=True)), None, None)
        with fp32_mode("conv", ctx.mode):
            grads = torch.ops.aten.convolution_backward(grad, x, weight, ctx.bias_sizes, *ctx.geometry, wanted)
        return (*grads, None, None)


class _Linear(torch.autograd.Function):
    """``x @ weight.T + bias`` of (.., K), (M, K), (M,), in one mode in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, mode: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.mode = mode
        if torch.compiler.is_compiling():
            rows = _matmul(x.reshape(-1, x.shape[-1]), weight.t(), mode)
            product = rows.reshape(*x.shape[:-1], weight.shape[0])
            return product if bias is None else product + bias
        with fp32_mode("matmul", mode):
            return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    @differentiated_once(TF32)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        flat = grad.reshape(-1, weight.shape[0]) if x.numel() else grad.reshape(0, weight.shape[0])
        if ctx.needs_input_grad[0]:
            grad_x = _matmul(flat, weight, ctx.mode).reshape(x.shape)
        if ctx.needs_input_grad[1]:
            grad_weight = _matmul(flat.t(), x.reshape(flat.shape[0], weight.shape[1]), ctx.mode)
        if ctx.needs_input_grad[2]:
            grad_bias = flat.sum(0)
        return grad_x, grad_weight, grad_bias, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, mode: str) -> Tensor:
    """A linear layer of FP32 tensors (.., K), (M, K), (M,) multiplied in ``mode`` forward and backward."""
    result: Tensor = _Linear.apply(x, weight, bias, mode)  # type: ignore[no-untyped-call]
    return result


def product(a: Tensor, b: Tensor, mode: str) -> Tensor:
    """``a @ b`` of FP32 matrices (N, K) (K, M) or batches of them, multiplied in ``mode`` forward and backward."""
    result: Tensor = _Product.apply(a, b, mode)  # type: ignore[no-untyped-call]
    return result


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: tuple[Any, ...], mode: str) -> Tensor:
    """A convolution of FP32 tensors in ``mode``; geometry as ``torch.convolution`` takes it after the bias."""
    result: Tensor = _Convolution.apply(x, weight, bias, geometry, mode)  # type: ignore[no-untyped-call]
    return result
