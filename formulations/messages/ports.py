"""Exchanges whose pairs share ports or packing: prices of both by multiplicative steps, with a bound.

A *row* is what decides a round's time: a port with its pairs, or a pair alone. What an exchange packs and unpacks is a
round too, of an exchange of its own that nothing hides, and its rows are workers. At prices u of rows the price q of a
bit of a pair is the sum over its rows of u x time per bit, and for any u >= 0 that sum to pi in each round, with pi at
most mu,

    sum over pairs of min(variance + q x bits) + sum of u x fixed - sum of pi x hidden - mu x limit

is a lower bound. A row that takes longer than the mean of its round gets a larger share of pi, and mu is chosen so that
the rounds' mean times meet the limit: at the optimum all rows that have a price take equally long. The search works on
tables of bits against prices; the bound is computed on all messages.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qsync_opt.formulations.messages.frontier import Floats, Frontier, Planned, Prices
from qsync_opt.messages import Plan, Problem, evaluate

_GRID = 2048
"""Prices per bit at which pairs are tabulated."""
_STEPS = 150
_EVERY = 10
"""Steps between bounds."""
_STILL, _SETTLED = 1e-9, 1e-8
"""Excess of rows, and relative rise of the bound, below which the search ends."""
_FEW = 100_000
"""Messages up to which steps are not extrapolated: bits answer to prices in jumps."""
_MANY = 1_000_000
"""Messages up to which a plan is made with every bound and the best is kept; beyond, with the best bound."""
_MEMORY = 8
"""Steps from which the next is extrapolated."""
_BISECTIONS = 48
_FIRST_RATE = 3.0
"""First exponent of the multiplicative steps: about the inverse of how bits answer to prices."""
_NEVER = 1e-300
_FIRST_PASSES = 4
"""Repetitions of the first step, which does not know the price of packing."""
_FILLS = 4
"""Sweeps that give pairs what their ports have left."""

Indices = npt.NDArray[np.int64]


@dataclass(slots=True)
class _Rows:
    """Rows and pairs of all rounds.

    Axes: R rows, P pairs, L links of a row and a pair, E exchanges and their packing.
    """

    row_L: Indices
    pair_L: Indices
    bit_ns_L: Floats
    round_R: Indices
    fixed_R: Floats
    exchange_of_round: Indices
    hidden_E: Floats
    least_P: Floats

    @classmethod
    def of(cls, problem: Problem, pairs: list[Frontier]) -> _Rows:
        links: list[tuple[int, int, float]] = []
        rounds: list[int] = []
        fixed: list[int] = []
        exchanges: list[int] = []
        hidden = [float(exchange.hidden_ns) for exchange in problem.exchanges]
        first = 0
        for e, exchange in enumerate(problem.exchanges):
            start = first
            for group in exchange.rounds:
                for positions in exchange.members(group):
                    links += [(len(fixed), first + k, group[k].ns_per_byte * exchange.dim / 8) for k in positions]
                    rounds.append(len(exchanges))
                    fixed.append(max(group[position].fixed_ns for position in positions))
                exchanges.append(e)
                first += len(group)
            workers = exchange.codec()
            for own in workers:
                links += [(len(fixed), start + k, per_byte * exchange.dim / 8) for k, per_byte in own]
                rounds.append(len(exchanges))
                fixed.append(0)
            if workers:
                exchanges.append(len(hidden))
                hidden.append(0.0)
        return cls(
            row_L=np.array([row for row, _, _ in links], np.int64),
            pair_L=np.array([pair for _, pair, _ in links], np.int64),
            bit_ns_L=np.array([bit_ns for _, _, bit_ns in links]),
            round_R=np.array(rounds, np.int64),
            fixed_R=np.array(fixed, np.float64),
            exchange_of_round=np.array(exchanges, np.int64),
            hidden_E=np.array(hidden),
            least_P=np.array([frontier.least_bits for frontier in pairs], np.float64),
        )

    def bit_prices(self, u_R: Floats) -> Floats:
        """Price of each pair's bits."""
        return _sums(self.pair_L, u_R[self.row_L] * self.bit_ns_L, self.least_P.size)

    def times(self, bits_P: Floats) -> Floats:
        """Time of each row."""
        return self.fixed_R + _sums(self.row_L, self.bit_ns_L * bits_P[self.pair_L], self.fixed_R.size)

    def bits_within(self, left_R: Floats) -> Floats:
        """Bits of each pair alone that fit what its rows have left; infinite where they take no time."""
        fitting = np.full(self.least_P.size, math.inf)
        is_paid = self.bit_ns_L > 0
        paid = self.bit_ns_L[is_paid]
        np.minimum.at(fitting, self.pair_L[is_paid], left_R[self.row_L[is_paid]] / paid)
        return fitting

    def sum_by_round(self, values_R: Floats) -> Floats:
        """Sum over the rows of each round."""
        return _sums(self.round_R, values_R, self.exchange_of_round.size)

    def slowest(self, times_R: Floats) -> Floats:
        """Time of each round."""
        result = np.zeros(self.exchange_of_round.size)
        np.maximum.at(result, self.round_R, times_R)
        return result


