"""Audit of a prediction: a recorded step compared with the predicted one, by worker, phase and operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from qsync_opt.errors import ProblemError
from qsync_opt.steps.predictor import PlannedStep, StepPredictor
from qsync_opt.steps.queues import NOTHING, Work
from qsync_opt.steps.trace import BACKWARD, CLIP, COPIES, FORWARD, Span, StepEvents, StepSpans, charge_step
from qsync_opt.training import NS_PER_US, Timeline, TimelineEvent, trace_json

_NOTHING = Span()


class AuditedOperator(NamedTuple):
    """One operator in one pass: predicted and measured nanoseconds on the device (cpu: on the host)."""

    operator: str
    phase: str
    precision: str
    predicted_ns: int
    measured_ns: int

    @property
    def difference_ns(self) -> int:
        """Predicted minus measured."""
        return self.predicted_ns - self.measured_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditedWorker:
    """One worker: its operators, the largest differences first, and its phases as (predicted, measured) nanoseconds.

    ``where`` is ``"device"``, or ``"host"`` for a worker without kernels, whose times a profiler lengthens.
    """

    name: str
    where: str
    phases: Mapping[str, tuple[int, int]]
    operators: tuple[AuditedOperator, ...]

    @property
    def total(self) -> tuple[int, int]:
        """Predicted and measured nanoseconds of everything in the step."""
        predicted, measured = zip(*self.phases.values(), strict=True)
        return sum(predicted), sum(measured)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON data."""
        return {
            "worker": self.name,
            "where": self.where,
            "predicted_ns": self.total[0],
            "measured_ns": self.total[1],
            "phases": {
                name: {"predicted_ns": predicted, "measured_ns": measured}
                for name, (predicted, measured) in self.phases.items()
            },
            "operators": [row._asdict() | {"difference_ns": row.difference_ns} for row in self.operators],
        }


def audit_worker(name: str, predictor: StepPredictor, step: PlannedStep, events: StepEvents) -> AuditedWorker:
    """Compare the last step of a worker, recorded inside ``step_labels``, with the predicted one.

    Raises:
        ProblemError: The trace has no labelled step, or is of another model or plan.
    """
    spans = charge_step(events)[-1]
    _check_model_and_plan(name, predictor, step, spans)
    on_device = any(span.kernels for span in spans.spans.values())
    rows = []
    totals: dict[str, Counter[str]] = {FORWARD: Counter(), BACKWARD: Counter()}
    for operator, cost in zip(predictor.graph, step.costs, strict=True):
        for phase, work in ((FORWARD, cost.forward), (BACKWARD, cost.backward)):
            span = spans.spans.get((phase, operator.name), _NOTHING)
            times = _times(work, span, spans, on_device)
            totals[phase].update(predicted=times[0], measured=times[1])
            if any(times):
                rows.append(AuditedOperator(operator.name, phase, step.plan.get(operator.name, ""), *times))
    phases = {phase: (total["predicted"], total["measured"]) for phase, total in totals.items()}
    for label, work in predictor.costs.phases.items():
        phase, _, end = label.partition("|")
        span = spans.spans.get((phase, "|end" if end else ""), _NOTHING)
        phases[label if label not in phases else f"{label}|begin"] = _times(work, span, spans, on_device)
    for label in (COPIES, CLIP):
        if label not in phases and (label, "") in spans.spans:  # not in the recorded steps
            phases[label] = _times(NOTHING, spans.spans[label, ""], spans, on_device)
    rows.sort(key=lambda row: -abs(row.difference_ns))
    return AuditedWorker(name=name, where="device" if on_device else "host", phases=phases, operators=tuple(rows))


