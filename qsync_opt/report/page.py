"""The page of a report: one self-contained HTML file that holds the figures as JSON.

The JSON has columns rather than objects, to stay small: operators, formats, devices and kinds are referred to by their
position. Times are in ns, memory in KiB or bytes as the names say.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Iterable
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

import qsync_opt
from qsync_opt.errors import ProblemError
from qsync_opt.io import write_text
from qsync_opt.model import Role
from qsync_opt.report.contents import Fronts, MeasuredDevice, Report
from qsync_opt.report.markup import front_markup, memory_markup, slot, summary_markup, timeline_markup
from qsync_opt.training import (
    COMMUNICATION,
    COMPUTE,
    Alternative,
    DeviceEvaluation,
    Front,
    MemoryTimeline,
    TimelineEvent,
    cast_buffers_kib,
)

REPORT_FORMAT = "qsync-report/1"
ROLES = tuple(role.value for role in Role)
KINDS = ("forward", "backward", "forward cast", "backward cast", "all-reduce", "optimizer")
"""Kinds of timeline events, as `replay` names them."""
_SCRIPTS = ("base.js", "model.js", "table.js", "charts.js", "timeline.js", "main.js")
_STYLES = ("report.css", "parts.css")
_TOKEN = re.compile(r"\{\{(\w+)\}\}")


def report_html(report: Report, *, note: str = "") -> str:
    """Return the page of a report, which ends with ``note``, such as its sources and date."""
    style, script = styles(), "\n".join(map(_resource, _SCRIPTS))
    parts = {
        "policy": f"default-src 'none'; script-src '{content_hash(script)}'; style-src '{content_hash(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'",
        "version": escape(qsync_opt.__version__),
        "name": escape(report.problem.name),
        "style": style,
        "script": script,
        "summary": summary_markup(report),
        "front": front_markup(report),
        "timeline": timeline_markup(report),
        "memory": memory_markup(report),
        "footer": escape(f"Made by qsync-opt {qsync_opt.__version__}. {note}".strip()),
        "data": json_for_html(report_json(report)),
    }
    # One pass, so that a token inside a part stays as it is.
    return _TOKEN.sub(lambda match: parts[match[1]], _resource("report.html"))


def write_report(report: Report, path: str | os.PathLike[str], *, note: str = "") -> int:
    """Write the page of a report, whole or not at all, and return its size in bytes.

    Raises:
        ProblemError: The file cannot be written.
    """
    text = report_html(report, note=note)
    write_text(path, text, error=ProblemError)
    return len(text.encode())


def json_for_html(data: object) -> str:
    """JSON that can stand in a script element: nothing in it can end the element or begin a comment."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def styles() -> str:
    """The style sheet of all pages."""
    return "\n".join(map(_resource, _STYLES))


def content_hash(text: str) -> str:
    """The hash by which a page's policy allows a style or script of its own."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def _resource(name: str) -> str:
    return (files("qsync_opt.report") / "page" / name).read_text(encoding="utf-8")


def report_json(report: Report) -> dict[str, Any]:
    """Return the data of a report's page; the page itself computes only sums and shares."""
    problem, evaluation = report.problem, report.evaluation
    return {
        "format": REPORT_FORMAT,
        "name": problem.name,
        "formats": list(problem.formats),
        "slots": [slot(list(problem.formats), name) for name in problem.formats],
        "roles": list(ROLES),
        "kinds": list(KINDS),
        "operators": _operators(report),
        "devices": [_device(report, device) for device in evaluation.devices.values()],
        **_picked(evaluation, "objective", "iteration_ns", "latency_limit_ns", "feasible"),
        "violations": list(evaluation.violations),
        "fronts": _fronts(report.fronts),
        "uniform": [
            {
                "label": label,
                **_picked(other, "objective", "iteration_ns", "feasible"),
                "memory_kib": list(other.memory_kib.values()),
            }
            for label, other in report.uniform.items()
        ],
        "timeline": _timeline(report),
        "measured": _measured(report),
    }


