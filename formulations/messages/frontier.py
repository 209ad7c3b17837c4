"""The trade-off of one pair of workers: variance against bits, by thresholds on the messages' scores.

All messages of a pair cost the same per bit, so some optimum gives a message of larger beta at least as many bits. With
the widths on the lower convex hull of the menu, step s raises a message from width s to s + 1; at a price per bit a
message takes the steps whose gain, beta x (fall of the factor per bit), is at least the price.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qsync_opt.messages import Pair, Problem

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
_SPLITS = 33
"""Prices tried at once when a price is searched for."""


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
        for limit in (most, np.zeros_like(most)):  # steps of one price first, then whatever still fits
            for step, width in enumerate(steps.tolist()):
                floor = max(int(limit[step]), int(first[step - 1]) if step else 0)
                count = min(int(first[step]) - floor, left // width)
                if count > 0:
                    first[step] -= count
                    left -= count * width
        return first

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
    """A dual point: ``exposed`` is mu, ``exchange`` pi of each exchange, ``pair`` y of each pair, per nanosecond."""

    exposed: float
    exchange: list[float]
    pair: list[float]


def frontiers(problem: Problem) -> list[list[list[Frontier]]]:
    """The trade-off of every pair: by exchange, round and pair."""
    hull = Hull.of(problem.menu)
    return [[[Frontier(p, e.dim, hull) for p in group] for group in e.rounds] for e in problem.exchanges]
