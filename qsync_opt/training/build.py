"""Construction of a `Problem` from a graph, profiles, sensitivities and a cluster."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import astuple, replace
from typing import Protocol, TypeVar, overload

from qsync_opt.cluster import Cluster, DeviceRole, DeviceType, load_cluster
from qsync_opt.costs import DeviceProfile, MeasuredCost, estimate_extras, load_profile
from qsync_opt.costs.learned import at_quantile, has_intervals, with_times
from qsync_opt.errors import ProblemError
from qsync_opt.io import check_number
from qsync_opt.model import HasGraph, OpGraph, Role, graph_of
from qsync_opt.numerics import FORMATS, PrecisionFormats
from qsync_opt.sensitivity import SensitivityTable, SensitivityValues
from qsync_opt.training.buckets import BucketOptions, gradient_buckets, merge_by_operator, operator_buckets
from qsync_opt.training.evaluation import BYTES_PER_KIB, evaluate_device
from qsync_opt.training.intervals import INTERVALS_KEY
from qsync_opt.training.memory import MemoryModel, model_memory
from qsync_opt.training.planner import fastest
from qsync_opt.training.pricing import device_tables, price_operators, problem_inputs, problem_role
from qsync_opt.training.problem import (
    NO_LIMIT_NS,
    CastCost,
    Communication,
    OperatorCost,
    Problem,
    ProblemDevice,
    ProblemOperator,
)
from qsync_opt.training.propagation import propagate

Sensitivities = Mapping[str, Mapping[str, float]]
"""Operator to precision to sensitivity of one worker."""
SEARCH_SECONDS = 60.0
"""Time limit of the planner's own search for the fastest plan."""
_UNLIMITED_KIB = 2**50


T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class CommunicationCosts(Protocol[T_co]):
    """What makes a training problem one of precisions and communication together."""

    def joint(self, problem: Problem) -> T_co:
        """The problem of both."""


