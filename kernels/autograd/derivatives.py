"""The refusal of second derivatives by operators whose gradient has none."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

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
    """Decorate the ``backward``, returning a tuple, of an autograd function whose derivative is not known.

    ``torch.autograd.function.once_differentiable`` lets gradients pass as constants where the incoming gradient
    requires none (the last layer under a sum): the second derivative then silently lacks that layer's part. This
    decorator always refuses, by a RuntimeError with the text ``reason``.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def once(ctx: Any, *gradients: Any) -> Any:
            if not torch.is_grad_enabled():
                return backward(ctx, *gradients)
            with torch.no_grad():
                result = backward(ctx, *gradients)
            if torch.compiler.is_compiling():  # a compiler refuses to differentiate twice
                return result
            differentiable = (None if value is None else value.detach().requires_grad_() for value in result)
            return _DelayedError(reason.encode(), len(result))(*differentiable)

        return once

    return decorate
