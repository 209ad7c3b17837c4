"""The systems of this package: each plans one kind of choice, by its own problems, methods and commands.

A further system is one entry here, or one of another package through the entry-point group ``qsync_opt.systems``.
Everything is named by texts ``"module:attribute"``, so that listing systems imports none of them.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, overload

from qsync_opt.errors import ProblemError, UnsupportedError
from qsync_opt.io import near_match
from qsync_opt.registry import Kind, attribute, entries
from qsync_opt.solving import Solution

if TYPE_CHECKING:
    from qsync_opt import training


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One kind of plan.

    ``problem`` names the class of its problems, ``plan`` the function that solves one (called with the problem, a
    method and options). ``searches`` are further questions about a problem, by name. ``runtime`` is the registered
    runtime that carries plans out, ``commands`` a ``typer.Typer`` that the command line mounts under the system's name.
    """

    name: str
    description: str
    problem: str
    plan: str
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
        plan="qsync_opt.training.planner:solve",
        searches={
            "fastest": "qsync_opt.formulations.training.fastest:fastest_plan",
            "front point": f"{_FRONT}:FrontPoint",
            "latency front": f"{_FRONT}:latency_front",
            "memory front": f"{_FRONT}:memory_front",
        },
        runtime="torch",
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


@overload
def solve(problem: training.Problem, method: Any = None, **options: Any) -> training.Solution: ...
@overload
def solve(problem: object, method: Any = None, **options: Any) -> Solution[Any, Any]: ...
def solve(problem: object, method: Any = None, **options: Any) -> Solution[Any, Any]:
    """Solve a problem of any registered system, and check the plan independently.

    Args:
        problem: A problem, such as `qsync_opt.load_problem` reads.
        method: Name of a registered formulation of that system, or an instance; its first one by default (for
            precision plans ``"greedy"``, which has a bound; ``"exact"`` proves the optimum).
        options: What the system's own ``solve`` takes: ``solver``, ``time_limit_s``, ``gap``, ... (for precision
            plans see `qsync_opt.training.solve`).

    Returns:
        The checked solution. That there is no feasible plan, or that the time was up, is a result, not an exception.

    Raises:
        ProblemError: This is no problem, or an option is out of range.
        UnsupportedError: No such method or solver, or it lacks what was asked for.
        NotInstalledError: A solver's package is missing.
        SolverError: A solver failed, or its plan is not what it claims.

    Example:
        >>> from qsync_opt.testing import chain
        >>> solve(chain().problem).objective
        0.25
    """
    chosen = system_of(problem)
    solution: Solution[Any, Any] = attribute(chosen.plan)(problem, method or chosen.methods[0], **options)
    return solution
