"""Traces of the loss's Hessian over every operator's tensors, by Hutchinson's estimator.

Let v be random signs on the elements of all tensors of all operators at once, and H the Hessian of the loss with
respect to them. The mean over v of ``v_t * (H v)_t``, summed over the elements of one tensor t, is the trace of its own
diagonal block, since signs of different elements are independent; weighting by t^2 gives the trace that noise in
proportion to the element's square sees. One backward pass that is differentiated once more yields all tensors. It is
the real Hessian, neither Gauss-Newton nor Fisher, so an estimate can be negative.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from qsync_opt.errors import ModelError
from qsync_opt.model import OpGraph
from qsync_opt.runtimes.torch.interception import OperatorCall
from qsync_opt.runtimes.torch.sensitivity.probes.derivatives import leaves_before
from qsync_opt.runtimes.torch.sensitivity.probes.gradient import (
    adjustable_names,
    sum_calls,
    tapped,
    twice_differentiable,
)
from qsync_opt.runtimes.torch.sensitivity.probes.taps import Key
from qsync_opt.runtimes.torch.sensitivity.products import is_adjustable, operand_slots, replace_operands
from qsync_opt.runtimes.torch.sensitivity.reductions import on_host
from qsync_opt.runtimes.torch.sensitivity.signs import RandomSigns
from qsync_opt.sensitivity import OPERANDS, Curvature


class _Tapper:
    """Handler of an interception: keeps a node of the autograd graph for every operand and result of the operators."""

    def __init__(self, operators: frozenset[str] | None) -> None:
        self._operators = operators
        self._calls: Counter[str] = Counter()
        self.taps: dict[Key, Tensor] = {}

    def __call__(self, call: OperatorCall) -> Any:
        """Run an operator on aliases of its operands, and return an alias of its result."""
        if not is_adjustable(call) or (self._operators is not None and call.name not in self._operators):
            return call.run()
        if not torch.is_grad_enabled():
            raise ModelError(
                f"operator {call.name!r} runs without gradients, where curvature_probes cannot follow its noise: "
                "freeze parameters by requires_grad_(False) instead of torch.no_grad(), or do without curvature_probes"
            )
        number = self._calls[call.name]
        self._calls[call.name] += 1
        slots = operand_slots(call.name, call.op_type, call.function, call.args, call.kwargs)
        operands = []
        for operand, slot in zip(OPERANDS[int(call.op_type == "embedding") :], slots, strict=False):
            x = slot.tensor
            tap = x.view_as(x) if x.requires_grad else x.detach().requires_grad_()
            self.taps[call.name, operand, number] = tap
            operands.append(tap)
        args, kwargs = replace_operands(call.args, call.kwargs, slots, operands)
        output = call.run(*args, **kwargs)
        self.taps[call.name, "output", number] = output = output.view_as(output)
        return output.clone()  # what follows may write into it


def _traces(loss: Tensor, taps: Mapping[Key, Tensor], probes: int, seed: int) -> dict[Key, Tensor]:
    """Per tap: trace of its block of the Hessian, plain and weighted by the squared element over its mean."""
    totals: dict[Key, Tensor] = {}
    if not taps:
        return totals
    start = torch.ones_like(loss, requires_grad=True)
    gradients = torch.autograd.grad(loss, list(taps.values()), start, create_graph=True, allow_unused=True)
    leaves_before(gradients)
    curved = {
        key: gradient
        for key, gradient in zip(taps, gradients, strict=True)
        if gradient is not None and gradient.requires_grad
    }
    random = RandomSigns(seed)
    for probe in range(probes):
        signs = {key: random.like(taps[key].detach()) for key in curved}
        projection = torch.stack([(gradient * signs[key]).sum() for key, gradient in curved.items()]).sum()
        products: tuple[Tensor | None, ...] = torch.autograd.grad(
            projection, [taps[key] for key in curved], allow_unused=True, retain_graph=probe + 1 < probes
        )
        for key, product in zip(curved, products, strict=True):
            if product is None:
                continue
            diagonal, squares = product * signs[key], taps[key].detach().square()
            mean = squares.mean(dtype=torch.float64).clamp(min=torch.finfo(torch.float64).tiny)
            sums = [diagonal.sum(dtype=torch.float64), (diagonal * squares).sum(dtype=torch.float64) / mean]
            estimate = torch.stack(sums) / probes
            totals[key] = totals[key] + estimate if key in totals else estimate
    return totals


def probe_curvatures(
    model: nn.Module, loss_of: Callable[[], Tensor], *, graph: OpGraph | None = None, probes: int, seed: int = 0
) -> dict[str, dict[str, Curvature]]:
    """Traces of the loss's Hessian over the operands and outputs of every adjustable operator, for one batch.

    Needs the memory of a forward and backward pass that is differentiated again. Dropout draws anew in each call.

    Args:
        model: The model.
        loss_of: Runs the model on the batch and returns the loss.
        graph: Limits the operators to its adjustable ones.
        probes: Random vectors. The noise of an estimate comes from the whole Hessian, so small blocks need more of
            them than gains do: 8 to 64.
        seed: Seed of the random vectors.

    Returns:
        Operator to tensor (``first``, ``second``, ``third``, ``output``) to curvature, summed over repeated calls,
        each counted by its tensor's mean square over the mean of all calls.

    Raises:
        ModelError: Some operation of the model has no second derivative, an operator runs without gradients, or there
            is not enough memory.

    Source:
        Hutchinson's estimator, as HAWQ-V2 (Dong et al., NeurIPS 2020) uses it for weights; over activations ours.
    """
    tapper = _Tapper(adjustable_names(graph))
    taps = tapper.taps
    try:
        with twice_differentiable("curvature_probes"):
            with tapped(model, tapper), sdpa_kernel(SDPBackend.MATH):
                loss = loss_of()
            traces = _traces(loss, taps, probes, seed)
        means = on_host([tap.detach().square().mean(dtype=torch.float64) for tap in taps.values()])
        squares = {key: mean for key, (mean,) in zip(taps, means, strict=True)}
    finally:
        taps.clear()
    pairs = {key: np.array(pair) for key, pair in zip(traces, on_host(list(traces.values())), strict=True)}
    if not np.isfinite(list(pairs.values())).all():
        raise ModelError("the loss has curvatures that are not finite: lower the learning rate or collect elsewhere")
    return {
        name: {tensor: Curvature(uniform=float(pair[0]), floating=float(pair[1])) for tensor, pair in tensors.items()}
        for name, tensors in sum_calls(pairs, squares).items()
    }
