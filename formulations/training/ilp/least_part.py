"""The least iteration time or memory that some plan of a device reaches, and from it why a problem is infeasible."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from qsync_opt.formulations.linear.solver import LinearOptions, LinearSolver, LinearStatus
from qsync_opt.formulations.training.ilp.assignment import Assignment
from qsync_opt.formulations.training.ilp.device_model import MEMORY_LIMIT, build_assignment, read_back
from qsync_opt.formulations.training.ilp.least import run
from qsync_opt.formulations.training.ilp.program import Goal
from qsync_opt.formulations.training.segments import peers_ns
from qsync_opt.registry import Kind, create
from qsync_opt.training.problem import Problem, ProblemDevice


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
