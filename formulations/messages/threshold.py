"""The method ``threshold``: a convex search over the times of rounds, with a bound, for millions of messages.

1. Each pair's frontier (`frontier`) is tabulated at some prices: least variance against time, convex.
2. A round's variance at its time is the sum of its pairs' frontiers there: convex too. Of all rounds' pieces the
   steepest are taken first, until the limit is met (those within an exchange's hidden time are free).
3. The slopes there are prices y of each pair's time. For any prices of which the sum in each round is at most its
   exchange's price pi, and pi at most the price mu of exposed time, a lower bound of every plan's variance is

       sum over pairs of min(variance + y x time) - sum over exchanges of pi x hidden - mu x limit,

   computed on all messages, not on the tables.
4. The tables are refined around these prices until the bound settles. Then times of rounds are shifted a little to
   where whole messages leave least unused, which raises the bound too (`whole`), and each pair fills its round's time.

What is left is less than one message's step per pair; small problems are then searched exactly (`exact`). Where pairs
share ports, or packing counts, `ports` plans.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from qsync_opt.formulations.messages.frontier import Floats, Frontier, Integers, Planned, Prices, frontiers
from qsync_opt.formulations.messages.ports import plan_by_ports, shares_rows
from qsync_opt.formulations.messages.whole import aligned, rounds
from qsync_opt.messages import Evaluation, Plan, Problem, evaluate
from qsync_opt.solving import PROOF_GAP, Answer, SolveOptions, TerminationStatus, relative_gap

SEARCHED, SEARCHED_SHARED = 400, 60
"""Messages up to which a gap that is left is closed by the exact search; the latter where pairs share something."""
SEARCH_S = 2.0
"""Most seconds of that search."""
_ALL = 512
"""Breakpoints of a pair up to which all are tabulated."""
_COARSE, _FINE = 192, 96
_PASSES = 6
_TARGET = 1e-7
"""Relative gap at which refinement ends under a variance limit."""
_SETTLED = 1e-8
"""Relative rise of the bound below which refinement ends."""
_CLOSE = 1e-5
"""Relative gap up to which the times of rounds are not tried unshifted too."""
_SHRINK = 1e-12
"""Relative room for rounding: under a limit, and below a price."""


@dataclass(slots=True)
class Relaxed:
    """What one pass found: the time of each round, and the prices."""

    round_ns: list[list[float]]
    prices: Prices


class ThresholdFormulation:
    """Thresholds per pair and a convex search over the times of rounds, with a bound.

    Source: ours; the problem is AdaQP's (MLSys 2023), whose integer program over groups it replaces.
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
        is_shared = shares_rows(problem)
        planned = (plan_by_ports if is_shared else plan_by_thresholds)(problem, tables)
        plan, bound = planned.plan, planned.bound
        objective = evaluate(problem, plan).objective
        gap = relative_gap(objective, bound)
        is_small = problem.num_messages <= (SEARCHED_SHARED if is_shared else SEARCHED)
        if gap is not None and gap > max(PROOF_GAP, options.gap) and is_small:
            from qsync_opt.formulations.messages.exact import search

            seconds = min(SEARCH_S, options.time_limit_s or math.inf)
            result = search(problem, planned, time.monotonic() + seconds)
            plan, objective, bound = result.plan, result.objective, max(bound, result.bound)
        bound = min(max(bound, 0.0), objective)
        proved = (relative_gap(objective, bound) or 0.0) <= PROOF_GAP
        return Answer(
            termination=TerminationStatus.OPTIMAL if proved else TerminationStatus.FEASIBLE,
            plan=plan,
            objective=objective,
            bound=bound,
            solve_seconds=time.monotonic() - started,
        )


def infeasible(problem: Problem, tables: list[list[list[Frontier]]]) -> str | None:
    """Why no plan keeps the limit, with the least value that could be met; None if there is one."""
    if problem.time_limit_ns is not None:
        exposed, total = 0.0, 0.0
        for exchange, groups in zip(problem.exchanges, tables, strict=True):
            narrowest = ([frontier.least_bits for frontier in group] for group in groups)
            least = sum(map(exchange.round_ns, exchange.rounds, narrowest))
            codec_ns = exchange.codec_ns([frontier.least_bits for group in groups for frontier in group])
            exposed += max(0.0, least - exchange.hidden_ns) + codec_ns
            total += least + codec_ns
        if exposed > problem.time_limit_ns + 1e-9 * total:
            return (
                f"no plan keeps the time limit of {problem.time_limit_ns} ns: with every message at its narrowest "
                f"width the exposed exchanges take {exposed:.9g} ns"
            )
    if problem.variance_limit is not None:
        factor = min(problem.menu.values())
        least = factor * sum(float(pair.beta.sum()) for exchange in problem.exchanges for pair in exchange.pairs)
        if least > problem.variance_limit * (1 + 1e-9):
            return (
                f"no plan keeps the variance limit of {problem.variance_limit:.9g}: with every message at its most "
                f"exact width the variance is {least:.9g}"
            )
    return None


