"""FP32 and TF32 products and convolutions with gradients: the mode is set around each forward and backward pass.

Whether CUDA multiplies FP32 tensors in TF32 is global state of torch, and convolutions do it by default; a plan needs
it per operator. The state is therefore set for the time of one call and restored, in the backward pass as well, which
runs long after the call: hence autograd functions with explicit backward products instead of the built-in ones, which
would read the global state of that later time. A compiled graph cannot set the state; there the products are operators
of their own (``*_in_mode``), which set it when they run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qsync_opt.kernels.autograd.derivatives import TF32, differentiated_once
from qsync_opt.kernels.compilation import library


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, mode: str) -> Tensor:
    """A linear layer of FP32 tensors (.., K), (M, K), (M,) multiplied in ``mode`` forward and backward."""
    result: Tensor = _Linear.apply(x, weight, bias, mode)  # type: ignore[no-untyped-call]
    return result


def product(a: Tensor, b: Tensor, bias: Tensor | None, mode: str) -> Tensor:
    """``a @ b + bias`` of FP32 matrices (N, K) (K, M) or batches of them in ``mode``, forward and backward."""
    result: Tensor = _Product.apply(a, b, mode)  # type: ignore[no-untyped-call]
    return result if bias is None else result + bias


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: tuple[Any, ...], mode: str) -> Tensor:
    """A convolution of FP32 tensors in ``mode``; geometry as ``torch.convolution`` takes it after the bias."""
    result: Tensor = _Convolution.apply(x, weight, bias, geometry, mode)  # type: ignore[no-untyped-call]
    return result


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
        self._setting, self._mode, self._before = _setting(family), mode, ""

    def __enter__(self) -> None:
        self._before = self._setting.fp32_precision
        if self._before != self._mode:
            self._setting.fp32_precision = self._mode

    def __exit__(self, *_: object) -> None:
        if self._before != self._mode:
            self._setting.fp32_precision = self._before


def fp32_mode(family: str, mode: str) -> contextlib.AbstractContextManager[None]:
    """Multiply FP32 tensors in ``mode`` within the block; the previous setting is restored after it."""
    return _Mode(family, mode)


def set_fp32_modes(modes: str | tuple[str, ...]) -> tuple[str, ...]:
    """Let CUDA multiply FP32 tensors in products, convolutions and recurrent layers as ``modes`` says, from now on.

    Args:
        modes: ``"ieee"`` or ``"tf32"`` for all three, or what an earlier call returned.

    Returns:
        What held before.
    """
    backends: Any = torch.backends
    settings = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
    before = tuple(setting.fp32_precision for setting in settings)
    for setting, mode in zip(settings, (modes,) * 3 if isinstance(modes, str) else modes, strict=True):
        setting.fp32_precision = mode
    return before


def _in_mode(family: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with a further, last argument: the mode that it runs in."""

    def run(*args: Any) -> Any:
        with fp32_mode(family, args[-1]):
            return function(*args[:-1])

    return run


_product_in_mode = _in_mode("matmul", torch.matmul)
_convolution_in_mode = _in_mode("conv", torch.convolution)
_convolution_backward_in_mode = _in_mode("conv", torch.ops.aten.convolution_backward)


def _filled(gradients: tuple[Tensor | None, ...], like: Tensor) -> tuple[Tensor, ...]:
    """Gradients with empty tensors for None, which no operator may return."""
    return tuple(like.new_empty(0) if g is None else g for g in gradients)


_GEOMETRY = "int[] stride, int[] padding, int[] dilation, bool transposed, int[] output_padding, int groups"
_PRODUCT_IN_MODE = library.define(
    "product_in_mode(Tensor a, Tensor b, str mode) -> Tensor",
    unit=None,
    plain=lambda a, b, mode: _product_in_mode(a, b, mode).contiguous(),
    fake=lambda a, b, mode: a.new_empty(torch.matmul(a, b).shape),
)
_CONVOLUTION_IN_MODE = library.define(
    f"convolution_in_mode(Tensor x, Tensor weight, Tensor? bias, {_GEOMETRY}, str mode) -> Tensor",
    unit=None,
    plain=_convolution_in_mode,
    fake=lambda *args: torch.convolution(*args[:-1]),
)
_CONVOLUTION_BACKWARD_IN_MODE = library.define(
    "convolution_backward_in_mode(Tensor grad, Tensor x, Tensor weight, int[]? bias_sizes, "
    f"{_GEOMETRY}, bool[] wanted, str mode) -> (Tensor, Tensor, Tensor)",
    unit=None,
    plain=lambda *args: _filled(_convolution_backward_in_mode(*args), args[0]),
    fake=lambda *args: _filled(torch.ops.aten.convolution_backward(*args[:-1]), args[0]),
)


def _matmul(a: Tensor, b: Tensor, mode: str) -> Tensor:
    result: Tensor = (_PRODUCT_IN_MODE if torch.compiler.is_compiling() else _product_in_mode)(a, b, mode)
    return result


class _Product(torch.autograd.Function):
    """``a @ b`` of two matrices or two batches of them."""

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
    """A convolution of any dimension, transposed or not."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: tuple[Any, ...], mode: str
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.geometry, ctx.mode, ctx.bias_sizes = geometry, mode, None if bias is None else list(bias.shape)
        run = _CONVOLUTION_IN_MODE if torch.compiler.is_compiling() else _convolution_in_mode
        result: Tensor = run(x, weight, bias, *geometry, mode)
        return result

    @staticmethod
    @differentiated_once(TF32)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[2]]
        arguments = (grad, x, weight, ctx.bias_sizes, *ctx.geometry, wanted, ctx.mode)
        if torch.compiler.is_compiling():
            gradients = _CONVOLUTION_BACKWARD_IN_MODE(*arguments)
            return (*(g if want else None for g, want in zip(gradients, wanted, strict=True)), None, None)
        return (*_convolution_backward_in_mode(*arguments), None, None)


class _Linear(torch.autograd.Function):
    """``x @ weight.T + bias`` of (.., K), (M, K), (M,)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, mode: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.mode = mode
        if torch.compiler.is_compiling():
            rows = _matmul(x.reshape(-1, x.shape[-1]), weight.t(), mode)
            result = rows.reshape(*x.shape[:-1], weight.shape[0])
            return result if bias is None else result + bias
        with fp32_mode("matmul", mode):
            return F.linear(x, weight, bias)

    @staticmethod
    @differentiated_once(TF32)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        rows = grad.reshape(-1, weight.shape[0]) if x.numel() else grad.reshape(0, weight.shape[0])
        if ctx.needs_input_grad[0]:
            grad_x = _matmul(rows, weight, ctx.mode).reshape(x.shape)
        if ctx.needs_input_grad[1]:
            grad_weight = _matmul(rows.t(), x.reshape(rows.shape[0], weight.shape[1]), ctx.mode)
        if ctx.needs_input_grad[2]:
            grad_bias = rows.sum(0)
        return grad_x, grad_weight, grad_bias, None
