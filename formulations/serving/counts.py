"""The best plan of one order with given stages, by numbers of groups.

Times and memory of a stage depend only on how many groups of a kind take each scheme, its least harm is then a small
dynamic program. A plan that is better than the best known one can only have mixes of schemes on each stage that cost
little more than the cheapest at given prices. Divided into cells by the slowest stage's times, stages are free of each
other but for harm; what a price for that leaves is tried out.

Source: ours; listing all columns of small reduced cost is how Baldacci, Christofides and Mingozzi (2008) end routing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qsync_opt.formulations.serving.chain import Prices
from qsync_opt.formulations.serving.tables import Array, Draft, Tables, stages_of
from qsync_opt.formulations.serving.transfers import fixed_sums

_MOST_NUMBERS = 300_000
"""Numbers of the schemes of one kind on a stage beyond which nothing is listed, ..."""
_MOST_MIXES = 1_000_000
"""... and mixes of a stage, or of all stages in a cell."""
_GRID = 160
"""Cells in each direction."""
_ROUNDS = 4
"""Most times that cells are made smaller."""
_HARM_FACTORS = (0.6, 0.8, 0.9, 1.0, 1.1, 1.25, 1.6)
"""Prices of harm that are tried, in units of the given one."""
_HARM_ROUNDING = 1e-12


def few_numbers(t: Tables, ends: Sequence[int]) -> bool:
    """Whether the numbers of groups of every kind on every stage can be listed."""
    members = np.zeros((len(ends), len(t.memory_KS)), dtype=np.intp)
    np.add.at(members, (stages_of(ends), t.kind_G), 1)
    return math.prod([int(members.max()) + 1] * (t.memory_KS.shape[1] - 1)) <= _MOST_NUMBERS


def _least_harms(harm_MS: Array, most: tuple[int, ...]) -> Iterator[Array]:
    """Of the first 0, 1, 2, ... groups the least harm, by how many take each scheme but the last, up to ``most``."""
    table = np.full(tuple(count + 1 for count in most), np.inf)
    table[(0,) * len(most)] = 0.0
    yield table
    for harm_S in harm_MS:
        before, table = table, table + harm_S[-1]
        for axis, harm in enumerate(harm_S[:-1]):
            at = tuple(slice(1, None) if a == axis else slice(None) for a in range(len(most)))
            source = tuple(slice(None, -1) if a == axis else slice(None) for a in range(len(most)))
            np.minimum(table[at], before[source] + harm, out=table[at])
        yield table


class _Numbers:
    """Numbers N of groups of one kind on one stage by scheme, with their least harm."""

    def __init__(self, harm_MS: Array) -> None:
        self._harm_MS = harm_MS
        members, schemes = harm_MS.shape
        for table in _least_harms(harm_MS, (members,) * (schemes - 1)):
            last = table
        flat = np.flatnonzero(np.isfinite(last))
        self.harm_N: Array = last.ravel()[flat]
        counts = np.zeros((len(flat), schemes - 1), dtype=np.intp)
        if schemes > 1:
            counts[:] = np.stack(np.unravel_index(flat, last.shape), axis=1)
        self.count_NS: NDArray[np.intp] = np.concatenate([counts, members - counts.sum(1)[:, None]], axis=1)

    def schemes(self, n: int) -> list[int]:
        """Schemes of the groups in such numbers, with the least harm."""
        left = [int(count) for count in self.count_NS[n]]
        tables = list(_least_harms(self._harm_MS, tuple(left[:-1])))
        result = []
        for m in range(len(self._harm_MS) - 1, -1, -1):

            def harm(s: int, m: int = m) -> float:
                rest = tuple(count - (s == i) for i, count in enumerate(left[:-1]))
                return float(tables[m][rest]) + float(self._harm_MS[m, s])

            scheme = min((s for s, count in enumerate(left) if count > 0), key=harm)
            left[scheme] -= 1
            result.append(scheme)
        return result[::-1]


@dataclass(frozen=True, slots=True)
class _Mixes:
    """Mixes N of schemes on one stage: times with all that the stage holds, harm, and the numbers of each kind."""

    time_N2: Array
    harm_N: Array
    number_NK: NDArray[np.intp]

    def only(self, keep: NDArray[np.intp]) -> _Mixes:
        return _Mixes(self.time_N2[keep], self.harm_N[keep], self.number_NK[keep])


def _pairs(above_N: Array, above_M: Array, gap: float) -> tuple[NDArray[np.intp], NDArray[np.intp]] | None:
    """All n and m that are together at most ``gap`` above the least; None if they are too many."""
    order_M = np.argsort(above_M, kind="stable")
    count_N = np.searchsorted(above_M[order_M], gap - above_N, side="right")
    total = int(count_N.sum())
    if total > _MOST_MIXES:
        return None
    n = np.repeat(np.arange(len(above_N)), count_N)
    return n, order_M[np.arange(total) - np.repeat(np.cumsum(count_N) - count_N, count_N)]


class GivenStages:
    """One order with given stages, each a type of its own in ``t``."""

    def __init__(self, t: Tables, ends: tuple[int, ...], allowed_GS: NDArray[np.bool_]) -> None:
        self._t, self._ends = t, ends
        harm_GS = np.where(allowed_GS, t.harm_GS, np.inf)
        self._members = [
            [
                (int(kind), begin + np.flatnonzero(t.kind_G[begin:end] == kind))
                for kind in np.unique(t.kind_G[begin:end])
            ]
            for begin, end in zip((0, *ends[:-1]), ends, strict=True)
        ]
        self._numbers = [[_Numbers(harm_GS[members]) for _, members in parts] for parts in self._members]

    def _mixes(self, prices: Prices, gap: float) -> list[_Mixes] | None:
        """The mixes of each stage that are at most ``gap`` above the cheapest at these prices; None if too many."""
        t, result = self._t, []
        fixed_J2, fixed_J = fixed_sums(t, len(self._ends))
        for j in range(len(self._ends)):
            time_N2, memory_N, harm_N = fixed_J2[j][None], fixed_J[j][None], np.zeros(1)
            above_N, number_NK = np.zeros(1), np.zeros((1, 0), dtype=np.intp)
            for (kind, _), numbers in zip(self._members[j], self._numbers[j], strict=True):
                time_M2 = numbers.count_NS @ t.time_KTS2[kind, j]
                memory_M = numbers.count_NS @ t.memory_KS[kind]
                cost_M = time_M2 @ prices.time_T2[j] + prices.memory_T[j] * memory_M + prices.harm * numbers.harm_N
                if not len(cost_M) or (pairs := _pairs(above_N, cost_M - cost_M.min(), gap)) is None:
                    return None
                n, m = pairs
                above_N = above_N[n] + (cost_M - cost_M.min())[m]
                time_N2, memory_N = time_N2[n] + time_M2[m], memory_N[n] + memory_M[m]
                harm_N = harm_N[n] + numbers.harm_N[m]
                number_NK = np.concatenate([number_NK[n], m[:, None]], axis=1)
            mixes = _Mixes(time_N2, harm_N, number_NK)
            harmless_N = harm_N <= t.harm_limit * (1 + _HARM_ROUNDING)
            result.append(mixes.only(np.flatnonzero(harmless_N & (memory_N <= t.limit_T[j]))))
        return result

    def _draft(self, numbers: Sequence[NDArray[np.intp]]) -> Draft:
        """The draft with such numbers on each stage."""
        schemes = np.zeros(self._t.groups, dtype=np.intp)
        for j, parts in enumerate(self._members):
            for (_, members), own, n in zip(parts, self._numbers[j], numbers[j], strict=True):
                schemes[members] = own.schemes(int(n))
        return Draft(tuple(range(len(self._ends))), self._ends, tuple(map(int, schemes)))

    def solve(self, prices: Prices, theta: float, bound: float, upper: float) -> tuple[float, Draft | None]:
        """A bound of all plans that are better than ``upper``, and a draft of the best of them that was found.

        ``bound`` is that at the prices, among which ``theta`` is the one of a decode round. The new bound is infinite
        where no plan but the draft is left.
        """
        mixes = self._mixes(prices, upper - bound)
        if mixes is None:
            return bound, None
        cells = _Cells(self._t, prices.harm, theta)
        numbers: Sequence[NDArray[np.intp]] | None = None
        least = np.zeros(2)
        for _ in range(_ROUNDS):
            if not all(len(m.harm_N) for m in mixes) or not cells.divide(mixes, least):
                return math.inf, None
            sizes = [len(m.harm_N) for m in mixes]
            least, most = cells.range_below(upper)
            if most is None:
                return math.inf, None
            mixes = [m.only(np.flatnonzero((m.time_N2 <= most).all(1))) for m in mixes]
            if sizes == [len(m.harm_N) for m in mixes]:
                break
        lowest = math.inf
        for value, i, d in cells.below(upper):
            if value > upper - 1:
                break
            result = cells.best(mixes, i, d, value, upper)
            if result is None:
                lowest = min(lowest, value)
            elif result[0] < upper:
                upper, numbers = result[0], [m.number_NK[n] for m, n in zip(mixes, result[1], strict=True)]
        return lowest, None if numbers is None else self._draft(numbers)


class _Cells:
    """Plans by the slowest stage's times in both phases, with a bound of each cell at the best of some prices."""

    def __init__(self, t: Tables, harm: float, theta: float) -> None:
        self._t = t
        extra = float(max(t.steps - 1, 0))
        limited = math.isfinite(t.harm_limit) and harm > 0
        thetas = sorted({0.0, 0.5 * theta, theta, min(1.5 * theta, extra), extra})
        self._prices = [(th, harm * f) for th in thetas for f in (_HARM_FACTORS if limited else (0.0,))]

    def _weights(self, theta: float) -> tuple[Array, float]:
        """What stage times cost in both phases, and the slowest decode time."""
        t, served = self._t, float(self._t.steps > 0)
        slowest = ((max(t.steps - 1, 0) - theta) * t.decode_parts + t.decode_parts - 1) * served
        return np.asarray([1.0, served * (1 + theta)]), slowest

    def divide(self, mixes: Sequence[_Mixes], least: Array) -> bool:
        """Make cells of the mixes, where the slowest stages take at least ``least``; False if there are none."""
        t = self._t
        self.ends, self.firsts, places = [], [], []
        for phase in range(2):
            times = [m.time_N2[:, phase] for m in mixes]
            values = np.unique(np.concatenate(times))
            values = values[values >= max(*(x.min() for x in times), least[phase])]
            if not len(values):
                return False
            at = np.unique(np.linspace(0, len(values) - 1, _GRID).round().astype(np.intp))
            self.ends.append(values[at])
            self.firsts.append(values[np.concatenate([[0], at[:-1] + 1])])
            places.append([np.searchsorted(values[at], x) for x in times])
        shape = (len(self.ends[0]), len(self.ends[1]))
        self.bounds = np.full(shape, -np.inf)
        self.at_price = np.zeros(shape, dtype=np.intp)
        for p, (theta, harm) in enumerate(self._prices):
            weights, slowest = self._weights(theta)
            total = (t.prefill_parts - 1) * self.firsts[0][:, None] + slowest * self.firsts[1]
            total = total - (harm * t.harm_limit if harm > 0 else 0.0)
            for j, m in enumerate(mixes):
                table = np.full((shape[0] + 1, shape[1] + 1), np.inf)
                np.minimum.at(table, (places[0][j], places[1][j]), m.time_N2 @ weights + harm * m.harm_N)
                total += np.minimum.accumulate(np.minimum.accumulate(table[:-1, :-1], axis=0), axis=1)
            better = total > self.bounds
            self.bounds[better], self.at_price[better] = total[better], p
        return True

    def range_below(self, upper: float) -> tuple[Array, Array | None]:
        """The least and largest times of the slowest stage where a plan may be better; None for the latter if none."""
        at = np.nonzero(self.bounds <= upper - 1)
        if not len(at[0]):
            return np.zeros(2), None
        least = [self.firsts[phase][at[phase].min()] for phase in range(2)]
        return np.asarray(least), np.asarray([self.ends[phase][at[phase].max()] for phase in range(2)])

    def below(self, upper: float) -> list[tuple[float, int, int]]:
        """Bound and place of the cells where a plan may be better, the lowest first."""
        at = np.nonzero(self.bounds <= upper - 1)
        return sorted(zip(self.bounds[at].tolist(), *(x.tolist() for x in at), strict=True))

    def best(
        self, mixes: Sequence[_Mixes], i: int, d: int, value: float, upper: float
    ) -> tuple[float, list[int]] | None:
        """The least objective of a cell whose bound is ``value``, and its mixes, of all better than ``upper``.

        None where too many had to be tried.
        """
        t = self._t
        theta, harm = self._prices[self.at_price[i, d]]
        weights, _ = self._weights(theta)
        gap = upper - value
        time_N2, harm_N, above_N = np.zeros((1, 0, 2)), np.zeros(1), np.zeros(1)
        picks: list[NDArray[np.intp]] = []
        for m in mixes:
            own = np.flatnonzero((m.time_N2 <= (self.ends[0][i], self.ends[1][d])).all(1))
            cost = m.time_N2[own] @ weights + harm * m.harm_N[own]
            pairs = _pairs(above_N, cost - cost.min(), gap)
            if pairs is None:
                return None
            n, k = pairs
            kept = harm_N[n] + m.harm_N[own[k]] <= t.harm_limit * (1 + _HARM_ROUNDING)
            n, k = n[kept], k[kept]
            above_N, harm_N = above_N[n] + (cost - cost.min())[k], harm_N[n] + m.harm_N[own[k]]
            time_N2 = np.concatenate([time_N2[n], m.time_N2[own[k]][:, None]], axis=1)
            picks = [*(pick[n] for pick in picks), own[k]]
        if not len(harm_N):
            return math.inf, []
        totals = t.totals(time_N2[..., 0], time_N2[..., 1])
        least = int(totals.argmin())
        return float(totals[least]), [int(pick[least]) for pick in picks]
