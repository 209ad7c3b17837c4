"""The core as a mixed-integer linear program, for a linear solver to close what the core search leaves open.

Axes as in `core`; label 0 is the base's. Columns and rows:

    x[c,a] in {0,1}, a > 0     core node c leaves the base for its label a;       sum_a x[c,a] <= 1
    x[c,1] in {0,1,2,...}      steps of core node c, where its labels are numbers of copies of equal parts
    y[e,a,b] >= 0, a, b > 0    both ends of edge e leave the base, for labels a and b
                               sum_b y[e,a,b] <= x[first,a],  sum_a y[e,a,b] <= x[second,b]
                               sum_ab y[e,a,b] >= sum_a x[first,a] + sum_b x[second,b] - 1
    rows                       sum of what labels and pairs add <= what the limits leave over the base

A forbidden pair has no y; where label a of one end may not stand beside the base of the other, its row holds with
equality. The y are continuous: at whole x they are whole. This is the local polytope without the columns and rows of
the base, which halves it.
"""

import math

import numpy as np

from qsync_opt.formulations.assignment.core.core import Core, CoreEdge, CoreResult
from qsync_opt.formulations.linear import LinearModel, LinearOptions, LinearSolver, LinearStatus

_OBJECTIVE_SCALE = 1e3
"""Distance between bound and incumbent in units of the objective; solvers' absolute gaps are far below it."""
_ROW_SCALE = 1e3
_LARGEST_TERM = 1e12
"""Solvers refuse rows with far larger terms, which a limit with next to no room would give."""
_ROUNDING = 1e-6
"""Share of that distance by which a solver's bound is lowered, for its tolerances."""


def close(
    core: Core,
    upper: float,
    solver: LinearSolver,
    time_limit_s: float | None,
    *,
    tolerance: float = 0.0,
    most_nodes: int | None = None,
) -> CoreResult:
    """Find the best labelling of the core below ``upper`` by a linear solver.

    Args:
        core: The undecided part.
        upper: Only labellings below this count; infinite if none is known.
        solver: A solver of linear models.
        time_limit_s: Seconds.
        tolerance: Distance to the optimum at which the solver may stop, in units of the objective.
        most_nodes: Most nodes of the solver's tree, where the solver can limit them.

    Returns:
        The best labelling found below ``upper``, and a lower bound.

    Source: ours; the local polytope of pairwise models is standard.
    """
    room = _room(core, upper)
    unit = max(room, 1e-300) / _OBJECTIVE_SCALE
    model, columns = _program(core, unit)
    # Everything that can be fixed is fixed, so restarts of the solver's tree cost more than they gain, as measured.
    options = LinearOptions(
        time_limit_s=time_limit_s, absolute_gap=tolerance / unit, node_limit=most_nodes, restarts=False
    )
    result = solver.solve(model, options)
    slack = _ROUNDING * room
    if result.status in (LinearStatus.INFEASIBLE, LinearStatus.INFEASIBLE_OR_UNBOUNDED):
        return CoreResult(None, upper, upper)
    bound = -np.inf if result.bound is None else core.objective + result.bound * unit - slack
    if result.values is None:
        return CoreResult(None, upper, min(bound, upper))
    values = np.array(result.values)
    choice_C = np.zeros(len(columns), dtype=np.int64)
    for c, own in enumerate(columns):
        chosen = values[own]
        if core.nodes[c].counted:
            choice_C[c] = round(float(chosen[0]))
        elif chosen.max(initial=0.0) > 1 / 2:
            choice_C[c] = 1 + int(chosen.argmax())
    return CoreResult(core.labels(choice_C), upper, min(bound, upper))


def _room(core: Core, upper: float) -> float:
    """Scale of the objective: the distance between bound and incumbent, or the core's own range without incumbent."""
    if math.isfinite(upper) and upper > core.priced:
        return upper - core.priced
    swings = [float(np.ptp(node.objective_A[np.isfinite(node.objective_A)])) for node in core.nodes]
    return sum(swings) or 1.0


def _program(core: Core, unit: float) -> tuple[LinearModel, list[list[int]]]:
    """The program, in units of ``unit``, and the columns of each node's labels after the base."""
    model = LinearModel(name="core")
    scale_R = np.maximum(np.abs(core.excess_R).astype(np.float64), 1.0) / _ROW_SCALE
    for amounts in (*(node.rows_AR for node in core.nodes), *(edge.rows_ABR for edge in core.edges)):
        largest_R = np.abs(amounts.reshape(-1, len(scale_R)).astype(np.float64)).max(axis=0, initial=0.0)
        scale_R = np.maximum(scale_R, largest_R / _LARGEST_TERM)
    terms: list[dict[int, float]] = [{} for _ in core.excess_R]
    columns: list[list[int]] = []
    for c, node in enumerate(core.nodes):
        own = []
        most = len(node.labels_A) - 1
        for a, objective in enumerate(node.objective_A[1 : 2 if node.counted else None].tolist(), start=1):
            finite = math.isfinite(objective)
            upper = float(most if node.counted else finite)
            column = model.add_column(
                f"x[{c},{a}]", integer=True, upper=upper, cost=objective / unit if finite else 0.0
            )
            own.append(column)
            _add(terms, column, node.rows_AR[a] / scale_R)
        columns.append(own)
        if len(own) > 1:
            model.add_row(f"one[{c}]", dict.fromkeys(own, 1.0), upper=1.0)
    for e, edge in enumerate(core.edges):
        _add_edge(model, terms, e, edge, (columns[edge.first], columns[edge.second]), unit, scale_R)
    for r, row in enumerate(terms):
        model.add_row(f"limit[{r}]", row, upper=float(-core.excess_R[r] / scale_R[r]))
    return model, columns


def _add_edge(
    model: LinearModel,
    terms: list[dict[int, float]],
    number: int,
    edge: CoreEdge,
    ends: tuple[list[int], list[int]],
    unit: float,
    scale_R: np.ndarray,
) -> None:
    allowed_AB = np.isfinite(edge.objective_AB)
    firsts = [{column: -1.0} for column in ends[0]]
    seconds = [{column: -1.0} for column in ends[1]]
    both = dict.fromkeys([*ends[0], *ends[1]], -1.0)
    for a, b in np.argwhere(allowed_AB[1:, 1:]).tolist():
        cost = float(edge.objective_AB[a + 1, b + 1]) / unit
        column = model.add_column(f"y[{number},{a + 1},{b + 1}]", cost=cost)
        _add(terms, column, edge.rows_ABR[a + 1, b + 1] / scale_R)
        firsts[a][column] = seconds[b][column] = both[column] = 1.0
    for side, groups, beside_base in (("first", firsts, allowed_AB[1:, 0]), ("second", seconds, allowed_AB[0, 1:])):
        for label, (group, allowed) in enumerate(zip(groups, beside_base.tolist(), strict=True), start=1):
            model.add_row(f"{side}[{number},{label}]", group, lower=-math.inf if allowed else 0.0, upper=0.0)
    model.add_row(f"both[{number}]", both, lower=-1.0)


def _add(terms: list[dict[int, float]], column: int, amounts: np.ndarray) -> None:
    for row in np.flatnonzero(amounts).tolist():
        terms[row][column] = float(amounts[row])
