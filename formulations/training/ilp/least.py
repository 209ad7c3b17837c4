"""Hand an assignment to a solver and read the answer back: scaling on the way in, exact integers on the way out."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from qsync_opt.errors import SolverError
from qsync_opt.formulations.linear import LinearOptions, LinearResult, LinearSolver, LinearStatus
from qsync_opt.formulations.training.ilp.assignment import (
    MEMORY,
    MEMORY_LIMIT,
    Assignment,
    Limit,
    build_assignment,
    read_back,
)
from qsync_opt.formulations.training.ilp.program import AssignmentProgram, Goal, Units, linearize
from qsync_opt.formulations.training.tables import peers_ns
from qsync_opt.registry import Kind, create
from qsync_opt.training import Problem, ProblemDevice

_ROW_SCALE = 1e3
"""Rows reach about this, so that solvers' tolerances of 1e-9 stay below one nanosecond or KiB."""
_WHOLE_COST_SCALE = 1e13
"""Sum of the largest costs where only whole coefficients are allowed: 1e6 was seen to give wrong optima, and 2**53
must not be reached."""
_TIGHTENINGS = 3
"""How often a limit is tightened when a solver's tolerance let a plan exceed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A solver's answer in the assignment's own units.

    ``labels`` keep every limit in exact integers (of the goal's own limits: moved by ``value``). ``value`` is exact for
    them; ``bound`` is the solver's lower bound. ``labels`` and ``value`` are None together.
    """

    status: LinearStatus
    labels: Mapping[str, str] | None
    value: float | None
    bound: float | None
    native: str
    build_seconds: float
    solve_seconds: float


def run(
    assignment: Assignment,
    solver: LinearSolver,
    *,
    goal: Goal = Goal.COST,
    cost_unit: float = 1.0,
    allowed: Mapping[str, frozenset[str]] | None = None,
    options: LinearOptions,
) -> Run:
    """Solve an assignment.

    Args:
        assignment: The assignment.
        solver: The solver.
        goal: What to minimise.
        cost_unit: What cost one unit of the objective stands for.
        allowed: Labels that a choice may take.
        options: The solver's limits.

    Returns:
        The answer. A plan that a solver's tolerance let exceed a limit is never returned: the limit is tightened by
        the excess and the solve repeated; the bound is that of the real limits all the same.

    Raises:
        SolverError: The solver failed, or keeps returning plans that exceed the limits.
    """
    build_seconds = solve_seconds = 0.0
    bound: float | None = None
    tightened = assignment
    for attempt in range(_TIGHTENINGS + 1):
        started = time.monotonic()
        program = _program(tightened, solver, goal, cost_unit, allowed)
        built = time.monotonic()
        result = solver.solve(program.model, options)
        build_seconds += built - started
        solve_seconds += time.monotonic() - built
        unit = _objective_unit(program.units, goal)
        if attempt == 0 and result.bound is not None:
            bound = result.bound * unit
        labels, value, excess = _read(assignment, program, result, goal)
        if not excess:
            return Run(
                status=result.status,
                labels=labels,
                value=value,
                bound=bound,
                native=result.native,
                build_seconds=build_seconds,
                solve_seconds=solve_seconds,
            )
        limits = tuple(replace(limit, bound=limit.bound - 2 * excess.get(limit.name, 0)) for limit in tightened.limits)
        tightened = replace(tightened, limits=limits)
    over = ", ".join(f"{name} by {amount}" for name, amount in excess.items())
    raise SolverError(
        f"{solver.name} keeps returning plans for {assignment.name!r} that exceed limits ({over}); use another solver"
    )


