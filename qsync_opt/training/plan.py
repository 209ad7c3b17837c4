"""Plans: for each device type, the precision of each operator."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from qsync_opt.errors import ProblemError
from qsync_opt.io import (
    Document,
    Extras,
    Json,
    Name,
    check_fields,
    freeze,
    load_file,
    near_match,
)
from qsync_opt.model import Role
from qsync_opt.training.problem import Problem, ProblemDevice
from qsync_opt.training.propagation import follow_inputs, precisions_by_rank, propagate
from qsync_opt.views import Displayed, Tabular

PLAN_FORMAT = "qsync-plan/1"
_NAMED = 3
"""How many differing operators an error names."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan(Document, Displayed, Tabular):
    """Device type to operator to precision.

    ``problem`` is the name of the problem it was made for. Every adjustable operator of every device is named;
    dependent and fixed ones may be. ``solution`` says where the plan came from and is never trusted.
    """

    FORMAT: ClassVar = PLAN_FORMAT
    KIND: ClassVar = "plan"

    problem: Name
    devices: Mapping[Name, Mapping[Name, str]]
    solution: Annotated[Mapping[str, Any] | None, Json(omitted=True)] = None
    extras: Annotated[Extras, Json(stored=False)] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.devices:
            raise ProblemError("the plan has no devices; it must name at least one device type")
        check_fields(self, "plan")
        freeze(self, "devices", depth=2)
        freeze(self, "extras", *(() if self.solution is None else ("solution",)))

    def resolve(self, problem: Problem) -> dict[str, dict[str, str]]:
        """Device to operator to precision, in the problem's order, with dependent and fixed operators recomputed.

        Raises:
            ProblemError: The plan is for other devices or operators, picks a precision that a table lacks, or
                contradicts what a dependent or fixed operator gets; the first differing operators are named.

        Source: ours.
        """
        for name in self.devices:
            problem.device(name)  # an unknown device type is an error there
        result = {}
        for device in problem.devices:
            if device.name not in self.devices:
                raise ProblemError(
                    f"the plan has no device type {device.name!r} of problem {problem.name!r}; "
                    f"it has {', '.join(self.devices)}"
                )
            result[device.name] = self._resolve_device(problem, device)
        return result

    def _resolve_device(self, problem: Problem, device: ProblemDevice) -> dict[str, str]:
        plan = self.devices[device.name]
        known = {operator.name for operator in problem.operators}
        unknown = [name for name in plan if name not in known]
        absent = [operator.name for operator in problem.adjustable if operator.name not in plan]
        if unknown or absent:
            faults = [f"it names {_some(unknown)}, which the problem lacks"] if unknown else []
            faults += [f"it lacks the adjustable {_some(absent)}"] if absent else []
            raise ProblemError(
                f"the plan (made for {self.problem!r}) does not fit problem {problem.name!r}, device {device.name!r}: "
                f"{'; '.join(faults)}; name a precision for each adjustable operator, or make a plan for this problem"
            )
        resolved = propagate(problem, device, plan)
        for operator in problem.operators:
            actual = resolved[operator.name]
            planned = plan.get(operator.name, actual)
            if planned != actual:
                why = "its table allows" if operator.role is Role.FIXED else "its inputs make it run in"
                raise ProblemError(
                    f"plan for device {device.name!r}: {operator.role} operator {operator.name!r} is planned at "
                    f"{planned}, but {why} {actual}; leave it out or correct it"
                )
        return resolved


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read and check a plan file.

    Raises:
        ProblemError: The file is missing, truncated, of another format version, or holds anything but a plan; one
            line that names the file, the place and what is allowed.

    Source: the plan file format of this package, "qsync-plan/1".
    """
    return load_file(path, {PLAN_FORMAT: Plan.from_json})


def _some(names: list[str]) -> str:
    listed = ", ".join(repr(name) for name in names[:_NAMED])
    return listed if len(names) <= _NAMED else f"{listed} and {len(names) - _NAMED} more"


def uniform_plan(problem: Problem, precision: str | None = None) -> Plan:
    """Return the plan that gives every adjustable operator one precision; None: the lowest that each one has.

    An operator whose table lacks it takes the lowest that it has above, or else the highest that it has.

    Raises:
        ProblemError: The problem has no such format.

    Source: the uniform-precision baseline of QSync (IPDPS 2024); the rule for missing entries is ours.
    """
    if precision is not None and precision not in problem.formats:
        near = near_match(precision, problem.formats)
        raise ProblemError(
            f"precision is {precision!r}{near}; problem {problem.name!r} has {', '.join(problem.formats)}"
        )
    rank = -1 if precision is None else problem.rank(precision)
    return Plan(
        problem=problem.name,
        devices={
            device.name: {
                o.name: follow_inputs(problem, precisions_by_rank(problem, device, o.name), rank)
                for o in problem.adjustable
            }
            for device in problem.devices
        },
    )
