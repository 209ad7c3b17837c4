"""Intervals of the estimated times of a problem's operators, and of the iteration time of a plan.

`build_problem` notes them under the extension key ``x-intervals`` of a device.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from qsync_opt.errors import ProblemError
from qsync_opt.training.evaluation import evaluate
from qsync_opt.training.plan import Plan
from qsync_opt.training.problem import OperatorCost, Problem

INTERVALS_KEY = "x-intervals"
"""Extension key of a device of a problem: operator and precision to the ends of its 90 % intervals in nanoseconds."""
Ends = tuple[int, int, int, int]
"""Forward low and high, backward low and high, in nanoseconds."""
Target = tuple[str, str]
"""A device type and an operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationInterval:
    """Iteration time of a plan in nanoseconds: as planned, and with all intervals at their low and high ends."""

    iteration_ns: int
    low_ns: int
    high_ns: int


def operator_intervals(problem: Problem) -> dict[Target, dict[str, Ends]]:
    """The intervals of a problem by device type and operator, then precision; empty if nothing was learned.

    Raises:
        ProblemError: The note is damaged: it names an operator or a precision that is not there, or holds no four ends.
    """
    result: dict[Target, dict[str, Ends]] = {}
    for device in problem.devices:
        note = problem.extras.get(("devices", device.name, INTERVALS_KEY), {})
        what = f"{INTERVALS_KEY} of device {device.name!r}"
        if not isinstance(note, Mapping):
            raise ProblemError(f"{what} is {type(note).__name__}, but an object is needed; build the problem again")
        for operator, table in note.items():
            if operator not in device.operators or not isinstance(table, Mapping):
                raise ProblemError(f"{what} has an entry for {operator!r}, which the device lacks; build it again")
            for precision, ends in table.items():
                _check_ends(ends, f"{what}: {operator!r} in {precision!r}")
                if precision in device.operators[operator]:  # an exclusion may have removed it
                    result.setdefault((device.name, operator), {})[precision] = tuple(ends)
    return result


def _check_ends(ends: Any, what: str) -> None:
    numbers = isinstance(ends, list | tuple) and len(ends) == 4 and all(type(end) is int and end >= 0 for end in ends)
    if not numbers or ends[0] > ends[1] or ends[2] > ends[3]:
        raise ProblemError(
            f"{what} is {ends!r}, but four times are needed: forward low and high, backward low and high"
        )


def interval_problem(
    problem: Problem, *, low: Collection[Target] = (), high: Collection[Target] = (), kept: Mapping[Target, str] = {}
) -> Problem:
    """The problem with the intervals of some operators at their low, of others at their high ends.

    Args:
        problem: With intervals.
        low: Device types and operators whose times are at the low end.
        high: The same for the high end.
        kept: Of operators in ``low``, a precision that is at the high end nevertheless.
    """
    intervals = operator_intervals(problem)
    low, high = set(low), set(high)
    devices = []
    for device in problem.devices:
        operators: dict[str, Mapping[str, OperatorCost]] = dict(device.operators)
        for name, table in device.operators.items():
            target = (device.name, name)
            if target in intervals and (target in low or target in high):
                operators[name] = {
                    precision: _moved(cost, ends, up=target in high or kept.get(target) == precision)
                    if (ends := intervals[target].get(precision)) is not None
                    else cost
                    for precision, cost in table.items()
                }
        devices.append(replace(device, operators=operators))
    return replace(problem, devices=tuple(devices), optimum=None)


def _moved(cost: OperatorCost, ends: Ends, *, up: bool) -> OperatorCost:
    return replace(cost, forward_ns=ends[up], backward_ns=ends[2 + up])


def iteration_interval(problem: Problem, plan: Plan) -> IterationInterval:
    """The iteration time of a plan with an interval that makes no use of errors that cancel out.

    Without intervals in the problem both ends are the time itself.
    """
    targets = tuple(operator_intervals(problem))
    low, high = interval_problem(problem, low=targets), interval_problem(problem, high=targets)
    return IterationInterval(
        iteration_ns=evaluate(problem, plan).iteration_ns,
        low_ns=evaluate(low, plan).iteration_ns,
        high_ns=evaluate(high, plan).iteration_ns,
    )
