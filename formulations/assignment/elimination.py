"""What is the least priced cost, and what does each choice cost at least? Exact dynamic programming along a schedule.

Compiled, nodes are minimised out one after the other. In numpy, nodes of equal shape in a round are one batch. Messages
of a round are added in the order of their nodes in both, so that sums agree to the last bit.

Axes: L labels of the eliminated node, B nodes of a batch, then one axis for each neighbour; Z table entries. Labels
come first, so that their minimum runs over whole contiguous blocks.

Source: bucket elimination (Dechter 1999); batching by rounds and shapes is ours.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qsync_opt.formulations.assignment.compiled import compiled, loops_pay, plain_work
from qsync_opt.formulations.assignment.model import AssignmentModel, Bools, Floats, Ints
from qsync_opt.formulations.assignment.schedule import Schedule, TooWideError, plan


class Elimination:
    """Exact minimiser of priced tables over one graph; reusable for any prices and any forbidden entries."""

    def __init__(self, model: AssignmentModel) -> None:
        """Plan the order.

        Args:
            model: Only its graph is used.

        Raises:
            TooWideError: A table would be too large.
        """
        self.schedule = schedule = plan(model)
        self._sizes_N, self._num_entries = model.sizes_N, len(model.objective_Z)
        width_I = np.diff(schedule.bag_I1)
        self.widest = int(width_I.max(initial=0))
        self._roots = schedule.target_I[width_I == 0]
        self._largest = int(np.diff(schedule.entries_I1).max(initial=0))
        self._batched: _Batched | None = None
        self._entry_index: NDArray[np.int32] | None = None

    def minimise(self, cost_Z: Floats) -> tuple[float, Ints]:
        """Least total cost and a labelling that has it (the first label on ties).

        Args:
            cost_Z: Priced tables, infinite where forbidden, shape (Z,).

        Returns:
            The cost (infinite if every labelling is forbidden) and the labels, shape (N,).
        """
        if loops_pay():
            least_R, labels_N = self._minimise_looped(cost_Z)
        else:
            with plain_work():
                least_R, labels_N = self._batches.minimise(cost_Z)
        return _total(least_R), labels_N

    def min_marginals(self, cost_Z: Floats) -> tuple[float, Floats]:
        """Least total cost, and the least total cost among labellings that choose each entry.

        Args:
            cost_Z: Priced tables, shape (Z,).

        Returns:
            The least cost, and one least cost per table entry, shape (Z,).

        Source: two-pass message passing on the elimination tree; ours.
        """
        if loops_pay():
            least_R, least_Z = self._min_marginals_looped(cost_Z)
        else:
            with plain_work():
                least_R, least_Z = self._batches.min_marginals(cost_Z)
        return _total(least_R), least_Z

    @property
    def _batches(self) -> _Batched:
        if self._batched is None:
            self._batched = _Batched(self.schedule, self._sizes_N, self._num_entries, self._roots)
        return self._batched

    @property
    def _index(self) -> NDArray[np.int32]:
        if self._entry_index is None:
            s = self.schedule
            self._entry_index = _positions(
                self._sizes_N, s.node_I, s.bag_I1, s.bag_K, s.factor_I1, s.offset_F, s.stride_I1, s.stride_J,
                s.entries_I1,
            )  # fmt: skip
        return self._entry_index

    def _minimise_looped(self, cost_Z: Floats) -> tuple[Floats, Ints]:
        s = self.schedule
        return _least(
            cost_Z, self._sizes_N, s.node_I, s.bag_I1, s.bag_K, s.target_I, s.factor_I1, s.cells_I1, s.end,
            self._index, self._largest, self._roots,
        )  # fmt: skip

    def _min_marginals_looped(self, cost_Z: Floats) -> tuple[Floats, Floats]:
        s = self.schedule
        return _marginals(
            cost_Z, self._sizes_N, s.node_I, s.target_I, s.factor_I1, s.cells_I1, s.entries_I1, s.end, self._index,
            self._roots,
        )  # fmt: skip


def _total(least_R: Floats) -> float:
    """Sum in order, as loops sum."""
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
    index, done, count = np.empty(total, dtype=np.int32), 0, np.zeros(64, dtype=np.int64)
    for i in range(len(node_I)):
        size, first_bag, width = sizes_N[node_I[i]], bag_I1[i], bag_I1[i + 1] - bag_I1[i]
        entries = entries_I1[i + 1] - entries_I1[i]
        for factor in range(factor_I1[i], factor_I1[i + 1]):
            stride = stride_I1[i] + (factor - factor_I1[i]) * (width + 1)
            for label in range(size):
                at = offset_F[factor] + label * stride_J[stride]
                count[:width] = 0
                for _ in range(entries // size):
                    index[done] = at
                    done += 1
                    for d in range(width - 1, -1, -1):
                        count[d] += 1
                        at += stride_J[stride + 1 + d]
                        if count[d] < sizes_N[bag_K[first_bag + d]]:
                            break
                        at -= count[d] * stride_J[stride + 1 + d]
                        count[d] = 0
    return index


@compiled(
    "(float64[::1],int64[::1],int64[::1],int64[::1],int64[::1],int64[::1],int64[::1],int64[::1],int64,int32[::1],int64,"
    "int64[::1])"
)
def _least(
    cost_Z: Floats, sizes_N: Ints, node_I: Ints, bag_I1: Ints, bag_K: Ints, target_I: Ints, factor_I1: Ints,
    cells_I1: Ints, end: int, index: NDArray[np.int32], largest: int, root_R: Ints,
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
            table[place] = buffer[index[done + place]]
        done += entries
        for _ in range(factor_I1[i] + 1, factor_I1[i + 1]):
            for place in range(entries):
                table[place] += buffer[index[done + place]]
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
def _marginals(
    cost_Z: Floats, sizes_N: Ints, node_I: Ints, target_I: Ints, factor_I1: Ints, cells_I1: Ints, entries_I1: Ints,
    end: int, index: NDArray[np.int32], root_R: Ints,
) -> tuple[Floats, Floats]:  # fmt: skip
    """Least cost of each part of the graph, and least costs of all labellings with each entry; see `_least`."""
    buffer = np.zeros(end)
    buffer[: len(cost_Z)] = cost_Z
    table, message, done = np.empty(entries_I1[-1]), np.empty(cells_I1[-1]), 0
    for i in range(len(node_I)):
        size, cells, first, first_cell = sizes_N[node_I[i]], cells_I1[i + 1] - cells_I1[i], entries_I1[i], cells_I1[i]
        entries = size * cells
        for place in range(entries):
            table[first + place] = buffer[index[done + place]]
        done += entries
        for _ in range(factor_I1[i] + 1, factor_I1[i + 1]):
            for place in range(entries):
                table[first + place] += buffer[index[done + place]]
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
                belief[index[done + place]] = np.inf
            for place in range(entries):
                if table[first + place] < belief[index[done + place]]:
                    belief[index[done + place]] = table[first + place]
    return least_R, belief[: len(cost_Z)].copy()


@dataclass(frozen=True, slots=True)
class _Factor:
    """Where the tables that mention the eliminated nodes of a batch lie, and along which axes."""

    index: Ints  # positions in the buffer, shape (L or 1, B, neighbours' labels or 1)
    other_axes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Batch:
    """Nodes eliminated together."""

    nodes_B: Ints
    bag_BD: Ints  # neighbours at elimination, in axis order
    factors: tuple[_Factor, ...]
    target: Ints  # positions of the message in the buffer, shape (B, neighbours...)
    shape: tuple[int, ...]  # of a table
    first_B: Ints  # where each node's entries of one label begin in a table
    strides_D: tuple[int, ...]  # of the neighbours' axes there, in entries


@dataclass(frozen=True, slots=True)
class _Round:
    """Batches of which no table depends on another one's message; how their messages are added, in order of nodes."""

    batches: tuple[_Batch, ...]
    order: Ints | None  # None: all in one batch, which is in order
    target: Ints


