"""Which mix of two plans is best? Take over, part by part, what one plan does better than the other.

Where two labellings differ, the differing nodes fall into parts without an edge between them. Every part can be taken
over by itself, and what that changes simply adds up.

A large part, as between plans of many equal blocks that differ everywhere, is cut once along the order of the nodes.

Source: partition crossover (Whitley et al. 2009), with parts chosen by ratio as in a knapsack; ours.
"""

import numpy as np

from qsync_opt.formulations.assignment.model import AssignmentModel, Floats, Ints

_LARGE_PART = 300
"""Nodes of a part from which on it is cut."""


def blend(model: AssignmentModel, feasible_N: Ints, other_N: Ints, prices_R: Floats) -> Ints:
    """Improve a feasible labelling by parts of another one.

    Args:
        model: The problem.
        feasible_N: A labelling within the limits.
        other_N: Another one, usually better and beyond the limits.
        prices_R: Prices of the limits, to rank parts.

    Returns:
        A labelling within the limits, at least as good as ``feasible_N``.
    """
    part_N, count = _parts(model, feasible_N != other_N)
    if not count:
        return feasible_N
    first, second = model.edges_E2.T
    owner = np.concatenate([part_N, np.maximum(part_N[first], part_N[second])])
    before, after = model.chosen(feasible_N), model.chosen(other_N)
    changed = np.flatnonzero(owner >= 0)
    loads_PS = model.loads_of(after[changed], owner[changed], count)
    loads_PS -= model.loads_of(before[changed], owner[changed], count)
    gain_P = np.zeros(count)
    np.add.at(gain_P, owner[changed], model.objective_Z[before[changed]] - model.objective_Z[after[changed]])
    useful = np.flatnonzero(gain_P > 0)
    price_P = loads_PS[useful] @ model.load_prices(prices_R)
    ratio = gain_P[useful] / np.maximum(price_P, 1e-300)
    slack_R = -model.excess(feasible_N)
    taken = np.zeros(count + 1, dtype=np.bool_)
    for part in useful[np.argsort(-ratio, kind="stable")].tolist():
        left_R = slack_R - model.left_sides(loads_PS[part])
        if (left_R >= 0).all():
            slack_R = left_R
            taken[part] = True
    blended_N = np.where(taken[part_N], other_N, feasible_N)  # part -1 reads the last entry, which is never taken
    if int(np.bincount(part_N[part_N >= 0]).max()) < _LARGE_PART:
        return blended_N
    return min((_cut(model, blended_N, other_N, turned=turned) for turned in (False, True)), key=model.objective)


def _cut(model: AssignmentModel, feasible_N: Ints, other_N: Ints, *, turned: bool) -> Ints:
    """Take over the first (or last) nodes of another labelling, as many as the limits allow; by bisection."""
    number_N = np.arange(model.num_nodes)
    best_N, best = feasible_N, model.objective(feasible_N)
    low, high = 0, model.num_nodes
    while low < high:
        middle = (low + high + 1) // 2
        takes_N = number_N >= model.num_nodes - middle if turned else number_N < middle
        mixed_N = model.complete(np.where(takes_N, other_N, feasible_N))
        value = model.objective(mixed_N)
        if value < np.inf and (model.excess(mixed_N) <= 0).all():
            low = middle
            if value < best:
                best_N, best = mixed_N, value
        else:
            high = middle - 1
    return best_N


def _parts(model: AssignmentModel, differs_N: np.ndarray) -> tuple[Ints, int]:
    """Connected parts of the differing nodes: the number of each node's part (-1: none), and how many there are."""
    parent = np.arange(model.num_nodes).tolist()

    def root(node: int) -> int:
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    inside = differs_N[model.edges_E2].all(axis=1)
    for a, b in model.edges_E2[inside].tolist():
        parent[root(a)] = root(b)
    nodes = np.flatnonzero(differs_N)
    _, number = np.unique(np.array([root(n) for n in nodes.tolist()], dtype=np.int64), return_inverse=True)
    part_N = np.full(model.num_nodes, -1)
    part_N[nodes] = number
    return part_N, int(number.max(initial=-1)) + 1
