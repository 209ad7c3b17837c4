"""Serving plans: a micro-batch option, the stages in order, and the scheme of each group."""

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
from qsync_opt.serving.problem import Problem

PLAN_FORMAT = "qsync-serving-plan/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of the pipeline: a device and the groups that it runs, in model order."""

    device: Name
    groups: tuple[Name, ...]

    def __post_init__(self) -> None:
        check_fields(self, f"stage on {self.device!r}")
        if not self.groups:
            raise ProblemError(f"the stage on {self.device!r} has no groups; leave the device out instead")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Document):
    """Micro-batch option, stages in order, and a scheme for each group.

    ``solution`` says where the plan came from and is never trusted.
    """

    FORMAT: ClassVar = PLAN_FORMAT
    KIND: ClassVar = "plan"

    microbatch: int
    stages: tuple[Stage, ...]
    schemes: Mapping[Name, Name]
    solution: Annotated[Mapping[str, Any] | None, Json(omitted=True)] = None
    extras: Annotated[Extras, Json(stored=False)] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self, "plan")
        object.__setattr__(self, "stages", tuple(self.stages))
        freeze(self, "schemes", "extras", *(() if self.solution is None else ("solution",)))

    def check_fits(self, problem: Problem) -> None:
        """Refuse a plan that is none of this problem.

        Raises:
            ProblemError: It names an option, device, group or scheme that the problem lacks, uses a device twice,
                leaves out a group, or has the groups in another order.
        """
        if self.microbatch >= len(problem.microbatches):
            raise ProblemError(
                f"plan: microbatch is {self.microbatch}, but problem {problem.name!r} has options "
                f"0 to {len(problem.microbatches) - 1}"
            )
        used: set[str] = set()
        for stage in self.stages:
            problem.device(stage.device)
            if stage.device in used:
                raise ProblemError(f"plan: device {stage.device!r} has two stages, but a device may have one")
            used.add(stage.device)
        expected = [group.name for group in problem.groups]
        actual = [name for stage in self.stages for name in stage.groups]
        for name in (*actual, *self.schemes):
            if name not in problem.harm:
                raise ProblemError(f"plan: problem {problem.name!r} has no group {name!r}{near_match(name, expected)}")
        for k, name in enumerate(expected):
            if name not in self.schemes:
                raise ProblemError(f"plan: group {name!r} has no scheme; name one of {', '.join(problem.schemes)}")
            if self.schemes[name] not in problem.schemes:
                raise ProblemError(
                    f"plan: group {name!r} has the scheme {self.schemes[name]!r}"
                    f"{near_match(self.schemes[name], problem.schemes)}; allowed are {', '.join(problem.schemes)}"
                )
            if k >= len(actual) or actual[k] != name:
                place = f"has {actual[k]!r} there" if k < len(actual) else "ends before it"
                raise ProblemError(
                    f"plan: the stages must run the groups in the model's order, each once; {name!r} is number {k}, "
                    f"but the plan {place}"
                )
        if len(actual) > len(expected):
            raise ProblemError(f"plan: the stages name {actual[len(expected)]!r} once too often")


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read and check a serving plan file.

    Raises:
        ProblemError: The file is missing, truncated, of another format version, or holds anything but such a plan.

    Source: the plan file format of this package, "qsync-serving-plan/1".
    """
    return load_file(path, {PLAN_FORMAT: Plan.from_json})
