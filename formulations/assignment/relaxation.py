"""What to bound with where the graph is too dense for exact minimisation: nodes split into free copies.

A node of many neighbours keeps its own costs, and each of its edges goes to a copy of its own that may take any label.
Every labelling of the true problem is one of the relaxed problem at the same cost, so bounds stay valid.

Axes: N nodes, Z table entries of the true model; Y table entries of the relaxed one.

Source: node splitting, as in mini-bucket elimination (Dechter and Rish 2003).
"""

from dataclasses import dataclass

import numpy as np

from qsync_opt.formulations.assignment.elimination import Elimination
from qsync_opt.formulations.assignment.model import AssignmentModel, Bools, Floats, Ints
from qsync_opt.formulations.assignment.schedule import TooWideError

_CUT_SHARE = 0.05
"""Share of the too dense part that is split at a time."""


@dataclass(frozen=True, slots=True)
class Relaxation:
    """A model that can be minimised exactly and bounds the true one.

    Attributes:
        true: The model asked about.
        model: The relaxed one; the same object if nothing had to be split.
        elimination: Exact minimiser of ``model``.
        entry_Y: The true entry that each relaxed entry stands for.
    """

    true: AssignmentModel
    model: AssignmentModel
    elimination: Elimination
    entry_Y: Ints | None

    def with_limits(self, limits_R: Ints) -> "Relaxation":
        """The same relaxation under other limits."""
        true = self.true.with_limits(limits_R)
        relaxed = true if self.entry_Y is None else self.model.with_limits(limits_R)
        return Relaxation(true, relaxed, self.elimination, self.entry_Y)

    def with_model(self, model: AssignmentModel) -> "Relaxation":
        """A relaxation of a model of the same graph, with other costs and limits."""
        return relax(model) if self.entry_Y is not None else Relaxation(model, model, self.elimination, None)

    def allowed(self, allowed_Z: Bools) -> Bools:
        """Allowed entries of the relaxed model."""
        return allowed_Z if self.entry_Y is None else allowed_Z[self.entry_Y]

    def min_marginals(self, cost_Y: Floats) -> tuple[float, Floats]:
        """Least relaxed cost, and a lower bound of the cost of choosing each true entry, shape (Z,)."""
        value, least_Y = self.elimination.min_marginals(cost_Y)
        if self.entry_Y is None:
            return value, least_Y
        least_Z = np.full(len(self.true.objective_Z), -np.inf)
        np.maximum.at(least_Z, self.entry_Y, least_Y)
        return value, least_Z

    def labelling(self, labels_N: Ints) -> Ints:
        """The labelling of the true model nearest to a relaxed one: copies are left out, joins follow their parents."""
        return labels_N if self.entry_Y is None else self.true.complete(labels_N[: self.true.num_nodes])


def relax(model: AssignmentModel) -> Relaxation:
    """Split as few nodes as needed, most neighbours first, until exact minimisation is possible."""
    split = np.zeros(model.num_nodes, dtype=np.bool_)
    while True:
        relaxed, entry_Y = _split(model, split) if split.any() else (model, None)
        try:
            return Relaxation(model, relaxed, Elimination(relaxed), entry_Y)
        except TooWideError as wide:
            remaining = np.array([node for node in wide.remaining if node < model.num_nodes], dtype=np.int64)
            candidates = remaining[~split[remaining]]
            degree = np.bincount(model.edges_E2.ravel(), minlength=model.num_nodes)[candidates]
            count = max(1, int(_CUT_SHARE * len(candidates)))
            split[candidates[np.argsort(-degree, kind="stable")[:count]]] = True


def _split(model: AssignmentModel, split_N: Bools) -> tuple[AssignmentModel, Ints]:
    """Give every edge of a split node its own copy of that node (of its first node, if both are split)."""
    first, second = model.edges_E2.T
    from_first = split_N[first]
    cut_E = np.flatnonzero(from_first | split_N[second])
    original = np.where(from_first[cut_E], first[cut_E], second[cut_E])
    other = np.where(from_first[cut_E], second[cut_E], first[cut_E])
    edges_E2 = model.edges_E2.copy()
    edges_E2[cut_E, 0], edges_E2[cut_E, 1] = other, model.num_nodes + np.arange(len(cut_E))
    sizes = np.concatenate([model.sizes_N, model.sizes_N[original]])
    node_entries = [np.arange(int(model.sizes_N.sum()))]
    node_entries += [model.offset_N[n] + np.arange(model.sizes_N[n]) for n in original]
    edge_entries = []
    turned = np.zeros(len(edges_E2), dtype=np.bool_)
    turned[cut_E[from_first[cut_E]]] = True
    for edge in range(len(edges_E2)):
        shape = (model.sizes_N[first[edge]], model.sizes_N[second[edge]])
        table = model.offset_E[edge] + np.arange(shape[0] * shape[1]).reshape(shape)
        edge_entries.append((table.T if turned[edge] else table).ravel())
    entry_Y = np.concatenate([*node_entries, *edge_entries])
    counts = np.diff(model.pointer_Z1)[entry_Y]
    is_copy = np.zeros(len(entry_Y), dtype=np.bool_)
    is_copy[len(node_entries[0]) : int(sizes.sum())] = True
    counts[is_copy] = 0  # costs stay with the original
    pointer = np.concatenate([[0], np.cumsum(counts)])
    term = np.arange(int(pointer[-1])) + np.repeat(model.pointer_Z1[entry_Y] - pointer[:-1], counts)
    relaxed = AssignmentModel(
        sizes_N=sizes,
        edges_E2=edges_E2,
        objective_Z=np.where(is_copy, 0.0, model.objective_Z[entry_Y]),
        allowed_Z=model.allowed_Z[entry_Y],
        pointer_Z1=pointer,
        load_T=model.load_T[term],
        value_T=model.value_T[term],
        rows_RS=model.rows_RS,
        limits_R=model.limits_R,
    )
    return relaxed, entry_Y
