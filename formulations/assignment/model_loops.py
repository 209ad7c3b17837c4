"""Prices, choices and loads of an assignment problem: the loops of `model` that every step of a search runs.

Axes: N nodes, E edges, Z table entries, S loads, R limit rows, T stored load terms, D derived nodes.
"""

import numpy as np

from qsync_opt.formulations.assignment.arrays import Bools, Floats, Ints
from qsync_opt.formulations.assignment.compiled import compiled


def _price_plain(
    objective_Z: Floats, weight: float, value_T: Floats, price_S: Floats, load_T: Ints, entry_T: Ints, pointer_Z1: Ints,
    allowed_Z: Bools,
) -> Floats:  # fmt: skip
    cost_Z = objective_Z * weight
    cost_Z += np.bincount(entry_T, weights=value_T * price_S[load_T], minlength=len(cost_Z))
    cost_Z[~allowed_Z] = np.inf
    return cost_Z


@compiled(
    "float64[::1](float64[::1],float64,float64[::1],float64[::1],int64[::1],int64[::1],int64[::1],boolean[::1])",
    plain=_price_plain,
)
def price(
    objective_Z: Floats, weight: float, value_T: Floats, price_S: Floats, load_T: Ints, entry_T: Ints, pointer_Z1: Ints,
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


def _choose_plain(labels_N: Ints, sizes_N: Ints, edges_E2: Ints, offset_N: Ints, offset_E: Ints) -> Ints:
    first, second = edges_E2[:, 0], edges_E2[:, 1]
    entry_E = offset_E + labels_N[first] * sizes_N[second] + labels_N[second]
    return np.concatenate([offset_N + labels_N, entry_E])


@compiled("int64[::1](int64[::1],int64[::1],int64[:,::1],int64[::1],int64[::1])", plain=_choose_plain)
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


def _sum_loads_plain(entry_X: Ints, pointer_Z1: Ints, load_T: Ints, value_T: Ints, num_loads: int) -> Ints:
    start, count = pointer_Z1[entry_X], pointer_Z1[entry_X + 1] - pointer_Z1[entry_X]
    ends = np.cumsum(count)
    total = int(ends[-1]) if len(ends) else 0
    term = np.arange(total) + np.repeat(start - (ends - count), count)
    loads_S = np.zeros(num_loads, dtype=np.int64)
    np.add.at(loads_S, load_T[term], value_T[term])
    return loads_S


@compiled("int64[::1](int64[::1],int64[::1],int64[::1],int64[::1],int64)", plain=_sum_loads_plain)
def sum_loads(entry_X: Ints, pointer_Z1: Ints, load_T: Ints, value_T: Ints, num_loads: int) -> Ints:
    """Loads of table entries together."""
    loads_S = np.zeros(num_loads, dtype=np.int64)
    for entry in entry_X:
        for term in range(pointer_Z1[entry], pointer_Z1[entry + 1]):
            loads_S[load_T[term]] += value_T[term]
    return loads_S


def _sum_steps_plain(row: Ints, load: Ints, sign: Ints, loads_S: Ints, num_rows: int) -> Ints:
    step_R = np.zeros(num_rows, dtype=np.int64)
    np.add.at(step_R, row, sign * loads_S[load])
    return np.cumsum(step_R)


@compiled("int64[::1](int64[::1],int64[::1],int64[::1],int64[::1],int64)", plain=_sum_steps_plain)
def sum_steps(row: Ints, load: Ints, sign: Ints, loads_S: Ints, num_rows: int) -> Ints:
    """Left-hand sides of rows that are given by their steps."""
    left_R = np.zeros(num_rows, dtype=np.int64)
    for step in range(len(row)):
        left_R[row[step]] += sign[step] * loads_S[load[step]]
    for r in range(1, num_rows):
        left_R[r] += left_R[r - 1]
    return left_R


def _follow_plain(labels_N: Ints, derived_D4: Ints, width_D: Ints, tables: Ints) -> Ints:
    labels, entries = labels_N.tolist(), tables.tolist()  # long chains of joins are followed faster so than by numpy
    for (node, first, second, place), width in zip(derived_D4.tolist(), width_D.tolist(), strict=True):
        labels[node] = entries[place + labels[first] * width + labels[second]]
    return np.array(labels, dtype=np.int64)


@compiled("int64[::1](int64[::1],int64[:,::1],int64[::1],int64[::1])", plain=_follow_plain)
def follow(labels_N: Ints, derived_D4: Ints, width_D: Ints, tables: Ints) -> Ints:
    """Labels with the derived ones set."""
    labels = labels_N.copy()
    for d in range(len(width_D)):
        first, second = labels[derived_D4[d, 1]], labels[derived_D4[d, 2]]
        labels[derived_D4[d, 0]] = tables[derived_D4[d, 3] + first * width_D[d] + second]
    return labels
