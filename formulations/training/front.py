"""Trade-off fronts of precision against time and memory, by one search under changing limits.

A change of the latency limit shifts the right-hand sides of all latency rows by the same amount, and of the memory
limit one row, so every point of a front reuses the arrays, the elimination order, the plans and the prices of the
last one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Protocol

import numpy as np

from qsync_opt.errors import ProblemError
from qsync_opt.formulations.assignment import PASSES, Effort, Outcome, Pass
from qsync_opt.formulations.training.certified import DeviceSearch
from qsync_opt.formulations.training.collapsed import collapse
from qsync_opt.formulations.training.exact import exact_effort
from qsync_opt.formulations.training.greedy import greedy_effort
from qsync_opt.formulations.training.latency import least_latency
from qsync_opt.formulations.training.tables import graph_tables, peers_ns
from qsync_opt.io import Json
from qsync_opt.registry import Kind, create, default_solver
from qsync_opt.training import NO_LIMIT_NS, Plan, Problem

_NO_LIMIT_KIB = 2**50
_COARSE = Effort(gap=1e-3, passes=PASSES[:2], max_nodes=1)
"""Effort for the fastest limit of a front."""
_POINT_PASSES = (Pass(30, 8),)
"""First passes for a point of a front with a gap; prices and plans come from its neighbour."""
_FURTHER_PASSES = (Pass(60, 64), Pass(150, 64))
_FURTHER_NODES = 4
"""Where these miss the gap: larger cores, and a few splits at joins, which the next points start from."""
_AGAIN_PASSES = (Pass(30, 8), Pass(100, walks=(100,)))
"""First passes of a further proof, instead of the quick searches: the last plan, repaired, is near already."""
_MARGINS = (1.2, 2.5)
"""Before these: searches near the bound, within these multiples of the last optimum's distance to its bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontPoint:
    """One plan of a front.

    ``objective`` is its sensitivity, ``bound`` a value that no plan within the point's limit is below,
    ``iteration_ns`` and ``memory_kib`` what the plan takes.
    """

    limit: int
    objective: float
    bound: float
    iteration_ns: int
    memory_kib: Mapping[str, int]
    plan: Annotated[Plan, Json(read=Plan.from_json, write=Plan.to_json)]


class PointStore(Protocol):
    """Keeps the points of a front, so that an interrupted front continues where it stopped.

    The key of a point are the latency limit and the memory limits of its search; None means that there is no plan.
    """

    def get(self, latency_limit_ns: int, memory_limits_kib: Mapping[str, int]) -> tuple[FrontPoint | None] | None:
        """The known answer in a tuple, or None if these limits are new."""
        ...

    def put(self, latency_limit_ns: int, memory_limits_kib: Mapping[str, int], point: FrontPoint | None) -> None:
        """Keep an answer."""
        ...


Progress = Callable[[int, int], None]
"""Called with the number of points so far and in all (0: not known)."""