def _program(
    assignment: Assignment,
    solver: LinearSolver,
    goal: Goal,
    cost_unit: float,
    allowed: Mapping[str, frozenset[str]] | None,
) -> AssignmentProgram:
    if not solver.continuous:
        total = assignment.constant_cost + sum(float(node.cost_S.max()) for node in assignment.nodes)
        units = Units(cost=max(total / _WHOLE_COST_SCALE, cost_unit * 1e-12))
        program = linearize(assignment, goal=goal, units=units, whole=True, allowed=allowed)
        # Rounding down keeps the bound valid: every column is at least 0.
        program.model.columns[:] = [replace(c, cost=float(math.floor(c.cost))) for c in program.model.columns]
        return program
    largest_R = np.abs(assignment.constant_R)
    for node in assignment.nodes:
        largest_R = largest_R + np.abs(node.load_SR).max(axis=0)
    units = Units(
        cost=cost_unit,
        time_ns=max(1.0, float(largest_R[MEMORY + 1 :].sum())) / _ROW_SCALE,
        memory_kib=max(1.0, float(largest_R[MEMORY])) / _ROW_SCALE,
    )
    return linearize(assignment, goal=goal, units=units, allowed=allowed)


def _objective_unit(units: Units, goal: Goal) -> float:
    return {Goal.COST: units.cost, Goal.TIME: units.time_ns, Goal.MEMORY: units.memory_kib}[goal]


def _concerns(goal: Goal, limit: Limit) -> bool:
    """True if ``goal`` moves ``limit``."""
    return goal is not Goal.COST and (goal is Goal.MEMORY) == (MEMORY in limit.resources)


def _read(
    assignment: Assignment, program: AssignmentProgram, result: LinearResult, goal: Goal
) -> tuple[dict[str, str] | None, float | None, dict[str, int]]:
    """Labels, exact value, and by how much they exceed limits that the goal does not move."""
    if result.values is None:
        return None, None, {}
    labels = program.labels(result.values)
    states = assignment.states(labels)
    total_R = assignment.load_R(states)
    over = {limit: int(total_R[list(limit.resources)].sum()) - limit.bound for limit in assignment.limits}
    excess = {limit.name: value for limit, value in over.items() if value > 0 and not _concerns(goal, limit)}
    if goal is Goal.COST:
        return labels, assignment.cost(states), excess
    return labels, float(max(value for limit, value in over.items() if _concerns(goal, limit))), excess


@dataclass(frozen=True, slots=True, kw_only=True)
class Least:
    """A least value (ns or KiB): reached by ``choices``, and no plan is below ``bound``.

    ``value`` and ``choices`` are None where no plan was found.
    """

    value: int | None
    bound: int
    choices: dict[str, str] | None
    proved: bool


def least_time(problem: Problem, device: ProblemDevice, solver: LinearSolver, deadline: float) -> Least:
    """Least iteration time in ns that ``device`` alone allows within its memory, the latency limit set aside.

    Args:
        problem: The problem.
        device: One of its devices.
        solver: A solver.
        deadline: When to stop, on `time.monotonic`'s clock.

    Source: ours; the same program as for sensitivity, with T as the objective (see `ilp`).
    """
    assignment = build_assignment(problem, device, latency_limit_ns=0)
    return _least(problem, device, assignment, Goal.TIME, solver, deadline)


def least_memory(problem: Problem, device: ProblemDevice, solver: LinearSolver, deadline: float) -> Least:
    """Least memory in KiB of any plan, the latency limit set aside; see `least_time`."""
    assignment = build_assignment(problem, device)
    limits = tuple(replace(limit, bound=0) for limit in assignment.limits if limit.name == MEMORY_LIMIT)
    return _least(problem, device, replace(assignment, limits=limits), Goal.MEMORY, solver, deadline)


