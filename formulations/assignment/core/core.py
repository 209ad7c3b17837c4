"""The core: the undecided part of a model around a priced minimum, with the cost of each deviation from it.

Given prices, their priced minimum (the base labelling) and the entries that may still be chosen, the core is the set of
nodes with more than one label left. Everything is measured as a difference to the base: per node and label, and per
pair of core nodes where the two deviations do not simply add up.

Axes: C core nodes, A and B their labels left (the base first), R limit rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from qsync_opt.formulations.assignment.model import AssignmentModel, Bools, Floats, Ints

_FEW_ROWS = 16
"""With more rows, those that cannot bind are dropped before any table of rows is formed."""
_MAX_PAIRED_ROWS = 200


@dataclass(slots=True)
class CoreNode:
    """A core node: its labels left, base first, and what each adds to objective, rows and priced cost."""

    node: int
    labels_A: Ints
    objective_A: Floats
    rows_AR: Ints
    priced_A: Floats
    counted: bool = False  # labels are numbers of copies, and every table is proportional to them


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
    ``prices_R`` are the prices of the rows that are left.
    """

    base_N: Ints
    objective: float
    priced: float
    excess_R: Ints
    nodes: list[CoreNode]
    edges: list[CoreEdge]
    prices_R: Floats

    def labels(self, choice_C: Ints) -> Ints:
        """The labelling in which core node c takes its label number ``choice_C[c]``."""
        labels_N = self.base_N.copy()
        for item, choice in zip(self.nodes, choice_C.tolist(), strict=True):
            labels_N[item.node] = item.labels_A[choice]
        return labels_N


@dataclass(slots=True)
class CoreResult:
    """The best labelling found, if any beats the incumbent, and a bound.

    No labelling of the core within the limits is below ``bound``, except where it is not below the incumbent.
    """

    labels_N: Ints | None
    objective: float
    bound: float


def extract(model: AssignmentModel, base_N: Ints, allowed_Z: Bools, prices_R: Floats) -> Core:
    """Extract the core.

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
    # The labels left of every node, the base first; of a node outside of the core the base alone.
    left_NA[np.flatnonzero(position_N < 0)] = False
    left_NA[np.arange(model.num_nodes), base_N] = True
    rank_NA = np.where(left_NA, np.arange(num_labels), num_labels)
    rank_NA[np.arange(model.num_nodes), base_N] = -1
    labels_NA = np.argsort(rank_NA, axis=1, kind="stable")
    count_N = left_NA.sum(axis=1)
    excess = model.excess(base_N)
    kept = _rows_left(model, base_N, allowed_Z, excess) if len(excess) > _FEW_ROWS else np.arange(len(excess))
    edges_X = np.flatnonzero((position_N[model.edges_E2] >= 0).any(axis=1))
    first, second = model.edges_E2[edges_X].T
    # All tables one after the other: of nodes by label, of edges by the first label and then the second one.
    is_left_CA = np.arange(num_labels) < count_N[core_N, None]
    node_entry = (model.offset_N[core_N, None] + labels_NA[core_N])[is_left_CA]
    is_left_XA = np.arange(num_labels) < count_N[first, None]
    is_left_XB = np.arange(num_labels) < count_N[second, None]
    is_left_XAB = is_left_XA[:, :, None] & is_left_XB[:, None, :]
    edge_entry = (
        model.offset_E[edges_X, None, None]
        + labels_NA[first][:, :, None] * model.sizes_N[second, None, None]
        + labels_NA[second][:, None, :]
    )[is_left_XAB]
    sizes = np.concatenate([count_N[core_N], count_N[first] * count_N[second]])
    entries = np.concatenate([node_entry, edge_entry])
    objective_Z, rows_ZR, priced_Z = _differences(model, entries, sizes, kept, prices_R)
    forbidden_Z = ~allowed_Z[entries]
    objective_Z[: len(node_entry)][forbidden_Z[: len(node_entry)]] = np.inf
    node_tables = objective_Z[: len(node_entry)], rows_ZR[: len(node_entry)], priced_Z[: len(node_entry)]
    edge_tables = objective_Z[len(node_entry) :], rows_ZR[len(node_entry) :], priced_Z[len(node_entry) :]
    edges = _split(
        position_N[first], position_N[second], is_left_XAB, node_tables, edge_tables, sizes[: len(core_N)],
        forbidden_Z[len(node_entry) :],
    )  # fmt: skip
    nodes = [
        CoreNode(node, labels_NA[node, : end - start], node_tables[0][start:end], node_tables[1][start:end],
                 node_tables[2][start:end])
        for node, start, end in _spans(core_N, sizes[: len(core_N)])
    ]  # fmt: skip
    objective = model.objective(base_N)
    priced = objective + float(excess @ prices_R)
    core = Core(base_N, objective, priced, excess[kept], nodes, edges, prices_R[kept])
    _drop_rows(core)
    return core


def _spans(names: Ints, sizes: Ints) -> Iterator[tuple[int, int, int]]:
    ends = np.cumsum(sizes)
    return zip(names.tolist(), (ends - sizes).tolist(), ends.tolist(), strict=True)


def _differences(
    model: AssignmentModel, entries: Ints, sizes: Ints, kept: Ints, prices_R: Floats
) -> tuple[Floats, Ints, Floats]:
    """Objective, rows and priced cost of tables of entries, less those of each table's first entry."""
    rows_XR, priced_X = model.amounts(entries, kept, prices_R)
    objective_X = model.objective_Z[entries]
    head = np.repeat(np.cumsum(sizes) - sizes, sizes)
    objective_X = objective_X - objective_X[head]
    return objective_X, rows_XR - rows_XR[head], objective_X + (priced_X - priced_X[head])


