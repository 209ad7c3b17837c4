"""Which labelling of the core is best within the limits? Dynamic programming over partial labellings with bounds.

Core nodes are taken one after the other. A state is a partial labelling: the labels of the taken nodes that still have
untaken neighbours, the objective so far and the rows so far. A state goes if its priced cost plus the least priced cost
of the rest reaches the incumbent, if no completion can meet the limits, or if another state with the same open labels
is at least as good in everything. If none goes for lack of room, the best complete state is the proved optimum.

Axes: K states, A labels of the node being taken, R limit rows, D open nodes.
"""

from dataclasses import dataclass

import numpy as np

from qsync_opt.formulations.assignment.core import Core, CoreEdge
from qsync_opt.formulations.assignment.model import Bools, Floats, Ints

_MAX_COMPLETION_ENTRIES = 4096


@dataclass(slots=True)
class FrontierResult:
    """The best labelling found, if any beats the incumbent, and a bound.

    ``bound``: no labelling of the core that meets the limits is below it, unless it is at or above the incumbent given.
    """

    labels_N: Ints | None
    objective: float
    bound: float
    steps: int


@dataclass(slots=True)
class _Step:
    """Taking one node: edges to open nodes, which open nodes stay, and the least priced completion afterwards."""

    position: int
    edges: list[tuple[int, CoreEdge, bool]]  # (slot of the open node, edge, whether the node taken is its first)
    kept: list[int]  # slots that stay open; the node taken has the last slot
    sizes: tuple[int, ...]  # label counts of the open nodes before
    completion: Floats  # over the labels of the kept slots


def _order(core: Core, prices_R: Floats) -> list[list[int]]:
    """Connected parts of the core, each in node order; parts with dear deviations first, fine ones last."""
    near: list[list[int]] = [[] for _ in core.nodes]
    for edge in core.edges:
        near[edge.first].append(edge.second)
        near[edge.second].append(edge.first)
    seen = [False] * len(near)
    parts = []
    for start in range(len(near)):
        if not seen[start]:
            seen[start] = True
            part, stack = [], [start]
            while stack:
                item = stack.pop()
                part.append(item)
                for other in near[item]:
                    if not seen[other]:
                        seen[other] = True
                        stack.append(other)
            parts.append(sorted(part))

    def fineness(part: list[int]) -> tuple[float, int]:
        moves = [np.abs(core.nodes[c].rows_AR[1:] @ prices_R).max(initial=0.0) for c in part]
        return -max(moves), part[0]

    return sorted(parts, key=fineness)


def _steps(core: Core, prices_R: Floats, order: list[int]) -> tuple[list[_Step], float]:
    """Plan the order and compute least priced completions backwards; the least priced deviation of all comes last."""
    place = {c: i for i, c in enumerate(order)}
    touching: list[list[CoreEdge]] = [[] for _ in core.nodes]
    last = list(range(len(order)))
    for edge in core.edges:
        touching[edge.first].append(edge)
        touching[edge.second].append(edge)
        one, two = place[edge.first], place[edge.second]
        last[one], last[two] = max(last[one], two), max(last[two], one)
    open_nodes: list[int] = []
    drafts = []
    for step, c in enumerate(order):
        edges = []
        for edge in touching[c]:
            other = edge.second if edge.first == c else edge.first
            if place[other] < step:
                edges.append((open_nodes.index(other), edge, edge.first == c))
        sizes = tuple(len(core.nodes[o].labels_A) for o in open_nodes)
        after = [*open_nodes, c]
        kept = [slot for slot, o in enumerate(after) if last[place[o]] > step]
        drafts.append((c, edges, kept, sizes))
        open_nodes = [after[slot] for slot in kept]
    steps = []
    completion = np.zeros(())
    for c, edges, kept, sizes in reversed(drafts):
        steps.append(_Step(c, edges, kept, sizes, completion))
        node = core.nodes[c]
        shape = (*sizes, len(node.labels_A))
        if int(np.prod(shape, dtype=np.int64)) > _MAX_COMPLETION_ENTRIES:
            least = sum(float(_priced(edge, prices_R).min()) for _, edge, _ in edges)
            value = completion.min() + (node.objective_A + node.rows_AR @ prices_R).min() + least
            completion = np.full((1,) * len(sizes), value)
            continue
        absent = tuple(axis for axis in range(len(shape)) if axis not in kept)
        table = np.expand_dims(completion, absent) + (node.objective_A + node.rows_AR @ prices_R)
        for slot, edge, is_first in edges:
            own = _priced(edge, prices_R)
            view = [1] * len(shape)
            view[slot], view[-1] = sizes[slot], len(node.labels_A)
            table = table + (own.T if is_first else own).reshape(view)
        completion = table.min(axis=-1)
    return steps[::-1], float(completion.min())


