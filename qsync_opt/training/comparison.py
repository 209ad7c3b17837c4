"""Differences between two plans, and what they cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qsync_opt.io import encode
from qsync_opt.training.evaluation import Evaluation, evaluate
from qsync_opt.training.plan import Plan
from qsync_opt.training.problem import Problem

DIFFERENCE_FORMAT = "qsync-plan-difference/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorChange:
    """One operator with different precisions, None where a plan does not name it.

    ``decided`` is False for an operator that no plan decides on: it follows its inputs.
    """

    operator: str
    before: str | None
    after: str | None
    decided: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDifference:
    """Changes from one plan to another, by device type; with a problem also both evaluations."""

    first: Plan
    second: Plan
    changes: Mapping[str, tuple[OperatorChange, ...]]
    before: Evaluation | None = None
    after: Evaluation | None = None

    @property
    def equal(self) -> bool:
        """True if no operator changes on any device type."""
        return not any(self.changes.values())

    @property
    def shared(self) -> int:
        """How many operators both plans name, on whatever device types."""
        return len(_names(self.first) & _names(self.second))

    @property
    def one_sided(self) -> int:
        """How many operators one plan names and the other does not."""
        return len(_names(self.first) ^ _names(self.second))

    def counts(self, device: str) -> dict[tuple[str | None, str | None], int]:
        """How many decided operators of a device type change between each two precisions."""
        return dict(Counter((c.before, c.after) for c in self.changes[device] if c.decided))

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object; ``cost`` is null without a problem."""
        cost = None
        if self.before is not None and self.after is not None:
            cost = {"first": self.before.to_json(), "second": self.after.to_json()}
        return {
            "format": DIFFERENCE_FORMAT,
            "equal": self.equal,
            "devices": {device: [encode(change) for change in changes] for device, changes in self.changes.items()},
            "cost": cost,
        }


def _names(plan: Plan) -> set[str]:
    return {name for chosen in plan.devices.values() for name in chosen}


def compare_plans(first: Plan, second: Plan, problem: Problem | None = None) -> PlanDifference:
    """Compare two plans operator by operator; with their problem dependent ones too, and both plans are evaluated.

    Changes are in the problem's order or else in that of the plans, for the device types of either plan.

    Raises:
        ProblemError: A plan does not fit the problem.

    Source: ours.
    """
    before: Mapping[str, Mapping[str, str]] = first.devices if problem is None else first.resolve(problem)
    after: Mapping[str, Mapping[str, str]] = second.devices if problem is None else second.resolve(problem)
    decided = None if problem is None else {operator.name for operator in problem.adjustable}
    changes = {}
    for device in dict.fromkeys((*before, *after)):
        old, new = before.get(device, {}), after.get(device, {})
        changes[device] = tuple(
            OperatorChange(
                operator=name, before=old.get(name), after=new.get(name), decided=decided is None or name in decided
            )
            for name in dict.fromkeys((*old, *new))
            if old.get(name) != new.get(name)
        )
    return PlanDifference(
        first=first,
        second=second,
        changes=changes,
        before=None if problem is None else evaluate(problem, first),
        after=None if problem is None else evaluate(problem, second),
    )
