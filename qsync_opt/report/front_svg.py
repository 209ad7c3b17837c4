"""A front as a picture that needs no library: one SVG file."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from qsync_opt.io.quantities import format_memory, format_sensitivity, format_time

if TYPE_CHECKING:
    from qsync_opt.training.pareto import Front

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
    """Draw a front: use from left to right, sensitivity upwards; points that break a limit are hollow.

    Args:
        front: The front; the problem's own limit on what is traded is a dashed line.

    Returns:
        The SVG document.

    Source: ours.
    """
    device, limit = front.device, front.limit
    uses, values = [point.use for point in front.points], [point.objective for point in front.points]
    low, high = _padded(min(uses, default=0), max(uses, default=1))
    top = max(values, default=0.0) * 1.05 or 1.0

    def x(use: float) -> float:
        return _LEFT + (use - low) / (high - low) * (_PLOT_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - value / top * (_HEIGHT - _TOP - _BOTTOM)

    form = format_time if device is None else format_memory
    label = "iteration time" if device is None else f"memory of {device}"
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
        corners += [(slower, value), (faster, value)]  # between two points the faster plan is the best there is
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
    """A range that a single value, too, lies within."""
    margin = (high - low) * 0.03 or max(1.0, math.fabs(high) * 0.05)
    return low - margin, high + margin