def _picked(value: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def _columns(rows: Iterable[Any], *names: str) -> dict[str, list[Any]]:
    return {name: [getattr(row, name) for row in rows] for name in names}


def _operators(report: Report) -> dict[str, Any]:
    operators = report.problem.operators
    position = {operator.name: i for i, operator in enumerate(operators)}
    return {
        **_columns(operators, "name", "type", "bucket"),
        "role": [ROLES.index(operator.role) for operator in operators],
        "inputs": [[position[name] for name in operator.inputs] for operator in operators],
        "elements": [operator.output_elements for operator in operators],
    }


def _device(report: Report, device: DeviceEvaluation) -> dict[str, Any]:
    formats = {name: i for i, name in enumerate(report.problem.formats)}
    explanations = report.explanations[device.name]
    times = device.operators
    return {
        "count": report.problem.device(device.name).count,
        **_picked(device, "name", "memory_kib", "memory_limit_kib", "sensitivity", "forward_end_ns", "backward_end_ns"),
        "operators": {
            "precision": [formats[time.precision] for time in times],
            **_columns(times, "forward_ns", "backward_ns"),
            **_columns(explanations, "memory_kib", "sensitivity", "reason"),
            "cast_ns": [time.forward_casts_ns + time.backward_casts_ns for time in times],
            "buffer_kib": [cast_buffers_kib(report.problem, time.forward_casts) for time in times],
            "alternatives": [[_alternative(a, formats) for a in e.alternatives] for e in explanations],
        },
        "memory": _memory(report.memory[device.name]),
    }


def _alternative(alternative: Alternative, formats: dict[str, int]) -> list[Any]:
    """Precision, change of iteration ns, computing ns, KiB, sensitivity, casts and followers; the limits it breaks."""
    return [
        formats[alternative.precision],
        alternative.iteration_change_ns,
        alternative.compute_change_ns,
        alternative.memory_change_kib,
        alternative.sensitivity_change,
        len(alternative.added_casts) - len(alternative.removed_casts),
        len(alternative.pushed),
        [limit.text for limit in alternative.broken],
    ]


def _memory(timeline: MemoryTimeline | None) -> dict[str, Any] | None:
    if timeline is None:
        return None
    parts = ("parameters", "optimizer", "buckets", "gradients", "transient", "activations", "casts", "total")
    return {
        "times_ns": list(timeline.times_ns),
        "held_bytes": list(timeline.live_bytes),
        "peak_ns": timeline.peak_ns,
        "peak_operator": timeline.peak_operator,
        **_picked(timeline.breakdown, *(f"{part}_bytes" for part in parts)),
    }


def _fronts(fronts: Fronts | None) -> dict[str, Any] | None:
    if fronts is None:
        return None
    return {
        "method": fronts.method,
        "best": _picked(fronts.best, "objective", "bound"),
        "latency": _points(fronts.latency),
        "memory": [_points(front) for front in fronts.memory.values()],
    }


def _points(front: Front) -> list[list[Any]]:
    """Sensitivity, bound, iteration ns and the KiB of every device, one list per point."""
    return [[p.objective, p.bound, p.iteration_ns, list(p.memory_kib.values())] for p in front.points]


def _timeline(report: Report) -> list[dict[str, Any]]:
    """One lane per worker and stream, its events in columns; ``what`` is an operator, or a bucket for all-reduces."""
    position = {operator.name: i for i, operator in enumerate(report.problem.operators)}
    lanes: dict[tuple[str, str], list[TimelineEvent]] = {}
    for event in report.timeline.events:
        lanes.setdefault((event.worker, event.stream), []).append(event)
    workers = list(dict.fromkeys(worker for worker, _ in lanes))
    order = sorted(lanes, key=lambda lane: (workers.index(lane[0]), lane[1] != COMPUTE))
    return [
        {
            "device": workers.index(worker),
            "stream": stream,
            **_columns(events, "start_ns", "duration_ns"),
            "kind": [KINDS.index(event.kind) for event in events],
            "what": [_what(event, position) for event in events],
            "label": [event.name if event.kind.endswith("cast") else "" for event in events],
            "waited_for": [event.details.get("waited_for", "") for event in events if stream == COMMUNICATION],
        }
        for (worker, stream), events in ((lane, lanes[lane]) for lane in order)
    ]


def _what(event: TimelineEvent, position: dict[str, int]) -> int:
    if event.kind == "optimizer":
        return -1
    if event.kind == "all-reduce":
        return int(event.details["bucket"])
    if event.kind == "forward cast":
        return position[str(event.details["consumer"])]
    return position[str(event.details["producer"]) if event.kind == "backward cast" else event.name]


def _measured(report: Report) -> dict[str, Any] | None:
    measured = report.measured
    if measured is None:
        return None
    devices = [measured.devices.get(name, MeasuredDevice()) for name in report.evaluation.devices]
    return {
        "iteration_ns": measured.iteration_ns,
        "peak_memory_bytes": [device.peak_memory_bytes for device in devices],
    }
