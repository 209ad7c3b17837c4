"""Read what ``torch.profiler`` exported: a trace in Chrome's format, as the events that a step is charged from."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from qsync_opt.errors import ProblemError
from qsync_opt.step_trace import LAUNCHES, NODE, PREFIX, Change, Kernel, Launch, Node, Range, StepEvents

_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_RUNTIME = frozenset({"cuda_runtime", "cuda_driver"})


def read_chrome_trace(path: str | os.PathLike[str]) -> StepEvents:
    """Read a trace file.

    Args:
        path: Written by ``export_chrome_trace`` of a profiler that ran inside ``step_labels``.

    Raises:
        ProblemError: It cannot be read, or is no trace.
    """
    where = os.fspath(path)
    try:
        trace = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ProblemError(f"cannot read trace {where!r}: {error}; export it with export_chrome_trace") from error
    events = trace.get("traceEvents") if isinstance(trace, dict) else None
    if not isinstance(events, list):
        raise ProblemError(f"{where!r} is no trace: it has no list 'traceEvents'; export it with export_chrome_trace")
    ranges, nodes, launches, kernels, calls, changes = [], [], [], [], [], []
    for event in events:
        if not isinstance(event, dict):
            continue
        arguments = event.get("args") or {}
        if event.get("name") == "[memory]" and "Bytes" in arguments:
            changes.append(Change(_ns(event["ts"]), int(arguments["Bytes"])))
        if event.get("ph") != "X" or "ts" not in event:
            continue
        name, category = str(event.get("name")), event.get("cat")
        start = _ns(event["ts"])
        end = start + _ns(event.get("dur", 0))
        if category in _ON_DEVICE:
            stream = int(arguments.get("stream", 0))
            kernels.append(Kernel(start, end, int(arguments.get("correlation", -1)), stream, name))
        elif category in _RUNTIME:
            if name.startswith(LAUNCHES):
                launches.append(Launch(start, end, int(arguments.get("correlation", -1))))
        elif category in ("cpu_op", "user_annotation"):
            if name.startswith(PREFIX):
                ranges.append(Range(start, end, name))
            elif name.startswith(NODE):
                nodes.append(Node(start, end, _sequence(arguments)))
            else:
                calls.append(start)
    return StepEvents(
        ranges=sorted(ranges),
        nodes=sorted(nodes),
        launches=sorted(launches),
        kernels=sorted(kernels),
        calls=sorted(calls),
        changes=sorted(changes),
    )


def _ns(microseconds: Any) -> int:
    return round(float(microseconds) * 1000)


def _sequence(arguments: dict[str, Any]) -> int:
    """Number of a node; those that accumulate gradients have none, or the largest there is."""
    number = int(arguments.get("Sequence number", -1))
    return number if number < 2**62 else -1
