"""The method ``ilp``: the compression problem as an integer linear program, for checking the dynamic program.

    minimise  sum_kc variance_kc z_kc           (or the end T of the last reduction)
    where     sum_c z_kc = 1                                     for every bucket k
              ready_j + sum_(k >= j) sum_c time_kc z_kc <= T     for every bucket j, T the deadline or a column
              sum_kc variance_kc z_kc <= limit                   where the end is minimised

Variances count from the least of each bucket. A solver's plan is evaluated before it counts, and a limit that it
exceeds within its tolerance is tightened.

Source: ours.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from qsync_opt.errors import SolverError
from qsync_opt.formulations.gradients.prices import least_variance, priced, relative_variances
from qsync_opt.formulations.gradients.tables import Tables
from qsync_opt.formulations.linear import LinearModel, LinearOptions, LinearStatus, required_solver
from qsync_opt.gradients import VARIANCE_SLACK, Objective, Problem, evaluate
from qsync_opt.solving import Answer, SolveOptions, TerminationStatus, termination_of

_SCALE = 1e3
"""Size of objective and rows, so that solvers' tolerances of 1e-6 to 1e-9 are small beside one nanosecond."""
_TIGHTENINGS = 3


class IlpFormulation:
    """The integer program, by any registered solver that takes continuous columns."""

    def solve(self, problem: Problem, options: SolveOptions) -> Answer:
        """Choose a scheme for every bucket; see `Formulation.solve`."""
        started = time.monotonic()
        tables = Tables.of(problem)
        if (reason := tables.infeasible()) is not None:
            return Answer(plan=None, termination=TerminationStatus.INFEASIBLE, reason=reason)
        solver = required_solver(options.solver, "method 'ilp'", continuous=True)
        program = _Program(tables)
        excess, bound, status, picks_K = 0, -math.inf, LinearStatus.LIMIT, program.start_K
        built = time.monotonic()
        for attempt in range(_TIGHTENINGS + 1):
            left_s = None if options.time_limit_s is None else options.time_limit_s - (time.monotonic() - started)
            if left_s is not None and left_s <= 0:
                break
            linear = LinearOptions(time_limit_s=left_s, relative_gap=options.gap)
            result = solver.solve(program.model(excess, attempt), linear)
            status = result.status
            if status in (LinearStatus.INFEASIBLE, LinearStatus.INFEASIBLE_OR_UNBOUNDED) and attempt == 0:
                raise SolverError(f"{solver.name} calls a problem infeasible ({result.native}) that has a plan at hand")
            if status in (LinearStatus.ERROR, LinearStatus.UNBOUNDED):
                raise SolverError(f"{solver.name} failed: {result.native}; use another solver")
            if attempt == 0 and result.bound is not None:
                bound = program.value_of(result.bound)
            if result.values is None:
                break
            point_K = program.picks(result.values)
            if evaluate(problem, tables.plan(point_K)).feasible:
                picks_K = min((picks_K, point_K), key=program.objective)
                break
            excess += 2 * program.excess(point_K)
        objective = program.objective(picks_K)
        known = bound if bound > -math.inf else None
        return tables.answer(
            picks_K,
            termination_of(objective, known, out_of_time=status is LinearStatus.LIMIT),
            known,
            solver=f"{solver.name} {solver.version}",
            build_seconds=built - started,
            solve_seconds=time.monotonic() - built,
        )