def _sums(index: Indices, values: Floats, count: int) -> Floats:
    """Sums of the values that have each index below ``count``."""
    return np.asarray(np.bincount(index, values, count), np.float64)


class _Tables:
    """Bits and variance of every pair against the logarithm of its price per bit."""

    def __init__(self, pairs: list[Frontier]) -> None:
        gains = [
            (float(beta[0] * f.hull.gain[-1]), f.top_price)
            for f in pairs
            if f.hull.gain.size and (beta := f.sorted_beta[f.sorted_beta > 0]).size
        ]
        low, high = (min(g[0] for g in gains), max(g[1] for g in gains)) if gains else (1.0, 2.0)
        self.low, self.step = math.log(low) - 0.1, (math.log(high / low) + 0.2) / (_GRID - 1)
        firsts = [f.first(np.exp(self.low + self.step * np.arange(_GRID))) for f in pairs]
        self._bits_PG = np.stack([f.bits(first) for f, first in zip(pairs, firsts, strict=True)]).astype(np.float64)
        self._variance_PG = np.stack([f.variance(first) for f, first in zip(pairs, firsts, strict=True)])
        self._all = np.arange(len(pairs))

    def bits(self, price_P: Floats) -> Floats:
        """Bits at prices per bit, between the table's by interpolation."""
        return self._at(self._bits_PG, price_P)

    def variance(self, price_P: Floats) -> float:
        """Variance of all pairs at prices per bit."""
        return float(self._at(self._variance_PG, price_P).sum())

    def _at(self, table_PG: Floats, price_P: Floats) -> Floats:
        at = (np.log(np.maximum(price_P, _NEVER)) - self.low) / self.step
        at = np.clip(at, 0.0, _GRID - 1.0)
        index = np.minimum(at.astype(np.int64), _GRID - 2)
        left, right = table_PG[self._all, index], table_PG[self._all, index + 1]
        interpolated: Floats = left + (at - index) * (right - left)
        return interpolated


def shares_rows(problem: Problem) -> bool:
    """Whether pairs share ports, or packing counts."""
    return any(exchange.ports or exchange.codec() for exchange in problem.exchanges)


