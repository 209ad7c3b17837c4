"""Nodes of an assignment under construction, and the reductions that keep it small.

Two reductions of a pairwise load are exact: what separates into the two nodes is charged to them, and states whose
rows are equal become one class.

Axis letters: S states of a node, R resources, G and H states of two nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from qsync_opt.formulations.training.ilp.assignment import Choice, Condition, Floats, Ints, Node, Product, Shared


@dataclass(slots=True)
class Draft:
    """A node under construction."""

    name: str
    labels: tuple[str, ...]
    cost_S: Floats
    load_SR: Ints
    left: int = -1
    right: int = -1
    left_class_S: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    right_class_S: Ints = field(default_factory=lambda: np.zeros(0, np.int64))


def reduce_pair(drafts: list[Draft], key: tuple[int, int], load_GHR: Ints | None, masks: list[Ints]) -> Product | None:
    """Classes of equal rows, and nothing at all where the load separates into the two nodes."""
    left, right = (drafts[node] for node in key)
    num_resources = left.load_SR.shape[1]
    shape = (len(left.labels), len(right.labels), num_resources)
    if load_GHR is None:
        load_GHR = np.zeros(shape, np.int64)
    rest_GHR = load_GHR - load_GHR[:, :1] - load_GHR[:1, :] + load_GHR[:1, :1]
    if not masks and not rest_GHR.any():
        left.load_SR += load_GHR[:, 0]
        right.load_SR += load_GHR[0] - load_GHR[0, 0]
        return None
    if not masks and _fold_into_join(drafts, key, load_GHR):
        return None
    # Row and column 0 go to the nodes, so that more rows are equal and more classes coincide.
    left.load_SR += load_GHR[:, 0]
    right.load_SR += load_GHR[0] - load_GHR[0, 0]
    signature = np.concatenate([rest_GHR, *(mask[:, :, None] for mask in masks)], axis=2)
    left_class_S = _classes(signature.reshape(shape[0], -1))
    right_class_S = _classes(signature.swapaxes(0, 1).reshape(shape[1], -1))
    first_G = [int(np.argmax(left_class_S == g)) for g in range(left_class_S.max() + 1)]
    first_H = [int(np.argmax(right_class_S == h)) for h in range(right_class_S.max() + 1)]
    reduced_GHR = rest_GHR[np.ix_(first_G, first_H)]
    return Product(
        name=f"{left.name}|{right.name}",
        left=key[0],
        left_class_S=left_class_S,
        right=key[1],
        right_class_S=right_class_S,
        cost_S=np.zeros(len(first_G) * len(first_H)),
        load_SR=reduced_GHR.reshape(-1, num_resources),
    )


def _fold_into_join(drafts: list[Draft], key: tuple[int, int], load_GHR: Ints) -> bool:
    """Charge the load to a join that looks at the other node, if its state tells all that the load needs."""
    join = drafts[key[1]]
    if key[0] not in (join.left, join.right):
        return False
    on_left = key[0] == join.left
    class_S = join.left_class_S if on_left else join.right_class_S
    num_right = int(join.right_class_S.max()) + 1
    states = range(len(join.labels))
    seen = [np.flatnonzero(class_S == (s // num_right if on_left else s % num_right)) for s in states]
    if any((load_GHR[seen[s], s] != load_GHR[seen[s][0], s]).any() for s in states):
        return False
    join.load_SR += np.array([load_GHR[seen[s][0], s] for s in states])
    return True


def freeze_shared(
    shared: tuple[str, list[tuple[int, int, Ints]], Ints],
    nodes: tuple[Node, ...],
    index: dict[tuple[int, int], int],
) -> Shared:
    """The shared load with its conditions as states of final nodes; ``index`` numbers the products of node pairs."""
    name, conditions, load_R = shared
    frozen = []
    for node, other, mask in conditions:
        if other < 0:
            frozen.append(Condition(node=node, mask_S=mask.astype(np.bool_)))
            continue
        product = nodes[index[node, other]]
        assert isinstance(product, Product)  # pairs of nodes are products by construction
        mask_S = np.zeros(product.num_states, np.bool_)
        for a, b in zip(*np.nonzero(mask), strict=True):
            mask_S[product.left_class_S[a] * product.num_right + product.right_class_S[b]] = True
        frozen.append(Condition(node=index[node, other], mask_S=mask_S))
    return Shared(name=name, conditions=tuple(frozen), load_R=load_R)


def merge(conditions: list[tuple[int, int, Ints]]) -> list[tuple[int, int, Ints]]:
    """One condition per node or pair of nodes: either mask."""
    merged: dict[tuple[int, int], Ints] = {}
    for node, other, mask in conditions:
        known = merged.get((node, other))
        merged[node, other] = mask if known is None else known | mask
    return [(node, other, mask) for (node, other), mask in merged.items()]


def _classes(rows: Ints) -> Ints:
    """Number equal rows alike, in order of first appearance."""
    seen: dict[bytes, int] = {}
    return np.array([seen.setdefault(row.tobytes(), len(seen)) for row in np.ascontiguousarray(rows)], np.int64)


def freeze(draft: Draft) -> Node:
    """The finished node."""
    if draft.left < 0:
        return Choice(name=draft.name, labels=draft.labels, cost_S=draft.cost_S, load_SR=draft.load_SR)
    return Product(
        name=draft.name,
        left=draft.left,
        left_class_S=draft.left_class_S,
        right=draft.right,
        right_class_S=draft.right_class_S,
        cost_S=draft.cost_S,
        load_SR=draft.load_SR,
    )
