"""The best prices of a region: cutting planes of its bound, one from each chain, in a box around the best so far.

Prices are one vector of nanoseconds of the objective::

    prefill T, decode T    per nanosecond of the slowest stage, by device type
    theta                  per nanosecond of all stages together, in a decode round
    harm, memory T         per harm limit, and per memory of a device

With n = new_tokens - 1 every vector >= 0 bounds the objective from below where::

    sum prefill <= m_p - 1,   sum decode + m_d theta <= (n - 1) m_d + m_d - 1,   theta <= n - 1

Source: ours; the method is Kelley's cutting planes (1960) in a box (Marsten, Hogan and Blankenship 1975).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from qsync_opt.formulations.serving.chain import Prices
from qsync_opt.formulations.serving.fluid import Fluid, simplex
from qsync_opt.formulations.serving.tables import Array, Draft, Tables
from qsync_opt.formulations.serving.transfers import StageSums, stage_sums

_MOST_PLANES = 60
_GROWTH, _SHRINKAGE = 1.5, 0.7
"""How the box changes after a step that gains a share `_ENOUGH` of what the planes promise, and after another."""
_ENOUGH = 0.1
_LEAST_GAIN = 1e-7
"""Relative gain that is not worth a step."""
_WIDE_BOX = 0.05
"""Box in which a promise of no gain counts as the end."""
_USUAL_HARM, _USUAL_MEMORY = 0.2, 0.05
"""About the prices of harm and memory, in units of the objective."""


def _most(tables: Tables) -> tuple[float, float, float]:
    """What prefill prices, decode prices with theta, and theta may add up to."""
    extra = max(tables.steps - 1, 0)
    decode = extra * tables.decode_parts + tables.decode_parts - 1 if tables.steps else 0
    return float(tables.prefill_parts - 1), float(decode), float(extra)


def _harm_unit(tables: Tables) -> float:
    return max(tables.harm_limit, 1e-9) if math.isfinite(tables.harm_limit) else 1.0


def even_prices(tables: Tables) -> Array:
    """Prices that hold all devices to be alike."""
    share_T = np.full(tables.types, 1 / float(tables.count_T.sum()))
    prefill, decode, _ = _most(tables)
    return np.concatenate([prefill * share_T, decode * share_T, np.zeros(2 + tables.types)])


def fluid_prices(tables: Tables, order: tuple[int, ...], fluid: Fluid) -> Array:
    """A fluid program's prices by device type."""
    pick, count_T = np.asarray(order), tables.count_T.astype(np.float64)

    def mean(values_J: Array) -> Array:
        return np.asarray(np.bincount(pick, values_J, tables.types) / count_T)

    prefill, decode, extra = _most(tables)
    theta = extra * fluid.theta
    decode -= tables.decode_parts * theta
    both = [theta, fluid.harm * _harm_unit(tables)]
    parts = (
        prefill * mean(fluid.prefill_J),
        decode * mean(fluid.decode_J),
        both,
        mean(fluid.memory_J) * tables.limit_T,
    )
    return _valid(tables, np.concatenate(parts))


def stage_prices(tables: Tables, prices: Array, order: tuple[int, ...]) -> Array:
    """The same prices where each stage of an order is a type of its own."""
    types, pick = tables.types, np.asarray(order)
    parts = (prices[pick], prices[types + pick], prices[2 * types : 2 * types + 2], prices[2 * types + 2 + pick])
    return _valid(tables.in_order(order), np.concatenate(parts))


def _valid(tables: Tables, prices: Array) -> Array:
    """The nearest prices, about, that bound the objective."""
    types = tables.types
    prefill, decode, extra = _most(tables)
    result = np.maximum(prices, 0.0)
    result[2 * types] = min(result[2 * types], extra)
    if not math.isfinite(tables.harm_limit):
        result[2 * types + 1] = 0.0
    decode -= tables.decode_parts * result[2 * types]
    for part, most in ((slice(0, types), prefill), (slice(types, 2 * types), decode)):
        total = float(tables.count_T @ result[part])
        if total > most:
            result[part] *= max(most, 0.0) / total
    return result


def chain_prices(tables: Tables, prices: Array) -> Prices:
    """What a unit of each resource costs a chain."""
    types = tables.types
    decode_T = 1 + prices[2 * types] + prices[types : 2 * types] if tables.steps else np.zeros(types)
    return Prices(
        np.stack([1 + prices[:types], decode_T], axis=1),
        prices[2 * types + 2 :] / np.maximum(tables.limit_T, 1.0),
        float(prices[2 * types + 1]) / _harm_unit(tables),
    )


