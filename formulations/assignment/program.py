"""The core as a mixed-integer linear program, for a solver to close what the core search leaves open.

Axes as in `core`. Columns and rows:

    x[c,a] in {0,1}            core node c takes its label a;       sum_a x[c,a] = 1
    y[e,a,b] >= 0              both ends of edge e take labels a, b; sum_b y[e,a,b] = x[first,a], sum_a y = x[second,b]
    rows                       sum of what labels and pairs add <= what the limits leave over the base

A forbidden pair has no y. The y are continuous: at whole x they are whole (local polytope).
"""

import math

import numpy as np

from qsync_opt.formulations.assignment.core import Core
from qsync_opt.formulations.assignment.frontier import FrontierResult
from qsync_opt.formulations.linear_model import LinearModel
from qsync_opt.formulations.linear_solver import LinearOptions, LinearSolver, LinearStatus

_OBJECTIVE_SCALE = 1e3
"""The room between bound and incumbent in units of the objective; solvers' absolute gaps are then far below it."""
_ROW_SCALE = 1e3
_ROUNDING = 1e-6
"""Share of that room by which a solver's bound is lowered: its tolerances."""


def close(core: Core, upper: float, solver: LinearSolver, time_limit_s: float | None) -> FrontierResult:
    """Best labelling of the core below ``upper``, by a solver.

    Args:
        core: The undecided part.
        upper: Only labellings below this count; infinite if none is known.
        solver: A solver of linear models.
        time_limit_s: Seconds.

    Returns:
        The best labelling found below ``upper``, and a lower bound.

    Source: ours; the local polytope of pairwise models is standard.
    """
    room = upper - core.objective if math.isfinite(upper) else _swing(core)
    unit = max(abs(room), 1e-300) / _OBJECTIVE_SCALE
    model, columns = _program(core, unit)
    result = solver.solve(model, LinearOptions(time_limit_s=time_limit_s))
    slack = _ROUNDING * _OBJECTIVE_SCALE * unit
    if result.status in (LinearStatus.INFEASIBLE, LinearStatus.INFEASIBLE_OR_UNBOUNDED):
        return FrontierResult(None, upper, upper, 0)
    bound = -np.inf if result.bound is None else core.objective + result.bound * unit - slack
    if result.values is None:
        return FrontierResult(None, upper, min(bound, upper), 0)
    choice_C = np.array([max(range(len(own)), key=lambda a: result.values[own[a]]) for own in columns], dtype=np.int64)  # type: ignore[index]
    labels_N = core.labels(choice_C)
    return FrontierResult(labels_N, upper, min(bound, upper), 0)


def _swing(core: Core) -> float:
    """A size of the objective where no labelling is known."""
    swings = [float(np.ptp(node.objective_A[np.isfinite(node.objective_A)])) for node in core.nodes]
    return sum(swings) or 1.0


def _program(core: Core, unit: float) -> tuple[LinearModel, list[list[int]]]:
    """The program, in units of ``unit``, and the columns of each node's labels."""
    model = LinearModel(name="core")
    scale_R = np.maximum(np.abs(core.excess_R).astype(np.float64), 1.0) / _ROW_SCALE
    terms: list[dict[int, float]] = [{} for _ in core.excess_R]
    columns: list[list[int]] = []
    for c, node in enumerate(core.nodes):
        own = []
        for a, objective in enumerate(node.objective_A.tolist()):
            finite = math.isfinite(objective)
            column = model.add_column(
                f"x[{c},{a}]", integer=True, upper=1.0 if finite else 0.0, cost=objective / unit if finite else 0.0
            )
            own.append(column)
            _add(terms, column, node.rows_AR[a] / scale_R)
        columns.append(own)
        model.add_row(f"one[{c}]", dict.fromkeys(own, 1.0), lower=1.0, upper=1.0)
    for e, edge in enumerate(core.edges):
        firsts = [{column: -1.0} for column in columns[edge.first]]
        seconds = [{column: -1.0} for column in columns[edge.second]]
        for a, b in np.argwhere(np.isfinite(edge.objective_AB)).tolist():
            column = model.add_column(f"y[{e},{a},{b}]", cost=float(edge.objective_AB[a, b]) / unit)
            _add(terms, column, edge.rows_ABR[a, b] / scale_R)
            firsts[a][column] = seconds[b][column] = 1.0
        for side, groups in (("first", firsts), ("second", seconds)):
            for label, group in enumerate(groups):
                model.add_row(f"{side}[{e},{label}]", group, lower=0.0, upper=0.0)
    for r, row in enumerate(terms):
        model.add_row(f"limit[{r}]", row, upper=float(-core.excess_R[r] / scale_R[r]))
    return model, columns


def _add(terms: list[dict[int, float]], column: int, amounts: np.ndarray) -> None:
    for row in np.flatnonzero(amounts).tolist():
        terms[row][column] = float(amounts[row])