def plan_by_thresholds(problem: Problem, tables: list[list[list[Frontier]]]) -> Planned:
    """A plan with its bound, for a feasible problem; the prices have the value of `dual_bound`."""
    pairs = [frontier for groups in tables for group in groups for frontier in group]
    grids = [_first_grid(frontier) for frontier in pairs]
    best: tuple[float, Plan] | None = None
    value, proved = -math.inf, Relaxed([], Prices(exposed=0.0, exchange=[], pair=[]))
    cap = problem.variance_limit

    def keep(round_ns: list[list[float]]) -> Evaluation:
        nonlocal best
        plan = _fill(problem, tables, round_ns)
        evaluation = evaluate(problem, plan)
        if evaluation.feasible and (best is None or evaluation.objective < best[0]):
            best = evaluation.objective, plan
        return evaluation

    for step in range(_PASSES):
        relaxed = _relax(problem, tables, [_points(*each) for each in zip(pairs, grids, strict=True)], cap)
        latest = dual_bound(problem, pairs, relaxed.prices)
        settled = step > 0 and latest - value <= _SETTLED * abs(value)
        if latest > value or step == 0:
            value, proved = latest, relaxed
        if cap is not None:  # rounding to whole messages may miss the limit, which is then aimed at lower
            evaluation = keep(relaxed.round_ns)
            if not evaluation.feasible:
                cap = max(0.0, cap - 1.5 * (evaluation.variance - (problem.variance_limit or 0.0)))
            gap = None if best is None else relative_gap(best[0], value)
            settled = gap is not None and gap <= _TARGET
        if settled:
            break
        spread = 1.1 if step == 0 else 1 + 0.1 / 30**step
        grids = [
            _refined(frontier, grid, price, spread)
            for frontier, grid, price in zip(pairs, grids, relaxed.prices.pair, strict=True)
        ]
    found = rounds(problem, tables, proved.round_ns, proved.prices)
    bound = dual_bound(problem, pairs, proved.prices, math.fsum(each.gain for each in found))
    if cap is None:
        keep(aligned(problem, found, proved.round_ns, proved.prices))
        if best is None or (relative_gap(best[0], bound) or 0.0) > _CLOSE:
            keep(proved.round_ns)
    if best is None:  # a variance limit that was missed each time
        keep([[math.inf] * len(groups) for groups in tables])
    assert best is not None, "with time for every message the most exact plan keeps a variance limit"
    return Planned(best[1], bound, proved.prices, value)