class Planes:
    """The bound of a region as a function of prices, as far as chains have shown it.

    ``best`` are the prices with the highest bound; ``box`` is how far the next ones may be from them, relative to their
    usual size; ``done`` says that no others are noticeably better.
    """

    def __init__(self, tables: Tables, prices: Array, box: float) -> None:
        self._tables = tables
        self.best, self.box, self.done = prices, box, False
        self._planes: list[tuple[Draft, float, Array]] = []
        self._promise = math.inf

    def inherit(self, other: Planes, holds: Callable[[Draft], bool]) -> None:
        """Take over the planes of another region whose chains are in this one too."""
        self._planes = [plane for plane in other._planes if holds(plane[0])]

    def add(self, draft: Draft) -> StageSums:
        """Add the plane of a chain in the region; returns its sums."""
        t = self._tables
        sums = stage_sums(t.in_order(draft.order), np.asarray(draft.ends), np.asarray(draft.schemes))
        order = np.asarray(draft.order)

        def by_type(values_J: Array) -> Array:
            return np.bincount(order, values_J, t.types).astype(np.float64)

        decode_J = sums.time_J2[:, 1] if t.steps else np.zeros(len(order))
        harm = sums.harm / _harm_unit(t) - 1 if math.isfinite(t.harm_limit) else 0.0
        memory_T = by_type(sums.memory_J - t.limit_T[order]) / np.maximum(t.limit_T, 1.0)
        slope = (by_type(sums.time_J2[:, 0]), by_type(decode_J), [float(decode_J.sum()), harm], memory_T)
        height = float(sums.time_J2[:, 0].sum() + decode_J.sum())
        self._planes = [*self._planes[1 - _MOST_PLANES :], (draft, height, np.concatenate(slope))]
        return sums

    def report(self, before: float, value: float, prices: Array) -> None:
        """Take in that the bound at ``prices`` is ``value``, where the best so far was ``before``."""
        good = value > before + _ENOUGH * (self._promise - before)
        self.box *= _GROWTH if good else _SHRINKAGE
        if value > before:
            self.best = prices

    def next(self, value: float) -> Array | None:
        """Prices near the best, whose bound is ``value``, that promise the highest one; None if there is none."""
        while not self.done:
            prices = self._highest(value)
            if self._promise - value > _LEAST_GAIN * abs(value):
                return prices
            self.done = self.box >= _WIDE_BOX
            self.box *= 4
        return None

    def _highest(self, value: float) -> Array:
        t, types, unit = self._tables, self._tables.types, max(abs(value), 1.0)
        prefill, decode, extra = _most(t)
        devices = float(t.count_T.sum())
        usual = np.full(3 * types + 2, _USUAL_MEMORY * unit)
        usual[:types], usual[types : 2 * types] = prefill / devices, decode / devices
        usual[2 * types] = extra
        usual[2 * types + 1] = _USUAL_HARM * unit if math.isfinite(t.harm_limit) else 0.0
        reach = self.box * np.maximum(usual, self.best)
        low = np.maximum(self.best - reach, 0.0)
        width = self.best + reach - low
        slopes = np.asarray([slope for _, _, slope in self._planes])
        heights = np.asarray([height for _, height, _ in self._planes]) + slopes @ low
        # What the three sums use of what they may.
        sums = np.zeros((3, len(low)))
        sums[0, :types] = t.count_T / max(prefill, 1.0)
        sums[1, types : 2 * types] = t.count_T / max(decode, 1.0)
        sums[1, 2 * types] = t.decode_parts / max(decode, 1.0)
        sums[2, 2 * types] = 1 / max(extra, 1.0)
        most = np.asarray([prefill, decode, extra]) / np.maximum([prefill, decode, extra], 1.0)
        # Columns are steps from the lowest corner of the box in units of its width, and the height above the lowest
        # plane there.
        planes, columns, base = len(heights), len(low), float(heights.min())
        count = planes + columns + 3
        matrix = np.zeros((count, columns + 1 + count))
        matrix[:planes, :columns] = -slopes * width / unit
        matrix[:planes, columns] = 1.0
        matrix[planes:-3, :columns] = np.eye(columns)
        matrix[-3:, :columns] = sums * width
        matrix[:, columns + 1 :] = np.eye(count)
        right = np.concatenate([(heights - base) / unit, np.ones(columns), np.maximum(most - sums @ low, 0.0)])
        costs = np.zeros(matrix.shape[1])
        costs[columns] = -1.0
        basis, values, _ = simplex(matrix, right + 1e-10 * (1 + np.arange(count) % 7), costs)
        amounts = np.zeros(matrix.shape[1])
        amounts[basis] = values
        self._promise = base + float(amounts[columns]) * unit
        return _valid(t, low + amounts[:columns] * width)