def plan_by_ports(problem: Problem, tables: list[list[list[Frontier]]]) -> Planned:
    """A plan with its bound, for a feasible problem."""
    pairs = [frontier for groups in tables for group in groups for frontier in group]
    nothing = Prices(exposed=0.0, exchange=[0.0] * len(tables), pair=[0.0] * len(pairs))
    if not pairs:
        plan = _plan(problem, tables, np.zeros(0))
        objective = evaluate(problem, plan).objective
        return Planned(plan, objective, nothing, objective)
    rows, table = _Rows.of(problem, pairs), _Tables(pairs)
    share_R = 1.0 / np.bincount(rows.round_R, minlength=rows.exchange_of_round.size)[rows.round_R]
    best: tuple[float, Plan] | None = None
    bound, proof, previous = -math.inf, nothing, -math.inf
    is_large = problem.num_messages > _FEW
    search = _Search(extrapolates=is_large)
    proved, mu = (np.zeros(0), np.zeros(0), np.zeros(0)), 0.0

    def make_plans(bits_P: Floats, price_P: Floats, time_of_round: Floats) -> None:
        nonlocal best
        for target in _targets(problem, rows, time_of_round):
            plan = _plan(problem, tables, _filled(rows, pairs, bits_P, price_P, target))
            evaluation = evaluate(problem, plan)
            if evaluation.feasible and (best is None or evaluation.objective < best[0]):
                best = evaluation.objective, plan
            if evaluation.feasible:
                break  # the other targets take longer

    for step in range(_STEPS):
        for _ in range(1 if step else _FIRST_PASSES):
            mu, pi = _outer(problem, rows, table, share_R, mu)
        u_R = share_R * pi[rows.exchange_of_round][rows.round_R]
        price_P = rows.bit_prices(u_R)
        bits_P = table.bits(price_P)
        times_R = rows.times(bits_P)
        time_of_round = rows.sum_by_round(share_R * times_R)  # as its rows that have a price take
        mean = time_of_round[rows.round_R]
        excess = (times_R - mean) / np.maximum(mean, _NEVER)
        is_still = float(np.abs(share_R * excess).max()) < _STILL
        if step % _EVERY == _EVERY - 1 or step == 0 or is_still:
            value = _bound(problem, pairs, rows, u_R, mu, pi)
            if value > bound:
                bound, proof = value, Prices(exposed=mu, exchange=pi.tolist(), pair=price_P.tolist())
                proved = bits_P, price_P, time_of_round
            elif step:
                search.slow_down()
            is_settled = is_still or abs(value - previous) <= _SETTLED * abs(value) >= bound - value
            previous = value
            if problem.num_messages <= _MANY:
                make_plans(bits_P, price_P, time_of_round)
                make_plans(bits_P, price_P, rows.slowest(times_R))
            if (is_large and is_settled) or (best is not None and best[0] - bound <= 1e-7 * abs(best[0])):
                break
        share_R = np.maximum(np.exp(search.next(excess, share_R)), 1e-12)
        share_R /= rows.sum_by_round(share_R)[rows.round_R]
    if is_large:
        make_plans(*proved)
    if best is None:  # the most exact or the narrowest plan keeps any limit that can be kept
        is_variance = problem.variance_limit is not None
        most_P = np.array([frontier.most_bits for frontier in pairs], np.float64)
        is_free = np.isinf(rows.bits_within(np.zeros(rows.fixed_R.size)))
        plan = _plan(problem, tables, most_P if is_variance else np.where(is_free, most_P, rows.least_P))
        best = evaluate(problem, plan).objective, plan
    return Planned(best[1], max(bound, 0.0), proof, bound)


class _Search:
    """Logarithms of the shares, step by step: multiplicative steps, extrapolated from the latest of them.

    Source: Anderson, "Iterative procedures for nonlinear integral equations" (1965).
    """

    def __init__(self, *, extrapolates: bool) -> None:
        self._rate, self._least = _FIRST_RATE, math.inf
        self._past: list[tuple[Floats, Floats]] = []
        self._best = (np.zeros(0), np.zeros(0))
        self._extrapolates = extrapolates

    def slow_down(self) -> None:
        """Take smaller steps from now on."""
        self._rate /= 2

    def next(self, excess_R: Floats, share_R: Floats) -> Floats:
        """The next point; ``excess_R`` is how much longer than the mean of its round each row takes."""
        error, at_R = float(np.abs(share_R * excess_R).max()), np.log(share_R)
        if error <= self._least:
            self._least, self._best = error, (at_R, excess_R)
        elif self._extrapolates and error > 4 * self._least:  # too far: on from the best point, in smaller steps
            self._past.clear()
            self._rate = max(self._rate / 2, 0.1)
            at_R, excess_R = self._best
            self._least *= 2  # or it would return here for ever
        step_R = np.clip(self._rate * excess_R, -2.0, 2.0)
        self._past = [*self._past[-_MEMORY:], (at_R, step_R)]
        next_R: Floats = at_R + step_R
        if self._extrapolates and len(self._past) > 2:
            points, steps = (np.stack(each, axis=1) for each in zip(*self._past, strict=True))
            moved, changed = np.diff(points, axis=1), np.diff(steps, axis=1)
            weight_R = np.sqrt(share_R)
            mixed = np.linalg.lstsq(changed * weight_R[:, None], step_R * weight_R, rcond=1e-10)[0]
            next_R = next_R - np.clip((moved + changed) @ mixed, -4.0, 4.0)
        return next_R


