"""Plans by bound and fix with a bound; what `greedy` and `exact` share.

Device types share nothing but the latency limit, so each is searched alone, and objectives and bounds add up.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from qsync_opt.formulations.assignment import PROOF, BoundAndFix, Effort, Outcome
from qsync_opt.formulations.training.collapsed import Collapsed, collapse
from qsync_opt.formulations.training.infeasible import explain
from qsync_opt.formulations.training.latency import least_latency
from qsync_opt.formulations.training.tables import graph_tables, peers_ns
from qsync_opt.training import PROOF_GAP, Answer, Plan, Problem, SolveOptions, TerminationStatus, relative_gap

_SMALL = 60
"""A problem of at most so many nodes is searched to the end, whatever the gap: that takes no longer."""

_FULL_SIZE, _LARGEST = 1500, 5
"""A problem of fewer nodes than this gets a tree larger in proportion, up to a factor: its nodes are bounded sooner."""

_FASTEST_S = 60.0
"""Seconds to look for the fastest plan, where no other was found."""


@dataclass(slots=True)
class DeviceSearch:
    """Search of one device type; keeps its arrays and its elimination for other limits."""

    collapsed: Collapsed
    engine: BoundAndFix = field(init=False)
    outcome: Outcome = field(init=False)

    def __post_init__(self) -> None:
        """Plan the elimination."""
        self.engine = BoundAndFix(self.collapsed.model)
        self.outcome = Outcome(None, math.inf, -math.inf, np.zeros(0))

    @property
    def name(self) -> str:
        """Name of the device type."""
        return self.collapsed.device.name

    def start_from_fastest(self, effort: Effort, deadline: float) -> None:
        """Find the fastest plan within memory, and search again from it if it keeps the latency limit too.

        For limits so tight that no plan was found under both, such as the time of the fastest plan itself.
        """
        until = min(deadline, time.monotonic() + _FASTEST_S)
        low_ns, reached_ns, labels_N = least_latency(self.collapsed, until, Effort())
        if low_ns > self.collapsed.latency_limit_ns:
            self.outcome.proved_infeasible = True
        elif labels_N is not None and reached_ns <= self.collapsed.latency_limit_ns:
            devices = {self.name: self.collapsed.choices(labels_N)}
            start = Plan(problem=self.collapsed.problem.name, devices=devices)
            self.advance(effort, 0.0, start=start, deadline=deadline)

    def advance(self, effort: Effort, aim: float, *, start: Plan | None = None, deadline: float = math.inf) -> bool:
        """Search with more effort than before; returns whether that settles this device type.

        Args:
            effort: How hard to search; see `BoundAndFix.solve`.
            aim: Relative gap of the last stage.
            start: A plan to start from.
            deadline: ``time.monotonic()`` value at which to stop.
        """
        labels = None if start is None else self.collapsed.labels(start.devices[self.name])
        if self.collapsed.model.num_nodes <= _SMALL:
            effort = replace(effort, gap=0.0, tree_gap=0.0)
        if effort.tree_passes is not None:
            larger = min(_LARGEST, max(1, _FULL_SIZE // max(1, self.collapsed.model.num_nodes)))
            tree_passes = effort.tree_passes if larger > 1 else None
            effort = replace(effort, max_nodes=effort.max_nodes * larger, tree_passes=tree_passes)
        outcome = self.engine.solve(effort, start=labels, deadline=deadline)
        outcome.bound = max(outcome.bound, self.outcome.bound)
        self.outcome = outcome
        gap = relative_gap(outcome.objective, outcome.bound)
        reached = outcome.labels_N is not None and gap is not None and gap <= max(aim, 2 * PROOF)
        return reached or outcome.proved_infeasible


def plan_certified(problem: Problem, stages: Sequence[Effort], options: SolveOptions) -> Answer:
    """Plan every device type.

    Args:
        problem: The problem.
        stages: How hard to search on each device type, ascending; the last one's gap is the aim.
        options: Seconds for everything, a plan to start from, and groups of operators that must share one precision.

    Returns:
        The answer, with a bound; on Ctrl-C the best known so far.

    Source: ours.
    """
    started = time.monotonic()
    deadline = math.inf if options.time_limit_s is None else started + options.time_limit_s
    searches: list[DeviceSearch] = []
    reason = None
    if peers_ns(problem) > problem.latency_limit_ns:
        reason = explain(problem, None, deadline)
    else:
        graph = graph_tables(problem)
        searches = [DeviceSearch(collapse(problem, each, graph=graph, tied=options.tied)) for each in problem.devices]
    built = time.monotonic()
    without = _advance(searches, stages, options.start, deadline)
    if without is not None:
        reason = explain(problem, without.collapsed, deadline)
    answer = _merge(searches) if reason is None else Answer(termination=TerminationStatus.INFEASIBLE, reason=reason)
    solver = None if options.solver is None else stages[-1].solver
    return replace(
        answer,
        solver=None if solver is None else f"{solver.name} {solver.version}",
        build_seconds=built - started,
        solve_seconds=time.monotonic() - built,
    )


def _advance(
    searches: list[DeviceSearch], stages: Sequence[Effort], start: Plan | None, deadline: float
) -> DeviceSearch | None:
    """Search every device type as far as the stages and the time allow; returns one that is proved to have no plan.

    Every device type passes a stage before any begins the next one. Where the last stage was cut short, it continues
    in the time that others left.
    """
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
                return search
        waiting = unsettled
        if effort is stages[-1]:
            waiting = [search for search in unsettled if search.outcome.out_of_time]
        if time.monotonic() > deadline:
            for search in waiting:
                search.outcome.out_of_time = True
            break
        if any(search.outcome.interrupted for search in searches):
            break
    for search in searches:
        outcome = search.outcome
        if outcome.labels_N is None and not (outcome.interrupted or outcome.out_of_time):
            search.start_from_fastest(stages[-1], deadline)
            if search.outcome.proved_infeasible:
                return search
    return None


def _merge(searches: list[DeviceSearch]) -> Answer:
    outcomes = [search.outcome for search in searches]
    solved = all(outcome.labels_N is not None for outcome in outcomes)
    constants = [search.collapsed.constant_objective for search in searches]
    # Sensitivities are never negative, so neither is a bound.
    bound = math.fsum(max(o.bound, 0.0) + c for o, c in zip(outcomes, constants, strict=True) if o.bound < math.inf)
    objective = math.fsum(o.objective + c for o, c in zip(outcomes, constants, strict=True)) if solved else None
    if objective is not None and bound >= objective * (1 - 2 * PROOF):
        bound = objective  # the search ends within this share of the optimum: that is its proof
    plans = [(search, search.outcome.labels_N) for search in searches]
    devices = {search.name: search.collapsed.choices(labels_N) for search, labels_N in plans if labels_N is not None}
    gap = relative_gap(objective, bound)
    stopped = any(outcome.out_of_time for outcome in outcomes)
    if gap is not None and gap <= PROOF_GAP:
        termination = TerminationStatus.OPTIMAL
    elif stopped:
        termination = TerminationStatus.TIME_LIMIT
    else:
        termination = TerminationStatus.FEASIBLE if solved else TerminationStatus.ERROR
    return Answer(
        termination=termination,
        devices=devices if solved else None,
        objective=objective,
        bound=bound if objective is None else min(bound, objective),
        reason=None if solved else "no plan within the limits was found, which proves nothing; allow more time",
    )
