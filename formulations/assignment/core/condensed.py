"""Condensed cores: small independent parts of a core become one node each, equal parts are counted.

Parts of a core without an edge between them only share the limits. A part of few labellings is one decision between
those that no other one beats in objective and all rows. Parts whose tables are equal, as the layers of a network of
equal blocks, need no distinction: only the number of copies that take each labelling matters, so every such labelling
becomes a node whose labels are numbers of copies, and one more row limits them to the copies there are.

Axes: C core nodes, A labels of a node, K labellings of a part, R limit rows.

Source: ours; aggregation of equal items is standard for knapsacks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from qsync_opt.formulations.assignment.compiled import compiled
from qsync_opt.formulations.assignment.core.core import Core, CoreEdge, CoreNode
from qsync_opt.formulations.assignment.model import Floats, Ints, root

_MOST_LABELLINGS = 256
"""Parts of more labellings are not condensed."""
_MERGED_LABELS = 9
"""Independent nodes are merged up to this many labels."""
_FEWEST_COPIES = 3
_MOST_CLASSES = 24
_MOST_COUNTS = 160
"""More copies than this are counted in two digits."""
_SLACK = 1e-9
"""Relative rounding granted before a labelling counts as too expensive."""


@dataclass(slots=True)
class Condensed(Core):
    """A core of condensed nodes; ``labels`` gives labellings of the whole model as before.

    ``classes`` are the parts that are counted; ``mostly_equal`` is True if most could be.
    """

    original: Core = field(kw_only=True)
    items: list[_Item] = field(kw_only=True)
    classes: list[Ints] = field(kw_only=True)
    mostly_equal: bool = field(kw_only=True, default=False)

    def labels(self, choice_C: Ints) -> Ints:
        """The labelling that the labels of the condensed nodes stand for."""
        choice = np.zeros(len(self.original.nodes), dtype=np.int64)
        used = [0] * len(self.classes)
        for item, label in zip(self.items, choice_C.tolist(), strict=True):
            if item.copies is None or item.counts_A is None:
                choice[item.positions] = item.choice_AC[label]
            else:
                start = used[item.copies]
                used[item.copies] = end = start + int(item.counts_A[label])
                choice[self.classes[item.copies][start:end]] = item.choice_AC[0]
        return self.original.labels(choice)


@dataclass(slots=True)
class _Item:
    """A condensed node: its tables, and for each label the choices of the core nodes at ``positions``.

    Where ``copies`` is set, label a stands for ``counts_A[a]`` further copies of a class that take one labelling.
    """

    positions: Ints
    choice_AC: Ints
    objective_A: Floats
    rows_AR: Ints
    priced_A: Floats
    copies: int | None = None
    counts_A: Ints | None = None


def condense(core: Core, upper: float, *, merge: bool, count: bool = True, product: bool = True) -> Core:
    """The same core with fewer nodes.

    Args:
        core: The core; its base must be the priced minimum, so that no part's deviation lowers the priced cost.
        upper: Labellings that are not below this need not be kept.
        merge: Also condense small parts; otherwise only equal parts are counted.
        count: Count equal parts.
        product: With ``merge``, also merge independent nodes.

    Returns:
        A core that keeps an optimal labelling below ``upper`` if there is one; ``core`` itself if there is nothing
        to gain.
    """
    room = upper - core.priced
    parts = _parts(core)
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for number, (nodes, edges) in enumerate(parts):
        groups[_signature(core, nodes, edges)].append(number)
    by_copies = sorted(groups.values(), key=lambda members: (-len(members), members[0]))
    equal = [m for m in by_copies[:_MOST_CLASSES] if len(m) >= _FEWEST_COPIES]
    is_small = {
        number
        for number, (nodes, _) in enumerate(parts)
        if math.prod(len(core.nodes[c].labels_A) for c in nodes) <= _MOST_LABELLINGS
    }
    equal = [members for members in equal if members[0] in is_small]
    mostly_equal = 2 * sum(len(members) for members in equal) > len(parts)
    if not count:
        equal = []
    if not equal and not merge:
        return core
    counted = {number for members in equal for number in members}
    items: list[_Item] = []
    kept = []
    for number, (nodes, edges) in enumerate(parts):
        if number in counted:
            continue
        if merge and number in is_small:
            items.append(_enumerate(core, nodes, edges, room))
        else:
            kept.append(number)
    items = _merge(items, room, most=_MERGED_LABELS if product else 0)
    classes: list[Ints] = []
    for members in equal:
        nodes, edges = parts[members[0]]
        item = _enumerate(core, nodes, edges, room)
        items += _counts(item, len(members), len(classes), room)
        classes.append(np.array([parts[number][0] for number in members], dtype=np.int64))
    result = _build(core, parts, kept, items, classes)
    result.mostly_equal = mostly_equal
    return result


def _build(
    core: Core, parts: list[tuple[list[int], list[CoreEdge]]], kept: list[int], items: list[_Item], classes: list[Ints]
) -> Condensed:
    """Join the nodes that stay and the items; one more row for each class."""
    single = [c for number in kept for c in parts[number][0]]
    place = {c: i for i, c in enumerate(single)}
    everything = [
        _Item(np.array([c]), np.arange(len(node.labels_A))[:, None], node.objective_A, node.rows_AR, node.priced_A)
        for c in single
        for node in (core.nodes[c],)
    ]
    everything += items
    edges = [edge for number in kept for edge in parts[number][1]]
    extra = len(classes)
    nodes = []
    for c, item in enumerate(everything):
        rows_AR = np.pad(item.rows_AR, ((0, 0), (0, extra))) if extra else item.rows_AR
        if item.copies is not None and item.counts_A is not None:
            rows_AR[:, len(core.excess_R) + item.copies] = item.counts_A
        nodes.append(
            CoreNode(
                c, np.arange(len(item.objective_A)), item.objective_A, rows_AR, item.priced_A,
                counted=item.copies is not None,
            )
        )  # fmt: skip
    joined = [
        CoreEdge(
            place[e.first], place[e.second], e.objective_AB,
            np.pad(e.rows_ABR, ((0, 0), (0, 0), (0, extra))) if extra else e.rows_ABR, e.priced_AB,
        )
        for e in edges
    ]  # fmt: skip
    excess = np.concatenate([core.excess_R, [-len(members) for members in classes]]).astype(np.int64)
    return Condensed(
        core.base_N, core.objective, core.priced, excess, nodes, joined, np.append(core.prices_R, np.zeros(extra)),
        original=core, items=everything, classes=classes,
    )  # fmt: skip


def _parts(core: Core) -> list[tuple[list[int], list[CoreEdge]]]:
    """Connected parts: nodes in order, and edges."""
    parent = list(range(len(core.nodes)))
    for edge in core.edges:
        parent[root(parent, edge.first)] = root(parent, edge.second)
    parts: dict[int, tuple[list[int], list[CoreEdge]]] = {}
    for c in range(len(parent)):
        parts.setdefault(root(parent, c), ([], []))[0].append(c)
    for edge in core.edges:
        parts[root(parent, edge.first)][1].append(edge)
    return list(parts.values())


def _signature(core: Core, nodes: list[int], edges: list[CoreEdge]) -> tuple[object, ...]:
    """Equal for parts whose tables are equal."""
    key: list[object] = [len(nodes)]
    if len(nodes) > _MOST_LABELLINGS:
        return (id(nodes),)
    place = {c: i for i, c in enumerate(nodes)}
    for c in nodes:
        node = core.nodes[c]
        key += (node.objective_A.tobytes(), node.rows_AR.tobytes(), node.priced_A.tobytes())
    for edge in edges:
        key += (place[edge.first], place[edge.second], edge.objective_AB.tobytes(), edge.rows_ABR.tobytes())
    return tuple(key)


def _enumerate(core: Core, nodes: list[int], edges: list[CoreEdge], room: float) -> _Item:
    """All labellings of a part that an optimum may need, the base's first."""
    positions = np.array(nodes, dtype=np.int64)
    first = core.nodes[nodes[0]]
    objective_K, rows_KR, priced_K = first.objective_A, first.rows_AR, first.priced_A
    if len(nodes) == 1:
        kept = _undominated(objective_K, np.ascontiguousarray(rows_KR), priced_K, room)
        return _Item(positions, kept[:, None], objective_K[kept], rows_KR[kept], priced_K[kept])
    sizes = [len(core.nodes[c].labels_A) for c in nodes]
    choice_KC = np.indices(sizes).reshape(len(sizes), -1).T
    own = choice_KC[:, 0]
    objective_K, rows_KR, priced_K = objective_K[own], rows_KR[own], priced_K[own]
    for i, c in enumerate(nodes[1:], start=1):
        node, own = core.nodes[c], choice_KC[:, i]
        objective_K = objective_K + node.objective_A[own]
        rows_KR = rows_KR + node.rows_AR[own]
        priced_K = priced_K + node.priced_A[own]
    place = {c: i for i, c in enumerate(nodes)}
    for edge in edges:
        a, b = choice_KC[:, place[edge.first]], choice_KC[:, place[edge.second]]
        objective_K = objective_K + edge.objective_AB[a, b]
        rows_KR = rows_KR + edge.rows_ABR[a, b]
        priced_K = priced_K + edge.priced_AB[a, b]
    kept = _undominated(objective_K, rows_KR, priced_K, room)
    return _Item(positions, choice_KC[kept], objective_K[kept], rows_KR[kept], priced_K[kept])


