"""Iteration time, memory and sensitivity of a plan, by the rules of the problem format alone."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from qsync_opt.errors import ProblemError
from qsync_opt.io import format_memory, format_time
from qsync_opt.training.plan import Plan
from qsync_opt.training.problem import Problem, ProblemDevice, ProblemOperator
from qsync_opt.views import Tabular

BYTES_PER_KIB = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class CastTime:
    """A cast on the edge from ``producer`` to ``consumer``; ``charged_to`` is the one of both that it lengthens."""

    producer: str
    consumer: str
    source: str
    target: str
    duration_ns: int
    charged_to: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTime:
    """One operator on one device: its precision, its own two durations, and the casts charged to each."""

    name: str
    precision: str
    forward_ns: int
    backward_ns: int
    forward_casts: tuple[CastTime, ...]
    backward_casts: tuple[CastTime, ...]

    @property
    def forward_casts_ns(self) -> int:
        """Time to cast its inputs."""
        return sum(cast.duration_ns for cast in self.forward_casts)

    @property
    def backward_casts_ns(self) -> int:
        """Time to cast the gradients that its users deliver."""
        return sum(cast.duration_ns for cast in self.backward_casts)

    @property
    def forward_total_ns(self) -> int:
        """Own forward and the casts of its inputs."""
        return self.forward_ns + self.forward_casts_ns

    @property
    def backward_total_ns(self) -> int:
        """Own backward and the casts of the gradients that its users deliver."""
        return self.backward_ns + self.backward_casts_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceEvaluation:
    """One device type under a plan.

    ``operators`` are in forward order; forward starts at 0 and backward runs in reverse right after it.
    ``bucket_ready_ns`` is R_k: when the device's last gradient of bucket k is done, 0 for a bucket that waits for none
    of its operators.
    """

    name: str
    operators: tuple[OperatorTime, ...]
    forward_end_ns: int
    backward_end_ns: int
    bucket_ready_ns: tuple[int, ...]
    memory_kib: int
    memory_limit_kib: int
    sensitivity: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenLimit:
    """A limit that does not hold: of the iteration time in ns (``device`` is None), or of a device's memory in KiB."""

    device: str | None
    value: int
    limit: int

    @property
    def text(self) -> str:
        """What is broken and by how much."""
        if self.device is None:
            return f"the latency limit of {format_time(self.limit)} by {format_time(self.value - self.limit)}"
        excess = format_memory(self.value - self.limit)
        return f"the memory limit of {self.device}, {format_memory(self.limit)}, by {excess}"

    def to_json(self) -> dict[str, object]:
        """Return the JSON object."""
        kind = "latency" if self.device is None else "memory"
        return {"kind": kind, "device": self.device, "value": self.value, "limit": self.limit}


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation(Tabular):
    """A whole plan: what it costs and which limits it breaks.

    ``bucket_start_ns`` is S_k: when the all-reduce of bucket k starts. ``violations`` are texts, empty if feasible.
    """

    objective: float
    iteration_ns: int
    latency_limit_ns: int
    devices: Mapping[str, DeviceEvaluation]
    bucket_start_ns: tuple[int, ...]
    violations: tuple[str, ...]

    @property
    def feasible(self) -> bool:
        """True if every limit holds."""
        return not self.violations

    @property
    def memory_kib(self) -> dict[str, int]:
        """Memory of each device type in KiB."""
        return {name: device.memory_kib for name, device in self.devices.items()}

    @property
    def memory_bytes(self) -> dict[str, int]:
        """Memory of each device type in bytes."""
        return {name: device.memory_kib * BYTES_PER_KIB for name, device in self.devices.items()}

    @property
    def sensitivity(self) -> dict[str, float]:
        """Sensitivity of each device type; their sum is the objective."""
        return {name: device.sensitivity for name, device in self.devices.items()}

    def to_json(self) -> dict[str, object]:
        """The keys that ``qsync-opt evaluate --json`` prints."""
        keys = ("objective", "iteration_ns", "memory_kib", "sensitivity", "feasible")
        return {**{key: getattr(self, key) for key in keys}, "violations": list(self.violations)}


def evaluate(problem: Problem, plan: Plan) -> Evaluation:
    """Time, memory, sensitivity and feasibility of a plan; times in nanoseconds, memory in KiB, both exact integers.

    Raises:
        ProblemError: The plan does not belong to the problem, or contradicts it, or is none.

    Source: QSync's cost mapper and replayer (IPDPS 2024); casts are priced per edge, and the two serial streams are
        evaluated in closed form.
    """
    if not isinstance(plan, Plan):
        raise ProblemError(
            f"plan is a {type(plan).__name__}, but a Plan is needed: solution.plan (None where none was found), or "
            "load_plan(path)"
        )
    precisions = plan.resolve(problem)
    devices = {device.name: evaluate_device(problem, device, precisions[device.name]) for device in problem.devices}
    starts, iteration_ns = iteration_time(problem, devices.values())
    return Evaluation(
        objective=math.fsum(time.sensitivity for time in devices.values()),
        iteration_ns=iteration_ns,
        latency_limit_ns=problem.latency_limit_ns,
        devices=MappingProxyType(devices),
        bucket_start_ns=starts,
        violations=tuple(
            f"iteration time: {broken.value} ns, but the limit is {broken.limit} ns"
            if broken.device is None
            else f"memory of {broken.device!r}: {broken.value} KiB, but the limit is {broken.limit} KiB"
            for broken in broken_limits(problem, devices.values(), iteration_ns)
        ),
    )


