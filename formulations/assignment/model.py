"""The assignment model: nodes with labels, pairwise tables, additive integer loads, linear limits.

Axes: N nodes, E edges, Z table entries (those of the nodes first, then those of the edges), S loads, R limit rows,
T stored load terms, D derived nodes.

    minimise    sum_n cost(n, x_n) + sum_(a,b) cost(a, b, x_a, x_b) + sum_i weight_i * max_k(rows_i @ loads_S(x))_k
    subject to  rows_RS @ loads_S(x) <= limits_R,   loads_S(x) = the sum of the load terms of the chosen entries
                every chosen entry is allowed

Bound and fix takes models without maxima; `program.linear_program` takes all. A limit on a maximum is a row for each of
its arguments, see `AssignmentModel.with_maximum_at_most`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qsync_opt.formulations.assignment.compiled import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Whole = NDArray[np.integer[Any]]
"""Whole numbers of any width."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """A node whose label follows from those of two others.

    Attributes:
        node: The derived node.
        first: Its first parent.
        second: Its second parent.
        label_AB: Label of ``node`` for each pair of parents' labels.
        group_L: For each label of ``node``, the value that it stands for; branching separates these values.
    """

    node: int
    first: int
    second: int
    label_AB: tuple[tuple[int, ...], ...]
    group_L: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wanted:
    """Nodes of two labels that must be 1 where any of some other nodes takes a label that wants it.

    Being 1 never lowers a load, so an optimal labelling has 0 where nobody wants 1. Axes: H such nodes, P pairs of one
    and a node that may want it, ordered by the first.

    Attributes:
        node_H: The nodes.
        start_H: First pair of each.
        source_P: Nodes that may want it.
        flag_PA: 1 for the labels of ``source_P`` that do, padded with zeros.
    """

    node_H: Ints
    start_H: Ints
    source_P: Ints
    flag_PA: Ints

    def fill(self, labels_N: Ints) -> None:
        """Set these nodes, in place, as the others want."""
        flag_P = self.flag_PA[np.arange(len(self.source_P)), labels_N[self.source_P]]
        labels_N[self.node_H] = np.maximum.reduceat(flag_P, self.start_H)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Maximum:
    """A term of the objective: ``weight`` (at least 0) times the largest of the rows ``rows_KS @ loads_S``."""

    rows_KS: Whole
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True, eq=False)
class AssignmentModel:
    """An assignment problem over flat tables; build it with :func:`assemble`.

    Attributes:
        sizes_N: Labels of each node, at least one.
        edges_E2: Pairs of nodes; an edge's table is row-major with the first node's labels as rows.
        objective_Z: Cost of each table entry.
        allowed_Z: False where the entry may not be chosen.
        pointer_Z1: The terms of entry z are ``pointer_Z1[z]:pointer_Z1[z + 1]``.
        load_T: Load index of each term.
        value_T: Integer amount of each term.
        rows_RS: Coefficients (0 or 1) of the limits, in few bytes where there are many rows.
        limits_R: Right-hand sides.
        derived: Derived nodes, each after its parents.
        wanted: Nodes that are 1 where another one wants it, if any.
        maxima: Maxima over rows of loads in the objective.
    """

    sizes_N: Ints
    edges_E2: Ints
    objective_Z: Floats
    allowed_Z: Bools
    pointer_Z1: Ints
    load_T: Ints
    value_T: Ints
    rows_RS: Whole
    limits_R: Ints
    derived: tuple[Derived, ...] = ()
    wanted: Wanted | None = None
    maxima: tuple[Maximum, ...] = ()

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.sizes_N)

    @cached_property
    def offset_N(self) -> Ints:
        """First table entry of each node."""
        return np.cumsum(self.sizes_N) - self.sizes_N

    @cached_property
    def sizes_E(self) -> Ints:
        """Table entries of each edge."""
        return self.sizes_N[self.edges_E2[:, 0]] * self.sizes_N[self.edges_E2[:, 1]]

    @cached_property
    def offset_E(self) -> Ints:
        """First table entry of each edge."""
        return int(self.sizes_N.sum()) + np.cumsum(self.sizes_E) - self.sizes_E

    @cached_property
    def entry_T(self) -> Ints:
        """Table entry of each term."""
        return np.repeat(np.arange(len(self.objective_Z)), np.diff(self.pointer_Z1))

    @cached_property
    def steps(self) -> tuple[Ints, Ints, Ints]:
        """Differences of each row to the one before: rows, loads, amounts; few for nested rows."""
        step_RS = np.diff(self.rows_RS, axis=0, prepend=self.rows_RS[:1] * 0)
        row, load = (np.ascontiguousarray(positions) for positions in np.nonzero(step_RS))
        return row, load, step_RS[row, load].astype(np.int64)

    @cached_property
    def _float_T(self) -> Floats:
        return self.value_T.astype(np.float64)

    @cached_property
    def _follows(self) -> tuple[Ints, Ints, Ints]:
        return _flat(self.derived)

    def chosen(self, labels_N: Ints) -> Ints:
        """Table entries that a labelling chooses: one per node, then one per edge."""
        return choose(labels_N, self.sizes_N, self.edges_E2, self.offset_N, self.offset_E)

    def loads(self, labels_N: Ints) -> Ints:
        """Exact integer loads of a labelling, shape (S,)."""
        return sum_loads(self.chosen(labels_N), self.pointer_Z1, self.load_T, self.value_T, self.rows_RS.shape[1])

    def excess(self, labels_N: Ints) -> Ints:
        """Left-hand sides minus limits, shape (R,): feasible where nothing is positive."""
        return self.left_sides(self.loads(labels_N)) - self.limits_R

    def left_sides(self, loads_S: Ints) -> Ints:
        """Left-hand sides of the limits for some loads, exactly, shape (R,)."""
        return sum_steps(*self.steps, loads_S, len(self.limits_R))

    def load_prices(self, prices_R: Floats) -> Floats:
        """Price of a unit of each load at the limits' prices, shape (S,)."""
        priced = np.flatnonzero(prices_R)
        price_S: Floats = prices_R[priced] @ self.rows_RS[priced].astype(np.float64)
        return price_S

    def objective(self, labels_N: Ints) -> float:
        """Objective of a labelling; infinite if it chooses a forbidden entry."""
        entry = self.chosen(labels_N)
        if not self.allowed_Z[entry].all():
            return float("inf")
        total = float(self.objective_Z[entry].sum())
        if self.maxima:
            loads_S = self.loads(labels_N)
            total += sum(each.weight * float((each.rows_KS @ loads_S).max()) for each in self.maxima)
        return total

    def least_objective(self) -> float:
        """Objective that no labelling is below, limits and forbidden entries set aside."""
        starts = np.concatenate([self.offset_N, self.offset_E])
        least = np.minimum.reduceat(self.objective_Z, starts) if len(starts) else np.zeros(0)
        return float(least.sum()) * (1 - 1e-12) if (least >= 0).all() else -np.inf

    def priced(self, prices_R: Floats, allowed_Z: Bools, objective_weight: float = 1.0) -> Floats:
        """Tables with the limits' prices added: ``objective + sum_r price_r * row_r``, forbidden entries infinite."""
        price_S = self.load_prices(prices_R)
        return price(
            self.objective_Z, objective_weight, self._float_T, price_S, self.load_T, self.pointer_Z1, allowed_Z
        )

    def amounts(self, entry_X: Ints, rows: Ints, prices_R: Floats) -> tuple[Ints, Floats]:
        """Amounts that table entries add to some limit rows, shape (X, rows), and their priced loads over all rows."""
        term, count = self._terms(entry_X)
        owner = np.repeat(np.arange(len(entry_X)), count)
        load, value = self.load_T[term], self.value_T[term]
        amounts = np.zeros((len(entry_X), len(rows)), dtype=np.int64)
        some = np.flatnonzero(count)
        if len(some) and len(rows):
            parts = value[:, None] * self.rows_RS[rows].T[load]
            amounts[some] = np.add.reduceat(parts, (np.cumsum(count) - count)[some])
        priced: Floats = np.zeros(len(entry_X))
        priced += np.bincount(owner, weights=value * self.load_prices(prices_R)[load], minlength=len(entry_X))
        return amounts, priced

    def loads_of(self, entry_X: Ints, group_X: Ints, num_groups: int) -> Ints:
        """Loads of table entries, summed by group, shape (groups, S)."""
        term, count = self._terms(entry_X)
        group = np.repeat(group_X, count)
        num_loads = self.rows_RS.shape[1]
        loads = np.zeros(num_groups * num_loads, dtype=np.int64)
        np.add.at(loads, group * num_loads + self.load_T[term], self.value_T[term])
        return loads.reshape(num_groups, num_loads)

    def _terms(self, entry_X: Ints) -> tuple[Ints, Ints]:
        start, count = self.pointer_Z1[entry_X], self.pointer_Z1[entry_X + 1] - self.pointer_Z1[entry_X]
        return np.arange(int(count.sum())) + np.repeat(start - (np.cumsum(count) - count), count), count

    def with_limits(self, limits_R: Ints) -> AssignmentModel:
        """The same problem under other limits; everything else is shared."""
        other = copy.copy(self)
        object.__setattr__(other, "limits_R", limits_R)
        return other

    def with_maximum_at_most(self, rows_KS: Whole, limit: int, rest_S: Whole | int = 0) -> AssignmentModel:
        """The same problem with ``max_k(rows_KS @ loads_S)_k + rest_S @ loads_S <= limit``, as one limit row per k."""
        rows_RS = np.concatenate([self.rows_RS, rows_KS + rest_S])
        limits_R = np.append(self.limits_R, np.full(len(rows_KS), limit))
        return replace(self, rows_RS=rows_RS, limits_R=limits_R)

    def complete(self, labels_N: Ints) -> Ints:
        """A copy with every derived node as its parents imply, and every wanted node at 1."""
        result = follow(labels_N, *self._follows)
        if self.wanted is not None:
            self.wanted.fill(result)
        return result


