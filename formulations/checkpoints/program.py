"""The write balance as an integer program, by any registered solver of linear programs.

min T subject to  sum_w n_iw = rows_i,  sum_i b_i n_iw <= rate_w T,  sum_{w on h} sum_i b_i n_iw <= rate_h T,  n whole

with b_i the bytes of a row. T is counted in units in which the smallest row at the highest rate takes 1, so that all
coefficients are near 1.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

from qsync_opt.checkpoints import Problem, evaluate
from qsync_opt.errors import SolverError
from qsync_opt.formulations.checkpoints.fractional import least_time
from qsync_opt.formulations.checkpoints.moves import Counts
from qsync_opt.formulations.checkpoints.wrap_around import (
    WrapAroundFormulation,
    bound_of,
    nobody_writes,
    plan_of_counts,
)
from qsync_opt.formulations.linear import LinearModel, LinearOptions, LinearStatus, required_solver
from qsync_opt.solving import PROOF_GAP, Answer, SolveOptions, TerminationStatus, relative_gap


class IlpFormulation:
    """The integer program above: whole rows, proved by a solver.

    Source: ours.
    """

    def solve(self, problem: Problem, options: SolveOptions) -> Answer:
        """Split every piece; see `qsync_opt.formulations.base.Formulation`."""
        started = time.monotonic()
        if (reason := nobody_writes(problem)) is not None:
            return Answer(termination=TerminationStatus.INFEASIBLE, reason=reason)
        solver = required_solver(options.solver, "method 'ilp'", continuous=True)
        if not problem.pieces:
            return replace(WrapAroundFormulation().solve(problem, options), solver=f"{solver.name} {solver.version}")
        program = _Program(problem)
        built = time.monotonic()
        limit_s = options.time_limit_s
        result = solver.solve(
            program.model,
            LinearOptions(
                time_limit_s=None if limit_s is None else max(1e-3, limit_s - (built - started)),
                relative_gap=max(options.gap, PROOF_GAP / 10),
            ),
        )
        if result.status not in (LinearStatus.OPTIMAL, LinearStatus.LIMIT):
            raise SolverError(f"{solver.name} failed on the write balance: {result.native}; use another solver")
        bound = bound_of(problem, least_time(problem))
        if result.bound is not None:
            bound = max(bound, result.bound * program.unit_s)
        plan = objective = None
        termination = TerminationStatus.TIME_LIMIT
        if result.values is not None:
            plan = plan_of_counts(problem, program.counts(result.values))
            objective = evaluate(problem, plan).objective
            bound = min(bound, objective)
            proved = (relative_gap(objective, bound) or 0.0) <= PROOF_GAP
            if proved or result.status is LinearStatus.OPTIMAL:
                termination = TerminationStatus.OPTIMAL if proved else TerminationStatus.FEASIBLE
        return Answer(
            termination=termination,
            plan=plan,
            objective=objective,
            bound=bound,
            solver=f"{solver.name} {solver.version}",
            build_seconds=built - started,
            solve_seconds=time.monotonic() - built,
        )


class ExactFormulation:
    """Wrap-around where its bound proves the plan best, else the integer program.

    Source: ours.
    """

    def solve(self, problem: Problem, options: SolveOptions) -> Answer:
        """Split every piece; see `qsync_opt.formulations.base.Formulation`."""
        first = WrapAroundFormulation().solve(problem, options)
        if first.plan is None or (relative_gap(first.objective, first.bound) or 0.0) <= max(options.gap, PROOF_GAP):
            return first
        limit_s = options.time_limit_s
        if limit_s is not None and limit_s <= first.solve_seconds:
            return replace(first, termination=TerminationStatus.TIME_LIMIT)
        rest_s = None if limit_s is None else limit_s - first.solve_seconds
        second = IlpFormulation().solve(problem, replace(options, time_limit_s=rest_s))
        bound = max(first.bound or 0.0, second.bound or 0.0)
        if second.objective is None or (first.objective or 0.0) < second.objective:
            return replace(first, termination=second.termination, bound=min(bound, first.objective or bound))
        return replace(second, bound=min(bound, second.objective))


class _Program:
    """The linear model of a problem, and what its columns mean."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        unit_bytes = min(piece.row_bytes for piece in problem.pieces)
        highest = max([*(writer.bytes_per_s for writer in problem.writers.values()), *problem.hosts.values()])
        self.unit_s = unit_bytes / highest
        self.model = LinearModel(name=problem.name)
        self._columns: list[dict[str, int]] = []
        loads: dict[str, dict[int, float]] = {name: {} for name in problem.writers}
        for piece in problem.pieces:
            columns = {}
            for name in piece.writers:
                label = f"rows|{piece.name}|{name}"
                columns[name] = self.model.add_column(label, upper=piece.rows, integer=True)
                loads[name][columns[name]] = piece.row_bytes / unit_bytes
            self.model.add_row(
                f"all|{piece.name}", dict.fromkeys(columns.values(), 1.0), lower=piece.rows, upper=piece.rows
            )
            self._columns.append(columns)
        time_column = self.model.add_column("time", upper=math.inf, cost=1.0)
        for name, writer in problem.writers.items():
            if loads[name]:
                terms = {**loads[name], time_column: -writer.bytes_per_s / highest}
                self.model.add_row(f"writer|{name}", terms, upper=0.0)
        for host, rate in problem.hosts.items():
            shared: dict[int, float] = {}
            for name, writer in problem.writers.items():
                if writer.host == host:
                    shared.update(loads[name])
            if shared:
                self.model.add_row(f"host|{host}", {**shared, time_column: -rate / highest}, upper=0.0)

    def counts(self, values: tuple[float, ...]) -> Counts:
        """Rows of each writer at a point, whole and complete even where a solver's tolerance left them otherwise."""
        counts: Counts = []
        for piece, columns in zip(self._problem.pieces, self._columns, strict=True):
            rows = {name: max(0, round(values[column])) for name, column in columns.items()}
            missing = piece.rows - sum(rows.values())
            largest = max(rows, key=rows.__getitem__)
            rows[largest] += missing
            counts.append({name: count for name, count in rows.items() if count})
        return counts
