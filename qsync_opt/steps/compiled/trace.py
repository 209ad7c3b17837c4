"""Charging of a compiled training step: kernels of compiled graphs to the operators inside them.

A compiler fuses operators across the borders that costs are charged to. It reports, however, in which order a compiled
graph runs its kernels and which operators are in each (`Scheduled`). A kernel's time is divided among its operators by
the bytes that they move: reads are charged to the operator that reads, writes to the operator they are written for, so
that the cast of a result to a reader's format, which is fused into the writer, is charged to the reader.

The trace has no labels of operators. The calls of a graph on the host are matched with its schedule: fused kernels one
by one, library calls by name between them. A fused kernel too many or too few is an error, because then none of them
can be identified.

Of memory, each operator's share at the peak of the passes is kept: a compiler computes gradients of weights at a time
of its choice, so that operators do not take turns, and the memory that they leave behind tells nothing about the peak.

Source: ours.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from qsync_opt.errors import ProblemError
from qsync_opt.steps.memory_timeline import Block, ChargedChange, backward_moment, blocks, forward_moment, take_reader
from qsync_opt.steps.trace import (
    BACKWARD,
    BEGIN,
    CLIP,
    END,
    FORWARD,
    OPTIMIZER,
    ZERO_GRAD,
    Change,
    Range,
    Span,
    Spans,
    StepEvents,
    StepSpans,
    Window,
    consecutive,
    fill,
    split_steps,
    waits_of,
)

_LATER = (CLIP, OPTIMIZER, ZERO_GRAD)
_AHEAD = 3
"""Number of calls whose writes are searched for an allocation: a compiler allocates some of them in advance."""


class Scheduled(NamedTuple):
    """One entry of a compiled graph's schedule.

    Attributes:
        fused: Whether it is a kernel of the compiler; else a library call, or nothing.
        calls: Names that a library call may have in a trace, without namespace.
        shares: Operators in it with their shares, which add up to 1. Empty if no operator is known.
        writes: Bytes that it writes, with the operator that reads them.
    """

    fused: bool
    calls: tuple[str, ...]
    shares: tuple[tuple[str, float], ...]
    writes: tuple[tuple[str, int], ...] = ()


class HostCall(NamedTuple):
    """An operation, or a compiler's kernel, that the host calls inside a compiled graph."""

    start: int
    end: int
    name: str
    fused: bool


class ChargedStep(NamedTuple):
    """A step charged to operators, and the blocks of memory of its passes."""

    spans: StepSpans
    blocks: tuple[Block, ...]


class CompiledEvents(NamedTuple):
    """Events of a trace: those of any step, the ranges of compiled graphs, and the calls of the host in them."""

    events: StepEvents
    graphs: Sequence[Range]
    calls: Sequence[HostCall]


def match_calls(schedule: Sequence[Scheduled], calls: Sequence[HostCall]) -> list[Scheduled | None]:
    """The entry of the schedule for each call of a graph.

    Args:
        schedule: Of the graph, in order.
        calls: Of the host while the graph ran, none inside another, by time.

    Returns:
        One entry per call; None for a library call that is not in the schedule (a part of the entry before it).

    Raises:
        ProblemError: The graph launched another number of fused kernels than scheduled.
    """
    expected, launched = (sum(one.fused for one in some) for some in (schedule, calls))
    if expected != launched:
        raise ProblemError(
            f"a compiled graph was to launch {expected} fused kernels and launched {launched}; its steps cannot be "
            "charged to operators"
        )
    entries: list[Scheduled | None] = []
    place, count = 0, len(schedule)
    for call in calls:
        fused = next((k for k in range(place, count) if schedule[k].fused), count)
        name = call.name.rpartition("::")[2]
        among = (k for k in range(place, fused) if name in schedule[k].calls)
        match = fused if call.fused else next(among, None)
        entries.append(None if match is None else schedule[match])
        place = place if match is None else match + 1
    return entries


def charge_compiled(
    trace: CompiledEvents,
    forward: Sequence[Sequence[Scheduled]],
    backward: Sequence[Sequence[Scheduled]],
    order: Sequence[str],
) -> list[ChargedStep]:
    """Charge the events of compiled steps to operators, step by step.

    Args:
        trace: With labelled phases.
        forward: Schedules of the graphs of the forward pass, in execution order.
        backward: Schedules of those of the backward pass.
        order: Operators of the model in the order of the forward pass.

    Returns:
        One entry per step, in order.

    Raises:
        ProblemError: A pass ran another number of graphs, or other kernels than scheduled.
    """
    waits = waits_of(trace.events.launches)
    steps = []
    for phases, end in split_steps(trace.events.ranges, (FORWARD, BACKWARD, *_LATER)):
        ranges = dict(phases)
        windows: list[Window] = []
        entries: dict[str, Scheduled] = {}
        _pass_windows(trace, FORWARD, ranges[FORWARD], ranges[BACKWARD].start, forward, windows, entries)
        later = [(r.start, phase) for phase, r in phases if phase in _LATER]
        until = later[0][0] if later else end
        _pass_windows(trace, BACKWARD, ranges[BACKWARD], until, backward, windows, entries)
        windows += consecutive([(start, (phase, BEGIN)) for start, phase in later], end)
        windows.sort()
        begin = ranges[FORWARD].start
        peak, later_bytes = _peaks(trace.events.changes, begin, until, end)
        events = replace(trace.events, changes=[c for c in trace.events.changes if begin <= c.time <= peak])
        spans = fill(events, windows, waits, tuple(order))
        spans.spans.setdefault((OPTIMIZER, BEGIN), Span()).changes = [later_bytes]
        waited = any(begin <= time < ranges[BACKWARD].end for time in trace.events.waits)
        most = max(spans.peak_bytes, later_bytes)
        whole = replace(spans, spans=_divided(spans.spans, entries), waits=waited, peak_bytes=most)
        changes = _charged_changes(
            [c for c in trace.events.changes if begin <= c.time < until], windows, entries, order
        )
        steps.append(ChargedStep(whole, blocks(changes, len(order))))
    return steps