def _outer(
    problem: Problem, rows: _Rows, table: _Tables, share_R: Floats, packing_price: float
) -> tuple[float, Floats]:
    """The price of exposed time that meets the goal at these shares, and the price of each exchange and its packing.

    At which price an exchange is just hidden depends on that of packing, which is taken from the step before.
    """
    hidden = rows.hidden_E
    is_packing = np.arange(hidden.size) >= len(problem.exchanges)

    def times(pi: Floats) -> Floats:
        u_R = share_R * pi[rows.exchange_of_round][rows.round_R]
        bits_P = table.bits(rows.bit_prices(u_R))
        mean = rows.sum_by_round(share_R * rows.times(bits_P))
        return _sums(rows.exchange_of_round, mean, hidden.size)

    # Links and packing may differ by orders of magnitude, and each has a price.
    costs = np.log(rows.bit_ns_L[rows.bit_ns_L > 0]) if (rows.bit_ns_L > 0).any() else np.zeros(1)
    low = np.full(hidden.size, table.low - float(costs.max()) - 20.0)
    high = np.full(hidden.size, table.low - float(costs.min()) + 20.0 + table.step * _GRID)
    own = np.full(hidden.size, math.inf)
    if (hidden > 0).any():  # at these prices exchanges are just hidden
        covered = _bisect(
            lambda at: times(np.where(is_packing, packing_price, np.exp(at))) <= hidden, low.copy(), high.copy()
        )
        own = np.where(hidden > 0, np.exp(covered), math.inf)

    def variance(pi: Floats) -> float:
        u_R = share_R * pi[rows.exchange_of_round][rows.round_R]
        return table.variance(rows.bit_prices(u_R))

    def exposed(at: Floats) -> float:
        pi = np.minimum(np.exp(at), own)
        return float(np.maximum(times(pi) - hidden, 0.0).sum())

    if problem.time_weight is not None:
        weight = problem.variance_weight
        mu = problem.time_weight / weight if weight else math.exp(float(high[0]))
    elif problem.time_limit_ns is not None:
        limit_ns = problem.time_limit_ns
        at = _bisect(lambda at: np.full(at.shape, exposed(at) <= limit_ns), low[:1].copy(), high[:1].copy())
        mu = math.exp(float(at[0]))
    else:
        limit = problem.variance_limit or 0.0
        # Variance rises with the price: the largest price whose variance keeps the limit.
        at = _bisect(
            lambda at: np.full(at.shape, variance(np.minimum(np.exp(at), own)) > limit),
            low[:1].copy(), high[:1].copy(),
        )  # fmt: skip
        mu = math.exp(float(at[0]))
    return mu, np.minimum(mu, own)


def _bisect(is_above: Callable[[Floats], npt.NDArray[np.bool_]], low: Floats, high: Floats) -> Floats:
    """Least arguments, one by one, from which on ``is_above`` holds."""
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        above = is_above(middle)
        high, low = np.where(above, middle, high), np.where(above, low, middle)
    return high


def _bound(problem: Problem, pairs: list[Frontier], rows: _Rows, u_R: Floats, mu: float, pi: Floats) -> float:
    """The lower bound of the objective that prices prove, evaluated on every message."""
    terms = [float(u_R @ rows.fixed_R)]
    for frontier, price in zip(pairs, rows.bit_prices(u_R).tolist(), strict=True):
        first = frontier.first(np.array([price]))[0] if price > 0 else np.zeros(frontier.hull.gain.size, np.int64)
        terms += [float(frontier.variance(first)), price * float(frontier.bits(first))]
    terms += (-pi * rows.hidden_E).tolist()
    value = math.fsum(terms) - 1e-13 * sum(map(abs, terms))
    if problem.time_limit_ns is not None:
        return value - mu * problem.time_limit_ns
    if problem.time_weight is not None:
        return problem.variance_weight * value
    return (value - (problem.variance_limit or 0.0)) / mu


