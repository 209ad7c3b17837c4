"""Baseline and oracle: the textbook program, nothing collapsed or unrolled, all device types in one model.

It shares no idea with `ilp` but the problem itself: dependent operators are variables with the max rule as rows, casts
are products with the textbook bound y >= x + x' - 1, and all-reduces have start times S_k. Its bound is weak, so it is
for small problems only.

Columns, per device: x[v,a] operator v runs at a; q[v,r] some input of v delivers rank r or higher; y[e,a,b] both ends
of edge e; s[u,a,b] the shared cast of u's output; S[k] start of all-reduce k, common to all devices.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from qsync_opt.errors import NotInstalledError, SolverError
from qsync_opt.formulations.linear import LinearModel, LinearOptions, LinearResult, LinearSolver, LinearStatus
from qsync_opt.model import Role
from qsync_opt.registry import Feature, Kind, create, default_solver
from qsync_opt.training import (
    BYTES_PER_KIB,
    Answer,
    Problem,
    ProblemDevice,
    ProblemOperator,
    SolveOptions,
    TerminationStatus,
    precisions_by_rank,
)

_SCALE = 1e3
_FALL = 1e3
"""When the optimum is further below the scale than this, the scale was wrong and the solve is repeated."""
_TERMINATIONS = {
    LinearStatus.OPTIMAL: TerminationStatus.OPTIMAL,
    LinearStatus.LIMIT: TerminationStatus.TIME_LIMIT,
    LinearStatus.INFEASIBLE: TerminationStatus.INFEASIBLE,
    LinearStatus.INFEASIBLE_OR_UNBOUNDED: TerminationStatus.INFEASIBLE,  # costs are never negative
}


class _Device:
    """Columns and rows of one device."""

    def __init__(self, model: LinearModel, problem: Problem, device: ProblemDevice, time_unit_ns: float) -> None:
        self.model, self.problem, self.device = model, problem, device
        self.time_unit_ns = time_unit_ns
        self.x: dict[tuple[str, str], int] = {}
        self.forward: dict[int, float] = {}
        self.backward: dict[str, dict[int, float]] = {operator.name: {} for operator in problem.operators}
        self.memory: dict[int, float] = {}
        self.shared: dict[tuple[str, str, str], int] = {}
        for operator in problem.operators:
            self._add_operator(operator)
        for operator in problem.operators:
            for position, source in enumerate(operator.inputs):
                self._add_edge(source, operator.name, position)
        limit = device.memory_limit_kib
        unit = max(1.0, limit / _SCALE)
        model.add_row(f"memory[{device.name}]", {c: v / unit for c, v in self.memory.items()}, upper=limit / unit)

    def _add_operator(self, operator: ProblemOperator) -> None:
        name, steps = operator.name, precisions_by_rank(self.problem, self.device, operator.name)
        for step in steps:
            cost = self.device.operators[name][step]
            label = f"x[{self.device.name},{name},{step}]"
            column = self.model.add_column(label, integer=True, cost=cost.sensitivity)
            self.x[name, step] = column
            self.forward[column] = cost.forward_ns / self.time_unit_ns
            self.backward[name][column] = cost.backward_ns / self.time_unit_ns
            self.memory[column] = cost.memory_kib
        self.model.add_row(f"one[{name}]", {self.x[name, step]: 1.0 for step in steps}, lower=1.0, upper=1.0)
        if operator.role is Role.DEPENDENT:
            self._follow(operator, steps)

    def _follow(self, operator: ProblemOperator, steps: tuple[str, ...]) -> None:
        """The steps above step i are taken exactly when some input delivers a rank above that of step i."""
        for i, step in enumerate(steps[:-1]):
            rank = self.problem.rank(step)
            higher = {self.x[operator.name, above]: 1.0 for above in steps[i + 1 :]}
            every: dict[int, float] = {}
            delivered = self.model.add_column(f"q[{operator.name},{rank + 1}]", integer=True)
            for source in dict.fromkeys(operator.inputs):
                above = {
                    self.x[source, a]: 1.0
                    for a in self.device.operators[source]
                    if self.problem.rank(self.device.precisions[a].output) > rank
                }
                every |= above
                self.model.add_row(f"max[{operator.name},{i},{source}]", {delivered: 1.0, **_minus(above)}, lower=0.0)
            self.model.add_row(f"any[{operator.name},{i}]", {delivered: 1.0, **_minus(every)}, upper=0.0)
            self.model.add_row(f"step[{operator.name},{i}]", {delivered: 1.0, **_minus(higher)}, lower=0.0, upper=0.0)

    def _add_edge(self, producer: str, consumer: str, position: int) -> None:
        device = self.device
        elements = self.problem.operators[self.problem.index(producer)].output_elements
        for a in device.operators[producer]:
            for b in device.operators[consumer]:
                output, gradient = device.precisions[a].output, device.precisions[b].gradient_output
                wanted = device.precisions[a].gradient_input
                if output == b and gradient == wanted:
                    continue
                both = self.model.add_column(f"y[{producer},{consumer},{position},{a},{b}]", upper=1.0)
                terms = {both: 1.0, self.x[producer, a]: -1.0, self.x[consumer, b]: -1.0}
                self.model.add_row(f"both[{producer},{consumer},{position},{a},{b}]", terms, lower=-1.0)
                backward_ns = self._cast_ns(gradient, wanted, elements)
                self.backward[producer][both] = backward_ns / self.time_unit_ns
                if output != b:
                    self._pay_forward(producer, a, b, both, elements)

    def _pay_forward(self, producer: str, a: str, b: str, both: int, elements: int) -> None:
        paid = both
        output = self.device.precisions[a].output
        if self.problem.cast_sharing == "producer":
            key = (producer, a, b)
            if key not in self.shared:
                self.shared[key] = self.model.add_column(f"s[{producer},{a},{b}]")
            paid = self.shared[key]
            self.model.add_row(f"shared[{producer},{a},{b},{both}]", {paid: 1.0, both: -1.0}, lower=0.0)
        self.forward[paid] = self._cast_ns(output, b, elements) / self.time_unit_ns
        self.memory[paid] = math.ceil(elements * self.problem.formats[b] / BYTES_PER_KIB)

    def _cast_ns(self, source: str, target: str, elements: int) -> int:
        # A pair that never occurs together may have no cost; its product is 0 in every plan.
        known = source == target or (source, target) in self.device.casts
        return self.device.cast_ns(source, target, elements) if known else 0

    def ready(self, bucket: int | None) -> dict[int, float]:
        """Time at which ``bucket`` is ready, or backward ends (None); empty for a bucket that waits for nothing."""
        waiting = [o.name for o in self.problem.operators if bucket is None or o.bucket == bucket]
        if not waiting:
            return {}
        first = self.problem.index(waiting[0])  # the last in backward order
        terms = dict(self.forward)
        for operator in self.problem.operators[first:]:
            for column, value in self.backward[operator.name].items():
                terms[column] = terms.get(column, 0.0) + value
        return terms

    def choices(self, values: Sequence[float]) -> dict[str, str]:
        """Precision of every adjustable operator at a point."""
        return {
            operator.name: max(self.device.operators[operator.name], key=lambda a: values[self.x[operator.name, a]])
            for operator in self.problem.adjustable
        }


def _minus(terms: Mapping[int, float]) -> dict[int, float]:
    return {column: -value for column, value in terms.items()}


def build_textbook(problem: Problem) -> tuple[LinearModel, list[_Device]]:
    """The whole problem as one program; times are in thousandths of the latency limit."""
    model = LinearModel(name=f"{problem.name}/textbook")
    unit_ns = max(1.0, problem.latency_limit_ns / _SCALE)
    devices = [_Device(model, problem, device, unit_ns) for device in problem.devices]
    communication = problem.communication
    budget = (problem.latency_limit_ns - problem.optimizer_ns) / unit_ns
    before: int | None = None
    for k, allreduce_ns in enumerate(communication.allreduce_ns):
        start = model.add_column(f"S[{k}]", lower=communication.peer_ready_ns[k] / unit_ns, upper=math.inf)
        for device in devices:
            model.add_row(f"ready[{device.device.name},{k}]", {start: 1.0, **_minus(device.ready(k))}, lower=0.0)
        if before is not None:
            previous_ns = communication.allreduce_ns[k - 1]
            model.add_row(f"serial[{k}]", {start: 1.0, before: -1.0}, lower=previous_ns / unit_ns)
        model.add_row(f"end[{k}]", {start: 1.0}, upper=budget - allreduce_ns / unit_ns)
        before = start
    for device in devices:
        model.add_row(f"compute[{device.device.name}]", device.ready(None), upper=budget)
    return model, devices


class TextbookFormulation:
    """The textbook program, solved as it stands; for comparison with `exact` on small problems.

    Source: the multiple-choice program of QSync (IPDPS 2024) with textbook linearisation.
    """

    FEATURES = frozenset({Feature.SOLVER, Feature.GAP, Feature.TIME_LIMIT})

    def solve(self, problem: Problem, options: SolveOptions) -> Answer:
        """Plan every device type; see `Formulation.solve`."""
        started = time.monotonic()
        choice = options.solver or default_solver()
        if choice is None:
            raise NotInstalledError("method 'textbook' needs a solver; install one: pip install 'qsync-opt[solvers]'")
        solver: LinearSolver = create(Kind.SOLVER, choice)
        model, devices = build_textbook(problem)
        built = time.monotonic()
        result = _solve_scaled(model, solver, options, started)
        if result.status not in _TERMINATIONS:
            raise SolverError(f"{solver.name} failed: {result.native}; use another solver")
        termination = _TERMINATIONS[result.status]
        if termination is TerminationStatus.OPTIMAL and options.gap:
            termination = TerminationStatus.FEASIBLE
        return Answer(
            termination=termination,
            devices={d.device.name: d.choices(result.values) for d in devices} if result.values is not None else None,
            bound=None if result.values is None else result.bound,
            solver=f"{solver.name} {solver.version}",
            build_seconds=built - started,
            solve_seconds=time.monotonic() - built,
            reason="no plan keeps the limits" if termination is TerminationStatus.INFEASIBLE else None,
        )


def _solve_scaled(model: LinearModel, solver: LinearSolver, options: SolveOptions, started: float) -> LinearResult:
    """Solve with the objective near 1000, and again where the optimum is far below that.

    Solvers stop at absolute gaps of about 1e-6, which is more than the sensitivities of some problems. The bound is
    in the problem's own units.
    """
    plain = tuple(model.columns)
    scale = best = math.fsum(column.cost for column in plain)
    while True:
        unit = scale / _SCALE or 1.0
        # A column that alone costs more than a known plan is in no better one, and its cost would spoil the scale.
        model.columns[:] = [
            replace(c, cost=c.cost / unit) if c.cost <= best * (1 + 1e-9) else replace(c, cost=0.0, upper=0.0)
            for c in plain
        ]
        left_s = None if options.time_limit_s is None else max(0.1, started + options.time_limit_s - time.monotonic())
        result = solver.solve(model, LinearOptions(time_limit_s=left_s, relative_gap=options.gap))
        if result.bound is not None:
            result = replace(result, bound=result.bound * unit)
        if result.values is None or result.status is not LinearStatus.OPTIMAL:
            return result
        best = math.fsum(c.cost * round(value) for c, value in zip(plain, result.values, strict=True))
        if best * _FALL >= scale or best <= 0.0:
            return result
        scale = best
