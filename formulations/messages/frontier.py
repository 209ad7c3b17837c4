"""The trade-off of one pair of workers: variance against bits, by thresholds on the messages' scores.

All messages of a pair cost the same per bit, so some optimum gives a message of larger beta at least as many bits. With
the widths on the lower convex hull of the menu, step s raises a message from width s to s + 1; at a price per bit a
message takes the steps whose gain, beta x (fall of the factor per bit), is at least the price.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qsync_opt.messages import Pair, Plan, Problem

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
_SPLITS = 33
"""Prices tried at once when a price is searched for."""
_REACHES = (0, 0, 4, 4, 4, 2, 1, 1, 0)
"""By number of steps, how many messages more or less in each step are tried when bits are left."""
_UNUSED = 3
"""Bits that such a change may leave unused."""


@dataclass(frozen=True, slots=True)
class Hull:
    """Widths and factors on the lower convex hull of a menu; ``gain`` is each step's fall of the factor per bit."""

    width: Integers
    factor: Floats
    gain: Floats

    @classmethod
    def of(cls, menu: Mapping[int, float]) -> Hull:
        """The hull of a menu, from its narrowest width to its least factor."""
        points: list[tuple[int, float]] = []
        for width, factor in sorted(menu.items()):
            if points and factor >= points[-1][1]:
                continue
            while len(points) > 1:
                (w0, f0), (w1, f1) = points[-2:]
                if (f0 - f1) * (width - w1) > (f1 - factor) * (w1 - w0):
                    break
                points.pop()
            points.append((width, factor))
        widths = np.array([width for width, _ in points], np.int64)
        factors = np.array([factor for _, factor in points])
        return cls(widths, factors, -np.diff(factors) / np.diff(widths))


@functools.cache
def _combinations(steps: tuple[int, ...], reach: int) -> tuple[Integers, Integers]:
    """All numbers of messages from ``-reach`` to ``reach`` in every step, and their bits, by ascending bits."""
    grids = np.meshgrid(*[np.arange(-reach, reach + 1)] * len(steps), indexing="ij")
    changes = np.stack([grid.ravel() for grid in grids], axis=1)
    bits = changes @ np.array(steps)
    order = np.argsort(bits, kind="stable")
    return changes[order], bits[order]


