"""Bounds of completions with one row kept exactly, in levels, and the other rows priced.

Amounts of memory are multiples of few sizes. What is left of such a row is counted in levels of their common divisor,
and for each point of the layers and each level the least cost of the rest is found by dynamic programming; the other
rows are priced as before. That bound knows which amounts no combination can use, which prices alone do not.

Levels below the table count as its first one, levels above it as unlimited, and amounts that are no multiples are
rounded down: all of this can only lower the bound. The row of the levels may have a price too, so the bound is never
below the one of prices alone.

Axes: S points, M levels, K arcs, T steps, R limit rows, Q vectors of prices.

Source: Lagrangian relaxation with one knapsack row kept (Geoffrion 1974), its tables as completion bounds; ours.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from qsync_opt.formulations.assignment.compiled import compiled
from qsync_opt.formulations.assignment.core.layers import Layers
from qsync_opt.formulations.assignment.dual import Master
from qsync_opt.formulations.assignment.model import Bools, Floats, Ints

_MOST_ENTRIES = 6_000_000
"""Of one table."""
_FEWEST_LEVELS, _MOST_LEVELS = 64, 8192
_MOST_STEPS = 12
_ENOUGH = 0.02
"""Precision of the best prices, as a share of the distance between bound and incumbent."""
_SLACK = 1e-12


@dataclass(slots=True, kw_only=True)
class Levels:
    """Levels of one row over some layers.

    Attributes:
        row: The row that is counted in levels.
        unit: Amount of one level.
        lowest: Level of the table's first column: what is left of the row, in units.
        start: Level at the first point.
        number: Number of levels of a table.
    """

    row: int
    unit: int
    lowest: int
    start: int
    number: int

    @property
    def first(self) -> int:
        """Column of the level at the first point."""
        return max(0, min(self.number - 1, self.start - self.lowest))

    def weights(self, layers: Layers) -> Ints:
        """Levels that each arc takes."""
        return np.ascontiguousarray(layers.rows_KR[:, self.row] // self.unit)

    def table(self, layers: Layers, prices_R: Floats, out_SM: Floats) -> None:
        """Least priced cost from each point to the end, for each level; in place."""
        completions(
            layers.first_T1, layers.point_T1, layers.source_K, layers.target_K, self.weights(layers),
            costs(layers, prices_R), self.lowest, out_SM,
        )  # fmt: skip

    def least(self, layers: Layers, prices_R: Floats, table_SM: Floats) -> Floats:
        """Least priced cost of a path through each arc."""
        return least_through(
            layers.first_T1, layers.point_T1, layers.source_K, layers.target_K, self.weights(layers),
            costs(layers, prices_R), self.first, table_SM,
        )  # fmt: skip

    def path(self, layers: Layers, prices_R: Floats, table_SM: Floats) -> Ints:
        """Arcs of a least path."""
        return path(
            layers.first_T1, layers.source_K, layers.target_K, self.weights(layers), costs(layers, prices_R),
            self.first, table_SM,
        )  # fmt: skip


@dataclass(slots=True)
class LevelBound:
    """The best bound found, as a difference to the base's objective; its prices, and a table at these prices."""

    bound: float
    prices_R: Floats
    table_SM: Floats


def bound(layers: Layers, levels: Levels, prices_R: Floats, upper: float, deadline: float) -> LevelBound:
    """Maximise the bound over the rows' prices.

    Args:
        layers: The core, laid out.
        levels: Levels of one of its rows.
        prices_R: Prices to begin with.
        upper: Incumbent as a difference to the base's objective; the search stops where the bound reaches it.
        deadline: ``time.monotonic()`` value at which to stop.
    """
    table_SM = np.empty((layers.num_points, levels.number))
    spare_SM = np.empty_like(table_SM)
    scale_R = np.maximum(np.abs(layers.rows_KR).max(axis=0), np.abs(layers.excess_R)).astype(np.float64)
    scale_R = np.maximum(scale_R, 1.0)
    size = max(abs(upper) if np.isfinite(upper) else 0.0, float(np.abs(layers.objective_K).max()), 1e-300)
    master = Master(len(prices_R), 1e9 * size, size)
    without = prices_R.copy()
    without[levels.row] = 0.0
    queries = [prices_R, without]
    best: LevelBound | None = None
    step = 0
    while True:
        query = queries[step]
        levels.table(layers, query, spare_SM)
        least = float(spare_SM[0, levels.first])
        if least == np.inf:
            return LevelBound(np.inf, query, spare_SM)
        value = least + constant(layers, query) - rounding(layers, query)
        path_T = levels.path(layers, query, spare_SM)
        if best is None or value > best.bound:
            table_SM, spare_SM = spare_SM, table_SM
            best = LevelBound(value, query, table_SM)
        excess_R = layers.excess_R + layers.rows_KR[path_T].sum(axis=0)
        master.add(float(layers.objective_K[path_T].sum()), excess_R / scale_R)
        step += 1
        if best.bound >= upper or step >= _MOST_STEPS or time.monotonic() > deadline:
            return best
        most, scaled, _ = master.solve()
        if most - best.bound <= _ENOUGH * min(upper - best.bound, abs(best.bound) + size):
            return best
        if step >= len(queries):
            target = scaled / scale_R
            queries.append(target if step % 3 == 2 else (best.prices_R + target) / 2)


