"""The method ``exact``: every pair's whole trade-off by dynamic programming, combined round by round.

Where pairs share ports or packing, the choices of an exchange's pairs are combined one by one instead. A choice whose
reduced cost at the prices of a bound exceeds the distance from bound to the best plan at hand cannot be part of a
better plan. That leaves few choices, and of those only ones that no other beats in time and variance.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qsync_opt.errors import UnsupportedError
from qsync_opt.formulations.messages.frontier import Floats, Planned, frontiers
from qsync_opt.formulations.messages.ports import plan_by_ports, shares_rows
from qsync_opt.formulations.messages.threshold import infeasible, plan_by_thresholds
from qsync_opt.messages import Exchange, Pair, Plan, Problem, evaluate
from qsync_opt.solving import PROOF_GAP, Answer, SolveOptions, TerminationStatus, relative_gap

MOST_CELLS = 50_000_000
"""Cells of a pair's table (messages x totals of bits) beyond which the method is refused."""
_MOST_STATES = 2_000_000
_MOST_JOINED = 100_000
"""The same for pairs that share ports or packing: where that many are near, more seldom prove anything."""


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
        tables = frontiers(problem)
        reason = infeasible(problem, tables)
        if reason is not None:
            return Answer(
                termination=TerminationStatus.INFEASIBLE, reason=reason, solve_seconds=time.monotonic() - started
            )
        planned = (plan_by_ports if shares_rows(problem) else plan_by_thresholds)(problem, tables)
        plan, bound = planned.plan, planned.bound
        objective = evaluate(problem, plan).objective
        if (relative_gap(objective, bound) or 0.0) > options.gap:
            result = search(problem, planned, started + (options.time_limit_s or math.inf))
            plan, objective, bound = result.plan, result.objective, max(bound, result.bound)
        bound = min(max(bound, 0.0), objective)
        gap = relative_gap(objective, bound) or 0.0
        spent = time.monotonic() - started
        if gap <= PROOF_GAP:
            ended = TerminationStatus.OPTIMAL
        elif options.time_limit_s is not None and spent >= options.time_limit_s:
            ended = TerminationStatus.TIME_LIMIT
        else:
            ended = TerminationStatus.FEASIBLE
            if gap > options.gap:
                reason = (
                    "too many plans are as good as the bound; this is the default method's, and 'ilp' may prove more"
                )
        return Answer(
            termination=ended, plan=plan, objective=objective, bound=bound, solve_seconds=spent, reason=reason
        )


@dataclass(slots=True)
class _Trade:
    """One pair's best variance at each total of bits that is worth having, and how to get there."""

    bits: npt.NDArray[np.int64]
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
    if pair.ns_per_byte == pair.pack_ns_per_byte == pair.unpack_ns_per_byte == 0:
        totals, bits = totals[-1:], bits[-1:]
    time_ns = pair.fixed_ns + pair.ns_per_byte * (dim * bits / 8)
    return _Trade(bits, time_ns, best[totals], totals.tolist(), choices, order, widths, unit)


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
    stages = []
    position = 0
    for e, exchange in enumerate(problem.exchanges):
        trades = [[_trade(pair, exchange.dim, problem.menu) for pair in group] for group in exchange.rounds]
        size = len(exchange.pairs)
        if exchange.ports or exchange.codec():
            prices_P = prices.pair[position : position + size] if finite else [0.0] * size
            stage = _pair_by_pair(exchange, trades, prices_P, prices.exposed if finite else 0.0, slack, deadline)
        else:
            price = prices.exchange[e] if finite else 0.0
            stage = _round_by_round(exchange, trades, price, prices.exposed if finite else 0.0, slack, deadline)
        if stage is None:
            return unfinished
        stages.append(stage)
        position += size
    total = _nothing()
    history = []
    for states, _ in stages:
        if time.monotonic() > deadline:
            return unfinished
        new = _merge(total, states, slack)
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
    for exchange, new, (_, widths) in zip(problem.exchanges[::-1], history[::-1], stages[::-1], strict=True):
        bits[exchange.name] = widths(int(new.right[index]))
        index = int(new.left[index])
    better = Plan(bits={exchange.name: bits[exchange.name] for exchange in problem.exchanges})
    value = evaluate(problem, better).objective
    return Searched(better, value, value)


