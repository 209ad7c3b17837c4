"""Who spent the time of a training step? A profiler's events, charged to operators, pass by pass.

The trace must carry labels (`qsync_opt.runtimes.torch.steps.recording`): a range around every operator of the forward
pass, whose text holds the operator's name, the number that autograd gives to the next node and, under a plan, the
precision; and ranges around the phases. Nodes of the backward pass carry that number too, so that each is charged to
the operator that made it. Nodes without one (accumulation of gradients, with the hooks of DistributedDataParallel)
follow the node before them, because the engine runs them at once.

Time on the host is cut where the next operator (backward: the next node) begins, so that the pieces add up to the pass.
What a launch waits for room in the device's queue is taken off: it is no work.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
import os
import statistics
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from qsync_opt.errors import ProblemError
from qsync_opt.io import read_bounded

PREFIX = "qsync-opt|"
FORWARD, BACKWARD, OPTIMIZER, ZERO_GRAD = "forward", "backward", "optimizer", "zero_grad"
COPIES, CLIP = "copies", "clip"
PHASES = (COPIES, FORWARD, BACKWARD, CLIP, OPTIMIZER, ZERO_GRAD)
"""In order; not every step copies its batch from the host's memory, or clips its gradients."""
NODE = "autograd::engine::evaluate_function"
LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaMemcpy", "cuMemcpy", "cudaMemset", "cuMemset", "cudaGraphLaunch")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cuStreamSynchronize")
_DIGITS = 20
"""An autograd number has fewer."""
_BLOCKED = 20.0
"""A launch that takes this many times the median launch has waited for room in the queue."""


def phase_label(phase: str) -> str:
    """Label of the range around a phase of the step."""
    return f"{PREFIX}{phase}"


def operator_label(name: str, sequence: int, precision: str = "") -> str:
    """Label of the range around an operator; ``sequence`` is the number that the next autograd node will get.

    ``precision`` is what the plan that is applied gives it, "" if none does.
    """
    return f"{PREFIX}{sequence}{':' if precision else ''}{precision}|{name}"


def _read_label(label: str) -> tuple[int, str, str]:
    """Sequence number, precision and name of an operator's label."""
    number, bar, name = label[len(PREFIX) :].partition("|")
    sequence, _, precision = number.partition(":")
    if not (bar and sequence.isdecimal() and len(sequence) < _DIGITS):
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
    """What the device ran: a kernel, a copy, a fill."""

    start: int
    end: int
    correlation: int
    stream: int
    name: str


class Change(NamedTuple):
    """Memory of the device allocated (positive) or given back, in bytes; the block's address, 0 if it is not known."""

    time: int
    num_bytes: int
    address: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvents:
    """Everything that a step's accounting needs, each sequence sorted by start.

    ``calls`` are starts of operations, ``waits`` those of calls in which the host waits for the device.
    """

    ranges: Sequence[Range]
    nodes: Sequence[Node]
    launches: Sequence[Launch] = ()
    kernels: Sequence[Kernel] = ()
    calls: Sequence[int] = ()
    changes: Sequence[Change] = ()
    waits: Sequence[int] = ()


@dataclass(slots=True)
class Span:
    """What one operator did in one pass, or what a phase did outside of all operators.

    ``kernels`` has, for each, its launch's offset on the host (within the span, waiting taken off), duration and name;
    ``changes`` the same for memory. ``calls`` and ``launches`` count what a profiler slows down.
    """

    host_ns: int = 0
    calls: int = 0
    launches: int = 0
    kernels: list[tuple[int, int, str]] = field(default_factory=list)
    changes: list[int] = field(default_factory=list)
    blocked_ns: int = 0

    @property
    def device_ns(self) -> int:
        """Time that its kernels run."""
        return sum(duration for _, duration, _ in self.kernels)


