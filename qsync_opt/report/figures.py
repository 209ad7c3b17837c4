"""Figures of plans, problems and fronts.

The functions that return a ``matplotlib.figure.Figure`` need matplotlib (``pip install 'qsync-opt[figures]'``) and keep
no pyplot state: ``figure.savefig("x.svg")`` writes it. `front_svg` needs nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

from qsync_opt.errors import NotInstalledError
from qsync_opt.io import format_memory, format_sensitivity, format_time
from qsync_opt.report.display import by_rank, color, traded
from qsync_opt.training import BYTES_PER_KIB, MEMORY_KEY, evaluate, memory_breakdown, replay

if TYPE_CHECKING:
    from qsync_opt.training import Front, Plan, Problem


_PLOT_WIDTH, _HEIGHT = 720, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 90, 40, 48, 64
_MIDDLE = (_LEFT + _PLOT_WIDTH - _RIGHT) / 2
_TICKS = 5
# The class in front keeps the style within the picture, also where it stands inside a page.
_STYLE = """
.qsync-front { max-width: 720px; } .qsync-front text { font: 13px system-ui, sans-serif; fill: #333; }
.qsync-front .axis { stroke: #777; fill: none; } .qsync-front .grid { stroke: #ddd; }
.qsync-front .line { stroke: #1f6feb; fill: none; stroke-width: 2; }
.qsync-front .kept { fill: #1f6feb; } .qsync-front .broken { fill: #fff; stroke: #1f6feb; }
.qsync-front .limit { stroke: #b42318; stroke-dasharray: 5 4; }
"""


def front_svg(front: Front) -> str:
    """Draw a front as an SVG document: use from left to right, sensitivity upwards.

    Points that break a limit are hollow; the problem's own limit is a dashed line.

    Source: ours.
    """
    limit = front.limit
    uses, values = [point.use for point in front.points], [point.objective for point in front.points]
    low, high = _padded(min(uses, default=0), max(uses, default=1))
    top = max(values, default=0.0) * 1.05 or 1.0

    def x(use: float) -> float:
        return _LEFT + (use - low) / (high - low) * (_PLOT_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - value / top * (_HEIGHT - _TOP - _BOTTOM)

    label, form = traded(front)
    title = f"{front.problem.name}: sensitivity against {label}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="qsync-front" viewBox="0 0 {_PLOT_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{escape(title, {chr(34): "&quot;"})}">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        f'<rect class="back" width="{_PLOT_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="26">{escape(title)}</text>',
    ]
    for step in range(_TICKS + 1):
        use, value = low + (high - low) * step / _TICKS, top * step / _TICKS
        parts += [
            f'<line class="grid" x1="{_LEFT}" x2="{_PLOT_WIDTH - _RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>',
            f'<text x="{_LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{format_sensitivity(value)}</text>',
            f'<text x="{x(use):.1f}" y="{_HEIGHT - _BOTTOM + 20}" text-anchor="middle">{form(round(use))}</text>',
        ]
    if low <= limit <= high:
        parts.append(f'<line class="limit" x1="{x(limit):.1f}" x2="{x(limit):.1f}" y1="{_TOP}" y2="{y(0):.1f}"/>')
    corners = [(uses[0], values[0])] if uses else []
    for (slower, _), (faster, value) in itertools.pairwise(zip(uses, values, strict=True)):
        corners += [(slower, value), (faster, value)]  # between two points the faster plan is the best
    line = " ".join(f"{x(use):.1f},{y(value):.1f}" for use, value in corners)
    parts.append(f'<polyline class="line" points="{line}"/>')
    parts += [
        f'<circle class="{"kept" if point.feasible else "broken"}" cx="{x(point.use):.1f}" '
        f'cy="{y(point.objective):.1f}" r="4"><title>{form(point.use)}, sensitivity '
        f"{format_sensitivity(point.objective)}</title></circle>"
        for point in front.points
    ]
    parts += [
        f'<path class="axis" d="M{_LEFT},{_TOP} V{y(0):.1f} H{_PLOT_WIDTH - _RIGHT}"/>',
        f'<text x="{_MIDDLE}" y="{_HEIGHT - 14}" text-anchor="middle">{escape(label)}</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _padded(low: float, high: float) -> tuple[float, float]:
    margin = (high - low) * 0.03 or max(1.0, math.fabs(high) * 0.05)
    return low - margin, high + margin


_KINDS = {
    "forward": "#2171b5",
    "backward": "#6baed6",
    "forward cast": "#d94801",
    "backward cast": "#fd8d3c",
    "all-reduce": "#41ab5d",
    "optimizer": "#807dba",
}
_PARTS = ("parameters", "gradients", "optimizer", "buckets", "activations", "casts", "transient")
_WIDTH = 10.0


def _figure(rows: int, height: float) -> tuple[Any, Any]:
    if importlib.util.find_spec("matplotlib") is None:
        raise NotInstalledError("figures need matplotlib, which is not installed: pip install 'qsync-opt[figures]'")
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.subplots(rows, 1, squeeze=False)[:, 0]


def _ticks(axis: Any, form: Callable[[float], str]) -> None:
    """Label an axis with quantities that carry their units."""
    axis.set_major_formatter(importlib.import_module("matplotlib.ticker").FuncFormatter(lambda value, _: form(value)))


def _legend(figure: Any, shades: dict[str, Any], place: str = "lower center") -> None:
    """A legend outside the axes: a box per name and color."""
    patches = importlib.import_module("matplotlib.patches")
    handles = [patches.Patch(color=shade, label=name) for name, shade in shades.items()]
    figure.legend(handles=handles, loc=f"outside {place}", ncols=max(1, len(shades)))


def plan_figure(plan: Plan, problem: Problem | None = None) -> Any:
    """Draw a plan: operators in order from left to right, one strip per device type, colored by precision.

    With its ``problem``, dependent and fixed operators are shown too.

    Raises:
        NotInstalledError: matplotlib is missing.
        ProblemError: The plan does not fit the problem.
    """
    devices = plan.devices if problem is None else plan.resolve(problem)
    figure, axes = _figure(len(devices), 0.8 + 0.9 * len(devices))
    for ax, (device, choices) in zip(axes, devices.items(), strict=True):
        shades = [color(precision) for precision in choices.values()]
        ax.bar(range(len(shades)), 1.0, width=1.0, align="edge", color=shades)
        ax.set(xlim=(0, max(1, len(shades))), ylim=(0, 1), yticks=[], ylabel=device)
    axes[-1].set_xlabel("operator, in forward order")
    used = by_rank(precision for choices in devices.values() for precision in choices.values())
    _legend(figure, {name: color(name) for name in used}, "upper right")
    return figure


def front_figure(front: Front) -> Any:
    """Draw a front: use from left to right, sensitivity upwards; hollow points break a limit.

    Raises:
        NotInstalledError: matplotlib is missing.
    """
    figure, (ax,) = _figure(1, 5.0)
    blue = "#2171b5"
    uses, values = [point.use for point in front.points], [point.objective for point in front.points]
    ax.step(uses, values, where="pre", color=blue, linewidth=1.0)
    for feasible, fill, label in ((True, blue, "keeps all limits"), (False, "none", "breaks a limit")):
        chosen = [point for point in front.points if point.feasible is feasible]
        uses, values = ([getattr(point, name) for point in chosen] for name in ("use", "objective"))
        ax.plot(uses, values, "o", color=blue, markerfacecolor=fill, label=label)
    ax.axvline(front.limit, color="#b42318", linestyle="--", label="limit")
    resource, form = traded(front)
    ax.set(xlabel=resource, ylabel="sensitivity", title=front.problem.name)
    _ticks(ax.xaxis, form)
    ax.legend()
    return figure


def timeline_figure(problem: Problem, plan: Plan) -> Any:
    """Draw the predicted iteration: a lane per device type and stream; gaps are waiting time.

    Raises:
        NotInstalledError: matplotlib is missing.
        ProblemError: The plan does not fit the problem.
    """
    timeline = replay(problem, plan)
    lanes = list(dict.fromkeys((event.worker, event.stream) for event in timeline.events))
    figure, (ax,) = _figure(1, 1.4 + 0.5 * len(lanes))
    for position, lane in enumerate(lanes):
        events = [event for event in timeline.events if (event.worker, event.stream) == lane]
        ax.broken_barh(
            [(event.start_ns, event.duration_ns) for event in events],
            (position - 0.4, 0.8),
            facecolors=[_KINDS[event.kind] for event in events],
        )
    ax.set(yticks=range(len(lanes)), yticklabels=[f"{worker}\n{stream}" for worker, stream in lanes])
    ax.set(
        xlim=(0, timeline.iteration_ns), xlabel="time", title=f"{problem.name}: {format_time(timeline.iteration_ns)}"
    )
    ax.invert_yaxis()
    _ticks(ax.xaxis, format_time)
    kinds = {event.kind for event in timeline.events}
    _legend(figure, {kind: shade for kind, shade in _KINDS.items() if kind in kinds})
    return figure


def memory_figure(problem: Problem, plan: Plan) -> Any:
    """Draw the predicted memory of each device type by purpose, with its limit.

    A problem that does not say what its memory is made of gets one bar per device type.

    Raises:
        NotInstalledError: matplotlib is missing.
        ProblemError: The plan does not fit the problem.
    """
    evaluation = evaluate(problem, plan)
    figure, (ax,) = _figure(1, 1.4 + 0.6 * len(evaluation.devices))
    shades = importlib.import_module("matplotlib").colormaps["tab10"]
    legend: dict[str, Any] = {}
    for position, device in enumerate(evaluation.devices.values()):
        left, kib_of = 0.0, {"all": float(device.memory_kib)}
        if ("devices", device.name, MEMORY_KEY) in problem.extras:
            breakdown = memory_breakdown(problem, device)
            kib_of = {part: getattr(breakdown, f"{part}_bytes") / BYTES_PER_KIB for part in _PARTS}
        for part, kib in kib_of.items():
            shade = shades(_PARTS.index(part)) if part in _PARTS else color("FP32")
            ax.barh(position, kib, left=left, color=shade, height=0.6)
            legend[part] = shade
            left += kib
        ax.plot([device.memory_limit_kib] * 2, [position - 0.4, position + 0.4], color="#b42318", linestyle="--")
    ax.set(
        yticks=range(len(evaluation.devices)), yticklabels=list(evaluation.devices), xlabel="memory", ylim=(-0.6, None)
    )
    ax.set_title(f"{problem.name}: memory of one worker, limits dashed")
    _ticks(ax.xaxis, format_memory)
    _legend(figure, legend)
    return figure
