"""Which path through the layers is best within the limits? Label setting with tables of levels as completion bounds.

A state is a point of the layers with the objective and the rows so far. Its bound is the best of several: one table of
levels for each of some vectors of prices. A state goes if its bound reaches the incumbent, if no completion meets the
limits, or if another state of the same point is at least as good in everything.

Axes: X states, K arcs, S points, M levels, R limit rows, Q vectors of prices.

Source: resource-constrained shortest paths by label setting (Irnich and Desaulniers 2005); the bounds are ours.
"""

import time
from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import numpy as np

from qsync_opt.formulations.assignment.core import Core
from qsync_opt.formulations.assignment.frontier import FrontierResult
from qsync_opt.formulations.assignment.layers import Layers, lay_out
from qsync_opt.formulations.assignment.levels import Levels, bound, choose_levels, constant, fixed, rounding
from qsync_opt.formulations.assignment.model import Bools, Floats, Ints
from qsync_opt.formulations.compiled import compiled

_FACTORS = (1.0, 0.5, 0.8, 0.9, 1.1, 1.25, 2.0)
"""Prices of the other rows, as multiples of the best."""
_MOST_TABLES = 30_000_000
"""Entries of all tables together."""


@dataclass(slots=True)
class _States:
    point: Ints
    objective: Floats
    rows_XR: Ints
    rank: Floats
    parent: Ints
    arc: Ints