def _check_model_and_plan(name: str, predictor: StepPredictor, step: PlannedStep, spans: StepSpans) -> None:
    """Refuse a trace of another model, or with precisions other than the plan's."""
    unknown = [operator for operator in spans.order if operator not in predictor.graph]
    if unknown:
        raise ProblemError(
            f"the trace of {name!r} has operator {unknown[0]!r}, which model {predictor.graph.name!r} lacks; "
            "give the trace of this model"
        )
    if not spans.order:
        raise ProblemError(
            f"the trace of {name!r} has no operators in its last step; record it inside step_labels(model, graph)"
        )
    others = {o: ran for o, ran in spans.precisions.items() if step.plan.get(o, ran) != ran}
    if others:
        operator, ran = next(iter(others.items()))
        raise ProblemError(
            f"the trace of {name!r} is of another plan: {operator!r} ran in {ran}, but the plan says "
            f"{step.plan[operator]} ({len(others)} operators differ); give the plan that it ran under"
        )


def _times(work: Work, span: Span, spans: StepSpans, on_device: bool) -> tuple[int, int]:
    """Predicted and measured time; on the device, gaps between kernels count in both. A cpu is its own device."""
    if not on_device:
        return work.device, span.host_ns
    return work.device, span.device_ns + round(spans.gap_ns * len(span.kernels))


def predicted_timeline(name: str, predictor: StepPredictor, step: PlannedStep) -> Timeline:
    """The predicted step of one worker alone, from a standstill: a lane for its host and one for its device."""
    phases, operators = predictor.costs.phases, predictor.graph.operators
    pieces = [("copies", "copies", phases["copies"])] if "copies" in phases else []
    pieces += [("begin", "forward", phases["forward"])]
    pieces += [(o.name, "forward", cost.forward) for o, cost in zip(operators, step.costs, strict=True)]
    pieces += [("end", "forward", phases["forward|end"]), ("begin", "backward", phases["backward"])]
    pieces += [
        (o.name, "backward", cost.backward) for o, cost in zip(reversed(operators), reversed(step.costs), strict=True)
    ]
    pieces += [("end", "backward", phases["backward|end"])]
    pieces += [(label, label, phases[label]) for label in ("clip", "optimizer", "zero_grad") if label in phases]
    events = []
    now = (0, 0)
    for what, kind, work in pieces:
        details = {"precision": step.plan[what]} if what in step.plan else {}
        events += [
            TimelineEvent(
                worker=name,
                stream=stream,
                name=what,
                kind=kind,
                start_ns=start,
                duration_ns=end - start,
                details=details,
            )
            for stream, start, end in work.lanes(*now)
        ]
        now = work.run(*now)
    return Timeline(name=predictor.graph.name, iteration_ns=max(now), events=tuple(events))


def overlay_json(timelines: Sequence[Timeline], measured: Mapping[str, StepEvents]) -> dict[str, Any]:
    """A trace file with lanes of predicted timelines and of measured events by worker; each step begins at zero."""
    rows: list[dict[str, Any]] = []
    for timeline in timelines:
        shift = len({row["pid"] for row in rows})
        rows += [row | {"pid": row["pid"] + shift} for row in trace_json(timeline)["traceEvents"]]
    for name, events in measured.items():
        pid = len({row["pid"] for row in rows})
        rows.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"{name} (measured)"}})
        rows += [
            {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": lane}}
            for tid, lane in enumerate(("host", "compute", "other streams"))
        ]
        last = charge_step(events)[-1]
        other_streams = set(last.other_streams)
        # The device may run a kernel long after the host has moved on: it belongs to the step that launched it.
        launched = {x.correlation for x in events.launches if last.start_ns <= x.start < last.end_ns}
        for r in events.ranges:
            if last.start_ns <= r.start < last.end_ns:
                rows.append(_row(pid, 0, r.label.rpartition("|")[2], r.start - last.start_ns, r.end - r.start))
        for kernel in events.kernels:
            if kernel.correlation in launched:
                lane = 2 if kernel in other_streams else 1
                rows.append(_row(pid, lane, kernel.name, kernel.start - last.start_ns, kernel.end - kernel.start))
    return {"displayTimeUnit": "ns", "traceEvents": rows}


def _row(pid: int, tid: int, name: str, start_ns: int, duration_ns: int) -> dict[str, Any]:
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": start_ns / NS_PER_US, "dur": duration_ns / NS_PER_US}
