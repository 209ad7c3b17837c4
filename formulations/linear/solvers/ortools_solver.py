"""OR-Tools through MathOpt: HiGHS (the default), SCIP and CP-SAT. The only file that imports ortools."""

from __future__ import annotations

import datetime
import enum
import importlib.metadata
import math
import threading
from collections.abc import Callable
from typing import Any

from qsync_opt.errors import SolverError
from qsync_opt.formulations.linear.model import LinearModel
from qsync_opt.formulations.linear.solver import LinearOptions, LinearResult, LinearStatus
from qsync_opt.io import delayed_interrupts

_TOLERANCE = 1e-9
"""Feasibility tolerance: rows are scaled to about 1e3, so that this is far below one nanosecond or KiB."""

_SMALL_COLUMNS = 300
"""Up to so many columns HiGHS does not presolve: of 12,000 random programs of some 50 columns, that of OR-Tools 9.15
was wrong about 3 (infeasible, or another plan the best); without presolving, which saves little there, about none."""
_POLL_S = 0.2

# MathOpt's own reasons, by name, to ours; a test walks the whole native enum.
STATUSES: dict[str, LinearStatus] = {
    "OPTIMAL": LinearStatus.OPTIMAL,
    "INFEASIBLE": LinearStatus.INFEASIBLE,
    "UNBOUNDED": LinearStatus.UNBOUNDED,
    "INFEASIBLE_OR_UNBOUNDED": LinearStatus.INFEASIBLE_OR_UNBOUNDED,
    "IMPRECISE": LinearStatus.ERROR,
    "FEASIBLE": LinearStatus.LIMIT,
    "NO_SOLUTION_FOUND": LinearStatus.LIMIT,
    "NUMERICAL_ERROR": LinearStatus.ERROR,
    "OTHER_ERROR": LinearStatus.ERROR,
}


class Engine(enum.StrEnum):
    """Which of MathOpt's solvers runs; the value is the name in ``SolverType``."""

    HIGHS = "HIGHS"
    SCIP = "GSCIP"
    CP_SAT = "CP_SAT"


class OrtoolsSolver:
    """A MathOpt solver.

    Source: ours; tolerances follow what was measured on problems whose sensitivities span many decades.
    """

    def __init__(self, engine: Engine = Engine.HIGHS) -> None:
        self.engine = engine
        self.name = f"ortools:{engine.name.lower().replace('_', '-')}"
        self.continuous = engine is not Engine.CP_SAT

    @property
    def version(self) -> str:
        """Version of the ortools package."""
        return importlib.metadata.version("ortools")

    def solve(self, model: LinearModel, options: LinearOptions) -> LinearResult:
        """Minimise ``model``; see `LinearSolver.solve`."""
        # Its native parts call Python while they are loaded, and an interrupt leaves them unusable.
        with delayed_interrupts():
            from ortools.math_opt.python import mathopt

        native = mathopt.Model(name=model.name)
        variables = [
            native.add_variable(lb=column.lower, ub=column.upper, is_integer=column.integer) for column in model.columns
        ]
        for row in model.rows:
            constraint = native.add_linear_constraint(lb=row.lower, ub=row.upper)
            for index, value in row.terms.items():
                constraint.set_coefficient(variables[index], value)
        for variable, column in zip(variables, model.columns, strict=True):
            native.objective.set_linear_coefficient(variable, column.cost)
        native.objective.offset = model.constant
        try:
            solver_type = mathopt.SolverType[self.engine.value]
            parameters = self._parameters(options, len(model.columns))
            result = _interruptible(lambda: mathopt.solve(native, solver_type, params=parameters))
        except Exception as failure:  # MathOpt turns native failures into many kinds, some by mishap
            detail = failure.__context__ or failure
            raise SolverError(f"{self.name} failed on {model.name!r}: {detail}") from failure
        reason = result.termination.reason
        values = None
        if result.has_primal_feasible_solution():
            by_variable = result.variable_values()
            values = tuple(by_variable[variable] for variable in variables)
        bound = result.termination.objective_bounds.dual_bound
        return LinearResult(
            status=STATUSES.get(reason.name, LinearStatus.ERROR),
            values=values,
            bound=bound if math.isfinite(bound) else None,
            native=f"{reason.name} {result.termination.detail}".strip(),
        )

    def _parameters(self, options: LinearOptions, columns: int) -> Any:
        from ortools.math_opt.python import mathopt

        parameters = mathopt.SolveParameters(
            random_seed=options.seed,
            relative_gap_tolerance=options.relative_gap,
            absolute_gap_tolerance=options.absolute_gap,
        )
        if self.engine is not Engine.CP_SAT:
            parameters.node_limit = options.node_limit
        # HiGHS keeps one scheduler per process, so MathOpt refuses a number of threads for it.
        if self.engine is not Engine.HIGHS:
            parameters.threads = 1
        if options.time_limit_s is not None:
            parameters.time_limit = datetime.timedelta(seconds=options.time_limit_s)
        if self.engine is Engine.HIGHS:
            doubles = parameters.highs.double_options
            doubles["primal_feasibility_tolerance"] = _TOLERANCE
            doubles["dual_feasibility_tolerance"] = _TOLERANCE
            doubles["mip_feasibility_tolerance"] = _TOLERANCE
            parameters.highs.bool_options["mip_allow_restart"] = options.restarts
            if columns <= _SMALL_COLUMNS:
                parameters.highs.string_options["presolve"] = "off"
        elif self.engine is Engine.SCIP:
            parameters.gscip.real_params["numerics/feastol"] = _TOLERANCE
            parameters.gscip.real_params["numerics/dualfeastol"] = _TOLERANCE
        else:
            # CP-SAT clips columns at 1e7 by default; times in nanoseconds are longer.
            parameters.cp_sat.mip_max_bound = 2.0**53
        return parameters


def _interruptible(work: Callable[[], Any]) -> Any:
    """Return ``work()``, done in a thread: native code would hold back Ctrl-C until it ends by itself.

    After an interrupt the thread is left behind, and ends with the process or its own limits: MathOpt cannot stop
    HiGHS from outside.
    """
    outcome: list[Any] = []
    failures: list[Exception] = []

    def target() -> None:
        try:
            outcome.append(work())
        except Exception as failure:  # raised again in the caller's thread
            failures.append(failure)

    thread = threading.Thread(target=target, name="qsync-solve", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_POLL_S)  # a join without limit cannot be interrupted on every platform
    if failures:
        raise failures[0]
    return outcome[0]


def scip_solver() -> OrtoolsSolver:
    """SCIP through MathOpt."""
    return OrtoolsSolver(Engine.SCIP)


def cp_sat_solver() -> OrtoolsSolver:
    """CP-SAT through MathOpt."""
    return OrtoolsSolver(Engine.CP_SAT)
