"""Programs whose costs are never negative, solved in units in which a solver can tell them apart."""

from __future__ import annotations

import math
import time
from dataclasses import replace

from qsync_opt.formulations.linear.model import LinearModel
from qsync_opt.formulations.linear.solver import LinearOptions, LinearResult, LinearSolver, LinearStatus

_SMALL = 1e-3
"""Objectives that are smaller beside the largest cost are sought again, without what costs more than they do."""
_ROUNDING = 1e-6
"""Share by which solvers may miss an objective."""


def solve_in_units(solver: LinearSolver, program: LinearModel, options: LinearOptions) -> LinearResult:
    """Solve a program in multiples of its largest cost: solvers' absolute tolerances are small beside 1.

    A choice that costs more than a known point is in no better one, and hides differences between what costs less:
    where the objective is tiny beside the largest cost, such choices are fixed at 0 and the program is solved again.

    Args:
        solver: For each of them.
        program: No column has a negative cost or lower bound; those up to 1 are choices, 0 or 1 in an optimum.
        options: The time limit is for all together.

    Returns:
        The last result that a solver called optimal, or the first; its bound is in the program's own unit.

    Source: ours.
    """
    started = time.monotonic()

    def scaled() -> LinearResult:
        unit = max((column.cost for column in program.columns if column.upper), default=0.0) or 1.0
        columns = [replace(column, cost=column.cost / unit) for column in program.columns]
        left_s = None
        if options.time_limit_s is not None:
            left_s = max(options.time_limit_s - (time.monotonic() - started), 0.0)
        own = replace(program, columns=columns, constant=program.constant / unit)
        result = solver.solve(own, replace(options, time_limit_s=left_s))
        return replace(result, bound=None if result.bound is None else result.bound * unit)

    result = scaled()
    while result.status is LinearStatus.OPTIMAL and result.values is not None:
        values = (round(v) if c.integer else max(v, 0.0) for c, v in zip(program.columns, result.values, strict=True))
        objective = math.fsum(c.cost * v for c, v in zip(program.columns, values, strict=True))
        most = objective * (1 + _ROUNDING)
        is_costly = [c.upper == 1.0 and c.cost > most for c in program.columns]
        if not any(is_costly) or most >= _SMALL * max(c.cost for c in program.columns if c.upper):
            break
        columns = [replace(c, upper=0.0) if costly else c for c, costly in zip(program.columns, is_costly, strict=True)]
        program = replace(program, columns=columns)
        finer = scaled()
        if finer.status is not LinearStatus.OPTIMAL:
            break
        result = finer
    return result
