"""Solving, for any kind of plan: why it stopped, what it holds, and how good that is known to be.

Each use (training, serving, ...) adds its own plan and evaluation; statuses, bound and gap mean the same everywhere.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, Protocol, Self, TypeVar

from qsync_opt.errors import ProblemError, SolverError

TINY = 1e-12
"""Least denominator of a relative gap."""
PROOF_GAP = 1e-6
"""A relative gap up to this counts as proved optimal: solvers compute in floating point."""
AGREEMENT = 1e-6
"""Largest relative difference between a claimed and the evaluated objective."""


class TerminationStatus(enum.StrEnum):
    """Why solving stopped."""

    OPTIMAL = "optimal"
    """The plan is proved best, to a relative gap of `PROOF_GAP`."""
    FEASIBLE = "feasible"
    """The method ended by itself with a plan that it does not prove best."""
    TIME_LIMIT = "time_limit"
    """The time was up; there may be a plan."""
    INFEASIBLE = "infeasible"
    """It is proved that no plan meets the limits."""
    ERROR = "error"
    """The method ended with neither a plan nor a proof; ``reason`` says why."""


class PointStatus(enum.StrEnum):
    """What a solution holds."""

    FEASIBLE = "feasible"
    NONE = "none"


class Evaluated(Protocol):
    """What an independent evaluation of a plan says, whatever the plan is of."""

    @property
    def objective(self) -> float:
        """The value that is minimized."""

    @property
    def feasible(self) -> bool:
        """Whether every limit is kept."""

    @property
    def violations(self) -> tuple[str, ...]:
        """Each broken limit, in words."""


PlanT = TypeVar("PlanT")
EvaluationT = TypeVar("EvaluationT", bound=Evaluated)


def relative_gap(objective: float | None, bound: float | None) -> float | None:
    """(objective - bound) / max(abs(objective), tiny), or None where either is missing."""
    if objective is None or bound is None:
        return None
    return max(objective - bound, 0.0) / max(abs(objective), TINY)


def termination_of(objective: float, bound: float | None, *, out_of_time: bool) -> TerminationStatus:
    """How a search that has a plan ended: optimal within `PROOF_GAP`, whether or not its time was up."""
    gap = relative_gap(objective, bound)
    if gap is not None and gap <= PROOF_GAP:
        return TerminationStatus.OPTIMAL
    return TerminationStatus.TIME_LIMIT if out_of_time else TerminationStatus.FEASIBLE


@dataclass(frozen=True, slots=True, kw_only=True)
class SolveOptions:
    """How a method should solve.

    ``solver`` is a solver's registered name, an instance of one, or None for the first that is installed.
    ``time_limit_s`` is for the whole solve; ``gap`` the relative gap at which to stop (0: prove the optimum).
    """

    solver: Any = None
    time_limit_s: float | None = None
    gap: float = 0.0

    def __post_init__(self) -> None:
        limit_s, gap = self.time_limit_s, self.gap
        if limit_s is not None and (not isinstance(limit_s, int | float) or not 0 < limit_s < float("inf")):
            raise ProblemError(f"time limit is {limit_s!r} s, but it must be a finite number above 0")
        if not isinstance(gap, int | float) or not 0 <= gap < 1:
            raise ProblemError(f"gap is {self.gap!r}, but it must be at least 0 and below 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a formulation claims, before it is checked.

    ``plan`` holds the decisions (for training, whose formulations decide by device, a subclass does); ``objective`` is
    the claim for them, ``bound`` a value that no feasible plan's objective is below.
    """

    termination: TerminationStatus
    plan: Any = None
    objective: float | None = None
    bound: float | None = None
    solver: str | None = None
    build_seconds: float = 0.0
    solve_seconds: float = 0.0
    reason: str | None = None


