"""Read what ``torch.profiler`` exported: a trace in Chrome's format, as the events that a step is charged from."""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Mapping
from typing import Any

from qsync_opt.errors import ProblemError
from qsync_opt.io.files import read_bounded
from qsync_opt.steps.trace import LAUNCHES, NODE, PREFIX, Change, Kernel, Launch, Node, Range, StepEvents

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
