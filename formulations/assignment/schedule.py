"""Order in which nodes are minimised out, and the tables that are then summed; planned once per graph.

A round takes nodes of which no two are neighbours, those with small tables first; a chain of n nodes takes about
log2(n) rounds. Minimising a node out sums all tables that mention it and leaves a message, a table over its
neighbours (its bag), which is added to the table over the same nodes if there is one.

Tables lie in one buffer: those of the model first, in its order, then the messages over new sets of nodes.

Axes: I nodes in the order of elimination, K their neighbours then, F tables to be summed, N nodes by number.

Source: bucket elimination (Dechter 1999) in order of table size; rounds are ours.
"""

from dataclasses import dataclass

import numpy as np

from qsync_opt.formulations.assignment.compiled import compiled
from qsync_opt.formulations.assignment.model import AssignmentModel, Ints

MAX_TABLE_ENTRIES = 1 << 17
"""A larger table is never formed: the graph is relaxed instead (see `relax`)."""
_SMALL_TABLE = 64
"""Nodes of tables up to this size are minimised out before all others, many at a time."""
_FEW_NEIGHBOURS = 3


class TooWideError(Exception):
    """An elimination table would be too large; ``remaining`` are the nodes of the part that is too dense."""

    def __init__(self, remaining: list[int]) -> None:
        super().__init__(f"{len(remaining)} nodes are too densely connected")
        self.remaining = remaining


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """The order of elimination, flat.

    Attributes:
        node_I: Nodes in order.
        bag_I1: The neighbours of node i are ``bag_I1[i]:bag_I1[i + 1]`` of ``bag_K``, ascending.
        bag_K: Neighbours.
        target_I: Where each message begins in the buffer; row-major over the neighbours.
        factor_I1: The tables of node i are ``factor_I1[i]:factor_I1[i + 1]``, largest first.
        offset_F: Where each of them begins in the buffer.
        stride_I1: The strides of node i's tables begin at ``stride_I1[i]``: for each table one for the node itself and
            one for each neighbour, 0 where the table does not depend on it.
        stride_J: Strides.
        cells_I1: Entries of messages before node i.
        entries_I1: Entries of whole tables before node i.
        end: Size of the buffer.
    """

    node_I: Ints
    bag_I1: Ints
    bag_K: Ints
    target_I: Ints
    factor_I1: Ints
    offset_F: Ints
    stride_I1: Ints
    stride_J: Ints
    cells_I1: Ints
    entries_I1: Ints
    end: int


def plan(model: AssignmentModel) -> Schedule:
    """Plan the order for the graph of a model.

    Raises:
        TooWideError: A table would exceed ``MAX_TABLE_ENTRIES``.
    """
    most = max(_SMALL_TABLE, MAX_TABLE_ENTRIES)
    arrays = _eliminate(
        model.sizes_N, model.edges_E2, model.offset_N, model.offset_E, len(model.objective_Z), _SMALL_TABLE, most
    )
    node_I, bag_I1, bag_K, target_I, factor_I1, offset_F, stride_J, end, left = arrays
    if len(left):
        raise TooWideError(left.tolist())
    width_I, count_I = np.diff(bag_I1), np.diff(factor_I1)
    cells_I = np.ones(len(node_I), dtype=np.int64)
    some = np.flatnonzero(width_I)
    if len(some):
        cells_I[some] = np.multiply.reduceat(model.sizes_N[bag_K], bag_I1[some])
    entries_I = cells_I * model.sizes_N[node_I]
    return Schedule(
        node_I=node_I, bag_I1=bag_I1, bag_K=bag_K, target_I=target_I, factor_I1=factor_I1,
        offset_F=offset_F, stride_I1=_ends(count_I * (width_I + 1)), stride_J=stride_J, cells_I1=_ends(cells_I),
        entries_I1=_ends(entries_I), end=end,
    )  # fmt: skip


def _ends(count_I: Ints) -> Ints:
    return np.concatenate([[0], np.cumsum(count_I)])


