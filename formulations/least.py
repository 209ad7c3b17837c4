"""The least iteration time or memory that some plan of a device reaches, and from it why a problem is infeasible."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any

from qsync_opt.formulations.device_model import MEMORY, MEMORY_LIMIT, build_assignment, read_back
from qsync_opt.formulations.ilp import Goal
from qsync_opt.formulations.linear_solver import LinearOptions, LinearSolver, LinearStatus
from qsync_opt.formulations.run import run
from qsync_opt.formulations.segments import peers_ns
from qsync_opt.problem import Problem, ProblemDevice
from qsync_opt.registry import Kind, create


@dataclass(frozen=True, slots=True, kw_only=True)
class Least:
    """A least value (ns or KiB): reached by ``choices``, and no plan is below ``bound``.

    ``value`` and ``choices`` are None where no plan was found; ``impossible`` tells that none exists.
    """

    value: int | None
    bound: int
    choices: dict[str, str] | None
    proved: bool
    impossible: bool = False


def least_time(
    problem: Problem, device: ProblemDevice, solver: LinearSolver, deadline: float, *, within_memory: bool = True
) -> Least:
    """Least iteration time in ns that ``device`` alone allows, the problem's latency limit set aside.

    Args:
        problem: The problem.
        device: One of its devices.
        solver: A solver.
        deadline: When to stop, on `time.monotonic`'s clock.
        within_memory: Keep the memory limit.

    Source: ours; the same program as for sensitivity, with T as the objective (see `ilp`).
    """
    assignment = build_assignment(problem, device, latency_limit_ns=0)
    if not within_memory:
        limits = tuple(limit for limit in assignment.limits if limit.name != MEMORY_LIMIT)
        assignment = replace(assignment, limits=limits)
    return _least(problem, device, assignment, Goal.TIME, solver, deadline)


def least_memory(
    problem: Problem, device: ProblemDevice, solver: LinearSolver, deadline: float, *, within_time: bool = False
) -> Least:
    """Least memory in KiB, with or without the latency limit kept; see `least_time`."""
    assignment = build_assignment(problem, device)
    limits = tuple(
        replace(limit, bound=0) if limit.name == MEMORY_LIMIT else limit
        for limit in assignment.limits
        if within_time or MEMORY in limit.resources
    )
    return _least(problem, device, replace(assignment, limits=limits), Goal.MEMORY, solver, deadline)


def _least(
    problem: Problem, device: ProblemDevice, assignment: Any, goal: Goal, solver: LinearSolver, deadline: float
) -> Least:
    remaining_s = deadline - time.monotonic()
    if remaining_s <= 0:
        return Least(value=None, bound=0, choices=None, proved=False)
    limit_s = None if math.isinf(remaining_s) else remaining_s
    found = run(assignment, solver, goal=goal, options=LinearOptions(time_limit_s=limit_s))
    bound = 0 if found.bound is None else max(0, math.ceil(found.bound - 1e-6 * abs(found.bound)))
    if found.labels is None or found.value is None:
        nowhere = found.status in (LinearStatus.INFEASIBLE, LinearStatus.INFEASIBLE_OR_UNBOUNDED)
        return Least(value=None, bound=bound, choices=None, proved=nowhere, impossible=nowhere)
    value = int(found.value)
    return Least(
        value=value,
        bound=min(bound, value),
        choices=read_back(problem, device, dict(found.labels)),
        proved=found.status is LinearStatus.OPTIMAL,
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
    limit_ns = problem.latency_limit_ns
    least_ns = peers_ns(problem)
    if least_ns > limit_ns:
        reason = (
            f"the latency limit of {limit_ns} ns cannot be met by any plan: the devices of fixed precision, the "
            f"all-reduces and the optimizer alone take {least_ns} ns, the least value that could be met"
        )
        return Verdict(proved=True, reason=reason)
    if solver is None:
        reason = (
            "no plan within the limits was found, which proves nothing; install a solver to settle it: "
            "pip install 'qsync-opt[solvers]'"
        )
        return Verdict(proved=False, reason=reason)
    engine = create(Kind.SOLVER, solver)
    verdicts = [_explain_device(problem, device, engine, deadline) for device in problem.devices]
    found = [verdict for verdict in verdicts if verdict is not None]
    if not found:
        return None
    # One certain reason is enough, so the uncertain ones are left out where there is one.
    certain = [verdict for verdict in found if verdict.proved]
    return Verdict(proved=bool(certain), reason="; ".join(verdict.reason for verdict in certain or found))


def _explain_device(problem: Problem, device: ProblemDevice, solver: LinearSolver, deadline: float) -> Verdict | None:
    name, limit_ns, limit_kib = device.name, problem.latency_limit_ns, device.memory_limit_kib
    memory = least_memory(problem, device, solver, deadline)
    if memory.bound > limit_kib:
        reason = (
            f"the memory limit of device {name!r}, {limit_kib} KiB, cannot be met by any plan; "
            f"the least value that could be met is {_least_text(memory, 'KiB')}"
        )
        return Verdict(proved=True, reason=reason)
    fastest = least_time(problem, device, solver, deadline)
    if fastest.value is not None and fastest.value <= limit_ns:
        return None
    if fastest.bound <= limit_ns:
        reason = f"no plan within the limits of device {name!r} was found in the time allowed, which proves nothing"
        return Verdict(proved=False, reason=reason)
    reason = (
        f"the latency limit of {limit_ns} ns cannot be met on device {name!r} within its memory limit of {limit_kib} "
        f"KiB; the least value that could be met is {_least_text(fastest, 'ns')}"
    )
    alone = least_memory(problem, device, solver, deadline, within_time=True)
    if alone.value is not None:
        reason += f" (or keep it, and allow {_least_text(alone, 'KiB')} of memory)"
    return Verdict(proved=True, reason=reason)


def _least_text(least: Least, unit: str) -> str:
    if least.proved and least.value is not None:
        return f"{least.value} {unit}"
    best = f", the best found is {least.value} {unit}" if least.value is not None else ""
    return f"at least {least.bound} {unit} (not settled in the time allowed{best})"
