"""Charging of a profiler's events in a training step to operators, pass by pass.

The trace must have labels (`qsync_opt.runtimes.torch.steps.recording`): a range around every operator of the forward
pass, whose text holds the operator's name, the number that autograd gives to the next node and, under a plan, the
precision; and ranges around the phases. Nodes of the backward pass have that number too, so that each is charged to the
operator that created it. Nodes without one (accumulation of gradients, with the hooks of DistributedDataParallel)
follow the node before them, because the engine runs them immediately.

Time on the host is cut where the next operator (backward: the next node) begins, so that the pieces add up to the pass.
The time that a launch waits for room in the device's queue is subtracted.
"""

from __future__ import annotations

import bisect
import gzip
import io
import itertools
import json
import math
import os
import statistics
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from qsync_opt.errors import ProblemError
from qsync_opt.io import read_bounded

PREFIX = "qsync-opt|"
FORWARD, BACKWARD, OPTIMIZER, ZERO_GRAD = "forward", "backward", "optimizer", "zero_grad"
COPIES, CLIP = "copies", "clip"
PHASES = (COPIES, FORWARD, BACKWARD, CLIP, OPTIMIZER, ZERO_GRAD)
"""Phases of a step, in order; not every step copies its batch from the host's memory, or clips its gradients."""
NODE = "autograd::engine::evaluate_function"
LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaMemcpy", "cuMemcpy", "cudaMemset", "cuMemset", "cudaGraphLaunch")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cuStreamSynchronize")
BEGIN, END = "", "|end"
"""Stand for the operator in keys of work before the first and after the last operator of a phase."""
_MAX_DIGITS = 19
"""Of an autograd number."""
_BLOCKED = 20.0
"""A launch that takes this many times the median launch has waited for room in the queue."""


def phase_label(phase: str) -> str:
    """Label of the range around a phase of the step."""
    return f"{PREFIX}{phase}"


def operator_label(name: str, sequence: int, precision: str = "") -> str:
    """Label of the range around an operator.

    ``sequence`` is the number that the next autograd node will get, ``precision`` that of the applied plan, "" if there
    is none.
    """
    return f"{PREFIX}{sequence}{':' if precision else ''}{precision}|{name}"


def _read_label(label: str) -> tuple[int, str, str]:
    number, bar, name = label[len(PREFIX) :].partition("|")
    sequence, _, precision = number.partition(":")
    if not (bar and sequence.isdecimal() and len(sequence) <= _MAX_DIGITS):
        raise ProblemError(
            f"the trace has a range {label[:80]!r}, but labels of operators are {PREFIX!r}, a number, '|' and a name; "
            "record it inside step_labels(model, graph)"
        )
    return int(sequence), precision, name


class Range(NamedTuple):
    """A labelled stretch on the host, in nanoseconds of the trace's clock."""

    start: int
    end: int
    label: str


class Node(NamedTuple):
    """One node of the backward pass on the host; ``sequence`` is negative for those without a number."""

    start: int
    end: int
    sequence: int


class Launch(NamedTuple):
    """One call that puts work on the device."""

    start: int
    end: int
    correlation: int


class Kernel(NamedTuple):
    """A kernel, copy or fill on the device."""

    start: int
    end: int
    correlation: int
    stream: int
    name: str


class Change(NamedTuple):
    """Device memory allocated (positive) or freed, in bytes; the block's address, 0 if it is unknown."""

    time: int
    num_bytes: int
    address: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvents:
    """Events of a trace that are charged, each sequence sorted by start.

    ``waits`` are starts of calls in which the host waits for the device.
    """

    ranges: Sequence[Range]
    nodes: Sequence[Node]
    launches: Sequence[Launch] = ()
    kernels: Sequence[Kernel] = ()
    changes: Sequence[Change] = ()
    waits: Sequence[int] = ()


@dataclass(slots=True)
class Span:
    """Work of one operator in one pass, or of a phase outside of all operators.

    Attributes:
        host_ns: Time on the host, without waiting.
        kernels: Offset of the launch on the host (within the span, without waiting), duration and name.
        changes: Bytes of memory allocated, or freed if below zero.
        blocked_ns: Time that launches waited for room in the device's queue.
    """

    host_ns: int = 0
    kernels: list[tuple[int, int, str]] = field(default_factory=list)
    changes: list[int] = field(default_factory=list)
    blocked_ns: int = 0

    @property
    def device_ns(self) -> int:
        """Running time of its kernels."""
        return sum(duration for _, duration, _ in self.kernels)