@overload
def build_problem(
    graph: OpGraph | HasGraph,
    profiles: Mapping[str, DeviceProfile],
    sensitivities: Sensitivities,
    cluster: Cluster | str | os.PathLike[str],
    *,
    slack: float = 0.0,
    cast_sharing: str = "edge",
    buckets: BucketOptions | None = None,
    latency_limit_ns: int | None = None,
    sensitivity_estimate: str | None = None,
    by_device: Mapping[str, Sensitivities] | None = None,
    quantile: float | None = None,
    memory_excess_bytes: Mapping[str, int] | None = None,
    communication: None = None,
) -> Problem: ...
@overload
def build_problem(
    graph: OpGraph | HasGraph,
    profiles: Mapping[str, DeviceProfile],
    sensitivities: Sensitivities,
    cluster: Cluster | str | os.PathLike[str],
    *,
    slack: float = 0.0,
    cast_sharing: str = "edge",
    buckets: BucketOptions | None = None,
    latency_limit_ns: int | None = None,
    sensitivity_estimate: str | None = None,
    by_device: Mapping[str, Sensitivities] | None = None,
    quantile: float | None = None,
    memory_excess_bytes: Mapping[str, int] | None = None,
    communication: CommunicationCosts[T],
) -> T: ...
def build_problem(
    graph: OpGraph | HasGraph,
    profiles: Mapping[str, DeviceProfile],
    sensitivities: Sensitivities,
    cluster: Cluster | str | os.PathLike[str],
    *,
    slack: float = 0.0,
    cast_sharing: str = "edge",
    buckets: BucketOptions | None = None,
    latency_limit_ns: int | None = None,
    sensitivity_estimate: str | None = None,
    by_device: Mapping[str, Sensitivities] | None = None,
    quantile: float | None = None,
    memory_excess_bytes: Mapping[str, int] | None = None,
    communication: CommunicationCosts[T] | None = None,
) -> Problem | T:
    """Build the precision-allocation problem of a model on a cluster.

    Args:
        graph: The model: its graph, or as captured.
        profiles: Profile per device type; where one is missing, the path in the cluster file is read.
        sensitivities: For each adjustable operator and precision the sensitivity of one worker; it is multiplied by
            the count of the type, because the gradient's variance adds up over workers. FP32 may be left out (0).
            Precisions that a `SensitivityTable` or `SensitivityValues` excludes are not planned.
        cluster: Device types and network, or the path of a cluster file.
        slack: Lengthens the iteration time of the fastest plan to the latency limit (0.1: by ten percent).
        cast_sharing: ``"edge"`` or ``"producer"``, how the runtime casts an output with several users.
        buckets: How DistributedDataParallel groups gradients.
        latency_limit_ns: Limit on the iteration time; None: that of the fastest plan that fits, times 1 + slack.
        sensitivity_estimate: What the sensitivities were estimated by, if not from collected statistics.
        by_device: Sensitivities of single device types, in place of ``sensitivities``: border formats differ between
            types (8-bit operators answer in FP16 on a T4, in BF16 on an A10), and with them the noise.
        quantile: Price operators whose times have an interval (learned ones) at this quantile instead of the median, so
            that limits hold at it; 0.9 keeps a plan within its limits on most devices. None: at the median.
        memory_excess_bytes: By device type, how far the sum of memory over operators was above a peak that was
            measured; so much less is charged for gradients and transient buffers.
        communication: What compressing gradients costs, such as `qsync_opt.gradients.GradientCosts`; the result is
            then the problem of precisions and schemes together, such as `qsync_opt.gradients.JointProblem`.

    Returns:
        The problem, named after the graph. Each device notes under ``x-memory`` what its static memory is made of, and
        under ``x-memory-operators`` which operators it is charged to; ``x-estimates`` names the device types whose
        profile is an estimate, ``sensitivity_estimate``, and ``quantile``. ``x-intervals`` of a device holds the ends
        of the operators' intervals (see `qsync_opt.training.interval_problem`), where there are any.

    Raises:
        ProblemError: A device type without profile, a profile of another model (the first operators that differ are
            named), a precision that the profile lacks, a missing or unusable sensitivity.

    Source: QSync's cost mapper (IPDPS 2024) as a problem file; casts are priced per edge, memory by
        `qsync_opt.training.memory`, launches by `qsync_opt.training.pricing`.
    """
    check_number(slack, "slack")
    graph = graph_of(graph)
    if isinstance(cluster, str | os.PathLike):
        cluster = load_cluster(cluster)
    if not isinstance(cluster, Cluster):
        raise ProblemError(f"cluster is a {type(cluster).__name__}: a Cluster or the path of a cluster file is needed")
    _check_mapping("profiles", profiles, "DeviceProfile by device type, as {'T4': profile(...)}")
    _check_mapping("sensitivities", sensitivities, "table, as sensitivities(...) returns it")
    by_device = by_device or {}
    for name in by_device:
        cluster.device(name)  # sensitivities for a type that the cluster lacks are a misspelling
    buckets = buckets or BucketOptions()
    used = _profiles(graph, profiles, cluster)
    estimated = used
    if quantile is not None:
        used = {name: at_quantile(profile, quantile) for name, profile in used.items()}
    distributed = cluster.num_workers > 1
    groups = merge_by_operator(gradient_buckets(graph, buckets)) if distributed else ()
    bucket_of = operator_buckets(graph, groups) if groups else dict.fromkeys((o.name for o in graph), None)
    operators = tuple(
        ProblemOperator(
            name=operator.name,
            type=operator.op_type,
            role=problem_role(operator),
            inputs=problem_inputs(operator),
            output_elements=operator.output_elements,
            bucket=bucket_of[operator.name],
        )
        for operator in graph
    )
    devices: list[ProblemDevice] = []
    extras: dict[tuple[str, ...], object] = {**estimate_extras(used, sensitivity_estimate, quantile)}
    for device in cluster.devices:
        profile, own = used[device.name], by_device.get(device.name, sensitivities)
        tables = device_tables(graph, profile, device)
        if device.role is DeviceRole.PLANNED:
            tables = _without(tables, own.excluded if isinstance(own, SensitivityTable | SensitivityValues) else {})
        memory = model_memory(
            graph, profile, tables, distributed=distributed, gradient_as_view=buckets.gradient_as_view
        )
        memory = memory.lowered((memory_excess_bytes or {}).get(device.name, 0))
        devices.append(_device(graph, device, profile, tables, memory, own))
        if device.role is DeviceRole.PLANNED:
            extras |= memory.notes(device.name)
            if has_intervals(estimated[device.name]):
                extras["devices", device.name, INTERVALS_KEY] = _intervals(
                    graph, estimated[device.name], device, devices[-1].operators
                )
    allreduce_ns = tuple(sum(cluster.allreduce_ns(bucket.num_bytes) for bucket in group) for group in groups)
    optimizers = [profile.optimizer for profile in used.values()]
    problem = Problem(
        name=graph.name,
        formats=_formats(devices),
        operators=operators,
        communication=Communication(allreduce_ns=allreduce_ns, peer_ready_ns=(0,) * len(groups)),
        optimizer_ns=max(optimizer.step_ns + optimizer.zero_grad_ns for optimizer in optimizers),
        latency_limit_ns=latency_limit_ns or 0,
        devices=tuple(devices),
        cast_sharing=cast_sharing,
    )
    planned = tuple(problem.device(device.name) for device in cluster.planned)
    with_peers = replace(problem.communication, peer_ready_ns=_peer_ready_ns(problem, cluster))
    problem = replace(problem, devices=planned, communication=with_peers, formats=_formats(planned), extras=extras)
    if latency_limit_ns is None:
        problem = replace(problem, latency_limit_ns=_latency_limit_ns(problem, slack))
    return problem if communication is None else communication.joint(problem)


