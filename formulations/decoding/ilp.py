"""The method ``ilp``: the integer program of a speculation plan.

Sets: regimes r, drafts d; t[r,d] is the weighted time per token with d's best length, p[r] that of plain decoding.

    y[d] in {0,1}           draft d is used and pays its memory m[d]
    x[r,d] in [0,1]         regime r takes draft d
    minimise  sum_r p[r] - sum_rd (p[r] - t[r,d]) x[r,d]
    subject to  sum_d x[r,d] <= 1,  x[r,d] <= y[d],  sum_d m[d] y[d] <= M

Only pairs with t[r,d] < p[r] have a column. With y whole, x is whole in some optimum.
"""

from __future__ import annotations

import math
import time

from qsync_opt.decoding import Problem
from qsync_opt.errors import SolverError
from qsync_opt.formulations.decoding.tables import Tables, build_tables
from qsync_opt.formulations.linear import (
    LinearModel,
    LinearOptions,
    LinearResult,
    LinearSolver,
    LinearStatus,
    required_solver,
)
from qsync_opt.solving import Answer, SolveOptions, termination_of

_OBJECTIVE_SCALE = 1e3
"""Plain decoding's objective in the program's units: solvers' absolute gaps of about 1e-6 are then 1e-9 of it."""
_WHOLE_SCALE = 1e12
"""The same for solvers that take whole coefficients only."""
_ROW_SCALE = 1e3
_MOST_CUTS = 20
"""Most repetitions where a solver's tolerance lets the drafts exceed the memory."""


class IlpFormulation:
    """The integer program, solved to a proved optimum, or to a gap or time limit.

    Source: ours; a facility location problem with a budget.
    """

    def solve(self, problem: Problem, options: SolveOptions) -> Answer:
        """Choose a draft and a length for every regime.

        Raises:
            NotInstalledError: No solver is installed.
            SolverError: The solver failed.
        """
        started = time.monotonic()
        solver = required_solver(options.solver, "method 'ilp'")
        tables = build_tables(problem)
        model, columns, unit = _program(tables, whole=not solver.continuous)
        built = time.monotonic()
        plain = math.fsum(tables.plain_R)
        best: tuple[int, ...] = ()
        bound, status = 0.0, LinearStatus.OPTIMAL
        for _ in range(_MOST_CUTS if columns else 0):
            left_s = None if options.time_limit_s is None else options.time_limit_s - (time.monotonic() - started)
            if left_s is not None and left_s <= 0:
                status = LinearStatus.LIMIT
                break
            result = solver.solve(model, LinearOptions(time_limit_s=left_s, relative_gap=options.gap))
            _check(result, solver)
            status = result.status
            bound = max(bound, 0.0 if result.bound is None else result.bound * unit)
            chosen = () if result.values is None else _chosen(result.values, columns)
            if sum(tables.memory_D[d] for d in chosen) <= tables.memory_kib:
                best = chosen
                break
            # Within the solver's tolerance only: this set is too large, and so is every larger one.
            model.add_row(f"cover{len(model.rows)}", {columns[d]: 1.0 for d in chosen}, upper=len(chosen) - 1)
        else:
            if columns:
                raise SolverError(f"{solver.name} keeps returning drafts that exceed the memory; use another solver")
            bound = plain
        objective = tables.objective(best)
        bound = min(bound, objective)
        return Answer(
            termination=termination_of(objective, bound, out_of_time=status is LinearStatus.LIMIT),
            plan=tables.plan(best),
            objective=objective,
            bound=bound,
            solver=f"{solver.name} {solver.version}",
            build_seconds=built - started,
            solve_seconds=time.monotonic() - built,
        )


def _program(tables: Tables, *, whole: bool) -> tuple[LinearModel, dict[int, int], float]:
    """The program, the column of each draft, and what one unit of its objective stands for."""
    plain = math.fsum(tables.plain_R)
    unit = (plain / (_WHOLE_SCALE if whole else _OBJECTIVE_SCALE)) or 1.0
    # Rounding costs down, and savings up, keeps the bound valid.
    constant = math.floor(plain / unit) if whole else plain / unit
    model = LinearModel(name=tables.problem.name, constant=constant)
    columns = {d: model.add_column(f"y[{name}]", integer=True) for d, name in enumerate(tables.drafts)}
    for r, regime in enumerate(tables.problem.regimes):
        choices = {}
        for d, name in enumerate(tables.drafts):
            if (saved := float(tables.plain_R[r] - tables.time_RD[r, d])) <= 0:
                continue
            cost = -float(math.ceil(saved / unit)) if whole else -saved / unit
            choices[d] = model.add_column(f"x[{regime.name},{name}]", integer=whole, cost=cost)
            model.add_row(f"used[{regime.name},{name}]", {choices[d]: 1.0, columns[d]: -1.0}, upper=0.0)
        if choices:
            model.add_row(f"one[{regime.name}]", dict.fromkeys(choices.values(), 1.0), upper=1.0)
    scale = 1.0 if whole else _ROW_SCALE / max(tables.memory_kib, 1)
    memory = {columns[d]: kib * scale for d, kib in enumerate(tables.memory_D)}
    model.add_row("memory", memory, upper=tables.memory_kib * scale)
    return model, columns, unit


def _check(result: LinearResult, solver: LinearSolver) -> None:
    if result.status not in (LinearStatus.OPTIMAL, LinearStatus.LIMIT):
        raise SolverError(f"{solver.name} failed on a program that has a plan: {result.native}; use another solver")


def _chosen(values: tuple[float, ...], columns: dict[int, int]) -> tuple[int, ...]:
    return tuple(d for d, column in columns.items() if values[column] > 0.5)