def _extend_plain(
    point_X: Ints, objective_X: Floats, rows_XR: Ints, first: int, end: int, source_K: Ints, target_K: Ints,
    objective_K: Floats, rows_KR: Ints, most_SR: Ints, prices_QR: Floats, table_QSM: Floats, row: int, unit: int,
    left: int, lowest: int, upper: float,
) -> tuple[Ints, Ints, Floats]:  # fmt: skip
    parent, arc = np.nonzero(point_X[:, None] == source_K[None, first:end])
    arc = arc + first
    rows = rows_XR[parent] + rows_KR[arc]
    fits = (rows <= most_SR[target_K[arc]]).all(axis=1)
    parent, arc, rows = parent[fits], arc[fits], rows[fits]
    objective = objective_X[parent] + objective_K[arc]
    level = np.clip((left - rows[:, row]) // unit - lowest, 0, table_QSM.shape[2] - 1)
    rank = np.full(len(parent), -np.inf)
    for vector in range(len(prices_QR)):
        value = objective + table_QSM[vector, target_K[arc], level]
        for r in range(rows_KR.shape[1]):
            value = value + prices_QR[vector, r] * rows[:, r]
        rank = np.maximum(rank, value)
    kept = rank < upper
    return parent[kept], arc[kept], rank[kept]


@compiled(
    "Tuple((int64[::1],int64[::1],float64[::1]))(int64[::1],float64[::1],int64[:,::1],int64,int64,int64[::1],"
    "int64[::1],float64[::1],int64[:,::1],int64[:,::1],float64[:,::1],float64[:,:,::1],int64,int64,int64,int64,float64)",
    plain=_extend_plain,
)
def _extend(
    point_X: Ints, objective_X: Floats, rows_XR: Ints, first: int, end: int, source_K: Ints, target_K: Ints,
    objective_K: Floats, rows_KR: Ints, most_SR: Ints, prices_QR: Floats, table_QSM: Floats, row: int, unit: int,
    left: int, lowest: int, upper: float,
) -> tuple[Ints, Ints, Floats]:  # fmt: skip
    """Extend states by the arcs of one step: parents, arcs and bounds of those that may lead below ``upper``."""
    room = 2 * len(point_X) + 16
    parent, arc, rank = np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room)
    num_rows, last, count = rows_KR.shape[1], table_QSM.shape[2] - 1, 0
    rows = np.empty(num_rows, np.int64)
    for x in range(len(point_X)):
        for k in range(first, end):
            if source_K[k] != point_X[x]:
                continue
            target = target_K[k]
            fits = True
            for r in range(num_rows):
                rows[r] = rows_XR[x, r] + rows_KR[k, r]
                fits = fits and rows[r] <= most_SR[target, r]
            if not fits:
                continue
            objective = objective_X[x] + objective_K[k]
            level = max(0, min(last, (left - rows[row]) // unit - lowest))
            best = -np.inf
            for vector in range(len(prices_QR)):
                value = objective + table_QSM[vector, target, level]
                for r in range(num_rows):
                    value = value + prices_QR[vector, r] * rows[r]
                best = max(best, value)
                if best >= upper:
                    break
            if best < upper:
                if count == room:
                    room *= 2
                    wider, wider_arc, wider_rank = np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room)
                    wider[:count], wider_arc[:count], wider_rank[:count] = parent, arc, rank
                    parent, arc, rank = wider, wider_arc, wider_rank
                parent[count], arc[count], rank[count] = x, k, best
                count += 1
    return parent[:count].copy(), arc[:count].copy(), rank[:count].copy()


def _undominated_plain(order_X: Ints, point_X: Ints, objective_X: Floats, rows_XR: Ints, column: int) -> Bools:
    keep = np.zeros(len(order_X), dtype=np.bool_)
    points, objectives, rows = point_X.tolist(), objective_X.tolist(), rows_XR.tolist()
    amounts: list[int] = []
    holders: list[int] = []
    current = -1
    for x in order_X.tolist():
        if points[x] != current:
            current = points[x]
            amounts.clear()
            holders.clear()
        amount, objective = rows[x][column], objectives[x]
        place = bisect_right(amounts, amount)
        if place:
            holder = holders[place - 1]
            if objectives[holder] <= objective:
                if all(a <= b for a, b in zip(rows[holder], rows[x], strict=True)):
                    continue
                keep[x] = True
                continue
        keep[x] = True
        start = bisect_left(amounts, amount)
        stop = start
        while stop < len(holders) and objectives[holders[stop]] >= objective:
            stop += 1
        amounts[start:stop] = [amount]
        holders[start:stop] = [x]
    return keep


@compiled(
    "boolean[::1](int64[::1],int64[::1],float64[::1],int64[:,::1],int64)", plain=_undominated_plain
)
def _undominated(order_X: Ints, point_X: Ints, objective_X: Floats, rows_XR: Ints, column: int) -> Bools:
    """States that no earlier one in order beats; exact for two rows, where states are in order of the other one.

    For every amount of the row ``column`` the state of least objective with at most this amount is held; with further
    rows a state goes only if the one held is no worse in those, too.
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
            gone = stop - start - 1
            for place in range(start + 1, size - gone):
                amounts[place], holders[place] = amounts[place + gone], holders[place + gone]
            size -= gone
        amounts[start], holders[start] = amount, x
    return keep


def _room_left(layers: Layers) -> Ints:
    """Most that a state at each point may have used up of each row, shape (S, R)."""
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


def walk(core: Core, upper: float, most_states: tuple[int, ...], deadline: float = np.inf) -> FrontierResult | None:
    """Best labelling of a core within the limits, by wider and wider searches.

    Args:
        core: The undecided part, not counted in copies.
        upper: Only labellings below this count.
        most_states: Most states kept after a step, for each search.
        deadline: ``time.monotonic()`` value at which to give up.

    Returns:
        The best labelling found below ``upper``, and a lower bound; None if the core cannot be laid out.
    """
    whole = lay_out(core)
    if whole is None or not len(core.excess_R):
        return None
    layers, taken, choice_C = whole, 0.0, np.zeros(len(core.nodes), dtype=np.int64)
    best_labels: Ints | None = None
    least = -np.inf
    prices_R = core.prices_R
    for width in most_states:
        levels = choose_levels(layers, prices_R, upper - core.priced)
        found = bound(layers, levels, prices_R, upper - core.objective - taken, deadline)
        prices_R = found.prices_R
        least = max(least, min(found.bound + core.objective + taken, upper))
        if least >= upper or time.monotonic() > deadline:
            break
        kept_K = fixed(layers, levels, found, upper - core.objective - taken)
        layers = layers.keep(kept_K)
        if (np.diff(layers.first_T1) == 0).any():
            least = upper
            break
        before = layers
        layers, added, forced = layers.without_forced()
        step_T = before.step_K[forced]
        choice_C[before.node_T[step_T]] = before.label_K[forced]
        taken += added
        if not layers.num_steps:
            if (layers.excess_R <= 0).all() and core.objective + taken < upper:
                upper, best_labels = core.objective + taken, core.labels(choice_C)
            least = upper
            break
        levels = choose_levels(layers, prices_R, upper - least)
        objective, arcs, lost = _search(layers, levels, prices_R, upper - core.objective - taken, width, deadline)
        if len(arcs):
            upper = core.objective + taken + objective
            chosen_C = choice_C.copy()
            chosen_C[layers.node_T] = layers.label_K[arcs]
            best_labels = core.labels(chosen_C)
        least = max(least, min(lost + core.objective + taken, upper))
        if least >= upper:
            break
    return FrontierResult(best_labels, upper, least, 0)


def _search(
    layers: Layers, levels: Levels, prices_R: Floats, upper: float, width: int, deadline: float
) -> tuple[float, Ints, float]:
    """One search: objective and arcs of the best path below ``upper`` (none: no arcs), and the bound of what it lost."""
    factors = _FACTORS if len(prices_R) > 1 else (1.0,)
    count = max(1, min(len(factors), _MOST_TABLES // max(1, layers.num_points * levels.number)))
    prices_QR = np.array(factors[:count])[:, None] * prices_R
    prices_QR[:, levels.row] = prices_R[levels.row]
    table_QSM = np.empty((count, layers.num_points, levels.number))
    for prices, table_SM in zip(prices_QR, table_QSM, strict=True):
        levels.table(layers, prices, table_SM)
        table_SM += constant(layers, prices)
    slack = max(rounding(layers, prices, upper) for prices in prices_QR)
    most_SR = _room_left(layers)
    num_rows = len(prices_R)
    left = -int(layers.excess_R[levels.row])
    others = [r for r in range(num_rows) if r != levels.row]
    column = others[0] if others else levels.row
    states = _States(
        np.zeros(1, dtype=np.int64), np.zeros(1), np.zeros((1, num_rows), dtype=np.int64), np.zeros(1),
        np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64),
    )  # fmt: skip
    trail = []
    lost = np.inf
    for step in range(layers.num_steps):
        if step % 16 == 0 and time.monotonic() > deadline:
            return upper, np.zeros(0, dtype=np.int64), -np.inf
        parent, arc, rank = _extend(
            states.point, states.objective, states.rows_XR, int(layers.first_T1[step]), int(layers.first_T1[step + 1]),
            layers.source_K, layers.target_K, layers.objective_K, layers.rows_KR, most_SR, prices_QR, table_QSM,
            levels.row, levels.unit, left, levels.lowest, upper + slack,
        )  # fmt: skip
        if not len(parent):
            return upper, np.zeros(0, dtype=np.int64), lost
        point = layers.target_K[arc]
        objective = states.objective[parent] + layers.objective_K[arc]
        rows_XR = states.rows_XR[parent] + layers.rows_KR[arc]
        if len(parent) > 1:
            order = np.lexsort((objective, rows_XR[:, column], rows_XR[:, levels.row], point))
            kept = np.flatnonzero(_undominated(order, point, objective, rows_XR, column))
            if len(kept) > width:
                by_rank = kept[np.argsort(rank[kept], kind="stable")]
                lost = min(lost, float(rank[by_rank[width]]))
                kept = np.sort(by_rank[:width])
            parent, arc, point, objective = parent[kept], arc[kept], point[kept], objective[kept]
            rows_XR, rank = np.ascontiguousarray(rows_XR[kept]), rank[kept]
        states = _States(point, objective, rows_XR, rank, parent, arc)
        trail.append((parent, arc))
    state = int(states.objective.argmin())
    value = float(states.objective[state])
    if value >= upper:
        return upper, np.zeros(0, dtype=np.int64), lost
    arcs_T = np.zeros(layers.num_steps, dtype=np.int64)
    for step in range(layers.num_steps - 1, -1, -1):
        parent, arc = trail[step]
        arcs_T[step] = arc[state]
        state = int(parent[state])
    return value, arcs_T, lost
