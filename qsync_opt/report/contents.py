"""Everything a report says, gathered and computed once; how it looks is `qsync_opt.report.page`'s business."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from qsync_opt.errors import ProblemError, UnsupportedError
from qsync_opt.io import Fields, check_integer, read_json, split_extras
from qsync_opt.training import (
    BYTES_PER_KIB,
    GAPS,
    MEMORY_KEY,
    OPERATORS_KEY,
    CastTime,
    DeviceEvaluation,
    Evaluation,
    Explainer,
    Explanation,
    Front,
    MemoryBreakdown,
    Plan,
    Problem,
    Solution,
    StaticMemory,
    Timeline,
    cast_buffer_kib,
    evaluate,
    memory_breakdown,
    pareto_front,
    replay,
    solve,
    uniform_plan,
)

NO_FRONT = "none"
POINTS = 30
"""Limits that each front is computed for: as many as `pareto_front` tries, so that both share a cache."""
Progress = Callable[[int, int, str], None]
"""Called with what is done, how much there is in all, and what comes next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fronts:
    """Sensitivity against iteration time within the memory limits, and against memory within the latency limit.

    ``best`` is what the method of the same name finds within the problem's own limits, with its bound.
    """

    method: str
    best: Solution
    latency: Front
    memory: Mapping[str, Front]


def check_front(name: str) -> None:
    """Refuse a name that is no front."""
    if name != NO_FRONT and name not in GAPS:
        raise UnsupportedError(f"front is {name!r}, but allowed are {', '.join((*GAPS, NO_FRONT))}")


def compute_fronts(
    problem: Problem, name: str, *, cache: str | os.PathLike[str] | None = None, progress: Progress | None = None
) -> Fronts | None:
    """Compute the fronts by a method, or nothing for ``"none"``.

    Args:
        problem: The problem.
        name: ``"greedy"``, ``"exact"`` (every point proved; it may take long) or ``"none"``.
        cache: Folder in which points are kept, so that an interrupted report goes on; None keeps them nowhere.
        progress: Called as the points are found.

    Raises:
        UnsupportedError: No such front.
        SolverError: A plan does not hold what was claimed of it.

    Source: ours; the fronts are those of `qsync_opt.training.pareto`.
    """
    check_front(name)
    if name == NO_FRONT:
        return None
    total = (1 + len(problem.devices)) * POINTS

    def front(number: int, device: str | None) -> Front:
        def step(done: int, _points: int, _reused: int) -> None:
            if progress is not None:
                progress(
                    number * POINTS + done, total, "front against " + (f"memory of {device}" if device else "time")
                )

        against = "latency" if device is None else "memory"
        return pareto_front(problem, against, device=device, method=name, points=POINTS, cache=cache, progress=step)

    return Fronts(
        method=name,
        best=solve(problem, name),
        latency=front(0, None),
        memory={device.name: front(i, device.name) for i, device in enumerate(problem.devices, start=1)},
    )


