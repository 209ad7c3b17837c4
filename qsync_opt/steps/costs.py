"""What was observed of a model's training steps on one device: what each operator costs as it really runs.

An operator costs the same wherever its kind, shapes, precision and the formats of its inputs are the same: these four
make its *case*. Whole steps of the model are recorded under a few plans, and everything is charged to operators; a plan
that was never run is then predicted from the cases that it consists of. So casts, fused neighbours and the types in
which dependent operators run are priced as the runtime carries them out, and caches are as warm as they are in a step.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Self

from qsync_opt.costs import CostFit, DeviceIdentity
from qsync_opt.errors import ProblemError
from qsync_opt.io import Fields, decode, encode, read_json, write_json
from qsync_opt.model import OpGraph
from qsync_opt.numerics import FORMATS
from qsync_opt.steps.courses import Course
from qsync_opt.steps.queues import NEVER, NOTHING, Work

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


STEP_COSTS_FORMAT = "qsync-step-costs/1"


class Case(NamedTuple):
    """What decides what an operator costs.

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
        """From the text.

        Raises:
            ProblemError: It is none; ``where`` names what it stands in.
        """
        if key.count("|") < 2:
            raise ProblemError(f"{where}: {key!r} is no case; 'signature|precision|formats of inputs' is needed")
        signature, precision, inputs = key.rsplit("|", 2)
        formats = tuple(inputs.split(",")) if inputs else ()
        return cls(signature, precision, ("",) if inputs == "-" else formats)


class RecordedCourses(NamedTuple):
    """Memory of the operators of a compiled step under one recorded plan: per operator, in order, case and course."""

    cases: tuple[Case, ...]
    courses: tuple[Course, ...]


SIZES = ("result_bytes", "forward_net_bytes", "backward_net_bytes", "forward_peak_bytes", "backward_peak_bytes")
"""Fields of a `CaseCost` that are memory."""
LEAST_NET_BYTES = -(1 << 62)
"""A pass may free more than it leaves behind: net sizes are below zero then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseCost:
    """Mean cost of a case over the ``samples`` of it.

    Times are on the host and the device (`Work`), memory in bytes as the device's allocator counts it. ``output`` is
    the format that it delivers, "" for none. ``saves_inputs`` (positions) and ``saves_output`` tell what stays until
    the backward pass as it is. The ``net`` pair is what the passes leave behind, results that die meanwhile not
    subtracted; the ``peak`` pair the most that exists beyond what did before; ``backward_late_bytes`` what the next
    operator's backward pass leaves behind (below zero: gives back) because of this one. ``kernel_ns`` is the running
    time of its forward and backward kernels alone. ``scaled_from`` names the precision that a cost was scaled from
    (`qsync_opt.steps.fitting`), "" where it was observed. ``course`` says how the memory of an operator of a
    compiled step comes and goes.
    """

    output: str
    samples: int
    forward: Work = NOTHING
    backward: Work = NOTHING
    saves_inputs: tuple[int, ...] = ()
    saves_output: bool = False
    result_bytes: int = 0
    forward_net_bytes: int = 0
    backward_net_bytes: int = 0
    forward_peak_bytes: int = 0
    backward_peak_bytes: int = 0
    backward_late_bytes: int = 0
    kernel_ns: int = 0
    scaled_from: str = ""
    course: Course = ()

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object."""
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        for seldom in ("scaled_from", "backward_late_bytes"):
            if not data[seldom]:
                del data[seldom]
        del data["course"]
        if self.course:
            data["course"] = [list(entry) for entry in self.course]
        return data | {
            "forward": work_json(self.forward),
            "backward": work_json(self.backward),
            "saves_inputs": list(self.saves_inputs),
        }

    @classmethod
    def from_json(cls, data: Any, where: str) -> Self:
        """Read it from its JSON object.

        Raises:
            ProblemError: Something is missing, unknown or not what it should be.
        """
        reader = Fields(data, where)
        if "saves_output" not in reader:
            reader.fail("the key 'saves_output' is missing; add it")
        cost = cls(
            output=_text(reader.take("output"), f"{where}: output"),
            samples=reader.integer("samples"),
            forward=read_work(reader.take("forward"), f"{where}: forward"),
            backward=read_work(reader.take("backward"), f"{where}: backward"),
            saves_inputs=reader.integers("saves_inputs"),
            saves_output=reader.flag("saves_output"),
            result_bytes=reader.integer("result_bytes"),
            forward_net_bytes=reader.integer("forward_net_bytes", minimum=LEAST_NET_BYTES),
            backward_net_bytes=reader.integer("backward_net_bytes", minimum=LEAST_NET_BYTES),
            forward_peak_bytes=reader.integer("forward_peak_bytes"),
            backward_peak_bytes=reader.integer("backward_peak_bytes"),
            backward_late_bytes=reader.integer("backward_late_bytes", minimum=LEAST_NET_BYTES)
            if "backward_late_bytes" in reader
            else 0,
            kernel_ns=reader.integer("kernel_ns"),
            scaled_from=reader.text("scaled_from") if "scaled_from" in reader else "",
            course=_rows(reader.take("course"), 3, f"{where}: course") if "course" in reader else (),
        )
        reader.finish()
        return cost