Spans = dict[tuple[str, str], Span]
"""(Phase, operator) to span; `BEGIN` and `END` stand for the operator outside of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpans:
    """A step charged to operators.

    Attributes:
        spans: By phase and operator.
        order: Operators of the forward pass.
        other_streams: Kernels beside the compute stream (collectives).
        gap_ns: Time on the device between two kernels that were both launched in time.
        latency_ns: From a launch to its kernel on an idle device.
        start_ns: Of the step on the host.
        end_ns: Of the step on the host.
        peak_bytes: Most memory beyond that at the start.
        waits: Whether the host waited for the device between the beginning of the forward and the end of the backward
            pass.
        precisions: Of operators under the applied plan, from the labels.
    """

    spans: Spans
    order: tuple[str, ...]
    other_streams: tuple[Kernel, ...]
    gap_ns: float
    latency_ns: float
    start_ns: int
    end_ns: int
    peak_bytes: int = 0
    waits: bool = False
    precisions: Mapping[str, str] = field(default_factory=dict)


class Window(NamedTuple):
    """A stretch on the host, and the key of the span that it is charged to."""

    start: int
    end: int
    key: tuple[str, str]


def charge_step(events: StepEvents) -> list[StepSpans]:
    """Charge the events of a trace to operators, step by step.

    Returns:
        One entry per step, in order. A step begins with a forward phase, or with the copies right before it. When
        gradients are accumulated, each backward pass counts as a step, and the last one has the optimizer's phases.

    Raises:
        ProblemError: The trace has no labels, or a phase lacks its backward pass.
    """
    waits = waits_of(events.launches)
    return [_charge_step(events, phases, end, waits) for phases, end in split_steps(events.ranges, PHASES)]


def split_steps(ranges: Sequence[Range], allowed: Sequence[str]) -> Iterator[tuple[list[tuple[str, Range]], int]]:
    """Phases of each step with their ranges, in order, and when the next step begins or the last phase ends.

    ``allowed`` are the phases that count.

    Raises:
        ProblemError: There is no step, or one lacks its backward pass.
    """
    phases = [(r.label[len(PREFIX) :], r) for r in ranges if r.label[len(PREFIX) :] in allowed]
    copies = [False, *(phase == COPIES for phase, _ in phases)]
    starts = [i - copies[i] for i, (phase, _) in enumerate(phases) if phase == FORWARD]
    if not starts:
        raise ProblemError(
            f"the trace has no range {phase_label(FORWARD)!r}; record it inside step_labels(model, graph)"
        )
    for first, last in itertools.pairwise([*starts, len(phases)]):
        if all(phase != BACKWARD for phase, _ in phases[first:last]):
            raise ProblemError(f"the trace has a step without range {phase_label(BACKWARD)!r}")
        yield phases[first:last], phases[last][1].start if last < len(phases) else phases[-1][1].end


def waits_of(launches: Sequence[Launch]) -> list[tuple[int, int]]:
    """Start and duration of each wait of a launch for room in the queue."""
    if not launches:
        return []
    usual = statistics.median(launch.end - launch.start for launch in launches)
    return [
        (launch.start, int(launch.end - launch.start - usual))
        for launch in launches
        if launch.end - launch.start > _BLOCKED * usual
    ]


def _charge_step(
    events: StepEvents, phases: Sequence[tuple[str, Range]], end: int, waits: Sequence[tuple[int, int]]
) -> StepSpans:
    ranges = dict(phases)
    forward, backward = ranges[FORWARD], ranges[BACKWARD]
    operators, precisions = [], {}
    for r in _between(events.ranges, forward.start, forward.end):
        if r.label[len(PREFIX) :] not in PHASES:
            sequence, precision, name = _read_label(r.label)
            operators.append((r.start, sequence, name))
            if precision:
                precisions[name] = precision
    windows = consecutive(
        [
            (forward.start, (FORWARD, BEGIN)),
            *((start, (FORWARD, name)) for start, _, name in operators),
            (forward.end, (FORWARD, END)),
        ],
        backward.start,
    )
    windows += _backward_windows(backward, operators, _between(events.nodes, backward.start, backward.end))
    if COPIES in ranges:
        windows.append(Window(ranges[COPIES].start, forward.start, (COPIES, BEGIN)))
    after = [(r.start, (phase, BEGIN)) for phase, r in phases if r.start >= backward.end]
    if after:
        windows += consecutive([(backward.end, (BACKWARD, END)), *after], end)
    windows.sort()
    order = tuple(dict.fromkeys(name for _, _, name in operators))
    waited = any(forward.start <= time < backward.end for time in events.waits)
    return replace(fill(events, windows, waits, order), waits=waited, precisions=precisions)


def consecutive(starts: Sequence[tuple[int, tuple[str, str]]], end: int) -> list[Window]:
    """Windows that each end where the next one begins."""
    pairs = itertools.pairwise([*starts, (end, ("", ""))])
    return [Window(start, stop, key) for (start, key), (stop, _) in pairs]


def _backward_windows(
    backward: Range, operators: Sequence[tuple[int, int, str]], nodes: Sequence[Node]
) -> list[Window]:
    numbers = [sequence for _, sequence, _ in operators]
    starts = [(backward.start, (BACKWARD, BEGIN))]
    name = BEGIN
    for node in nodes:
        if node.sequence >= 0:
            # The last operator that began at or before this number created the node.
            position = bisect.bisect_right(numbers, node.sequence) - 1
            name = operators[position][2] if position >= 0 else BEGIN
        starts.append((node.start, (BACKWARD, name)))
    if nodes:
        starts.append((nodes[-1].end, (BACKWARD, END)))
    return consecutive(starts, backward.end)


def _between(events: Sequence[Any], start: int, end: int) -> list[Any]:
    return [event for event in events if start <= event[0] < end]


def fill(
    events: StepEvents, windows: Sequence[Window], waits: Sequence[tuple[int, int]], order: tuple[str, ...]
) -> StepSpans:
    """Charge the events of one step to windows, which are sorted.

    Several windows may belong to one span, which then continues in the next. Waits of launches are subtracted from the
    spans' time on the host, and from offsets in them.
    """
    starts = [window.start for window in windows]

    def index(time: int) -> int | None:
        i = bisect.bisect_right(starts, time) - 1
        return i if i >= 0 and time < windows[i].end else None

    waits_in: dict[int | None, list[tuple[int, int]]] = {}
    for wait in waits:
        waits_in.setdefault(index(wait[0]), []).append(wait)
    spans: Spans = {}
    offsets = []  # of each window in its span
    for i, window in enumerate(windows):
        span = spans.setdefault(window.key, Span())
        offsets.append(span.host_ns)
        waited = sum(duration for _, duration in waits_in.get(i, ()))
        span.host_ns += window.end - window.start - waited
        span.blocked_ns += waited
    launch_of = {launch.correlation: launch for launch in events.launches}
    usage = Counter(kernel.stream for kernel in events.kernels)
    compute = max(usage, key=lambda stream: usage[stream], default=0)
    others, launched = [], []
    for kernel in events.kernels:
        launch = launch_of.get(kernel.correlation)
        if launch is None or (place := index(launch.start)) is None:
            continue
        if kernel.stream != compute:
            others.append(kernel)
            continue
        launched.append((kernel, launch))
        span, begin = spans[windows[place].key], launch.start
        waited = sum(duration for start, duration in waits_in.get(place, ()) if start < begin)
        offset = offsets[place] + begin - windows[place].start - waited
        span.kernels.append((offset, kernel.end - kernel.start, kernel.name))
    start, end = windows[0].start, windows[-1].end
    for change in events.changes:
        if (place := index(change.time)) is not None:
            spans[windows[place].key].changes.append(change.num_bytes)
    changes = (change.num_bytes for change in events.changes if start <= change.time < end)
    gap_ns, latency_ns = _gaps(launched)
    return StepSpans(
        spans=spans,
        order=order,
        other_streams=tuple(others),
        gap_ns=gap_ns,
        latency_ns=latency_ns,
        start_ns=start,
        end_ns=end,
        peak_bytes=max(itertools.accumulate(changes, initial=0)),
    )


def _gaps(pairs: Iterable[tuple[Kernel, Launch]]) -> tuple[float, float]:
    """Median time between kernels where the host was ahead, and from a launch to its kernel on an idle device."""
    ordered = sorted(pairs, key=lambda pair: pair[0].start)
    gaps, latencies = [], []
    for (before, _), (kernel, launch) in itertools.pairwise(ordered):
        if launch.end < before.start:
            gaps.append(kernel.start - before.end)
        elif launch.start > before.end:
            latencies.append(kernel.start - launch.start)
    return (
        max(0.0, statistics.median(gaps)) if gaps else 0.0,
        max(0.0, statistics.median(latencies)) if latencies else 0.0,
    )


_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_RUNTIME = frozenset({"cuda_runtime", "cuda_driver"})
_LARGEST_BYTES = 2**32
_GZIP = b"\x1f\x8b"
_LATEST_US = 1e17
"""Clocks of traces begin at the start of the machine or in 1970; times thousands of years later are invalid."""


def read_chrome_trace(path: str | os.PathLike[str]) -> StepEvents:
    """Read a trace file that ``export_chrome_trace`` of a profiler wrote that ran inside ``step_labels``.

    It is plain or compressed by gzip (as torch writes it for names that end in ".gz").

    Raises:
        ProblemError: It cannot be read, is no trace, or an event in it is damaged.
    """
    where = os.fspath(path)
    try:
        data = read_bounded(path, _LARGEST_BYTES)
        if data is not None and data.startswith(_GZIP):
            data = gzip.GzipFile(fileobj=io.BytesIO(data)).read(_LARGEST_BYTES + 1)
        is_small = data is not None and len(data) <= _LARGEST_BYTES
        trace = json.loads(data) if data is not None and is_small else None
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:  # ValueError: no UTF-8, or no JSON
        text = str(error) or type(error).__name__
        raise ProblemError(f"cannot read trace {where!r}: {text}; export it with export_chrome_trace") from error
    if not is_small:
        raise ProblemError(f"cannot read trace {where!r}: it has more than {_LARGEST_BYTES} bytes; trace fewer steps")
    events = trace.get("traceEvents") if isinstance(trace, dict) else None
    if not isinstance(events, list):
        raise ProblemError(f"{where!r} is no trace: it has no list 'traceEvents'; export it with export_chrome_trace")
    collected: dict[str, list[Any]] = {f.name: [] for f in fields(StepEvents)}
    for i, event in enumerate(events):
        if not isinstance(event, dict):
            continue
        try:
            _collect(event, collected)
        except (TypeError, ValueError, KeyError, OverflowError, AttributeError) as error:
            name = str(event.get("name"))[:60]
            raise ProblemError(
                f"trace {where!r} is damaged: event {i} ({name!r}) cannot be read ({error!r:.80}); export it again "
                "with export_chrome_trace"
            ) from error
    return StepEvents(**{kind: sorted(of_kind) for kind, of_kind in collected.items()})


def _collect(event: Mapping[str, Any], events: Mapping[str, list[Any]]) -> None:
    """Add an event of a trace to those of its kind."""
    arguments = event.get("args") or {}
    if event.get("name") == "[memory]" and "Bytes" in arguments:
        events["changes"].append(Change(_ns(event["ts"]), int(arguments["Bytes"])))
    if event.get("ph") != "X" or "ts" not in event:
        return
    name, category = str(event.get("name")), event.get("cat")
    start = _ns(event["ts"])
    end = start + _ns(event.get("dur", 0))
    if end < start:
        raise ValueError(f"dur is {event['dur']}")
    if category in _ON_DEVICE:
        stream = int(arguments.get("stream", 0))
        events["kernels"].append(Kernel(start, end, int(arguments.get("correlation", -1)), stream, name))
    elif category in _RUNTIME:
        if name.startswith(LAUNCHES):
            events["launches"].append(Launch(start, end, int(arguments.get("correlation", -1))))
    elif category in ("cpu_op", "user_annotation"):
        if name.startswith(PREFIX):
            events["ranges"].append(Range(start, end, name))
        elif name.startswith(NODE):
            # Nodes that accumulate gradients have no number, or the largest possible.
            number = int(arguments.get("Sequence number", -1))
            events["nodes"].append(Node(start, end, number if number < 2**62 else -1))


def _ns(microseconds: Any) -> int:
    value = float(microseconds)
    if not (math.isfinite(value) and abs(value) < _LATEST_US):
        raise ValueError(f"{value} is no time in microseconds")
    return round(value * 1000)
