"""Which states of a core search go on, and which ones does another one beat? The loops that take most of its time.

Axes: K states, A labels of the node being taken, R limit rows.
"""

import numpy as np

from qsync_opt.formulations.assignment.compiled import compiled
from qsync_opt.formulations.assignment.model import Bools, Floats, Ints

_DISTANCES = (1, 2, 3, 5, 8)
"""How far back in sorted order each state is compared."""


def _undominated_plain(code_K: Ints, objective_K: Floats, rows_KR: Ints) -> Ints:
    if not rows_KR.shape[1]:
        order = np.lexsort((objective_K, code_K))
        return order[np.flatnonzero(np.diff(code_K[order], prepend=code_K[order[:1]] - 1))]
    order = np.lexsort((*rows_KR.T[1:], objective_K, rows_KR[:, 0], code_K))
    alive = np.arange(len(order))
    for distance in _DISTANCES:
        if len(alive) <= distance:
            break
        ordered = order[alive]
        before, after = ordered[:-distance], ordered[distance:]
        worse = (
            (code_K[before] == code_K[after])
            & (objective_K[before] <= objective_K[after])
            & (rows_KR[before] <= rows_KR[after]).all(axis=1)
        )
        alive = alive[np.concatenate([np.ones(distance, dtype=np.bool_), ~worse])]
    if rows_KR.shape[1] == 1:
        alive = alive[_falling(code_K[order[alive]], objective_K[order[alive]])]
    return order[alive]


def _falling(code_K: Ints, objective_K: Floats) -> Bools:
    """In order of the only row: states whose objective is below that of all before them with the same code."""
    keep = np.ones(len(code_K), dtype=np.bool_)
    starts = np.flatnonzero(np.diff(code_K, prepend=code_K[:1] - 1))
    for start, end in zip(starts, np.append(starts[1:], len(code_K)), strict=True):
        part = objective_K[start:end]
        keep[start + 1 : end] = part[1:] < np.minimum.accumulate(part)[:-1]
    return keep


@compiled("int64[::1](int64[::1],float64[::1],int64[:,::1])", plain=_undominated_plain)
def undominated(code_K: Ints, objective_K: Floats, rows_KR: Ints) -> Ints:
    """States that no other state with the same code is at least as good as, in objective and every row.

    Exact for one row; with more rows it compares each state with a few predecessors in sorted order, so it may keep
    dominated states but never drops an undominated one.
    """
    count, rows = rows_KR.shape
    order, other = np.arange(count), np.empty(count, dtype=np.int64)
    width = 1
    while width < count:  # merges runs, so equal states stay in their order
        for start in range(0, count, 2 * width):
            middle, end = min(start + width, count), min(start + 2 * width, count)
            left, right = start, middle
            for place in range(start, end):
                if left == middle:
                    first = False
                elif right == end:
                    first = True
                else:
                    a, b = order[left], order[right]
                    first = True
                    if code_K[a] != code_K[b]:
                        first = code_K[a] < code_K[b]
                    elif rows and rows_KR[a, 0] != rows_KR[b, 0]:
                        first = rows_KR[a, 0] < rows_KR[b, 0]
                    elif objective_K[a] != objective_K[b]:
                        first = objective_K[a] < objective_K[b]
                    else:
                        for r in range(rows - 1, 0, -1):
                            if rows_KR[a, r] != rows_KR[b, r]:
                                first = rows_KR[a, r] < rows_KR[b, r]
                                break
                if first:
                    other[place] = order[left]
                    left += 1
                else:
                    other[place] = order[right]
                    right += 1
        order, other = other, order
        width *= 2
    left = count
    for distance in _DISTANCES:
        if left <= distance or (not rows and distance > 1):
            break
        kept = 0
        for place in range(left):
            k, worse = order[place], False
            if not rows:
                worse = place > 0 and code_K[order[place - 1]] == code_K[k]
            elif place >= distance:
                before = order[place - distance]
                worse = code_K[before] == code_K[k] and objective_K[before] <= objective_K[k]
                for r in range(rows):
                    worse = worse and rows_KR[before, r] <= rows_KR[k, r]
            if not worse:
                other[kept] = k
                kept += 1
        order, other, left = other, order, kept
    if rows == 1:
        kept, least = 0, np.inf
        for place in range(left):
            k = order[place]
            heads = place == 0 or code_K[order[place - 1]] != code_K[k]
            if heads or objective_K[k] < least:
                other[kept] = k
                kept += 1
                least = objective_K[k]
        order, left = other, kept
    return order[:left].copy()


def _extend_plain(
    priced_K: Floats, rows_KR: Ints, priced_A: Floats, rows_AR: Ints, base: float, completion: float, upper: float,
    slack_R: Ints,
) -> tuple[Ints, Ints, Floats]:  # fmt: skip
    rank_KA = base + (priced_K[:, None] + priced_A) + completion
    alive = (rank_KA < upper) & (rows_KR[:, None] + rows_AR <= slack_R).all(axis=2)
    parent, label = np.nonzero(alive)
    return parent, label, rank_KA[parent, label]


@compiled(
    "(float64[::1],int64[:,::1],float64[::1],int64[:,::1],float64,float64,float64,int64[::1])",
    plain=_extend_plain,
)
def extend(
    priced_K: Floats, rows_KR: Ints, priced_A: Floats, rows_AR: Ints, base: float, completion: float, upper: float,
    slack_R: Ints,
) -> tuple[Ints, Ints, Floats]:  # fmt: skip
    """States by labels of a node without edges that stay below a value and within the rows: parent, label, rank."""
    count = 0
    parent, label = np.empty(len(priced_K) * len(priced_A), np.int64), np.empty(len(priced_K) * len(priced_A), np.int64)
    rank = np.empty(len(priced_K) * len(priced_A))
    for k in range(len(priced_K)):
        for a in range(len(priced_A)):
            value = base + (priced_K[k] + priced_A[a]) + completion
            alive = value < upper
            for r in range(len(slack_R)):
                alive = alive and rows_KR[k, r] + rows_AR[a, r] <= slack_R[r]
            if alive:
                parent[count], label[count], rank[count] = k, a, value
                count += 1
    return parent[:count].copy(), label[:count].copy(), rank[:count].copy()


def _leaders_plain(cell_K: Ints, most: int) -> Bools:
    grouped = np.argsort(cell_K, kind="stable")
    ordered = cell_K[grouped]
    first = np.sort(grouped[np.concatenate([[True], ordered[1:] != ordered[:-1]])])
    leads = np.zeros(len(cell_K), dtype=np.bool_)
    leads[first[:most]] = True
    return leads


@compiled("boolean[::1](int64[::1],int64)", plain=_leaders_plain)
def leaders(cell_K: Ints, most: int) -> Bools:
    """The first state of each cell, of so many cells at most."""
    size = 2
    while size < 2 * len(cell_K):
        size *= 2
    slot = np.full(size, -1, dtype=np.int64)
    leads = np.zeros(len(cell_K), dtype=np.bool_)
    found = 0
    for k in range(len(cell_K)):
        if found == most:
            break
        cell = cell_K[k]
        at = (cell ^ (cell >> 17)) & (size - 1)
        while slot[at] >= 0 and cell_K[slot[at]] != cell:
            at = (at + 1) & (size - 1)
        if slot[at] < 0:
            slot[at] = k
            leads[k] = True
            found += 1
    return leads