def work_json(work: Work) -> list[int | None]:
    """A piece of work as JSON; a lag of work that launches nothing is null."""
    return [work.host, work.device, None if work.lag < 0 else work.lag]


def read_work(data: Any, where: str) -> Work:
    """A piece of work from JSON.

    Raises:
        ProblemError: It is none.
    """
    right = isinstance(data, list) and len(data) == 3 and all(type(x) is int and x >= 0 for x in data[:2])
    if not right or not (data[2] is None or (type(data[2]) is int and data[2] >= 0)):
        raise ProblemError(f"{where} is {data!r}, but [host, device, lag or null] in integer nanoseconds is needed")
    return Work(data[0], data[1], NEVER if data[2] is None else data[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCheck:
    """One recorded plan: measured, and predicted from the cases that it contributed to (the residual of the fit)."""

    plan: str
    predicted_ns: int
    measured_ns: int
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
        half_format: 16-bit format that 8-bit operators deliver.
        cases: Costs by case.
        phases: What a phase does outside of all operators, by label: "forward", "forward|end", "backward",
            "backward|end", "optimizer", "zero_grad".
        phase_peaks: Bytes beyond what existed at their beginning, by the same labels.
        roots: Operator to the one whose storage its result lives in, where that is another.
        held: Operator to the operator after which the program lets go of its result; "" means after the step.
        resident_bytes: In use between steps: parameters, state of the optimizer, buckets, workspaces.
        casts: Device time of casts by "A>B", fitted; for cases that were never met.
        cast_host_ns: Time on the host of one cast.
        checks: Residuals.
        resting_share: Time on the host under a plan of FP32 alone, which stands aside, as a share of what it would be
            if that plan were carried out like others.
        waits: Whether the host waits for the device in every step, so that each begins on an idle device.
        graphs: Compiled graphs per pass, 0 if the model is not compiled. What their kernels cost is divided among the
            operators in them (`qsync_opt.steps.compiled.trace`). Gradients are ready when their graph ends: if there is
            one only, after the whole backward pass. The net sizes of a case are then what it has in use when the passes
            need most, and ``phase_peaks`` what the phases have; that of the optimizer is all that its phase needs.
        outside: Memory of compiled steps that belongs to no operator: moments (`qsync_opt.steps.courses`) and the
            bytes that come or, below zero, go then.
        courses: Memory of compiled steps under every recorded plan; the course of a case is the mean of it over them.
    """

    device: DeviceIdentity
    model: str
    fingerprint: str
    half_format: str
    cases: Mapping[Case, CaseCost]
    phases: Mapping[str, Work]
    phase_peaks: Mapping[str, int]
    roots: Mapping[str, str]
    held: Mapping[str, str]
    resident_bytes: int
    casts: Mapping[str, CostFit] = field(default_factory=dict)
    cast_host_ns: int = 0
    checks: tuple[StepCheck, ...] = ()
    resting_share: float = 1.0
    waits: bool = False
    graphs: int = 0
    outside: tuple[tuple[int, int], ...] = ()
    courses: tuple[RecordedCourses, ...] = ()

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
        return {
            "format": STEP_COSTS_FORMAT,
            "device": encode(self.device),
            "model": self.model,
            "fingerprint": self.fingerprint,
            "half_format": self.half_format,
            "cases": {case.key(): cost.to_json() for case, cost in self.cases.items()},
            "phases": {name: work_json(work) for name, work in self.phases.items()},
            "phase_peaks": dict(self.phase_peaks),
            "roots": dict(self.roots),
            "held": dict(self.held),
            "resident_bytes": self.resident_bytes,
            "casts": {pair: {f.name: getattr(fit, f.name) for f in fields(fit)} for pair, fit in self.casts.items()},
            "cast_host_ns": self.cast_host_ns,
            "resting_share": self.resting_share,
            "waits": self.waits,
            "graphs": self.graphs,
            "outside": [list(entry) for entry in self.outside],
            "courses": [
                [[case.key(), [list(entry) for entry in course]] for case, course in zip(*plan, strict=True)]
                for plan in self.courses
            ],
            "checks": [{f.name: getattr(check, f.name) for f in fields(check)} for check in self.checks],
        }

    @classmethod
    def from_json(cls, data: Any, where: str) -> Self:
        """Read the object; ``where`` names it in errors.

        Raises:
            ProblemError: Something is missing, unknown or not what it should be.
        """
        reader = Fields(data, where)
        reader.version(STEP_COSTS_FORMAT)
        costs = cls(
            device=decode(DeviceIdentity, reader.take("device"), f"{where}: device"),
            model=reader.text("model"),
            fingerprint=reader.text("fingerprint"),
            half_format=reader.text("half_format"),
            cases={
                Case.parse(key, f"{where}: cases"): CaseCost.from_json(item, f"{where}: cases {key!r}")
                for key, item in reader.mapping("cases").items()
            },
            phases={
                name: read_work(work, f"{where}: phases {name!r}") for name, work in reader.mapping("phases").items()
            },
            phase_peaks=_sizes(Fields(reader.mapping("phase_peaks"), f"{where}: phase_peaks")),
            roots=_texts(reader, "roots"),
            held=_texts(reader, "held"),
            resident_bytes=reader.integer("resident_bytes"),
            casts={
                pair: decode(CostFit, item, f"{where}: casts {pair!r}")
                for pair, item in reader.mapping("casts").items()
            },
            cast_host_ns=reader.integer("cast_host_ns"),
            resting_share=reader.number("resting_share") if "resting_share" in reader else 1.0,
            waits=reader.flag("waits"),
            graphs=reader.integer("graphs") if "graphs" in reader else 0,
            outside=_rows(reader.take("outside"), 2, f"{where}: outside") if "outside" in reader else (),
            courses=tuple(
                _recorded_courses(plan, f"{where}: courses[{i}]")
                for i, plan in enumerate(reader.sequence("courses") if "courses" in reader else ())
            ),
            checks=tuple(
                StepCheck(**_check(Fields(item, f"{where}: checks[{i}]")))
                for i, item in enumerate(reader.sequence("checks"))
            ),
        )
        reader.finish()
        return costs

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file.

        Raises:
            ProblemError: It cannot be written.
        """
        write_json(path, self.to_json())


def on_one_queue(costs: StepCosts) -> StepCosts:
    """On a cpu the host is the device: nothing is launched ahead, and who waits for the network waits for all."""

    def one(work: Work) -> Work:
        return Work(0, work.host, work.host)

    return replace(
        costs,
        cases={
            case: replace(cost, forward=one(cost.forward), backward=one(cost.backward))
            for case, cost in costs.cases.items()
        },
        phases={label: one(work) for label, work in costs.phases.items()},
    )


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise ProblemError(f"{what} is {value!r}, but it must be a text")
    return value


def _rows(data: Any, length: int, where: str) -> Any:
    """Rows of so many integers each."""
    right = isinstance(data, list) and all(
        isinstance(row, list) and len(row) == length and all(type(x) is int for x in row) for row in data
    )
    if not right:
        raise ProblemError(f"{where} is {str(data)[:80]}, but a list of rows of {length} integers is needed")
    return tuple(tuple(row) for row in data)


def _recorded_courses(data: Any, where: str) -> RecordedCourses:
    right = isinstance(data, list) and all(
        isinstance(row, list) and len(row) == 2 and isinstance(row[0], str) for row in data
    )
    if not right:
        raise ProblemError(f"{where} is {str(data)[:80]}, but a list of [case, course] is needed")
    cases = tuple(Case.parse(key, where) for key, _ in data)
    return RecordedCourses(cases, tuple(_rows(course, 3, where) for _, course in data))


def _texts(reader: Fields, key: str) -> dict[str, str]:
    return {name: _text(value, f"{reader.where}: {key} {name!r}") for name, value in reader.mapping(key).items()}


def _sizes(reader: Fields) -> dict[str, int]:
    return {name: reader.integer(name) for name in reader}


def _check(reader: Fields) -> dict[str, Any]:
    # Errors are relative to the measured time.
    data = {"plan": reader.text("plan")} | {
        f.name: reader.integer(f.name, minimum=int(f.name == "measured_ns"))
        for f in fields(StepCheck)
        if f.name != "plan"
    }
    reader.finish()
    return data


def load_step_costs(path: str | os.PathLike[str]) -> StepCosts:
    """Read a file of step costs.

    Raises:
        ProblemError: It cannot be read, or is no such file.
    """
    return StepCosts.from_json(read_json(path, (STEP_COSTS_FORMAT,)), str(path))
