"""The methods ``dynamic`` and ``exact``: a dynamic program over the Pareto front of end time and variance.

Bucket by bucket it keeps the partial plans that no other one beats in both (their *labels*). Labels that the priced
bound shows to be no better than the plan at hand are dropped; so are, while a search is narrow, all but the most
promising, and the least bound among those is then the bound of the answer.

Source: ours; labels and dominance as in multi-criteria shortest paths.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from qsync_opt.formulations.gradients.prices import Prices, least_variance, priced, relative_variances
from qsync_opt.formulations.gradients.tables import Floats, Ints, Tables
from qsync_opt.gradients import Objective, Problem, evaluate
from qsync_opt.solving import Answer, SolveOptions, TerminationStatus, termination_of

_FIRST_WIDTH = 1 << 9
_GROWTH = 1 << 4
_MOST_LABELS = 1 << 17
"""Labels of one bucket beyond which the method ``dynamic`` ends with the bound that it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sweep:
    """Result of one pass over the buckets.

    ``picks_K`` is the best plan that it reached, if any. ``dropped`` is the least bound among labels that were dropped
    for width alone: infinite if the pass was exhaustive.
    """

    picks_K: list[int] | None
    dropped: float


class DynamicFormulation:
    """Least variance within a deadline, or the earliest end within a variance, with a proved bound."""

    most_labels: float = _MOST_LABELS

    def solve(self, problem: Problem, options: SolveOptions) -> Answer:
        """Choose a scheme for every bucket; see `Formulation.solve`."""
        started = time.monotonic()
        stop_at = math.inf if options.time_limit_s is None else started + options.time_limit_s
        tables = Tables.of(problem)
        if (reason := tables.infeasible()) is not None:
            return Answer(
                plan=None,
                termination=TerminationStatus.INFEASIBLE,
                reason=reason,
                solve_seconds=time.monotonic() - started,
            )
        search = self._variance if problem.objective is Objective.VARIANCE else self._latency
        picks_K, bound, late = search(tables, options.gap, stop_at)
        objective = evaluate(problem, tables.plan(picks_K)).objective
        termination = termination_of(objective, bound, out_of_time=late)
        return tables.answer(picks_K, termination, bound, solve_seconds=time.monotonic() - started)

    def _variance(self, tables: Tables, gap: float, stop_at: float) -> tuple[list[int], float, bool]:
        """A plan, a lower bound of its objective, and whether time ended the search."""
        deadline = tables.deadline_ns()
        if deadline is None:
            return tables.finest_K, _value(tables, tables.finest_K) + least_variance(tables), False
        prices = priced(tables, deadline)
        lowest = least_variance(tables)
        best_K, bound = prices.picks_K, prices.bound
        value = _value(tables, best_K)
        width: float = _FIRST_WIDTH
        while True:
            goal = value - gap * (lowest + value)
            if value == 0.0 or bound >= lowest + goal:
                return best_K, bound if value else lowest, False
            sweep = _sweep(tables, prices, goal, width, stop_at, earliest=False)
            if sweep is None:
                return best_K, bound, True
            if sweep.picks_K is not None:
                best_K, value = sweep.picks_K, _value(tables, sweep.picks_K)
            # What was not dropped for width was dropped for a bound of at least the goal, or reached the best plan.
            bound = max(bound, lowest + min(value, goal, sweep.dropped))
            if sweep.dropped == math.inf or width >= self.most_labels:
                return best_K, bound, False
            width = min(width * _GROWTH, self.most_labels)

    def _latency(self, tables: Tables, gap: float, stop_at: float) -> tuple[list[int], float, bool]:
        ceiling = tables.ceiling() - least_variance(tables)
        best_K = tables.finest_K
        early = max(tables.floor_ns, tables.end_ns(tables.fastest_K))
        late = max(tables.floor_ns, tables.end_ns(best_K))
        low, high = early, late  # the relaxation keeps the ceiling at high, and at nothing before low
        while low < high:
            middle = (low + high) // 2
            prices = priced(tables, middle)
            if _value(tables, prices.picks_K) <= ceiling:
                end = max(tables.floor_ns, tables.end_ns(prices.picks_K))
                if end < late:
                    best_K, late = prices.picks_K, end
            if prices.bound - least_variance(tables) <= ceiling:
                high = middle
            else:
                low = middle + 1
            if time.monotonic() > stop_at:
                return best_K, float(low + tables.tail_ns), True
        bound = float(low + tables.tail_ns)
        width: float = _FIRST_WIDTH
        while late > low and late + tables.tail_ns - bound > gap * (late + tables.tail_ns):
            sweep = _sweep(tables, priced(tables, late - 1), ceiling, width, stop_at, earliest=True)
            if sweep is None:
                return best_K, bound, True
            if sweep.picks_K is not None:
                best_K, late = sweep.picks_K, max(tables.floor_ns, tables.end_ns(sweep.picks_K))
            if sweep.dropped == math.inf:
                return best_K, float(late + tables.tail_ns), False
            if sweep.picks_K is None or width < self.most_labels:
                if width >= self.most_labels:
                    break
                width = min(width * _GROWTH, self.most_labels)
        return best_K, bound if late > low else float(late + tables.tail_ns), False


