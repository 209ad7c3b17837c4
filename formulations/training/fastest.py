"""The fastest plan within the memory limits, and within a budget of sensitivity."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qsync_opt.formulations.assignment import Effort
from qsync_opt.formulations.base import Formulation
from qsync_opt.formulations.linear import LinearSolver
from qsync_opt.formulations.training.collapsed import collapse
from qsync_opt.formulations.training.exact import exact_effort
from qsync_opt.formulations.training.front import Sweep
from qsync_opt.formulations.training.greedy import greedy_effort
from qsync_opt.formulations.training.latency import least_latency
from qsync_opt.formulations.training.tables import graph_tables, peers_ns
from qsync_opt.io import check_number
from qsync_opt.registry import Feature, Kind, create, features, require
from qsync_opt.training import NO_LIMIT_NS, Plan, Problem, SolveOptions, TerminationStatus, evaluate

_STEPS = 80
"""Most steps of a bisection: more than the bits of any time."""
_ROUNDING = 1e-12
"""Share of a budget by which a search's own sum of sensitivities may differ from the evaluation's."""
_FINE = 1e-4
"""Relative precision of the time where nothing is proved."""
_GREEDY_GAP = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Fastest:
    """The fastest known plan within memory and budget; no such plan is faster than ``bound_ns``."""

    devices: dict[str, dict[str, str]]
    iteration_ns: int
    bound_ns: int
    method: str = ""

    @property
    def proved(self) -> bool:
        """True if no such plan is faster than this one."""
        return self.bound_ns >= self.iteration_ns


_Attempt = Callable[[int], tuple[Plan | None, bool]]
"""Solves under a latency limit: a plan or None, and whether it is proved that no plan keeps the budget."""


def fastest_within(
    problem: Problem,
    sensitivity_budget: float,
    *,
    tied: Sequence[Sequence[str]] = (),
    solver: Any = None,
    deadline: float = math.inf,
    prove: bool = True,
) -> Fastest | None:
    """Least iteration time with total sensitivity at most ``sensitivity_budget``, by one search under changing limits.

    Args:
        problem: The problem; its latency limit is set aside.
        sensitivity_budget: Most total sensitivity.
        tied: Groups of adjustable operators that must share one precision.
        solver: As in `Sweep`.
        deadline: ``time.monotonic()`` value at which to stop with the best plan and bound known.
        prove: Search at every limit until it is settled whether a plan keeps the budget (method ``exact``), or no
            harder than the default method (``greedy``).

    Returns:
        The plan and a proved lower bound of the time, or None if no plan within memory keeps the budget (or none was
        found before the deadline).

    Source: ours; bisection over the latency limit, in which every plan and every bound moves an end.
    """
    check_number(sensitivity_budget, "sensitivity budget")
    gap = 0.0 if prove else _GREEDY_GAP
    sweep = Sweep(problem, gap=gap, tied=tied, solver=solver, deadline=deadline, thorough=True)
    aim = sensitivity_budget * (1 + _ROUNDING)

    def attempt(limit_ns: int) -> tuple[Plan | None, bool]:
        point = sweep.solve(limit_ns, aim=aim)
        return (None, sweep.none_proved) if point is None else (point.plan, point.bound > aim)

    return _bisect(problem, sensitivity_budget, attempt, sweep.floor_ns, deadline, fine=0.0 if prove else _FINE)


def _bisect(
    problem: Problem, budget: float, attempt: _Attempt, floor_ns: int, deadline: float, *, fine: float
) -> Fastest | None:
    patient = replace(problem, latency_limit_ns=NO_LIMIT_NS)
    best: Fastest | None = None
    # It is proved that no plan is below ``proved``; none was found below ``low``.
    proved = low = floor_ns
    high = limit = NO_LIMIT_NS
    for _ in range(_STEPS):
        plan, none_proved = attempt(limit)
        evaluation = None if plan is None else evaluate(patient, plan)
        if plan is not None and evaluation and evaluation.feasible and evaluation.objective <= budget:
            high = min(limit, evaluation.iteration_ns)
            devices = {name: dict(choices) for name, choices in plan.devices.items()}
            best = Fastest(devices=devices, iteration_ns=evaluation.iteration_ns, bound_ns=proved)
        elif limit == NO_LIMIT_NS:
            return None
        else:
            proved = limit + 1 if none_proved and proved == low else proved
            low = limit + 1
        if low >= high or high - low <= fine * high or time.monotonic() > deadline:
            break
        limit = (low + high) // 2
    return None if best is None else replace(best, bound_ns=min(proved, best.iteration_ns))


def fastest_plan(
    problem: Problem,
    method: Any,
    solver: LinearSolver | None,
    deadline: float,
    *,
    budget: float | None = None,
    tied: Sequence[Sequence[str]] = (),
) -> Fastest | None:
    """Find the fastest plan: bound and fix with time as the objective, or within a budget of sensitivity by bisection.

    Args:
        problem: The problem; its latency limit is set aside.
        method: ``"exact"`` proves, ``"greedy"`` searches no harder than the method of that name; any other formulation,
            by name or as an instance, solves under one latency limit after another.
        solver: A linear solver for what the search leaves undecided, or None.
        deadline: When to stop, on `time.monotonic`'s clock.
        budget: Most total sensitivity, if any.
        tied: Groups of adjustable operators that must share one precision.

    Returns:
        The plan, or None if no plan keeps the memory limits and the budget, or none was found.

    Source: ours. Each device's least time is independent of the others, and the iteration time is their maximum.
    """
    exact = method == "exact"
    label = "bound and fix" if exact else method if isinstance(method, str) else type(method).__name__
    if exact and solver is not None:
        label += f" with {solver.name} {solver.version}"
    if not exact and method != "greedy":
        result = _fastest_by(problem, method, math.inf if budget is None else budget, deadline, tied)
    elif budget is not None:
        result = fastest_within(
            problem, budget, tied=tied, solver=solver if exact else None, deadline=deadline, prove=exact
        )
    else:
        effort = replace(exact_effort(0.0, solver), enough=0.0) if exact else greedy_effort(0.0)
        result = _least(problem, effort, deadline, tied)
    if result is None:
        return None
    return replace(result, method=label if result.proved else f"{label}, not proved fastest")


def _fastest_by(
    problem: Problem, method: Any, budget: float, deadline: float, tied: Sequence[Sequence[str]]
) -> Fastest | None:
    """By any formulation, which solves the problem anew at every limit."""
    if tied:
        require(Kind.FORMULATION, method, Feature.TIED)
    formulation: Formulation = create(Kind.FORMULATION, method)
    proves = Feature.PROOF in features(Kind.FORMULATION, method)

    def attempt(limit_ns: int) -> tuple[Plan | None, bool]:
        left_s = None if deadline == math.inf else max(deadline - time.monotonic(), 1e-3)
        options = SolveOptions(tied=tuple(map(tuple, tied)), time_limit_s=left_s)
        answer = formulation.solve(replace(problem, latency_limit_ns=limit_ns), options)
        if answer.devices is None:
            return None, proves and answer.termination is TerminationStatus.INFEASIBLE
        plan = Plan(problem=problem.name, devices=answer.devices)
        return plan, proves and answer.bound is not None and answer.bound > budget * (1 + _ROUNDING)

    return _bisect(problem, budget, attempt, 0, deadline, fine=0.0 if proves else _FINE)


def _least(problem: Problem, effort: Effort, deadline: float, tied: Sequence[Sequence[str]]) -> Fastest | None:
    graph = graph_tables(problem)
    reached_ns = bound_ns = peers_ns(problem)
    devices: dict[str, dict[str, str]] = {}
    for device in problem.devices:
        collapsed = collapse(problem, device, graph=graph, latency_limit_ns=0, tied=tied)
        low, high, labels_N = least_latency(collapsed, deadline, effort)
        if labels_N is None:
            return None
        devices[device.name] = collapsed.choices(labels_N)
        reached_ns, bound_ns = max(reached_ns, int(high)), max(bound_ns, int(low))
    return Fastest(devices=devices, iteration_ns=reached_ns, bound_ns=min(bound_ns, reached_ns))
