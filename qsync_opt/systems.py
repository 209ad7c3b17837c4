"""The systems of this package: each plans one kind of choice, by its own problems, methods and commands.

A further system is one entry here, or one of another package through the entry-point group ``qsync_opt.systems``.
Everything is named by texts ``"module:attribute"``, so that listing systems imports none of them.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, overload

from qsync_opt.errors import ProblemError, UnsupportedError
from qsync_opt.io import carried_estimates, load_file, near_match
from qsync_opt.registry import Feature, Kind, attribute, create, entries, require
from qsync_opt.solving import Answer, Solution, SolveOptions

if TYPE_CHECKING:
    from qsync_opt import training


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One kind of plan.

    ``problem`` and ``plan_class`` name the classes of its problems and plans; each has a class method ``from_json`` of
    a file's data, and a method ``save``. ``problem_format`` and ``plan_format`` are the ``"format"`` of their files.
    ``evaluation`` names the function of a problem and a plan that every plan is judged by, ``plan`` the function that
    solves a problem (called with the problem, a method and options). ``searches`` are further questions about a
    problem, by name. ``runtime`` is the registered runtime that carries plans out, ``commands`` a ``typer.Typer`` of
    further commands under the system's name, beside ``solve`` and ``evaluate`` of files.
    """

    name: str
    description: str
    problem: str
    plan_class: str | None = None
    problem_format: str | None = None
    plan_format: str | None = None
    evaluation: str | None = None
    plan: str = "qsync_opt.systems:solve_by_formulation"
    searches: Mapping[str, str] = field(default_factory=dict)
    runtime: str | None = None
    commands: str | None = None

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the registered formulations, the default first."""
        return tuple(entries(Kind.FORMULATION, self.name))

    def search(self, name: str) -> Any:
        """Import and return one of ``searches``.

        Raises:
            UnsupportedError: No such search.
        """
        if name not in self.searches:
            allowed = ", ".join(self.searches) or "none"
            raise UnsupportedError(f"system {self.name!r} has no search {name!r}; allowed are {allowed}")
        return attribute(self.searches[name])


_FRONT = "qsync_opt.formulations.training.front"
BUILT_IN = (
    System(
        name="training",
        description="a precision for every operator of data-parallel training on unlike devices",
        problem="qsync_opt.training.problem:Problem",
        plan_class="qsync_opt.training.plan:Plan",
        problem_format="qsync-problem/1",
        plan_format="qsync-plan/1",
        evaluation="qsync_opt.training.evaluation:evaluate",
        plan="qsync_opt.training.planner:solve",
        searches={
            "fastest": "qsync_opt.formulations.training.fastest:fastest_plan",
            "front point": f"{_FRONT}:FrontPoint",
            "latency front": f"{_FRONT}:latency_front",
            "memory front": f"{_FRONT}:memory_front",
        },
        runtime="torch",
    ),
    System(
        name="gradients",
        description="a compression scheme for every gradient bucket's all-reduce",
        problem="qsync_opt.gradients.problem:Problem",
        plan_class="qsync_opt.gradients.plan:Plan",
        problem_format="qsync-gradients/1",
        plan_format="qsync-gradients-plan/1",
        evaluation="qsync_opt.gradients.evaluation:evaluate",
        runtime="torch",
        commands="qsync_opt.cli.gradients:app",
    ),
    System(
        name="joint",
        description="operators' precisions and gradient buckets' schemes in one problem",
        problem="qsync_opt.gradients.joint:JointProblem",
        plan_class="qsync_opt.gradients.joint:JointPlan",
        problem_format="qsync-joint/1",
        plan_format="qsync-joint-plan/1",
        evaluation="qsync_opt.gradients.joint:evaluate_joint",
        runtime="torch",
    ),
    System(
        name="shares",
        description="local batches and operators' precisions of unequal workers in one problem",
        problem="qsync_opt.training.shares:SharesProblem",
        plan_class="qsync_opt.training.shares:SharesPlan",
        problem_format="qsync-shares/1",
        plan_format="qsync-shares-plan/1",
        evaluation="qsync_opt.training.shares:evaluate_shares",
        searches={"fastest": "qsync_opt.formulations.training.shares:find_fastest"},
        runtime="torch",
    ),
    System(
        name="messages",
        description="a width for every message of full-graph GNN training, hidden behind computation",
        problem="qsync_opt.messages.problem:Problem",
        plan_class="qsync_opt.messages.plan:Plan",
        problem_format="qsync-messages/1",
        plan_format="qsync-messages-plan/1",
        evaluation="qsync_opt.messages.evaluation:evaluate",
        runtime="torch",
        commands="qsync_opt.cli.messages:app",
    ),
    System(
        name="decoding",
        description="a draft and its length for every regime of speculative decoding, or none",
        problem="qsync_opt.decoding.problem:Problem",
        plan_class="qsync_opt.decoding.plan:Plan",
        problem_format="qsync-decoding/1",
        plan_format="qsync-decoding-plan/1",
        evaluation="qsync_opt.decoding.evaluation:evaluate",
        commands="qsync_opt.cli.decoding:app",
    ),
    System(
        name="serving",
        description="stages, weight schemes and micro-batches of a language model over unequal devices",
        problem="qsync_opt.serving.problem:Problem",
        plan_class="qsync_opt.serving.plan:Plan",
        problem_format="qsync-serving/1",
        plan_format="qsync-serving-plan/1",
        evaluation="qsync_opt.serving.evaluation:evaluate",
        commands="qsync_opt.cli.serving:app",
    ),
    System(
        name="checkpoints",
        description="which rank writes which rows of a checkpoint, how often to save, and what a folder holds",
        problem="qsync_opt.checkpoints.problem:Problem",
        plan_class="qsync_opt.checkpoints.plan:Plan",
        problem_format="qsync-writes/1",
        plan_format="qsync-writes-plan/1",
        evaluation="qsync_opt.checkpoints.evaluation:evaluate",
        runtime="torch",
        commands="qsync_opt.cli.checkpoints:app",
    ),
)


@cache
def systems() -> Mapping[str, System]:
    """All systems by name, built-ins first.

    Raises:
        UnsupportedError: Two packages claim the same name.
    """
    result = {system.name: system for system in BUILT_IN}
    for point in importlib.metadata.entry_points(group="qsync_opt.systems"):
        system = point.load()
        if system.name in result:
            raise UnsupportedError(
                f"the system name {system.name!r} is claimed twice, by {point.value} too; uninstall one"
            )
        result[system.name] = system
    return MappingProxyType(result)


def system(name: str) -> System:
    """The system called ``name``.

    Raises:
        UnsupportedError: No such system; the text lists the names and the nearest one.
    """
    known = systems()
    if name not in known:
        raise UnsupportedError(f"unknown system {name!r}{near_match(name, known)}; allowed are {', '.join(known)}")
    return known[name]


def system_of(problem: object) -> System:
    """The system whose problems ``problem`` is one of.

    Raises:
        ProblemError: It is no problem of any system.
    """
    classes = {f"{kind.__module__}:{kind.__qualname__}" for kind in type(problem).__mro__}
    for candidate in systems().values():
        if candidate.problem in classes:
            return candidate
    raise ProblemError(
        f"problem is a {type(problem).__name__}, but a Problem is needed: load_problem(path) reads one from a file"
    )


def load_problem(path: str | os.PathLike[str]) -> Any:
    """Read and check a problem file of any registered system.

    Raises:
        ProblemError: The file is missing, truncated, of another format version, or breaks a rule of the format; one
            line that names the file, the place and what is allowed.

    Source: formats of this package, such as ``"qsync-problem/1"``.
    """
    kinds = systems().values()
    return load_file(path, {kind.problem_format: _reader(kind.problem) for kind in kinds if kind.problem_format})


def load_plan(path: str | os.PathLike[str]) -> Any:
    """Read and check a plan file of any registered system.

    Raises:
        ProblemError: The file is missing, truncated, of another format version, or holds anything but a plan.

    Source: formats of this package, such as ``"qsync-plan/1"``.
    """
    kinds = systems().values()
    return load_file(path, {kind.plan_format: _reader(kind.plan_class) for kind in kinds if kind.plan_format})


def _reader(target: str | None) -> Callable[[Any], Any]:
    return lambda data: attribute(str(target)).from_json(data)


@overload
def evaluate(problem: training.Problem, plan: training.Plan) -> training.Evaluation: ...
@overload
def evaluate(problem: object, plan: object) -> Any: ...
def evaluate(problem: object, plan: object) -> Any:
    """Objective, feasibility and costs of a plan, whatever it is of, by code that trusts no solver.

    Raises:
        ProblemError: The plan does not belong to the problem, or contradicts it, or is none.
    """
    kind = system_of(problem)
    if kind.plan_class and not isinstance(plan, attribute(kind.plan_class)):
        raise ProblemError(
            f"plan is a {type(plan).__name__}, but a Plan is needed: solution.plan (None where none was found), or "
            "load_plan(path)"
        )
    return attribute(str(kind.evaluation))(problem, plan)


@overload
def solve(problem: training.Problem, method: Any = None, **options: Any) -> training.Solution: ...
@overload
def solve(problem: object, method: Any = None, **options: Any) -> Solution[Any, Any]: ...
def solve(problem: object, method: Any = None, **options: Any) -> Solution[Any, Any]:
    """Solve a problem of any registered system, and check the plan independently.

    Args:
        problem: A problem, such as `qsync_opt.load_problem` reads.
        method: Name of a registered formulation of that system, or an instance; its first one by default and for
            the name ``"default"`` (for precision plans ``"greedy"``, with a bound; ``"exact"`` proves the optimum).
        options: What the system's own ``solve`` takes: ``solver``, ``time_limit_s``, ``gap``, ... (for precision
            plans see `qsync_opt.training.solve`).

    Returns:
        The checked solution. That there is no feasible plan, or that the time was up, is a result, not an exception.

    Raises:
        ProblemError: This is no problem, or an option is out of range.
        UnsupportedError: No such method or solver, or it lacks what was asked for.
        NotInstalledError: A solver's package is missing.
        SolverError: A solver failed, or its plan is not what it claims.

    Examples:
        >>> from qsync_opt.testing import chain
        >>> solve(chain().problem).objective
        0.25
    """
    chosen = system_of(problem)
    if method is None or (method == "default" and "default" not in chosen.methods):
        method = chosen.methods[0]
    solution: Solution[Any, Any] = attribute(chosen.plan)(problem, method, **options)
    return solution


def solve_by_formulation(
    problem: Any,
    method: Any,
    *,
    solver: Any = None,
    time_limit_s: float | None = None,
    gap: float | None = None,
) -> Solution[Any, Any]:
    """Solve a problem by one of its system's formulations, and check the plan that it returns.

    The plan carries what the problem says about its estimates (`carried_estimates`).

    Args:
        problem: A problem of a system whose formulations return plans.
        method: Name of a formulation of that system, or an instance of one.
        solver: Name of a solver or an instance; the first that is installed by default.
        time_limit_s: Seconds for the whole solve; without it a method ends by itself.
        gap: Relative gap at which to stop; by default 0.

    Raises:
        ProblemError: An option is out of range.
        UnsupportedError: No such method or solver, or it lacks what was asked for.
        NotInstalledError: A solver's package is missing.
        SolverError: A solver failed, or its plan is not what it claims.
    """
    kind = system_of(problem)
    formulation = create(Kind.FORMULATION, method, kind.name)
    name = method if isinstance(method, str) else type(formulation).__name__
    if solver is not None:
        require(Kind.FORMULATION, method, Feature.SOLVER, kind.name)
        solver = create(Kind.SOLVER, solver)
    options = SolveOptions(solver=solver, time_limit_s=time_limit_s, gap=0.0 if gap is None else gap)
    answer: Answer = formulation.solve(problem, options)
    plan = answer.plan
    evaluation = None if plan is None else evaluate(problem, plan)
    estimates = carried_estimates(getattr(problem, "extras", {}))
    if plan is not None and estimates:
        plan = replace(plan, extras={**plan.extras, **estimates})
    return Solution.checked(answer, plan, evaluation, method=name, time_limit_s=time_limit_s)