def _check_mapping(name: str, value: object, needed: str) -> None:
    if not isinstance(value, Mapping):
        raise ProblemError(f"{name} is a {type(value).__name__}: needed is a {needed}")


def _profiles(graph: OpGraph, profiles: Mapping[str, DeviceProfile], cluster: Cluster) -> dict[str, DeviceProfile]:
    for name in profiles:
        cluster.device(name)  # a profile for a type that the cluster lacks is a misspelling
    used: dict[str, DeviceProfile] = {}
    for device in cluster.devices:
        profile = profiles.get(device.name)
        if profile is None and device.profile is None:
            raise ProblemError(
                f"device type {device.name!r} has no profile; hand one over, or add profile: FILE in the cluster file"
            )
        used[device.name] = profile if profile is not None else load_profile(device.profile or "")
        used[device.name].check_graph(graph)
    return used


def _intervals(
    graph: OpGraph,
    profile: DeviceProfile,
    device: DeviceType,
    priced: Mapping[str, Mapping[str, OperatorCost]],
) -> dict[str, dict[str, list[int]]]:
    """Operator and precision to the ends of the intervals: forward low and high, backward low and high.

    On a card an operator whose neighbours take longer may be charged less for launches, so that its price is lower
    where all times are high; the ends are the least and the most of the three prices.
    """
    low, high = (with_times(profile, end) for end in (0.0, 1.0))
    ends = [price_operators(graph, moved, device_tables(graph, moved, device)) for moved in (low, high)]

    def ends_around(name: str, precision: str, planned: OperatorCost) -> list[int]:
        prices = [(planned.forward_ns, planned.backward_ns), *(times[name][precision] for times in ends)]
        return [end(price[direction] for price in prices) for direction in (0, 1) for end in (min, max)]

    result: dict[str, dict[str, list[int]]] = {}
    for name, table in priced.items():
        for precision, planned in table.items():
            if profile.cost(name)[precision].interval_ns:
                result.setdefault(name, {})[precision] = ends_around(name, precision, planned)
    return result


def _without(
    tables: Mapping[str, Mapping[str, MeasuredCost]], excluded: Mapping[str, Mapping[str, str]]
) -> dict[str, dict[str, MeasuredCost]]:
    """Tables without the excluded precisions, each of which has a reason."""
    result = {}
    for operator, table in tables.items():
        reasons = excluded.get(operator, {})
        result[operator] = {precision: cost for precision, cost in table.items() if precision not in reasons}
        if not result[operator]:
            listed = "; ".join(f"{precision}: {reasons[precision]}" for precision in table)
            raise ProblemError(
                f"operator {operator!r} must get none of its precisions ({listed}); allow a finer one in the cluster"
            )
    return result


