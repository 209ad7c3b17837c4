"""What is still undecided around a priced minimum, and what does each deviation from it cost? All tables of the core.

Given prices, their priced minimum (the base labelling) and the entries that may still be chosen, the core are the nodes
with more than one label left. Everything is measured as a difference to the base: per node and label, and per pair of
core nodes where the two deviations do not simply add up.

Axes: C core nodes, A and B their labels left (the base first), R limit rows.
"""

from dataclasses import dataclass

import numpy as np

from qsync_opt.formulations.assignment.model import AssignmentModel, Bools, Floats, Ints


@dataclass(slots=True)
class CoreNode:
    """A core node: its labels left, base first, and what each adds to objective, rows and priced cost."""

    node: int
    labels_A: Ints
    objective_A: Floats
    rows_AR: Ints
    priced_A: Floats


@dataclass(slots=True)
class CoreEdge:
    """What two deviations add beyond their sum; infinite objective where the pair is forbidden."""

    first: int  # positions in the core
    second: int
    objective_AB: Floats
    rows_ABR: Ints
    priced_AB: Floats


@dataclass(slots=True)
class Core:
    """The undecided part of a model around a base labelling; rows that cannot bind any more are left out.

    ``priced`` is the base's objective plus the priced excess over all rows: a lower bound if the base minimises it.
    """

    base_N: Ints
    objective: float
    priced: float
    excess_R: Ints
    nodes: list[CoreNode]
    edges: list[CoreEdge]

    def labels(self, choice_C: Ints) -> Ints:
        """The labelling in which core node c takes its label number ``choice_C[c]``."""
        labels_N = self.base_N.copy()
        for item, choice in zip(self.nodes, choice_C.tolist(), strict=True):
            labels_N[item.node] = item.labels_A[choice]
        return labels_N


def extract(model: AssignmentModel, base_N: Ints, allowed_Z: Bools, prices_R: Floats) -> Core:
    """Tables of the core.

    Args:
        model: The problem.
        base_N: A labelling whose entries are all allowed.
        allowed_Z: Entries that may be chosen.
        prices_R: Prices of the limits.

    Returns:
        The core; nodes in order of their numbers.

    Source: ours.
    """
    num_labels = int(model.sizes_N.max(initial=1))
    exists = np.arange(num_labels)[None, :] < model.sizes_N[:, None]
    entry_NA = np.where(exists, model.offset_N[:, None] + np.arange(num_labels), 0)
    left_NA = exists & allowed_Z[entry_NA]
    core_N = np.flatnonzero(left_NA.sum(axis=1) > 1)
    position_N = np.full(model.num_nodes, -1)
    position_N[core_N] = np.arange(len(core_N))
    labels = [np.flatnonzero(left_NA[node]) for node in core_N]
    labels = [np.concatenate([[base_N[n]], own[own != base_N[n]]]) for n, own in zip(core_N, labels, strict=True)]
    nodes = _core_nodes(model, core_N, labels)
    edges = []
    first_E, second_E = model.edges_E2[:, 0], model.edges_E2[:, 1]
    size_E = model.sizes_N[second_E]
    for edge in np.flatnonzero((position_N[first_E] >= 0) | (position_N[second_E] >= 0)).tolist():
        a, b = int(first_E[edge]), int(second_E[edge])
        at, bt = int(position_N[a]), int(position_N[b])
        own_a = labels[at] if at >= 0 else base_N[a : a + 1]
        own_b = labels[bt] if bt >= 0 else base_N[b : b + 1]
        entry_AB = model.offset_E[edge] + own_a[:, None] * size_E[edge] + own_b
        rows = model.row_values(entry_AB.ravel()).reshape(*entry_AB.shape, -1)
        rows -= rows[0, 0]
        objective = model.objective_Z[entry_AB] - model.objective_Z[entry_AB[0, 0]]
        if at >= 0:
            nodes[at].objective_A += objective[:, 0]
            nodes[at].rows_AR += rows[:, 0]
        if bt >= 0:
            nodes[bt].objective_A += objective[0]
            nodes[bt].rows_AR += rows[0]
        allowed = allowed_Z[entry_AB]
        if at >= 0 and bt >= 0:
            rows = rows - rows[:, :1] - rows[:1]
            objective = objective - objective[:, :1] - objective[:1]
            if rows.any() or objective.any() or not allowed.all():
                edges.append(CoreEdge(at, bt, np.where(allowed, objective, np.inf), rows, rows @ prices_R))
        elif not allowed.all():
            (nodes[at] if at >= 0 else nodes[bt]).objective_A[~allowed.ravel()] = np.inf
    for node in nodes:
        node.priced_A = node.objective_A + node.rows_AR @ prices_R
    for item in edges:
        item.priced_AB += item.objective_AB
    objective, excess = model.objective(base_N), model.excess(base_N)
    core = Core(base_N, objective, objective + float(excess @ prices_R), excess, nodes, edges)
    _drop_rows(core)
    return core


def _drop_rows(core: Core) -> None:
    """Leave out rows that no labelling of the core can break, or that another row implies."""
    excess = core.excess_R
    blocks = [node.rows_AR for node in core.nodes]
    blocks += [edge.rows_ABR.reshape(-1, len(excess)) for edge in core.edges]
    if not blocks:
        return
    starts = np.cumsum([0, *(len(block) for block in blocks)])[:-1]
    stacked = np.concatenate(blocks)
    most = np.maximum.reduceat(stacked, starts).sum(axis=0)
    left = np.flatnonzero(excess + most > 0)
    for row in left.tolist():
        others = left[left != row]
        # Row o is implied by ``row`` if it cannot rise above it: the excess never gets larger.
        above = np.maximum.reduceat(stacked[:, others] - stacked[:, [row]], starts).sum(axis=0)
        implied = others[(excess[others] - excess[row] + above <= 0)]
        if row in left:
            left = left[~np.isin(left, implied)]
    if len(left) == len(excess):
        return
    core.excess_R = excess[left]
    for node in core.nodes:
        node.rows_AR = node.rows_AR[:, left]
    for edge in core.edges:
        edge.rows_ABR = edge.rows_ABR[:, :, left]


def _core_nodes(model: AssignmentModel, core_N: Ints, labels: list[Ints]) -> list[CoreNode]:
    """Core nodes with what their own entries add."""
    counts = [len(own) for own in labels]
    if not counts:
        return []
    flat = np.repeat(model.offset_N[core_N], counts) + np.concatenate(labels)
    rows_XR, objective_X = model.row_values(flat), model.objective_Z[flat]
    ends, no_price = np.cumsum(counts), np.zeros(0)
    return [
        CoreNode(int(node), own, objective_X[e - c : e] - objective_X[e - c], rows_XR[e - c : e] - rows_XR[e - c], no_price)
        for node, own, e, c in zip(core_N, labels, ends, counts, strict=True)
    ]
