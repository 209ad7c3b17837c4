"""Least priced cost of a labelling, and of the labellings with each entry, by exact dynamic programming.

Nodes are minimised out one after the other along a `Schedule`. Messages are added in the order of their nodes.

Axes: N nodes, Z table entries of the model, Y of the relaxed model; those of `Schedule`.

Source: bucket elimination (Dechter 1999).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from qsync_opt.formulations.assignment.compiled import compiled
from qsync_opt.formulations.assignment.model import AssignmentModel, Bools, Floats, Ints
from qsync_opt.formulations.assignment.schedule import TooWideError, plan


class Elimination:
    """Exact minimiser of priced tables over one graph; reusable for any prices and any forbidden entries."""

    def __init__(self, model: AssignmentModel) -> None:
        """Plan the order for the graph of a model.

        Raises:
            TooWideError: A table would be too large.
        """
        self.schedule = schedule = plan(model)
        self._sizes_N = model.sizes_N
        width_I = np.diff(schedule.bag_I1)
        self._roots = schedule.target_I[width_I == 0]
        self._largest = int(np.diff(schedule.entries_I1).max(initial=0))

    def minimise(self, cost_Z: Floats) -> tuple[float, Ints]:
        """Least total cost and a labelling (N,) that has it, the first label on ties.

        ``cost_Z`` is infinite where forbidden, and so is the cost where every labelling is.
        """
        s = self.schedule
        least_R, labels_N = _minimise(
            cost_Z, self._sizes_N, s.node_I, s.bag_I1, s.bag_K, s.target_I, s.factor_I1, s.cells_I1, s.end,
            self._positions, self._largest, self._roots,
        )  # fmt: skip
        return _total(least_R), labels_N

    def min_marginals(self, cost_Z: Floats) -> tuple[float, Floats]:
        """Least total cost, and the least among labellings that choose each entry, shape (Z,).

        Source: two-pass message passing on the elimination tree; ours.
        """
        s = self.schedule
        least_R, least_Z = _min_marginals(
            cost_Z, self._sizes_N, s.node_I, s.target_I, s.factor_I1, s.cells_I1, s.entries_I1, s.end, self._positions,
            self._roots,
        )  # fmt: skip
        return _total(least_R), least_Z

    @cached_property
    def _positions(self) -> NDArray[np.int32]:
        s = self.schedule
        return _positions(
            self._sizes_N, s.node_I, s.bag_I1, s.bag_K, s.factor_I1, s.offset_F, s.stride_I1, s.stride_J, s.entries_I1
        )


def _total(least_R: Floats) -> float:
    return float(np.cumsum(least_R)[-1]) if len(least_R) else 0.0


@compiled("(int64[::1],int64[::1],int64[::1],int64[::1],int64[::1],int64[::1],int64[::1],int64[::1],int64[::1])")
def _positions(
    sizes_N: Ints, node_I: Ints, bag_I1: Ints, bag_K: Ints, factor_I1: Ints, offset_F: Ints, stride_I1: Ints,
    stride_J: Ints, entries_I1: Ints,
) -> NDArray[np.int32]:  # fmt: skip
    """Where in the buffer the entries of all tables to be summed lie: node by node, table by table, labels first."""
    total = 0
    for i in range(len(node_I)):
        total += (entries_I1[i + 1] - entries_I1[i]) * (factor_I1[i + 1] - factor_I1[i])
    position, done, count = np.empty(total, dtype=np.int32), 0, np.zeros(64, dtype=np.int64)
    for i in range(len(node_I)):
        size, first_bag, width = sizes_N[node_I[i]], bag_I1[i], bag_I1[i + 1] - bag_I1[i]
        entries = entries_I1[i + 1] - entries_I1[i]
        for factor in range(factor_I1[i], factor_I1[i + 1]):
            stride = stride_I1[i] + (factor - factor_I1[i]) * (width + 1)
            for label in range(size):
                at = offset_F[factor] + label * stride_J[stride]
                count[:width] = 0
                for _ in range(entries // size):
                    position[done] = at
                    done += 1
                    for d in range(width - 1, -1, -1):
                        count[d] += 1
                        at += stride_J[stride + 1 + d]
                        if count[d] < sizes_N[bag_K[first_bag + d]]:
                            break
                        at -= count[d] * stride_J[stride + 1 + d]
                        count[d] = 0
    return position


@compiled(
    "(float64[::1],int64[::1],int64[::1],int64[::1],int64[::1],int64[::1],int64[::1],int64[::1],int64,int32[::1],int64,"
    "int64[::1])"
)
def _minimise(
    cost_Z: Floats, sizes_N: Ints, node_I: Ints, bag_I1: Ints, bag_K: Ints, target_I: Ints, factor_I1: Ints,
    cells_I1: Ints, end: int, position: NDArray[np.int32], largest: int, root_R: Ints,
) -> tuple[Floats, Ints]:  # fmt: skip
    """Least cost of each part of the graph, and labels; arrays as in `Schedule`."""
    buffer = np.zeros(end)
    buffer[: len(cost_Z)] = cost_Z
    choice = np.zeros(cells_I1[-1], dtype=np.int64)
    table, done = np.empty(largest), 0
    for i in range(len(node_I)):
        size, cells = sizes_N[node_I[i]], cells_I1[i + 1] - cells_I1[i]
        entries = size * cells
        for place in range(entries):
            table[place] = buffer[position[done + place]]
        done += entries
        for _ in range(factor_I1[i] + 1, factor_I1[i + 1]):
            for place in range(entries):
                table[place] += buffer[position[done + place]]
            done += entries
        for label in range(1, size):
            for cell in range(cells):
                if table[label * cells + cell] < table[cell]:
                    table[cell] = table[label * cells + cell]
                    choice[cells_I1[i] + cell] = label
        for cell in range(cells):
            buffer[target_I[i] + cell] += table[cell]
    labels_N = np.zeros(len(sizes_N), dtype=np.int64)
    for i in range(len(node_I) - 1, -1, -1):
        cell = 0
        for k in range(bag_I1[i], bag_I1[i + 1]):
            cell = cell * sizes_N[bag_K[k]] + labels_N[bag_K[k]]
        labels_N[node_I[i]] = choice[cells_I1[i] + cell]
    return buffer[root_R], labels_N


@compiled(
    "(float64[::1],int64[::1],int64[::1],int64[::1],int64[::1],int64[::1],int64[::1],int64,int32[::1],int64[::1])"
)
def _min_marginals(
    cost_Z: Floats, sizes_N: Ints, node_I: Ints, target_I: Ints, factor_I1: Ints, cells_I1: Ints, entries_I1: Ints,
    end: int, position: NDArray[np.int32], root_R: Ints,
) -> tuple[Floats, Floats]:  # fmt: skip
    """Least cost of each part of the graph, and least costs of all labellings with each entry; see `_minimise`."""
    buffer = np.zeros(end)
    buffer[: len(cost_Z)] = cost_Z
    table, message, done = np.empty(entries_I1[-1]), np.empty(cells_I1[-1]), 0
    for i in range(len(node_I)):
        size, cells, first, first_cell = sizes_N[node_I[i]], cells_I1[i + 1] - cells_I1[i], entries_I1[i], cells_I1[i]
        entries = size * cells
        for place in range(entries):
            table[first + place] = buffer[position[done + place]]
        done += entries
        for _ in range(factor_I1[i] + 1, factor_I1[i + 1]):
            for place in range(entries):
                table[first + place] += buffer[position[done + place]]
            done += entries
        for cell in range(cells):
            message[first_cell + cell] = table[first + cell]
        for label in range(1, size):
            for cell in range(cells):
                if table[first + label * cells + cell] < message[first_cell + cell]:
                    message[first_cell + cell] = table[first + label * cells + cell]
        for cell in range(cells):
            buffer[target_I[i] + cell] += message[first_cell + cell]
    least_R = buffer[root_R]
    value = 0.0
    for root in range(len(root_R)):
        value += least_R[root]
    belief = np.full(end, np.inf)
    for root in root_R:
        belief[root] = value
    for i in range(len(node_I) - 1, -1, -1):
        size, cells, first, first_cell = sizes_N[node_I[i]], cells_I1[i + 1] - cells_I1[i], entries_I1[i], cells_I1[i]
        entries = size * cells
        for cell in range(cells):
            outside = belief[target_I[i] + cell] - message[first_cell + cell]
            if np.isnan(outside):
                outside = np.inf
            for label in range(size):
                table[first + label * cells + cell] += outside
        for _ in range(factor_I1[i], factor_I1[i + 1]):
            done -= entries
            for place in range(entries):
                belief[position[done + place]] = np.inf
            for place in range(entries):
                if table[first + place] < belief[position[done + place]]:
                    belief[position[done + place]] = table[first + place]
    return least_R, belief[: len(cost_Z)].copy()


_CUT_SHARE = 0.05
"""Share of the nodes of the too dense part that are split at a time."""


@dataclass(frozen=True, slots=True)
class Relaxation:
    """A model that can be minimised exactly and whose minimum bounds the true one's.

    Attributes:
        true: The true model.
        model: The relaxed one; the same object if nothing had to be split.
        elimination: Exact minimiser of ``model``.
        entry_Y: The true entry that each relaxed entry stands for.
    """

    true: AssignmentModel
    model: AssignmentModel
    elimination: Elimination
    entry_Y: Ints | None

    def with_limits(self, limits_R: Ints) -> Relaxation:
        """The same relaxation under other limits."""
        true = self.true.with_limits(limits_R)
        relaxed = true if self.entry_Y is None else self.model.with_limits(limits_R)
        return Relaxation(true, relaxed, self.elimination, self.entry_Y)

    def with_model(self, model: AssignmentModel) -> Relaxation:
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
    transposed = np.zeros(len(edges_E2), dtype=np.bool_)
    transposed[cut_E[from_first[cut_E]]] = True
    for edge in range(len(edges_E2)):
        shape = (model.sizes_N[first[edge]], model.sizes_N[second[edge]])
        table = model.offset_E[edge] + np.arange(shape[0] * shape[1]).reshape(shape)
        edge_entries.append((table.T if transposed[edge] else table).ravel())
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