def _priced(edge: CoreEdge, prices_R: Floats) -> Floats:
    cost: Floats = edge.objective_AB + edge.rows_ABR @ prices_R
    return cost


def _future_rows(core: Core, order: list[int]) -> Ints:
    """Least that nodes and edges from each step on can add to each row, shape (steps + 1, R)."""
    place = {c: i for i, c in enumerate(order)}
    least = np.zeros((len(order) + 1, len(core.excess_R)), dtype=np.int64)
    for step, c in enumerate(order):
        least[step] += core.nodes[c].rows_AR.min(axis=0)
    for edge in core.edges:
        least[max(place[edge.first], place[edge.second])] += edge.rows_ABR.min(axis=(0, 1))
    result: Ints = np.cumsum(least[::-1], axis=0)[::-1]
    return result


def search(core: Core, prices_R: Floats, upper: float, width: int, *, spread: bool) -> FrontierResult:
    """Best labelling of the core within the limits, with at most ``width`` states at a time.

    Args:
        core: The undecided part.
        prices_R: Prices of the limits, to bound and to rank states.
        upper: Only labellings below this count.
        width: Most states kept after a step.
        spread: Keep states that differ in their rows rather than only those of least priced cost.

    Returns:
        The best labelling found below ``upper``, and a lower bound.

    Source: bounded dynamic programming over a path decomposition (as for knapsack cores, Pisinger 1997); ours.
    """
    order = [c for part in _order(core, prices_R) for c in part]
    steps, _ = _steps(core, prices_R, order)
    future = _future_rows(core, order)
    base_priced = core.objective + float(core.excess_R @ prices_R)
    objective, rows = np.zeros(1), np.zeros((1, len(core.excess_R)), dtype=np.int64)
    open_KD = np.zeros((1, 0), dtype=np.int64)
    trail: list[tuple[Ints, Ints]] = []
    lost = np.inf
    for number, step in enumerate(steps):
        node = core.nodes[step.position]
        objective_KA = objective[:, None] + node.objective_A
        rows_KAR = rows[:, None] + node.rows_AR
        for slot, edge, is_first in step.edges:
            own, own_rows = edge.objective_AB, edge.rows_ABR
            if is_first:
                own, own_rows = own.T, own_rows.transpose(1, 0, 2)
            objective_KA = objective_KA + own[open_KD[:, slot]]
            rows_KAR = rows_KAR + own_rows[open_KD[:, slot]]
        completion, after_KAD = _after(step, open_KD, len(node.labels_A))
        rank_KA = base_priced + objective_KA + rows_KAR @ prices_R + completion
        alive = (rank_KA < upper) & (core.excess_R + rows_KAR + future[number + 1] <= 0).all(axis=2)
        parent, label = np.nonzero(alive)
        if not len(parent):
            return FrontierResult(None, upper, min(lost, upper), number)
        objective, rows, rank = objective_KA[parent, label], rows_KAR[parent, label], rank_KA[parent, label]
        open_KD = after_KAD[parent, label]
        code = _code(open_KD)
        kept = undominated(code, objective, rows)
        if len(kept) > width:
            chosen = _select(rank[kept], rows[kept], code[kept], prices_R, width, spread=spread)
            gone = np.ones(len(kept), dtype=np.bool_)
            gone[chosen] = False
            lost = min(lost, float(rank[kept[gone]].min()))
            kept = kept[chosen]
        objective, rows, open_KD = objective[kept], rows[kept], open_KD[kept]
        trail.append((parent[kept], label[kept]))
    best = int(objective.argmin())
    value = core.objective + float(objective[best])
    if value >= upper:
        return FrontierResult(None, upper, min(lost, upper), len(steps))
    choice_C = np.zeros(len(core.nodes), dtype=np.int64)
    state = best
    for step, (parent, label) in zip(reversed(steps), reversed(trail), strict=True):
        choice_C[step.position] = label[state]
        state = parent[state]
    return FrontierResult(core.labels(choice_C), value, min(lost, value), len(steps))


