"""The assignment model as a mixed-integer linear program, for any linear solver.

Axes as in `model`; columns and rows:

    x[n,a] in {0,1}        node n takes label a                      sum_a x[n,a] = 1
    y[e,a,b] >= 0          edge e takes the pair of labels (a, b)    sum_b y[e,a,b] = x[first,a], likewise for b
    m[i]                   maximum i of the objective                m[i] >= every row of the maximum
    limit[r]               the limits

Forbidden entries have the upper bound 0. The y are whole wherever the x are: this is the local polytope.
"""

from __future__ import annotations

import math

import numpy as np

from qsync_opt.formulations.assignment.model import AssignmentModel, Ints
from qsync_opt.formulations.linear import LinearModel


def linear_program(model: AssignmentModel) -> LinearModel:
    """Write the program; its first columns are the model's table entries, in the model's order.

    Args:
        model: The problem, maxima included.

    Source: ours; the local polytope of pairwise models is standard.
    """
    program = LinearModel(name="assignment")
    num_node_entries = int(model.sizes_N.sum())
    for entry, (cost, allowed) in enumerate(zip(model.objective_Z.tolist(), model.allowed_Z.tolist(), strict=True)):
        program.add_column(
            f"z[{entry}]", upper=float(allowed), integer=entry < num_node_entries, cost=cost if allowed else 0.0
        )
    for node, (start, size) in enumerate(zip(model.offset_N.tolist(), model.sizes_N.tolist(), strict=True)):
        program.add_row(f"one[{node}]", {start + label: 1.0 for label in range(size)}, lower=1.0, upper=1.0)
    for edge, (ends, start) in enumerate(zip(model.edges_E2.tolist(), model.offset_E.tolist(), strict=True)):
        pairs_AB = start + np.arange(math.prod(model.sizes_N[ends].tolist())).reshape(model.sizes_N[ends])
        for side, node, rows in (("first", ends[0], pairs_AB), ("second", ends[1], pairs_AB.T)):
            for label, pairs in enumerate(rows.tolist()):
                terms = {**dict.fromkeys(pairs, 1.0), int(model.offset_N[node]) + label: -1.0}
                program.add_row(f"{side}[{edge},{label}]", terms, lower=0.0, upper=0.0)
    loads_SZ = np.zeros((model.rows_RS.shape[1], len(model.objective_Z)))
    loads_SZ[model.load_T, model.entry_T] = model.value_T
    for row, (amounts_Z, limit) in enumerate(zip(model.rows_RS @ loads_SZ, model.limits_R.tolist(), strict=True)):
        program.add_row(f"limit[{row}]", dict(enumerate(amounts_Z.tolist())), upper=float(limit))
    begins = np.concatenate([model.offset_N, model.offset_E])
    for number, maximum in enumerate(model.maxima):
        amounts_KZ = maximum.rows_KS @ loads_SZ
        # A bound that changes nothing: PuLP takes no column without one.
        least = float(np.minimum.reduceat(amounts_KZ, begins, axis=1).sum(axis=1).max())
        column = program.add_column(f"m[{number}]", lower=least, upper=math.inf, cost=maximum.weight)
        for row, amounts_Z in enumerate(amounts_KZ):
            terms = {**dict(enumerate(amounts_Z.tolist())), column: -1.0}
            program.add_row(f"maximum[{number},{row}]", terms, upper=0.0)
    return program


def labels_at(model: AssignmentModel, values: tuple[float, ...]) -> Ints:
    """The labelling at a point of the program: for each node the label whose column is largest."""
    spans = zip(model.offset_N.tolist(), model.sizes_N.tolist(), strict=True)
    return np.array([int(np.argmax(values[start : start + size])) for start, size in spans], dtype=np.int64)
