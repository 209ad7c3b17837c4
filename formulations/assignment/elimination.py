"""In which order are nodes minimised out, and what is the least priced cost? Exact dynamic programming in batches.

A round eliminates many nodes of which no two are neighbours; nodes of equal shape in a round are one batch of numpy
work. Chains halve in every round, so a chain of n nodes takes about log2(n) rounds.

Axes: L labels of the eliminated node, B nodes of a batch, then one axis for each neighbour; Z table entries. Labels
come first, so that their minimum runs over whole contiguous blocks.

Source: bucket elimination (Dechter 1999) along an order of least tables; batching by rounds and shapes is ours.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from qsync_opt.formulations.assignment.model import AssignmentModel, Floats, Ints

MAX_TABLE_ENTRIES = 1 << 17
"""A table larger than this is never formed: the graph is relaxed instead (see ``relaxation``)."""


_SMALL_TABLE = 64
"""Nodes of tables up to this size are minimised out before all others, many at a time."""
_FEW_NEIGHBOURS = 3


class TooWideError(Exception):
    """An elimination table would be too large; ``remaining`` are the nodes of the part that is too dense."""

    def __init__(self, remaining: list[int]) -> None:
        super().__init__(f"{len(remaining)} nodes are too densely connected")
        self.remaining = remaining


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
    order: Ints | None  # sorts messages by target when several share one
    starts: Ints | None
    shape: tuple[int, ...]  # of a table
    first_B: Ints  # where each node's entries of one label begin in a table
    strides_D: tuple[int, ...]  # of the neighbours' axes there, in entries


class _Graph:
    """The shrinking graph during scheduling: neighbours and live tables of each node."""

    def __init__(self, model: AssignmentModel) -> None:
        self.sizes = model.sizes_N.tolist()
        self.neighbours: list[set[int]] = [set() for _ in self.sizes]
        self.tables: list[dict[tuple[int, ...], int]] = [{} for _ in self.sizes]
        self.end = len(model.objective_Z)
        for first, second, offset in zip(*model.edges_E2.T.tolist(), model.offset_E.tolist(), strict=True):
            self.neighbours[first].add(second)
            self.neighbours[second].add(first)
            self.tables[first][first, second] = self.tables[second][first, second] = offset
        self.unary: list[int] = model.offset_N.tolist()

    def eliminate(self, node: int) -> tuple[tuple[object, ...], list[int], list[int], int]:
        """Remove a node; returns the batch signature, its neighbours, its tables' offsets and its message's."""
        bag = sorted(self.neighbours[node])
        sizes, axes = self.sizes, {node: 0}
        for position, other in enumerate(bag):
            axes[other] = position + 1
        patterns: list[tuple[tuple[int, ...], int]] = [((0,), self.unary[node])]
        for variables, offset in self.tables[node].items():
            patterns.append((tuple(axes[v] for v in variables), offset))
            for other in variables:
                if other != node:
                    del self.tables[other][variables]
        patterns.sort()
        target = self._target(bag)
        for other in bag:
            near = self.neighbours[other]
            near.update(bag)
            near.discard(node)
            near.discard(other)
        signature = (sizes[node], *(sizes[v] for v in bag), *(p for p, _ in patterns))
        return signature, bag, [offset for _, offset in patterns], target

    def _target(self, bag: list[int]) -> int:
        """Where the message over ``bag`` goes: to a table that is there already, or to a new one."""
        if not bag:
            self.end += 1
            return self.end - 1
        if len(bag) == 1:
            return self.unary[bag[0]]
        key = tuple(bag)
        found = self.tables[bag[0]].get(key)
        if found is None:
            found, size = self.end, 1
            for other in bag:
                self.tables[other][key] = found
                size *= self.sizes[other]
            self.end += size
        return found

    def rounds(self) -> Iterator[list[int]]:
        """Independent sets of nodes with few neighbours or a small table, until none is left."""
        remaining = list(range(len(self.sizes)))
        while remaining:
            entries = [self._entries(node) for node in remaining]
            limit = max(_SMALL_TABLE, min(entries))
            if limit > max(_SMALL_TABLE, MAX_TABLE_ENTRIES):
                raise TooWideError(remaining)
            blocked: set[int] = set()
            chosen, kept = [], []
            for node, count in zip(remaining, entries, strict=True):
                if count <= limit and node not in blocked:
                    chosen.append(node)
                    blocked |= self.neighbours[node]
                else:
                    kept.append(node)
            yield chosen
            remaining = kept

    def _entries(self, node: int) -> int:
        """Entries of the table that minimises a node out; a node of at most two neighbours counts as small."""
        near = self.neighbours[node]
        if len(near) < _FEW_NEIGHBOURS:
            return _SMALL_TABLE
        entries: int = self.sizes[node]
        for other in near:
            entries *= self.sizes[other]
            if entries > max(_SMALL_TABLE, MAX_TABLE_ENTRIES):
                break
        return entries


def _row_major(sizes: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _make_batch(
    signature: tuple[object, ...], rows: list[tuple[int, list[int], list[int], int]], sizes: list[int]
) -> _Batch:
    nodes_B = np.array([row[0] for row in rows], dtype=np.int64)
    bag_BD = np.array([row[1] for row in rows], dtype=np.int64).reshape(len(rows), -1)
    shape = (sizes[rows[0][0]], *(sizes[v] for v in rows[0][1]))
    patterns = signature[len(shape) :]
    offsets = np.array([row[2] for row in rows], dtype=np.int64)
    factors = []
    whole = (shape[0], len(rows), *shape[1:])
    place = (0, *range(2, len(whole)))  # where each axis of a pattern lies in a table
    for position, pattern in enumerate(patterns):
        axes: tuple[int, ...] = pattern  # type: ignore[assignment]
        index = offsets[:, position].reshape(1, -1, *(1 for _ in shape[1:]))
        for axis, stride in zip(axes, _row_major(tuple(shape[a] for a in axes)), strict=True):
            steps = np.arange(shape[axis]) * stride
            index = index + steps.reshape(*(-1 if place[axis] == i else 1 for i in range(len(whole))))
        absent = tuple(place[a] for a in range(len(shape)) if a not in axes)
        factors.append(_Factor(np.ascontiguousarray(index), absent))
    # The largest first: the sums are then formed in its place.
    factors.sort(key=lambda factor: -factor.index.size)
    base = np.array([row[3] for row in rows], dtype=np.int64)
    steps = np.arange(int(np.prod(shape[1:], dtype=np.int64))).reshape(shape[1:])
    order, starts = None, None
    if len(np.unique(base)) < len(base):
        order = np.argsort(base, kind="stable")
        starts = np.flatnonzero(np.diff(base[order], prepend=-1))
    target = base.reshape(-1, *(1 for _ in shape[1:])) + steps
    first_B = np.arange(len(rows)) * len(steps.ravel())
    return _Batch(nodes_B, bag_BD, tuple(factors), target, order, starts, whole, first_B, _row_major(shape[1:]))


class Elimination:
    """Exact minimiser of priced tables over one graph; reusable for any prices and any forbidden entries."""

    def __init__(self, model: AssignmentModel) -> None:
        """Plan the order.

        Args:
            model: Only its graph is used.

        Raises:
            TooWideError: A table would exceed ``MAX_TABLE_ENTRIES``.
        """
        graph = _Graph(model)
        self._num_entries, self._num_nodes = len(model.objective_Z), model.num_nodes
        self._batches: list[_Batch] = []
        self.widest = 0
        for chosen in graph.rounds():
            groups = defaultdict(list)
            for node in chosen:
                signature, bag, offsets, target = graph.eliminate(node)
                groups[signature].append((node, bag, offsets, target))
                self.widest = max(self.widest, len(bag))
            self._batches += [_make_batch(key, rows, graph.sizes) for key, rows in groups.items()]
        self._end = graph.end
        roots = [batch.target for batch in self._batches if batch.target.ndim == 1]
        self._roots = np.concatenate(roots) if roots else np.zeros(0, dtype=np.int64)

    def minimise(self, cost_Z: Floats) -> tuple[float, Ints]:
        """Least total cost and a labelling that has it (the first label on ties).

        Args:
            cost_Z: Priced tables, infinite where forbidden, shape (Z,).

        Returns:
            The cost (infinite if every labelling is forbidden) and the labels, shape (N,).
        """
        value, tables, _ = self._forward(cost_Z)
        labels_N = np.zeros(self._num_nodes, dtype=np.int64)
        for batch, table in zip(reversed(self._batches), reversed(tables), strict=True):
            at_B = batch.first_B
            for position, stride in enumerate(batch.strides_D):
                at_B = at_B + labels_N.take(batch.bag_BD[:, position]) * stride
            labels_N[batch.nodes_B] = table.reshape(len(table), -1).take(at_B, axis=1).argmin(axis=0)
        return value, labels_N

    def min_marginals(self, cost_Z: Floats) -> tuple[float, Floats]:
        """Least total cost, and the least total cost among labellings that choose each entry.

        Args:
            cost_Z: Priced tables, shape (Z,).

        Returns:
            The least cost, and one least cost per table entry, shape (Z,).

        Source: two-pass message passing on the elimination tree; ours in batches.
        """
        value, tables, messages = self._forward(cost_Z)
        belief = np.full(self._end, np.inf)
        belief[self._roots] = value
        for batch, table, message in zip(reversed(self._batches), reversed(tables), reversed(messages), strict=True):
            with np.errstate(invalid="ignore"):
                outside = belief.take(batch.target) - message
            outside[np.isnan(outside)] = np.inf
            table += outside
            for factor in batch.factors:
                reduced = table.min(axis=factor.other_axes, keepdims=True) if factor.other_axes else table
                belief[factor.index] = reduced
        return value, belief[: self._num_entries]

    def _forward(self, cost_Z: Floats) -> tuple[float, list[Floats], list[Floats]]:
        """Least total cost, and the table and the message of every batch."""
        buffer = np.zeros(self._end)
        buffer[: self._num_entries] = cost_Z
        tables: list[Floats] = []
        messages: list[Floats] = []
        for batch in self._batches:
            table = buffer.take(batch.factors[0].index)
            for factor in batch.factors[1:]:
                cost = buffer.take(factor.index)
                if table.shape == batch.shape:
                    table += cost
                else:
                    table = table + cost
            tables.append(table)
            message = table.min(axis=0)
            messages.append(message)
            if batch.order is None or batch.starts is None:
                buffer[batch.target] += message
            else:
                summed = np.add.reduceat(message[batch.order], batch.starts, axis=0)
                buffer[batch.target[batch.order[batch.starts]]] += summed
        return float(buffer[self._roots].sum()), tables, messages