class _Batched:
    """The same in numpy, many nodes at a time."""

    def __init__(self, schedule: Schedule, sizes_N: Ints, num_entries: int, roots: Ints) -> None:
        self._num_entries, self._roots, self._sizes_N, self._end = num_entries, roots, sizes_N, schedule.end
        groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
        sizes, nodes, bags = sizes_N.tolist(), schedule.node_I.tolist(), schedule.bag_K.tolist()
        rounds, strides = schedule.round_I.tolist(), schedule.stride_J.tolist()
        bag_ends, stride_ends = schedule.bag_I1.tolist(), schedule.stride_I1.tolist()
        for i, node in enumerate(nodes):
            own = bags[bag_ends[i] : bag_ends[i + 1]]
            pattern = strides[stride_ends[i] : stride_ends[i + 1]]
            groups[rounds[i], len(own), sizes[node], *(sizes[v] for v in own), *pattern].append(i)
        by_round: dict[int, list[list[int]]] = defaultdict(list)
        for key, members in groups.items():
            by_round[key[0]].append(members)
        self._rounds = [_make_round(schedule, sizes_N, groups_of_round) for groups_of_round in by_round.values()]
        self._batches = [batch for each in self._rounds for batch in each.batches]

    def minimise(self, cost_Z: Floats) -> tuple[Floats, Ints]:
        """Least cost of each part of the graph, and labels."""
        least_R, tables, _ = self._forward(cost_Z)
        labels_N = np.zeros(len(self._sizes_N), dtype=np.int64)
        for batch, table in zip(reversed(self._batches), reversed(tables), strict=True):
            at_B = batch.first_B
            for position, stride in enumerate(batch.strides_D):
                at_B = at_B + labels_N.take(batch.bag_BD[:, position]) * stride
            labels_N[batch.nodes_B] = table.reshape(len(table), -1).take(at_B, axis=1).argmin(axis=0)
        return least_R, labels_N

    def min_marginals(self, cost_Z: Floats) -> tuple[Floats, Floats]:
        """Least cost of each part of the graph, and least costs of all labellings with each entry."""
        least_R, tables, messages = self._forward(cost_Z)
        belief = np.full(self._end, np.inf)
        belief[self._roots] = _total(least_R)
        for batch, table, message in zip(reversed(self._batches), reversed(tables), reversed(messages), strict=True):
            with np.errstate(invalid="ignore"):
                outside = belief.take(batch.target) - message
            outside[np.isnan(outside)] = np.inf
            table += outside
            for factor in batch.factors:
                reduced = table.min(axis=factor.other_axes, keepdims=True) if factor.other_axes else table
                belief[factor.index] = reduced
        return least_R, belief[: self._num_entries]

    def _forward(self, cost_Z: Floats) -> tuple[Floats, list[Floats], list[Floats]]:
        """Least cost of each part of the graph, and the table and the message of every batch."""
        buffer = np.zeros(self._end)
        buffer[: self._num_entries] = cost_Z
        tables: list[Floats] = []
        messages: list[Floats] = []
        for each in self._rounds:
            for batch in each.batches:
                table = buffer.take(batch.factors[0].index)
                for factor in batch.factors[1:]:
                    cost = buffer.take(factor.index)
                    if table.shape == batch.shape:
                        table += cost
                    else:
                        table = table + cost
                tables.append(table)
                messages.append(table.min(axis=0))
            added = [message.ravel() for message in messages[-len(each.batches) :]]
            flat = added[0] if each.order is None else np.concatenate(added).take(each.order)
            np.add.at(buffer, each.target, flat)
        return buffer[self._roots], tables, messages