def _merge(items: list[_Item], room: float, most: int) -> list[_Item]:
    order = sorted(range(len(items)), key=lambda i: (-float(np.ptp(items[i].objective_A)), int(items[i].positions[0])))
    merged: list[_Item] = []
    for number in order:
        item = items[number]
        if len(item.objective_A) < 2:
            continue  # only the base is left
        if merged and len(merged[-1].objective_A) * len(item.objective_A) <= most:
            merged[-1] = _product(merged[-1], item, room)
        else:
            merged.append(item)
    return merged


def _product(one: _Item, two: _Item, room: float) -> _Item:
    a, b = (grid.ravel() for grid in np.indices((len(one.objective_A), len(two.objective_A))))
    objective_K, priced_K = one.objective_A[a] + two.objective_A[b], one.priced_A[a] + two.priced_A[b]
    rows_KR = one.rows_AR[a] + two.rows_AR[b]
    kept = np.flatnonzero(priced_K < room + _SLACK * abs(room))
    if not len(kept) or kept[0]:
        kept = np.concatenate([[0], kept])
    a, b = a[kept], b[kept]
    return _Item(
        np.concatenate([one.positions, two.positions]), np.concatenate([one.choice_AC[a], two.choice_AC[b]], axis=1),
        objective_K[kept], rows_KR[kept], priced_K[kept],
    )  # fmt: skip


