"""Solve a problem by a named method, and believe nothing that comes back: every plan is evaluated independently."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qsync_opt import solving
from qsync_opt.errors import ProblemError, SolverError, UnsupportedError
from qsync_opt.io import carried_estimates, check_number
from qsync_opt.registry import Feature, Kind, create, default_solver, features, require
from qsync_opt.solving import AGREEMENT
from qsync_opt.systems import system
from qsync_opt.training.evaluation import Evaluation, evaluate
from qsync_opt.training.plan import Plan
from qsync_opt.training.problem import Problem
from qsync_opt.views import Displayed

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SolveOptions(solving.SolveOptions):
    """How a method should solve; see `qsync_opt.solving.SolveOptions`.

    ``start`` is a plan to start from; each group of ``tied`` operators gets one precision.
    """

    start: Plan | None = None
    tied: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer(solving.Answer):
    """What a formulation claims, before it is checked.

    ``devices`` maps device to adjustable operator to precision; None where there is no plan.
    """

    devices: Mapping[str, Mapping[str, str]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Solution(Displayed, solving.Solution[Plan, Evaluation]):
    """A checked plan; its objective is the plan's total sensitivity."""

    @property
    def iteration_ns(self) -> int | None:
        """Iteration time of the plan in nanoseconds."""
        return None if self.evaluation is None else self.evaluation.iteration_ns

    def details(self) -> dict[str, Any]:
        """Iteration time in nanoseconds, memory in KiB and sensitivity by device."""
        return {key: getattr(self.evaluation, key, None) for key in ("iteration_ns", "memory_kib", "sensitivity")}


def solve(
    problem: Problem,
    method: Any = "greedy",
    *,
    solver: Any = None,
    time_limit_s: float | None = None,
    gap: float | None = None,
    start: Plan | None = None,
    tied: Sequence[Sequence[str]] = (),
) -> Solution:
    """Choose a precision for every operator on every device type.

    Args:
        problem: The problem.
        method: Name of a formulation (``"greedy"``, ``"qsync"``, ``"exact"``, ``"ilp"``, ``"exhaustive"``, or one
            that another package registered), or an instance of one.
        solver: Name of a solver (``"ortools"``, ``"pulp"``, ``"scip"``, ``"cp-sat"``, ...) or an instance; the first
            that is installed by default. Methods that solve a program use it.
        time_limit_s: Seconds for the whole solve; without it a method ends by itself.
        gap: Relative gap at which to stop; by default 0, or 0.001 for ``"greedy"``.
        start: A plan to start from; it need not be feasible.
        tied: Groups of adjustable operators, such as the same operator of identical blocks, that must each run in one
            precision.

    Returns:
        The solution, with its plan evaluated by `evaluate`. That there is no feasible plan, or that the time was up, is
        a result and not an exception.

    Raises:
        ProblemError: An option is out of range, or what is given is no problem.
        UnsupportedError: No such method or solver, or it lacks what was asked for.
        NotInstalledError: A solver's package is missing.
        SolverError: A solver failed, or its plan breaks a limit or has another objective than was claimed.

    Source: QSync (IPDPS 2024) for the problem and the default method.

    Examples:
        >>> from qsync_opt.testing import chain
        >>> solve(chain().problem).objective
        0.25
    """
    _check_arguments(problem, start, tied)
    formulation = _formulation(method)
    name = method if isinstance(method, str) else type(formulation).__name__
    if solver is not None:
        require(Kind.FORMULATION, method, Feature.SOLVER)
    if start is not None:
        require(Kind.FORMULATION, method, Feature.START)
        start.resolve(problem)
    if tied:
        require(Kind.FORMULATION, method, Feature.TIED)
    if gap and Feature.GAP not in features(Kind.FORMULATION, method):
        _LOGGER.warning("method %r has no bound, so the gap of %s does not stop it early", name, gap)
    if isinstance(solver, str):
        solver = create(Kind.SOLVER, solver)
    options = SolveOptions(
        solver=solver,
        time_limit_s=time_limit_s,
        gap=0.0 if gap is None else gap,
        start=start,
        tied=tuple(map(tuple, tied)),
    )
    _LOGGER.info("solving %s by %s", problem.name, name)
    answer: Answer = formulation.solve(problem, options)
    _LOGGER.info("%s ended %s after %.2f s", name, answer.termination, answer.build_seconds + answer.solve_seconds)
    for device, plan_of_device in (answer.devices or {}).items():
        for group in tied:
            precisions = {plan_of_device[operator] for operator in group}
            if len(precisions) > 1:
                raise SolverError(
                    f"{name} gave the tied operators {', '.join(map(repr, group))} of device {device!r} different "
                    f"precisions: {', '.join(sorted(precisions))}"
                )
    plan = None if answer.devices is None else Plan(problem=problem.name, devices=answer.devices)
    evaluation = None if plan is None else evaluate(problem, plan)
    solution = Solution.checked(answer, plan, evaluation, method=name, time_limit_s=time_limit_s)
    if plan is None:
        return solution
    estimates = carried_estimates(problem.extras)
    return replace(solution, plan=replace(plan, solution=solution.provenance(), extras=estimates))


