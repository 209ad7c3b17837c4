"""Peak memory of a worker as a sum over operators, as the problem format needs it.

The format adds up one number per operator and precision, plus a buffer for every cast; the true peak of a training
step is a maximum over time. The sum bounds the peak of every plan:

- **Parameters, optimizer state, buckets** stay for the whole iteration. A parameter is charged to the first operator
  that reads it, with its optimizer state and (with more than one worker) its share of the all-reduce buckets.
- **Activations** that backward needs are charged to one operator each. What an operator saves for itself (masks,
  statistics, quantized copies) is its own. A result that its users save as it is belongs to its producer, in the
  producer's format. If only one adjustable operator saves it, it is charged there. In both cases it is charged only at
  precisions in which some operator that saves it reads it uncast: a cast copy is already charged as a cast buffer (the
  FP32 copy that normalization saves of a 16-bit result). Views belong to the result whose storage they show.
- **Gradients and transient buffers** (gradients of activations, workspace) exist while activations are being freed. For
  each moment of the forward pass, the backward pass and the optimizer step, we add up what exists beyond the
  activations and subtract the activations that do not exist then, each in the precision in which it is smallest. The
  largest of these sums covers every plan; it is charged to the operator at which it occurs.

The bound is exact in static memory. It is above the truth where a result is saved by users of which some cast it, where
a cast copy is not kept until the backward pass, and where plans keep more activations than the smallest ones.
Precisions that no plan gives a dependent operator (behind a normalization in FP32, say) do not count.

Source: ours; the liveness view follows dPRO's memory estimator (MLSys 2022), which replays one plan where we bound all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import accumulate

from qsync_opt.costs import DeviceProfile, MeasuredCost
from qsync_opt.errors import ProblemError
from qsync_opt.io import check_fields, check_integer, decode, encode
from qsync_opt.model import OpGraph, Role
from qsync_opt.numerics import closest_precision, is_eight_bit, number_format
from qsync_opt.training.buckets import gradient_users
from qsync_opt.training.evaluation import BYTES_PER_KIB, DeviceEvaluation, cast_buffers_kib
from qsync_opt.training.pricing import problem_inputs, problem_role
from qsync_opt.training.problem import Problem

CostTables = Mapping[str, Mapping[str, MeasuredCost]]
"""Operator to precision to measured cost, restricted to what a device type may use."""
GRADIENT_BYTES = 4
"""Bytes per element of a gradient of an activation at most (FP32)."""
MEMORY_KEY = "x-memory"
"""Extension key of a device in a problem file: the part of its memory that no plan changes."""
OPERATORS_KEY = "x-memory-operators"
"""Extension key of a device in a problem file: the operators that this part is charged to, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticMemory:
    """Memory of a worker that is the same under every plan, in bytes.

    ``gradients_bytes`` and ``transient_bytes`` are what exists at the peak beyond activations (see the module's text),
    which occurs at ``peak_operator``.
    """

    parameters_bytes: int
    optimizer_bytes: int
    buckets_bytes: int
    gradients_bytes: int
    transient_bytes: int
    peak_operator: str

    def __post_init__(self) -> None:
        check_fields(self, "static memory")

    @property
    def parts(self) -> dict[str, int]:
        """The bytes by name of their field."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "peak_operator"}

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel:
    """Memory of one device type: bytes per operator and precision, static part included."""

    static: StaticMemory
    fixed_bytes: Mapping[str, int]
    activation_bytes: Mapping[str, Mapping[str, int]]

    def notes(self, device: str) -> dict[tuple[str, ...], object]:
        """The extension keys of a problem file for one device, by path: `MEMORY_KEY` and `OPERATORS_KEY`."""
        charges = {name: num_bytes for name, num_bytes in self.fixed_bytes.items() if num_bytes}
        return {("devices", device, MEMORY_KEY): encode(self.static), ("devices", device, OPERATORS_KEY): charges}

    def lowered(self, excess_bytes: int) -> MemoryModel:
        """The model with so many bytes less, the same for every plan, as far as there are any.

        Where the peak of a plan was measured, this takes off how far the sum of the plan was above it: first from
        transient buffers and gradients, then from what every operator keeps in each precision, in proportion to that.
        """
        taken = max(0, min(excess_bytes, self.static.transient_bytes + self.static.gradients_bytes))
        transient = min(taken, self.static.transient_bytes)
        static = replace(
            self.static,
            transient_bytes=self.static.transient_bytes - transient,
            gradients_bytes=self.static.gradients_bytes - (taken - transient),
        )
        peak = self.static.peak_operator
        fixed_bytes = {**self.fixed_bytes, peak: self.fixed_bytes[peak] - taken}
        least_bytes = {name: min(own.values()) for name, own in self.activation_bytes.items()}
        all_bytes = sum(least_bytes.values())
        rest = min(max(0, excess_bytes) - taken, all_bytes)
        activation_bytes = {
            name: {p: num_bytes - rest * least_bytes[name] // max(1, all_bytes) for p, num_bytes in own.items()}
            for name, own in self.activation_bytes.items()
        }
        return replace(self, static=static, fixed_bytes=fixed_bytes, activation_bytes=activation_bytes)

    def kib(self, operator: str, precision: str) -> int:
        """Memory of an operator in a precision in KiB, rounded up."""
        return -(-(self.fixed_bytes[operator] + self.activation_bytes[operator][precision]) // BYTES_PER_KIB)


def model_memory(
    graph: OpGraph,
    profile: DeviceProfile,
    tables: CostTables,
    *,
    distributed: bool = True,
    gradient_as_view: bool = False,
) -> MemoryModel:
    """Build the memory model of one device type.

    ``distributed`` says whether gradients go through all-reduce buckets (more than one worker), ``gradient_as_view``
    whether they live in these instead of beside them.

    Source: ours (see the module's text).
    """
    reached = _reached(graph, profile, tables)
    possible = {name: {p: table[p] for p in reached[name]} for name, table in tables.items()}
    roots = storage_roots(graph, tables)
    savers = _savers(graph, possible, roots)
    owners = {result: _owner(graph, result, users) for result, users in savers.items()}
    activations = _activations(graph, profile, tables, reached, savers, owners)
    parameter_bytes = {p.name: p.spec.num_bytes for p in graph.parameters}
    total_bytes = sum(parameter_bytes.values())
    gradient_bytes = dict.fromkeys(parameter_bytes, 0) if gradient_as_view else parameter_bytes
    live = _live_bytes(graph, roots, owners, _cast_away_bytes(profile, reached, savers))
    peak, gradients, transient = _peak(graph, profile, possible, activations, gradient_bytes, live)
    static = StaticMemory(
        parameters_bytes=total_bytes,
        optimizer_bytes=profile.optimizer.state_bytes,
        buckets_bytes=total_bytes if distributed else 0,
        gradients_bytes=gradients,
        transient_bytes=transient,
        peak_operator=peak,
    )
    fixed = dict.fromkeys((operator.name for operator in graph), 0)
    fixed[peak] += gradients + transient
    users = gradient_users(graph)
    state_bytes = charged_bytes = 0
    for name, num_bytes in parameter_bytes.items():
        # Optimizer state is measured as one sum; running totals distribute it without losing a byte.
        charged_bytes += num_bytes
        share = static.optimizer_bytes * charged_bytes // max(1, total_bytes) - state_bytes
        state_bytes += share
        first = users.get(name, (0, 0))[0]
        fixed[graph.operators[first].name] += num_bytes * (2 if distributed else 1) + share
    fixed[peak] += static.optimizer_bytes - state_bytes  # state that belongs to no parameter
    return MemoryModel(static=static, fixed_bytes=fixed, activation_bytes=activations)


def storage_roots(graph: OpGraph, tables: CostTables) -> dict[str, str]:
    """For each operator the one whose storage its result lives in (itself unless it is a view)."""
    roots: dict[str, str] = {}
    for operator in graph:
        # Whether a result is a view depends on shapes and strides, not on the format.
        alias = next(iter(tables[operator.name].values())).alias_input
        is_view = alias is not None and alias < len(operator.inputs)
        roots[operator.name] = roots[operator.inputs[alias or 0]] if is_view else operator.name
    return roots


def _reached(graph: OpGraph, profile: DeviceProfile, tables: CostTables) -> dict[str, set[str]]:
    """The precisions that some plan gives each operator; a dependent one follows its inputs."""
    reached: dict[str, set[str]] = {}
    for operator in graph:
        table = tables[operator.name]
        if problem_role(operator) is not Role.DEPENDENT:
            reached[operator.name] = set(table)
            continue
        formats = [
            {profile.formats[precision].output for precision in reached[source]} for source in problem_inputs(operator)
        ]
        lowest = max(min(number_format(name).rank for name in own) for own in formats)
        delivered = {name for own in formats for name in own if number_format(name).rank >= lowest}
        reached[operator.name] = {closest_precision(table, name) for name in delivered}
    return reached


def _savers(graph: OpGraph, tables: CostTables, roots: Mapping[str, str]) -> dict[str, set[str]]:
    """For each result that is saved for the backward pass, the operators that save it, its own producer perhaps."""
    savers: dict[str, set[str]] = {}
    for operator in graph:
        for cost in tables[operator.name].values():
            for position in cost.saves_inputs:
                savers.setdefault(roots[operator.inputs[position]], set()).add(operator.name)
            if cost.saves_output:
                savers.setdefault(roots[operator.name], set()).add(operator.name)
    return savers


def _owner(graph: OpGraph, result: str, users: set[str]) -> str:
    """The operator that a saved result is charged to."""
    only = next(iter(users))
    return only if len(users) == 1 and graph[only].role is Role.ADJUSTABLE else result


def _read_uncast(reached: Mapping[str, set[str]], result: str, users: set[str], output: str) -> bool:
    """Whether an operator that saves a result may read it as its producer delivers it, in the format ``output``."""
    return any(user == result or output in reached[user] for user in users)


def _activations(
    graph: OpGraph,
    profile: DeviceProfile,
    tables: CostTables,
    reached: Mapping[str, set[str]],
    savers: Mapping[str, set[str]],
    owners: Mapping[str, str],
) -> dict[str, dict[str, int]]:
    outputs = {name: {profile.formats[p].output for p in reached[name]} for name in tables}
    charged = {
        operator.name: {
            precision: _own_bytes(graph, operator.name, precision, cost, outputs)
            for precision, cost in tables[operator.name].items()
        }
        for operator in graph
    }
    for result, owner in owners.items():
        elements = graph[result].output_elements
        for precision in charged[owner]:
            if owner == result:
                saved = profile.formats[precision].output
                uncast = _read_uncast(reached, result, savers[result], saved)
            else:
                saved, uncast = precision, precision in outputs[result]
            if uncast:  # else a cast copy is saved, which is charged as a cast buffer
                charged[owner][precision] += elements * number_format(saved).num_bytes
    return charged


def _cast_away_bytes(
    profile: DeviceProfile, reached: Mapping[str, set[str]], savers: Mapping[str, set[str]]
) -> dict[str, int]:
    """Bytes per element of results of which only cast copies are saved, which themselves live until their last use."""
    sizes = {}
    for result, users in savers.items():
        formats = {profile.formats[precision].output for precision in reached[result]}
        cast = [number_format(name).num_bytes for name in formats if not _read_uncast(reached, result, users, name)]
        sizes[result] = max(cast, default=0)
    return sizes


def _own_bytes(graph: OpGraph, name: str, precision: str, cost: MeasuredCost, outputs: Mapping[str, set[str]]) -> int:
    """Saved bytes that are the operator's own, less the copies of inputs that are charged as cast buffers."""
    if not is_eight_bit(precision):
        return cost.saved_bytes
    always_cast = [source for source in graph[name].inputs if precision not in outputs[source]]
    buffers = sum(graph[source].output_elements * number_format(precision).num_bytes for source in always_cast)
    return max(0, cost.saved_bytes - buffers)


def _peak(
    graph: OpGraph,
    profile: DeviceProfile,
    tables: CostTables,
    activations: Mapping[str, Mapping[str, int]],
    gradient_bytes: Mapping[str, int],
    live: tuple[list[int], list[int]],
) -> tuple[str, int, int]:
    """Operator, gradient bytes and transient bytes of the moment that needs most beyond the activations of any plan."""
    forward_live, backward_live = live
    users = gradient_users(graph)
    # Gradients that exist while position k runs backward: those that some operator at k or later contributes to.
    gradients = sum(size for name, size in gradient_bytes.items() if name not in users)
    ends_at: dict[int, int] = {}
    for name, (_, last) in users.items():
        ends_at[last] = ends_at.get(last, 0) + gradient_bytes[name]
    freed = 0
    moments: list[tuple[int, int, str]] = []
    for k, operator in reversed(list(enumerate(graph))):
        costs = tables[operator.name].values()
        gradients += ends_at.get(k, 0)
        backward = backward_live[k] + max(cost.backward_workspace_bytes for cost in costs)
        moments.append((gradients, backward - freed, operator.name))
        freed += min(activations[operator.name][precision] for precision in tables[operator.name])
        forward = forward_live[k] + max(cost.forward_workspace_bytes for cost in costs)
        moments.append((0, forward - freed, operator.name))
    moments.append((gradients, profile.optimizer.workspace_bytes - freed, graph.operators[0].name))
    gradients, transient, name = max(moments, key=lambda moment: moment[0] + moment[1])
    # Activations that are freed make room for the transient buffers first, then for the gradients.
    total = max(0, gradients + transient)
    return name, min(gradients, total), total - min(gradients, total)


def _live_bytes(
    graph: OpGraph, roots: Mapping[str, str], owners: Mapping[str, str], cast_away: Mapping[str, int]
) -> tuple[list[int], list[int]]:
    """Bytes of results not charged as activations and of gradients of results, while each operator runs."""
    last = {operator.name: position for position, operator in enumerate(graph)}
    size = {operator.name: operator.output_elements * GRADIENT_BYTES for operator in graph}
    for position, operator in enumerate(graph):
        for source in operator.inputs:
            last[roots[source]] = max(last[roots[source]], position)
    forward, backward = [0] * (len(graph) + 1), [0] * (len(graph) + 1)  # changes from one operator to the next
    for position, operator in enumerate(graph):
        name = operator.name
        if roots[name] == name:
            kept = owners.get(name) == name
            alive = operator.output_elements * cast_away[name] if kept else size[name]
            for changes, num_bytes in ((forward, alive), (backward, size[name])):
                changes[position] += num_bytes
                changes[last[name] + 1] -= num_bytes
    return list(accumulate(forward))[:-1], list(accumulate(backward))[:-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBreakdown:
    """Predicted memory of one worker under a plan by purpose, in bytes; ``activations_bytes`` includes rounding."""

    device: str
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    buckets_bytes: int
    activations_bytes: int
    casts_bytes: int
    transient_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it; equal to the memory that `evaluate` gives."""
        return sum(getattr(self, f.name) for f in fields(self) if f.name != "device")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTimeline:
    """Memory of one worker over one iteration, in bytes at times in ns.

    From ``times_ns[i]`` on, ``live_bytes[i]`` of activations and cast buffers exist: an operator's from its forward
    pass until its backward pass is done. Parameters, optimizer state and all-reduce buckets stay throughout.
    Gradients and transient buffers are one allowance in the problem, which covers their worst moment, at
    ``peak_operator``; added throughout, it makes the highest point the memory that `evaluate` gives.
    """

    breakdown: MemoryBreakdown
    times_ns: tuple[int, ...]
    live_bytes: tuple[int, ...]
    peak_ns: int
    peak_operator: str


def memory_breakdown(problem: Problem, device: DeviceEvaluation) -> MemoryBreakdown:
    """Split the predicted memory of one evaluated device under a plan by purpose.

    Raises:
        ProblemError: The problem has no note ``x-memory`` of the static part, as `build_problem` makes it (it was
            written by hand or by another tool).
    """
    static = _static_memory(problem, device.name)
    casts_kib = sum(cast_buffers_kib(problem, time.forward_casts) for time in device.operators)
    return MemoryBreakdown(
        device=device.name,
        **static.parts,
        casts_bytes=casts_kib * BYTES_PER_KIB,
        activations_bytes=(device.memory_kib - casts_kib) * BYTES_PER_KIB - static.total_bytes,
    )


def memory_timeline(problem: Problem, device: DeviceEvaluation) -> MemoryTimeline | None:
    """The memory timeline of one evaluated device under a plan.

    None if the problem lacks what `build_problem` notes under ``x-memory`` and ``x-memory-operators``.

    Raises:
        ProblemError: The notes contradict the problem.

    Source: ours; the life of an activation follows `qsync_opt.training.memory`.
    """
    charges = problem.extras.get(("devices", device.name, OPERATORS_KEY))
    if charges is None or ("devices", device.name, MEMORY_KEY) not in problem.extras:
        return None
    what = f"devices {device.name!r}: {OPERATORS_KEY}"
    if not isinstance(charges, Mapping):
        raise ProblemError(f"{what} is {charges!r}, but it must map operators to bytes")
    for name, num_bytes in charges.items():
        problem.index(name)
        check_integer(num_bytes, f"{what}: {name!r}")
    static, charged = _static_memory(problem, device.name), sum(charges.values())
    if charged != (total := static.total_bytes):
        raise ProblemError(f"{what} adds up to {charged} bytes, but {MEMORY_KEY} to {total}; build the problem again")
    costs = problem.device(device.name).operators
    own_bytes = {}
    for time in device.operators:
        kib = costs[time.name][time.precision].memory_kib + cast_buffers_kib(problem, time.forward_casts)
        own_bytes[time.name] = kib * BYTES_PER_KIB - charges.get(time.name, 0)
    steps = [(time.forward_total_ns, own_bytes[time.name]) for time in device.operators]
    steps += [(time.backward_total_ns, -own_bytes[time.name]) for time in reversed(device.operators)]
    durations_ns, changes_bytes = zip(*steps, strict=True)
    times_ns = tuple(accumulate(durations_ns, initial=0))
    return MemoryTimeline(
        breakdown=memory_breakdown(problem, device),
        times_ns=times_ns,
        live_bytes=tuple(accumulate(changes_bytes, initial=0)),
        peak_ns=times_ns[len(device.operators)],
        peak_operator=static.peak_operator,
    )


def _static_memory(problem: Problem, device: str) -> StaticMemory:
    note = problem.extras.get(("devices", device, MEMORY_KEY))
    if note is None:
        raise ProblemError(
            f"problem {problem.name!r} does not say what the memory of {device!r} is made of (key "
            f"{MEMORY_KEY!r}); build it with build_problem"
        )
    return decode(StaticMemory, note, f"devices {device!r}: {MEMORY_KEY}")