def _counts(item: _Item, copies: int, number: int, room: float) -> list[_Item]:
    """One item for each labelling of a class after the base: the number of copies that take it."""
    result = []
    for k in range(1, len(item.objective_A)):
        price = max(float(item.priced_A[k]), 0.0)
        most = copies if price * copies < room else min(copies, int((room + _SLACK * abs(room)) / price) + 1)
        if most > _MOST_COUNTS:
            step = round(most**0.5) + 1
            digits = [np.arange(step), np.arange(0, most + 1, step)]
        else:
            digits = [np.arange(most + 1)]
        result += [
            _Item(
                item.positions,
                item.choice_AC[k : k + 1],
                counts * item.objective_A[k],
                counts[:, None] * item.rows_AR[k],
                counts * item.priced_A[k],
                copies=number,
                counts_A=counts,
            )
            for counts in digits
        ]
    return result


@compiled("int64[::1](float64[::1],int64[:,::1],float64[::1],float64)")
def _undominated(objective_K: Floats, rows_KR: Ints, priced_K: Floats, room: float) -> Ints:
    """Labellings to keep: the first (the base), and the undominated ones that are not too expensive."""
    count = 0
    alive, stays = np.empty(len(objective_K), dtype=np.int64), np.empty(len(objective_K), dtype=np.int64)
    for k in range(len(objective_K)):
        if k == 0 or (np.isfinite(objective_K[k]) and priced_K[k] < room + _SLACK * abs(room)):
            alive[count] = k
            count += 1
    kept = 0
    for i in range(count):
        k, beaten = alive[i], False
        for j in range(count):
            other = alive[j]
            if i == j or beaten or not objective_K[other] <= objective_K[k]:
                continue
            no_worse, equal = True, objective_K[k] <= objective_K[other]
            for r in range(rows_KR.shape[1]):
                if rows_KR[other, r] > rows_KR[k, r]:
                    no_worse = False
                    break
                equal = equal and rows_KR[other, r] == rows_KR[k, r]
            beaten = no_worse and (j < i or not equal)  # of two equal ones the first stays
        if i == 0 or not beaten:
            stays[kept] = k
            kept += 1
    return stays[:kept].copy()
