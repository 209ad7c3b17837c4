"""Best path through the layers within the limits, by label setting with tables of levels as completion bounds.

A state is a point of the layers with the objective and the rows so far. Its bound is the best of several: one table of
levels for each of some vectors of prices. A state is dropped if its bound reaches the incumbent, if no completion meets
the limits, or if another state of the same point is at least as good in everything.

Axes: X states, K arcs, S points, M levels, R limit rows, Q vectors of prices.

Source: resource-constrained shortest paths by label setting (Irnich and Desaulniers 2005); the bounds are ours.
"""

from __future__ import annotations

import math
import time

import numpy as np
from numpy.typing import NDArray

from qsync_opt.formulations.assignment.compiled import compiled
from qsync_opt.formulations.assignment.core.core import Core, CoreResult
from qsync_opt.formulations.assignment.core.layers import Layers, lay_out
from qsync_opt.formulations.assignment.core.levels import (
    Levels,
    affordable,
    bound,
    choose_levels,
    constant,
    rounding,
)
from qsync_opt.formulations.assignment.model import Bools, Floats, Ints

_SCALES, _GROWTH = 4, 4.0
"""Prices further and further from the best: their number on either side, and the factor from one to the next."""
_NEAREST, _FURTHEST = 1e-4, 0.5
_LOSS_SHARE = 0.5
"""Share of the distance between bound and incumbent that the nearest of these prices lose at the start."""
_SHARES = (0.3, 0.65, 1.0)
"""Shares of the distance between bound and incumbent to search, one after the other: the best is mostly near the
bound, and a small share is searched much sooner."""
_MOST_ROWS = 60
"""Most rows of a core."""
_MOST_STATES = 4_000_000
"""States of one search in all."""
_MOST_TABLES = 30_000_000
"""Entries of all tables together."""


