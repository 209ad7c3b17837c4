"""Costs of a model's operators on one device, observed in whole training steps, and the file that holds them.

An operator costs the same wherever its kind, shapes, precision and the formats of its inputs are the same: these four
are its *case*. Whole steps of the model are recorded under a few plans and charged to operators; any other plan is
predicted from its cases. Casts, fused neighbours and the formats of dependent operators are therefore priced as the
runtime executes them, with caches as warm as in a step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, NamedTuple, Self

from qsync_opt.costs import CostFit, DeviceIdentity
from qsync_opt.errors import ProblemError
from qsync_opt.io import Json, decode, encode, read_json, write_json
from qsync_opt.model import OpGraph
from qsync_opt.numerics import FORMATS
from qsync_opt.steps.memory_timeline import MemoryTimeline
from qsync_opt.steps.queues import NEVER, NOTHING, Work

STEP_COSTS_FORMAT = "qsync-step-costs/1"
PHASE_LABELS = ("forward", "forward|end", "backward", "backward|end", "optimizer", "zero_grad")
"""Labels of the phases of every step."""
SIZES = ("result_bytes", "forward_net_bytes", "backward_net_bytes", "forward_peak_bytes", "backward_peak_bytes")
"""Fields of a `CaseCost` that are memory."""
_MIN_NET_BYTES = -(1 << 62)
"""Net sizes are below zero where a pass frees more than it leaves behind."""


class Case(NamedTuple):
    """The properties that decide the cost of an operator.

    Attributes:
        signature: Kind, shapes and arguments, as in the graph.
        precision: Of an adjustable operator; "" for the others, which follow their inputs.
        inputs: Formats in which its floating inputs arrive.
    """

    signature: str
    precision: str
    inputs: tuple[str, ...]

    def key(self) -> str:
        """As one text. A lone input without a format is a dash: empty text is no input."""
        return f"{self.signature}|{self.precision}|{'-' if self.inputs == ('',) else ','.join(self.inputs)}"

    @classmethod
    def parse(cls, key: str, where: str = "case") -> Case:
        """The inverse of `key`.

        Raises:
            ProblemError: The text is no case; ``where`` names its place.
        """
        if key.count("|") < 2:
            raise ProblemError(f"{where}: {key!r} is no case; 'signature|precision|formats of inputs' is needed")
        signature, precision, inputs = key.rsplit("|", 2)
        formats = tuple(inputs.split(",")) if inputs else ()
        return cls(signature, precision, ("",) if inputs == "-" else formats)


def _read_work(data: Any, where: str) -> Work:
    if not isinstance(data, list) or len(data) != 3:
        raise ProblemError(f"{where} is {data!r}, but [host, device, lag or null] in integer nanoseconds is needed")
    work = Work(data[0], data[1], NEVER if data[2] is None else data[2])
    _check_work(work, where)
    return work


def _write_work(work: Work) -> list[int | None]:
    """Work as JSON; the lag of work that launches nothing is null."""
    return [work.host, work.device, None if work.lag < 0 else work.lag]


def _read_rows(length: int) -> Callable[[Any, str], Any]:
    """Reader of a list of rows of ``length`` integers."""

    def read(data: Any, where: str) -> Any:
        if not isinstance(data, list) or not all(
            isinstance(row, list) and len(row) == length and all(type(x) is int for x in row) for row in data
        ):
            raise ProblemError(f"{where} is {str(data)[:80]}, but a list of rows of {length} integers is needed")
        return tuple(tuple(row) for row in data)

    return read


def _write_rows(rows: Any) -> list[list[int]]:
    return [list(row) for row in rows]


_JsonWork = Annotated[Work, Json(read=_read_work, write=_write_work)]
_read_timeline = _read_rows(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseCost:
    """Mean cost of a case.

    Attributes:
        output: Format of the result, "" for none.
        samples: How many were observed.
        forward: Time of the forward pass.
        backward: Time of the backward pass.
        saves_inputs: Positions of inputs that are kept as they are until the backward pass.
        saves_output: Whether the result is.
        result_bytes: Storage of the result; bytes are as the device's allocator counts them.
        forward_net_bytes: Growth of memory over the pass, results that are freed meanwhile not subtracted.
        backward_net_bytes: The same of the backward pass.
        forward_peak_bytes: Most memory beyond that at the beginning of the pass.
        backward_peak_bytes: The same of the backward pass.
        backward_late_bytes: Growth over the *next* operator's backward pass because of this one.
        kernel_ns: Running time of the forward and backward kernels alone.
        scaled_from: Precision that the cost was scaled from (`qsync_opt.steps.cases`); "" if it was observed.
        timeline: Of a compiled step: when the operator's memory is allocated and freed.
    """

    output: Annotated[str, Json(empty=True)]
    samples: int
    forward: _JsonWork = NOTHING
    backward: _JsonWork = NOTHING
    saves_inputs: tuple[int, ...] = ()
    saves_output: bool = False
    result_bytes: int = 0
    forward_net_bytes: Annotated[int, Json(minimum=_MIN_NET_BYTES)] = 0
    backward_net_bytes: Annotated[int, Json(minimum=_MIN_NET_BYTES)] = 0
    forward_peak_bytes: int = 0
    backward_peak_bytes: int = 0
    backward_late_bytes: Annotated[int, Json(minimum=_MIN_NET_BYTES, omitted=True)] = 0
    kernel_ns: int = 0
    scaled_from: Annotated[str, Json(omitted=True)] = ""
    timeline: Annotated[MemoryTimeline, Json(key="course", omitted=True, read=_read_timeline, write=_write_rows)] = ()


class RecordedTimelines(NamedTuple):
    """Memory of a compiled step under one recorded plan: case and timeline of each operator, in order."""

    cases: tuple[Case, ...]
    timelines: tuple[MemoryTimeline, ...]


def _read_recorded(data: Any, where: str) -> tuple[RecordedTimelines, ...]:
    plans = []
    for i, plan in enumerate(data if isinstance(data, list) else [data]):
        at = f"{where}[{i}]"
        if not isinstance(plan, list) or not all(
            isinstance(row, list) and len(row) == 2 and isinstance(row[0], str) for row in plan
        ):
            raise ProblemError(f"{at} is {str(plan)[:80]}, but a list of [case, course] is needed")
        cases = tuple(Case.parse(key, at) for key, _ in plan)
        plans.append(RecordedTimelines(cases, tuple(_read_timeline(rows, at) for _, rows in plan)))
    return tuple(plans)


def _write_recorded(plans: tuple[RecordedTimelines, ...]) -> list[Any]:
    return [
        [[case.key(), _write_rows(timeline)] for case, timeline in zip(plan.cases, plan.timelines, strict=True)]
        for plan in plans
    ]


def _read_cases(data: Any, where: str) -> dict[Case, CaseCost]:
    if not isinstance(data, dict):
        raise ProblemError(f"{where} is {str(data)[:80]}, but an object of cases is needed")
    return {Case.parse(key, where): decode(CaseCost, item, f"{where} {key!r}") for key, item in data.items()}


def _write_cases(cases: Mapping[Case, CaseCost]) -> dict[str, Any]:
    return {case.key(): encode(cost) for case, cost in cases.items()}


_Names = Mapping[str, Annotated[str, Json(empty=True)]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCheck:
    """Residual of the fit: a recorded plan as measured, and as predicted from the cases that it contributed to."""

    plan: str
    predicted_ns: int
    measured_ns: Annotated[int, Json(minimum=1)]  # errors are relative to it
    predicted_bytes: int
    measured_bytes: int

    @property
    def time_error(self) -> float:
        """Predicted relative to measured time, minus 1."""
        return self.predicted_ns / self.measured_ns - 1

    @property
    def memory_error(self) -> float:
        """Predicted relative to measured peak, minus 1; 0 where the peak was not measured."""
        return self.predicted_bytes / self.measured_bytes - 1 if self.measured_bytes else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Everything that predicts a model's steps on one device.

    Attributes:
        device: Where it was recorded.
        model: Name of the graph.
        fingerprint: Of the graph.
        half_format: 16-bit format of the results of 8-bit operators.
        cases: Costs by case.
        phases: Work outside of all operators, by label: "forward", "forward|end", "backward", "backward|end",
            "optimizer", "zero_grad"; some steps have "copies" and "clip".
        phase_peaks: Bytes beyond those in use when a phase begins, by the same labels.
        roots: Operator to the one whose storage its result lives in, where that is another.
        held: Operator to the operator after which the program releases its result; "" means after the step.
        resident_bytes: In use between steps: parameters, state of the optimizer, buckets, workspaces.
        casts: Device time of casts by "A>B", fitted; for cases that were not observed.
        cast_host_ns: Time on the host of one cast.
        resting_share: Time on the host under a plan of FP32 alone, for which the runtime stands aside, as a share of
            the time if that plan were executed like others.
        waits: Whether the host waits for the device in every step, so that each begins on an idle device.
        graphs: Compiled graphs per pass, 0 if the model is not compiled. The cost of their kernels is divided among
            their operators (`qsync_opt.steps.compiled.trace`). Gradients are ready when their graph ends: if there is
            only one, after the whole backward pass. The net sizes of a case are then its memory in use at the peak of
            the passes, and ``phase_peaks`` that of the phases; the optimizer's includes all that its phase needs.
        outside: Memory of compiled steps that belongs to no operator: pairs of a moment
            (`qsync_opt.steps.memory_timeline`) and the bytes that memory grows by then.
        timelines: Memory of compiled steps under every recorded plan; the timeline of a case is the mean over them.
        checks: Residuals.
    """

    device: DeviceIdentity
    model: str
    fingerprint: str
    half_format: str
    cases: Annotated[Mapping[Case, CaseCost], Json(read=_read_cases, write=_write_cases)]
    phases: Mapping[str, _JsonWork]
    phase_peaks: Mapping[str, int]
    roots: _Names
    held: _Names
    resident_bytes: int
    casts: Mapping[str, CostFit] = field(default_factory=dict)
    cast_host_ns: int = 0
    resting_share: Annotated[float, Json(optional=True)] = 1.0
    waits: Annotated[bool, Json(optional=True)] = False
    graphs: Annotated[int, Json(optional=True)] = 0
    outside: Annotated[tuple[tuple[int, int], ...], Json(optional=True, read=_read_rows(2), write=_write_rows)] = ()
    timelines: Annotated[
        tuple[RecordedTimelines, ...], Json(key="courses", optional=True, read=_read_recorded, write=_write_recorded)
    ] = ()
    checks: tuple[StepCheck, ...] = ()

    def check_graph(self, graph: OpGraph) -> None:
        """Refuse another model.

        Raises:
            ProblemError: The graph is not the one that was recorded.
        """
        if graph.fingerprint() != self.fingerprint:
            raise ProblemError(
                f"the step costs are of model {self.model!r}, not of {graph.name!r}: names or shapes of operators "
                "differ; record the steps of this model"
            )

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object."""
        return encode(self, version=STEP_COSTS_FORMAT)

    @classmethod
    def from_json(cls, data: Any, where: str) -> Self:
        """Read the object; ``where`` names it in errors.

        Raises:
            ProblemError: A key is missing, unknown or has an unusable value.
        """
        return decode(cls, data, where, version=STEP_COSTS_FORMAT)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file.

        Raises:
            ProblemError: It cannot be written.
        """
        write_json(path, self.to_json())


