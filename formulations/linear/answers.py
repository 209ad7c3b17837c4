"""The answer to a problem whose whole program a solver was given once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qsync_opt.errors import SolverError
from qsync_opt.formulations.linear.solver import LinearResult, LinearSolver, LinearStatus
from qsync_opt.solving import Answer, TerminationStatus, termination_of


def answer_of(
    result: LinearResult,
    solver: LinearSolver,
    *,
    bound_of: Callable[[float], float],
    plan_of: Callable[[tuple[float, ...]], Any],
    objective_of: Callable[[Any], float],
    why_infeasible: Callable[[], str],
    build_seconds: float,
    solve_seconds: float,
) -> Answer:
    """What a result says of the problem; the plan is evaluated anew.

    Args:
        result: Of the solver.
        solver: That gave it.
        bound_of: From a bound of the program to one of the problem.
        plan_of: From a point of the program.
        objective_of: Of a plan.
        why_infeasible: The reason where there is no plan.
        build_seconds: Spent on the program.
        solve_seconds: Spent by the solver.

    Raises:
        SolverError: The solver failed.
    """
    solved: dict[str, Any] = {
        "solver": f"{solver.name} {solver.version}",
        "build_seconds": build_seconds,
        "solve_seconds": solve_seconds,
    }
    if result.status in (LinearStatus.INFEASIBLE, LinearStatus.INFEASIBLE_OR_UNBOUNDED):
        return Answer(termination=TerminationStatus.INFEASIBLE, reason=why_infeasible(), **solved)
    if result.status in (LinearStatus.ERROR, LinearStatus.UNBOUNDED):
        raise SolverError(f"{solver.name} failed: {result.native}; use another solver")
    bound = None if result.bound is None else bound_of(result.bound)
    if result.values is None:
        return Answer(termination=TerminationStatus.TIME_LIMIT, bound=bound, **solved)
    plan = plan_of(result.values)
    objective = objective_of(plan)
    return Answer(
        plan=plan,
        termination=termination_of(objective, bound, out_of_time=result.status is LinearStatus.LIMIT),
        objective=objective,
        bound=None if bound is None else min(bound, objective),
        **solved,
    )
