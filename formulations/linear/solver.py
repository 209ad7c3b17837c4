"""The contract of linear solvers: a linear model in; a point, a bound and a status out."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, Protocol

from qsync_opt.errors import NotInstalledError, UnsupportedError
from qsync_opt.formulations.linear.model import LinearModel
from qsync_opt.registry import Kind, create, default_solver


class LinearStatus(enum.StrEnum):
    """Why a solver stopped, in one vocabulary for all of them."""

    OPTIMAL = "optimal"
    """The point is best, to the relative gap of the options."""
    LIMIT = "limit"
    """A limit (time, memory, interrupt) ended it; there may be a point."""
    INFEASIBLE = "infeasible"
    UNBOUNDED = "unbounded"
    INFEASIBLE_OR_UNBOUNDED = "infeasible_or_unbounded"
    ERROR = "error"
    """Anything else; ``native`` keeps the solver's own words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearOptions:
    """Limits in seconds, gaps at which to stop, and a seed for repeatable runs.

    ``node_limit`` bounds the solver's search tree; a solver that cannot count its nodes ignores it. ``restarts`` allows
    a solver to begin its tree anew when it has fixed many columns, where it has that option.
    """

    time_limit_s: float | None = None
    relative_gap: float = 0.0
    absolute_gap: float = 0.0
    node_limit: int | None = None
    restarts: bool = True
    seed: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearResult:
    """A solver's claim: nothing in it has been checked.

    ``values`` has one number per column, or is None; ``bound`` is a lower bound on the objective, or None.
    """

    status: LinearStatus
    values: tuple[float, ...] | None
    bound: float | None
    native: str


class LinearSolver(Protocol):
    """A solver of linear models with whole columns.

    ``name`` and ``version`` identify it in results. ``continuous`` is False for solvers that take whole columns and
    whole coefficients only.
    """

    name: str
    continuous: bool

    @property
    def version(self) -> str:
        """Version of the solver or of the package that holds it."""
        ...

    def solve(self, model: LinearModel, options: LinearOptions) -> LinearResult:
        """Minimise.

        Raises:
            SolverError: The solver itself failed; its exception is the cause.
        """
        ...


def required_solver(choice: Any, method: str, *, continuous: bool = False) -> LinearSolver:
    """The solver of a method that solves a program.

    Args:
        choice: A name or an instance; None: the first that is installed.
        method: The method as errors call it, such as ``"method 'ilp'"``.
        continuous: Whether the program has continuous columns.

    Raises:
        NotInstalledError: No solver is installed.
        UnsupportedError: The solver takes whole columns only.
    """
    choice = choice or default_solver()
    if choice is None:
        raise NotInstalledError(
            f"{method} needs a solver and none is installed; install one: pip install 'qsync-opt[solvers]'"
        )
    solver: LinearSolver = create(Kind.SOLVER, choice)
    if continuous and not solver.continuous:
        raise UnsupportedError(
            f"solver {solver.name!r} takes whole columns and coefficients only, but {method} needs continuous ones; "
            "use ortools, pulp, highs or scip"
        )
    return solver
