"""The contents of a report, computed once; `qsync_opt.report.page` lays them out."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from qsync_opt.errors import ProblemError, UnsupportedError
from qsync_opt.gradients import Reduction
from qsync_opt.io import Json, check_fields, decode, freeze, read_json, split_extras
from qsync_opt.training import (
    GAPS,
    Evaluation,
    Explainer,
    Explanation,
    Front,
    MemoryTimeline,
    Plan,
    Problem,
    Solution,
    Timeline,
    evaluate,
    memory_timeline,
    pareto_front,
    replay,
    solve,
    uniform_plan,
)

MEASURED_FORMAT = "qsync-measured/1"
DEFAULT_FRONT = "greedy"
NO_FRONT = "none"
LOWEST = "lowest"
"""Label of the plan that gives every operator the lowest precision that it has."""
POINTS = 30
"""Limits that each front is computed for: as many as `pareto_front` tries, so that both share a cache."""
_Positive = Annotated[int | None, Json(minimum=1, optional=True)]
Progress = Callable[[int, int, str], None]
"""Called with the number of points computed, their total, and what is being computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fronts:
    """Sensitivity against iteration time within the memory limits, and against memory within the latency limit.

    ``best`` is what the method of the same name finds within the problem's own limits, with its bound.
    """

    method: str
    best: Solution
    latency: Front
    memory: Mapping[str, Front]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredDevice:
    """One worker of a device type: its iteration time alone and its peak memory; None is what was not measured."""

    iteration_ns: _Positive = None
    peak_memory_bytes: _Positive = None

    def __post_init__(self) -> None:
        check_fields(self, "measured")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements of a plan. ``iteration_ns`` is that of the whole cluster; ``source`` says how it was measured."""

    source: str
    iteration_ns: _Positive = None
    devices: Annotated[Mapping[str, MeasuredDevice], Json(optional=True)] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self, "measured")
        freeze(self, "devices")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A plan, its evaluation, and what explains both.

    ``explanations`` are by device, in the problem's order of operators. ``uniform`` has the evaluation of each plan of
    one precision, by that precision, or `LOWEST`. ``memory`` has None for a device of which the problem knows only
    totals per operator. ``fronts`` is None if they were left out.
    """

    problem: Problem
    plan: Plan
    evaluation: Evaluation
    explanations: Mapping[str, tuple[Explanation, ...]]
    uniform: Mapping[str, Evaluation]
    fronts: Fronts | None
    timeline: Timeline
    memory: Mapping[str, MemoryTimeline | None]
    measured: Measured | None
    reductions: tuple[Reduction, ...] = ()
    """What was measured of each gradient bucket under the plan; empty: nothing."""


def make_report(
    problem: Problem,
    plan: Plan,
    *,
    front: str = DEFAULT_FRONT,
    measured: Measured | None = None,
    cache: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    reductions: Sequence[Reduction] = (),
) -> Report:
    """Evaluate and explain a plan, and compare it with others.

    Args:
        problem: The problem.
        plan: A plan for it, feasible or not.
        front: Method of the fronts and of the bound: ``"greedy"``, ``"exact"`` (proves every point, which may take
            long) or ``"none"``.
        measured: What was measured of the plan, to stand beside what is predicted.
        cache: Folder in which points of fronts are kept, so that an interrupted report resumes; None: nowhere.
        progress: Called with each point of the fronts: points so far, points in all, which front it is.
        reductions: Measured times of the gradient buckets (`qsync_opt.gradients.RecordedReductions.under`).

    Raises:
        ProblemError: The plan or the measurements do not belong to the problem.
        UnsupportedError: No such front.
        SolverError: A plan of a front is not what the front claims.

    Source: ours.
    """
    check_front(front)
    explainer = Explainer(problem, plan)
    for name in () if measured is None else measured.devices:
        problem.device(name)  # an unknown device type is an error there
    if len(reductions) not in (0, len(problem.communication.allreduce_ns)):
        raise ProblemError(
            f"{len(reductions)} buckets were measured, but problem {problem.name!r} reduces "
            f"{len(problem.communication.allreduce_ns)}; measure them under this plan"
        )
    labels: list[str | None] = [*reversed(tuple(problem.formats)), None]
    return Report(
        problem=problem,
        plan=plan,
        evaluation=explainer.evaluation,
        explanations={
            device.name: tuple(explainer.explain(operator.name, device.name) for operator in problem.operators)
            for device in problem.devices
        },
        uniform={label or LOWEST: evaluate(problem, uniform_plan(problem, label)) for label in labels},
        fronts=None if front == NO_FRONT else _fronts(problem, front, cache, progress),
        timeline=replay(problem, plan),
        memory={name: memory_timeline(problem, device) for name, device in explainer.evaluation.devices.items()},
        measured=measured,
        reductions=tuple(reductions),
    )


def check_front(name: str) -> None:
    """Refuse a name that is no front."""
    if name != NO_FRONT and name not in GAPS:
        raise UnsupportedError(f"front is {name!r}, but allowed are {', '.join((*GAPS, NO_FRONT))}")


def _fronts(problem: Problem, method: str, cache: str | os.PathLike[str] | None, progress: Progress | None) -> Fronts:
    total = (1 + len(problem.devices)) * POINTS

    def front(number: int, device: str | None) -> Front:
        against, resource = ("latency", "time") if device is None else ("memory", f"memory of {device}")

        def step(done: int, _points: int, _reused: int) -> None:
            if progress is not None:
                progress(number * POINTS + done, total, f"front against {resource}")

        return pareto_front(problem, against, device=device, method=method, points=POINTS, cache=cache, progress=step)

    return Fronts(
        method=method,
        best=solve(problem, method),
        latency=front(0, None),
        memory={device.name: front(i, device.name) for i, device in enumerate(problem.devices, start=1)},
    )


def load_measured(path: str | os.PathLike[str]) -> Measured:
    """Read a file of measurements.

    It is a JSON object: ``"format": "qsync-measured/1"``, ``source`` (how and on what it was measured), optionally
    ``iteration_ns`` of the whole cluster, and optionally ``devices``, an object by device type with the optional
    ``iteration_ns`` (of one worker alone) and ``peak_memory_bytes``.

    Raises:
        ProblemError: The file cannot be read, has another format, or holds anything but positive integers.
    """
    data = split_extras(read_json(path, (MEASURED_FORMAT,)))[0]
    present = {key: value for key, value in data.items() if value is not None}  # null says the same as a missing key
    return decode(Measured, present, f"{os.fspath(path)}: measured", version=MEASURED_FORMAT)