def _split(
    first_X: Ints,
    second_X: Ints,
    is_left_XAB: Bools,
    node_tables: tuple[Floats, Ints, Floats],
    edge_tables: tuple[Floats, Ints, Floats],
    node_sizes: Ints,
    forbidden_Z: Bools,
) -> list[CoreEdge]:
    """Move the parts of the edges' tables that depend on one side to the nodes; the rest, if any, are the edges.

    Axes: X edges that touch the core, Z entries of all their tables, one after the other.

    Args:
        first_X: Positions of their first ends, -1 where it is not in the core.
        second_X: Likewise of their second ends.
        is_left_XAB: Labels left at both ends.
        node_tables: Objective, rows and priced cost of the nodes' labels; they grow.
        edge_tables: The same of the edges.
        node_sizes: Labels of each core node.
        forbidden_Z: Pairs that may not be chosen; their amounts have no meaning.
    """
    if not len(first_X):
        return []
    size_a_X, size_b_X = is_left_XAB[:, :, 0].sum(axis=1), is_left_XAB[:, 0].sum(axis=1)
    edge_Z, a_Z, b_Z = np.nonzero(is_left_XAB)
    sizes = size_a_X * size_b_X
    start_Z = np.repeat(np.cumsum(sizes) - sizes, sizes)
    by_a, by_b = start_Z + a_Z * size_b_X[edge_Z], start_Z + b_Z  # the entries of one label and the other's base
    node_starts = np.cumsum(node_sizes) - node_sizes
    inner_Z = (first_X >= 0)[edge_Z] & (second_X >= 0)[edge_Z]
    to_a = np.flatnonzero(np.where(inner_Z, b_Z == 0, first_X[edge_Z] >= 0))
    to_b = np.flatnonzero(np.where(inner_Z, a_Z == 0, second_X[edge_Z] >= 0))
    label_a = node_starts[first_X[edge_Z[to_a]]] + a_Z[to_a]
    label_b = node_starts[second_X[edge_Z[to_b]]] + b_Z[to_b]
    outer_Z = forbidden_Z & ~inner_Z
    objective_Z, rows_ZR, priced_Z = edge_tables
    objective_Z = np.where(forbidden_Z, np.where(inner_Z, 0.0, np.inf), objective_Z)
    priced_Z = np.where(outer_Z, np.inf, priced_Z)
    for table, own in zip(node_tables, (objective_Z, rows_ZR, priced_Z), strict=True):
        np.add.at(table, label_a, own[to_a])
        np.add.at(table, label_b, own[to_b])
    kept = np.flatnonzero(inner_Z)
    by_a, by_b, forbidden_Z = by_a[kept], by_b[kept], forbidden_Z[kept]
    objective_K = objective_Z[kept] - objective_Z[by_a] - objective_Z[by_b]
    rows_KR = rows_ZR[kept] - rows_ZR[by_a] - rows_ZR[by_b]
    priced_K = priced_Z[kept] - priced_Z[by_a] - priced_Z[by_b]
    matters = forbidden_Z | (objective_K != 0) | rows_KR.any(axis=1)
    objective_K[forbidden_Z] = np.inf
    priced_K[forbidden_Z] = np.inf
    inner_X = np.flatnonzero((first_X >= 0) & (second_X >= 0))
    edges = []
    for number, start, end in _spans(inner_X, sizes[inner_X]):
        if matters[start:end].any():
            shape = int(size_a_X[number]), int(size_b_X[number])
            edges.append(
                CoreEdge(
                    int(first_X[number]), int(second_X[number]), objective_K[start:end].reshape(shape),
                    rows_KR[start:end].reshape(*shape, -1), priced_K[start:end].reshape(shape),
                )
            )  # fmt: skip
    return edges


