"""The problem turned round: how fast can a plan be whose total sensitivity keeps a budget, within memory?

Bisection over the latency limit. At every limit the method at hand looks for a plan that keeps the budget: a plan moves
the upper end, and a proof that there is none the lower end, which is the bound. Where the method finds none and proves
nothing, the search goes on above all the same, but the bound stays.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qsync_opt.formulations.base import Formulation
from qsync_opt.formulations.training.front import Sweep
from qsync_opt.io.codec import check_number
from qsync_opt.training.evaluation import evaluate
from qsync_opt.training.plan import Plan
from qsync_opt.training.problem import NO_LIMIT_NS, Problem
from qsync_opt.training.solution import SolveOptions, TerminationStatus

_STEPS = 80
"""Of a bisection, more than the bits of any time."""
_ROUNDING = 1e-12
"""Share of a budget by which a search's own sum of sensitivities may differ from the evaluation's."""
_FINE = 1e-4
"""Where nothing is to be proved the search ends this near, as a share of the time."""
_GREEDY_GAP = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Within:
    """The fastest plan found whose sensitivity keeps a budget; no such plan is faster than ``bound_ns``."""

    plan: Plan
    iteration_ns: int
    bound_ns: int


@dataclass(frozen=True, slots=True)
class _Try:
    """What a method says about one latency limit: a plan (or None), and whether none keeps the budget for certain."""

    plan: Plan | None
    none: bool


_Attempt = Callable[[int], _Try]


def fastest_within(
    problem: Problem,
    sensitivity_budget: float,
    *,
    tied: Sequence[Sequence[str]] = (),
    solver: Any = None,
    deadline: float = math.inf,
    prove: bool = True,
) -> Within | None:
    """Least iteration time with total sensitivity at most ``sensitivity_budget``, by one search under growing limits.

    Args:
        problem: The problem; its latency limit is set aside.
        sensitivity_budget: Most total sensitivity.
        tied: Groups of adjustable operators that must share one precision.
        solver: As in `Sweep`.
        deadline: ``time.monotonic()`` value at which to stop with the best plan and bound known.
        prove: Search at every limit until it is settled whether a plan keeps the budget (method ``exact``), or no
            harder than the default method does (``greedy``).

    Returns:
        The plan and a proved lower bound of the time, or None if no plan within memory keeps the budget (or none was
        found before the deadline).

    Source: ours; bisection over the latency limit, in which every plan and every bound found moves an end.
    """
    check_number(sensitivity_budget, "sensitivity budget")
    gap = 0.0 if prove else _GREEDY_GAP
    sweep = Sweep(problem, gap=gap, tied=tied, solver=solver, deadline=deadline, thorough=True)
    aim = sensitivity_budget * (1 + _ROUNDING)

    def attempt(limit_ns: int) -> _Try:
        point = sweep.solve(limit_ns, aim=aim)
        if point is None:
            return _Try(None, sweep.none_proved)
        return _Try(point.plan, point.bound > aim)

    return _bisect(problem, sensitivity_budget, attempt, sweep.floor_ns, deadline, fine=0.0 if prove else _FINE)


def fastest_by(
    problem: Problem,
    formulation: Formulation,
    budget: float,
    *,
    options: SolveOptions,
    deadline: float,
    proves: bool,
) -> Within | None:
    """The same by any formulation, which solves the problem anew at every limit.

    Args:
        problem: The problem; its latency limit is set aside.
        formulation: What chooses precisions under a latency limit.
        budget: Most total sensitivity, infinite for none.
        options: For every solve; the time that is left takes the place of their time limit.
        deadline: ``time.monotonic()`` value at which to stop.
        proves: Whether its bounds, and what it calls infeasible, are to be believed.
    """

    def attempt(limit_ns: int) -> _Try:
        left_s = None if deadline == math.inf else max(deadline - time.monotonic(), 1e-3)
        limited = replace(problem, latency_limit_ns=limit_ns)
        answer = formulation.solve(limited, replace(options, time_limit_s=left_s))
        if answer.devices is None:
            return _Try(None, proves and answer.termination is TerminationStatus.INFEASIBLE)
        plan = Plan(problem=problem.name, devices=answer.devices)
        return _Try(plan, proves and answer.bound is not None and answer.bound > budget * (1 + _ROUNDING))

    return _bisect(problem, budget, attempt, 0, deadline, fine=0.0 if proves else _FINE)


def _bisect(
    problem: Problem, budget: float, attempt: _Attempt, floor_ns: int, deadline: float, *, fine: float
) -> Within | None:
    patient = replace(problem, latency_limit_ns=NO_LIMIT_NS)
    best: Within | None = None
    # Below ``proved`` there is no plan for certain, below ``tried`` none was found.
    proved = tried = floor_ns
    high = limit = NO_LIMIT_NS
    for _ in range(_STEPS):
        found = attempt(limit)
        evaluation = None if found.plan is None else evaluate(patient, found.plan)
        if found.plan is not None and evaluation and evaluation.feasible and evaluation.objective <= budget:
            high = min(limit, evaluation.iteration_ns)
            best = Within(plan=found.plan, iteration_ns=evaluation.iteration_ns, bound_ns=proved)
        elif limit == NO_LIMIT_NS:
            return None
        else:
            proved = limit + 1 if found.none and proved == tried else proved
            tried = limit + 1
        if tried >= high or high - tried <= fine * high or time.monotonic() > deadline:
            break
        limit = (tried + high) // 2
    return None if best is None else replace(best, bound_ns=min(proved, best.iteration_ns))