def _charged_changes(
    changes: Sequence[Change], windows: Sequence[Window], entries: Mapping[str, Scheduled], order: Sequence[str]
) -> list[ChargedChange]:
    """Changes of memory with their operators and moments."""
    positions = {name: i for i, name in enumerate(order)}
    count = len(order)
    charged: list[ChargedChange] = []
    pending = deque(changes)
    forward, backward = -1, count
    writes = {label: list(entry.writes) for label, entry in entries.items()}
    labels = list(entries)
    follows = {label: labels[i : i + _AHEAD] for i, label in enumerate(labels)}
    for window in windows:
        phase, label = window.key
        entry = entries.get(label)
        first = entry.shares[0][0] if entry is not None else ""
        if entry is not None and not entry.fused and first in positions:
            if phase == FORWARD:
                forward = max(forward, positions[first])
            else:
                backward = min(backward, positions[first])
        moment = forward_moment(forward) if phase == FORWARD else backward_moment(backward, count)
        while pending and pending[0].time < window.end:
            change, operator = pending.popleft(), ""
            if change.num_bytes > 0:
                operator = take_reader(change.num_bytes, [writes[k] for k in follows.get(label, ())], first)
            charged.append(ChargedChange(change.num_bytes, change.address, operator, moment))
    return charged


def _peaks(changes: Sequence[Change], begin: int, until: int, end: int) -> tuple[int, int]:
    """Time of the memory peak from ``begin`` to ``until``, and the peak from there to ``end``."""
    mine = [change for change in changes if begin <= change.time < end]
    used = list(itertools.accumulate((change.num_bytes for change in mine), initial=0))[1:]
    passes = [(total, -change.time) for change, total in zip(mine, used, strict=True) if change.time < until]
    most, when = max(passes, default=(0, -begin))
    later = [total for change, total in zip(mine, used, strict=True) if change.time >= until]
    return (-when if most > 0 else begin - 1), max(0, *later) if later else 0


def _pass_windows(
    trace: CompiledEvents,
    phase: str,
    whole: Range,
    until: int,
    schedules: Sequence[Sequence[Scheduled]],
    windows: list[Window],
    entries: dict[str, Scheduled],
) -> None:
    """Add the windows of a pass: before its graphs, one per call of them, and after them.

    Work between two graphs (accumulation of gradients, and the hooks of DistributedDataParallel) belongs to the one
    before it. A call's window begins where the call before it ended, because its results are allocated there.
    """
    graphs = [g for g in trace.graphs if whole.start <= g.start < whole.end]
    if len(graphs) != len(schedules):
        raise ProblemError(f"the {phase} pass ran {len(graphs)} compiled graphs, but {len(schedules)} were compiled")
    now, current = whole.start, ""
    for graph, schedule in zip(graphs, schedules, strict=True):
        windows.append(Window(now, graph.start, (phase, current or BEGIN)))
        now = graph.start
        calls = [call for call in trace.calls if graph.start <= call.start < graph.end]
        for call, entry in zip(calls, match_calls(schedule, calls), strict=True):
            if entry is not None and entry.shares:
                current = f"{phase} {len(entries)}"
                entries[current] = entry
            windows.append(Window(now, call.end, (phase, current or BEGIN)))
            now = call.end
        windows.append(Window(now, graph.end, (phase, current or BEGIN)))
        now = graph.end
    windows.append(Window(now, until, (phase, END)))


def _divided(spans: Spans, entries: dict[str, Scheduled]) -> Spans:
    """Spans of calls, divided among their operators."""
    divided: Spans = {}
    for (phase, name), span in spans.items():
        entry = entries.get(name)
        shares = ((name, 1.0),) if entry is None else entry.shares
        charged_ns = 0
        for k, (operator, share) in enumerate(shares):
            target = divided.setdefault((phase, operator), Span())
            host = span.host_ns - charged_ns if k + 1 == len(shares) else round(share * span.host_ns)
            charged_ns += host
            target.kernels += [
                (target.host_ns + round(share * offset), round(share * duration), kernel)
                for offset, duration, kernel in span.kernels
                if share > 0.0
            ]
            target.host_ns += host
            if k == 0:
                target.changes += span.changes
                target.blocked_ns += span.blocked_ns
    return divided
