"""Replanning: whether a plan in use is replaced when its problem has changed.

Sensitivities drift while a model trains, and devices lose or regain memory and speed. Every change of plan costs
something (casts and caches are set up again, the run is harder to compare), so a plan that still keeps all limits is
replaced only by one that is better by a given share: without this hysteresis two plans of nearly equal value would
alternate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qsync_opt.errors import ProblemError, SolverError
from qsync_opt.io import check_number, freeze
from qsync_opt.training.comparison import compare_plans
from qsync_opt.training.evaluation import Evaluation, evaluate
from qsync_opt.training.plan import Plan
from qsync_opt.training.planner import Solution, solve
from qsync_opt.training.problem import Problem

Change = tuple[str | None, str]
"""Precision before (None: the operator was not planned) and after."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replanning:
    """The decision and its reason.

    ``plan`` is the one to use from now on; ``replaced`` tells whether it is another than the old one. ``before``
    evaluates the old plan on the new problem, None if it does not fit it; ``after`` the new solution's plan.
    ``changes`` maps device type to operator to the change, and is empty if the old plan is kept.
    """

    plan: Plan
    replaced: bool
    before: Evaluation | None
    after: Evaluation
    changes: Mapping[str, Mapping[str, Change]]
    reason: str
    solution: Solution

    def __post_init__(self) -> None:
        freeze(self, "changes", depth=2)


def replan(
    problem: Problem,
    current: Plan,
    *,
    improvement: float = 0.1,
    method: Any = "greedy",
    solver: Any = None,
    time_limit_s: float | None = None,
    tied: Sequence[Sequence[str]] = (),
) -> Replanning:
    """Solve a changed problem and decide whether to replace the plan in use.

    ``problem`` is as it is now, with new sensitivities, limits or times; ``current`` is the plan in use. A new plan
    must lower the total sensitivity by the share ``improvement`` (0.1: by 10 %); 0 takes any better one. A plan that
    breaks a limit now, or that does not fit the problem, is replaced in any case. All else is as in `solve`.

    Raises:
        ProblemError: ``improvement`` is not a share; no plan keeps the limits now (the text says which clash).
        SolverError: No plan was found within the time limit, and the current one does not keep the limits.
        UnsupportedError: As in `solve`.

    Source: ours.
    """
    check_number(improvement, "improvement")
    if improvement >= 1:
        raise ProblemError(f"improvement is {improvement}: a share below 1 is needed, such as 0.1")
    before: Evaluation | None = None
    misfit = ""
    try:
        before = evaluate(problem, current)
    except ProblemError as error:
        misfit = str(error)
    solution = solve(problem, method, solver=solver, time_limit_s=time_limit_s, tied=tied)
    if solution.plan is None or solution.evaluation is None:
        if before is None or not before.feasible:
            kind = ProblemError if solution.termination == "infeasible" else SolverError
            raise kind(f"there is no plan for problem {problem.name!r} as it is now: {solution.reason}")
        plan, after, changes, replaced = current, before, {}, False
        reason = f"the plan in use is kept: method {solution.method!r} found no other ({solution.reason})"
    else:
        plan, after, changes = solution.plan, solution.evaluation, _changes(problem, current, solution.plan)
        reason, replaced = _verdict(before, misfit, after, changes, improvement)
    return Replanning(
        plan=plan if replaced else current,
        replaced=replaced,
        before=before,
        after=after,
        changes=changes if replaced else {},
        reason=reason,
        solution=solution,
    )


def _verdict(
    before: Evaluation | None,
    misfit: str,
    after: Evaluation,
    changes: Mapping[str, Mapping[str, Change]],
    improvement: float,
) -> tuple[str, bool]:
    if before is None:
        return f"the plan in use does not fit the problem: {misfit}", True
    if not changes:
        if before.feasible:
            return "the plan in use is still the one that is found", False
        raise SolverError("one plan was found both to break the limits and to keep them")
    count = sum(map(len, changes.values()))
    if not before.feasible:
        return f"the plan in use breaks limits now ({'; '.join(before.violations)}): {count} operators change", True
    old, new = before.objective, after.objective
    comparison = f"total sensitivity {new:.6g} instead of {old:.6g}"
    if new < (1 - improvement) * old:
        return f"a better plan was found, {comparison}: {count} operators change", True
    return f"the plan in use is kept: the best that was found, {comparison}, is not better by {improvement:.0%}", False


def _changes(problem: Problem, before: Plan, after: Plan) -> dict[str, dict[str, Change]]:
    """Adjustable operators whose precision differs, by device type; ``before`` need not fit the problem."""
    adjustable = {operator.name for operator in problem.adjustable}
    differences = compare_plans(before, after).changes
    changes = {
        device: {
            c.operator: (c.before, precisions[c.operator]) for c in differences[device] if c.operator in adjustable
        }
        for device, precisions in after.devices.items()
    }
    return {device: changed for device, changed in changes.items() if changed}
