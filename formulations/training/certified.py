"""Plan every device type by bound and fix, with a certificate; what `greedy` and `exact` share.

Device types share nothing but the latency limit, so each is searched by itself and objectives and bounds add up.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from qsync_opt.formulations.assignment import PROOF, BoundAndFix, Effort, Outcome
from qsync_opt.formulations.training.collapsed import Collapsed, collapse
from qsync_opt.formulations.training.infeasible import explain
from qsync_opt.formulations.training.tables import DeviceTables, GraphTables, device_tables, graph_tables
from qsync_opt.training import PROOF_GAP, Answer, Plan, Problem, ProblemDevice, TerminationStatus, relative_gap

_SMALL = 60
"""A problem of so few nodes is searched to the end, whatever gap is asked for: that takes no longer."""

_FULL_SIZE, _LARGEST = 1500, 5
"""A problem smaller than this gets a tree that is larger by as much, up to a factor: its nodes are bounded sooner."""


@dataclass(slots=True)
class DeviceSearch:
    """One device type under search; keeps its arrays and its elimination for further limits."""

    problem: Problem
    device: ProblemDevice
    graph: GraphTables
    tables: DeviceTables
    tied: Sequence[Sequence[str]] = ()
    latency_limit_ns: int | None = None  # another one than the problem's
    collapsed: Collapsed = field(init=False)
    engine: BoundAndFix = field(init=False)
    outcome: Outcome = field(init=False)

    def __post_init__(self) -> None:
        """Collapse the problem and plan the elimination."""
        self.collapsed = collapse(
            self.problem, self.device, graph=self.graph, tables=self.tables, tied=self.tied,
            latency_limit_ns=self.latency_limit_ns,
        )  # fmt: skip
        self.engine = BoundAndFix(self.collapsed.model)
        self.outcome = Outcome(None, math.inf, -math.inf, np.zeros(0))

    def advance(self, effort: Effort, aim: float, *, start: Plan | None = None, deadline: float = math.inf) -> bool:
        """Search with more effort than before; tells whether that settles this device type.

        Args:
            effort: How hard to search; see `BoundAndFix.solve`.
            aim: Relative gap that is asked for in the end.
            start: A plan to start from.
            deadline: ``time.monotonic()`` value at which to stop.
        """
        labels = None if start is None else self.collapsed.labels(start.devices[self.device.name])
        if self.collapsed.model.num_nodes <= _SMALL:
            effort = replace(effort, gap=0.0, tree_gap=0.0)
        if effort.tree_passes is not None:
            larger = min(_LARGEST, max(1, _FULL_SIZE // max(1, self.collapsed.model.num_nodes)))
            tree_passes = effort.tree_passes if larger > 1 else None
            effort = replace(effort, max_nodes=effort.max_nodes * larger, tree_passes=tree_passes)
        found = self.engine.solve(effort, start=labels, deadline=deadline)
        found.bound = max(found.bound, self.outcome.bound)
        self.outcome = found
        gap = relative_gap(found.objective, found.bound)
        reached = found.labels_N is not None and gap is not None and gap <= max(aim, 2 * PROOF)
        return reached or found.proved_infeasible


def plan_certified(
    problem: Problem,
    stages: Sequence[Effort],
    *,
    time_limit_s: float | None = None,
    start: Plan | None = None,
    tied: Sequence[Sequence[str]] = (),
) -> Answer:
    """Plan every device type.

    Args:
        problem: The problem.
        stages: How hard to search on each device type, ascending; the last one's gap is the aim.
        time_limit_s: Seconds for everything.
        start: A plan to start from.
        tied: Groups of adjustable operators that must share one precision.

    Returns:
        The answer, with a bound; on Ctrl-C the best known so far.

    Source: ours.
    """
    started = time.monotonic()
    deadline = math.inf if time_limit_s is None else started + time_limit_s
    graph = graph_tables(problem)
    searches: list[DeviceSearch] = []
    for device in problem.devices:
        searches.append(DeviceSearch(problem, device, graph, device_tables(problem, device), tied))
        if searches[-1].collapsed.rows.floor_ns > problem.latency_limit_ns:
            return _infeasible(problem, None, time.monotonic() - started, started, deadline)
    build_s = time.monotonic() - started
    # Every device type goes through a stage before any begins the next one. Where the last stage was cut short, it goes
    # on in the time that others left.
    waiting = searches
    for effort in [*stages, *[stages[-1]] * len(searches)]:
        unsettled = []
        for left, search in zip(range(len(waiting), 0, -1), waiting, strict=True):
            now = time.monotonic()
            interrupted = any(each.outcome.interrupted for each in searches)
            share = now if interrupted else now + max(0.0, deadline - now) / left
            if not search.advance(effort, stages[-1].gap, start=start, deadline=share):
                unsettled.append(search)
            elif search.outcome.proved_infeasible:
                return _infeasible(problem, search, build_s, started, deadline)
        waiting = unsettled
        if effort is stages[-1]:
            waiting = [search for search in unsettled if search.outcome.out_of_time]
        if time.monotonic() > deadline:
            for search in waiting:
                search.outcome.out_of_time = True
            break
        if any(search.outcome.interrupted for search in searches):
            break
    return _merge(searches, build_s, started)


def _infeasible(
    problem: Problem, search: DeviceSearch | None, build_s: float, started: float, deadline: float
) -> Answer:
    """No plan: a search proved it, or without one communication alone does."""
    reason = explain(problem, None if search is None else search.collapsed, deadline)
    return Answer(
        termination=TerminationStatus.INFEASIBLE,
        build_seconds=build_s,
        solve_seconds=time.monotonic() - started - build_s,
        reason=reason,
    )


def _merge(searches: list[DeviceSearch], build_s: float, started: float) -> Answer:
    outcomes = [search.outcome for search in searches]
    held = all(outcome.labels_N is not None for outcome in outcomes)
    constants = [search.collapsed.constant_objective for search in searches]
    # Sensitivities are never negative, so neither is a bound.
    bound = math.fsum(max(o.bound, 0.0) + c for o, c in zip(outcomes, constants, strict=True) if o.bound < math.inf)
    objective = math.fsum(o.objective + c for o, c in zip(outcomes, constants, strict=True)) if held else None
    if objective is not None and bound >= objective * (1 - 2 * PROOF):
        bound = objective  # the search ends within this share of the optimum: that is its proof
    devices: Mapping[str, Mapping[str, str]] | None = None
    if held:
        devices = {
            search.device.name: search.collapsed.choices(outcome.labels_N)
            for search, outcome in zip(searches, outcomes, strict=True)
            if outcome.labels_N is not None
        }
    gap = relative_gap(objective, bound)
    stopped = any(outcome.out_of_time for outcome in outcomes)
    if gap is not None and gap <= PROOF_GAP:
        termination = TerminationStatus.OPTIMAL
    elif stopped:
        termination = TerminationStatus.TIME_LIMIT
    else:
        termination = TerminationStatus.FEASIBLE if held else TerminationStatus.ERROR
    return Answer(
        termination=termination,
        devices=devices,
        objective=objective,
        bound=bound if objective is None else min(bound, objective),
        build_seconds=build_s,
        solve_seconds=time.monotonic() - started - build_s,
        reason=None if held else "no plan within the limits was found, which proves nothing; allow more time",
    )
