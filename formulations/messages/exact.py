"""The method ``exact``: every pair's whole trade-off by dynamic programming, combined round by round.

A choice whose reduced cost at the prices of a bound exceeds the distance from bound to the best plan at hand cannot be
part of a better plan. That leaves few choices, and of those only ones that no other beats in time and variance.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qsync_opt.errors import UnsupportedError
from qsync_opt.formulations.messages.frontier import Floats, Planned, frontiers
from qsync_opt.formulations.messages.threshold import infeasible, plan_by_thresholds
from qsync_opt.messages import Pair, Plan, Problem, evaluate
from qsync_opt.solving import PROOF_GAP, Answer, SolveOptions, TerminationStatus, relative_gap

MOST_CELLS = 50_000_000
"""Cells of a pair's table (messages x totals of bits) beyond which the method is refused."""
_MOST_STATES = 2_000_000


@dataclass(frozen=True, slots=True)
class Searched:
    """A plan, its objective, and a bound that equals it if the search was complete."""

    plan: Plan
    objective: float
    bound: float


class ExactFormulation:
    """Dynamic programming over pairs and rounds, within a bound.

    Source: ours.
    """

    def solve(self, problem: Problem, options: SolveOptions) -> Answer:
        """Plan every message."""
        started = time.monotonic()
        if any(exchange.ports for exchange in problem.exchanges):
            raise UnsupportedError(
                "method 'exact' combines pairs that do not share ports; use 'threshold', which has a bound, or 'ilp'"
            )
        tables = frontiers(problem)
        reason = infeasible(problem, tables)
        if reason is not None:
            return Answer(
                termination=TerminationStatus.INFEASIBLE, reason=reason, solve_seconds=time.monotonic() - started
            )
        planned = plan_by_thresholds(problem, tables)
        plan, bound = planned.plan, planned.bound
        objective = evaluate(problem, plan).objective
        if (relative_gap(objective, bound) or 0.0) > options.gap:
            result = search(problem, planned, started + (options.time_limit_s or math.inf))
            plan, objective, bound = result.plan, result.objective, max(bound, result.bound)
        bound = min(max(bound, 0.0), objective)
        gap = relative_gap(objective, bound) or 0.0
        ended = TerminationStatus.OPTIMAL if gap <= PROOF_GAP else TerminationStatus.TIME_LIMIT
        if gap > PROOF_GAP and gap <= options.gap:
            ended = TerminationStatus.FEASIBLE
        return Answer(
            termination=ended, plan=plan, objective=objective, bound=bound, solve_seconds=time.monotonic() - started
        )


@dataclass(slots=True)
class _Trade:
    """One pair's best variance at each total of bits that is worth having, and how to get there."""

    time_ns: Floats
    variance: Floats
    totals: list[int]
    choices: list[npt.NDArray[np.uint8]]
    order: npt.NDArray[np.int64]
    menu: list[int]
    unit: int

    def widths(self, index: int) -> npt.NDArray[np.uint8]:
        """Width of each message at one of the totals."""
        result = np.zeros(self.order.size, np.uint8)
        cell = self.totals[index]
        for message in range(self.order.size - 1, -1, -1):
            width = self.menu[self.choices[message][cell]]
            result[self.order[message]] = width
            cell -= (width - self.menu[0]) // self.unit
        return result


