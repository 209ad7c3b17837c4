"""Which operators of a plan to ask about: those that cost most sensitivity, and those that could save most time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qsync_opt.errors import ProblemError
from qsync_opt.training.explanation import Alternative, Explainer, Explanation

MOST_TELLING = 10
"""How many operators of each kind are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """An operator that would compute for less time in another precision; ``instead`` is the one that saves most."""

    explanation: Explanation
    instead: Alternative


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """The most telling operators of one device type under a plan.

    ``adjustable`` counts the operators that a plan decides on; ``sensitivity`` is that of the whole device type.
    ``sensitive`` are the operators with most sensitivity, those without any left out; ``savings`` those whose change
    would shorten the computation of the device type most, everything else left as it is.
    """

    device: str
    adjustable: int
    sensitivity: float
    sensitive: tuple[Explanation, ...]
    savings: tuple[Saving, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "adjustable": self.adjustable,
            "sensitivity": self.sensitivity,
            "most_sensitive": [explanation.to_json() for explanation in self.sensitive],
            "most_saving": [{**s.explanation.to_json(), "instead": s.instead.precision} for s in self.savings],
        }


def overview(explainer: Explainer, device: str, count: int = MOST_TELLING) -> Overview:
    """Name the operators of a plan that tell most on one device type.

    Args:
        explainer: The plan.
        device: Name of a device type of its problem.
        count: Operators of each kind at most.

    Raises:
        ProblemError: No such device type, or ``count`` is below 1.

    Source: ours.
    """
    if count < 1:
        raise ProblemError(f"count is {count}, but an overview needs at least 1 operator")
    problem = explainer.problem
    problem.device(device)
    found = explainer.evaluation.devices[device]
    table = problem.device(device).operators
    own = {
        operator.name: table[operator.name][time.precision].sensitivity
        for operator, time in zip(problem.operators, found.operators, strict=True)
    }
    # Sorting keeps the forward order of equals.
    sensitive = sorted((name for name, value in own.items() if value > 0), key=lambda name: -own[name])[:count]
    saved_ns = {
        operator.name: min(
            explainer.compute_change_ns(operator.name, device, precision) for precision in table[operator.name]
        )
        for operator in problem.adjustable
    }
    quicker = sorted((name for name, change in saved_ns.items() if change < 0), key=saved_ns.__getitem__)[:count]
    savings = []
    for name in quicker:
        explanation = explainer.explain(name, device)
        instead = min(explanation.alternatives, key=lambda a: (a.compute_change_ns, a.sensitivity_change))
        savings.append(Saving(explanation=explanation, instead=instead))
    return Overview(
        device=device,
        adjustable=len(problem.adjustable),
        sensitivity=found.sensitivity,
        sensitive=tuple(explainer.explain(name, device) for name in sensitive),
        savings=tuple(savings),
    )