def _after(step: _Step, open_KD: Ints, num_labels: int) -> tuple[Floats, Ints]:
    """Least priced completion, and the labels that stay open, for every state and label of the node taken."""
    num_states = len(open_KD)
    full = np.empty((num_states, num_labels, open_KD.shape[1] + 1), dtype=np.int64)
    full[:, :, :-1] = open_KD[:, None]
    full[:, :, -1] = np.arange(num_labels)
    after_KAD = full[:, :, step.kept]
    if step.completion.size == 1:
        return step.completion.reshape(1, 1), after_KAD
    return step.completion[tuple(after_KAD[:, :, d] for d in range(len(step.kept)))], after_KAD


def _code(open_KD: Ints) -> Ints:
    """One number per combination of open labels."""
    code = np.zeros(len(open_KD), dtype=np.int64)
    if open_KD.shape[1]:
        for column in open_KD.T:
            code = code * (int(column.max()) + 1) + column
        if open_KD.shape[1] > 12:
            code = np.unique(open_KD, axis=0, return_inverse=True)[1].reshape(-1)
    return code


def undominated(code_K: Ints, objective_K: Floats, rows_KR: Ints) -> Ints:
    """States that no other state with the same code is at least as good as, in objective and every row.

    Exact for one row; with more rows it compares each state with its predecessors in a few sorted orders, so it may keep
    dominated states but never drops an undominated one.
    """
    if not rows_KR.shape[1]:
        order = np.lexsort((objective_K, code_K))
        return order[np.flatnonzero(np.diff(code_K[order], prepend=code_K[order[:1]] - 1))]
    order = np.lexsort((*rows_KR.T[1:], objective_K, rows_KR[:, 0], code_K))
    alive = np.arange(len(order))
    for distance in (1, 2, 3, 5, 8):
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


def _select(rank_K: Floats, rows_KR: Ints, code_K: Ints, prices_R: Floats, width: int, *, spread: bool) -> Ints:
    """Which states stay: the best ranked, or the best ranked of each cell of a grid over code and priced rows."""
    by_rank = np.argsort(rank_K, kind="stable")
    if not spread:
        return by_rank[:width]
    cell = code_K
    weighted = rows_KR * prices_R
    side = max(2, int(round((width / max(1, len(np.unique(code_K)))) ** (1 / max(1, int((prices_R > 0).sum()))))))
    for row in np.flatnonzero(prices_R > 0).tolist():
        low, high = weighted[:, row].min(), weighted[:, row].max()
        step = (weighted[:, row] - low) * ((side - 1e-9) / (high - low)) if high > low else np.zeros(len(cell))
        cell = cell * side + step.astype(np.int64)
    _, leaders = np.unique(cell[by_rank], return_index=True)
    leaders = by_rank[np.sort(leaders)][: width // 2]
    rest = by_rank[~np.isin(by_rank, leaders)][: width - len(leaders)]
    return np.concatenate([leaders, rest])
