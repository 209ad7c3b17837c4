"""Are step costs usable? What a file, or code, may have put into them that no step could cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from qsync_opt.errors import ProblemError
from qsync_opt.numerics.formats import FORMATS
from qsync_opt.steps.queues import NEVER, Work

if TYPE_CHECKING:
    from qsync_opt.steps.costs import StepCosts

NEEDED = ("forward", "forward|end", "backward", "backward|end", "optimizer", "zero_grad")
"""What every step does outside of operators."""


def check_step_costs(costs: StepCosts, where: str = "step costs") -> None:
    """Refuse costs that no prediction could be made of.

    Args:
        costs: What to look at.
        where: Names them in errors.

    Raises:
        ProblemError: A phase is missing, a time or share is none, a format unknown, or an operator keeps an input that
            it does not have.
    """
    for what, found in (("phases", costs.phases), ("phase_peaks", costs.phase_peaks)):
        missing = [label for label in NEEDED if label not in found]
        if missing:
            raise ProblemError(
                f"{where}: {what} lacks {missing[0]!r}; needed are {', '.join(NEEDED)}: record them again"
            )
    for label, work in costs.phases.items():
        _check_work(work, f"{where}: phase {label!r}")
    if not 0.0 <= costs.resting_share <= 1.0:
        raise ProblemError(f"{where}: resting_share is {costs.resting_share}, but a share from 0 to 1 is needed")
    _check_format(costs.half_format, f"{where}: half_format")
    for case, cost in costs.cases.items():
        what = f"{where}: case {case.key()!r}"
        _check_work(cost.forward, f"{what}: forward")
        _check_work(cost.backward, f"{what}: backward")
        if cost.output:
            _check_format(cost.output, f"{what}: output")
        if cost.saves_inputs and not 0 <= min(cost.saves_inputs) <= max(cost.saves_inputs) < len(case.inputs):
            raise ProblemError(
                f"{what}: saves_inputs is {list(cost.saves_inputs)}, but it has {len(case.inputs)} inputs, counted "
                "from 0"
            )


def check_places(costs: StepCosts, inputs: Mapping[str, int], moments: int) -> None:
    """Refuse a case with more or fewer inputs than its operator has, and memory of a moment that a step has not.

    Args:
        costs: Of a model.
        inputs: By signature, how many inputs operators have in it.
        moments: Of a step of the model (`qsync_opt.steps.courses.moments`).
    """
    for moment, _ in costs.outside:
        if not 0 <= moment < moments:
            raise ProblemError(f"memory comes or goes at moment {moment}, but a step has {moments}; record it again")
    for case in costs.cases:
        if len(case.inputs) != inputs.get(case.signature, len(case.inputs)):
            raise ProblemError(
                f"case {case.key()!r} has formats of {len(case.inputs)} inputs, but the operator has "
                f"{inputs[case.signature]}; record the steps again"
            )


def _check_work(work: Work, what: str) -> None:
    right = all(type(x) is int for x in work) and work.host >= 0 and work.device >= 0
    if not (right and (work.lag >= 0 or work.lag == NEVER)):
        raise ProblemError(
            f"{what} is {tuple(work)}, but host, device and lag in integer nanoseconds from 0 are needed"
        )


def _check_format(name: str, what: str) -> None:
    if name not in FORMATS:
        raise ProblemError(f"{what} is {name!r}, but allowed are {', '.join(FORMATS)}")
