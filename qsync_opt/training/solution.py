"""What solving a precision problem gives: the claim of a formulation and the checked solution."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qsync_opt import solving
from qsync_opt.training.evaluation import Evaluation
from qsync_opt.training.plan import Plan
from qsync_opt.views import Displayed


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
        return {
            "iteration_ns": self.iteration_ns,
            "memory_kib": None if self.evaluation is None else self.evaluation.memory_kib,
            "sensitivity": None if self.evaluation is None else self.evaluation.sensitivity,
        }
