"""Backward passes that cannot be differentiated again, and say so wherever somebody tries."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

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