def _device(
    graph: OpGraph,
    device: DeviceType,
    profile: DeviceProfile,
    tables: Mapping[str, Mapping[str, MeasuredCost]],
    memory: MemoryModel,
    sensitivities: Sensitivities,
) -> ProblemDevice:
    times = price_operators(graph, profile, tables)
    operators: dict[str, dict[str, OperatorCost]] = {}
    for operator in graph:
        sensitive = device.role is DeviceRole.PLANNED and problem_role(operator) is Role.ADJUSTABLE
        operators[operator.name] = {
            precision: OperatorCost(
                forward_ns=forward_ns,
                backward_ns=backward_ns,
                memory_kib=memory.kib(operator.name, precision),
                sensitivity=device.count * _sensitivity(sensitivities, operator.name, precision) if sensitive else 0.0,
            )
            for precision, (forward_ns, backward_ns) in times[operator.name].items()
        }
    used = {precision for table in operators.values() for precision in table}
    return ProblemDevice(
        name=device.name,
        count=device.count,
        memory_limit_kib=device.memory_limit_bytes // BYTES_PER_KIB,
        precisions={name: borders for name, borders in profile.formats.items() if name in used},
        casts=_casts(profile, used),
        operators=operators,
    )


def _casts(profile: DeviceProfile, used: set[str]) -> dict[tuple[str, str], CastCost]:
    formats = _names({precision: profile.formats[precision] for precision in used})
    casts = {}
    for pair, fit in profile.casts.items():
        source, _, target = pair.partition(">")
        if source in formats and target in formats:
            casts[source, target] = CastCost(base_ns=fit.base_ns, ns_per_mi_elements=fit.ns_per_mi_elements)
    return casts


def _formats(devices: Iterable[ProblemDevice]) -> dict[str, int]:
    """The formats that occur on some device, lowest rank first, with their bytes per element."""
    names = {name for device in devices for name in _names(device.precisions)}
    return {f.name: f.num_bytes for f in sorted(FORMATS.values(), key=lambda f: f.rank) if f.name in names}


def _names(precisions: Mapping[str, PrecisionFormats]) -> set[str]:
    return {*precisions, *(name for borders in precisions.values() for name in astuple(borders))}


def _sensitivity(sensitivities: Sensitivities, operator: str, precision: str) -> float:
    by_precision = sensitivities.get(operator)
    if by_precision is None:
        raise ProblemError(
            f"there is no sensitivity for adjustable operator {operator!r}; collect statistics on this model again"
        )
    if precision not in by_precision:
        if precision == "FP32":
            return 0.0
        raise ProblemError(
            f"operator {operator!r} has no sensitivity for {precision}, only for {', '.join(by_precision)}; "
            "compute it for all precisions of the cluster"
        )
    check_number(by_precision[precision], f"sensitivity of {operator!r} in {precision}")
    return by_precision[precision]


def _peer_ready_ns(problem: Problem, cluster: Cluster) -> tuple[int, ...]:
    """When the device types of fixed precision have each bucket ready.

    The format has no end of backward for them. Where theirs comes after the last bucket of all (parameters only near
    the end of the model), the last bucket is delayed, since the iteration cannot end before.
    """
    ready_ns = [0] * len(problem.communication.allreduce_ns)
    for peer in cluster.fixed:
        device = problem.device(peer.name)
        choices = {operator.name: next(iter(device.operators[operator.name])) for operator in problem.adjustable}
        evaluation = evaluate_device(problem, device, propagate(problem, device, choices))
        ready_ns = [max(pair) for pair in zip(ready_ns, evaluation.bucket_ready_ns, strict=True)]
        if ready_ns:
            ready_ns[-1] = max(ready_ns[-1], evaluation.backward_end_ns - problem.communication.allreduce_ns[-1])
    return tuple(ready_ns)


def _latency_limit_ns(problem: Problem, slack: float) -> int:
    """Iteration time of the fastest plan that fits into memory, times 1 + slack.

    Where nothing fits, memory limits are ignored: solving will then name the memory limit that is too low.
    """
    roomy = tuple(replace(device, memory_limit_kib=_UNLIMITED_KIB) for device in problem.devices)
    for devices in (problem.devices, roomy):
        unlimited = replace(problem, latency_limit_ns=NO_LIMIT_NS, devices=devices)
        if (answer := fastest(unlimited, time_limit_s=SEARCH_SECONDS)) is not None:
            return math.floor(answer.iteration_ns * (1.0 + slack))
    raise ProblemError(f"no fastest plan was found for {problem.name!r}; give latency_limit_ns")
