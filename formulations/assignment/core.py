"""What is still undecided around a priced minimum, and what does each deviation from it cost? All tables of the core.

Given prices, their priced minimum (the base labelling) and the entries that may still be chosen, the core are the nodes
with more than one label left. Everything is measured as a difference to the base: per node and label, and per pair of
core nodes where the two deviations do not simply add up.

Axes: C core nodes, A and B their labels left (the base first), R limit rows.
"""

from dataclasses import dataclass

import numpy as np

from qsync_opt.formulations.assignment.model import AssignmentModel, Bools, Floats, Ints
from qsync_opt.formulations.compiled import compiled

_FEW_ROWS = 16
"""With more rows, those that cannot bind are sought before any table of rows is made."""
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
    labels = []
    for node in core_N.tolist():
        own = np.flatnonzero(left_NA[node])
        labels.append(np.concatenate([base_N[node : node + 1], own[own != base_N[node]]]))
    excess = model.excess(base_N)
    kept = _rows_left(model, base_N, allowed_Z, excess) if len(excess) > _FEW_ROWS else np.arange(len(excess))
    edges_X = np.flatnonzero((position_N[model.edges_E2] >= 0).any(axis=1))
    ends = position_N[model.edges_E2[edges_X]].tolist()
    tables = [model.offset_N[node] + own for node, own in zip(core_N, labels, strict=True)]
    for edge, (first, second) in zip(edges_X.tolist(), ends, strict=True):
        a, b = model.edges_E2[edge]
        own_a = labels[first] if first >= 0 else base_N[a : a + 1]
        own_b = labels[second] if second >= 0 else base_N[b : b + 1]
        tables.append(model.offset_E[edge] + own_a[:, None] * model.sizes_N[b] + own_b)
    blocks = _differences(model, tables, allowed_Z, kept, prices_R)
    nodes = [
        CoreNode(int(node), own, *block) for node, own, block in zip(core_N, labels, blocks[: len(core_N)], strict=True)
    ]
    edges = [_join(nodes, a, b, *block) for (a, b), block in zip(ends, blocks[len(core_N) :], strict=True)]
    objective = model.objective(base_N)
    priced = objective + float(excess @ prices_R)
    core = Core(
        base_N, objective, priced, excess[kept], nodes, [edge for edge in edges if edge is not None], prices_R[kept]
    )
    _drop_rows(core)
    return core


def _differences(
    model: AssignmentModel, tables: list[Ints], allowed_Z: Bools, kept: Ints, prices_R: Floats
) -> list[tuple[Floats, Ints, Floats]]:
    """Objective, rows and priced cost of tables of entries, less those of each table's first entry."""
    if not tables:
        return []
    flat = np.concatenate([table.ravel() for table in tables])
    rows_XR, priced_X = model.amounts(flat, kept, prices_R)
    objective_X = model.objective_Z[flat]
    starts = np.cumsum([0, *(table.size for table in tables)])
    head = np.repeat(starts[:-1], np.diff(starts))
    rows_XR = rows_XR - rows_XR[head]
    objective_X = objective_X - objective_X[head]
    priced_X = objective_X + (priced_X - priced_X[head])
    objective_X = np.where(allowed_Z[flat], objective_X, np.inf)
    return [
        (objective_X[i:k].reshape(t.shape), rows_XR[i:k].reshape(*t.shape, -1), priced_X[i:k].reshape(t.shape))
        for t, i, k in zip(tables, starts[:-1].tolist(), starts[1:].tolist(), strict=True)
    ]


def _join(
    nodes: list[CoreNode], first: int, second: int, objective_AB: Floats, rows_ABR: Ints, priced_AB: Floats
) -> CoreEdge | None:
    """Give the parts of an edge's table that depend on one side to that node; what is left, if anything, is an edge."""
    if second < 0 or first < 0:
        node = nodes[max(first, second)]
        node.objective_A += objective_AB.ravel()
        node.rows_AR += rows_ABR.reshape(node.rows_AR.shape)
        node.priced_A += np.where(np.isfinite(objective_AB), priced_AB, np.inf).ravel()
        return None
    a, b = nodes[first], nodes[second]
    left = _split(
        objective_AB, rows_ABR, priced_AB, a.objective_A, a.rows_AR, a.priced_A, b.objective_A, b.rows_AR, b.priced_A
    )
    return CoreEdge(first, second, objective_AB, rows_ABR, priced_AB) if left else None