Spans = dict[tuple[str, str], Span]
"""(Phase, operator) to span; the operator is "" for what a phase does before the first and after the last of them,
"begin" and "end" in the forward and backward phases."""
BEGIN, END = "", "|end"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpans:
    """A step charged to operators.

    ``other_streams`` has the kernels that ran beside the compute stream (collectives). ``gap_ns`` is what passes on the
    device between two kernels that were both launched in time; ``peak_bytes`` the most memory beyond that at the start.
    ``waits`` says that the host waited for the device somewhere from the forward to the end of the backward pass.
    ``precisions`` are those that labels name: what a plan that was applied gave to operators.
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
    """A stretch on the host, and what it is charged to."""

    start: int
    end: int
    key: tuple[str, str]


def charge(events: StepEvents) -> list[StepSpans]:
    """Charge the events of a trace to operators, step by step.

    Returns:
        One entry per step, in order. A step begins with a forward phase, or with the copies right before it; one that
        accumulates gradients counts as a step per backward pass, of which the last has the optimizer's phases.

    Raises:
        ProblemError: The trace has no labels, or a phase lacks its backward pass.
    """
    phases = [r for r in events.ranges if r.label[len(PREFIX) :] in PHASES]
    copies = [False, *(r.label == phase_label(COPIES) for r in phases)]
    starts = [i - copies[i] for i, r in enumerate(phases) if r.label == phase_label(FORWARD)]
    if not starts:
        raise ProblemError(
            f"the trace has no range {phase_label(FORWARD)!r}; record it inside step_labels(model, graph)"
        )
    waits = waits_of(events.launches)
    steps = []
    for i, first in enumerate(starts):
        last = starts[i + 1] if i + 1 < len(starts) else len(phases)
        until = phases[last].start if last < len(phases) else None
        steps.append(_charge_step(events, phases[first:last], until, waits))
    return steps


def waits_of(launches: Sequence[Launch]) -> list[tuple[int, int]]:
    """Stretches in which a launch waited for room in the queue: (start, how long)."""
    if not launches:
        return []
    usual = statistics.median(launch.end - launch.start for launch in launches)
    return [
        (launch.start, int(launch.end - launch.start - usual))
        for launch in launches
        if launch.end - launch.start > _BLOCKED * usual
    ]


def _charge_step(
    events: StepEvents, phases: Sequence[Range], until: int | None, waits: Sequence[tuple[int, int]]
) -> StepSpans:
    found = {phase.label[len(PREFIX) :]: phase for phase in phases}
    if BACKWARD not in found:
        raise ProblemError(f"the trace has a step without range {phase_label(BACKWARD)!r}")
    forward, backward = found[FORWARD], found[BACKWARD]
    operators, precisions = [], {}
    for r in _between(events.ranges, forward.start, forward.end):
        if r.label[len(PREFIX) :] not in PHASES:
            sequence, precision, name = _read_label(r.label)
            operators.append((r.start, sequence, name))
            if precision:
                precisions[name] = precision
    windows = _forward_windows(forward, operators, backward.start)
    windows += _backward_windows(backward, operators, _between(events.nodes, backward.start, backward.end))
    if COPIES in found:
        windows.append(Window(found[COPIES].start, forward.start, (COPIES, BEGIN)))
    after = sorted((p for p in phases if p.start >= backward.end), key=lambda p: p.start)
    for i, phase in enumerate(after):
        end = after[i + 1].start if i + 1 < len(after) else phase.end if until is None else until
        windows.append(Window(phase.start, end, (phase.label[len(PREFIX) :], BEGIN)))
    if after:
        windows.append(Window(backward.end, after[0].start, (BACKWARD, END)))
    windows.sort()
    order = tuple(dict.fromkeys(name for _, _, name in operators))
    waited = any(forward.start <= time < backward.end for time in events.waits)
    return replace(fill(events, windows, waits, order), waits=waited, precisions=precisions)


def _forward_windows(forward: Range, operators: Sequence[tuple[int, int, str]], end: int) -> list[Window]:
    first = operators[0][0] if operators else forward.end
    windows = [Window(forward.start, first, (FORWARD, BEGIN))]
    for i, (start, _, name) in enumerate(operators):
        stop = operators[i + 1][0] if i + 1 < len(operators) else forward.end
        windows.append(Window(start, stop, (FORWARD, name)))
    windows.append(Window(forward.end, end, (FORWARD, END)))
    return windows


def _backward_windows(
    backward: Range, operators: Sequence[tuple[int, int, str]], nodes: Sequence[Node]
) -> list[Window]:
    if not nodes:
        return [Window(backward.start, backward.end, (BACKWARD, BEGIN))]
    numbers = [sequence for _, sequence, _ in operators]
    windows = [Window(backward.start, nodes[0].start, (BACKWARD, BEGIN))]
    name = BEGIN
    for i, node in enumerate(nodes):
        if node.sequence >= 0:
            # The last operator that began at or before this number made the node.
            position = bisect.bisect_right(numbers, node.sequence) - 1
            name = operators[position][2] if position >= 0 else BEGIN
        stop = nodes[i + 1].start if i + 1 < len(nodes) else node.end
        windows.append(Window(node.start, stop, (BACKWARD, name)))
    windows.append(Window(nodes[-1].end, backward.end, (BACKWARD, END)))
    return windows


def _between(events: Sequence[Any], start: int, end: int) -> list[Any]:
    return [event for event in events if start <= event[0] < end]


def fill(
    events: StepEvents, windows: Sequence[Window], waits: Sequence[tuple[int, int]], order: tuple[str, ...]
) -> StepSpans:
    """Charge the events of one step to windows, which are sorted."""
    starts = [w.start for w in windows]
    spans: Spans = {}
    base: list[int] = []
    for w in windows:
        span = spans.setdefault(w.key, Span())
        base.append(span.host_ns)
        span.host_ns += w.end - w.start
    waited: dict[int, list[tuple[int, int]]] = {}

    def window_of(time: int) -> int | None:
        i = bisect.bisect_right(starts, time) - 1
        return i if i >= 0 and time < windows[i].end else None

    for start, length in waits:
        i = window_of(start)
        if i is not None:
            waited.setdefault(i, []).append((start, length))
            spans[windows[i].key].blocked_ns += length
    taken = {key: 0 for key in spans}
    shift: list[int] = []
    for i, w in enumerate(windows):
        shift.append(base[i] - taken[w.key])
        taken[w.key] += sum(length for _, length in waited.get(i, ()))
    for key, span in spans.items():
        span.host_ns -= taken[key]

    def offset(i: int, time: int) -> int:
        lost = sum(length for start, length in waited.get(i, ()) if start < time)
        return shift[i] + time - windows[i].start - lost

    for time in events.calls:
        i = window_of(time)
        if i is not None:
            spans[windows[i].key].calls += 1
    launch_of = {launch.correlation: launch for launch in events.launches}
    usage: dict[int, int] = {}
    for kernel in events.kernels:
        usage[kernel.stream] = usage.get(kernel.stream, 0) + 1
    compute = max(usage, key=lambda stream: usage[stream], default=0)
    others, mine = [], []
    for kernel in events.kernels:
        launch = launch_of.get(kernel.correlation)
        i = None if launch is None else window_of(launch.start)
        if launch is None or i is None:
            continue
        if kernel.stream != compute:
            others.append(kernel)
            continue
        mine.append((kernel, launch))
        span = spans[windows[i].key]
        span.launches += 1
        span.kernels.append((offset(i, launch.start), kernel.end - kernel.start, kernel.name))
    for change in events.changes:
        i = window_of(change.time)
        if i is not None:
            spans[windows[i].key].changes.append(change.num_bytes)
    now = peak = 0
    for change in events.changes:
        if windows[0].start <= change.time < windows[-1].end:
            now += change.num_bytes
            peak = max(peak, now)
    gap_ns, latency_ns = _gaps(mine)
    return StepSpans(
        spans=spans,
        order=order,
        other_streams=tuple(others),
        gap_ns=gap_ns,
        latency_ns=latency_ns,
        start_ns=windows[0].start,
        end_ns=windows[-1].end,
        peak_bytes=peak,
    )


def _gaps(pairs: Iterable[tuple[Kernel, Launch]]) -> tuple[float, float]:
    """Median gap between kernels where the host was ahead, and from a launch to its kernel where the device idled."""
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
"""Clocks of traces begin at the start of the machine or in 1970; what is thousands of years later is no time."""


def read_chrome_trace(path: str | os.PathLike[str]) -> StepEvents:
    """Read a trace file, as it is or packed by gzip (torch packs those whose name ends so).

    Args:
        path: Written by ``export_chrome_trace`` of a profiler that ran inside ``step_labels``.

    Raises:
        ProblemError: It cannot be read, is no trace, or an event in it is damaged.
    """
    where = os.fspath(path)
    try:
        data = read_bounded(path, _LARGEST_BYTES)
        if data is not None and data.startswith(_GZIP):
            data = _unpacked(data)
        trace = None if data is None else json.loads(data)
    except (OSError, ValueError, RecursionError, zlib.error) as error:  # ValueError: no UTF-8, or no JSON
        text = str(error) or type(error).__name__
        raise ProblemError(f"cannot read trace {where!r}: {text}; export it with export_chrome_trace") from error
    if data is None:
        raise ProblemError(f"cannot read trace {where!r}: it has more than {_LARGEST_BYTES} bytes; trace fewer steps")
    events = trace.get("traceEvents") if isinstance(trace, dict) else None
    if not isinstance(events, list):
        raise ProblemError(f"{where!r} is no trace: it has no list 'traceEvents'; export it with export_chrome_trace")
    found = _Found()
    for i, event in enumerate(events):
        if not isinstance(event, dict):
            continue
        try:
            found.take(event)
        except (TypeError, ValueError, KeyError, OverflowError, AttributeError) as error:
            name = str(event.get("name"))[:60]
            raise ProblemError(
                f"trace {where!r} is damaged: event {i} ({name!r}) cannot be read ({error!r:.80}); export it again "
                "with export_chrome_trace"
            ) from error
    return found.events()


def _unpacked(data: bytes) -> bytes | None:
    """What a gzip file holds; None if that is more than is read."""
    unpacking = zlib.decompressobj(zlib.MAX_WBITS | 16)
    whole = unpacking.decompress(data, _LARGEST_BYTES)
    if unpacking.unconsumed_tail:
        return None
    if not unpacking.eof:
        raise ValueError("the packed file ends too early")
    return whole


class _Found:
    """What was found in a trace, by kind."""

    def __init__(self) -> None:
        self._ranges: list[Range] = []
        self._nodes: list[Node] = []
        self._launches: list[Launch] = []
        self._kernels: list[Kernel] = []
        self._calls: list[int] = []
        self._changes: list[Change] = []

    def take(self, event: Mapping[str, Any]) -> None:
        arguments = event.get("args") or {}
        if event.get("name") == "[memory]" and "Bytes" in arguments:
            self._changes.append(Change(_ns(event["ts"]), int(arguments["Bytes"])))
        if event.get("ph") != "X" or "ts" not in event:
            return
        name, category = str(event.get("name")), event.get("cat")
        start = _ns(event["ts"])
        end = start + _ns(event.get("dur", 0))
        if end < start:
            raise ValueError(f"dur is {event['dur']}")
        if category in _ON_DEVICE:
            stream = int(arguments.get("stream", 0))
            self._kernels.append(Kernel(start, end, int(arguments.get("correlation", -1)), stream, name))
        elif category in _RUNTIME:
            if name.startswith(LAUNCHES):
                self._launches.append(Launch(start, end, int(arguments.get("correlation", -1))))
        elif category in ("cpu_op", "user_annotation"):
            if name.startswith(PREFIX):
                self._ranges.append(Range(start, end, name))
            elif name.startswith(NODE):
                self._nodes.append(Node(start, end, _sequence(arguments)))
            else:
                self._calls.append(start)

    def events(self) -> StepEvents:
        return StepEvents(
            ranges=sorted(self._ranges),
            nodes=sorted(self._nodes),
            launches=sorted(self._launches),
            kernels=sorted(self._kernels),
            calls=sorted(self._calls),
            changes=sorted(self._changes),
        )


def _ns(microseconds: Any) -> int:
    value = float(microseconds)
    if not (math.isfinite(value) and abs(value) < _LATEST_US):
        raise ValueError(f"{value} is no time in microseconds")
    return round(value * 1000)


def _sequence(arguments: Mapping[str, Any]) -> int:
    """Number of a node; those that accumulate gradients have none, or the largest there is."""
    number = int(arguments.get("Sequence number", -1))
    return number if number < 2**62 else -1