def load_step_costs(path: str | os.PathLike[str]) -> StepCosts:
    """Read a file of step costs.

    Raises:
        ProblemError: It cannot be read, or is no such file.
    """
    return StepCosts.from_json(read_json(path, (STEP_COSTS_FORMAT,)), str(path))


def check_step_costs(costs: StepCosts, inputs: Mapping[str, int], moments: int) -> None:
    """Refuse costs that no prediction can be based on.

    ``inputs`` is the number of inputs of an operator, by signature; ``moments`` that of the moments of a step.

    Raises:
        ProblemError: A phase is missing, a time, share or format invalid, a case has another number of inputs than its
            operator or saves one that it does not have, or memory changes at a moment that a step does not have.
    """
    where = f"step costs of {costs.device.name!r}"
    for name, by_phase in (("phases", costs.phases), ("phase_peaks", costs.phase_peaks)):
        missing = [label for label in PHASE_LABELS if label not in by_phase]
        if missing:
            raise ProblemError(
                f"{where}: {name} lacks {missing[0]!r}; needed are {', '.join(PHASE_LABELS)}: record them again"
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
        if len(case.inputs) != inputs.get(case.signature, len(case.inputs)):
            raise ProblemError(
                f"case {case.key()!r} has formats of {len(case.inputs)} inputs, but the operator has "
                f"{inputs[case.signature]}; record the steps again"
            )
        if cost.saves_inputs and not 0 <= min(cost.saves_inputs) <= max(cost.saves_inputs) < len(case.inputs):
            raise ProblemError(
                f"{what}: saves_inputs is {list(cost.saves_inputs)}, but it has {len(case.inputs)} inputs, counted "
                "from 0"
            )
    for moment, _ in costs.outside:
        if not 0 <= moment < moments:
            raise ProblemError(f"memory comes or goes at moment {moment}, but a step has {moments}; record it again")


def _check_work(work: Work, what: str) -> None:
    is_valid = all(type(x) is int for x in work) and work.host >= 0 and work.device >= 0
    if not (is_valid and (work.lag >= 0 or work.lag == NEVER)):
        raise ProblemError(
            f"{what} is {tuple(work)}, but host, device and lag in integer nanoseconds from 0 are needed"
        )


def _check_format(name: str, what: str) -> None:
    if name not in FORMATS:
        raise ProblemError(f"{what} is {name!r}, but allowed are {', '.join(FORMATS)}")


def on_one_queue(costs: StepCosts) -> StepCosts:
    """The costs on a cpu, where the host is the device: nothing is launched ahead of its execution."""

    def one(work: Work) -> Work:
        return Work(0, work.host, work.host)

    return replace(
        costs,
        cases={c: replace(v, forward=one(v.forward), backward=one(v.backward)) for c, v in costs.cases.items()},
        phases={label: one(work) for label, work in costs.phases.items()},
    )