def _formulation(method: Any) -> Any:
    formulation = create(Kind.FORMULATION, method)
    if isinstance(formulation, type) or not callable(getattr(formulation, "solve", None)):
        raise UnsupportedError(
            f"method is {method!r}, but it must be a name, such as 'greedy', or an instance that has a method 'solve'"
        )
    return formulation


def _check_arguments(problem: object, start: object, tied: Sequence[object]) -> None:
    if not isinstance(problem, Problem):
        raise ProblemError(
            f"problem is a {type(problem).__name__}, but a Problem is needed: load_problem(path) reads one from a file"
        )
    if start is not None and not isinstance(start, Plan):
        raise ProblemError(
            f"start is a {type(start).__name__}, but a Plan is needed: load_plan(path) reads one from a file"
        )
    for group in (tied,) if isinstance(tied, str) else tied:
        if isinstance(group, str) or not isinstance(group, Iterable):
            raise ProblemError(
                f"tied holds {group!r}, but each group must be a sequence of names: tied=[('first', 'second')]"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class FastestPlan:
    """The plan of least iteration time that keeps the memory limits.

    ``bound_ns`` is a time that no such plan is below; ``proved`` tells that ``iteration_ns`` is the least. Where time
    was short the plan is the best found, ``proved`` is False and ``method`` says so.
    """

    plan: Plan
    evaluation: Evaluation
    bound_ns: int
    proved: bool
    method: str
    solve_seconds: float

    @property
    def iteration_ns(self) -> int:
        """Iteration time in nanoseconds."""
        return self.evaluation.iteration_ns


def fastest(
    problem: Problem,
    method: Any = "exact",
    *,
    sensitivity_budget: float | None = None,
    solver: Any = None,
    time_limit_s: float | None = None,
    tied: Sequence[Sequence[str]] = (),
) -> FastestPlan | None:
    """The plan of least iteration time that keeps every memory limit; the problem's latency limit is set aside.

    Args:
        problem: The problem.
        method: ``"exact"`` proves that no plan is faster; ``"greedy"`` searches no harder than `solve` does by that
            name. Any other formulation (a name or an instance) is asked under one latency limit after another.
        sensitivity_budget: Most total sensitivity of the plan; none by default. With sensitivities that are shares of
            the gradient's own noise (`SensitivityTable.relative_to`), 0.05 is "at most 5 % more noise".
        solver: As in `solve`, for what the search by itself leaves undecided; of method ``"exact"`` only.
        time_limit_s: Seconds for the whole search.
        tied: Groups of adjustable operators that must each run in one precision.

    Returns:
        The plan, or None if no plan keeps the memory limits (`solve` gives the reason) and the budget.

    Raises:
        ProblemError: An option is out of range.
        UnsupportedError: No such method or solver, or the method uses none.
        SolverError: The solver failed, or its plan breaks a memory limit.

    Source: ours; QSync exhausts blocks of the graph for its starting plan.
    """
    _check_arguments(problem, None, tied)
    _formulation(method)
    if sensitivity_budget is not None:
        check_number(sensitivity_budget, "sensitivity budget")
    started = time.monotonic()
    options = SolveOptions(time_limit_s=time_limit_s)
    deadline = math.inf if options.time_limit_s is None else started + options.time_limit_s
    if solver is not None and method != "exact":
        raise UnsupportedError(f"seeking the fastest plan, only method 'exact' uses a solver, not {method!r}")
    choice = solver if solver is not None else default_solver()
    engine = None if choice is None else create(Kind.SOLVER, choice)
    search = system("training").search("fastest")
    answer = search(problem, method, engine, deadline, budget=sensitivity_budget, tied=tied)
    if answer is None:
        return None
    plan = Plan(problem=problem.name, devices=answer.devices)
    evaluation = evaluate(problem, plan)
    over = [device.name for device in evaluation.devices.values() if device.memory_kib > device.memory_limit_kib]
    if over:
        raise SolverError(f"the fastest plan found breaks the memory limit of {', '.join(over)}")
    if sensitivity_budget is not None and evaluation.objective > sensitivity_budget * (1 + AGREEMENT):
        raise SolverError(f"the plan found has a sensitivity of {evaluation.objective!r}, above the budget")
    return FastestPlan(
        plan=plan,
        evaluation=evaluation,
        bound_ns=answer.bound_ns,
        proved=answer.proved,
        method=answer.method,
        solve_seconds=time.monotonic() - started,
    )