class _Program:
    """The linear model around a plan at hand, whose objective scales it."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.by_variance = tables.problem.objective is Objective.VARIANCE
        self.variances_KC = relative_variances(tables)
        self.lowest = least_variance(tables)
        deadline = tables.deadline_ns()
        if self.by_variance and deadline is not None:
            self.start_K = priced(tables, deadline).picks_K
        else:
            self.start_K = tables.finest_K
        self.deadline = deadline
        most = sum(int(times_C[-1]) for times_C in tables.times_KC)
        self.time_unit = max(1.0, float(most)) / _SCALE
        # What the plan at hand costs beyond the least: no choice that costs more alone is in a better plan.
        self.excess_variance = math.fsum(
            float(variances_C[pick]) for variances_C, pick in zip(self.variances_KC, self.start_K, strict=True)
        )
        self.unit = (self.excess_variance or 1.0) / _SCALE if self.by_variance else self.time_unit
        self.base = tables.end_ns(tables.fastest_K)  # no end is before it
        self.columns_KC: list[list[int]] = []

    def objective(self, picks_K: list[int]) -> float:
        return evaluate(self.tables.problem, self.tables.plan(picks_K)).objective

    def value_of(self, bound: float) -> float:
        """A bound of the model, in the unit of the problem."""
        if self.by_variance:
            return self.lowest + bound * self.unit
        end = max(self.tables.floor_ns, self.base + math.ceil(bound * self.unit - 1e-3))  # ends are whole
        return float(end + self.tables.tail_ns)

    def excess(self, picks_K: list[int]) -> int:
        """Nanoseconds by which a plan is late."""
        if not self.by_variance or self.deadline is None:
            return 0
        return max(0, self.tables.end_ns(picks_K) - self.deadline)

    def picks(self, values: Sequence[float]) -> list[int]:
        return [max(range(len(own)), key=lambda c, own=own: values[own[c]]) for own in self.columns_KC]  # type: ignore[misc]

    def model(self, excess: int, attempt: int) -> LinearModel:
        """The linear model; the deadline is earlier by ``excess``, a variance limit lower with each attempt."""
        tables = self.tables
        model = LinearModel(name=tables.problem.name)
        most = self.excess_variance * (1 + VARIANCE_SLACK) if self.by_variance else math.inf
        self.columns_KC = [
            [
                model.add_column(
                    f"z[{bucket.name},{name}]",
                    upper=float(variance <= most),
                    integer=True,
                    cost=variance / self.unit if self.by_variance and variance <= most else 0.0,
                )
                for name, variance in zip(names_C, variances_C.tolist(), strict=True)
            ]
            for bucket, names_C, variances_C in zip(
                tables.problem.buckets, tables.names_KC, self.variances_KC, strict=True
            )
        ]
        end = None
        if not self.by_variance:
            end = model.add_column("end", lower=0.0, upper=math.inf, cost=1.0)
        for bucket, own in zip(tables.problem.buckets, self.columns_KC, strict=True):
            model.add_row(f"one[{bucket.name}]", dict.fromkeys(own, 1.0), lower=1.0, upper=1.0)
        terms: dict[int, float] = {}
        for k in range(len(self.columns_KC) - 1, -1, -1):
            for column, time_ns in zip(self.columns_KC[k], tables.times_KC[k].tolist(), strict=True):
                terms[column] = time_ns / self.time_unit
            row = dict(terms)
            ready = int(tables.ready_K[k])
            if end is not None:
                row[end] = -1.0
                model.add_row(f"end[{k}]", row, upper=(self.base - ready) / self.time_unit)
            elif self.deadline is not None:
                model.add_row(f"deadline[{k}]", row, upper=(self.deadline - excess - ready) / self.time_unit)
        if not self.by_variance and tables.ceiling() < math.inf:
            self._limit_variance(model, attempt)
        return model

    def _limit_variance(self, model: LinearModel, attempt: int) -> None:
        """Add the variance limit as a row in units of the room that it leaves beyond what every plan pays.

        A choice that needs more than all the room is forbidden: the room may be nothing, and a row in units of that
        would have no usable coefficients.
        """
        room = max(0.0, self.tables.ceiling() - self.lowest)
        costs: dict[int, float] = {}
        for own, variances_C in zip(self.columns_KC, self.variances_KC, strict=True):
            for column, variance in zip(own, variances_C.tolist(), strict=True):
                if variance > room:
                    model.columns[column] = replace(model.columns[column], upper=0.0)
                elif variance > 0.0:
                    costs[column] = variance / room * _SCALE
        if costs:
            model.add_row("variance", costs, upper=_SCALE * (1 - (4**attempt - 1) * VARIANCE_SLACK))