def walk(
    core: Core, upper: float, most_states: tuple[int, ...], *, tolerance: float = 0.0, known: float = -np.inf,
    deadline: float = np.inf,
) -> CoreResult | None:  # fmt: skip
    """Find the best labelling of a core within the limits, by wider and wider searches.

    Args:
        core: The undecided part, not counted in copies.
        upper: Only labellings below this count.
        most_states: Most states kept after a step, for each search.
        tolerance: Distance to the optimum at which the search may stop, in units of the objective.
        known: A lower bound of all labellings of the core.
        deadline: ``time.monotonic()`` value at which to stop.

    Returns:
        The best labelling found below ``upper``, and a lower bound; None if the core has no rows or too many, or
        cannot be laid out.
    """
    if not 0 < len(core.excess_R) <= _MOST_ROWS:
        return None
    layers = lay_out(core)
    if layers is None:
        return None
    best_labels: Ints | None = None
    least, before, prices_R = known, 0, core.prices_R
    goal, base = upper, core.objective
    for states in most_states:
        width = min(states, _MOST_STATES // max(1, layers.num_steps))
        if width <= before or least >= goal or time.monotonic() > deadline:
            break
        before = width
        levels = choose_levels(layers, prices_R, goal - max(core.priced, least))
        at_best = bound(layers, levels, prices_R, goal - base, deadline)
        prices_R = at_best.prices_R
        least = max(least, at_best.bound + base)
        for share in _SHARES:
            if least >= goal or (share < 1 and (best_labels is not None or not np.isfinite(goal))):
                continue
            aim = goal if share == 1 else least + share * (goal - least)
            narrow = layers.keep(affordable(layers, levels, at_best, aim - base))
            if (np.diff(narrow.first_T1) == 0).any():  # no path is below
                least = max(least, aim)
                continue
            own = choose_levels(narrow, prices_R, aim - least)
            objective, arcs, lost = _search(narrow, own, prices_R, aim - base, width, deadline)
            if base + objective < aim:
                upper = aim = base + objective
                choice_C = np.empty(len(core.nodes), dtype=np.int64)
                choice_C[narrow.node_T] = narrow.label_K[arcs]
                best_labels = core.labels(choice_C)
                goal = upper - tolerance  # a better incumbent has to be better by this much
            least = max(least, min(base + lost, aim))
            if share == 1:
                layers = narrow
    return CoreResult(best_labels, upper, min(least, upper))


def _search(
    layers: Layers, levels: Levels, prices_R: Floats, upper: float, width: int, deadline: float
) -> tuple[float, Ints, float]:
    """One search: objective and arcs of the best path below ``upper`` (infinite: none), and a bound of what it lost."""
    prices_QR, table_QSM = _tables(layers, levels, prices_R, upper)
    slack = max(rounding(layers, prices) for prices in prices_QR)
    most_SR = _room_left(layers)
    num_rows = len(prices_R)
    left = -int(layers.excess_R[levels.row])
    others = [r for r in range(num_rows) if r != levels.row]
    column = others[0] if others else levels.row
    point, objective, rows_XR = np.zeros(1, np.int64), np.zeros(1), np.zeros((1, num_rows), np.int64)
    trail = []
    lost = np.inf
    for step in range(layers.num_steps):
        if step % 16 == 0 and time.monotonic() > deadline:
            return np.inf, np.zeros(0, dtype=np.int64), -np.inf
        first, end = int(layers.first_T1[step]), int(layers.first_T1[step + 1])
        room = len(point) * int(np.bincount(layers.source_K[first:end] - layers.point_T1[step]).max())
        parent, arc, rank = np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room)
        count = extend(
            point, objective, rows_XR, first, end, layers.source_K, layers.target_K,
            layers.objective_K, layers.rows_KR, most_SR, prices_QR, table_QSM, levels.row, levels.unit, left,
            levels.lowest, upper + slack, parent, arc, rank,
        )  # fmt: skip
        parent, arc, rank = parent[:count], arc[:count], rank[:count]
        if not len(parent):
            return np.inf, np.zeros(0, dtype=np.int64), lost
        point, objective, rows_XR = grown(
            parent, arc, objective, rows_XR, layers.target_K, layers.objective_K, layers.rows_KR
        )
        if len(parent) > 1:
            order = in_order(point, objective, rows_XR, levels.row, column)
            kept = np.flatnonzero(undominated(order, point, objective, rows_XR, column))
            if len(kept) > width:
                by_rank = kept[np.argsort(rank[kept], kind="stable")]
                lost = min(lost, float(rank[by_rank[width]]))
                kept = np.sort(by_rank[:width])
            parent, arc, point, objective = parent[kept], arc[kept], point[kept], objective[kept]
            rows_XR = np.ascontiguousarray(rows_XR[kept])
        trail.append((parent, arc))
    state = int(objective.argmin())
    value = float(objective[state])
    if value >= upper:
        return np.inf, np.zeros(0, dtype=np.int64), lost
    arcs_T = np.zeros(layers.num_steps, dtype=np.int64)
    for step in range(layers.num_steps - 1, -1, -1):
        parent, arc = trail[step]
        arcs_T[step] = arc[state]
        state = int(parent[state])
    return value, arcs_T, lost