def _rows_left(model: AssignmentModel, base_N: Ints, allowed_Z: Bools, excess_R: Ints) -> Ints:
    """Rows that the core may break and that no row before or after implies, by the range of each load.

    Only neighbouring rows are compared, which is exact enough for nested rows and quick for thousands of them.
    """
    base_Z = np.zeros(len(allowed_Z), dtype=np.bool_)
    base_Z[model.chosen(base_N)] = True
    num_loads = model.rows_RS.shape[1]
    sizes = np.concatenate([model.sizes_N, model.sizes_E])
    table_Z = np.repeat(np.arange(len(sizes)), sizes)
    choices = np.bincount(table_Z[allowed_Z], minlength=len(sizes))
    entry_T = model.entry_T
    used = np.flatnonzero(allowed_Z[entry_T] & (choices[table_Z[entry_T]] > 1))
    key = table_Z[entry_T[used]] * num_loads + model.load_T[used]
    order = np.argsort(key, kind="stable")
    key, value, is_base = key[order], model.value_T[used][order], base_Z[entry_T[used]][order]
    starts = np.flatnonzero(np.diff(key, prepend=-1))
    if not len(starts):
        return np.flatnonzero(excess_R > 0)
    own = np.add.reduceat(np.where(is_base, value, 0), starts)
    partly = np.diff(np.append(starts, len(key))) < choices[key[starts] // num_loads]
    high = np.maximum.reduceat(value, starts)
    low = np.minimum.reduceat(value, starts)
    high, low = np.where(partly, np.maximum(high, 0), high) - own, np.where(partly, np.minimum(low, 0), low) - own
    most_S, least_S = np.zeros(num_loads, dtype=np.int64), np.zeros(num_loads, dtype=np.int64)
    np.add.at(most_S, key[starts] % num_loads, high)
    np.add.at(least_S, key[starts] % num_loads, low)
    row, load, sign = model.steps
    up_R, down_R = np.zeros_like(excess_R), np.zeros_like(excess_R)
    np.add.at(up_R, row, sign * np.where(sign > 0, most_S[load], least_S[load]))
    np.add.at(down_R, row, sign * np.where(sign > 0, least_S[load], most_S[load]))
    rising, falling = excess_R + np.cumsum(up_R), excess_R + np.cumsum(down_R)
    first = np.concatenate([[0], np.maximum.accumulate(np.maximum(rising, 0))[:-1]])
    kept = np.flatnonzero((rising > first) & (excess_R + model.left_sides(most_S) > 0))
    last = np.maximum.accumulate(falling[kept][::-1])[::-1]
    result: Ints = kept[np.append(falling[kept][:-1] > last[1:], True)] if len(kept) else kept
    return result


def _drop_rows(core: Core) -> None:
    """Drop rows that no labelling of the core can break, or that another row implies."""
    excess = core.excess_R
    blocks = [node.rows_AR for node in core.nodes]
    blocks += [edge.rows_ABR.reshape(-1, len(excess)) for edge in core.edges]
    if not blocks:
        return
    starts = np.cumsum([0, *(len(block) for block in blocks)])[:-1]
    stacked = np.concatenate(blocks)
    left = np.flatnonzero(excess + np.maximum.reduceat(stacked, starts).sum(axis=0) > 0)
    for row in left.tolist() if len(left) <= _MAX_PAIRED_ROWS else []:
        if row in left:
            others = left[left != row]
            # A row is implied if its excess cannot rise above that of ``row``.
            above = np.maximum.reduceat(stacked[:, others] - stacked[:, [row]], starts).sum(axis=0)
            left = left[~np.isin(left, others[excess[others] - excess[row] + above <= 0])]
    if len(left) == len(excess):
        return
    core.excess_R, core.prices_R = excess[left], core.prices_R[left]
    for node in core.nodes:
        node.rows_AR = node.rows_AR[:, left]
    for edge in core.edges:
        edge.rows_ABR = edge.rows_ABR[:, :, left]


def nearest(
    allowed_Z: Bools, least_Z: Floats, exists_NA: Bools, entry_NA: Ints, most_nodes: int | None
) -> tuple[Bools, float]:
    """Keep a choice only at the ``most_nodes`` nodes whose second label is cheapest, by the bounds ``least_Z``.

    Everything else costs at least the float.
    """
    kept_Z = allowed_Z.copy()
    if most_nodes is None or len(exists_NA) <= most_nodes:
        return kept_Z, np.inf
    least_NA = np.where(exists_NA & allowed_Z[entry_NA], least_Z[entry_NA], np.inf)
    second_N = np.partition(least_NA, 1, axis=1)[:, 1]
    order = np.argsort(second_N, kind="stable")
    ceiling = float(second_N[order[most_nodes]])
    out_NA = exists_NA & (least_NA > ceiling)
    out_NA[order[most_nodes:]] = exists_NA[order[most_nodes:]]
    kept_Z[entry_NA[out_NA]] = False
    return kept_Z, ceiling
