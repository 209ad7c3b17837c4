"""Best labelling of a core within the limits, by dynamic programming over partial labellings with bounds.

Core nodes are added one after the other. A state is a partial labelling: the labels of the open nodes (those with
neighbours still to be added), the objective so far and the rows so far. A state is dropped if its priced cost plus the
least priced cost of the rest reaches the incumbent, if no completion can meet the limits, or if another state with the
same open labels is at least as good in everything. If none is dropped for lack of room, the best complete state is a
proved optimum.

Axes: K states, A labels of the node being added, R limit rows, D open nodes.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from qsync_opt.formulations.assignment.compiled import compiled
from qsync_opt.formulations.assignment.core.core import Core, CoreEdge, CoreResult
from qsync_opt.formulations.assignment.model import Floats, Ints

_DISTANCES = (1, 2, 3, 5, 8)
"""Distances in sorted order at which states are compared."""
_MAX_COMPLETION_ENTRIES = 4096
_MAX_AXES = 30
"""With more open nodes completions are not distinguished; numpy before 2.0 has at most 32 axes."""
_MAX_CODE = 1 << 40


def search(core: Core, upper: float, width: int, *, spread: bool, deadline: float = np.inf) -> CoreResult:
    """Best labelling of the core within the limits, with at most ``width`` states at a time.

    Args:
        core: The undecided part.
        upper: Only labellings below this count.
        width: Most states kept after a step.
        spread: Keep states that differ in their rows rather than only those of least priced cost.
        deadline: ``time.monotonic()`` value at which to stop.

    Returns:
        The best labelling found below ``upper``, and a lower bound.

    Source: bounded dynamic programming over a path decomposition (as for knapsack cores, Pisinger 1997); ours.
    """
    order = order_of(core)
    steps = _steps(core, order)
    future, last_R = _row_use(core, order)
    states = _States(
        objective=np.zeros(1), priced=np.zeros(1), rows=np.zeros((1, len(core.excess_R)), dtype=np.int64),
        open_KD=np.zeros((1, 0), dtype=np.int64),
    )  # fmt: skip
    trail: list[tuple[Ints, Ints]] = []
    lost = np.inf
    for number, step in enumerate(steps):
        if number % 64 == 0 and time.monotonic() > deadline:
            return CoreResult(None, upper, -np.inf)
        over = (last_R < number) & (last_R >= 0)
        if over.any():  # a limit that no further node touches holds, so states need not differ in it
            states.rows[:, over] = 0
        slack_R = np.where(over, 0, -core.excess_R - future[number + 1])
        states, parent, label, dropped = _add_node(core, step, states, slack_R, upper, width, spread=spread)
        lost = min(lost, dropped)
        if not len(parent):
            return CoreResult(None, upper, min(lost, upper))
        trail.append((parent, label))
    state = int(states.objective.argmin())
    value = core.objective + float(states.objective[state])
    if value >= upper:
        return CoreResult(None, upper, min(lost, upper))
    choice_C = np.zeros(len(core.nodes), dtype=np.int64)
    for step, (parent, label) in zip(reversed(steps), reversed(trail), strict=True):
        choice_C[step.position] = label[state]
        state = int(parent[state])
    return CoreResult(core.labels(choice_C), value, min(lost, value))


@dataclass(slots=True, kw_only=True)
class _States:
    """Partial labellings, as differences to the base."""

    objective: Floats
    priced: Floats
    rows: Ints
    open_KD: Ints


@dataclass(slots=True)
class _Step:
    """Adding one node: edges to open nodes, which nodes stay open, and the least priced completion afterwards."""

    position: int
    edges: list[tuple[int, CoreEdge, bool]]  # (slot of the open node, edge, whether the new node is its first)
    kept: list[int]  # slots that stay open; the new node has the last slot
    sizes: tuple[int, ...]  # label counts of the open nodes before
    completion: Floats  # over the labels of the kept slots


def _add_node(
    core: Core, step: _Step, states: _States, slack_R: Ints, upper: float, width: int, *, spread: bool
) -> tuple[_States, Ints, Ints, float]:
    """Extend every state by every label of a node; returns those kept, their parents and labels, and what was lost."""
    node, open_KD = core.nodes[step.position], states.open_KD
    if not open_KD.shape[1] and not step.kept:
        parent, label, rank = extend(
            states.priced, states.rows, node.priced_A, np.ascontiguousarray(node.rows_AR), core.priced,
            float(step.completion), upper, slack_R,
        )  # fmt: skip
        if not len(parent):
            return states, parent, label, np.inf
        objective = states.objective[parent] + node.objective_A[label]
        priced = states.priced[parent] + node.priced_A[label]
        rows = states.rows[parent] + node.rows_AR[label]
        after = np.zeros((len(parent), 0), dtype=np.int64)
    else:
        objective_KA = states.objective[:, None] + node.objective_A
        priced_KA = states.priced[:, None] + node.priced_A
        rows_KAR = states.rows[:, None] + node.rows_AR
        for slot, edge, is_first in step.edges:
            at = (slice(None), open_KD[:, slot]) if is_first else (open_KD[:, slot],)
            own, priced, amounts = edge.objective_AB[at], edge.priced_AB[at], edge.rows_ABR[at]
            objective_KA = objective_KA + (own.T if is_first else own)
            priced_KA = priced_KA + (priced.T if is_first else priced)
            rows_KAR = rows_KAR + (amounts.transpose(1, 0, 2) if is_first else amounts)
        completion, after_KAD = _after(step, open_KD, len(node.labels_A))
        rank_KA = core.priced + priced_KA + completion
        parent, label = np.nonzero((rank_KA < upper) & (rows_KAR <= slack_R).all(axis=2))
        if not len(parent):
            return states, parent, label, np.inf
        objective, priced, rows = objective_KA[parent, label], priced_KA[parent, label], rows_KAR[parent, label]
        rank, after = rank_KA[parent, label], after_KAD[parent, label]
    code = _code(after)
    # With room to spare, comparing states costs more than carrying the dominated ones along.
    kept = undominated(code, objective, rows) if 2 * len(parent) > width else np.arange(len(parent))
    lost = np.inf
    if len(kept) > width:
        chosen = _select(rank[kept], rows[kept], code[kept], width, spread=spread)
        dropped = np.ones(len(kept), dtype=np.bool_)
        dropped[chosen] = False
        lost = float(rank[kept[dropped]].min())
        kept = kept[chosen]
    states = _States(objective=objective[kept], priced=priced[kept], rows=rows[kept], open_KD=after[kept])
    return states, parent[kept], label[kept], lost


def _after(step: _Step, open_KD: Ints, num_labels: int) -> tuple[Floats, Ints]:
    """Least priced completion, and the labels that stay open, for every state and label of the new node."""
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
    for column in open_KD.T:
        count = int(column.max()) + 1
        if int(code.max()) >= _MAX_CODE // count:
            code = np.unique(code, return_inverse=True)[1].reshape(-1)
        code = code * count + column
    return code


def _select(rank_K: Floats, rows_KR: Ints, code_K: Ints, width: int, *, spread: bool) -> Ints:
    """States to keep: the best ranked, or also the best ranked of each cell of a grid over open labels and rows."""
    by_rank = np.argsort(rank_K, kind="stable")
    if not spread:
        return by_rank[:width]
    span_R = np.ptp(rows_KR, axis=0)
    wide = np.flatnonzero(span_R > 0)
    codes = len(np.unique(code_K)) if code_K.any() else 1
    cells = width / max(1, codes)
    side = max(2, round(cells ** (1 / max(1, len(wide)))))
    cell = code_K
    for row in wide[:8].tolist():
        step = (rows_KR[:, row] - rows_KR[:, row].min()) * ((side - 1e-9) / float(span_R[row]))
        cell = cell * side + step.astype(np.int64)
    leads = np.sort(np.unique(cell[by_rank], return_index=True)[1])[: width // 2]
    return np.concatenate([by_rank[leads], np.delete(by_rank, leads)[: width - len(leads)]])


def order_of(core: Core) -> list[int]:
    """Core nodes by connected parts, each in a narrow order; parts with expensive deviations first, cheap ones last."""
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
            parts.append(_narrow(sorted(part), near))

    def fineness(part: list[int]) -> tuple[float, int]:
        moves = [np.ptp(core.nodes[c].objective_A[np.isfinite(core.nodes[c].objective_A)]) for c in part]
        return -max(moves), min(part)

    return [c for part in sorted(parts, key=fineness) for c in part]


def _narrow(part: list[int], near: list[list[int]]) -> list[int]:
    """An order in which few nodes are open: what closes an open node comes before the next node by number."""
    waiting = {node: len(near[node]) for node in part}
    order: dict[int, None] = {}
    for start in part:
        stack = [start]
        while stack:
            node = stack.pop()
            if node in order:
                continue
            order[node] = None
            for other in near[node]:
                waiting[other] -= 1
            closing = [other for other in (node, *near[node]) if other in order and waiting[other] == 1]
            stack += [next(other for other in near[last] if other not in order) for last in closing]
    return list(order)


def slots_of(
    core: Core, order: list[int]
) -> list[tuple[int, list[tuple[int, CoreEdge, bool]], list[int], tuple[int, ...]]]:
    """For each step: the node, edges to open nodes, slots that stay open, and label counts of the open nodes before."""
    place = {c: i for i, c in enumerate(order)}
    touching: list[list[CoreEdge]] = [[] for _ in core.nodes]
    last = list(range(len(order)))
    for edge in core.edges:
        touching[edge.first].append(edge)
        touching[edge.second].append(edge)
        one, two = place[edge.first], place[edge.second]
        last[one], last[two] = max(last[one], two), max(last[two], one)
    open_nodes: list[int] = []
    steps = []
    for step, c in enumerate(order):
        edges = []
        for edge in touching[c]:
            other = edge.second if edge.first == c else edge.first
            if place[other] < step:
                edges.append((open_nodes.index(other), edge, edge.first == c))
        sizes = tuple(len(core.nodes[o].labels_A) for o in open_nodes)
        after = [*open_nodes, c]
        kept = [slot for slot, o in enumerate(after) if last[place[o]] > step]
        steps.append((c, edges, kept, sizes))
        open_nodes = [after[slot] for slot in kept]
    return steps


def _steps(core: Core, order: list[int]) -> list[_Step]:
    """Steps of an order, with least priced completions computed backwards."""
    steps = []
    completion = np.zeros(())
    for c, edges, kept, sizes in reversed(slots_of(core, order)):
        steps.append(_Step(c, edges, kept, sizes, completion))
        node = core.nodes[c]
        shape = (*sizes, len(node.labels_A))
        if len(shape) > _MAX_AXES or math.prod(shape) > _MAX_COMPLETION_ENTRIES:
            least = sum(float(edge.priced_AB.min()) for _, edge, _ in edges)
            value = completion.min() + node.priced_A.min() + least
            completion = np.array(value)  # one value for all labels: there may be more axes than numpy allows
            continue
        absent = tuple(axis for axis in range(len(shape)) if axis not in kept)
        table = (np.expand_dims(completion, absent) if completion.ndim else completion) + node.priced_A
        for slot, edge, is_first in edges:
            own = edge.priced_AB
            view = [1] * len(shape)
            view[slot], view[-1] = sizes[slot], len(node.labels_A)
            table = table + (own.T if is_first else own).reshape(view)
        completion = np.broadcast_to(table, shape).min(axis=-1)
    return steps[::-1]


def _row_use(core: Core, order: list[int]) -> tuple[Ints, Ints]:
    """Least that nodes and edges from each step on can add to each row, (steps + 1, R); last step that adds, (R,)."""
    num_rows, place = len(core.excess_R), {c: i for i, c in enumerate(order)}
    tables = [(place[c], node.rows_AR[:, None]) for c, node in enumerate(core.nodes)]
    tables += [(max(place[e.first], place[e.second]), e.rows_ABR) for e in core.edges]
    least, last_R = np.zeros((len(order) + 1, num_rows), dtype=np.int64), np.full(num_rows, -1, dtype=np.int64)
    for step, rows_ABR in tables:
        least[step] += rows_ABR.min(axis=(0, 1))
        used = rows_ABR.any(axis=(0, 1))
        last_R[used] = np.maximum(last_R[used], step)
    return np.cumsum(least[::-1], axis=0)[::-1], last_R


@compiled("int64[::1](int64[::1],float64[::1],int64[:,::1])")
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


@compiled("(float64[::1],int64[:,::1],float64[::1],int64[:,::1],float64,float64,float64,int64[::1])")
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
