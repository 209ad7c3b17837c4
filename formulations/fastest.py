"""The plan of least iteration time that keeps the memory limits, device type by device type."""

from __future__ import annotations

from dataclasses import dataclass, replace

from qsync_opt.formulations.collapse import collapse
from qsync_opt.formulations.exact import exact_effort
from qsync_opt.formulations.least_latency import least_latency
from qsync_opt.formulations.linear_solver import LinearSolver
from qsync_opt.formulations.segments import peers_ns
from qsync_opt.formulations.tables import device_tables, graph_tables
from qsync_opt.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Fastest:
    """A fast plan: ``bound_ns`` is a time no plan is below, ``proved`` that this plan reaches the least."""

    devices: dict[str, dict[str, str]]
    bound_ns: int
    proved: bool
    method: str


def fastest_plan(problem: Problem, solver: LinearSolver | None, deadline: float) -> Fastest | None:
    """Search by bound and fix, with time as the objective.

    Args:
        problem: The problem; its latency limit is set aside.
        solver: A solver for what the search leaves undecided, or None.
        deadline: When to stop, on `time.monotonic`'s clock.

    Returns:
        The plan, or None if no plan keeps the memory limits or none was found.

    Source: ours. Each device's least time is independent of the others, and the iteration time is their maximum.
    """
    graph = graph_tables(problem)
    effort = replace(exact_effort(0.0, solver), enough=0.0)
    reached_ns = bound_ns = peers_ns(problem)
    devices: dict[str, dict[str, str]] = {}
    for device in problem.devices:
        tables = device_tables(problem, device)
        collapsed = collapse(problem, device, graph=graph, tables=tables, latency_limit_ns=0)
        low, high, labels_N = least_latency(collapsed, deadline, effort)
        if labels_N is None:
            return None
        devices[device.name] = collapsed.choices(labels_N)
        reached_ns, bound_ns = max(reached_ns, int(high)), max(bound_ns, int(low))
    proved = bound_ns >= reached_ns
    label = "bound and fix" if solver is None else f"bound and fix with {solver.name} {solver.version}"
    return Fastest(
        devices=devices,
        bound_ns=min(bound_ns, reached_ns),
        proved=proved,
        method=label if proved else f"{label}, not proved fastest",
    )
