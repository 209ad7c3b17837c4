"""One device type of a problem as an assignment model, and labellings as plans.

Device types share nothing but the latency limit, so each is collapsed and solved alone. Loads are the work segments
between the rows of the latency limit that can bind, then memory. Casts become pairwise tables; what depends on one
side only moves to the nodes, exactly, and edges left empty disappear.

Axes: O operators, P precisions, X operator edges, A and B labels of an edge's two carriers.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from qsync_opt.errors import ProblemError
from qsync_opt.formulations.assignment import AssignmentModel, Bools, Floats, Ints, assemble
from qsync_opt.formulations.training.fold import CONSTANT, Folding, fold
from qsync_opt.formulations.training.tables import (
    DeviceTables,
    GraphTables,
    LatencyRows,
    binding_rows,
    cast_backward,
    cast_forward,
    device_tables,
    graph_tables,
    latency_rows,
)
from qsync_opt.model import Role
from qsync_opt.training import Problem, ProblemDevice, merge_groups

FORWARD, BACKWARD, MEMORY = 0, 1, 2
"""Kinds of amounts before they become loads."""
DROPPED = -1
"""Load of work that no row counts."""
NO_TIE = -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Collapsed:
    """One device type as an assignment model.

    Attributes:
        model: The problem; its last row is the memory limit, the others are the latency rows.
        tables: The device type's costs.
        constant_objective: Sensitivity of the operators of constant precision.
        memory_limit_kib: The memory limit in the model.
        latency_limit_ns: The latency limit in the model.
        tied: Groups of operators that share one precision.
    """

    problem: Problem
    device: ProblemDevice
    graph: GraphTables
    tables: DeviceTables
    folding: Folding
    rows: LatencyRows
    model: AssignmentModel
    constant_objective: float
    memory_limit_kib: int
    latency_limit_ns: int
    tied: Sequence[Sequence[str]]

    def under(self, latency_limit_ns: int, memory_limit_kib: int) -> Collapsed:
        """The same device type under other limits."""
        return collapse(
            self.problem, self.device, graph=self.graph, tied=self.tied, latency_limit_ns=latency_limit_ns,
            memory_limit_kib=memory_limit_kib,
        )  # fmt: skip

    def precisions(self, labels_N: Ints) -> Ints:
        """Precision (rank) of every operator under a labelling."""
        carrier = np.array(self.folding.carrier_O, dtype=np.int64)
        label = np.concatenate([labels_N, [0]])[carrier]  # the last is CONSTANT's
        precisions: Ints = self.folding.map_array()[np.array(self.folding.map_O, dtype=np.int64), label]
        return precisions

    def choices(self, labels_N: Ints) -> dict[str, str]:
        """Precision of every adjustable operator, by name."""
        formats = tuple(self.problem.formats)
        precisions = self.precisions(labels_N).tolist()
        return {name: formats[precisions[row]] for row, name in self.graph.adjustable}

    def memory_kib(self, labels_N: Ints) -> int:
        """Exact memory of this device type under a labelling."""
        return int(self.model.excess(labels_N)[-1]) + self.memory_limit_kib

    def labels(self, choices: Mapping[str, str]) -> Ints:
        """The labelling of a plan for this device type."""
        formats = tuple(self.problem.formats)
        labels_N = np.zeros(self.model.num_nodes, dtype=np.int64)
        for row, name in enumerate(self.graph.names):
            carrier = self.folding.carrier_O[row]
            if carrier != CONSTANT and not self.graph.dependent_O[row]:
                precisions = self.folding.maps[self.folding.map_O[row]]
                labels_N[carrier] = precisions.index(formats.index(choices[name]))
        return self.model.complete(labels_N)


def collapse(
    problem: Problem,
    device: ProblemDevice,
    *,
    graph: GraphTables | None = None,
    latency_limit_ns: int | None = None,
    memory_limit_kib: int | None = None,
    tied: Sequence[Sequence[str]] = (),
    all_rows: bool = False,
) -> Collapsed:
    """Write one device type as an assignment model.

    Args:
        problem: The problem.
        device: One of its device types.
        graph: ``graph_tables(problem)`` if it is at hand.
        latency_limit_ns: Another limit than the problem's.
        memory_limit_kib: Another limit than the device's.
        tied: Groups of adjustable operators that must all run in one precision.
        all_rows: Keep latency rows that other rows imply at these limits, for a caller who adds to them.

    Returns:
        The collapsed problem.

    Raises:
        ProblemError: A tied group names an unknown operator or operators with different tables.

    Source: ours.
    """
    limit_ns = problem.latency_limit_ns if latency_limit_ns is None else latency_limit_ns
    limit_kib = device.memory_limit_kib if memory_limit_kib is None else memory_limit_kib
    graph, tables = graph or graph_tables(problem), device_tables(problem, device)
    shared = problem.cast_sharing == "producer"
    folding = fold(graph, tables, _tied_to(problem, graph, tables, tied), shared=shared)
    sharing = share_casts(graph, tables, folding) if shared else SharedCasts()
    every_row = latency_rows(problem, graph, limit_ns)
    rows = every_row if all_rows else binding_rows(every_row, *_work_range(graph, tables, every_row))
    num_times = len(rows.segment_K)
    time_of_segment = np.searchsorted(rows.segment_K, np.arange(rows.num_segments))
    time_of_segment[time_of_segment == num_times] = DROPPED
    forward_load = 0 if num_times else DROPPED
    load_of = np.concatenate([time_of_segment[rows.segment_O], [forward_load, num_times]])
    terms = _Terms(load_of, num_times + 1)
    maps = folding.map_array()
    carrier, map_O = np.array(folding.carrier_O, dtype=np.int64), np.array(folding.map_O, dtype=np.int64)
    objective = _operator_terms(terms, tables, folding, carrier, maps[map_O])
    _cast_terms(terms, graph, tables, folding, carrier, maps[map_O], shared=shared)
    sharing.add_to(terms)
    rows_RS = np.tril(np.ones((num_times + 1, num_times + 1), dtype=np.int8))
    rows_RS[-1, :-1] = 0  # memory stands alone
    constants = np.append(np.cumsum(terms.constant[:-1]), terms.constant[-1])
    limits = np.append(rows.limit_K, limit_kib) - constants
    empty = np.zeros(0, dtype=np.int64)
    model = assemble(
        sizes=np.array(folding.sizes, dtype=np.int64),
        node_terms=terms.node,
        edge_pair=np.concatenate([np.zeros((0, 2), dtype=np.int64), *terms.pairs]),
        edge_terms=tuple(np.concatenate([empty, *column]) for column in zip(*terms.edge, strict=True))  # type: ignore[arg-type]
        if terms.edge
        else (empty,) * 5,
        ties=folding.ties,
        node_objective=objective,
        rows=rows_RS,
        limits=limits,
        derived=tuple(folding.derived),
        wanted=folding.wanted(),
    )
    constant = carrier == CONSTANT
    constant_objective = float(tables.sensitivity_OP[constant, maps[map_O[constant], 0]].sum())
    return Collapsed(
        problem=problem, device=device, graph=graph, tables=tables, folding=folding, rows=rows, model=model,
        constant_objective=constant_objective, memory_limit_kib=limit_kib, latency_limit_ns=limit_ns, tied=tied,
    )  # fmt: skip


def _tied_to(
    problem: Problem, graph: GraphTables, tables: DeviceTables, tied: Sequence[Sequence[str]]
) -> dict[int, int]:
    index = {name: i for i, name in enumerate(graph.names)}
    result: dict[int, int] = {}
    for group in merge_groups(tied):
        for name in group:
            if name not in index or problem.operators[index[name]].role is not Role.ADJUSTABLE:
                raise ProblemError(f"tied operators: {name!r} is no adjustable operator; name adjustable ones only")
        first, *others = sorted(index[name] for name in group)
        for other in others:
            if (tables.available_OP[other] != tables.available_OP[first]).any():
                raise ProblemError(
                    f"tied operators {graph.names[first]!r} and {graph.names[other]!r} have different precisions; "
                    "tie only operators whose tables have the same ones"
                )
            result[other] = first
    return result


def _work_range(graph: GraphTables, tables: DeviceTables, rows: LatencyRows) -> tuple[Ints, Ints]:
    """Least and most work of each segment under any plan; bounds, not always reached."""
    low, high = np.zeros(rows.num_segments, dtype=np.int64), np.zeros(rows.num_segments, dtype=np.int64)
    huge = np.iinfo(np.int64).max
    available = tables.available_OP
    for table, segment in ((tables.forward_OP, None), (tables.backward_OP, rows.segment_O)):
        least = np.where(available, table, huge).min(axis=1)
        where = np.zeros(len(least), dtype=np.int64) if segment is None else segment
        np.add.at(low, where, least)
        np.add.at(high, where, table.max(axis=1))
    source, target = graph.source_X, graph.target_X
    most = np.zeros((2, len(source)), dtype=np.int64)
    for p in range(available.shape[1]):
        for q in range(available.shape[1]):
            possible = available[source, p] & available[target, q]
            elements = graph.elements_O[source]
            forward, _ = cast_forward(tables, elements, np.full(len(source), p), np.full(len(source), q))
            backward = cast_backward(tables, elements, np.full(len(source), p), np.full(len(source), q))
            np.maximum(most[0], np.where(possible, forward, 0), out=most[0])
            np.maximum(most[1], np.where(possible, backward, 0), out=most[1])
    high[0] += most[0].sum()
    np.add.at(high, rows.segment_O[source], most[1])
    return low, high


class _Terms:
    """Collects amounts on nodes and edges before they are summed."""

    def __init__(self, load_of: Ints, num_loads: int) -> None:
        self.node: list[tuple[Ints, Ints, Ints, Ints]] = []
        self.edge: list[tuple[Ints, Ints, Ints, Ints, Ints]] = []
        self.pairs: list[Ints] = []
        self.num_pairs = 0
        self.constant = np.zeros(num_loads, dtype=np.int64)
        self._load_of = load_of

    def load(self, kind: int, operators: Ints) -> Ints:
        """Load index of amounts of a kind charged to operators."""
        if kind == BACKWARD:
            return self._load_of[operators]
        return np.full(len(operators), self._load_of[-2 if kind == FORWARD else -1])

    def add_constant(self, load: Ints, value: Ints) -> None:
        kept = load != DROPPED
        np.add.at(self.constant, load[kept], value[kept])

    def add_node(self, node: Ints, load: Ints, value_XL: Ints) -> None:
        """Amounts for every label of nodes (labels beyond a node's own must be zero)."""
        position, label = np.nonzero((value_XL != 0) & (load != DROPPED)[:, None])
        self.node.append((node[position], label, load[position], value_XL[position, label]))

    def add_edge(self, pair_X2: Ints, load: Ints, value_XAB: Ints) -> None:
        """Amounts for every pair of labels; the part that depends on one side only is added to that node."""
        first_XA = value_XAB[:, :, 0]
        second_XB = value_XAB[:, 0, :] - value_XAB[:, :1, 0]
        rest = value_XAB - first_XA[:, :, None] - second_XB[:, None, :]
        self.add_node(pair_X2[:, 0], load, first_XA)
        self.add_node(pair_X2[:, 1], load, second_XB)
        position, first, second = np.nonzero((rest != 0) & (load != DROPPED)[:, None, None])
        used, raw = np.unique(position, return_inverse=True)
        self.edge.append((raw + self.num_pairs, first, second, load[position], rest[position, first, second]))
        self.pairs.append(pair_X2[used])
        self.num_pairs += len(used)


def _operator_terms(terms: _Terms, tables: DeviceTables, folding: Folding, carrier: Ints, map_OL: Ints) -> Floats:
    """Add the operators' own times and memory; returns the sensitivity per node and label, flat."""
    sizes = np.array(folding.sizes, dtype=np.int64)
    free = np.flatnonzero(carrier != CONSTANT)
    fixed = np.flatnonzero(carrier == CONSTANT)
    exists = np.arange(map_OL.shape[1])[None, :] < (sizes[carrier[free]] if len(free) else free)[:, None]
    for kind, table in ((FORWARD, tables.forward_OP), (BACKWARD, tables.backward_OP), (MEMORY, tables.memory_OP)):
        value = np.where(exists, table[free[:, None], map_OL[free]], 0)
        terms.add_node(carrier[free], terms.load(kind, free), value)
        terms.add_constant(terms.load(kind, fixed), table[fixed, map_OL[fixed, 0]])
    offset = np.cumsum(sizes) - sizes
    operator, label = np.nonzero(exists)
    position = offset[carrier[free[operator]]] + label
    weight = tables.sensitivity_OP[free[operator], map_OL[free[operator], label]]
    objective = np.zeros(int(sizes.sum()))
    np.add.at(objective, position, weight)
    return objective


def _cast_terms(
    terms: _Terms,
    graph: GraphTables,
    tables: DeviceTables,
    folding: Folding,
    carrier: Ints,
    map_OL: Ints,
    *,
    shared: bool,
) -> None:
    """Add casts: constant, on one node, or on a pair of nodes; not the forward ones if they are ``shared``."""
    source, target = graph.source_X, graph.target_X
    sizes = np.array([*folding.sizes, 1], dtype=np.int64)  # the last is CONSTANT's
    left, right = carrier[source], carrier[target]
    swap = (left > right) & (right != CONSTANT) | (left == CONSTANT)
    first, second = np.where(swap, right, left), np.where(swap, left, right)
    kind_of: dict[int, int] = {}
    tie_of = {(a, b): kind_of.setdefault(id(allowed), len(kind_of)) for a, b, allowed in folding.ties}
    tables_of_ties = list({id(allowed): allowed for _, _, allowed in folding.ties}.values())
    pairs = zip(first.tolist(), second.tolist(), strict=True)
    tie = np.array([tie_of.get(pair, NO_TIE) for pair in pairs], dtype=np.int64)
    same = (left == right) & (left != CONSTANT)
    shape = sizes[first] * (int(sizes.max()) + 1) + sizes[second]
    code = (shape * (len(kind_of) + 1) + tie + 1) * 4 + same * 2 + swap
    _, group_X = np.unique(code, return_inverse=True)
    for number in range(int(group_X.max(initial=-1)) + 1):
        member = np.flatnonzero(group_X == number)
        head = member[0]
        own = np.arange(sizes[first[head]])[None, :, None]
        far = own if same[head] else np.arange(sizes[second[head]])[None, None, :]
        low, high = (far, own) if swap[head] else (own, far)
        producer, consumer = source[member][:, None, None], target[member][:, None, None]
        ends = map_OL[producer, low], map_OL[consumer, high]
        elements = graph.elements_O[producer]
        amounts = [(BACKWARD, cast_backward(tables, elements, *ends), source[member])]
        if not shared:
            time, buffer = cast_forward(tables, elements, *ends)
            amounts += [(FORWARD, time, target[member]), (MEMORY, buffer, target[member])]
        for kind, value_XAB, charged in amounts:
            load = terms.load(kind, charged)
            if first[head] == CONSTANT:
                terms.add_constant(load, value_XAB[:, 0, 0])
            elif second[head] == CONSTANT or same[head]:
                terms.add_node(first[member], load, value_XAB[:, :, 0])
            else:
                pair = np.stack([first[member], second[member]], axis=1)
                allowed = None if tie[head] == NO_TIE else tables_of_ties[tie[head]]
                _add_pair(terms, pair, load, value_XAB, allowed)


def _add_pair(terms: _Terms, pair_X2: Ints, load: Ints, value_XAB: Ints, allowed_AB: Bools | None) -> None:
    """Add pairwise amounts; where the tie to a join fixes the parent's part, they belong to the join alone."""
    if allowed_AB is not None:
        row_B = allowed_AB.argmax(axis=0)
        column_XB = value_XAB[:, row_B, np.arange(value_XAB.shape[2])]
        alone = ((value_XAB == column_XB[:, None, :]) | ~allowed_AB).all(axis=(1, 2))
        terms.add_node(pair_X2[alone, 1], load[alone], column_XB[alone])
        pair_X2, load, value_XAB = pair_X2[~alone], load[~alone], value_XAB[~alone]
    terms.add_edge(pair_X2, load, value_XAB)


@dataclass(slots=True)
class SharedCasts:
    """Forward cast times and buffers to be added, with their nodes and amounts, by kind and numbers of labels.

    An edge's table is the outer product of two rows of amounts, one for each of its nodes.
    """

    edges: dict[tuple[int, int, int], list[tuple[tuple[int, int], tuple[int, ...], tuple[int, ...]]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    nodes: dict[tuple[int, int], list[tuple[int, tuple[int, ...]]]] = field(default_factory=lambda: defaultdict(list))
    constants: list[tuple[int, int]] = field(default_factory=list)

    def add(self, producer: int, cost_A: tuple[int, ...], wanted: tuple[int, tuple[int, ...]], kind: int) -> None:
        """Charge ``cost_A`` (by label of the producer's carrier) where the node ``wanted`` is in a state marked 1."""
        node, flags_B = wanted
        if not any(cost_A):
            return
        if node == CONSTANT and producer == CONSTANT:
            self.constants.append((kind, cost_A[0]))
        elif node == CONSTANT:
            self.nodes[kind, len(cost_A)].append((producer, cost_A))
        elif producer in (node, CONSTANT):
            costs = cost_A if producer == node else cost_A[:1] * len(flags_B)
            self.nodes[kind, len(flags_B)].append((node, tuple(map(operator.mul, costs, flags_B))))
        elif producer < node:
            self.edges[kind, len(cost_A), len(flags_B)].append(((producer, node), cost_A, flags_B))
        else:
            self.edges[kind, len(flags_B), len(cost_A)].append(((node, producer), flags_B, cost_A))

    def add_to(self, terms: _Terms) -> None:
        """Add everything to the terms."""
        for (kind, _, _), members in self.edges.items():
            pair_X2, first_XA, second_XB = (np.array(column, dtype=np.int64) for column in zip(*members, strict=True))
            terms.add_edge(pair_X2, terms.load(kind, pair_X2[:, 0]), first_XA[:, :, None] * second_XB[:, None, :])
        for (kind, _), amounts in self.nodes.items():
            node_X, value_XA = (np.array(column, dtype=np.int64) for column in zip(*amounts, strict=True))
            terms.add_node(node_X, terms.load(kind, node_X), value_XA)
        for kind, value in self.constants:
            terms.add_constant(terms.load(kind, np.zeros(1, dtype=np.int64)), np.array([value]))


def share_casts(graph: GraphTables, tables: DeviceTables, folding: Folding) -> SharedCasts:
    """Forward casts and buffers of every output, once per target format; adds the OR nodes to ``folding``.

    Source: ours.
    """
    users: dict[int, list[int]] = defaultdict(list)
    for source, target in zip(graph.source_X.tolist(), graph.target_X.tolist(), strict=True):
        users[source].append(target)
    rank = np.arange(len(tables.bytes_P))
    every = (graph.elements_O[:, None, None], rank[None, :, None], rank[None, None, :])
    time_OPP, buffer_OPP = (amounts.transpose(0, 2, 1).tolist() for amounts in cast_forward(tables, *every))
    result = SharedCasts()
    wants = _Wants(folding)
    for producer, targets in users.items():
        precisions = folding.maps[folding.map_O[producer]]
        carrier = folding.carrier_O[producer]
        for precision in wants.precisions(targets):
            times, buffers = time_OPP[producer][precision], buffer_OPP[producer][precision]
            time, buffer = tuple([times[p] for p in precisions]), tuple([buffers[p] for p in precisions])
            if any(time) or any(buffer):
                some = wants.any_user(targets, precision)
                result.add(carrier, time, some, FORWARD)
                result.add(carrier, buffer, some, MEMORY)
    return result


class _Wants:
    """Precisions that users of an output want; cached by map from labels to precisions, since users share few maps."""

    def __init__(self, folding: Folding) -> None:
        self._folding = folding
        self._flags: dict[tuple[int, int], tuple[tuple[int, ...], bool]] = {}
        self._sorted: dict[tuple[int, ...], list[int]] = {}

    def precisions(self, targets: list[int]) -> list[int]:
        """Precisions of any label of any user, ascending."""
        folding = self._folding
        key = tuple([folding.map_O[target] for target in targets])
        if key not in self._sorted:
            self._sorted[key] = sorted({p for number in key for p in folding.maps[number]})
        return self._sorted[key]

    def any_user(self, targets: list[int], precision: int) -> tuple[int, tuple[int, ...]]:
        """The node, and flags of its states, for whether some user wants a precision; CONSTANT if one always does."""
        folding = self._folding
        flags: dict[int, tuple[int, ...]] = {}
        for target in targets:
            number = folding.map_O[target]
            known = self._flags.get((number, precision))
            if known is None:
                own = tuple([int(p == precision) for p in folding.maps[number]])
                known = self._flags[number, precision] = own, any(own)
            own, is_any = known
            carrier = folding.carrier_O[target]
            if carrier == CONSTANT:
                if own[0]:
                    return CONSTANT, (1,)
            elif is_any:
                before = flags.get(carrier)
                flags[carrier] = own if before is None else tuple(map(max, before, own))
        for states in flags.values():
            if all(states):
                return CONSTANT, (1,)
        if len(flags) > 1:
            return folding.add_wanted(flags), (0, 1)
        return next(iter(flags.items()))
