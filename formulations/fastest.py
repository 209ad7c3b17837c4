"""The plan of least iteration time that keeps the memory limits, device type by device type."""

from __future__ import annotations

from dataclasses import dataclass, replace

from qsync_opt.formulations.least import least_time
from qsync_opt.formulations.linear_solver import LinearSolver
from qsync_opt.formulations.paper_greedy import fast_start
from qsync_opt.formulations.segments import peers_ns
from qsync_opt.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Fastest:
    """A fast plan: ``bound_ns`` is a time no plan is below, ``proved`` that this plan reaches the least."""

    devices: dict[str, dict[str, str]]
    bound_ns: int
    proved: bool
    method: str


def fastest_plan(problem: Problem, solver: LinearSolver | None, deadline: float) -> Fastest | None:
    """Search by descent, then let a solver (if there is one) improve on it and prove it.

    Args:
        problem: The problem; its latency limit is set aside.
        solver: A solver, or None.
        deadline: When to stop, on `time.monotonic`'s clock.

    Returns:
        The plan, or None if no plan keeps the memory limits or none was found.

    Source: ours. Each device's least time is independent of the others, and the iteration time is their maximum.
    """
    floor_ns = peers_ns(problem)
    devices: dict[str, dict[str, str]] = {}
    reached_ns, bound_ns, proved = floor_ns, floor_ns, True
    patient = replace(problem, latency_limit_ns=2**62)  # the search is for speed, not for a limit
    for device in problem.devices:
        state = fast_start(patient, device, deadline)
        fits = state.memory_kib <= device.memory_limit_kib
        choices, time_ns = (state.choices(), state.iteration_ns) if fits else (None, 2**62)
        exact = None if solver is None else least_time(problem, device, solver, deadline)
        if exact is not None and exact.choices is not None and exact.value is not None and exact.value < time_ns:
            choices, time_ns = exact.choices, exact.value
        if choices is None:
            return None
        devices[device.name] = choices
        reached_ns = max(reached_ns, time_ns)
        if exact is not None:
            bound_ns = max(bound_ns, exact.bound)
        proved = proved and exact is not None and exact.proved
    proved = proved or bound_ns >= reached_ns
    label = "search" if solver is None else f"search and {solver.name} {solver.version}"
    return Fastest(
        devices=devices,
        bound_ns=reached_ns if proved else min(bound_ns, reached_ns),
        proved=proved,
        method=label if proved else f"{label}, not proved fastest",
    )
