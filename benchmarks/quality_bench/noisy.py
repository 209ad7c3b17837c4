"""Models under a plan, with the error of their low-precision operators as it is or made larger.

A factor A runs an 8-bit operator twice, in the reference precision and through the real kernel, and hands on
``reference + A * (kernel - reference)``, gradients likewise: the kernel's own error, A times as large (for a grid, what
log2(A) bits less would make). Variances grow by A squared, nothing else changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from frozen import Masks
from torch import Tensor, nn

from qsync_opt.kernels import ops
from qsync_opt.model import OpGraph, Role
from qsync_opt.runtimes.torch.execution import AppliedPlan, ApplyOptions
from qsync_opt.runtimes.torch.interception import OperatorCall
from qsync_opt.runtimes.torch.sensitivity import full_precision

EIGHT_BITS = ("INT8", "INT8-BWD8", "FP8")


class MagnifiedPlan(AppliedPlan):
    """A plan whose 8-bit operators err ``factor`` times as much as their kernels do.

    ``widened`` hands results on in FP32, so that what lies between planned operators rounds nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Mapping[str, str],
        graph: OpGraph,
        options: ApplyOptions,
        *,
        factor: float = 1.0,
        reference: str = "FP32",
        widened: bool = False,
    ) -> None:
        self._factor, self._reference, self._widened = factor, reference, widened
        adjustable = {operator.name: plan.get(operator.name, "FP32") for operator in graph.by_role(Role.ADJUSTABLE)}
        super().__init__(model, adjustable, graph, options)

    def __call__(self, call: OperatorCall) -> Any:
        """Run one operator."""
        low = super().__call__(call)
        if self._widened and isinstance(low, Tensor) and low.is_floating_point():
            low = low.float()
        if self._factor == 1.0 or self.precisions.get(call.name) not in EIGHT_BITS or not self.interception.training:
            return low
        exact = ops.execute(call.op_type, self._reference, call.function, call.args, call.kwargs)
        magnified = torch.lerp(exact.float(), low.float(), self._factor)
        return magnified if self._reference == "FP32" else magnified.to(low.dtype)


@contextlib.contextmanager
def planned(
    model: nn.Module, plan: Mapping[str, str], graph: OpGraph, options: ApplyOptions, **magnified: Any
) -> Iterator[MagnifiedPlan]:
    """The model under a plan within the block."""
    applied = MagnifiedPlan(model, plan, graph, options, **magnified)
    try:
        yield applied
    finally:
        applied.interception.remove()


def gradient(model: nn.Module, batch: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of all parameters for one batch."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(model(*batch), parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


def squared_distance(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Squared norm of the difference, all parameters together."""
    sums = [(x.float() - y.float()).square().sum(dtype=torch.float64) for x, y in zip(a, b, strict=True)]
    return float(torch.stack(sums).sum())


def added_variance(
    model: nn.Module,
    batch: Sequence[Tensor],
    exact: Sequence[Tensor],
    plan: Mapping[str, str],
    graph: OpGraph,
    options: ApplyOptions,
    draws: int,
    factor: float = 1.0,
    widened: bool = False,
) -> list[float]:
    """Squared distance of the gradient under a plan from the exact one, per draw of the rounding."""
    with full_precision(), planned(model, plan, graph, options, factor=factor, widened=widened):
        return [squared_distance(gradient(model, batch), exact) for _ in range(draws)]


def added_parts(
    model: nn.Module,
    batch: Sequence[Tensor],
    exact: Sequence[Tensor],
    plan: Mapping[str, str],
    graph: OpGraph,
    options: ApplyOptions,
    draws: int,
    factor: float = 1.0,
) -> dict[str, float]:
    """Of what a plan adds: the squared shift of the mean gradient, and the mean of all with rectifiers frozen.

    The shift is the mean over pairs of draws of the product of their deviations. Empty without rectifiers.
    """
    masks = Masks()
    with full_precision():
        masks.record(lambda: gradient(model, batch))
    if not masks:
        return {}
    frozen, sums, squares = 0.0, [torch.zeros_like(g) for g in exact], 0.0
    with full_precision(), planned(model, plan, graph, options, factor=factor):
        for _ in range(draws):
            frozen += squared_distance(masks.run(lambda: gradient(model, batch)), exact) / draws
            noisy = gradient(model, batch)
            squares += squared_distance(noisy, exact)
            for known, g, true in zip(sums, noisy, exact, strict=True):
                known += g - true
    whole = squared_distance(sums, [torch.zeros_like(g) for g in sums])
    return {"shift": (whole - squares) / (draws * (draws - 1)), "frozen": frozen}


def exact_gradient(model: nn.Module, batch: Sequence[Tensor]) -> list[Tensor]:
    """In true FP32."""
    with full_precision():
        return gradient(model, batch)