def _trade(pair: Pair, dim: int, menu: dict[int, float]) -> _Trade:
    widths: list[int] = []
    for width in menu:
        if not widths or menu[width] < menu[widths[-1]]:
            widths.append(width)
    unit = math.gcd(*(width - widths[0] for width in widths)) or 1
    steps = [(width - widths[0]) // unit for width in widths]
    cells = pair.beta.size * steps[-1] + 1
    if cells * max(pair.beta.size, 1) > MOST_CELLS:
        raise UnsupportedError(
            f"{pair.label} has {pair.beta.size} messages, too many for the method 'exact'; use 'threshold', whose gap "
            "is less than one message's step per pair"
        )
    best = np.full(cells, math.inf)
    best[0] = 0.0
    choices = []
    order = np.argsort(-pair.beta, kind="stable")
    for beta in pair.beta[order]:
        new, choice = np.full(cells, math.inf), np.zeros(cells, np.uint8)
        for k, (width, step) in enumerate(zip(widths, steps, strict=True)):
            candidate = best[: cells - step] + beta * menu[width]
            better = candidate < new[step:]
            new[step:][better] = candidate[better]
            choice[step:][better] = k
        best = new
        choices.append(choice)
    lower = np.minimum.accumulate(np.concatenate([[math.inf], best[:-1]]))
    totals = np.flatnonzero(best < lower)
    bits = widths[0] * pair.beta.size + unit * totals
    time_ns = pair.fixed_ns + pair.ns_per_byte * (dim * bits / 8)
    if pair.ns_per_byte == 0:
        totals, time_ns = totals[-1:], time_ns[-1:]
    return _Trade(time_ns, best[totals], totals.tolist(), choices, order, widths, unit)


@dataclass(slots=True)
class _States:
    """Combinations of choices: their time, variance and reduced cost, and the two that each came from."""

    time_ns: Floats
    variance: Floats
    reduced: Floats
    left: npt.NDArray[np.int64]
    right: npt.NDArray[np.int64]


def _nothing() -> _States:
    zero, first = np.zeros(1), np.zeros(1, np.int64)
    return _States(zero, zero, zero, first, first)


def search(problem: Problem, planned: Planned, deadline: float) -> Searched:
    """Improve a plan to the optimum, or until the deadline (a time of `time.monotonic`).

    What a choice costs beyond the value of the plan's prices (`dual_bound`) is its reduced cost.
    """
    plan, prices, bound = planned.plan, planned.prices, planned.value
    objective = evaluate(problem, plan).objective
    unfinished = Searched(plan, objective, bound)
    finite = math.isfinite(prices.exposed)
    slack = math.inf
    if finite:
        # In units of variance: what any plan that is better than `plan` may lose.
        scale = problem.variance_weight if problem.time_weight is not None else 1.0
        scale = scale if problem.variance_limit is None else (1 / prices.exposed if prices.exposed > 0 else 0.0)
        slack = (objective - bound) / scale * (1 + 1e-9) + 1e-12 * abs(objective / scale) if scale > 0 else math.inf
    menu = problem.menu
    stages: list[tuple[_States, list[list[_Trade]], list[Floats], list[_States]]] = []
    for e, exchange in enumerate(problem.exchanges):
        price = prices.exchange[e] if finite else 0.0
        trades = [[_trade(pair, exchange.dim, menu) for pair in group] for group in exchange.rounds]
        merged = _nothing()
        steps, times = [], []
        for group in trades:
            if time.monotonic() > deadline:
                return unfinished
            least = max((float(trade.time_ns[0]) for trade in group), default=0.0)
            at = np.unique(np.concatenate([[least], *(trade.time_ns for trade in group)]))
            at = at[at >= least]
            variance = np.zeros(at.size)
            for trade in group:
                variance += trade.variance[np.searchsorted(trade.time_ns, at, side="right") - 1]
            kept = np.concatenate([[True], np.diff(variance) < 0])
            at, variance = at[kept], variance[kept]
            cost = variance + price * at
            cost = cost - cost.min()
            new = _merge(merged, _States(at, variance, cost, *(np.zeros(at.size, np.int64),) * 2), slack)
            if new is None:
                return unfinished
            times.append(at)
            steps.append(new)
            merged = new
        hidden = np.maximum(merged.time_ns - exchange.hidden_ns, 0.0)
        lost = merged.reduced.copy()
        if finite:
            lost += prices.exposed * hidden - price * (merged.time_ns - exchange.hidden_ns)
        exposed = _States(hidden, merged.variance, np.maximum(lost, 0.0), np.arange(hidden.size), merged.right)
        stages.append((exposed, trades, times, steps))
    total = _nothing()
    history = []
    for exposed, *_ in stages:
        if time.monotonic() > deadline:
            return unfinished
        new = _merge(total, exposed, slack)
        if new is None:
            return unfinished
        history.append(new)
        total = new
    goals = np.array([problem.goal(v, t) for v, t in zip(total.variance, total.time_ns, strict=True)])
    if problem.time_limit_ns is not None:
        goals[total.time_ns > problem.time_limit_ns * (1 + 1e-12)] = math.inf
    if problem.variance_limit is not None:
        goals[total.variance > problem.variance_limit * (1 + 1e-12)] = math.inf
    if not goals.size or not goals.min() < objective:
        return Searched(plan, objective, objective)
    index = int(np.argmin(goals))
    bits = {}
    for e in range(len(stages) - 1, -1, -1):
        exposed, trades, times, steps = stages[e]
        state = int(history[e].right[index])
        index = int(history[e].left[index])
        rounds = []
        for group, at, step in zip(trades[::-1], times[::-1], steps[::-1], strict=True):
            limit = at[int(step.right[state])]
            state = int(step.left[state])
            rounds.append(
                tuple(each.widths(int(np.searchsorted(each.time_ns, limit, side="right")) - 1) for each in group)
            )
        bits[problem.exchanges[e].name] = tuple(rounds[::-1])
    better = Plan(bits={exchange.name: bits[exchange.name] for exchange in problem.exchanges})
    value = evaluate(problem, better).objective
    return Searched(better, value, value)


def _merge(first: _States, second: _States, slack: float) -> _States | None:
    """All sums of two, without those that cannot be part of a better plan; None if there are too many."""
    near = np.flatnonzero(second.reduced <= slack)
    if first.time_ns.size * near.size > 10 * _MOST_STATES:
        return None
    reduced = first.reduced[:, None] + second.reduced[None, near]
    left, right = np.nonzero(reduced <= slack)
    if left.size > _MOST_STATES:
        return None
    time_ns = first.time_ns[left] + second.time_ns[near[right]]
    variance = first.variance[left] + second.variance[near[right]]
    order = np.lexsort((variance, time_ns))
    lower = np.minimum.accumulate(np.concatenate([[math.inf], variance[order][:-1]]))
    kept = order[variance[order] < lower]
    return _States(time_ns[kept], variance[kept], reduced[left[kept], right[kept]], left[kept], near[right[kept]])
