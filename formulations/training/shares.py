"""Joint plans of local batches and precisions: one training problem per device type and batch, solved only if wanted.

Given the latency limit, device types share nothing but the sum of their batches. With F_i(b) the least weighted
sensitivity of type i at batch b, within the limits, what remains is a choice of one batch per type:

    minimise  sum of F_i(b_i)   subject to  sum of count_i b_i = N

Dynamic programming over the sum solves it for any F. Most F_i(b) are never computed: the program runs on lower bounds,
at first 0, or infinite where even the fastest and the smallest precisions break a limit. The batches that it picks are
solved, their bounds replaced, and it runs again, until what it picks is solved. Its value is a bound all the way. Where
costs grow with the batch, so does F_i, and a bound or a proof of infeasibility holds for all larger batches.

The fastest joint plan is found in the same way, with the largest of the least times of the types in place of the sum.

Source: ours.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from qsync_opt.errors import UnsupportedError
from qsync_opt.formulations.assignment import PROOF, Floats, labels_at, linear_program
from qsync_opt.formulations.linear import LinearModel, LinearOptions, answer_of, required_solver, solve_in_units
from qsync_opt.formulations.training.collapsed import Collapsed, collapse
from qsync_opt.formulations.training.tables import peers_ns
from qsync_opt.registry import Kind, create
from qsync_opt.solving import Answer, SolveOptions, TerminationStatus, termination_of
from qsync_opt.training import (
    NO_LIMIT_NS,
    FastestShares,
    Plan,
    Problem,
    SharesPlan,
    SharesProblem,
    evaluate_shares,
    fastest,
)
from qsync_opt.training import SolveOptions as TrainingOptions

Values = Mapping[str, Mapping[int, float]]
"""Device type to candidate batch to a value; infinite where the batch is impossible."""
_MOST_SUMS = 2_000_000
"""Most sums of local batches that the dynamic program goes through."""
Combine = Callable[[Any, Any], Any]
"""Elementwise sum or maximum."""
_REASON_S = 20.0
"""Seconds for the least time of a joint plan, which the reason for infeasibility names."""


def best_batches(values: Values, problem: SharesProblem, combine: Combine) -> tuple[float, dict[str, int]] | None:
    """The batch of every device type for which the combined values are least, by dynamic programming over the sum.

    None if no choice with finite values adds up to the global batch.
    """
    unit = math.gcd(*(count * batch for name, count in problem.counts.items() for batch in problem.candidates[name]))
    total, rest = divmod(problem.global_batch, unit)
    most = sum(count * max(problem.candidates[name]) for name, count in problem.counts.items())
    if rest or problem.global_batch > most:
        return None
    if total > _MOST_SUMS:
        raise UnsupportedError(
            f"the global batch of {problem.global_batch} is {total} times the common divisor of what workers may take, "
            f"but at most {_MOST_SUMS} times is planned; allow only local batches that are multiples of a larger number"
        )
    reached: Floats = np.full(total + 1, math.inf)
    reached[0] = 0.0
    chosen: dict[str, np.ndarray] = {}
    for name, count in problem.counts.items():
        after: Floats = np.full(total + 1, math.inf)
        batch_S = np.zeros(total + 1, dtype=np.int64)
        for batch, value in values[name].items():
            step = count * batch // unit
            if value == math.inf or step > total:
                continue
            candidate = combine(reached[: total + 1 - step], value)
            better = candidate < after[step:]
            after[step:][better] = candidate[better]
            batch_S[step:][better] = batch
        reached, chosen[name] = after, batch_S
    if not math.isfinite(reached[total]):
        return None
    left, batches = total, {}
    for name, count in reversed(problem.counts.items()):
        batches[name] = int(chosen[name][left])
        left -= count * batches[name] // unit
    return float(reached[total]), {name: batches[name] for name in problem.counts}


class _Floors:
    """Bounds without any search: times and memory of the cheapest precision of every operator, casts left out.

    Axes: A anchors, O operators, P precisions; times are of forward and backward, rounded down.
    """

    def __init__(self, problem: SharesProblem) -> None:
        self._sizes = [*problem.anchors]
        self._least_ns = peers_ns(problem.first)
        self._optimizer_ns = problem.first.optimizer_ns
        self._costs: dict[str, tuple[Floats, Floats]] = {}
        for device in problem.first.devices:
            tables = [anchor.device(device.name).operators for anchor in problem.anchors.values()]
            width = max(map(len, device.operators.values()))
            time_AOP: Floats = np.full((len(tables), len(device.operators), width), np.inf)
            memory_AOP = time_AOP.copy()
            for anchor, table in enumerate(tables):
                for row, costs in enumerate(table.values()):
                    values = [*costs.values()]
                    time_AOP[anchor, row, : len(values)] = [cost.forward_ns + cost.backward_ns for cost in values]
                    memory_AOP[anchor, row, : len(values)] = [cost.memory_kib for cost in values]
            self._costs[device.name] = time_AOP, memory_AOP

    def __call__(self, name: str, batch: int) -> tuple[int, int]:
        """Least iteration time in ns and least memory in KiB, of a device type at a batch."""
        busy_ns, memory_kib = (self._least(costs_AOP, batch) for costs_AOP in self._costs[name])
        return max(self._least_ns, busy_ns + self._optimizer_ns), memory_kib

    def _least(self, costs_AOP: Floats, batch: int) -> int:
        position = sum(size <= batch for size in self._sizes[1:-1])
        low, high = self._sizes[position : position + 2]
        share = (batch - low) / (high - low)
        with np.errstate(invalid="ignore"):
            costs_OP = costs_AOP[position] + (costs_AOP[position + 1] - costs_AOP[position]) * share
        least_O = np.nanmin(np.where(np.isfinite(costs_OP), np.maximum(costs_OP, 0.0), np.nan), axis=1)
        # Less by what rounding each of up to two parts down, and floating point, can take.
        return max(0, math.floor(float(least_O.sum()) * (1 - 1e-9)) - 2 * len(least_O))


@dataclass(slots=True)
class _Solved:
    """What is known of one device type at one batch: bounds of its value, and its best precisions."""

    lower: float
    upper: float = math.inf
    devices: Mapping[str, str] | None = None
    proved: bool = True
    """Whether an infinite value is proved."""


Solve = Callable[[str, int], _Solved]


@dataclass(slots=True)
class _Lazy:
    """The program on bounds: `run` solves what it picks until that is solved, or a gap or a time is reached."""

    problem: SharesProblem
    solve: Solve
    combine: Combine
    gap: float = 0.0
    deadline: float = math.inf
    lower: dict[str, dict[int, float]] = field(default_factory=dict)
    solved: dict[tuple[str, int], _Solved] = field(default_factory=dict)
    out_of_time: bool = False

    def run(self) -> tuple[float, tuple[float, dict[str, int]] | None]:
        """The bound (infinite if there is no plan), and the value and batches of the best plan, if any was found."""
        grows = {name: self.problem.grows(name) for name in self.lower}
        while True:
            picked = best_batches(self.lower, self.problem, self.combine)
            best = best_batches(self._upper(), self.problem, self.combine)
            if picked is None:
                return math.inf, best
            bound, batches = picked
            if best is not None and bound >= best[0] * (1 - self.gap):
                return min(bound, best[0]), best
            new = [(name, batch) for name, batch in batches.items() if (name, batch) not in self.solved]
            if not new or time.monotonic() > self.deadline:
                self.out_of_time = bool(new)
                return bound, best
            for name, batch in new:
                result = self.solved[name, batch] = self.solve(name, batch)
                own = self.lower[name]
                for other in own:
                    if other == batch or (grows[name] and other > batch):
                        own[other] = max(own[other], result.lower)

    def _upper(self) -> dict[str, dict[int, float]]:
        values: dict[str, dict[int, float]] = {name: {} for name in self.lower}
        for (name, batch), result in self.solved.items():
            values[name][batch] = result.upper
        return values

    def plan(self, batches: Mapping[str, int]) -> SharesPlan:
        """The plan of solved batches."""
        devices = {name: self.solved[name, batch].devices or {} for name, batch in batches.items()}
        return SharesPlan(batches=batches, precisions=Plan(problem=self.problem.name, devices=devices))


def find_fastest(
    problem: SharesProblem, method: str = "exact", time_limit_s: float | None = None
) -> FastestShares | None:
    """The joint plan of least iteration time; see `qsync_opt.training.fastest_shares`."""
    deadline = math.inf if time_limit_s is None else time.monotonic() + time_limit_s
    roomy = replace(problem, latency_limit_ns=NO_LIMIT_NS)
    floors = _Floors(roomy)

    def solve(name: str, batch: int) -> _Solved:
        left_s = None if deadline == math.inf else max(1e-3, deadline - time.monotonic())
        answer = fastest(roomy.at(name, batch), method, time_limit_s=left_s)
        if answer is None:
            return _Solved(lower=math.inf if left_s is None else 0.0, proved=left_s is None)
        bound_ns = answer.iteration_ns if answer.proved else answer.bound_ns
        return _Solved(lower=bound_ns, upper=answer.iteration_ns, devices=answer.plan.devices[name])

    search = _Lazy(problem=roomy, solve=solve, combine=np.maximum, deadline=deadline)
    limits_kib = {device.name: device.memory_limit_kib for device in problem.first.devices}
    for name, batches in problem.candidates.items():
        search.lower[name] = {}
        for batch in batches:
            least_ns, least_kib = floors(name, batch)
            search.lower[name][batch] = math.inf if least_kib > limits_kib[name] else float(least_ns)
    bound, best = search.run()
    if best is None:
        return None
    plan = search.plan(best[1])
    evaluation = evaluate_shares(roomy, plan)
    return FastestShares(plan=plan, evaluation=evaluation, bound_ns=min(math.ceil(bound), evaluation.iteration_ns))


class SharesFormulation:
    """The default: every batch that is wanted is solved by the default for precisions, with its gap."""

    METHOD: ClassVar = "greedy"
    GAP: ClassVar = 1e-3
    """Relative gap at which it stops, where none is asked for: that of the default for precisions."""

    def solve(self, problem: SharesProblem, options: SolveOptions) -> Answer:
        """Choose local batches and precisions; see `Formulation.solve`."""
        started = time.monotonic()
        deadline = math.inf if options.time_limit_s is None else started + options.time_limit_s
        search = _Lazy(
            problem=problem,
            solve=lambda name, batch: self._solved(problem.at(name, batch), options, deadline),
            combine=np.add,
            gap=options.gap or self.GAP,
            deadline=deadline,
            lower=_possible(problem),
        )
        built = time.monotonic()
        bound, best = search.run()
        times: dict[str, Any] = {"build_seconds": built - started, "solve_seconds": time.monotonic() - built}
        proved = all(each.proved for each in search.solved.values())
        if best is None:
            if bound == math.inf and proved and not search.out_of_time:
                return Answer(
                    termination=TerminationStatus.INFEASIBLE, reason=_infeasible(problem, options.time_limit_s), **times
                )
            stopped = TerminationStatus.TIME_LIMIT if time.monotonic() > deadline else TerminationStatus.ERROR
            return Answer(
                termination=stopped,
                bound=0.0 if bound == math.inf else bound,
                reason="no plan within the limits was found, which proves nothing; allow more time",
                **times,
            )
        plan = search.plan(best[1])
        objective = evaluate_shares(problem, plan).objective
        if bound >= objective * (1 - 2 * PROOF):
            bound = objective  # every search ends within this share of its optimum: that is its proof
        late = search.out_of_time or any(not each.proved for each in search.solved.values())
        termination = termination_of(objective, bound, out_of_time=late)
        return Answer(plan=plan, termination=termination, objective=objective, bound=min(bound, objective), **times)

    def _solved(self, alone: Problem, options: SolveOptions, deadline: float) -> _Solved:
        left_s = None if deadline == math.inf else max(1e-3, deadline - time.monotonic())
        solver = None if options.solver is None else create(Kind.SOLVER, options.solver)
        own = TrainingOptions(solver=solver, time_limit_s=left_s, gap=options.gap)
        answer = create(Kind.FORMULATION, self.METHOD).solve(alone, own)
        if answer.termination is TerminationStatus.INFEASIBLE:
            return _Solved(lower=math.inf)
        if answer.devices is None:
            return _Solved(lower=answer.bound or 0.0, proved=False)
        return _Solved(
            lower=answer.objective if answer.termination is TerminationStatus.OPTIMAL else answer.bound or 0.0,
            upper=answer.objective,
            devices=answer.devices[alone.devices[0].name],
            proved=answer.termination is not TerminationStatus.TIME_LIMIT,
        )


class ExactSharesFormulation(SharesFormulation):
    """The proved optimum: every batch that is wanted is solved with proof."""

    METHOD: ClassVar = "exact"
    GAP: ClassVar = 0.0


class ExhaustiveSharesFormulation(SharesFormulation):
    """Every batch that is wanted is solved by trying all precisions, for tiny problems."""

    METHOD: ClassVar = "exhaustive"
    GAP: ClassVar = 0.0


def _possible(problem: SharesProblem) -> dict[str, dict[int, float]]:
    """0 for every candidate, infinite where even the cheapest precisions break a limit."""
    floors = _Floors(problem)
    limits_kib = {device.name: device.memory_limit_kib for device in problem.first.devices}
    values: dict[str, dict[int, float]] = {}
    for name, batches in problem.candidates.items():
        values[name] = {}
        for batch in batches:
            least_ns, least_kib = floors(name, batch)
            breaks = least_ns > problem.latency_limit_ns or least_kib > limits_kib[name]
            values[name][batch] = math.inf if breaks else 0.0
    return values


def _infeasible(problem: SharesProblem, time_limit_s: float | None) -> str:
    everything = {name: dict.fromkeys(batches, 0.0) for name, batches in problem.candidates.items()}
    if best_batches(everything, problem, np.add) is None:
        counts = ", ".join(f"{count} of {name!r}" for name, count in problem.counts.items())
        return (
            f"no local batches of the candidates add up to the global batch of {problem.global_batch} over {counts}; "
            "allow other candidates or another global batch"
        )
    quickest = find_fastest(problem, time_limit_s=min(_REASON_S, time_limit_s or _REASON_S))
    if quickest is None:
        return (
            f"no local batches that add up to the global batch of {problem.global_batch} fit into the memory limits; "
            "allow smaller batches, more memory or a smaller global batch"
        )
    return (
        f"no local batches and precisions keep the latency limit of {problem.latency_limit_ns} ns within the memory "
        f"limits; the least value that could be met is {quickest.bound_ns} ns"
        + ("" if quickest.bound_ns == quickest.iteration_ns else f" or more, and {quickest.iteration_ns} ns can")
    )


@dataclass(frozen=True, slots=True)
class _Block:
    """One device type at one batch within the program: its model, its first column, and the column that chooses it."""

    name: str
    batch: int
    collapsed: Collapsed
    first: int
    choice: int


def shares_program(problem: SharesProblem) -> tuple[LinearModel, list[_Block]]:
    """The joint problem as one integer program.

    Every device type has, for every candidate batch, the program of its precisions, all of whose constants are
    multiplied by a variable that is 1 if the batch is chosen and 0 if not.
    """
    program, blocks = LinearModel(name="shares"), []
    for name, values in _possible(problem).items():
        for batch, value in values.items():
            if value == math.inf:
                continue
            alone = problem.at(name, batch)
            collapsed = collapse(alone, alone.devices[0])
            own = linear_program(collapsed.model)
            choice = program.add_column(
                f"batch[{name},{batch}]", integer=True, cost=collapsed.constant_objective + own.constant
            )
            first = len(program.columns)
            program.columns += [replace(column, name=f"{name},{batch}:{column.name}") for column in own.columns]
            for row in own.rows:
                largest = max((abs(value) for value in row.terms.values()), default=0.0) or 1.0
                scale = 1e3 / largest if row.name.startswith("limit") else 1.0
                terms = {first + column: scale * value for column, value in row.terms.items()}
                label = f"{name},{batch}:{row.name}"
                if row.lower == row.upper:
                    program.add_row(label, {**terms, choice: -scale * row.upper}, lower=0.0, upper=0.0)
                elif row.upper < math.inf:
                    program.add_row(label, {**terms, choice: -scale * row.upper}, upper=0.0)
            blocks.append(_Block(name, batch, collapsed, first, choice))
    for name in problem.counts:
        choices = {block.choice: 1.0 for block in blocks if block.name == name}
        program.add_row(f"one[{name}]", choices, lower=1.0, upper=1.0)
    total = float(problem.global_batch)
    samples = {block.choice: float(problem.counts[block.name] * block.batch) for block in blocks}
    program.add_row("global batch", samples, lower=total, upper=total)
    return program, blocks


class IlpSharesFormulation:
    """The joint problem as one integer program, for checking the others on small problems."""

    def solve(self, problem: SharesProblem, options: SolveOptions) -> Answer:
        """Choose local batches and precisions; see `Formulation.solve`."""
        started = time.monotonic()
        solver = required_solver(options.solver, "method 'ilp'", continuous=True)
        program, blocks = shares_program(problem)
        missing = {*problem.counts} - {block.name for block in blocks}
        if missing:
            return Answer(termination=TerminationStatus.INFEASIBLE, reason=_infeasible(problem, options.time_limit_s))
        built = time.monotonic()

        def plan_of(values: tuple[float, ...]) -> SharesPlan:
            batches: dict[str, int] = {}
            devices: dict[str, Mapping[str, str]] = {}
            for block in blocks:
                if values[block.choice] > 0.5:
                    model = block.collapsed.model
                    own = values[block.first : block.first + len(model.objective_Z)]
                    batches[block.name] = block.batch
                    devices[block.name] = block.collapsed.choices(model.complete(labels_at(model, tuple(own))))
            return SharesPlan(batches=batches, precisions=Plan(problem=problem.name, devices=devices))

        limits = LinearOptions(time_limit_s=options.time_limit_s, relative_gap=options.gap)
        result = solve_in_units(solver, program, limits)
        return answer_of(
            result,
            solver,
            bound_of=lambda bound: max(bound, 0.0),  # costs are never negative
            plan_of=plan_of,
            objective_of=lambda plan: evaluate_shares(problem, plan).objective,
            why_infeasible=lambda: _infeasible(problem, options.time_limit_s),
            build_seconds=built - started,
            solve_seconds=time.monotonic() - built,
        )