def broken_limits(problem: Problem, devices: Iterable[DeviceEvaluation], iteration_ns: int) -> tuple[BrokenLimit, ...]:
    """The limits that an evaluated plan breaks: memory by device, then latency."""
    broken = [
        BrokenLimit(device=device.name, value=device.memory_kib, limit=device.memory_limit_kib)
        for device in devices
        if device.memory_kib > device.memory_limit_kib
    ]
    if iteration_ns > problem.latency_limit_ns:
        broken.append(BrokenLimit(device=None, value=iteration_ns, limit=problem.latency_limit_ns))
    return tuple(broken)


def iteration_time(problem: Problem, devices: Collection[DeviceEvaluation]) -> tuple[tuple[int, ...], int]:
    """Start of each bucket's all-reduce, and the iteration time, in ns.

    With one device it is the iteration time that this device and the fixed-precision peers alone would have.
    """
    starts: list[int] = []
    free_ns = 0
    communication = problem.communication
    for k, allreduce_ns in enumerate(communication.allreduce_ns):
        ready_ns = max((device.bucket_ready_ns[k] for device in devices), default=0)
        start_ns = max(ready_ns, communication.peer_ready_ns[k], free_ns)
        starts.append(start_ns)
        free_ns = start_ns + allreduce_ns
    computed_ns = max((device.backward_end_ns for device in devices), default=0)
    return tuple(starts), max(free_ns, computed_ns) + problem.optimizer_ns


def evaluate_device(problem: Problem, device: ProblemDevice, precisions: Mapping[str, str]) -> DeviceEvaluation:
    """One device under the precisions of *all* its operators (`Plan.resolve` or `propagate` give them)."""
    forward, backward = _casts(problem, device, precisions)
    buffers_kib = cast_buffers_kib(problem, (cast for casts in forward.values() for cast in casts))
    costs = [device.operators[operator.name][precisions[operator.name]] for operator in problem.operators]
    times, forward_end_ns = [], 0
    for operator, cost in zip(problem.operators, costs, strict=True):
        name = operator.name
        time = OperatorTime(
            name=name,
            precision=precisions[name],
            forward_ns=cost.forward_ns,
            backward_ns=cost.backward_ns,
            forward_casts=tuple(forward.get(name, ())),
            backward_casts=tuple(backward.get(name, ())),
        )
        times.append(time)
        forward_end_ns += time.forward_total_ns if time.forward_casts else cost.forward_ns
    ready = [0] * len(problem.communication.allreduce_ns)
    now_ns = forward_end_ns
    for operator, time in zip(reversed(problem.operators), reversed(times), strict=True):
        now_ns += time.backward_total_ns if time.backward_casts else time.backward_ns
        if operator.bucket is not None:
            ready[operator.bucket] = now_ns
    return DeviceEvaluation(
        name=device.name,
        operators=tuple(times),
        forward_end_ns=forward_end_ns,
        backward_end_ns=now_ns,
        bucket_ready_ns=tuple(ready),
        memory_kib=sum(cost.memory_kib for cost in costs) + buffers_kib,
        memory_limit_kib=device.memory_limit_kib,
        sensitivity=math.fsum(cost.sensitivity for cost in costs),
    )


def edge_casts(
    device: ProblemDevice,
    producer: ProblemOperator,
    consumer: ProblemOperator,
    producer_precision: str,
    consumer_precision: str,
) -> tuple[CastTime | None, CastTime | None]:
    """Forward and backward cast of one edge, each None where the formats at its two ends agree.

    The forward cast is charged to the consumer, the backward cast to the producer. The caller handles casts of one
    output that are shared.
    """
    before, after = device.precisions[producer_precision], device.precisions[consumer_precision]

    def cast(source: str, target: str, charged_to: str) -> CastTime | None:
        if source == target:
            return None
        return CastTime(
            producer=producer.name,
            consumer=consumer.name,
            source=source,
            target=target,
            duration_ns=device.cast_ns(source, target, producer.output_elements),
            charged_to=charged_to,
        )

    forward = cast(before.output, consumer_precision, consumer.name)
    return forward, cast(after.gradient_output, before.gradient_input, producer.name)


def cast_buffers_kib(problem: Problem, casts: Iterable[CastTime]) -> int:
    """Memory of the results of forward casts in KiB, each rounded up."""
    operators, formats = problem.operators, problem.formats
    return sum(
        -(-operators[problem.index(cast.producer)].output_elements * formats[cast.target] // BYTES_PER_KIB)
        for cast in casts
    )


def _casts(
    problem: Problem, device: ProblemDevice, precisions: Mapping[str, str]
) -> tuple[dict[str, list[CastTime]], dict[str, list[CastTime]]]:
    """Casts by the operator they are charged to, forward and backward."""
    forward: dict[str, list[CastTime]] = {}
    backward: dict[str, list[CastTime]] = {}
    shared: set[tuple[str, str]] = set()
    uncast = {  # the pairs of precisions of most edges
        (low, high)
        for low, before in device.precisions.items()
        for high, after in device.precisions.items()
        if before.output == high and after.gradient_output == before.gradient_input
    }
    for consumer in problem.operators:
        target = precisions[consumer.name]
        for name in consumer.inputs:
            precision = precisions[name]
            if (precision, target) in uncast:
                continue
            producer = problem.operators[problem.index(name)]
            there, back = edge_casts(device, producer, consumer, precision, target)
            is_repeated = problem.cast_sharing == "producer" and (name, target) in shared
            if there is not None and not is_repeated:
                shared.add((name, target))
                forward.setdefault(consumer.name, []).append(there)
            if back is not None:
                backward.setdefault(name, []).append(back)
    return forward, backward
