"""Plots of the page on the indicator's truth, as SVG in two themes, from ``benchmarks/results/quality.json``.

All are rows of dots on one axis, with the asked-for range as a band.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from picture import text
from quality_records import MEASURES, PARTS, harm_record, operator_records, plan_records, train_records

THEMES: Mapping[str, Mapping[str, str]] = {
    "light": {"ground": "#ffffff", "ink": "#1f2328", "grid": "#d8dce2", "band": "#e3efe5"},
    "dark": {"ground": "#1b1d23", "ink": "#e6e8ec", "grid": "#3a3f49", "band": "#23382a"},
}
COLOURS: Mapping[str, Sequence[str]] = {
    "light": ("#2f6ea8", "#b3400f", "#2b7a3d"),
    "dark": ("#8fbce6", "#f5a25d", "#86cf96"),
}
LEFT, ROW, TOP, WIDTH = 390, 26, 74, 940


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Where values lie: ends, ticks, whether logarithmic, and the range that was asked for."""

    low: float
    high: float
    ticks: Sequence[float]
    band: tuple[float, float] | None = None
    log: bool = False

    def place(self, value: float) -> float:
        """Pixels from the left; values beyond the ends stand at the ends."""
        value = min(max(value, self.low), self.high)
        low, high, at = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return LEFT + (at - low) / (high - low) * (WIDTH - LEFT - 30)


Row = tuple[str, Sequence[tuple[float, int, float]]]
"""Label, and per dot its value, its kind, and half the length of its error bar."""


def dots(theme: str, title: str, rows: Sequence[Row], kinds: Sequence[str], axis: Axis) -> str:
    """The SVG text of one plot."""
    look, colours = THEMES[theme], COLOURS[theme]
    ink, bottom = look["ink"], TOP + ROW * len(rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 34}" width="{WIDTH}" '
        f'height="{bottom + 34}" font-family="system-ui, sans-serif" role="img" aria-labelledby="title">',
        f'<title id="title">{escape(title)}</title>',
        f'<rect width="{WIDTH}" height="{bottom + 34}" rx="8" fill="{look["ground"]}"/>',
        text(20, 28, title, 16, ink, weight="600"),
    ]
    if axis.band:
        begin, end = map(axis.place, axis.band)
        parts.append(
            f'<rect x="{begin:.1f}" y="{TOP - 6}" width="{end - begin:.1f}" height="{bottom - TOP + 6}" '
            f'fill="{look["band"]}"/>'
        )
    for tick in axis.ticks:
        x = axis.place(tick)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 6}" y2="{bottom}" stroke="{look["grid"]}"/>')
        parts.append(text(round(x), bottom + 18, f"{tick:g}", 12, ink, anchor="middle"))
    for i, kind in enumerate(kinds):
        x = LEFT + 170 * i
        parts.append(f'<circle cx="{x}" cy="50" r="5" fill="{colours[i]}"/>')
        parts.append(text(x + 10, 54, kind, 13, ink))
    for number, (label, points) in enumerate(rows):
        y = TOP + ROW * number + ROW // 2
        parts.append(text(LEFT - 14, y + 4, label, 12, ink, anchor="end"))
        for value, kind, error in points:
            x, colour = axis.place(value), colours[kind]
            height = y + (kind - (len(kinds) - 1) / 2) * 6
            if error:
                ends = [axis.place(value - error), axis.place(value + error)]
                parts.append(
                    f'<line x1="{ends[0]:.1f}" x2="{ends[1]:.1f}" y1="{height:.1f}" y2="{height:.1f}" '
                    f'stroke="{colour}" stroke-width="2"/>'
                )
            parts.append(
                f'<circle cx="{x:.1f}" cy="{height:.1f}" r="{4 if error or len(points) < 20 else 2.6}" '
                f'fill="{colour}" fill-opacity="0.75"/>'
            )
    return "\n".join([*parts, "</svg>", ""])


def _operators(data: Mapping[str, Any], theme: str) -> str:
    rows = []
    for record in operator_records(data):
        points = [
            (ratios[part], kind, 0.0)
            for ratios in record["ratios"].values()
            for kind, part in enumerate(PARTS)
            if part in ratios
        ]
        rows.append((f"{record['label']}, {record['case']}", points))
    axis = Axis(low=0.02, high=5, ticks=(0.02, 0.1, 0.5, 1, 2, 5), band=(0.9, 1.1), log=True)
    title = "Predicted over measured variance, a dot per operator and result"
    return dots(theme, title, rows, [part.replace("_", " ") for part in PARTS], axis)


def _ranks(data: Mapping[str, Any], theme: str) -> str:
    record = harm_record(data)
    rows = [
        (
            kind,
            [
                (record[m]["spearman"][kind], i, record[m].get("spearman_error", {}).get(kind) or 0.0)
                for i, m in enumerate(MEASURES)
            ],
        )
        for kind in record["indicators"]
        if all(record[m]["spearman"][kind] is not None for m in MEASURES)
    ]
    axis = Axis(low=-0.6, high=1, ticks=(-0.5, 0, 0.5, 0.8, 1), band=(0.8, 1))
    title = "Rank correlation of indicators with three measures of harm, one operator in INT8; one standard error"
    return dots(theme, title, rows, list(MEASURES.values()), axis)


def _plans(data: Mapping[str, Any], theme: str) -> str:
    rows = [
        (f"{record['model']}, {row['plan']}", [(row["ratios"][kind], i, 0.0) for i, kind in enumerate(kinds)])
        for record in plan_records(data)
        for kinds in [("probed", "propagated")]
        for row in record["plans"]
    ]
    axis = Axis(low=0.05, high=3, ticks=(0.05, 0.1, 0.25, 0.5, 1, 2), band=(0.75, 1.25), log=True)
    title = "Whole plans: predicted over measured increase of the gradient's variance"
    return dots(theme, title, rows, ["probed", "propagated"], axis)


def _training(data: Mapping[str, Any], theme: str) -> str:
    rows: list[Row] = []
    for record in train_records(data):
        setting = record["chosen"]
        policies = record["summary"][setting]
        gap = policies["uniform INT8"]["worse_than_full"]
        for policy in ("uniform BF16", *record["plans"], "uniform INT8"):
            found = policies[policy]
            error = (found["worse_than_full_error"] or 0.0) / gap
            rows.append((f"{record['model']}, {policy}", [(found["worse_than_full"] / gap, 0, error)]))
    axis = Axis(low=-0.25, high=1.25, ticks=(-0.25, 0, 0.25, 0.5, 0.75, 1, 1.25), band=(-0.25, 0.5))
    title = "Trained: worse than full precision, as a share of what uniform INT8 loses; one standard error"
    return dots(theme, title, rows, ["mean over seeds"], axis)


PLOTS = {"operators": _operators, "ranks": _ranks, "plans": _plans, "training": _training}
"""Name to what draws it."""


def quality_plots(data: Mapping[str, Any]) -> dict[str, str]:
    """File name to SVG text, for both themes."""
    return {f"quality-{name}-{theme}.svg": draw(data, theme) for name, draw in PLOTS.items() for theme in THEMES}
