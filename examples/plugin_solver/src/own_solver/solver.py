"""Branch and bound over relaxations that GLOP solves: a small but complete solver of mixed-integer programs."""

import datetime
import importlib.metadata
import math
import time
from typing import Any

from ortools.math_opt.python import mathopt

from qsync_opt.formulations.linear import LinearModel, LinearOptions, LinearResult, LinearStatus
from qsync_opt.registry import Feature

TOLERANCE = 1e-9
"""A column this near to a whole number counts as whole."""
LIMIT_ENDINGS = (mathopt.TerminationReason.FEASIBLE, mathopt.TerminationReason.NO_SOLUTION_FOUND)

Bounds = dict[int, tuple[float, float]]
"""Column to the range that branching has left it."""


class OwnSolver:
    """What `qsync_opt.formulations.linear.solver.LinearSolver` asks for."""

    FEATURES = frozenset({Feature.PROOF, Feature.GAP, Feature.TIME_LIMIT, Feature.CONTINUOUS})
    name = "own"
    continuous = True

    @property
    def version(self) -> str:
        return importlib.metadata.version("own-solver")

    def solve(self, model: LinearModel, options: LinearOptions) -> LinearResult:
        search = _Search(model, options)
        return search.run()


class _Search:
    """One run. Open nodes lie on a stack, each with the bound of its parent."""

    def __init__(self, model: LinearModel, options: LinearOptions) -> None:
        self.model = model
        self.gap = options.relative_gap
        self.deadline = math.inf if options.time_limit_s is None else time.monotonic() + options.time_limit_s
        self.best: tuple[float, ...] | None = None
        self.best_value = math.inf
        self.native, self.columns = _native(model)

    def run(self) -> LinearResult:
        open_nodes: list[tuple[float, Bounds]] = [(-math.inf, {})]
        while open_nodes:
            bound, ranges = open_nodes.pop()
            if self._is_settled(bound):
                continue
            left_s = self.deadline - time.monotonic()
            if left_s <= 0:
                open_nodes.append((bound, ranges))
                break
            relaxed = self._relax(ranges, left_s)
            reason = relaxed.termination.reason
            if reason in (mathopt.TerminationReason.UNBOUNDED, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED):
                return LinearResult(
                    status=LinearStatus.INFEASIBLE_OR_UNBOUNDED, values=None, bound=None, native=reason.name
                )
            if reason in LIMIT_ENDINGS:
                open_nodes.append((bound, ranges))
                break
            if reason not in (mathopt.TerminationReason.OPTIMAL, mathopt.TerminationReason.INFEASIBLE):
                return LinearResult(status=LinearStatus.ERROR, values=None, bound=None, native=reason.name)
            if reason is mathopt.TerminationReason.OPTIMAL:
                open_nodes += self._branch(relaxed, ranges)
        return self._result([bound for bound, _ in open_nodes])

    def _is_settled(self, bound: float) -> bool:
        """Nothing below this bound is better than what is known by more than the gap."""
        return self.best is not None and bound >= self.best_value - max(self.gap, 1e-12) * abs(self.best_value)

    def _relax(self, ranges: Bounds, left_s: float) -> Any:
        for index, column in enumerate(self.model.columns):
            self.columns[index].lower_bound, self.columns[index].upper_bound = ranges.get(
                index, (column.lower, column.upper)
            )
        limit = None if math.isinf(left_s) else datetime.timedelta(seconds=left_s)
        parameters = mathopt.SolveParameters(time_limit=limit)
        parameters.glop.primal_feasibility_tolerance = TOLERANCE
        parameters.glop.dual_feasibility_tolerance = TOLERANCE
        return mathopt.solve(self.native, mathopt.SolverType.GLOP, params=parameters)

    def _branch(self, relaxed: Any, ranges: Bounds) -> list[tuple[float, Bounds]]:
        """Keep a whole point; else split the range of the column that is farthest from whole, nearer half last."""
        bound = relaxed.objective_value()
        if self._is_settled(bound):
            return []
        found = relaxed.variable_values()
        values = [found[column] for column in self.columns]
        whole = [i for i, column in enumerate(self.model.columns) if column.integer]
        broken = [i for i in whole if abs(values[i] - round(values[i])) > TOLERANCE]
        if not broken:
            rounded = tuple(float(round(v)) if self.model.columns[i].integer else v for i, v in enumerate(values))
            self.best, self.best_value = rounded, self.model.objective(rounded)
            return []
        split = max(broken, key=lambda i: abs(values[i] - round(values[i])))
        low, high = ranges.get(split, (self.model.columns[split].lower, self.model.columns[split].upper))
        down = (bound, {**ranges, split: (low, math.floor(values[split]))})
        up = (bound, {**ranges, split: (math.ceil(values[split]), high)})
        return [down, up] if values[split] % 1 > 0.5 else [up, down]

    def _result(self, open_bounds: list[float]) -> LinearResult:
        bound = min([*open_bounds, self.best_value])
        if open_bounds:
            status = LinearStatus.LIMIT
        else:
            status = LinearStatus.INFEASIBLE if self.best is None else LinearStatus.OPTIMAL
            # What was cut off is at most the gap below the best point.
            bound = self.best_value - self.gap * abs(self.best_value)
        return LinearResult(
            status=status,
            values=self.best,
            bound=bound if math.isfinite(bound) else None,
            native=f"{len(open_bounds)} nodes open",
        )


def _native(model: LinearModel) -> tuple[mathopt.Model, list[mathopt.Variable]]:
    native = mathopt.Model(name=model.name)
    columns = [native.add_variable(lb=column.lower, ub=column.upper) for column in model.columns]
    for row in model.rows:
        constraint = native.add_linear_constraint(lb=row.lower, ub=row.upper)
        for index, value in row.terms.items():
            constraint.set_coefficient(columns[index], value)
    for variable, column in zip(columns, model.columns, strict=True):
        native.objective.set_linear_coefficient(variable, column.cost)
    native.objective.offset = model.constant
    return native, columns