def assemble(
    *,
    sizes: Ints,
    node_terms: Sequence[tuple[Ints, Ints, Ints, Ints]],
    edge_pair: Ints,
    edge_terms: tuple[Ints, Ints, Ints, Ints, Ints],
    ties: Sequence[tuple[int, int, Bools]],
    node_objective: Floats,
    rows: Whole,
    limits: Ints,
    derived: tuple[Derived, ...],
    wanted: Wanted | None = None,
) -> AssignmentModel:
    """Sum terms into flat tables.

    Args:
        sizes: Labels of each node, shape (N,).
        node_terms: Arrays (node, label, load, value) to be summed.
        edge_pair: Node pairs of the raw edges, first < second, shape (X, 2); repeated pairs become one edge.
        edge_terms: Arrays (raw edge, first label, second label, load, value) to be summed.
        ties: (first, second, allowed table) with first < second: pairs of labels that may stand together.
        node_objective: Cost per node and label, flat by node.
        rows: Limit coefficients, shape (R, S).
        limits: Right-hand sides, shape (R,).
        derived: Derived nodes, each after its parents.
        wanted: Nodes that are 1 where another one wants it; ``ties`` must say so too.

    Returns:
        The model.
    """
    num_nodes, num_loads = len(sizes), rows.shape[1]
    offset_N = np.cumsum(sizes) - sizes
    tie_pair = np.array([(a, b) for a, b, _ in ties], dtype=np.int64).reshape(-1, 2)
    code = np.concatenate([edge_pair, tie_pair]) @ np.array([num_nodes, 1], dtype=np.int64)
    unique_code, edge_of = np.unique(code, return_inverse=True)
    edges_E2 = np.stack([unique_code // max(num_nodes, 1), unique_code % max(num_nodes, 1)], axis=1)
    sizes_E = sizes[edges_E2[:, 0]] * sizes[edges_E2[:, 1]]
    num_node_entries = int(sizes.sum())
    offset_E = num_node_entries + np.cumsum(sizes_E) - sizes_E
    num_entries = num_node_entries + int(sizes_E.sum())
    keys, values = [], []
    for node, label, load, value in node_terms:
        keys.append((offset_N[node] + label) * num_loads + load)
        values.append(value)
    raw, first, second, load, value = edge_terms
    edge = edge_of[raw]
    keys.append((offset_E[edge] + first * sizes[edges_E2[edge, 1]] + second) * num_loads + load)
    values.append(value)
    pointer, load_T, value_T = _sum_terms(np.concatenate(keys), np.concatenate(values), num_entries, num_loads)
    allowed_Z = np.ones(num_entries, dtype=np.bool_)
    for (_, _, allowed), edge_index in zip(ties, edge_of[len(edge_pair) :], strict=True):
        allowed_Z[offset_E[edge_index] : offset_E[edge_index] + allowed.size] &= allowed.ravel()
    objective_Z = np.zeros(num_entries)
    objective_Z[:num_node_entries] = node_objective
    return AssignmentModel(
        sizes_N=sizes, edges_E2=edges_E2, objective_Z=objective_Z, allowed_Z=allowed_Z, pointer_Z1=pointer,
        load_T=load_T, value_T=value_T, rows_RS=rows, limits_R=limits, derived=derived, wanted=wanted,
    )  # fmt: skip


def _sum_terms(key: Ints, value: Ints, num_entries: int, num_loads: int) -> tuple[Ints, Ints, Ints]:
    """Sum the values of equal keys exactly, and give them as (pointer, load, value) by entry."""
    order = np.argsort(key, kind="stable")
    key, value = key[order], value[order]
    starts = np.flatnonzero(np.diff(key, prepend=-1))
    summed = np.add.reduceat(value, starts) if len(starts) else value
    kept = summed != 0
    key, summed = key[starts][kept], summed[kept]
    entry, load = key // num_loads, key % num_loads
    pointer = np.searchsorted(entry, np.arange(num_entries + 1))
    return pointer, load, summed


def _flat(derived: Sequence[Derived]) -> tuple[Ints, Ints, Ints]:
    """Derived nodes with both parents and the place of their tables (D, 4), widths (D,), and the tables, each once."""
    place: dict[tuple[tuple[int, ...], ...], int] = {}
    tables: list[int] = []
    rows, widths = [], []
    for item in derived:
        at = place.get(item.label_AB)
        if at is None:
            at = place[item.label_AB] = len(tables)
            for row in item.label_AB:
                tables += row
        rows.append((item.node, item.first, item.second, at))
        widths.append(len(item.label_AB[0]))
    table = np.array(rows, dtype=np.int64).reshape(-1, 4)
    return table, np.array(widths, dtype=np.int64), np.array(tables, dtype=np.int64)


def root(parent: list[int], node: int) -> int:
    """The root of a node's part; paths are halved on the way, in place."""
    while parent[node] != node:
        parent[node] = parent[parent[node]]
        node = parent[node]
    return node


@compiled("float64[::1](float64[::1],float64,float64[::1],float64[::1],int64[::1],int64[::1],boolean[::1])")
def price(
    objective_Z: Floats,
    weight: float,
    value_T: Floats,
    price_S: Floats,
    load_T: Ints,
    pointer_Z1: Ints,
    allowed_Z: Bools,
) -> Floats:  # fmt: skip
    """Tables with prices of loads added, forbidden entries infinite."""
    cost_Z = np.empty(len(objective_Z))
    for entry in range(len(objective_Z)):
        added = 0.0
        for term in range(pointer_Z1[entry], pointer_Z1[entry + 1]):
            added += value_T[term] * price_S[load_T[term]]
        cost_Z[entry] = objective_Z[entry] * weight + added if allowed_Z[entry] else np.inf
    return cost_Z


@compiled("int64[::1](int64[::1],int64[::1],int64[:,::1],int64[::1],int64[::1])")
def choose(labels_N: Ints, sizes_N: Ints, edges_E2: Ints, offset_N: Ints, offset_E: Ints) -> Ints:
    """Chosen entries of nodes, then of edges."""
    num_nodes = len(labels_N)
    entries = np.empty(num_nodes + len(edges_E2), dtype=np.int64)
    for node in range(num_nodes):
        entries[node] = offset_N[node] + labels_N[node]
    for edge in range(len(edges_E2)):
        second = edges_E2[edge, 1]
        entries[num_nodes + edge] = offset_E[edge] + labels_N[edges_E2[edge, 0]] * sizes_N[second] + labels_N[second]
    return entries


@compiled("int64[::1](int64[::1],int64[::1],int64[::1],int64[::1],int64)")
def sum_loads(entry_X: Ints, pointer_Z1: Ints, load_T: Ints, value_T: Ints, num_loads: int) -> Ints:
    """Loads of table entries together."""
    loads_S = np.zeros(num_loads, dtype=np.int64)
    for entry in entry_X:
        for term in range(pointer_Z1[entry], pointer_Z1[entry + 1]):
            loads_S[load_T[term]] += value_T[term]
    return loads_S


@compiled("int64[::1](int64[::1],int64[::1],int64[::1],int64[::1],int64)")
def sum_steps(row: Ints, load: Ints, sign: Ints, loads_S: Ints, num_rows: int) -> Ints:
    """Left-hand sides of rows that are given by their steps."""
    left_R = np.zeros(num_rows, dtype=np.int64)
    for step in range(len(row)):
        left_R[row[step]] += sign[step] * loads_S[load[step]]
    for r in range(1, num_rows):
        left_R[r] += left_R[r - 1]
    return left_R


@compiled("int64[::1](int64[::1],int64[:,::1],int64[::1],int64[::1])")
def follow(labels_N: Ints, derived_D4: Ints, width_D: Ints, tables: Ints) -> Ints:
    """Labels with the derived ones set."""
    labels = labels_N.copy()
    for d in range(len(width_D)):
        first, second = labels[derived_D4[d, 1]], labels[derived_D4[d, 2]]
        labels[derived_D4[d, 0]] = tables[derived_D4[d, 3] + first * width_D[d] + second]
    return labels
