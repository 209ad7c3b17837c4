"""Errors of low-precision operators that all runs of a comparison share: noted in one run, added in the others.

Where two runs part, so do their rounding errors, though they draw the same random numbers: a number that has moved by a
fraction of a step rounds to another neighbour. An error and the reversed one then no longer cancel to first order, and
what is left of them hides what they do to second order. Here one run, in full precision, notes at every step what each
operator's kernel would have erred there, in its result and in the gradients it hands on; another run adds the noted
errors of one operator, times a factor of either sign.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from qsync_opt.kernels import ops
from qsync_opt.model import OpGraph, Role
from qsync_opt.runtimes.torch.execution import AppliedPlan, ApplyOptions
from qsync_opt.runtimes.torch.interception import OperatorCall

Errors = dict[int, Tensor]
"""Of one operator: of the gradient of its n-th argument that has one, and at -1 of its result."""
RESULT = -1


def _differentiable(call: OperatorCall) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Any]]:
    """The arguments that get a gradient, and how to call with others in their place."""
    leaves, form = tree_flatten((call.args, dict(call.kwargs)))
    places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad]

    def replaced(tensors: Sequence[Tensor]) -> Any:
        given = list(leaves)
        for place, x in zip(places, tensors, strict=True):
            given[place] = x
        return tree_unflatten(given, form)

    return [leaves[i] for i in places], replaced


class _Noted(torch.autograd.Function):
    """An operator as it is, which notes how another way to run it errs, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any,
        exact: Callable[[Sequence[Tensor]], Tensor],
        low: Callable[[Sequence[Tensor]], Tensor],
        note: Callable[[int, Tensor], None],
        *tensors: Tensor,
    ) -> Tensor:
        with torch.enable_grad():
            own = [x.detach().requires_grad_() for x in tensors]
            result = exact(own)
            error = low(own).float() - result
        note(RESULT, error.detach())
        ctx.inner = own, result, error, note
        return result.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        own, result, error, note = ctx.inner
        found = torch.autograd.grad(error, own, gradient, retain_graph=True)
        for number, x in enumerate(found):
            note(number, x)
        return None, None, None, *torch.autograd.grad(result, own, gradient)


class NotingPlan(AppliedPlan):
    """Everything in FP32, and ``errors`` of every operator as its kernel in a low precision would make them.

    They are of the last pass forward and backward, in tensors that stay where they are.
    """

    def __init__(
        self, model: nn.Module, errors: dict[str, Errors], precision: str, graph: OpGraph, options: ApplyOptions
    ) -> None:
        self.errors = errors
        plan = {o.name: precision if o.name in self.errors else "FP32" for o in graph.by_role(Role.ADJUSTABLE)}
        super().__init__(model, plan, graph, options)

    def __call__(self, call: OperatorCall) -> Any:
        """Run one operator."""
        if call.name not in self.errors or not self.interception.training or not torch.is_grad_enabled():
            return super().__call__(call)
        tensors, replaced = _differentiable(call)
        note = functools.partial(_note, self.errors[call.name])
        low_of = super().__call__

        def exact(given: Sequence[Tensor]) -> Any:
            args, kwargs = replaced(given)
            return ops.execute(call.op_type, "FP32", call.function, args, kwargs)

        def low(given: Sequence[Tensor]) -> Any:
            args, kwargs = replaced(given)
            return low_of(OperatorCall(call.name, call.op_type, call.module, call.function, args, kwargs))

        return _Noted.apply(exact, low, note, *tensors)  # type: ignore[no-untyped-call]


def _note(errors: Errors, number: int, error: Tensor) -> None:
    if number in errors:
        errors[number].copy_(error)
    else:
        errors[number] = error.detach().clone()


class _WithError(torch.autograd.Function):
    """A tensor as it is; its gradient with an error added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, error: Tensor, factor: float) -> Tensor:
        ctx.error, ctx.factor = error, factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return torch.add(gradient, ctx.error, alpha=ctx.factor), None, None


class ErringPlan(AppliedPlan):
    """Everything in FP32; to the results and gradients of one operator the noted errors are added, times a factor."""

    def __init__(
        self,
        model: nn.Module,
        name: str,
        errors: Mapping[int, Tensor],
        graph: OpGraph,
        options: ApplyOptions,
        factor: float,
    ) -> None:
        self._name, self._errors, self._factor = name, errors, factor
        super().__init__(model, {o.name: "FP32" for o in graph.by_role(Role.ADJUSTABLE)}, graph, options)
        self._changes_nothing = False  # FP32 everywhere would otherwise be left to torch after the first pass

    def __call__(self, call: OperatorCall) -> Any:
        """Run one operator."""
        if call.name != self._name or not self.interception.training or not torch.is_grad_enabled():
            return super().__call__(call)
        tensors, replaced = _differentiable(call)
        erring = [
            _WithError.apply(x, self._errors[number], self._factor)  # type: ignore[no-untyped-call]
            for number, x in enumerate(tensors)
        ]
        args, kwargs = replaced(erring)
        result = super().__call__(OperatorCall(call.name, call.op_type, call.module, call.function, args, kwargs))
        return torch.add(result, self._errors[RESULT], alpha=self._factor)
