"""The plan of least iteration time that keeps the memory limits, device type by device type."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from qsync_opt.formulations.assignment.effort import Effort
from qsync_opt.formulations.linear.solver import LinearSolver
from qsync_opt.formulations.training.collapse import collapse
from qsync_opt.formulations.training.exact import exact_effort
from qsync_opt.formulations.training.greedy import greedy_effort
from qsync_opt.formulations.training.least_latency import least_latency
from qsync_opt.formulations.training.segments import peers_ns
from qsync_opt.formulations.training.tables import device_tables, graph_tables
from qsync_opt.formulations.training.turned import fastest_by, fastest_within
from qsync_opt.registry import Feature, Kind, create, features, require
from qsync_opt.training.problem import Problem
from qsync_opt.training.solution import SolveOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Fastest:
    """A fast plan: ``bound_ns`` is a time no plan is below, ``proved`` that this plan reaches the least."""

    devices: dict[str, dict[str, str]]
    bound_ns: int
    proved: bool
    method: str


def fastest_plan(
    problem: Problem,
    method: Any,
    solver: LinearSolver | None,
    deadline: float,
    *,
    budget: float | None = None,
    tied: Sequence[Sequence[str]] = (),
) -> Fastest | None:
    """Search by bound and fix with time as the objective; under a budget of sensitivity, by the problem turned round.

    Args:
        problem: The problem; its latency limit is set aside.
        method: ``"exact"`` proves, ``"greedy"`` searches no harder than the method of that name; any other formulation,
            by name or as an instance, is asked under one latency limit after another.
        solver: A solver for what the search leaves undecided, or None.
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
        if tied:
            require(Kind.FORMULATION, method, Feature.TIED)
        within = fastest_by(
            problem,
            create(Kind.FORMULATION, method),
            math.inf if budget is None else budget,
            options=SolveOptions(tied=tuple(map(tuple, tied))),
            deadline=deadline,
            proves=Feature.PROOF in features(Kind.FORMULATION, method),
        )
    elif budget is not None:
        within = fastest_within(
            problem, budget, tied=tied, solver=solver if exact else None, deadline=deadline, prove=exact
        )
    else:
        effort = replace(exact_effort(0.0, solver), enough=0.0) if exact else greedy_effort(0.0)
        return _least(problem, effort, deadline, tied, label)
    if within is None:
        return None
    chosen = {name: dict(choices) for name, choices in within.plan.devices.items()}
    return _fastest(chosen, within.iteration_ns, within.bound_ns, label)


def _least(
    problem: Problem, effort: Effort, deadline: float, tied: Sequence[Sequence[str]], label: str
) -> Fastest | None:
    """The least iteration time whatever the sensitivity, device type by device type."""
    graph = graph_tables(problem)
    reached_ns = bound_ns = peers_ns(problem)
    devices: dict[str, dict[str, str]] = {}
    for device in problem.devices:
        tables = device_tables(problem, device)
        collapsed = collapse(problem, device, graph=graph, tables=tables, latency_limit_ns=0, tied=tied)
        low, high, labels_N = least_latency(collapsed, deadline, effort)
        if labels_N is None:
            return None
        devices[device.name] = collapsed.choices(labels_N)
        reached_ns, bound_ns = max(reached_ns, int(high)), max(bound_ns, int(low))
    return _fastest(devices, reached_ns, bound_ns, label)


def _fastest(devices: dict[str, dict[str, str]], reached_ns: int, bound_ns: int, label: str) -> Fastest:
    proved = bound_ns >= reached_ns
    return Fastest(
        devices=devices,
        bound_ns=min(bound_ns, reached_ns),
        proved=proved,
        method=label if proved else f"{label}, not proved fastest",
    )
