"""The overhead of an iteration beyond its operators, fitted to whole iterations.

The sum of operators leaves out the interpreter between them, the interception of a plan, the autograd engine and the
accumulation of gradients. All of them grow with the number of operators, so one time per operator and pass is fitted.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

from qsync_opt.cluster import Cluster, DeviceType, Network
from qsync_opt.costs import DeviceProfile, IterationCheck, IterationOverhead
from qsync_opt.io import Json, check_fields
from qsync_opt.model import OpGraph, Role
from qsync_opt.numerics import FORMATS
from qsync_opt.training.build import build_problem
from qsync_opt.training.evaluation import evaluate_device
from qsync_opt.training.pricing import device_tables, price_operators, uniform_precisions

_ALONE = "alone"
_FORWARD, _BACKWARD = "forward_ns_per_operator", "backward_ns_per_operator"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPasses:
    """Forward and backward pass of a whole iteration in one uniform precision, measured."""

    forward_ns: Annotated[int, Json(minimum=1)]
    backward_ns: Annotated[int, Json(minimum=1)]

    def __post_init__(self) -> None:
        check_fields(self, "whole iteration")


def uniform_choices(graph: OpGraph, profile: DeviceProfile, precision: str) -> dict[str, str]:
    """Precision of every operator when each adjustable one runs in ``precision``, or the next finer that it has."""
    return uniform_precisions(graph, profile, device_tables(graph, profile, _alone(profile)), precision)


def calibrate(graph: OpGraph, profile: DeviceProfile, measured: Mapping[str, MeasuredPasses]) -> DeviceProfile:
    """Fit the overhead per operator to whole iterations and return the profile with it.

    The overhead of backward makes the relative errors of the backward passes sum to zero, that of forward then those
    of both passes together; neither is below zero. ``profile.overhead.residual`` is the error that remains. An overhead
    that the profile has is replaced. ``measured`` are, by precision, iterations under that precision's uniform plan.

    Source: ours.
    """
    bare = replace(profile, overhead=IterationOverhead())
    if not measured:
        return bare
    predictors = {precision: UniformPredictor(graph, bare, precision) for precision in measured}

    def relative_error(fitted: IterationOverhead, part: str, ns: int) -> float:
        """With so many ns in one part, summed over the precisions; of both passes if the part is that of forward."""
        change: Any = {part: ns}
        overhead = replace(fitted, **change)
        first = 0 if part == _FORWARD else 1
        pairs = (
            (predictors[precision].predict(overhead)[first:], (passes.forward_ns, passes.backward_ns)[first:])
            for precision, passes in measured.items()
        )
        return sum(sum(predicted_ns) / sum(actual_ns) - 1.0 for predicted_ns, actual_ns in pairs)

    # An overhead that fills the longest pass by itself is too much.
    limit_ns = 1 + max(max(p.forward_ns, p.backward_ns) for p in measured.values()) // len(graph)
    candidates = range(1, limit_ns + 1)
    fitted = IterationOverhead()
    for part in (_BACKWARD, _FORWARD):
        # Errors grow with the overhead, so that the number of candidates that are small enough is the largest of them.
        change: Any = {part: bisect.bisect(candidates, 0.0, key=partial(relative_error, fitted, part))}
        fitted = replace(fitted, **change)
    checks = []
    for precision, passes in measured.items():
        summed, predicted = (predictors[precision].predict(each) for each in (IterationOverhead(), fitted))
        checks.append(
            IterationCheck(
                precision=precision,
                forward_ns=passes.forward_ns,
                backward_ns=passes.backward_ns,
                summed_forward_ns=summed[0],
                summed_backward_ns=summed[1],
                predicted_forward_ns=predicted[0],
                predicted_backward_ns=predicted[1],
            )
        )
    return replace(bare, overhead=replace(fitted, iterations=tuple(checks)))


class UniformPredictor:
    """Predicts the passes of one worker under different overheads, each adjustable operator in ``precision``.

    One that lacks it runs in the next finer one that it has; the overhead of the profile itself does not matter.
    """

    def __init__(self, graph: OpGraph, profile: DeviceProfile, precision: str) -> None:
        device = _alone(profile)
        network = Network(latency_s=0.0, bandwidth_bytes_per_s=1.0, source="one worker sends nothing")
        insensitive = {operator.name: dict.fromkeys(FORMATS, 0.0) for operator in graph.by_role(Role.ADJUSTABLE)}
        cluster = Cluster(name=_ALONE, devices=(device,), network=network)
        problem = build_problem(graph, {_ALONE: profile}, insensitive, cluster, latency_limit_ns=0)
        self._graph = graph
        self._profile = profile
        self._tables = device_tables(graph, profile, device)
        self._choices = uniform_precisions(graph, profile, self._tables, precision)
        times = evaluate_device(problem, problem.device(_ALONE), self._choices).operators
        self._forward_casts_ns = sum(time.forward_casts_ns for time in times)
        self._backward_casts_ns = sum(time.backward_casts_ns for time in times)

    def predict(self, overhead: IterationOverhead) -> tuple[int, int]:
        """Forward and backward nanoseconds."""
        times = price_operators(self._graph, replace(self._profile, overhead=overhead), self._tables)
        chosen = [times[name][precision] for name, precision in self._choices.items()]
        return (
            sum(forward_ns for forward_ns, _ in chosen) + self._forward_casts_ns,
            sum(backward_ns for _, backward_ns in chosen) + self._backward_casts_ns,
        )


def _alone(profile: DeviceProfile) -> DeviceType:
    return DeviceType(name=_ALONE, count=1, memory_limit_bytes=2**60, precisions=tuple(profile.formats))
