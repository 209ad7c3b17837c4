"""Local batches and precisions in one problem: how many samples a worker of each device type takes, and in what.

    minimise    sum over device types i of (W b_i / N)^2 * sensitivity_i(x_i, b_i)
    subject to  sum over i of count_i * b_i = N
                iteration time(x, b) <= latency limit
                memory_i(x_i, b_i) <= memory limit_i

``b_i`` is the local batch of one worker of type i, N the global batch, W the number of workers and ``x_i`` the
precisions of the type. A worker's gradient has the weight b_i / N in the average over all samples instead of 1 / W, so
its variance counts (W b_i / N)^2 times.

What a batch costs is known at a few sizes, the *anchors*, each a whole training problem, and lies on straight lines
between them and beyond: times, memory and elements of results are affine in the batch (rounded down), and so is the
batch times the sensitivity: noise that all samples share, of weights, stays as the batch grows; noise of their own
falls with it.

Source: ours. Batch sizing by speed is that of LB-BSP (SoCC 2020), the rest of the problem QSync's (IPDPS 2024).
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qsync_opt.errors import ProblemError
from qsync_opt.io import Fields, Optimum, check_integer, check_number, decode, encode, freeze, write_json
from qsync_opt.training.evaluation import BYTES_PER_KIB, DeviceEvaluation, evaluate_device, iteration_time
from qsync_opt.training.memory import OPERATORS_KEY
from qsync_opt.training.plan import Plan
from qsync_opt.training.problem import (
    NO_LIMIT_NS,
    OperatorCost,
    Problem,
    ProblemDevice,
    ProblemOperator,
)

PROBLEM_FORMAT = "qsync-shares/1"
PLAN_FORMAT = "qsync-shares-plan/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class SharesProblem:
    """Training problems of one job at several local batches, the local batches to choose from, and the limits.

    Attributes:
        name: Of the problem.
        global_batch: Samples of one iteration of all workers together.
        latency_limit_ns: Most time of an iteration; that of the anchors does not count.
        anchors: Local batch to the training problem in which every worker has it; two or more, ascending. They differ
            in costs and elements alone.
        candidates: Device type to the local batches that its workers may have, ascending.
        optimum: A recorded one, or None.

    Raises:
        ProblemError: A rule of the format is broken; the text names the batch, operator or device type.
    """

    name: str
    global_batch: int
    latency_limit_ns: int
    anchors: Mapping[int, Problem]
    candidates: Mapping[str, tuple[int, ...]]
    optimum: Optimum | None = None

    def __post_init__(self) -> None:
        check_integer(self.global_batch, "global_batch", minimum=1)
        check_integer(self.latency_limit_ns, "latency_limit_ns")
        for batch in self.anchors:
            check_integer(batch, "batch of an anchor", minimum=1)
        object.__setattr__(self, "anchors", {batch: self.anchors[batch] for batch in sorted(self.anchors)})
        if len(self.anchors) < 2:
            raise ProblemError(
                f"problem {self.name!r} has {len(self.anchors)} anchors, but costs at two local batches or more are "
                "needed; with a profile of one batch alone, at_batch(problem, batch, other) estimates another"
            )
        first = self.first
        for batch, problem in self.anchors.items():
            _check_alike(first, problem, f"the anchor of batch {batch}")
        if (missing := [d.name for d in first.devices if not self.candidates.get(d.name)]) or len(
            self.candidates
        ) != len(first.devices):
            raise ProblemError(
                f"candidates are given for {', '.join(self.candidates) or 'nothing'}, but every device type needs one "
                f"or more and no other has any: {', '.join(missing or (d.name for d in first.devices))}"
            )
        for name, batches in self.candidates.items():
            for batch in batches:
                check_integer(batch, f"candidates of {name!r}", minimum=1)
        ordered = {d.name: tuple(sorted(set(self.candidates[d.name]))) for d in first.devices}
        object.__setattr__(self, "candidates", ordered)
        freeze(self, "anchors", "candidates")

    @property
    def first(self) -> Problem:
        """The anchor of the smallest batch."""
        return next(iter(self.anchors.values()))

    @property
    def counts(self) -> dict[str, int]:
        """Number of workers of each device type."""
        return {device.name: device.count for device in self.first.devices}

    def weight(self, batch: int) -> float:
        """What a worker's gradient of ``batch`` samples counts in the average over workers: 1 for equal batches."""
        return sum(self.counts.values()) * batch / self.global_batch

    def at(self, name: str, batch: int) -> Problem:
        """The training problem of one device type alone at a local batch, sensitivities weighted by its share."""
        low, high = self._around(batch)
        below, above = self.anchors[low], self.anchors[high]

        def between(a: int, b: int) -> int:
            return max(0, a + (b - a) * (batch - low) // (high - low))

        def sensitivity(a: float, b: float) -> float:
            per_batch = a * low + (b * high - a * low) * ((batch - low) / (high - low))
            return max(0.0, per_batch) / batch * self.weight(batch) ** 2

        device, other = below.device(name), above.device(name)
        tables = {
            operator: {
                precision: OperatorCost(
                    forward_ns=between(cost.forward_ns, other.operators[operator][precision].forward_ns),
                    backward_ns=between(cost.backward_ns, other.operators[operator][precision].backward_ns),
                    memory_kib=between(cost.memory_kib, other.operators[operator][precision].memory_kib),
                    sensitivity=sensitivity(cost.sensitivity, other.operators[operator][precision].sensitivity),
                )
                for precision, cost in table.items()
            }
            for operator, table in device.operators.items()
        }
        operators = tuple(
            replace(a, output_elements=between(a.output_elements, b.output_elements))
            for a, b in zip(below.operators, above.operators, strict=True)
        )
        return replace(
            below,
            name=self.name,
            operators=operators,
            devices=(replace(device, operators=tables),),
            latency_limit_ns=self.latency_limit_ns,
            optimum=None,
            extras={},
        )

    def _around(self, batch: int) -> tuple[int, int]:
        """The two anchors whose line a batch is on."""
        sizes = [*self.anchors]
        position = sum(size <= batch for size in sizes[1:-1])
        return sizes[position], sizes[position + 1]

    def grows(self, name: str) -> bool:
        """Whether nothing on a device type costs less, or counts less, with a larger batch."""
        pairs = list(self.anchors.items())
        for (low, a), (high, b) in itertools.pairwise(pairs):
            if any(x.output_elements > y.output_elements for x, y in zip(a.operators, b.operators, strict=True)):
                return False
            for operator, table in a.device(name).operators.items():
                for precision, less in table.items():
                    more = b.device(name).operators[operator][precision]
                    if (
                        less.forward_ns > more.forward_ns
                        or less.backward_ns > more.backward_ns
                        or less.memory_kib > more.memory_kib
                        or less.sensitivity * low > more.sensitivity * high
                    ):
                        return False
        return True

    @classmethod
    def from_json(cls, data: Any, where: str = "problem") -> SharesProblem:
        """Build it from the data of a problem file; ``where`` names the data in errors."""
        fields = Fields(data, where)
        fields.version(PROBLEM_FORMAT)
        anchors: dict[int, Problem] = {}
        for index, entry in enumerate(fields.sequence("anchors")):
            own = Fields(entry, f"{where}: anchors[{index}]")
            batch = own.integer("batch", minimum=1)
            if batch in anchors:
                raise ProblemError(f"{own.where}: batch {batch} occurs twice; give each anchor another batch")
            anchors[batch] = Problem.from_json(own.take("problem"), f"{own.where}: problem")
            own.finish()
        chosen = Fields(fields.take("candidates"), f"{where}: candidates")
        candidates = {name: tuple(chosen.sequence(name)) for name in chosen}
        name, global_batch = fields.text("name"), fields.integer("global_batch", minimum=1)
        latency_limit_ns = fields.integer("latency_limit_ns")
        optimum = fields.take_or("optimum", None)
        fields.finish()
        return cls(
            name=name,
            global_batch=global_batch,
            latency_limit_ns=latency_limit_ns,
            anchors=anchors,
            candidates=candidates,
            optimum=None if optimum is None else decode(Optimum, optimum, f"{where}: optimum"),
        )

    def to_json(self) -> dict[str, Any]:
        """The problem as plain JSON data."""
        return {
            "format": PROBLEM_FORMAT,
            "name": self.name,
            "global_batch": self.global_batch,
            "latency_limit_ns": self.latency_limit_ns,
            "candidates": {name: list(batches) for name, batches in self.candidates.items()},
            "anchors": [{"batch": batch, "problem": problem.to_json()} for batch, problem in self.anchors.items()],
            "optimum": None if self.optimum is None else encode(self.optimum),
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the problem file, whole or not at all."""
        write_json(path, self.to_json(), digest=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharesPlan:
    """The local batch of one worker of each device type, and the precisions of its operators."""

    batches: Mapping[str, int]
    precisions: Plan

    def __post_init__(self) -> None:
        for name, batch in self.batches.items():
            check_integer(batch, f"batches: {name!r}", minimum=1)
        freeze(self, "batches")

    @classmethod
    def from_json(cls, data: Any, where: str = "plan") -> SharesPlan:
        """Build it from the data of a plan file; ``where`` names the data in errors."""
        fields = Fields(data, where)
        fields.version(PLAN_FORMAT)
        sizes = Fields(fields.take("batches"), f"{where}: batches")
        result = cls(
            batches={name: sizes.integer(name, minimum=1) for name in sizes},
            precisions=Plan.from_json(fields.take("precisions"), f"{where}: precisions"),
        )
        fields.finish()
        return result

    def to_json(self) -> dict[str, Any]:
        """The plan as plain JSON data."""
        return {"format": PLAN_FORMAT, "batches": dict(self.batches), "precisions": self.precisions.to_json()}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan file, whole or not at all."""
        write_json(path, self.to_json(), digest=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharesEvaluation:
    """What a plan of local batches and precisions costs.

    ``shares`` is the part of the global batch of one worker of each device type, ``sensitivity`` the part of the
    objective of each type.
    """

    objective: float
    feasible: bool
    violations: tuple[str, ...]
    iteration_ns: int
    batches: Mapping[str, int]
    shares: Mapping[str, float]
    memory_kib: Mapping[str, int]
    sensitivity: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """As plain JSON data."""
        return {
            "objective": self.objective,
            "feasible": self.feasible,
            "violations": list(self.violations),
            "iteration_ns": self.iteration_ns,
            "batches": dict(self.batches),
            "shares": dict(self.shares),
            "memory_kib": dict(self.memory_kib),
            "sensitivity": dict(self.sensitivity),
        }


def evaluate_shares(problem: SharesProblem, plan: SharesPlan) -> SharesEvaluation:
    """Compute what a plan costs, by the evaluation of training plans on each device type at its batch.

    Raises:
        ProblemError: The plan does not fit the problem.
    """
    names = [*problem.counts]
    if {*plan.batches} != {*names} or {*plan.precisions.devices} != {*names}:
        raise ProblemError(
            f"the plan has batches of {', '.join(plan.batches)} and precisions of "
            f"{', '.join(plan.precisions.devices)}, but problem {problem.name!r} is of {', '.join(names)}"
        )
    evaluated: dict[str, DeviceEvaluation] = {}
    violations: list[str] = []
    total = sum(count * plan.batches[name] for name, count in problem.counts.items())
    if total != problem.global_batch:
        violations.append(f"local batches add up to {total} samples, but the global batch is {problem.global_batch}")
    for name in names:
        batch = plan.batches[name]
        if batch not in problem.candidates[name]:
            allowed = ", ".join(map(str, problem.candidates[name]))
            raise ProblemError(f"the plan gives {name!r} a local batch of {batch}, but allowed are {allowed}")
        alone = problem.at(name, batch)
        choices = Plan(problem=plan.precisions.problem, devices={name: plan.precisions.devices[name]}).resolve(alone)
        evaluated[name] = device = evaluate_device(alone, alone.devices[0], choices[name])
        if device.memory_kib > device.memory_limit_kib:
            violations.append(
                f"memory of {name!r}: {device.memory_kib} KiB, but the limit is {device.memory_limit_kib} KiB"
            )
    _, iteration_ns = iteration_time(problem.first, evaluated.values())
    if iteration_ns > problem.latency_limit_ns:
        violations.append(f"iteration time: {iteration_ns} ns, but the limit is {problem.latency_limit_ns} ns")
    return SharesEvaluation(
        objective=math.fsum(device.sensitivity for device in evaluated.values()),
        feasible=not violations,
        violations=tuple(violations),
        iteration_ns=iteration_ns,
        batches=dict(plan.batches),
        shares={name: plan.batches[name] / problem.global_batch for name in names},
        memory_kib={name: device.memory_kib for name, device in evaluated.items()},
        sensitivity={name: device.sensitivity for name, device in evaluated.items()},
    )


def at_batch(problem: Problem, batch: int, other: int) -> Problem:
    """An estimate of a training problem at another local batch, from that of one batch alone.

    Times, elements of results and memory grow in proportion, all but the parameters, gradients, optimizer state and
    buckets (as far as the problem notes them), which stay; sensitivities fall as the noise of a mean over more samples
    does. Where the host or fixed costs matter this is optimistic for small batches: profile a second batch instead.

    Source: ours.
    """
    check_integer(batch, "batch", minimum=1)
    check_integer(other, "other batch", minimum=1)

    def scaled(value: int) -> int:
        return -(-value * other // batch)

    devices = []
    for device in problem.devices:
        charges = problem.extras.get(("devices", device.name, OPERATORS_KEY), {})
        assert isinstance(charges, Mapping)
        fixed_kib = {name: num_bytes // BYTES_PER_KIB for name, num_bytes in charges.items()}
        tables = {
            name: {
                precision: OperatorCost(
                    forward_ns=scaled(cost.forward_ns),
                    backward_ns=scaled(cost.backward_ns),
                    memory_kib=(fixed := min(fixed_kib.get(name, 0), cost.memory_kib))
                    + scaled(cost.memory_kib - fixed),
                    sensitivity=cost.sensitivity * batch / other,
                )
                for precision, cost in table.items()
            }
            for name, table in device.operators.items()
        }
        devices.append(replace(device, operators=tables))
    operators = tuple(replace(each, output_elements=scaled(each.output_elements)) for each in problem.operators)
    return replace(problem, operators=operators, devices=tuple(devices), optimum=None, extras={})


def build_shares_problem(
    anchors: Mapping[int, Problem],
    global_batch: int,
    *,
    candidates: Mapping[str, Iterable[int]] | None = None,
    multiple_of: int = 1,
    slack: float = 0.0,
    latency_limit_ns: int | None = None,
    time_limit_s: float | None = None,
) -> SharesProblem:
    """The problem of choosing local batches and precisions together.

    Args:
        anchors: Local batch to the training problem at it, at two batches or more.
        global_batch: Samples of one iteration of all workers.
        candidates: Device type to local batches to choose from; by default multiples of ``multiple_of``, at most about
            64 of them, evenly spaced.
        multiple_of: What local batches are multiples of, such as 8 for matrix units.
        slack: How much longer than in the fastest joint plan an iteration may take (0.1: by ten percent).
        latency_limit_ns: A limit instead of that.
        time_limit_s: Seconds for the search of the fastest joint plan.

    Raises:
        ProblemError: No choice of local batches adds up to the global batch, or none fits into memory; the anchors
            are not of one job.
    """
    check_number(slack, "slack")
    check_integer(multiple_of, "multiple_of", minimum=1)
    if not anchors:
        raise ProblemError("anchors is empty; give a training problem at each of two local batches or more")
    first = next(iter(anchors.values()))
    workers = sum(device.count for device in first.devices)
    if candidates is None:
        step = _step(global_batch, workers, multiple_of)
        candidates = {
            device.name: range(step, (global_batch - step * (workers - device.count)) // device.count + 1, step)
            for device in first.devices
        }
    problem = SharesProblem(
        name=first.name,
        global_batch=global_batch,
        latency_limit_ns=NO_LIMIT_NS if latency_limit_ns is None else latency_limit_ns,
        anchors={batch: _alike(first, other) for batch, other in anchors.items()},
        candidates={name: tuple(own) for name, own in candidates.items()},
    )
    if latency_limit_ns is not None:
        return problem
    quickest = fastest_shares(problem, time_limit_s=time_limit_s)
    if quickest is None:
        raise ProblemError(
            f"problem {problem.name!r}: no choice of the candidates adds up to the global batch of {global_batch} and "
            "fits into memory; allow other local batches, more memory or another global batch"
        )
    return replace(problem, latency_limit_ns=math.floor(quickest.iteration_ns * (1.0 + slack)))


_MOST_CANDIDATES = 64


def _step(global_batch: int, workers: int, multiple_of: int) -> int:
    """Distance of candidates: the least multiple that divides the global batch and leaves few enough of them.

    ``multiple_of`` itself where it does not divide the global batch, or none leaves a sample for every worker.
    """
    units, rest = divmod(global_batch, multiple_of)
    fitting = (
        multiple_of * d
        for d in range(1, units // workers + 1)
        if not rest and units % d == 0 and units // d <= _MOST_CANDIDATES
    )
    return next(fitting, multiple_of)


@dataclass(frozen=True, slots=True, kw_only=True)
class FastestShares:
    """The joint plan of least iteration time that keeps the memory limits; no such plan is faster than ``bound_ns``."""

    plan: SharesPlan
    evaluation: SharesEvaluation
    bound_ns: int

    @property
    def iteration_ns(self) -> int:
        """Iteration time in nanoseconds."""
        return self.evaluation.iteration_ns


def fastest_shares(
    problem: SharesProblem, method: str = "exact", *, time_limit_s: float | None = None
) -> FastestShares | None:
    """The local batches and precisions of least iteration time within memory; the latency limit is set aside.

    Args:
        problem: The problem.
        method: ``"exact"`` or ``"greedy"``, as in `qsync_opt.training.fastest`.
        time_limit_s: Seconds for the whole search.

    Returns:
        The plan with a bound; None if no local batches add up and fit into memory, or none was found.
    """
    from qsync_opt.systems import system

    result: FastestShares | None = system("shares").search("fastest")(problem, method, time_limit_s)
    return result


def _alike(first: Problem, other: Problem) -> Problem:
    """Another anchor with what does not depend on the batch from the first: links, optimizer, casts, limits."""
    known = {device.name: device for device in first.devices}
    devices = tuple(
        replace(device, casts=known[device.name].casts, memory_limit_kib=known[device.name].memory_limit_kib)
        if device.name in known
        else device
        for device in other.devices
    )
    return replace(
        other,
        devices=devices,
        communication=first.communication,
        optimizer_ns=first.optimizer_ns,
        optimum=None,
        extras={},
    )


def _check_alike(first: Problem, other: Problem, what: str) -> None:
    """Refuse anchors that differ in more than costs and elements."""

    def shape(operator: ProblemOperator) -> ProblemOperator:
        return replace(operator, output_elements=0)

    def frame(device: ProblemDevice) -> tuple[object, ...]:
        tables: Sequence[object] = [(name, tuple(table)) for name, table in device.operators.items()]
        return (device.count, device.memory_limit_kib, device.precisions, device.casts, tables)

    parts = {
        "formats": (first.formats, other.formats),
        "operators": (tuple(map(shape, first.operators)), tuple(map(shape, other.operators))),
        "communication": (first.communication, other.communication),
        "optimizer_ns": (first.optimizer_ns, other.optimizer_ns),
        "cast_sharing": (first.cast_sharing, other.cast_sharing),
        "names of devices": ([d.name for d in first.devices], [d.name for d in other.devices]),
    }
    for part, (expected, actual) in parts.items():
        if expected != actual:
            raise ProblemError(
                f"{what} differs from the first in its {part}; anchors differ in costs and elements alone"
            )
    for expected_device, device in zip(first.devices, other.devices, strict=True):
        if frame(expected_device) != frame(device):
            raise ProblemError(
                f"{what}: device {device.name!r} differs from the first's in more than costs: in its count, limit, "
                "precisions, casts or the precisions of an operator"
            )