class Sweep:
    """A problem under changing limits."""

    def __init__(
        self,
        problem: Problem,
        *,
        gap: float = 1e-2,
        tied: Sequence[Sequence[str]] = (),
        solver: Any = None,
        deadline: float = math.inf,
        store: PointStore | None = None,
        thorough: bool = False,
    ) -> None:
        """Build the model of every device type.

        Args:
            problem: The problem; its limits are where the sweep starts.
            gap: Relative gap at which the search for a point stops; its effort is small. 0 proves every point. Every
                point carries its own bound.
            tied: Groups of adjustable operators that must share one precision.
            solver: Name of a solver, or an instance, for what a proof leaves open; by default the first installed.
            deadline: ``time.monotonic()`` value at which every search stops.
            store: Where known points are looked up and new ones kept.
            thorough: Where a point's quick search misses the gap, search on as the default method does.
        """
        self.problem = problem
        self.floor_ns = peers_ns(problem)
        """Iteration time that communication, peers and the optimizer take alone."""
        self.none_proved = False
        """Whether it is proved that no plan keeps the limits (and the aim) of the last search."""
        self._store = store
        self._deadline = deadline
        self._further: list[Effort] = []
        if gap:
            self._again = self._effort = Effort(
                gap=gap, passes=_POINT_PASSES, blends=2, dual_share=0.2, dives=1, dive_passes=1, max_nodes=1
            )
            further = replace(
                self._effort, passes=_FURTHER_PASSES, join_passes=1, max_nodes=_FURTHER_NODES, joins_only=True
            )
            self._further = [further, greedy_effort(gap)] if thorough else [further]
        else:
            choice = solver or default_solver()
            self._effort = exact_effort(0.0, None if choice is None else create(Kind.SOLVER, choice))
            rest = (each for each in self._effort.passes if not each.width or each.nodes is None or each.whole_only)
            passes = (*_AGAIN_PASSES, *rest)
            self._again = replace(self._effort, passes=passes, join_passes=1, dive_passes=1, margins=_MARGINS)
        graph = graph_tables(problem)
        # At a latency limit of zero no row is dropped for being slack, so the rows serve every limit.
        self._searches = [
            DeviceSearch(collapse(problem, device, graph=graph, tied=tied, latency_limit_ns=0))
            for device in problem.devices
        ]

    def solve(
        self,
        latency_limit_ns: int | None = None,
        memory_limits_kib: Mapping[str, int] | None = None,
        *,
        start: Plan | None = None,
        aim: float | None = None,
    ) -> FrontPoint | None:
        """Find the best plan within limits; None if there is none, or none was found.

        Args:
            latency_limit_ns: Another latency limit than the problem's.
            memory_limits_kib: Other memory limits, by device type.
            start: A plan to start from, beside the last one; it need not be feasible.
            aim: A sensitivity: search only for whether a plan keeps it (used with one device type).
        """
        limit_ns = self.problem.latency_limit_ns if latency_limit_ns is None else latency_limit_ns
        self.none_proved = limit_ns < self.floor_ns
        if self.none_proved:
            return None
        if self._store is None:
            return self._solve(limit_ns, memory_limits_kib, start, aim)
        known = self._store.get(limit_ns, memory_limits_kib or {})
        if known is not None:
            return known[0]
        point = self._solve(limit_ns, memory_limits_kib, start, aim)
        if aim is None:  # with an aim the plan need not be the best
            self._store.put(limit_ns, memory_limits_kib or {}, point)
        return point

    def _solve(
        self, limit_ns: int, memory_limits_kib: Mapping[str, int] | None, start: Plan | None, aim: float | None
    ) -> FrontPoint | None:
        outcomes: list[Outcome] = []
        for search in self._searches:
            limits = search.collapsed.model.limits_R.copy()
            limits[:-1] += limit_ns
            limits[-1] += (memory_limits_kib or {}).get(search.name, search.collapsed.memory_limit_kib)
            limits[-1] -= search.collapsed.memory_limit_kib
            engine = search.engine.under(limits)
            labels_N = None if start is None else search.collapsed.labels(start.devices[search.name])
            effort = self._effort if search.engine.best is None else self._again
            # A problem that was split at joins under other limits starts from these splits.
            efforts = [effort, *self._further]
            if engine.is_split and self._further and aim is None:
                efforts = [self._further[0], *self._further]
            own_aim = None
            if aim is not None and len(self._searches) == 1:
                own_aim = aim - search.collapsed.constant_objective
                efforts = [replace(each, aim=own_aim) for each in efforts]
            outcome = engine.solve(efforts[0], start=labels_N, deadline=self._deadline)
            for further in efforts[1:]:
                if not outcome.proved_infeasible:
                    outcome = engine.solve(further, deadline=self._deadline).above(outcome.bound)
            outcomes.append(outcome)
            if outcome.labels_N is None:
                self.none_proved = outcome.proved_infeasible or (own_aim is not None and outcome.bound > own_aim)
                return None
            search.engine = engine
        return self._point(limit_ns, outcomes)

    def _point(self, limit_ns: int, outcomes: list[Outcome]) -> FrontPoint:
        iteration_ns, memory, devices = self.floor_ns, {}, {}
        objective, bound = [], []
        for search, outcome in zip(self._searches, outcomes, strict=True):
            assert outcome.labels_N is not None
            excess = search.engine.model.excess(outcome.labels_N)
            if len(excess) > 1:
                iteration_ns = max(iteration_ns, limit_ns + int(excess[:-1].max()))
            constant = search.collapsed.constant_objective
            memory[search.name] = search.collapsed.memory_kib(outcome.labels_N)
            devices[search.name] = search.collapsed.choices(outcome.labels_N)
            objective.append(outcome.objective + constant)
            bound.append(max(outcome.bound, 0.0) + constant)
        return FrontPoint(
            limit=limit_ns,
            objective=math.fsum(objective),
            bound=min(math.fsum(bound), math.fsum(objective)),
            iteration_ns=iteration_ns,
            memory_kib=memory,
            plan=Plan(problem=self.problem.name, devices=devices),
        )

    def slowest(self) -> FrontPoint | None:
        """The best plan within memory, however long it takes."""
        return self.solve(NO_LIMIT_NS)

    def fastest(self) -> tuple[int, Plan] | None:
        """About the least latency limit at which there is a plan, and that plan; None if memory forbids every plan."""
        reached, devices = float(self.floor_ns), {}
        for search in self._searches:
            relaxation = search.engine.relaxation
            _, high, labels_N = least_latency(search.collapsed, math.inf, _COARSE, relaxation=relaxation)
            if labels_N is None:
                return None
            reached, devices[search.name] = max(reached, high), search.collapsed.choices(labels_N)
        return int(reached), Plan(problem=self.problem.name, devices=devices)