def affordable(layers: Layers, levels: Levels, at: LevelBound, upper: float) -> Bools:
    """Arcs that a path below ``upper`` may take."""
    least_K = levels.least(layers, at.prices_R, at.table_SM)
    offset = constant(layers, at.prices_R) - rounding(layers, at.prices_R)
    kept: Bools = least_K + offset < upper
    return kept


def choose_levels(layers: Layers, prices_R: Floats, room: float) -> Levels:
    """Choose the row whose amounts within reach of the incumbent need the fewest levels.

    ``room`` is the distance between bound and incumbent, in units of the objective; it may be infinite.
    """
    fits = max(_FEWEST_LEVELS, min(_MOST_LEVELS, _MOST_ENTRIES // layers.num_points))
    best: tuple[float, Levels] | None = None
    for row in range(len(layers.excess_R)):
        divisor = int(np.gcd.reduce(layers.rows_KR[:, row])) or 1
        reach = _reach(layers, prices_R, row, room)
        over = -int(layers.excess_R[row])
        needed = 2 * reach // divisor + abs(over) // divisor + 4
        unit = divisor
        largest = int(np.abs(layers.rows_KR[:, row]).max(initial=0))
        if needed > fits:  # a wide table of coarse levels bounds better than a narrow one of fine levels
            unit = max(
                divisor, largest * 8 // fits // divisor * divisor, (abs(over) * 2 // fits // divisor + 1) * divisor
            )
        start = over // unit
        number = min(fits, max(_FEWEST_LEVELS, 2 * reach // unit + abs(start) + 4))
        lowest = min(start, 0) - (number - abs(start)) // 2
        score = needed if unit == divisor else needed * 1e6
        if best is None or score < best[0]:
            best = score, Levels(row=row, unit=unit, lowest=lowest, start=start, number=number)
    if best is None:
        raise ValueError("levels need a row")
    return best[1]


def _reach(layers: Layers, prices_R: Floats, row: int, room: float) -> int:
    """Estimate how far a row can move from the base's, up or down, by deviations that cost at most ``room``."""
    priced_K = costs(layers, prices_R)
    starts = layers.first_T1[:-1]
    extra_K = np.maximum(priced_K - np.minimum.reduceat(priced_K, starts)[layers.step_K], 0.0)
    reach = 0.0
    for sign in (1, -1):
        amount_K = np.maximum(sign * layers.rows_KR[:, row], 0).astype(np.float64)
        used = np.flatnonzero(amount_K)
        if not np.isfinite(room):
            reach = max(reach, float(np.maximum.reduceat(amount_K, starts).sum()))
            continue
        order = used[np.argsort(extra_K[used] / amount_K[used], kind="stable")]
        before = np.cumsum(extra_K[order]) - extra_K[order]
        reach = max(reach, float(amount_K[order[before <= room]].sum()))
    return int(reach)


def costs(layers: Layers, prices_R: Floats) -> Floats:
    """Priced cost of each arc."""
    cost_K = layers.objective_K.copy()
    for row, price in enumerate(prices_R.tolist()):
        if price:
            cost_K += price * layers.rows_KR[:, row]
    return cost_K


def constant(layers: Layers, prices_R: Floats) -> float:
    """Bound of a path of priced cost 0."""
    return float(prices_R @ layers.excess_R)


def rounding(layers: Layers, prices_R: Floats) -> float:
    """Rounding error of sums of priced costs."""
    amounts_R = np.abs(layers.excess_R) + np.abs(layers.rows_KR).max(axis=0)
    return _SLACK * (float(np.abs(layers.objective_K).max()) + float(prices_R @ amounts_R))


@compiled("void(int64[::1],int64[::1],int64[::1],int64[::1],int64[::1],float64[::1],int64,float64[:,::1])")
def completions(
    first_T1: Ints, point_T1: Ints, source_K: Ints, target_K: Ints, weight_K: Ints, cost_K: Floats, lowest: int,
    table_SM: Floats,
) -> None:  # fmt: skip
    """Least cost from each point to the end for each level of the row left, in place."""
    num_levels = table_SM.shape[1]
    for level in range(num_levels):
        table_SM[len(table_SM) - 1, level] = 0.0 if level + lowest >= 0 else np.inf
    for step in range(len(first_T1) - 2, -1, -1):
        for point in range(point_T1[step], point_T1[step + 1]):
            table_SM[point, :] = np.inf
        for arc in range(first_T1[step], first_T1[step + 1]):
            weight, cost = weight_K[arc], cost_K[arc]
            row, after = table_SM[source_K[arc]], table_SM[target_K[arc]]
            low = max(0, min(num_levels - 1, weight))
            high = max(low, min(num_levels - 1, num_levels + weight))
            value = after[0] + cost
            for level in range(low):
                row[level] = min(row[level], value)
            # Slices, so that indices start at 0 and the loop is vectorised.
            here, there = row[low:high], after[low - weight : high - weight]
            for level in range(high - low):
                here[level] = min(here[level], there[level] + cost)
            value = after[num_levels - 1] + cost
            here = row[high:]
            for level in range(num_levels - high):
                here[level] = min(here[level], value)


@compiled("int64[::1](int64[::1],int64[::1],int64[::1],int64[::1],float64[::1],int64,float64[:,::1])")
def path(
    first_T1: Ints, source_K: Ints, target_K: Ints, weight_K: Ints, cost_K: Floats, level: int, table_SM: Floats
) -> Ints:
    """The arcs of a least path from the first point and a level; its cost must be finite."""
    last = table_SM.shape[1] - 1
    arcs_T = np.zeros(len(first_T1) - 1, dtype=np.int64)
    point = 0
    for step in range(len(arcs_T)):
        best, chosen = np.inf, first_T1[step]
        for arc in range(first_T1[step], first_T1[step + 1]):
            if source_K[arc] == point:
                after = max(0, min(last, level - weight_K[arc])) if level < last else last
                value = cost_K[arc] + table_SM[target_K[arc], after]
                if value < best:
                    best, chosen = value, arc
        arcs_T[step] = chosen
        if level < last:
            level = max(0, min(last, level - weight_K[chosen]))
        point = target_K[chosen]
    return arcs_T


@compiled("float64[::1](int64[::1],int64[::1],int64[::1],int64[::1],int64[::1],float64[::1],int64,float64[:,::1])")
def least_through(
    first_T1: Ints, point_T1: Ints, source_K: Ints, target_K: Ints, weight_K: Ints, cost_K: Floats, level: int,
    table_SM: Floats,
) -> Floats:  # fmt: skip
    """Least cost of a path from the first point and a level to the end that takes each arc."""
    num_levels = table_SM.shape[1]
    least_K = np.full(len(source_K), np.inf)
    before_SM = np.full((point_T1[1], num_levels), np.inf)
    before_SM[0, level] = 0.0
    sums, lanes = np.empty(num_levels), np.full(8, np.inf)
    for step in range(len(first_T1) - 1):
        first, second = point_T1[step], point_T1[step + 1]
        end = point_T1[step + 2] if step + 2 < len(point_T1) else second + 1
        after_SM = np.full((end - second, num_levels), np.inf)
        for arc in range(first_T1[step], first_T1[step + 1]):
            weight, cost, least = weight_K[arc], cost_K[arc], np.inf
            before, after = before_SM[source_K[arc] - first], after_SM[target_K[arc] - second]
            rest = table_SM[target_K[arc]]
            low = max(0, min(num_levels - 1, weight))
            high = max(low, min(num_levels - 1, num_levels + weight))
            for level_before in range(low):
                reached = before[level_before] + cost
                least = min(least, reached + rest[0])
                after[0] = min(after[0], reached)
            # As in `completions`; the minimum of the sums is formed apart, in lanes, so that the loop is vectorised.
            here, there, to = before[low:high], rest[low - weight : high - weight], after[low - weight : high - weight]
            for level_before in range(high - low):
                reached = here[level_before] + cost
                sums[level_before] = reached + there[level_before]
                to[level_before] = min(to[level_before], reached)
            for level_before in range(0, high - low - 7, 8):
                for lane in range(8):
                    lanes[lane] = min(lanes[lane], sums[level_before + lane])
            for level_before in range((high - low) // 8 * 8, high - low):
                least = min(least, sums[level_before])
            for lane in range(8):
                least = min(least, lanes[lane])
                lanes[lane] = np.inf
            for level_before in range(high, num_levels):
                reached = before[level_before] + cost
                least = min(least, reached + rest[num_levels - 1])
                after[num_levels - 1] = min(after[num_levels - 1], reached)
            least_K[arc] = least
        before_SM = after_SM
    return least_K
