"""The predicted timeline of one iteration of a plan, and its trace file for Perfetto."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from qsync_opt.errors import ProblemError
from qsync_opt.io import check_fields, freeze, write_json
from qsync_opt.training.evaluation import DeviceEvaluation, Evaluation, evaluate
from qsync_opt.training.plan import Plan
from qsync_opt.training.problem import SCHEMES_KEY, Problem

COMPUTE = "compute"
COMMUNICATION = "communication"
NS_PER_US = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineEvent:
    """An interval on one lane (worker and stream); a viewer shows ``details`` beside it."""

    worker: str
    stream: str
    name: str
    kind: str
    start_ns: int
    duration_ns: int
    details: Mapping[str, str | int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self, f"event {self.name!r}")
        freeze(self, "details")

    @property
    def end_ns(self) -> int:
        """When the lane is free again."""
        return self.start_ns + self.duration_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One iteration. Events of a lane follow one another; the last one ends at ``iteration_ns``."""

    name: str
    iteration_ns: int
    events: tuple[TimelineEvent, ...]

    def __post_init__(self) -> None:
        busy: dict[tuple[str, str], TimelineEvent] = {}
        for event in self.events:
            lane = (event.worker, event.stream)
            before = busy.get(lane)
            if before is not None and event.start_ns < before.end_ns:
                raise ProblemError(
                    f"timeline {self.name!r}: {event.name!r} starts at {event.start_ns} ns on {lane}, before "
                    f"{before.name!r} ends at {before.end_ns} ns"
                )
            busy[lane] = event
        end_ns = max((event.end_ns for event in self.events), default=0)
        if end_ns != self.iteration_ns:
            raise ProblemError(
                f"timeline {self.name!r} ends at {end_ns} ns, but the iteration takes {self.iteration_ns} ns"
            )


def replay(problem: Problem, plan: Plan) -> Timeline:
    """Lay out one iteration of a plan event by event.

    One worker of each device type has a compute lane (casts, operators, optimizer) and a communication lane (the
    all-reduce of each bucket, at the same time on all workers). The end is the iteration time that `evaluate` gives.

    Raises:
        ProblemError: The plan does not belong to the problem.

    Source: QSync's replayer and dPRO's (MLSys 2022), with the two serial streams of the problem format.
    """
    evaluation = evaluate(problem, plan)
    events: list[TimelineEvent] = []
    for device in evaluation.devices.values():
        worker = f"{device.name} (one of {problem.device(device.name).count})"
        events += _compute(worker, device)
        events += _all_reduces(worker, problem, evaluation)
        events.append(
            TimelineEvent(
                worker=worker,
                stream=COMPUTE,
                name="optimizer",
                kind="optimizer",
                start_ns=evaluation.iteration_ns - problem.optimizer_ns,
                duration_ns=problem.optimizer_ns,
            )
        )
    return Timeline(name=problem.name, iteration_ns=evaluation.iteration_ns, events=tuple(events))


def _compute(worker: str, device: DeviceEvaluation) -> Iterator[TimelineEvent]:
    event = partial(TimelineEvent, worker=worker, stream=COMPUTE)
    passes = [("forward", o, o.forward_casts, o.forward_ns) for o in device.operators]
    passes += [("backward", o, o.backward_casts, o.backward_ns) for o in reversed(device.operators)]
    now_ns = 0
    for kind, operator, casts, duration_ns in passes:
        for cast in casts:
            name, ends = f"{cast.source} > {cast.target}", {"producer": cast.producer, "consumer": cast.consumer}
            yield event(name=name, kind=f"{kind} cast", start_ns=now_ns, duration_ns=cast.duration_ns, details=ends)
            now_ns += cast.duration_ns
        details: dict[str, str | int] = {"precision": operator.precision, "casts": len(casts)}
        yield event(name=operator.name, kind=kind, start_ns=now_ns, duration_ns=duration_ns, details=details)
        now_ns += duration_ns


def _all_reduces(worker: str, problem: Problem, evaluation: Evaluation) -> Iterator[TimelineEvent]:
    communication = problem.communication
    schemes = problem.extras.get(SCHEMES_KEY)
    free_ns = 0
    spans = zip(evaluation.bucket_start_ns, communication.allreduce_ns, strict=True)
    for k, (start_ns, duration_ns) in enumerate(spans):
        ready_ns = {device.name: device.bucket_ready_ns[k] for device in evaluation.devices.values()}
        ready_ns |= {"devices of fixed precision": communication.peer_ready_ns[k], "the bucket before": free_ns}
        compressed = {"scheme": schemes[k]} if schemes else {}
        yield TimelineEvent(
            worker=worker,
            stream=COMMUNICATION,
            name=f"all-reduce {k} ({schemes[k]})" if schemes else f"all-reduce {k}",
            kind="all-reduce",
            start_ns=start_ns,
            duration_ns=duration_ns,
            details={"bucket": k, **compressed, "waited_for": max(ready_ns, key=ready_ns.__getitem__)},
        )
        free_ns = start_ns + duration_ns


def trace_json(timeline: Timeline) -> dict[str, Any]:
    """Return a timeline in Chrome's trace event format: one process per worker, one thread per stream.

    Source: "Trace Event Format" (Google); complete events (``X``), times in microseconds.
    """
    workers = list(dict.fromkeys(event.worker for event in timeline.events))
    streams = list(dict.fromkeys(event.stream for event in timeline.events))
    rows: list[dict[str, Any]] = []
    for pid, worker in enumerate(workers):
        rows.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": worker}})
        rows += [
            {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": stream}}
            for tid, stream in enumerate(streams)
        ]
    rows += [
        {
            "ph": "X",
            "name": event.name,
            "cat": event.kind,
            "pid": workers.index(event.worker),
            "tid": streams.index(event.stream),
            "ts": event.start_ns / NS_PER_US,
            "dur": event.duration_ns / NS_PER_US,
            "args": dict(event.details),
        }
        for event in timeline.events
    ]
    return {"displayTimeUnit": "ns", "otherData": {"name": timeline.name}, "traceEvents": rows}


def write_trace(path: str | os.PathLike[str], timeline: Timeline) -> None:
    """Write a timeline as a trace that https://ui.perfetto.dev and chrome://tracing open.

    Raises:
        ProblemError: The file cannot be written.
    """
    write_json(path, trace_json(timeline))