_Stage = tuple[_States, Callable[[int], tuple[tuple[npt.NDArray[np.uint8], ...], ...]]]
"""The states of an exchange, by exposed time, and the widths of each."""


def _round_by_round(
    exchange: Exchange, trades: list[list[_Trade]], price: float, mu: float, slack: float, deadline: float
) -> _Stage | None:
    """States of an exchange whose pairs share nothing; ``price`` is that of its time, ``mu`` of exposed time."""
    merged = _nothing()
    steps: list[_States] = []
    times: list[Floats] = []
    for group in trades:
        if time.monotonic() > deadline:
            return None
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
            return None
        times.append(at)
        steps.append(new)
        merged = new
    hidden = np.maximum(merged.time_ns - exchange.hidden_ns, 0.0)
    lost = merged.reduced + mu * hidden - price * (merged.time_ns - exchange.hidden_ns)
    exposed = _States(hidden, merged.variance, np.maximum(lost, 0.0), np.arange(hidden.size), merged.right)

    def widths(state: int) -> tuple[tuple[npt.NDArray[np.uint8], ...], ...]:
        rounds = []
        for group, at, step in zip(trades[::-1], times[::-1], steps[::-1], strict=True):
            limit = at[int(step.right[state])]
            state = int(step.left[state])
            rounds.append(tuple(t.widths(int(np.searchsorted(t.time_ns, limit, side="right")) - 1) for t in group))
        return tuple(rounds[::-1])

    return exposed, widths


def _pair_by_pair(
    exchange: Exchange, trades: list[list[_Trade]], prices_P: list[float], mu: float, slack: float, deadline: float
) -> _Stage | None:
    """States of any exchange; ``prices_P`` are those of the pairs' bits, ``mu`` that of exposed time."""
    flat = [trade for group in trades for trade in group]
    chosen = np.zeros((1, 0), np.int64)  # states by pairs: positions in the pairs' trades
    reduced = variance = np.zeros(1)
    for trade, price in zip(flat, prices_P, strict=True):
        if time.monotonic() > deadline:
            return None
        cost = trade.variance + price * trade.bits
        cost = cost - cost.min()
        near = np.flatnonzero(cost <= slack)
        if reduced.size * near.size > 10 * _MOST_JOINED:
            return None
        both = reduced[:, None] + cost[None, near]
        left, right = np.nonzero(both <= slack)
        if left.size > _MOST_JOINED:
            return None
        reduced, variance = both[left, right], variance[left] + trade.variance[near[right]]
        chosen = np.concatenate([chosen[left], near[right][:, None]], axis=1)
    bits_PS = [trade.bits[chosen[:, k]] for k, trade in enumerate(flat)]
    time_ns, first = np.zeros(reduced.size), 0
    for group in exchange.rounds:
        slowest = np.zeros(reduced.size)
        for positions in exchange.members(group):
            fixed = max(group[k].fixed_ns for k in positions)
            rest = sum(group[k].ns_per_byte * (exchange.dim * bits_PS[first + k] / 8) for k in positions)
            slowest = np.maximum(slowest, fixed + rest)
        time_ns += slowest
        first += len(group)
    codec_ns = np.zeros(reduced.size)
    for own in exchange.codec():
        codec_ns = np.maximum(codec_ns, sum(per_byte * (exchange.dim * bits_PS[k] / 8) for k, per_byte in own))
    exposed = np.maximum(time_ns - exchange.hidden_ns, 0.0) + codec_ns
    # The least cost is among these states if some plan is better than the one at hand.
    lost = variance + mu * exposed
    states = _States(
        exposed, variance, lost - lost.min(initial=math.inf), np.arange(exposed.size), np.arange(exposed.size)
    )

    def widths(state: int) -> tuple[tuple[npt.NDArray[np.uint8], ...], ...]:
        each = iter(zip(flat, chosen[state].tolist(), strict=True))
        return tuple(tuple(trade.widths(k) for trade, k in (next(each) for _ in group)) for group in trades)

    return states, widths


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