class Frontier:
    """A pair's trade-off.

    ``first`` vectors have one entry per step of the hull: messages of that rank and above, by ascending beta, take the
    step.
    """

    __slots__ = ("bit_ns", "dim", "hull", "pair", "sorted_beta", "tail")

    def __init__(self, pair: Pair, dim: int, hull: Hull) -> None:
        self.pair, self.dim, self.hull = pair, dim, hull
        self.sorted_beta: Floats = np.sort(pair.beta)
        self.tail: Floats = np.zeros(pair.beta.size + 1)
        """``tail[i]`` is the sum of beta from rank i on."""
        np.cumsum(self.sorted_beta[::-1], out=self.tail[1:])
        self.tail = self.tail[::-1]
        self.bit_ns = pair.ns_per_byte * dim / 8
        """Nanoseconds per bit of width of one message."""

    @property
    def least_bits(self) -> int:
        """Bits with every message at its narrowest."""
        return int(self.hull.width[0]) * self.sorted_beta.size

    @property
    def most_bits(self) -> int:
        """Bits with every message at its widest."""
        return int(self.hull.width[-1]) * self.sorted_beta.size

    @property
    def top_price(self) -> float:
        """The largest price at which some step is taken."""
        if not self.hull.gain.size or not self.sorted_beta.size:
            return 0.0
        return float(self.sorted_beta[-1] * self.hull.gain[0])

    def first(self, price: Floats) -> Integers:
        """Ranks from which each step is taken, shape (prices, steps)."""
        thresholds = np.asarray(price)[:, None] / self.hull.gain[None, :]
        return np.searchsorted(self.sorted_beta, thresholds)

    def bits(self, first: Integers) -> Integers:
        """Total bits of ``first`` vectors."""
        steps = np.diff(self.hull.width)
        return self.least_bits + (self.sorted_beta.size - first) @ steps

    def variance(self, first: Integers) -> Floats:
        """Variance of ``first`` vectors."""
        count = first.shape[:-1]
        edges = np.concatenate(
            [np.zeros((*count, 1), np.int64), first, np.full((*count, 1), self.sorted_beta.size)], axis=-1
        )
        # Level s holds the ranks from first[s - 1] to first[s]: the wider, the larger the score.
        sums = self.tail[edges[..., :-1]] - self.tail[edges[..., 1:]]
        variance: Floats = sums @ self.hull.factor
        return variance

    def fill(self, budget_bits: float) -> Integers:
        """The best thresholds with at most ``budget_bits``; short of the frontier by less than one message's step."""
        size, widths = self.sorted_beta.size, self.hull.width
        steps = np.diff(widths)
        if not steps.size or not size or budget_bits >= self.most_bits:
            return np.zeros(steps.size, np.int64)
        low, high = 0.0, self.top_price * 2 or 1.0  # at the price 0 all take every step, those of score 0 too
        least = float(self.sorted_beta[0] * self.hull.gain[-1]) / 2
        if least > 0 and int(self.bits(self.first(np.array([least])))[0]) > budget_bits:
            low = least
        while True:
            if low > 0 and high > 2 * low:
                prices = np.geomspace(low, high, _SPLITS)[1:-1]
            else:
                prices = np.linspace(low, high, _SPLITS)[1:-1]
            prices = np.unique(prices[(prices > low) & (prices < high)])
            if not prices.size:
                break
            fits = self.bits(self.first(prices)) <= budget_bits
            index = int(np.argmax(fits)) if fits.any() else prices.size
            if index < prices.size:
                high = float(prices[index])
            if index > 0:
                low = float(prices[index - 1])
        first: Integers = self.first(np.array([high]))[0]
        most = self.first(np.array([low]))[0]
        left = int(min(budget_bits, 2.0**62)) - int(self.bits(first))
        left -= self._take(first, most, left)
        left -= self._exchange(first, left)
        self._take(first, np.zeros_like(most), left)
        return first

    def _take(self, first: Integers, limit: Integers, left: int) -> int:
        """Take steps down to the ranks ``limit`` while bits are left; the bits taken."""
        taken = 0
        for step, width in enumerate(np.diff(self.hull.width).tolist()):
            floor = max(int(limit[step]), int(first[step - 1]) if step else 0)
            count = min(int(first[step]) - floor, (left - taken) // width)
            if count > 0:
                first[step] -= count
                taken += count * width
        return taken

    def _exchange(self, first: Integers, left: int) -> int:
        """Give up some steps for others so that bits that are left fit; the bits that this takes.

        All that a few messages more or less in each step can reach is tried: near the threshold a step gains about as
        much per bit as another, so that what does not fit in whole is the only loss.
        """
        steps = np.diff(self.hull.width)
        reach = _REACHES[min(steps.size, len(_REACHES) - 1)]
        if left <= 0 or not reach:
            return 0
        changes, widths = _combinations(tuple(steps.tolist()), reach)
        fitting = slice(*np.searchsorted(widths, [left - _UNUSED, left + 1]).tolist())
        change = changes[fitting]
        moved = first[None, :] - change
        allowed = (np.diff(moved, axis=1) >= 0).all(axis=1) & (moved >= 0).all(axis=1)
        allowed &= (moved <= self.sorted_beta.size).all(axis=1)
        near = np.clip(first[None, :] - np.arange(-reach, reach + 1)[:, None], 0, self.sorted_beta.size)
        # Sums of scores from the threshold, by number of messages.
        gained = (self.tail[near] - self.tail[first][None, :]) * (self.hull.gain * steps)[None, :]
        total = np.where(allowed, gained[change + reach, np.arange(steps.size)[None, :]].sum(axis=1), 0.0)
        best = int(np.argmax(total)) if total.size else 0
        if not total.size or total[best] <= 0:
            return 0
        first[:] = moved[best]
        return int(widths[fitting][best])

    def widths(self, first: Integers) -> npt.NDArray[np.uint8]:
        """The width of each message, in the order of the pair."""
        beta, level = self.pair.beta, np.zeros(self.pair.beta.size, np.uint8)
        for rank in first.tolist():
            if rank >= beta.size:
                continue
            value = self.sorted_beta[rank]
            above = beta >= value
            if rank and self.sorted_beta[rank - 1] == value:  # of equal scores, the last ones are raised
                ties = np.flatnonzero(beta == value)
                above[ties[: rank - int(np.searchsorted(self.sorted_beta, value))]] = False
            level += above
        return self.hull.width.astype(np.uint8)[level]


@dataclass(slots=True)
class Prices:
    """A dual point: ``exposed`` is mu, ``exchange`` pi of each exchange, ``pair`` y of each pair, per nanosecond.

    From `ports`, ``pair`` is the price of a bit of each pair, and the prices of packing follow those of exchanges.
    """

    exposed: float
    exchange: list[float]
    pair: list[float]


@dataclass(slots=True)
class Planned:
    """A feasible plan, a lower bound of the objective, and prices with the value (a lesser bound) that they prove."""

    plan: Plan
    bound: float
    prices: Prices
    value: float


def frontiers(problem: Problem) -> list[list[list[Frontier]]]:
    """The trade-off of every pair: by exchange, round and pair."""
    hull = Hull.of(problem.menu)
    return [[[Frontier(p, e.dim, hull) for p in group] for group in e.rounds] for e in problem.exchanges]