_Arrays = tuple[Ints, Ints, Ints, Ints, Ints, Ints, Ints, int, Ints]


@compiled("(int64[::1],int64[:,::1],int64[::1],int64[::1],int64,int64,int64)")
def _eliminate(
    sizes_N: Ints, edges_E2: Ints, offset_N: Ints, offset_E: Ints, num_entries: int, small: int, most: int
) -> _Arrays:
    """Nodes in order with neighbours, tables and messages; the last array holds those that cannot be minimised out."""
    num_nodes, num_tables = len(sizes_N), len(edges_E2)
    # A table is a run of ascending nodes. Each node has a chain of links to its tables; dead ones leave it in passing.
    table_end = np.empty(num_tables + num_nodes + 1, dtype=np.int64)
    table_offset = np.empty(num_tables + num_nodes, dtype=np.int64)
    alive = np.ones(num_tables + num_nodes, dtype=np.bool_)
    link_node = np.empty(2 * num_tables + 16, dtype=np.int64)
    link_table = np.empty(2 * num_tables + 16, dtype=np.int64)
    link_next = np.empty(2 * num_tables + 16, dtype=np.int64)
    head_N = np.full(num_nodes, -1, dtype=np.int64)
    links = 0
    table_end[0] = 0
    for edge in range(num_tables):
        for side in range(2):
            node = edges_E2[edge, side]
            link_node[links], link_table[links], link_next[links] = node, edge, head_N[node]
            head_N[node] = links
            links += 1
        table_end[edge + 1] = links
        table_offset[edge] = offset_E[edge]
    end = num_entries
    node_I, target_I = np.empty(num_nodes, dtype=np.int64), np.empty(num_nodes, dtype=np.int64)
    bag_I1, factor_I1 = np.zeros(num_nodes + 1, dtype=np.int64), np.zeros(num_nodes + 1, dtype=np.int64)
    bag_K = np.empty(4 * num_nodes + 16, dtype=np.int64)
    offset_F = np.empty(4 * num_nodes + 16, dtype=np.int64)
    stride_J = np.empty(16 * num_nodes + 64, dtype=np.int64)
    num_bag, num_factors, num_strides, done = 0, 0, 0, 0
    remaining, entries_N = np.arange(num_nodes), np.empty(num_nodes, dtype=np.int64)
    seen_N, stamp = np.full(num_nodes, -1, dtype=np.int64), 0
    blocked_N = np.full(num_nodes, -1, dtype=np.int64)
    place_N = np.zeros(num_nodes, dtype=np.int64)
    number = 0
    while len(remaining):
        limit = most + 1
        for node in remaining:
            stamp += 1
            seen_N[node] = stamp
            near, entries, before, link = 0, sizes_N[node], -1, head_N[node]
            while link >= 0 and (near < _FEW_NEIGHBOURS or entries <= most):
                table = link_table[link]
                if alive[table]:
                    before = link
                    for k in range(table_end[table], table_end[table + 1]):
                        other = link_node[k]
                        if seen_N[other] != stamp:
                            seen_N[other] = stamp
                            near += 1
                            entries = min(entries * sizes_N[other], most + 1)
                elif before < 0:
                    head_N[node] = link_next[link]
                else:
                    link_next[before] = link_next[link]
                link = link_next[link]
            if near < _FEW_NEIGHBOURS:
                entries = small
            entries_N[node] = entries
            limit = min(limit, entries)
        limit = max(small, limit)
        if limit > most:
            break
        kept = 0
        for node in remaining:
            if entries_N[node] > limit or blocked_N[node] == number:
                remaining[kept] = node
                kept += 1
                continue
            # Its neighbours, ascending, and its live tables.
            stamp += 1
            seen_N[node] = stamp
            first_bag, tables, link = num_bag, 0, head_N[node]
            while link >= 0:
                table = link_table[link]
                if alive[table]:
                    tables += 1
                    for k in range(table_end[table], table_end[table + 1]):
                        other = link_node[k]
                        if seen_N[other] != stamp:
                            seen_N[other] = stamp
                            if num_bag == len(bag_K):
                                bag_K = np.concatenate((bag_K, bag_K))
                            at = num_bag
                            while at > first_bag and bag_K[at - 1] > other:
                                bag_K[at] = bag_K[at - 1]
                                at -= 1
                            bag_K[at] = other
                            num_bag += 1
                link = link_next[link]
            width = num_bag - first_bag
            for d in range(width):
                place_N[bag_K[first_bag + d]] = d + 1
                blocked_N[bag_K[first_bag + d]] = number
            place_N[node] = 0
            while num_factors + tables + 1 > len(offset_F):
                offset_F = np.concatenate((offset_F, offset_F))
            while num_strides + (tables + 1) * (width + 1) > len(stride_J):
                stride_J = np.concatenate((stride_J, stride_J))
            # Its tables: largest first, then by strides.
            step_G = np.empty(tables + 1, dtype=np.int64)
            own_GD = np.zeros((tables + 1, width + 1), dtype=np.int64)
            from_G = np.empty(tables + 1, dtype=np.int64)
            step_G[0], own_GD[0, 0], from_G[0] = sizes_N[node], 1, offset_N[node]
            tables, link = 1, head_N[node]
            while link >= 0:
                table = link_table[link]
                if alive[table]:
                    step = 1
                    for k in range(table_end[table + 1] - 1, table_end[table] - 1, -1):
                        own_GD[tables, place_N[link_node[k]]] = step
                        step *= sizes_N[link_node[k]]
                    step_G[tables], from_G[tables] = step, table_offset[table]
                    alive[table] = False
                    tables += 1
                link = link_next[link]
            order_G = np.arange(tables)
            for g in range(1, tables):
                at = g
                while at > 0:
                    one, two = order_G[at - 1], order_G[at]
                    less = step_G[two] > step_G[one]
                    if step_G[two] == step_G[one]:
                        for d in range(width + 1):
                            if own_GD[two, d] != own_GD[one, d]:
                                less = own_GD[two, d] < own_GD[one, d]
                                break
                    if not less:
                        break
                    order_G[at - 1], order_G[at] = two, one
                    at -= 1
            for position in range(tables):
                g = order_G[position]
                offset_F[num_factors] = from_G[g]
                num_factors += 1
                for d in range(width + 1):
                    stride_J[num_strides] = own_GD[g, d]
                    num_strides += 1
            # Its message.
            if width == 0:
                target = end
                end += 1
            elif width == 1:
                target = offset_N[bag_K[first_bag]]
            else:
                target, link = -1, head_N[bag_K[first_bag]]
                while link >= 0 and target < 0:
                    table = link_table[link]
                    if alive[table] and table_end[table + 1] - table_end[table] == width:
                        same = True
                        for d in range(width):
                            if link_node[table_end[table] + d] != bag_K[first_bag + d]:
                                same = False
                                break
                        if same:
                            target = table_offset[table]
                    link = link_next[link]
                if target < 0:
                    target, size = end, 1
                    while links + width > len(link_node):
                        link_node = np.concatenate((link_node, link_node))
                        link_table = np.concatenate((link_table, link_table))
                        link_next = np.concatenate((link_next, link_next))
                    for d in range(width):
                        other = bag_K[first_bag + d]
                        link_node[links], link_table[links], link_next[links] = other, num_tables, head_N[other]
                        head_N[other] = links
                        links += 1
                        size *= sizes_N[other]
                    table_offset[num_tables] = target
                    num_tables += 1
                    table_end[num_tables] = links
                    end += size
            node_I[done], target_I[done] = node, target
            done += 1
            bag_I1[done], factor_I1[done] = num_bag, num_factors
        remaining = remaining[:kept]
        number += 1
    return (
        node_I[:done], bag_I1[: done + 1], bag_K[:num_bag], target_I[:done], factor_I1[: done + 1],
        offset_F[:num_factors], stride_J[:num_strides], end, remaining,
    )  # fmt: skip
