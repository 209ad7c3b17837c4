"""What does an iteration cost beyond its operators? Fitted to whole iterations, never assumed.

The sum of operators leaves out the interpreter between them, the interception of a plan, the autograd engine and the
accumulation of gradients. All of them grow with the number of operators, so one time per operator and pass is fitted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from qsync_opt.cluster import Cluster, DeviceType, Network
from qsync_opt.costs import DeviceProfile, IterationCheck, IterationOverhead
from qsync_opt.io import check_integer
from qsync_opt.model import OpGraph, Role
from qsync_opt.numerics import FORMATS
from qsync_opt.training.build import build_problem
from qsync_opt.training.evaluation import DeviceEvaluation, evaluate_device
from qsync_opt.training.pricing import device_tables, price_operators, uniform_precisions

_ALONE = "alone"
_UNLIMITED_BYTES = 2**60


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPasses:
    """Forward and backward pass of a whole iteration in one uniform precision, measured."""

    forward_ns: int
    backward_ns: int

    def __post_init__(self) -> None:
        check_integer(self.forward_ns, "whole iteration: forward_ns", minimum=1)
        check_integer(self.backward_ns, "whole iteration: backward_ns", minimum=1)


def uniform_choices(graph: OpGraph, profile: DeviceProfile, precision: str) -> dict[str, str]:
    """Precision of every operator when each adjustable one runs in ``precision``, or the next finer that it has."""
    return uniform_precisions(graph, profile, device_tables(graph, profile, _alone(profile)), precision)


def predict_passes(graph: OpGraph, profile: DeviceProfile, precision: str) -> tuple[int, int]:
    """Predicted forward and backward time in nanoseconds of the uniform plan of one worker by itself.

    Args:
        graph: The model.
        profile: The device; its overhead counts.
        precision: Of every adjustable operator, or the next finer one that it has.
    """
    replayed = _replay_uniform(graph, profile, precision)
    return replayed.forward_end_ns, replayed.backward_end_ns - replayed.forward_end_ns


def calibrate(graph: OpGraph, profile: DeviceProfile, measured: Mapping[str, MeasuredPasses]) -> DeviceProfile:
    """Fit the overhead per operator to whole iterations and return the profile with it.

    The overhead of backward makes the relative errors of the backward passes sum to zero, that of forward then those
    of both passes together; neither is below zero. What they leave unexplained is in ``profile.overhead.residual``.

    Args:
        graph: The model.
        profile: Of the device; an overhead in it is replaced.
        measured: By precision, whole iterations under the uniform plan of that precision, applied by the runtime.

    Source: ours.
    """
    bare = replace(profile, overhead=IterationOverhead())
    if not measured:
        return bare
    predictors = {precision: _UniformPredictor(graph, bare, precision) for precision in measured}

    def excess(overhead: IterationOverhead, *, whole: bool) -> float:
        total = 0.0
        for precision, passes in measured.items():
            forward_ns, backward_ns = predictors[precision].predict(replace(bare, overhead=overhead))
            predicted_ns = backward_ns + (forward_ns if whole else 0)
            total += predicted_ns / (passes.backward_ns + (passes.forward_ns if whole else 0)) - 1.0
        return total

    # An overhead that fills the longest pass by itself is too much.
    limit_ns = 1 + max(max(p.forward_ns, p.backward_ns) for p in measured.values()) // len(graph)
    backward_ns = _largest(lambda x: excess(IterationOverhead(backward_ns_per_operator=x), whole=False) <= 0, limit_ns)
    fitted = IterationOverhead(backward_ns_per_operator=backward_ns)
    forward_ns = _largest(lambda x: excess(replace(fitted, forward_ns_per_operator=x), whole=True) <= 0, limit_ns)
    fitted = replace(fitted, forward_ns_per_operator=forward_ns)
    checks = []
    for precision, passes in measured.items():
        summed, predicted = (predictors[precision].predict(p) for p in (bare, replace(bare, overhead=fitted)))
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


class _UniformPredictor:
    """Predicts a uniform plan under changing overheads; casts and tables are worked out once."""

    def __init__(self, graph: OpGraph, bare: DeviceProfile, precision: str) -> None:
        self._graph = graph
        self._tables = device_tables(graph, bare, _alone(bare))
        self._uniform = uniform_choices(graph, bare, precision)
        replayed = _replay_uniform(graph, bare, precision)
        own_forward_ns, own_backward_ns = self._own(bare)
        self._casts_ns = (
            replayed.forward_end_ns - own_forward_ns,
            replayed.backward_end_ns - replayed.forward_end_ns - own_backward_ns,
        )

    def _own(self, profile: DeviceProfile) -> tuple[int, int]:
        times = price_operators(self._graph, profile, self._tables)
        chosen = [times[name][precision] for name, precision in self._uniform.items()]
        return sum(forward_ns for forward_ns, _ in chosen), sum(backward_ns for _, backward_ns in chosen)

    def predict(self, profile: DeviceProfile) -> tuple[int, int]:
        """Forward and backward nanoseconds."""
        forward_ns, backward_ns = self._own(profile)
        return forward_ns + self._casts_ns[0], backward_ns + self._casts_ns[1]


def _alone(profile: DeviceProfile) -> DeviceType:
    return DeviceType(name=_ALONE, count=1, memory_limit_bytes=_UNLIMITED_BYTES, precisions=tuple(profile.formats))


def _replay_uniform(graph: OpGraph, profile: DeviceProfile, precision: str) -> DeviceEvaluation:
    device = _alone(profile)
    network = Network(latency_s=0.0, bandwidth_bytes_per_s=1.0, source="one worker sends nothing")
    insensitive = {operator.name: dict.fromkeys(FORMATS, 0.0) for operator in graph.by_role(Role.ADJUSTABLE)}
    problem = build_problem(
        graph,
        {_ALONE: profile},
        insensitive,
        Cluster(name=_ALONE, devices=(device,), network=network),
        latency_limit_ns=0,
    )
    return evaluate_device(problem, problem.device(_ALONE), uniform_choices(graph, profile, precision))


def _largest(holds: Callable[[int], bool], limit: int) -> int:
    """Largest integer in 0..limit for which a property holds that ends at some point; 0 if it never holds."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