def _split_plain(
    objective_AB: Floats, rows_ABR: Ints, priced_AB: Floats, objective_A: Floats, rows_AR: Ints, priced_A: Floats,
    objective_B: Floats, rows_BR: Ints, priced_B: Floats,
) -> bool:  # fmt: skip
    forbidden = np.isinf(objective_AB)
    # A forbidden pair's own numbers mean nothing: count its objective as zero, the infinity is put back below.
    plain_AB = np.where(forbidden, 0.0, objective_AB)
    objective_A += plain_AB[:, 0]
    rows_AR += rows_ABR[:, 0]
    priced_A += priced_AB[:, 0]
    objective_B += plain_AB[0]
    rows_BR += rows_ABR[0]
    priced_B += priced_AB[0]
    objective_AB[:] = plain_AB - plain_AB[:, :1] - plain_AB[:1]
    rows_ABR[:] = rows_ABR - rows_ABR[:, :1] - rows_ABR[:1]
    priced_AB[:] = priced_AB - priced_AB[:, :1] - priced_AB[:1]
    left = bool(forbidden.any() or rows_ABR.any() or objective_AB.any())
    objective_AB[forbidden] = np.inf
    priced_AB[forbidden] = np.inf
    return left


@compiled(
    "boolean(float64[:,::1],int64[:,:,::1],float64[:,::1],float64[::1],int64[:,::1],float64[::1],float64[::1],"
    "int64[:,::1],float64[::1])",
    plain=_split_plain,
)
def _split(
    objective_AB: Floats, rows_ABR: Ints, priced_AB: Floats, objective_A: Floats, rows_AR: Ints, priced_A: Floats,
    objective_B: Floats, rows_BR: Ints, priced_B: Floats,
) -> bool:  # fmt: skip
    """Move what depends on one side from an edge's tables to its nodes', in place; tells whether anything is left."""
    size_a, size_b, rows = rows_ABR.shape
    own_A, own_B = np.zeros(size_a), np.zeros(size_b)
    for a in range(size_a):
        own_A[a] = 0.0 if np.isinf(objective_AB[a, 0]) else objective_AB[a, 0]
        objective_A[a] += own_A[a]
        priced_A[a] += priced_AB[a, 0]
        for r in range(rows):
            rows_AR[a, r] += rows_ABR[a, 0, r]
    for b in range(size_b):
        own_B[b] = 0.0 if np.isinf(objective_AB[0, b]) else objective_AB[0, b]
        objective_B[b] += own_B[b]
        priced_B[b] += priced_AB[0, b]
        for r in range(rows):
            rows_BR[b, r] += rows_ABR[0, b, r]
    left = False
    for a in range(size_a - 1, -1, -1):  # from the last on, so that the first row and column are still as they were
        for b in range(size_b - 1, -1, -1):
            forbidden = np.isinf(objective_AB[a, b])
            objective = (0.0 if forbidden else objective_AB[a, b]) - own_A[a] - own_B[b]
            left = left or forbidden or objective != 0.0
            objective_AB[a, b] = np.inf if forbidden else objective
            priced = priced_AB[a, b] - priced_AB[a, 0] - priced_AB[0, b]
            priced_AB[a, b] = np.inf if forbidden else priced
            for r in range(rows):
                rows_ABR[a, b, r] = rows_ABR[a, b, r] - rows_ABR[a, 0, r] - rows_ABR[0, b, r]
                left = left or rows_ABR[a, b, r] != 0
    return left


def _rows_left(model: AssignmentModel, base_N: Ints, allowed_Z: Bools, excess_R: Ints) -> Ints:
    """Rows that the core may break and that no row before or after implies, by the range of each load.

    Only neighbouring rows are compared, which is exact enough for nested rows and quick for thousands of them.
    """
    base_Z = np.zeros(len(allowed_Z), dtype=np.bool_)
    base_Z[model.chosen(base_N)] = True
    num_loads = model.rows_RS.shape[1]
    sizes_E = model.sizes_N[model.edges_E2[:, 0]] * model.sizes_N[model.edges_E2[:, 1]]
    table_Z = np.repeat(np.arange(len(model.sizes_N) + len(sizes_E)), np.concatenate([model.sizes_N, sizes_E]))
    choices = np.bincount(table_Z[allowed_Z], minlength=len(model.sizes_N) + len(sizes_E))
    entry_T = np.repeat(np.arange(len(allowed_Z)), np.diff(model.pointer_Z1))
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
    """Leave out rows that no labelling of the core can break, or that another row implies."""
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
    """Leave a choice only to the nodes whose second label is least dear; what goes costs the float or more.

    Args:
        allowed_Z: Entries that are left.
        least_Z: Bound of a labelling with the entry.
        exists_NA: Labels of each node.
        entry_NA: Entry of each label.
        most_nodes: How many nodes keep a choice; None: all of them.
    """
    tried_Z = allowed_Z.copy()
    if most_nodes is None or len(exists_NA) <= most_nodes:
        return tried_Z, np.inf
    least_NA = np.where(exists_NA & allowed_Z[entry_NA], least_Z[entry_NA], np.inf)
    second_N = np.partition(least_NA, 1, axis=1)[:, 1]
    order = np.argsort(second_N, kind="stable")
    ceiling = float(second_N[order[most_nodes]])
    out_NA = exists_NA & (least_NA > ceiling)
    out_NA[order[most_nodes:]] = exists_NA[order[most_nodes:]]
    tried_Z[entry_NA[out_NA]] = False
    return tried_Z, ceiling
