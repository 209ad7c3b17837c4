"""Which operators to profile: those whose uncertain times can change the plan.

The regret of a plan under other times is the share by which it is worse than the best plan there could be: in
sensitivity where it keeps the limits, else in the time beyond the limit that another plan would not need. Lower bounds
on the best plan decide it without proving optima: where the bound reaches the plan, the operator cannot change it.

Operators with equal costs share one measurement, so that groups of them are chosen.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qsync_opt.errors import ProblemError
from qsync_opt.io import check_integer, check_member
from qsync_opt.training.evaluation import Evaluation, evaluate
from qsync_opt.training.intervals import Target, interval_problem, operator_intervals
from qsync_opt.training.plan import Plan
from qsync_opt.training.planner import fastest, solve
from qsync_opt.training.problem import Problem

EXACT_GROUPS = 7
"""Most groups that the exhaustive choice takes: it plans for all ends of all intervals."""
_NOTHING = 1e-9
_ROUNDS = 50


class ChoiceMethod(enum.StrEnum):
    """How operators to profile are chosen."""

    BOUNDS = "bounds"
    """Largest mean regret that its interval alone can cause."""
    KMEANS = "kmeans"
    """Nearest to the centres of clusters of costs."""
    FACILITY = "facility"
    """Greedy facility location over costs, at least 1 - 1/e of the best cover."""
    RANDOM = "random"
    """At random."""
    EXACT = "exact"
    """Least mean regret over all ends of all intervals, by enumeration; for a few groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Operators of a device type that one measurement serves, with the mean regret that their times can cause."""

    device: str
    operators: tuple[str, ...]
    regret: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileChoice:
    """The measurements to make, the most useful first.

    ``complete`` is True if no other measurement can change the plan by itself, which only the bounds tell.
    """

    method: ChoiceMethod
    measurements: tuple[Measurement, ...]
    groups: int
    complete: bool

    @property
    def targets(self) -> tuple[Target, ...]:
        """Device type and operator of all that the measurements serve."""
        return tuple((m.device, name) for m in self.measurements for name in m.operators)


def choose_profiles(
    problem: Problem, budget: int, *, method: ChoiceMethod | str = ChoiceMethod.BOUNDS, seed: int = 0
) -> ProfileChoice:
    """Choose at most ``budget`` operators to profile before the plan is trusted.

    Args:
        problem: With intervals, as `build_problem` makes it of learned costs.
        budget: Number of measurements; operators with equal costs share one.
        method: See `ChoiceMethod`. By bounds fewer than the budget are chosen if no other can change the plan.
        seed: Of the methods that draw at random.

    Raises:
        ProblemError: No interval in the problem, no plan, a budget below 1, or too many groups for the exact choice.

    Source: ours; the greedy cover is that of Nemhauser, Wolsey and Fisher (1978).
    """
    check_integer(budget, "budget: number of measurements", minimum=1)
    method = check_member(ChoiceMethod, method, "method of choosing profiles")
    groups = profile_groups(problem)
    if not groups:
        raise ProblemError(
            f"problem {problem.name!r} has no intervals, so nothing says what is uncertain; build it from learned costs"
        )
    solution = solve(problem)
    if solution.plan is None:
        raise ProblemError(f"problem {problem.name!r} has no plan ({solution.termination}): raise its limits first")
    budget = min(budget, len(groups))
    if method is ChoiceMethod.EXACT:
        chosen = _exact(problem, groups, budget)
        regrets = [_mean_regret(problem, solution.plan, group) for group in groups]
    elif method is ChoiceMethod.BOUNDS:
        regrets = [_mean_regret(problem, solution.plan, group) for group in groups]
        order = sorted(range(len(groups)), key=lambda g: (-regrets[g], g))
        chosen = [g for g in order if regrets[g] > _NOTHING][:budget]
    else:
        regrets = [math.nan] * len(groups)
        chosen = _BASELINES[method](_cost_features(problem, groups), _times(problem, groups), budget, seed)
    left = [regrets[g] for g in range(len(groups)) if g not in chosen]
    return ProfileChoice(
        method=method,
        measurements=tuple(
            Measurement(
                device=groups[g][0][0],
                operators=tuple(name for _, name in groups[g]),
                regret=0.0 if math.isnan(regrets[g]) else regrets[g],
            )
            for g in chosen
        ),
        groups=len(groups),
        complete=all(regret <= _NOTHING for regret in left),
    )


def profile_groups(problem: Problem) -> list[tuple[Target, ...]]:
    """Device types and operators with intervals, grouped by what one measurement serves, in execution order."""
    intervals = operator_intervals(problem)
    groups: dict[object, list[Target]] = {}
    for device in problem.devices:
        for operator in problem.operators:
            target = (device.name, operator.name)
            if target in intervals:
                ends = tuple(sorted(intervals[target].items()))
                groups.setdefault((device.name, operator.type, operator.output_elements, ends), []).append(target)
    return [tuple(members) for members in groups.values()]


def plan_regret(problem: Problem, plan: Plan) -> float:
    """How much worse a plan may be than the best one of a problem, as a share; 0: the bound proves it the best.

    Within the limits it is the sensitivity above its lower bound over the plan's sensitivity. Beyond the time limit it
    is the time that the fastest plan (or the limit) would save, over the limit.
    """
    evaluation = evaluate(problem, plan)
    if evaluation.feasible:
        bound = solve(problem).bound
        return _excess(evaluation.objective, 0.0 if bound is None else bound)
    return _late(problem, evaluation)


def _late(problem: Problem, evaluation: Evaluation) -> float:
    best = fastest(problem, "greedy")
    bound_ns = 0 if best is None else best.bound_ns
    within_ns = max(problem.latency_limit_ns, bound_ns)
    return max(0.0, (evaluation.iteration_ns - within_ns) / max(1, within_ns))


def _excess(objective: float, bound: float) -> float:
    return 0.0 if objective <= 0 else max(0.0, (objective - bound) / objective)


def _mean_regret(problem: Problem, plan: Plan, group: Sequence[Target]) -> float:
    """Mean regret of a plan over three cases in which the times of one group alone are not as estimated.

    All take their shortest time, which leaves time for a finer plan; all take their longest, which may break the limit;
    the chosen precision takes its longest and the others their shortest, which speaks most for another choice. Zero:
    the group cannot change the plan by itself.
    """
    chosen = plan.resolve(problem)
    kept = {(device, name): chosen[device][name] for device, name in group}
    cases = (
        interval_problem(problem, low=group),
        interval_problem(problem, high=group),
        interval_problem(problem, low=group, kept=kept),
    )
    return math.fsum(plan_regret(case, plan) for case in cases) / len(cases)


def _exact(problem: Problem, groups: Sequence[tuple[Target, ...]], budget: int) -> list[int]:
    """The groups whose measurement leaves the least mean regret over all ends of all intervals."""
    if len(groups) > EXACT_GROUPS:
        raise ProblemError(
            f"the exact choice takes at most {EXACT_GROUPS} groups of operators, but the problem has {len(groups)}; "
            "choose by 'bounds'"
        )
    count = len(groups)
    ends = list(itertools.product((False, True), repeat=count))

    def at(known: dict[int, bool]) -> Problem:
        low = [target for g, up in known.items() if not up for target in groups[g]]
        return interval_problem(problem, low=low, high=[t for g, up in known.items() if up for t in groups[g]])

    worlds = [at(dict(enumerate(end))) for end in ends]
    default = solve(problem).plan
    best: tuple[float, tuple[int, ...]] | None = None
    for subset in itertools.combinations(range(count), budget):
        plans: dict[tuple[bool, ...], Plan | None] = {}
        total = 0.0
        for end, world in zip(ends, worlds, strict=True):
            key = tuple(end[g] for g in subset)
            if key not in plans:
                plans[key] = solve(at({g: end[g] for g in subset})).plan or _fastest_plan(world) or default
            plan = plans[key]
            assert plan is not None
            total += plan_regret(world, plan)
        if best is None or total < best[0] - _NOTHING:
            best = total, subset
    assert best is not None
    return list(best[1])


def _fastest_plan(problem: Problem) -> Plan | None:
    answer = fastest(problem, "greedy")
    return None if answer is None else answer.plan


def _times(problem: Problem, groups: Sequence[tuple[Target, ...]]) -> NDArray[np.float64]:
    """Time of each group in nanoseconds: the mean over its precisions, times its operators."""
    times = []
    for group in groups:
        device, name = group[0]
        table = problem.device(device).operators[name].values()
        times.append(len(group) * sum(c.forward_ns + c.backward_ns for c in table) / len(table))
    return np.array(times)


def _cost_features(problem: Problem, groups: Sequence[tuple[Target, ...]]) -> NDArray[np.float64]:
    """One row of standardized logarithms per group: times by precision and elements."""
    names = sorted({p for device in problem.devices for table in device.operators.values() for p in table})
    rows = []
    for group in groups:
        device, name = group[0]
        table = problem.device(device).operators[name]
        slowest = max(table.values(), key=lambda c: c.forward_ns + c.backward_ns)
        costs = [table.get(precision, slowest) for precision in names]
        elements = problem.operators[problem.index(name)].output_elements
        row = [math.log1p(value) for cost in costs for value in (cost.forward_ns, cost.backward_ns)]
        rows.append([*row, math.log1p(elements)])
    matrix = np.array(rows)
    spread = matrix.std(axis=0)
    return np.asarray((matrix - matrix.mean(axis=0)) / np.where(spread > 0, spread, 1.0))


_Baseline = Callable[[NDArray[np.float64], NDArray[np.float64], int, int], list[int]]


def _random(rows: NDArray[np.float64], times: NDArray[np.float64], budget: int, seed: int) -> list[int]:
    return [int(g) for g in np.random.default_rng(seed).permutation(len(times))[:budget]]


def _facility(rows: NDArray[np.float64], times: NDArray[np.float64], budget: int, seed: int) -> list[int]:
    distance = np.linalg.norm(rows[:, None] - rows[None], axis=2)
    scale = float(np.median(distance[distance > 0])) if (distance > 0).any() else 1.0
    similarity = np.exp(-distance / scale)
    covered, chosen = np.zeros(len(rows)), list[int]()
    for _ in range(budget):
        gains = (np.maximum(similarity, covered[None]) - covered[None]) @ times
        gains[chosen] = -1.0
        chosen.append(int(gains.argmax()))
        covered = np.maximum(covered, similarity[chosen[-1]])
    return chosen


def _kmeans(rows: NDArray[np.float64], times: NDArray[np.float64], budget: int, seed: int) -> list[int]:
    rng = np.random.default_rng(seed)
    centers = rows[rng.permutation(len(rows))[:budget]]
    for _ in range(_ROUNDS):
        nearest = np.linalg.norm(rows[:, None] - centers[None], axis=2).argmin(axis=1)
        moved = np.array(
            [rows[nearest == k].mean(axis=0) if (nearest == k).any() else centers[k] for k in range(budget)]
        )
        if np.allclose(moved, centers):
            break
        centers = moved
    chosen: list[int] = []
    for center in centers:
        order = np.linalg.norm(rows - center, axis=1).argsort(kind="stable")
        chosen.append(next(int(g) for g in order if int(g) not in chosen))
    return chosen


_BASELINES: dict[ChoiceMethod, _Baseline] = {
    ChoiceMethod.RANDOM: _random,
    ChoiceMethod.FACILITY: _facility,
    ChoiceMethod.KMEANS: _kmeans,
}