def _row_major(sizes: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _make_round(schedule: Schedule, sizes_N: Ints, groups: list[list[int]]) -> _Round:
    batches = tuple(_make_batch(schedule, sizes_N, np.array(members, dtype=np.int64)) for members in groups)
    if len(batches) == 1:
        return _Round(batches, None, batches[0].target.ravel())
    cells = [
        np.repeat(np.array(m, dtype=np.int64), schedule.cells_I1[m[0] + 1] - schedule.cells_I1[m[0]]) for m in groups
    ]
    order = np.argsort(np.concatenate(cells), kind="stable")
    return _Round(batches, order, np.concatenate([batch.target.ravel() for batch in batches])[order])


def _make_batch(schedule: Schedule, sizes_N: Ints, rows_B: Ints) -> _Batch:
    head = int(rows_B[0])
    nodes_B = schedule.node_I[rows_B]
    width = int(schedule.bag_I1[head + 1] - schedule.bag_I1[head])
    bag_BD = schedule.bag_K[schedule.bag_I1[rows_B][:, None] + np.arange(width)]
    shape = (int(sizes_N[nodes_B[0]]), *sizes_N[bag_BD[0]].tolist())
    whole = (shape[0], len(rows_B), *shape[1:])
    place = (0, *range(2, len(whole)))  # where each axis of a pattern lies in a table
    factors = []
    for number in range(int(schedule.factor_I1[head + 1] - schedule.factor_I1[head])):
        index = schedule.offset_F[schedule.factor_I1[rows_B] + number].reshape(1, -1, *(1 for _ in shape[1:]))
        start = int(schedule.stride_I1[head]) + number * len(shape)
        strides = schedule.stride_J[start : start + len(shape)].tolist()
        for axis, stride in enumerate(strides):
            if stride:
                steps = np.arange(shape[axis]) * stride
                index = index + steps.reshape(*(-1 if place[axis] == i else 1 for i in range(len(whole))))
        absent = tuple(place[axis] for axis, stride in enumerate(strides) if not stride)
        factors.append(_Factor(np.ascontiguousarray(index), absent))
    cells = np.arange(int(np.prod(shape[1:], dtype=np.int64))).reshape(shape[1:])
    target = schedule.target_I[rows_B].reshape(-1, *(1 for _ in shape[1:])) + cells
    first_B = np.arange(len(rows_B)) * cells.size
    return _Batch(nodes_B, bag_BD, tuple(factors), target, whole, first_B, _row_major(shape[1:]))


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