def _first_grid(frontier: Frontier) -> Floats:
    """Prices per bit, falling, from none of the steps to all."""
    beta, gain = frontier.sorted_beta, frontier.hull.gain
    if not gain.size or not beta.size:
        return np.array([math.inf])
    if beta.size * gain.size <= _ALL:
        # A price that equals a step's gain may round to either side of it; a hair below, the step is taken.
        every = np.unique((beta[:, None] * gain[None, :]).ravel() * (1 - _SHRINK))[::-1]
        return np.concatenate([[math.inf], every[every > 0], [0.0]])
    positive = beta[np.searchsorted(beta, 0.0, side="right") :]
    if not positive.size:
        return np.array([math.inf, 0.0])
    # Each step's prices at quantiles of beta: equally many messages between neighbours.
    at = np.linspace(0, positive.size - 1, max(16, _COARSE // gain.size)).astype(np.int64)
    prices = np.unique((positive[at][:, None] * gain[None, :]).ravel())[::-1]
    return np.concatenate([[math.inf], prices, [0.0]])


def _refined(frontier: Frontier, grid: Floats, price: float, spread: float) -> Floats:
    """A grid with more prices around one of the pair's time."""
    per_bit = price * frontier.bit_ns
    if not 0 < per_bit < math.inf or frontier.sorted_beta.size * frontier.hull.gain.size <= _ALL:
        return grid
    index = int(np.searchsorted(-grid, -per_bit))
    above, below = float(grid[max(index - 1, 0)]), float(grid[min(index, grid.size - 1)])
    high = min(above if math.isfinite(above) else per_bit * 2, per_bit * 2) * spread
    low = max(below, per_bit / 2) / spread
    if spread < 1.05:
        high, low = per_bit * spread, per_bit / spread
    near = np.geomspace(low, high, _FINE)
    kept = grid[np.linspace(0, grid.size - 1, min(grid.size, 2 * _COARSE)).astype(np.int64)]
    return np.unique(np.concatenate([near, kept, grid[max(index - 2, 0) : index + 2]]))[::-1]


def _points(frontier: Frontier, grid: Floats) -> tuple[Floats, Floats]:
    """Time and variance of a pair along a grid of prices; times rise strictly."""
    if not frontier.sorted_beta.size or not frontier.hull.gain.size:
        start = frontier.pair.time_ns(frontier.dim, frontier.least_bits)
        return np.array([start]), np.array([float(frontier.tail[0] * frontier.hull.factor[0])])
    first = frontier.first(grid)
    bits, variance = frontier.bits(first), frontier.variance(first)
    time_ns = np.asarray(frontier.pair.fixed_ns + frontier.bit_ns * bits, np.float64)
    if frontier.bit_ns == 0:
        return time_ns[-1:], variance[-1:]
    kept = np.concatenate([[True], np.diff(time_ns) > 0])
    return time_ns[kept], np.minimum.accumulate(variance[kept])


def _relax(
    problem: Problem, tables: list[list[list[Frontier]]], points: list[tuple[Floats, Floats]], cap: float | None
) -> Relaxed:
    """Solve the tabulated problem: the steepest pieces of all rounds first."""
    lengths, slopes, owner, exchange_of = [], [], [], []
    round_ns: list[list[float]] = []
    members: list[tuple[int, int, list[int]]] = []
    variance, position, exposed, bases = 0.0, 0, 0.0, []
    for e, groups in enumerate(tables):
        round_ns.append([])
        for r, group in enumerate(groups):
            own = list(range(position, position + len(group)))
            position += len(group)
            members.append((e, r, own))
            least = max((float(points[p][0][0]) for p in own), default=0.0)
            round_ns[e].append(least)
            if not own:
                continue
            times = np.unique(np.concatenate([points[p][0] for p in own]))
            times = np.concatenate([[least], times[times > least]])
            total = np.sum([np.interp(times, *points[p]) for p in own], axis=0)
            variance += float(total[0])
            lengths.append(np.diff(times))
            slopes.append(-np.diff(total) / np.diff(times))
            owner.append(np.full(times.size - 1, len(members) - 1))
            exchange_of.append(np.full(times.size - 1, e))
        bases.append(sum(round_ns[e]))
        exposed += max(0.0, bases[e] - problem.exchanges[e].hidden_ns)
    empty = [np.zeros(0)]
    length, slope = np.concatenate(lengths or empty), np.concatenate(slopes or empty)
    ring = np.concatenate(owner or [np.zeros(0, np.int64)])
    source = np.concatenate(exchange_of or [np.zeros(0, np.int64)])
    order = np.argsort(-slope, kind="stable")
    order = order[slope[order] > 0]
    length, slope, ring, source = length[order], slope[order], ring[order], source[order]
    spent = np.zeros(length.size)  # nanoseconds
    marginal = [0.0] * len(tables)  # slope of the first piece that no hidden time covers
    for e, exchange in enumerate(problem.exchanges):
        mine = np.flatnonzero(source == e)
        free = max(0.0, exchange.hidden_ns - bases[e]) * (1 - _SHRINK)
        ends = np.cumsum(length[mine])
        spent[mine] = np.clip(free - (ends - length[mine]), 0.0, length[mine])
        beyond = int(np.searchsorted(ends, free, side="right"))
        marginal[e] = float(slope[mine[beyond]]) if beyond < mine.size else 0.0
    rest = length - spent
    paid = np.cumsum(rest)
    if problem.time_limit_ns is not None:
        room = max(0.0, problem.time_limit_ns - exposed) * (1 - _SHRINK)
        spent += np.clip(room - (paid - rest), 0.0, rest)
        last = int(np.searchsorted(paid, room, side="right"))
        mu = float(slope[last]) if last < slope.size else 0.0
    elif problem.time_weight is not None:
        mu = problem.time_weight / problem.variance_weight if problem.variance_weight else math.inf
        spent = np.where(slope >= mu, length, spent)
    else:
        needed = variance - float(spent @ slope) - (cap or 0.0)
        worth = np.cumsum(rest * slope)
        fractions = np.clip((needed - (worth - rest * slope)) / np.maximum(rest * slope, 1e-300), 0.0, 1.0)
        spent += np.where(rest > 0, fractions, 0.0) * rest
        last = int(np.searchsorted(worth, needed, side="left"))
        mu = 0.0 if not slope.size else math.inf if needed <= 0 else float(slope[min(last, slope.size - 1)])
    for index, (e, r, _) in enumerate(members):
        round_ns[e][r] += float(spent[ring == index].sum())
    prices = _prices(problem, points, members, round_ns, mu, marginal, bases)
    return Relaxed(round_ns, prices)


def _prices(
    problem: Problem,
    points: list[tuple[Floats, Floats]],
    members: list[tuple[int, int, list[int]]],
    round_ns: list[list[float]],
    mu: float,
    marginal: list[float],
    bases: list[float],
) -> Prices:
    """Slopes of the pairs' frontiers at the times of their rounds, scaled to the price of their exchange."""
    exchange = []
    for e, each in enumerate(problem.exchanges):
        total = sum(round_ns[e])
        is_hidden = total <= each.hidden_ns * (1 + 1e-9) and each.hidden_ns > 0 and bases[e] <= each.hidden_ns
        exchange.append(min(mu, marginal[e]) if is_hidden else mu)
    pair = [0.0] * len(points)
    for e, r, own in members:
        target, at = exchange[e], round_ns[e][r]
        before, after, stuck = [], [], None
        for p in own:
            times, variance = points[p]
            low, high = at * (1 - 1e-9), at * (1 + 1e-9)
            left = int(np.searchsorted(times, low)) - 1
            right = int(np.searchsorted(times, high, side="right")) - 1
            if left < 0:
                stuck = p
            before.append(_slope(times, variance, max(left, 0)))
            after.append(_slope(times, variance, right) if right >= 0 else 0.0)
        high, low = sum(before), sum(after)
        share = min(max((target - low) / (high - low), 0.0), 1.0) if high > low and math.isfinite(target) else 1.0
        values = [a + share * (b - a) for a, b in zip(after, before, strict=True)]
        total = sum(values)
        if total > target:
            values = [value * (target / total) for value in values]
        elif stuck is not None and math.isfinite(target):
            values[own.index(stuck)] += target - total
        for p, value in zip(own, values, strict=True):
            pair[p] = value
    return Prices(exposed=mu, exchange=exchange, pair=pair)


def _slope(times: Floats, variance: Floats, index: int) -> float:
    if index + 1 >= times.size:
        return 0.0
    return max(0.0, float((variance[index] - variance[index + 1]) / (times[index + 1] - times[index])))


def dual_bound(problem: Problem, pairs: list[Frontier], prices: Prices, gain: float = 0.0) -> float:
    """The lower bound of the objective that prices prove, evaluated on every message; negative where they are bad.

    Reduced costs at the prices are measured from this value, so that it is not raised to 0 here. ``gain`` is what
    whole messages add to the variance and the price of time of all rounds (`whole`).
    """
    mu = prices.exposed
    if not math.isfinite(mu):
        return 0.0
    terms = [gain]
    for frontier, price in zip(pairs, prices.pair, strict=True):
        first = frontier.first(np.array([price * frontier.bit_ns]))[0]
        if price * frontier.bit_ns == 0:
            first[:] = 0
        time_ns = frontier.pair.time_ns(frontier.dim, int(frontier.bits(first)))
        terms += [float(frontier.variance(first)), price * time_ns]
    terms += [-pi * each.hidden_ns for pi, each in zip(prices.exchange, problem.exchanges, strict=True)]
    rounding = 1e-14 * sum(map(abs, terms))
    value = math.fsum(terms) - rounding
    if problem.time_limit_ns is not None:
        return value - mu * problem.time_limit_ns
    if problem.time_weight is not None:
        return problem.variance_weight * value
    return (value - (problem.variance_limit or 0.0)) / mu if mu > 0 else 0.0


def _fill(problem: Problem, tables: list[list[list[Frontier]]], round_ns: list[list[float]]) -> Plan:
    """Every pair fills its round's time."""
    bits = {}
    for exchange, groups, times in zip(problem.exchanges, tables, round_ns, strict=True):
        bits[exchange.name] = tuple(
            tuple(frontier.widths(_thresholds(frontier, at)) for frontier in group)
            for group, at in zip(groups, times, strict=True)
        )
    return Plan(bits=bits)


def _thresholds(frontier: Frontier, at: float) -> Integers:
    room = max(0.0, at - frontier.pair.fixed_ns)
    budget = room / frontier.bit_ns if frontier.bit_ns > 0 else math.inf
    if budget >= 2**62:
        return frontier.fill(2.0**62)
    return frontier.fill(max(math.floor(budget * (1 + 1e-13) + 1e-9), frontier.least_bits))