def _tables(layers: Layers, levels: Levels, prices_R: Floats, upper: float) -> tuple[Floats, NDArray[np.float64]]:
    """Vectors of prices of the other rows around the best ones, and their tables with all that is constant added.

    The nearest ones are so far off that they lose a share of the distance to the incumbent at the start: a row of
    thousands of amounts supports finer prices than a row of few.
    """
    most = max(1, _MOST_TABLES // max(1, layers.num_points * levels.number))
    spare_SM = np.empty((layers.num_points, levels.number))

    def at(factor: float) -> Floats:
        prices = prices_R * factor
        prices[levels.row] = prices_R[levels.row]
        return prices

    def start(prices: Floats) -> float:
        levels.table(layers, prices, spare_SM)
        return float(spare_SM[0, levels.first]) + constant(layers, prices)

    factors = [1.0]
    if len(prices_R) > 1:
        best = start(prices_R)
        distance = _FURTHEST
        most_loss = max(0.0, _LOSS_SHARE * (upper - best))
        loss = best - start(at(1 + distance))
        while distance > _NEAREST and loss > most_loss:
            # The loss is convex in the distance: a step by the quotient is never too long, by its root it may be.
            distance *= math.sqrt(most_loss / loss) if distance == _FURTHEST else most_loss / loss
            loss = best - start(at(1 + distance))
        distance = max(distance, _NEAREST)
        scale = 1
        while len(factors) + 2 <= most and scale <= _SCALES and distance <= _FURTHEST:
            factors += [1 + distance, 1 - distance]
            distance, scale = distance * _GROWTH, scale + 1
    prices_QR = np.stack([at(factor) for factor in factors])
    table_QSM = np.empty((len(factors), layers.num_points, levels.number))
    for prices, table_SM in zip(prices_QR, table_QSM, strict=True):
        levels.table(layers, prices, table_SM)
        table_SM += constant(layers, prices)
    return prices_QR, table_QSM


def _room_left(layers: Layers) -> Ints:
    """Largest amount of each row that a state at each point may have, shape (S, R)."""
    num_rows = len(layers.excess_R)
    far = np.int64(2**62)
    least_SR = np.full((layers.num_points, num_rows), far)
    least_SR[-1] = 0
    for step in range(layers.num_steps - 1, -1, -1):
        arcs = slice(layers.first_T1[step], layers.first_T1[step + 1])
        after = least_SR[layers.target_K[arcs]]
        rest = np.where(after < far, after + layers.rows_KR[arcs], far)
        np.minimum.at(least_SR, layers.source_K[arcs], rest)
    room_SR: Ints = np.where(least_SR < far, -layers.excess_R - least_SR, -far)
    return np.ascontiguousarray(room_SR)


@compiled(
    "int64(int64[::1],float64[::1],int64[:,::1],int64,int64,int64[::1],int64[::1],float64[::1],int64[:,::1],"
    "int64[:,::1],float64[:,::1],float64[:,:,::1],int64,int64,int64,int64,float64,int64[::1],int64[::1],float64[::1])"
)
def extend(
    point_X: Ints, objective_X: Floats, rows_XR: Ints, first: int, end: int, source_K: Ints, target_K: Ints,
    objective_K: Floats, rows_KR: Ints, most_SR: Ints, prices_QR: Floats, table_QSM: Floats, row: int, unit: int,
    left: int, lowest: int, upper: float, parent_X: Ints, arc_X: Ints, rank_X: Floats,
) -> int:  # fmt: skip
    """Extend states by the arcs of one step; returns how many may lead below ``upper``.

    Their parents, arcs and bounds are written into the last three arrays, which must have room for every arc. The many
    arguments are what numba passes without cost: arrays and numbers, no objects.
    """
    num_rows, last, count = rows_KR.shape[1], table_QSM.shape[2] - 1, 0
    for x in range(len(point_X)):
        for k in range(first, end):
            if source_K[k] != point_X[x]:
                continue
            target = target_K[k]
            over = 0
            for r in range(num_rows):
                if rows_XR[x, r] + rows_KR[k, r] > most_SR[target, r]:
                    over += 1
            if over:
                continue
            objective = objective_X[x] + objective_K[k]
            level = (left - (rows_XR[x, row] + rows_KR[k, row])) // unit - lowest
            level = max(0, min(last, level))
            best = -np.inf
            for vector in range(len(prices_QR)):
                value = objective + table_QSM[vector, target, level]
                for r in range(num_rows):
                    value = value + prices_QR[vector, r] * (rows_XR[x, r] + rows_KR[k, r])
                best = max(best, value)
                if best >= upper:
                    break
            if best < upper:
                parent_X[count] = x
                arc_X[count] = k
                rank_X[count] = best
                count += 1
    return count


@compiled("(int64[::1],int64[::1],float64[::1],int64[:,::1],int64[::1],float64[::1],int64[:,::1])")
def grown(
    parent_X: Ints, arc_X: Ints, objective_X: Floats, rows_XR: Ints, target_K: Ints, objective_K: Floats, rows_KR: Ints
) -> tuple[Ints, Floats, Ints]:
    """Points, objectives and rows of states that are parents extended by arcs."""
    count, num_rows = len(parent_X), rows_XR.shape[1]
    point, objective = np.empty(count, np.int64), np.empty(count)
    rows = np.empty((count, num_rows), np.int64)
    for x in range(count):
        parent, arc = parent_X[x], arc_X[x]
        point[x] = target_K[arc]
        objective[x] = objective_X[parent] + objective_K[arc]
        for r in range(num_rows):
            rows[x, r] = rows_XR[parent, r] + rows_KR[arc, r]
    return point, objective, rows


@compiled("int64[::1](int64[::1],float64[::1],int64[:,::1],int64,int64)")
def in_order(point_X: Ints, objective_X: Floats, rows_XR: Ints, row: int, column: int) -> Ints:
    """States by point, then the row of levels, then another row, then objective; equal ones as they come.

    They are merged run by run: states extended by one arc stay in order.
    """
    count = len(point_X)
    order, other = np.arange(count), np.empty(count, np.int64)
    width = 1
    while width < count:
        for start in range(0, count, 2 * width):
            middle, end = min(start + width, count), min(start + 2 * width, count)
            left, right = start, middle
            for place in range(start, end):
                takes_right = left >= middle
                if right < end and not takes_right:
                    a, b = order[right], order[left]
                    if point_X[a] != point_X[b]:
                        takes_right = point_X[a] < point_X[b]
                    elif rows_XR[a, row] != rows_XR[b, row]:
                        takes_right = rows_XR[a, row] < rows_XR[b, row]
                    elif rows_XR[a, column] != rows_XR[b, column]:
                        takes_right = rows_XR[a, column] < rows_XR[b, column]
                    else:
                        takes_right = objective_X[a] < objective_X[b]
                if takes_right:
                    other[place] = order[right]
                    right += 1
                else:
                    other[place] = order[left]
                    left += 1
        order, other = other, order
        width *= 2
    return order


@compiled("boolean[::1](int64[::1],int64[::1],float64[::1],int64[:,::1],int64)")
def undominated(order_X: Ints, point_X: Ints, objective_X: Floats, rows_XR: Ints, column: int) -> Bools:
    """States that no earlier one in order beats; exact for two rows, where states are in order of the other one.

    For every amount of the row ``column`` the state of least objective with at most this amount is remembered; with
    further rows a state is dropped only if the remembered one is no worse in those, too.
    """
    count = len(order_X)
    keep = np.zeros(count, dtype=np.bool_)
    amounts, holders = np.empty(count, np.int64), np.empty(count, np.int64)
    size, current = 0, -1
    for position in range(count):
        x = order_X[position]
        if point_X[x] != current:
            current, size = point_X[x], 0
        amount, objective = rows_XR[x, column], objective_X[x]
        low, high = 0, size
        while low < high:  # first place with a larger amount
            middle = (low + high) // 2
            if amounts[middle] <= amount:
                low = middle + 1
            else:
                high = middle
        if low:
            holder = holders[low - 1]
            if objective_X[holder] <= objective:
                worse = True
                for r in range(rows_XR.shape[1]):
                    worse = worse and rows_XR[holder, r] <= rows_XR[x, r]
                keep[x] = not worse
                continue
        keep[x] = True
        start = low - 1 if low and amounts[low - 1] == amount else low
        stop = start
        while stop < size and objective_X[holders[stop]] >= objective:
            stop += 1
        if stop == start:
            for place in range(size, start, -1):
                amounts[place], holders[place] = amounts[place - 1], holders[place - 1]
            size += 1
        elif stop > start + 1:
            dropped = stop - start - 1
            for place in range(start + 1, size - dropped):
                amounts[place], holders[place] = amounts[place + dropped], holders[place + dropped]
            size -= dropped
        amounts[start], holders[start] = amount, x
    return keep