def _targets(problem: Problem, rows: _Rows, time_of_round: Floats) -> list[Floats]:
    """Times of rounds that meet the goal, in proportion to those of the search above the least possible ones."""
    hidden = rows.hidden_E
    least = rows.slowest(rows.times(rows.least_P))
    extra = np.maximum(time_of_round - least, 0.0)
    of, count = rows.exchange_of_round, hidden.size
    start, rise = _sums(of, least, count), _sums(of, extra, count)
    # An exchange that does not fill its hidden time may.
    to_hidden = np.where(rise > 0, (hidden - start) / np.maximum(rise, _NEVER), 0.0)
    shrink = 1 - 1e-12

    def exposed(theta: float) -> float:
        return float(np.maximum(start + theta * rise - hidden, 0.0).sum())

    if problem.time_limit_ns is not None:
        low, high = 0.0, 1.0
        while exposed(high) <= problem.time_limit_ns and high < 1e9:
            high *= 2
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (middle, high) if exposed(middle) <= problem.time_limit_ns else (low, middle)
        thetas = [low * shrink]
    elif problem.time_weight is not None:
        thetas = [1.0]
    else:
        thetas = [1 + 10.0**-k for k in range(8, 0, -1)]
    return [least + np.maximum(theta, to_hidden * shrink)[of] * extra for theta in thetas]


def _filled(rows: _Rows, pairs: list[Frontier], bits_P: Floats, price_P: Floats, time_of_round: Floats) -> Floats:
    """Whole bits of every pair, near ``bits_P``, with which no row takes longer than its round.

    ``price_P`` is the price of each pair's bits.
    """
    limit_R = time_of_round[rows.round_R] * (1 + 1e-13)
    least_R, most_R = rows.times(rows.least_P), rows.times(bits_P)
    scale_R = np.clip((limit_R - least_R) / np.maximum(most_R - least_R, _NEVER), 0.0, 1.0)
    scale_P = np.ones(bits_P.size)
    np.minimum.at(scale_P, rows.pair_L, scale_R[rows.row_L])
    budget_P: Floats = rows.least_P + scale_P * (bits_P - rows.least_P)
    most_P = np.array([frontier.most_bits for frontier in pairs], np.float64)
    count_R = np.bincount(rows.row_L, minlength=rows.fixed_R.size)
    for _ in range(_FILLS):
        left_R = np.maximum(limit_R - rows.times(budget_P), 0.0) / np.maximum(count_R, 1)
        budget_P = np.minimum(budget_P + rows.bits_within(left_R), most_P)
    unit = int(np.gcd.reduce(np.diff(pairs[0].hull.width))) or 1
    budget_P = rows.least_P + np.floor((budget_P - rows.least_P) / unit + 1e-9) * unit
    # Whole messages leave pairs bits that they cannot use, and ports time: the pairs of the highest price get it.
    used_P = np.array([float(f.bits(f.fill(most))) for f, most in zip(pairs, budget_P.tolist(), strict=True)])
    left_R = limit_R - rows.times(used_P)
    links: list[list[int]] = [[] for _ in pairs]
    for link in np.flatnonzero(rows.bit_ns_L > 0).tolist():
        links[int(rows.pair_L[link])].append(link)
    for pair in np.argsort(-price_P, kind="stable").tolist():
        own, costs = rows.row_L[links[pair]], rows.bit_ns_L[links[pair]]
        fitting = float((left_R[own] / costs).min()) if own.size else 0.0
        if fitting >= 1 and used_P[pair] < most_P[pair]:
            frontier = pairs[pair]
            more = float(frontier.bits(frontier.fill(used_P[pair] + math.floor(fitting)))) - used_P[pair]
            used_P[pair] += more
            left_R[own] -= more * costs
    return used_P


def _plan(problem: Problem, tables: list[list[list[Frontier]]], budget_P: Floats) -> Plan:
    """The best widths of every pair within its bits."""
    budgets = iter(budget_P.tolist())
    bits = {}
    for exchange, groups in zip(problem.exchanges, tables, strict=True):
        bits[exchange.name] = tuple(
            tuple(frontier.widths(frontier.fill(next(budgets))) for frontier in group) for group in groups
        )
    return Plan(bits=bits)