MEASURED_FORMAT = "qsync-measured/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredDevice:
    """One worker of a device type: its iteration time alone and its peak memory; None is what was not measured."""

    iteration_ns: int | None = None
    peak_memory_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("iteration_ns", "peak_memory_bytes"):
            if getattr(self, name) is not None:
                check_integer(getattr(self, name), f"measured: {name}", minimum=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements of a plan. ``iteration_ns`` is that of the whole cluster; ``source`` says how it was measured."""

    source: str
    iteration_ns: int | None
    devices: Mapping[str, MeasuredDevice]

    def __post_init__(self) -> None:
        if self.iteration_ns is not None:
            check_integer(self.iteration_ns, "measured: iteration_ns", minimum=1)
        object.__setattr__(self, "devices", MappingProxyType(dict(self.devices)))

    def check(self, problem: Problem) -> None:
        """Refuse measurements of device types that the problem lacks."""
        for name in self.devices:
            problem.device(name)


def load_measured(path: str | os.PathLike[str]) -> Measured:
    """Read a file of measurements.

    It is a JSON object: ``"format": "qsync-measured/1"``, ``source`` (how and on what it was measured), optionally
    ``iteration_ns`` of the whole cluster, and optionally ``devices``, an object by device type with the optional
    ``iteration_ns`` (of one worker alone) and ``peak_memory_bytes``.

    Raises:
        ProblemError: The file cannot be read, has another format, or holds anything but positive integers.
    """
    data = read_json(path, (MEASURED_FORMAT,))
    try:
        fields = Fields(split_extras(data)[0], "measured")
        fields.version(MEASURED_FORMAT)
        devices = {}
        given = fields.take_or("devices", None) is not None
        for name, device in fields.children("devices") if given else ():
            devices[name] = MeasuredDevice(
                iteration_ns=device.take_or("iteration_ns", None),
                peak_memory_bytes=device.take_or("peak_memory_bytes", None),
            )
            device.finish()
        measured = Measured(
            source=fields.text("source"), iteration_ns=fields.take_or("iteration_ns", None), devices=devices
        )
        fields.finish()
    except ProblemError as failure:
        raise ProblemError(f"{os.fspath(path)}: {failure}") from failure
    return measured


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCurve:
    """Memory of one worker over one iteration, in bytes at times in ns.

    From ``times_ns[i]`` on, ``held_bytes[i]`` of activations and cast buffers exist: an operator's from its forward
    pass until its backward pass is done. Parameters, optimizer state and all-reduce buckets stay throughout.
    Gradients and passing buffers are one allowance in the problem, which covers their worst moment, found at
    ``peak_operator``; the curve adds it throughout, so that its highest point is the memory that `evaluate` gives.
    """

    breakdown: MemoryBreakdown
    times_ns: tuple[int, ...]
    held_bytes: tuple[int, ...]
    peak_ns: int
    peak_operator: str


def memory_curve(problem: Problem, device: DeviceEvaluation) -> MemoryCurve | None:
    """The curve of one device under a plan, or None if the problem knows only totals per operator.

    Args:
        problem: The problem; `build_problem` notes what is needed under ``x-memory`` and ``x-memory-operators``.
        device: The device's part of the plan's evaluation.

    Raises:
        ProblemError: The notes contradict the problem.

    Source: ours; the life of an activation follows `qsync_opt.training.memory`.
    """
    static_bytes = _static_bytes(problem, device.name)
    if static_bytes is None:
        return None
    breakdown = memory_breakdown(problem, device)
    own = _own_bytes(problem, device, static_bytes)
    times_ns, held_bytes = [0], [0]
    now_ns = held = 0
    for time in device.operators:
        now_ns += time.forward_total_ns
        held += own[time.name]
        times_ns.append(now_ns)
        held_bytes.append(held)
    peak_ns = now_ns
    for time in reversed(device.operators):
        now_ns += time.backward_total_ns
        held -= own[time.name]
        times_ns.append(now_ns)
        held_bytes.append(held)
    return MemoryCurve(
        breakdown=breakdown,
        times_ns=tuple(times_ns),
        held_bytes=tuple(held_bytes),
        peak_ns=peak_ns,
        peak_operator=_static(problem, device.name).peak_operator,
    )


def _static(problem: Problem, device: str) -> StaticMemory:
    return StaticMemory.from_json(problem.extras["devices", device, MEMORY_KEY], f"devices {device!r}: {MEMORY_KEY}")


def _static_bytes(problem: Problem, device: str) -> dict[str, int] | None:
    """Bytes of each operator's memory that no plan changes, or None where the problem does not say."""
    noted = problem.extras.get(("devices", device, OPERATORS_KEY))
    if noted is None or ("devices", device, MEMORY_KEY) not in problem.extras:
        return None
    what = f"devices {device!r}: {OPERATORS_KEY}"
    if not isinstance(noted, Mapping):
        raise ProblemError(f"{what} is {noted!r}, but it must map operators to bytes")
    for name, num_bytes in noted.items():
        problem.index(name)
        check_integer(num_bytes, f"{what}: {name!r}")
    total = _static(problem, device).total_bytes
    if sum(noted.values()) != total:
        raise ProblemError(
            f"{what} adds up to {sum(noted.values())} bytes, but {MEMORY_KEY} to {total}; build the problem again"
        )
    return dict(noted)


def _own_bytes(problem: Problem, device: DeviceEvaluation, static_bytes: Mapping[str, int]) -> dict[str, int]:
    """What each operator holds from its forward to its backward pass: activations, and the casts of its inputs."""
    table = problem.device(device.name).operators
    own = {}
    for time in device.operators:
        kept_kib = table[time.name][time.precision].memory_kib
        casts_kib = sum(_buffer_kib(problem, cast) for cast in time.forward_casts)
        own[time.name] = (kept_kib + casts_kib) * BYTES_PER_KIB - static_bytes.get(time.name, 0)
    return own


def _buffer_kib(problem: Problem, cast: CastTime) -> int:
    return cast_buffer_kib(problem, problem.operators[problem.index(cast.producer)], cast.target)


DEFAULT_FRONT = "greedy"
LOWEST = "lowest"
"""Label of the plan that gives every operator the lowest precision that it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Uniform:
    """One precision for the whole model: ``label`` is the format wanted everywhere, or `LOWEST`."""

    label: str
    evaluation: Evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A plan and all that is said of it.

    ``explanations`` are by device, in the problem's order of operators. ``memory`` has None for a device of which the
    problem knows only totals per operator. ``fronts`` is None if none was asked for.
    """

    problem: Problem
    plan: Plan
    evaluation: Evaluation
    explanations: Mapping[str, tuple[Explanation, ...]]
    uniform: tuple[Uniform, ...]
    fronts: Fronts | None
    timeline: Timeline
    memory: Mapping[str, MemoryCurve | None]
    measured: Measured | None


def make_report(
    problem: Problem,
    plan: Plan,
    *,
    front: str = DEFAULT_FRONT,
    measured: Measured | None = None,
    cache: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Report:
    """Evaluate and explain a plan, and compare it with others.

    Args:
        problem: The problem.
        plan: A plan for it, feasible or not.
        front: Method of the fronts and of the bound: ``"greedy"``, ``"exact"`` (may take long) or ``"none"``.
        measured: What was measured of the plan, to stand beside what is predicted.
        cache: Folder in which points of fronts are kept, so that an interrupted report goes on; None: nowhere.
        progress: Called as points of the fronts are found: done, in all, what comes next.

    Raises:
        ProblemError: The plan or the measurements do not belong to the problem.
        UnsupportedError: No such front.

    Source: ours.
    """
    check_front(front)
    explainer = Explainer(problem, plan)
    if measured is not None:
        measured.check(problem)
    labels: list[str | None] = [*reversed(tuple(problem.formats)), None]
    return Report(
        problem=problem,
        plan=plan,
        evaluation=explainer.evaluation,
        explanations={
            device.name: tuple(explainer.explain(operator.name, device.name) for operator in problem.operators)
            for device in problem.devices
        },
        uniform=tuple(
            Uniform(label=label or LOWEST, evaluation=evaluate(problem, uniform_plan(problem, label)))
            for label in labels
        ),
        fronts=compute_fronts(problem, front, cache=cache, progress=progress),
        timeline=replay(problem, plan),
        memory={name: memory_curve(problem, device) for name, device in explainer.evaluation.devices.items()},
        measured=measured,
    )
