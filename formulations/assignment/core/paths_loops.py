"""The inner loops of `walk`: states extended by the arcs of a step, and those left that no other one beats.

Axes: X states, K arcs, S points, M levels, R limit rows, Q vectors of prices.
"""

from bisect import bisect_left, bisect_right

import numpy as np

from qsync_opt.formulations.assignment.compiled import compiled
from qsync_opt.formulations.assignment.model import Bools, Floats, Ints


def _extend_plain(
    point_X: Ints, objective_X: Floats, rows_XR: Ints, first: int, end: int, source_K: Ints, target_K: Ints,
    objective_K: Floats, rows_KR: Ints, most_SR: Ints, prices_QR: Floats, table_QSM: Floats, row: int, unit: int,
    left: int, lowest: int, upper: float, parent_X: Ints, arc_X: Ints, rank_X: Floats,
) -> int:  # fmt: skip
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
    count = int(kept.sum())
    parent_X[:count], arc_X[:count], rank_X[:count] = parent[kept], arc[kept], rank[kept]
    return count


@compiled(
    "int64(int64[::1],float64[::1],int64[:,::1],int64,int64,int64[::1],int64[::1],float64[::1],int64[:,::1],"
    "int64[:,::1],float64[:,::1],float64[:,:,::1],int64,int64,int64,int64,float64,int64[::1],int64[::1],float64[::1])",
    plain=_extend_plain,
)
def extend(
    point_X: Ints, objective_X: Floats, rows_XR: Ints, first: int, end: int, source_K: Ints, target_K: Ints,
    objective_K: Floats, rows_KR: Ints, most_SR: Ints, prices_QR: Floats, table_QSM: Floats, row: int, unit: int,
    left: int, lowest: int, upper: float, parent_X: Ints, arc_X: Ints, rank_X: Floats,
) -> int:  # fmt: skip
    """Extend states by the arcs of one step; returns how many may lead below ``upper``.

    Their parents, arcs and bounds are written into the last three arrays, which must have room for every arc.
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


def _grown_plain(
    parent_X: Ints, arc_X: Ints, objective_X: Floats, rows_XR: Ints, target_K: Ints, objective_K: Floats, rows_KR: Ints
) -> tuple[Ints, Floats, Ints]:
    return target_K[arc_X], objective_X[parent_X] + objective_K[arc_X], rows_XR[parent_X] + rows_KR[arc_X]


@compiled("(int64[::1],int64[::1],float64[::1],int64[:,::1],int64[::1],float64[::1],int64[:,::1])", plain=_grown_plain)
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


def _in_order_plain(point_X: Ints, objective_X: Floats, rows_XR: Ints, row: int, column: int) -> Ints:
    return np.lexsort((objective_X, rows_XR[:, column], rows_XR[:, row], point_X))


@compiled("int64[::1](int64[::1],float64[::1],int64[:,::1],int64,int64)", plain=_in_order_plain)
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


@compiled("boolean[::1](int64[::1],int64[::1],float64[::1],int64[:,::1],int64)", plain=_undominated_plain)
def undominated(order_X: Ints, point_X: Ints, objective_X: Floats, rows_XR: Ints, column: int) -> Bools:
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