def check_claim(answer: Answer, evaluation: Evaluated, method: str) -> None:
    """Compare what a method claims with the independent evaluation of its plan.

    Raises:
        SolverError: The plan breaks a limit, has another objective than was claimed, or lies below its own bound.
    """
    source = method if answer.solver is None else f"{method} with {answer.solver}"
    if not evaluation.feasible:
        raise SolverError(f"{source} returned a plan that breaks limits: {'; '.join(evaluation.violations)}")
    slack = AGREEMENT * max(abs(evaluation.objective), 1e-300)
    if answer.objective is not None and abs(answer.objective - evaluation.objective) > slack:
        raise SolverError(
            f"{source} claims the objective {answer.objective!r} for a plan whose objective is {evaluation.objective!r}"
        )
    if answer.bound is not None and answer.bound > evaluation.objective + slack:
        raise SolverError(
            f"{source} claims the lower bound {answer.bound!r} above the objective {evaluation.objective!r} of its plan"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution(Generic[PlanT, EvaluationT]):
    """A checked answer.

    ``evaluation`` is the independent evaluation of ``plan``; both are None where there is no plan, and ``reason`` then
    names the limit in the way and the least value of it that could be met.
    """

    termination: TerminationStatus
    plan: PlanT | None
    evaluation: EvaluationT | None
    bound: float | None
    method: str
    solver: str | None
    build_seconds: float
    solve_seconds: float
    reason: str | None = None

    @classmethod
    def checked(
        cls,
        answer: Answer,
        plan: PlanT | None,
        evaluation: EvaluationT | None,
        *,
        method: str,
        time_limit_s: float | None = None,
    ) -> Self:
        """The solution that an answer amounts to.

        Args:
            answer: What the method claims.
            plan: Its plan, None if there is none.
            evaluation: The independent evaluation of ``plan``.
            method: Name of the method.
            time_limit_s: What it was allowed, for the reason of an answer that was cut off without a plan.

        Raises:
            SolverError: As `check_claim`.
        """
        if evaluation is not None:
            check_claim(answer, evaluation, method)
        reason = answer.reason
        if plan is None and reason is None and answer.termination is TerminationStatus.TIME_LIMIT:
            reason = (
                f"no plan was found within the time limit of {time_limit_s} s, which proves nothing; allow more time"
            )
        return cls(
            termination=answer.termination,
            plan=plan,
            evaluation=evaluation,
            bound=answer.bound,
            method=method,
            solver=answer.solver,
            build_seconds=answer.build_seconds,
            solve_seconds=answer.solve_seconds,
            reason=reason,
        )

    def __post_init__(self) -> None:
        if (self.plan is None) != (self.evaluation is None):
            raise SolverError("a solution must hold a plan and its evaluation, or neither")
        needs_plan = self.termination in (TerminationStatus.OPTIMAL, TerminationStatus.FEASIBLE)
        forbids_plan = self.termination in (TerminationStatus.INFEASIBLE, TerminationStatus.ERROR)
        if (needs_plan and self.plan is None) or (forbids_plan and self.plan is not None):
            raise SolverError(
                f"method {self.method!r} ended {self.termination} {'without' if needs_plan else 'with'} a plan"
            )

    @property
    def point(self) -> PointStatus:
        """What the solution holds."""
        return PointStatus.NONE if self.plan is None else PointStatus.FEASIBLE

    @property
    def objective(self) -> float | None:
        """Objective of the plan."""
        return None if self.evaluation is None else self.evaluation.objective

    @property
    def gap(self) -> float | None:
        """Relative distance from bound to objective; None where either is missing."""
        return relative_gap(self.objective, self.bound)

    def provenance(self) -> Mapping[str, Any]:
        """The ``solution`` object of a plan file."""
        data = self.to_json()
        keys = ("termination", "objective", "bound", "gap", "method", "solver")
        return MappingProxyType({key: data[key] for key in keys})

    def details(self) -> dict[str, Any]:
        """What `to_json` says of this use's plan; nothing by default."""
        return {}

    def to_json(self) -> dict[str, Any]:
        """The keys that the command line prints with ``--json``."""
        return {
            "termination": self.termination.value,
            "point": self.point.value,
            "objective": self.objective,
            "bound": self.bound,
            "gap": self.gap,
            **self.details(),
            "method": self.method,
            "solver": self.solver,
            "build_seconds": self.build_seconds,
            "solve_seconds": self.solve_seconds,
            "reason": self.reason,
        }