def _least(
    problem: Problem, device: ProblemDevice, assignment: Assignment, goal: Goal, solver: LinearSolver, deadline: float
) -> Least:
    remaining_s = deadline - time.monotonic()
    if remaining_s <= 0:
        return Least(value=None, bound=0, choices=None, proved=False)
    limit_s = None if math.isinf(remaining_s) else remaining_s
    found = run(assignment, solver, goal=goal, options=LinearOptions(time_limit_s=limit_s))
    bound = 0 if found.bound is None else max(0, math.ceil(found.bound - 1e-6 * abs(found.bound)))
    if found.labels is None or found.value is None:
        nowhere = found.status in (LinearStatus.INFEASIBLE, LinearStatus.INFEASIBLE_OR_UNBOUNDED)
        return Least(value=None, bound=bound, choices=None, proved=nowhere)
    value, proved = int(found.value), found.status is LinearStatus.OPTIMAL
    return Least(
        value=value,
        bound=value if proved else min(bound, value),
        choices=read_back(problem, device, dict(found.labels)),
        proved=proved,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Why there is no plan: ``proved`` if it is certain, ``reason`` in words."""

    proved: bool
    reason: str


def explain_infeasible(problem: Problem, solver: Any, deadline: float) -> Verdict | None:
    """Which limit stands in the way, on which device, and the least value of it that could be met.

    Args:
        problem: The problem.
        solver: A solver, its name, or None if none is installed.
        deadline: When to stop, on `time.monotonic`'s clock.

    Returns:
        The verdict, or None if each device has a plan that keeps its limits.

    Source: ours.
    """
    if solver is None:
        if peers_ns(problem) > problem.latency_limit_ns:
            return describe_infeasible(problem, {}, {})
        reason = (
            "no plan within the limits was found, which proves nothing; install a solver to settle it: "
            "pip install 'qsync-opt[solvers]'"
        )
        return Verdict(proved=False, reason=reason)
    engine = create(Kind.SOLVER, solver)
    memories = {device.name: least_memory(problem, device, engine, deadline) for device in problem.devices}
    times = {
        device.name: least_time(problem, device, engine, deadline)
        for device in problem.devices
        if memories[device.name].bound <= device.memory_limit_kib
    }
    return describe_infeasible(problem, memories, times)


def describe_infeasible(problem: Problem, memories: Mapping[str, Least], times: Mapping[str, Least]) -> Verdict | None:
    """Put least values into words.

    Args:
        problem: The problem.
        memories: Least memory in KiB, by device.
        times: Least iteration time in ns within memory, of the devices where memory alone can be kept.

    Returns:
        The verdict, or None if these values leave room for a plan.
    """
    limit_ns, floor_ns = problem.latency_limit_ns, peers_ns(problem)
    reasons = [
        f"the memory limit of device {device.name!r}, {device.memory_limit_kib} KiB, cannot be met by any plan; "
        f"the least value that could be met is {_least_text([memories[device.name]], 'KiB')}"
        for device in problem.devices
        if device.name in memories and memories[device.name].bound > device.memory_limit_kib
    ]
    blamed = [
        f"on device {device.name!r} within its memory limit of {device.memory_limit_kib} KiB"
        for device in problem.devices
        if device.name in times and times[device.name].bound > max(limit_ns, floor_ns)
    ]
    if floor_ns > limit_ns:
        blamed.append("by the devices of fixed precision, the all-reduces and the optimizer alone")
    if blamed:
        peers = Least(value=floor_ns, bound=floor_ns, choices=None, proved=True)
        reasons.append(
            f"the latency limit of {limit_ns} ns cannot be met {' nor '.join(blamed)}; "
            f"the least value that could be met is {_least_text([peers, *times.values()], 'ns')}"
        )
    if reasons:
        return Verdict(proved=True, reason="; ".join(reasons))
    open_devices = [name for name, least in times.items() if least.value is None or least.value > limit_ns]
    if open_devices:
        names = ", ".join(repr(name) for name in open_devices)
        reason = f"no plan within the limits of device {names} was found in the time allowed, which proves nothing"
        return Verdict(proved=False, reason=reason)
    return None


def _least_text(parts: list[Least], unit: str) -> str:
    """The largest of several least values: all must be met."""
    if all(least.proved and least.value is not None for least in parts):
        return f"{max(least.value or 0 for least in parts)} {unit}"
    return f"at least {max(least.bound for least in parts)} {unit} (not settled in the time allowed)"
