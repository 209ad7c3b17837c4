"""Traces of the loss's Hessian over every operator's tensors, by Hutchinson's estimator.

Let v be random signs on the elements of all tensors of all operators at once, and H the Hessian of the loss with
respect to them. The mean over v of ``v_t * (H v)_t``, summed over the elements of one tensor t, is the trace of its own
diagonal block, since signs of different elements are independent; weighting by t^2 gives the trace that noise in
proportion to the element's square sees. One backward pass that is differentiated once more yields all tensors. It is
the real Hessian, neither Gauss-Newton nor Fisher, so an estimate can be negative.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from qsync_opt.errors import ModelError
from qsync_opt.model import OpGraph
from qsync_opt.runtimes.torch.interception import OperatorCall
from qsync_opt.runtimes.torch.sensitivity.probes.derivatives import leaves_before
from qsync_opt.runtimes.torch.sensitivity.probes.gradient import adjustable_names, tapped, twice_differentiable
from qsync_opt.runtimes.torch.sensitivity.products import ADJUSTABLE, operand_slots, replace_operands
from qsync_opt.runtimes.torch.sensitivity.reductions import shares_of_mean
from qsync_opt.runtimes.torch.sensitivity.signs import RandomSigns
from qsync_opt.sensitivity import OPERANDS, Curvature


class _Tapper:
    """Handler of an interception: keeps a node of the autograd graph for every operand and result of the operators."""

    def __init__(self, operators: frozenset[str] | None) -> None:
        self._operators = operators
        self.taps: list[tuple[str, str, Tensor]] = []

    def __call__(self, call: OperatorCall) -> Any:
        """Run an operator on aliases of its operands, and return an alias of its result."""
        if call.op_type not in ADJUSTABLE or (self._operators is not None and call.name not in self._operators):
            return call.run()
        slots = operand_slots(call.name, call.op_type, call.function, call.args, call.kwargs)
        operands = []
        for operand, slot in zip(OPERANDS[int(call.op_type == "embedding") :], slots, strict=False):
            x = slot.tensor
            tap = x.view_as(x) if x.requires_grad else x.detach().requires_grad_()
            self.taps.append((call.name, operand, tap))
            operands.append(tap)
        args, kwargs = replace_operands(call.args, call.kwargs, slots, operands)
        output = call.run(*args, **kwargs)
        output = output.view_as(output)
        self.taps.append((call.name, "output", output))
        return output.clone()  # what follows may write into it


def _traces(loss: Tensor, taps: list[tuple[str, str, Tensor]], probes: int, seed: int) -> list[Tensor | None]:
    """Per tap: trace of its block of the Hessian, plain and weighted by the squared element over its mean."""
    if not taps:
        return []
    tensors = [tap for *_, tap in taps]
    start = torch.ones_like(loss, requires_grad=True)
    gradients = torch.autograd.grad(loss, tensors, start, create_graph=True, allow_unused=True)
    leaves_before(gradients)
    curved = [i for i, gradient in enumerate(gradients) if gradient is not None and gradient.requires_grad]
    random = RandomSigns(seed)
    totals: list[Tensor | None] = [None] * len(taps)
    for probe in range(probes):
        signs = {i: random.like(tensors[i].detach()) for i in curved}
        projection = torch.stack([(gradients[i] * signs[i]).sum() for i in curved]).sum()
        products = torch.autograd.grad(
            projection, [tensors[i] for i in curved], allow_unused=True, retain_graph=probe + 1 < probes
        )
        for i, product in zip(curved, products, strict=True):
            if product is None:  # typed as if it never were
                continue  # type: ignore[unreachable]
            diagonal, squares = product * signs[i], tensors[i].detach().square()
            mean = squares.mean(dtype=torch.float64).clamp(min=torch.finfo(torch.float64).tiny)
            sums = [diagonal.sum(dtype=torch.float64), (diagonal * squares).sum(dtype=torch.float64) / mean]
            estimate, total = torch.stack(sums) / probes, totals[i]
            totals[i] = estimate if total is None else total + estimate
    return totals


def _shares(taps: list[tuple[str, str, Tensor]]) -> list[float]:
    """Weights of the calls of an operator: a call with a larger tensor is noisier."""
    calls: Counter[tuple[str, str]] = Counter()
    keys = []
    for name, tensor, _ in taps:
        keys.append((name, tensor, calls[name, tensor]))
        calls[name, tensor] += 1
    several = {key: tap for key, (*_, tap) in zip(keys, taps, strict=True) if calls[key[:2]] > 1}
    squares = {key: float(tap.detach().square().mean(dtype=torch.float64)) for key, tap in several.items()}
    shares = shares_of_mean(squares)
    return [shares.get(key, 1.0) for key in keys]


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
        ModelError: Some operation of the model has no second derivative, or there is not enough memory.

    Source:
        Hutchinson's estimator, as HAWQ-V2 (Dong et al., NeurIPS 2020) uses it for weights; over activations ours.
    """
    tapper = _Tapper(adjustable_names(graph))
    traces_by_operator: dict[str, dict[str, tuple[float, float]]] = {}
    try:
        with twice_differentiable("curvature_probes"):
            with tapped(model, tapper), sdpa_kernel(SDPBackend.MATH):
                loss = loss_of()
            traces = _traces(loss, tapper.taps, probes, seed)
        for (name, tensor, _), share, total in zip(tapper.taps, _shares(tapper.taps), traces, strict=True):
            if total is None:
                continue
            uniform, floating = (share * value for value in total.tolist())
            before = traces_by_operator.setdefault(name, {}).get(tensor, (0.0, 0.0))
            traces_by_operator[name][tensor] = (before[0] + uniform, before[1] + floating)
    finally:
        tapper.taps.clear()
    values = [number for tensors in traces_by_operator.values() for pair in tensors.values() for number in pair]
    if not all(map(math.isfinite, values)):
        raise ModelError("the loss has curvatures that are not finite: lower the learning rate or collect elsewhere")
    return {
        name: {tensor: Curvature(uniform=pair[0], floating=pair[1]) for tensor, pair in tensors.items()}
        for name, tensors in traces_by_operator.items()
    }
