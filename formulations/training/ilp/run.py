"""One run of a linear solver on an assignment: scaled on the way in, evaluated in exact integers on the way out."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from qsync_opt.errors import SolverError
from qsync_opt.formulations.linear import LinearOptions, LinearResult, LinearSolver, LinearStatus
from qsync_opt.formulations.training.ilp.assignment import MEMORY, Assignment
from qsync_opt.formulations.training.ilp.program import AssignmentProgram, Units, linearize

_ROW_SCALE = 1e3
"""Size of the rows, so that solvers' tolerances of 1e-9 stay below one nanosecond or KiB."""
_WHOLE_COST_SCALE = 1e13
"""Sum of the largest costs where only whole coefficients are allowed: 1e6 gave wrong optima, and 2**53 must not be
reached."""
_TIGHTENINGS = 3
"""Most repetitions with tightened limits when a solver's tolerance lets a plan exceed them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A solver's answer in the assignment's own units.

    ``labels`` keep every limit in exact integers. ``value`` is exact for them; ``bound`` is the solver's lower bound.
    ``labels`` and ``value`` are None together.
    """

    status: LinearStatus
    labels: Mapping[str, str] | None
    value: float | None
    bound: float | None
    native: str
    build_seconds: float
    solve_seconds: float


def run(
    assignment: Assignment,
    solver: LinearSolver,
    *,
    options: LinearOptions,
    cost_unit: float = 1.0,
    allowed: Mapping[str, frozenset[str]] | None = None,
) -> Run:
    """Solve an assignment.

    Args:
        assignment: The assignment.
        solver: The solver.
        options: The solver's limits.
        cost_unit: What cost one unit of the objective stands for.
        allowed: Labels that a choice may take.

    Returns:
        The answer. A plan that exceeds a limit within the solver's tolerance is never returned: the limit is tightened
        by the excess and the solve repeated; the bound remains that of the real limits.

    Raises:
        SolverError: The solver failed, or keeps returning plans that exceed the limits.
    """
    build_seconds = solve_seconds = 0.0
    bound: float | None = None
    tightened = assignment
    for attempt in range(_TIGHTENINGS + 1):
        started = time.monotonic()
        program = _program(tightened, solver, cost_unit, allowed)
        built = time.monotonic()
        result = solver.solve(program.model, options)
        build_seconds += built - started
        solve_seconds += time.monotonic() - built
        if attempt == 0 and result.bound is not None:
            bound = result.bound * program.units.cost
        labels, value, excess = _read(assignment, program, result)
        if not excess:
            return Run(
                status=result.status,
                labels=labels,
                value=value,
                bound=bound,
                native=result.native,
                build_seconds=build_seconds,
                solve_seconds=solve_seconds,
            )
        limits = tuple(replace(limit, bound=limit.bound - 2 * excess.get(limit.name, 0)) for limit in tightened.limits)
        tightened = replace(tightened, limits=limits)
    over = ", ".join(f"{name} by {amount}" for name, amount in excess.items())
    raise SolverError(
        f"{solver.name} keeps returning plans for {assignment.name!r} that exceed limits ({over}); use another solver"
    )


def _program(
    assignment: Assignment,
    solver: LinearSolver,
    cost_unit: float,
    allowed: Mapping[str, frozenset[str]] | None,
) -> AssignmentProgram:
    if not solver.continuous:
        total = assignment.constant_cost + sum(float(node.cost_S.max()) for node in assignment.nodes)
        units = Units(cost=max(total / _WHOLE_COST_SCALE, cost_unit * 1e-12))
        program = linearize(assignment, units=units, whole=True, allowed=allowed)
        # Rounding down keeps the bound valid: every column is at least 0.
        program.model.columns[:] = [replace(c, cost=float(math.floor(c.cost))) for c in program.model.columns]
        return program
    largest_R = np.abs(assignment.constant_R)
    for node in assignment.nodes:
        largest_R = largest_R + np.abs(node.load_SR).max(axis=0)
    units = Units(
        cost=cost_unit,
        time_ns=max(1.0, float(largest_R[MEMORY + 1 :].sum())) / _ROW_SCALE,
        memory_kib=max(1.0, float(largest_R[MEMORY])) / _ROW_SCALE,
    )
    return linearize(assignment, units=units, allowed=allowed)


def _read(
    assignment: Assignment, program: AssignmentProgram, result: LinearResult
) -> tuple[dict[str, str] | None, float | None, dict[str, int]]:
    """Labels, exact value, and by how much they exceed limits."""
    if result.values is None:
        return None, None, {}
    labels = program.labels(result.values)
    states = assignment.states(labels)
    excess = {limit.name: value for limit, value in assignment.excess(states).items() if value > 0}
    return labels, assignment.cost(states), excess