class ExactFormulation(DynamicFormulation):
    """The same, however many labels it takes."""

    most_labels = math.inf


def _value(tables: Tables, picks_K: list[int]) -> float:
    """Sum of a plan's variances beyond the least ones."""
    return math.fsum(
        float(variances_C[pick]) for variances_C, pick in zip(relative_variances(tables), picks_K, strict=True)
    )


def _sweep(
    tables: Tables, prices: Prices, goal: float, width: float, stop_at: float, *, earliest: bool
) -> _Sweep | None:
    """Extend labels over all buckets; None if the time was up.

    Args:
        tables: The problem.
        prices: Of the deadline that plans must keep.
        goal: Variance beyond the least that plans must stay below, or may reach where ``earliest``.
        width: Most labels that are kept after each bucket.
        stop_at: ``time.monotonic()`` value at which to give up.
        earliest: Whether the plan of the earliest end is wanted, not that of least variance.
    """
    ends_L: Ints = np.zeros(1, dtype=np.int64)
    variances_L: Floats = np.zeros(1)
    history: list[tuple[Ints, Ints]] = []
    dropped, last = math.inf, len(tables.times_KC) - 1
    latest_K = _latest(tables, prices.deadline)
    for k, (times_C, variances_C) in enumerate(zip(tables.times_KC, relative_variances(tables), strict=True)):
        if time.monotonic() > stop_at:
            return None
        next_ready = tables.ready_K[k + 1] if k < last else tables.floor_ns
        starts_L = np.maximum(ends_L, tables.ready_K[k])
        ends_N = np.maximum(starts_L[:, None] + times_C, next_ready).ravel()
        variances_N = (variances_L[:, None] + variances_C).ravel()
        bounds_N = prices.completed(k, ends_N, variances_N) if k < last else variances_N
        hopeful_N = (ends_N <= latest_K[k]) & ((bounds_N <= goal) if earliest else (bounds_N < goal))
        kept_N = np.flatnonzero(hopeful_N)
        kept_N = kept_N[_undominated(ends_N[kept_N], variances_N[kept_N])]
        if len(kept_N) > width and k < last:
            order = np.argsort(bounds_N[kept_N], kind="stable")
            dropped = min(dropped, float(bounds_N[kept_N[order[int(width)]]]))
            kept_N = kept_N[np.sort(order[: int(width)])]
        if not len(kept_N):
            return _Sweep(picks_K=None, dropped=dropped)
        parents, picks = np.divmod(kept_N, len(times_C))
        history.append((parents, picks))
        ends_L, variances_L = ends_N[kept_N], variances_N[kept_N]
    label = int(np.argmin(ends_L if earliest else variances_L))
    picks_K = []
    for parents, picks in reversed(history):
        picks_K.append(int(picks[label]))
        label = int(parents[label])
    return _Sweep(picks_K=picks_K[::-1], dropped=dropped)


def _latest(tables: Tables, deadline: int) -> list[int]:
    """When each bucket must have ended for the fastest rest to keep the deadline.

    Ends are raised to the readiness of the next bucket before they are compared.
    """
    latest, result = deadline, []
    for k in range(len(tables.times_KC) - 1, -1, -1):
        result.append(latest)
        latest -= int(tables.times_KC[k][0])
    return result[::-1]


def _undominated(ends_N: Ints, variances_N: Floats) -> Ints:
    """Positions of the labels that no other one equals or beats in both, by rising end."""
    order = np.lexsort((variances_N, ends_N))
    sorted_N = variances_N[order]
    kept = np.ones(len(order), dtype=bool)
    kept[1:] = sorted_N[1:] < np.minimum.accumulate(sorted_N)[:-1]
    result: Ints = order[kept]
    return result
