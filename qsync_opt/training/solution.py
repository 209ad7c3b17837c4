"""What solving gives: why it stopped, what is held, how good it is known to be, and how long it took."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from qsync_opt.errors import ProblemError, SolverError
from qsync_opt.training.evaluation import Evaluation
from qsync_opt.training.plan import Plan
from qsync_opt.views import Displayed

TINY = 1e-12
"""Least denominator of a relative gap."""
PROOF_GAP = 1e-6
"""A relative gap up to this counts as proved optimal: solvers compute in floating point."""


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
    """What is held."""

    FEASIBLE = "feasible"
    NONE = "none"


def relative_gap(objective: float | None, bound: float | None) -> float | None:
    """(objective - bound) / max(abs(objective), tiny), or None where either is missing."""
    if objective is None or bound is None:
        return None
    return max(objective - bound, 0.0) / max(abs(objective), TINY)


@dataclass(frozen=True, slots=True, kw_only=True)
class SolveOptions:
    """How a method should solve.

    ``solver`` is a solver's registered name, an instance of one, or None for the first that is installed.
    ``time_limit_s`` is for the whole solve; ``gap`` the relative gap at which to stop (0: prove the optimum).
    ``start`` is a plan to start from; each group of ``tied`` operators gets one precision.
    """

    solver: Any = None
    time_limit_s: float | None = None
    gap: float = 0.0
    start: Plan | None = None
    tied: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        limit_s, gap = self.time_limit_s, self.gap
        if limit_s is not None and (not isinstance(limit_s, int | float) or not 0 < limit_s < float("inf")):
            raise ProblemError(f"time limit is {limit_s!r} s, but it must be a finite number above 0")
        if not isinstance(gap, int | float) or not 0 <= gap < 1:
            raise ProblemError(f"gap is {self.gap!r}, but it must be at least 0 and below 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a formulation claims, before anyone has checked it.

    ``devices`` maps device to adjustable operator to precision. ``objective`` is its claim for that plan; ``bound``
    a value that no feasible plan's objective is below.
    """

    termination: TerminationStatus
    devices: Mapping[str, Mapping[str, str]] | None = None
    objective: float | None = None
    bound: float | None = None
    solver: str | None = None
    build_seconds: float = 0.0
    solve_seconds: float = 0.0
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Solution(Displayed):
    """A checked answer.

    ``evaluation`` is the independent evaluation of ``plan``; both are None where there is no plan, and ``reason`` then
    says which limit stands in the way, on which device, and the least value of it that could be met.
    """

    termination: TerminationStatus
    plan: Plan | None
    evaluation: Evaluation | None
    bound: float | None
    method: str
    solver: str | None
    build_seconds: float
    solve_seconds: float
    reason: str | None = None
    point: PointStatus = field(init=False)

    def __post_init__(self) -> None:
        if (self.plan is None) != (self.evaluation is None):
            raise SolverError("a solution must hold a plan and its evaluation, or neither")
        needs_plan = self.termination in (TerminationStatus.OPTIMAL, TerminationStatus.FEASIBLE)
        forbids_plan = self.termination in (TerminationStatus.INFEASIBLE, TerminationStatus.ERROR)
        if (needs_plan and self.plan is None) or (forbids_plan and self.plan is not None):
            raise SolverError(
                f"method {self.method!r} ended {self.termination} {'without' if needs_plan else 'with'} a plan"
            )
        object.__setattr__(self, "point", PointStatus.NONE if self.plan is None else PointStatus.FEASIBLE)

    @property
    def objective(self) -> float | None:
        """Total sensitivity of the plan."""
        return None if self.evaluation is None else self.evaluation.objective

    @property
    def gap(self) -> float | None:
        """Relative distance from bound to objective; None where either is missing."""
        return relative_gap(self.objective, self.bound)

    @property
    def iteration_ns(self) -> int | None:
        """Iteration time of the plan in nanoseconds."""
        return None if self.evaluation is None else self.evaluation.iteration_ns

    def provenance(self) -> Mapping[str, Any]:
        """The ``solution`` object of a plan file."""
        return MappingProxyType(
            {
                "termination": self.termination.value,
                "objective": self.objective,
                "bound": self.bound,
                "gap": self.gap,
                "method": self.method,
                "solver": self.solver,
            }
        )

    def to_json(self) -> dict[str, Any]:
        """The keys that ``qsync-opt solve --json`` prints."""
        return {
            "termination": self.termination.value,
            "point": self.point.value,
            "objective": self.objective,
            "bound": self.bound,
            "gap": self.gap,
            "iteration_ns": self.iteration_ns,
            "memory_kib": None if self.evaluation is None else self.evaluation.memory_kib,
            "sensitivity": None if self.evaluation is None else self.evaluation.sensitivity,
            "method": self.method,
            "solver": self.solver,
            "build_seconds": self.build_seconds,
            "solve_seconds": self.solve_seconds,
            "reason": self.reason,
        }