def latency_front(
    problem: Problem,
    *,
    points: int | None = 50,
    gap: float = 1e-2,
    tied: Sequence[Sequence[str]] = (),
    store: PointStore | None = None,
    progress: Progress | None = None,
    thorough: bool = False,
) -> tuple[FrontPoint, ...]:
    """Sensitivity against iteration time within the memory limits.

    Args:
        problem: The problem; its latency limit is set aside.
        points: Latency limits to try, evenly spaced; None for every point of the front (with ``gap=0``, exactly).
        gap: Relative gap of every point.
        tied: Groups of adjustable operators that must share one precision.
        store: Keeps the points, see `PointStore`.
        progress: Called after every point.
        thorough: Search on where the quick search for a point misses ``gap``, see `Sweep`.

    Returns:
        Points that no other point beats in both, from the slowest to the fastest; empty if memory forbids every plan.

    Source: the epsilon-constraint method.
    """
    _check_points(points)
    sweep = Sweep(problem, gap=gap, tied=tied, store=store, thorough=thorough)
    report = progress or (lambda done, total: None)
    point = sweep.slowest()
    front: list[FrontPoint] = []
    if point is None:
        return ()
    if points is None:
        while point is not None:
            front.append(point)
            report(len(front), 0)
            point = sweep.solve(point.iteration_ns - 1)
        return _undominated(front)
    front.append(point)
    report(1, points)
    fastest = sweep.fastest()
    if fastest is not None and points > 1:
        fastest_ns = fastest[0]
        start: Plan | None = fastest[1]
        # From tight to loose every plan stays feasible, and what it rules out stays ruled out.
        limits = np.linspace(fastest_ns, point.iteration_ns, points)[:-1].astype(np.int64).tolist()
        for number, limit in enumerate(limits, start=2):
            point = sweep.solve(max(limit, fastest_ns), start=start)
            if point is not None:
                front.append(point)
                start = None  # the sweep keeps it
            report(number, points)
    return _undominated(front)


def _check_points(points: int | None) -> None:
    if points is not None and (not isinstance(points, int) or points < 1):
        raise ProblemError(f"points is {points!r}, but a front needs a whole number of at least 1")


def memory_front(
    problem: Problem,
    device: str,
    *,
    points: int = 50,
    gap: float = 1e-2,
    tied: Sequence[Sequence[str]] = (),
    store: PointStore | None = None,
    progress: Progress | None = None,
    thorough: bool = False,
) -> tuple[FrontPoint, ...]:
    """Sensitivity against the memory of one device type within the latency limit; see `latency_front`."""
    problem.device(device)
    _check_points(points)
    sweep = Sweep(problem, gap=gap, tied=tied, store=store, thorough=thorough)
    report = progress or (lambda done, total: None)
    point = sweep.solve(memory_limits_kib={device: _NO_LIMIT_KIB})
    front: list[FrontPoint] = []
    while point is not None and len(front) < points:
        front.append(point)
        report(len(front), points)
        # Equal steps down from what the first plan takes.
        step = max(1, front[0].memory_kib[device] // points)
        limit = min(point.memory_kib[device] - 1, front[0].memory_kib[device] - len(front) * step)
        point = sweep.solve(memory_limits_kib={device: limit})
    return _undominated(front, device)


def _undominated(points: list[FrontPoint], device: str | None = None) -> tuple[FrontPoint, ...]:
    """From the largest to the least use, without points that another one with no more use equals."""
    kept: list[FrontPoint] = []
    uses = [point.iteration_ns if device is None else point.memory_kib[device] for point in points]
    for _, _, point in sorted(zip(uses, (p.objective for p in points), points, strict=True), key=lambda row: row[:2]):
        if not kept or point.objective < kept[-1].objective:
            kept.append(point)
    return tuple(reversed(kept))
