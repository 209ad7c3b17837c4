"""Plots of the solver benchmark: gap against time, time against size, growth of ``greedy``. Reproducible SVG."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from solvers_summary import WIDE, References, merged_cases

mpl.use("svg")
import matplotlib.pyplot as plt

STYLES = {
    "greedy": ("#0072b2", "o"), "exact": ("#009e73", "s"), "qsync": ("#d55e00", "v"), "ratio": ("#e69f00", "^"),
    "lp-rounding": ("#cc79a7", "D"), "HiGHS": ("#56b4e9", "P"), "SCIP": ("#8c6d31", "X"), "CBC": ("#7f7f7f", "*"),
    "CP-SAT": ("#000000", "<"),
}  # fmt: skip
"""Colour (told apart by colour-blind readers too) and marker, so that grey prints can be read."""
FLOOR = 1e-6
"""Gaps below are drawn here: this is where a proof ends."""
_LOOK = {
    "svg.hashsalt": "qsync-opt",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.edgecolor": "#555555",
    "figure.facecolor": "white",
    "legend.frameon": False,
}

Record = dict[str, Any]


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None}, bbox_inches="tight")
    plt.close(figure)
    # matplotlib ends lines with spaces, which editors and hooks would remove.
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


def _legend(axes: Any, methods: list[str]) -> None:
    handles = [
        mpl.lines.Line2D([], [], color=STYLES[m][0], marker=STYLES[m][1], linestyle="", label=m) for m in methods
    ]
    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.01, 0.5))


def _mark_sizes(axes: Any, sizes: set[int]) -> None:
    """Ticks where problems are."""
    axes.set_xticks(sorted(sizes), [f"{size:,}" for size in sorted(sizes)])
    axes.set_xticks([], minor=True)


def gap_against_time(records: list[Record], references: References, path: Path) -> None:
    """Error against the best known, by size: small marks for problems, large ones for medians."""
    sizes = sorted({record["size"] for record in records if record["size"] >= 200}) or [records[0]["size"]]
    figure, panels = plt.subplots(1, len(sizes), figsize=(3.2 * len(sizes), 3.4), sharey=True, squeeze=False)
    for axes, size in zip(panels[0], sizes, strict=True):
        for method, (colour, marker) in STYLES.items():
            points = []
            for record in records:
                run = record["runs"].get(method)
                if record["size"] == size and run:
                    error, _ = references.error(record, run)
                    if error is not None:
                        points.append((run["wall_s"], max(error, FLOOR)))
            if points:
                axes.loglog(*zip(*points, strict=True), marker, color=colour, markersize=3, alpha=0.45, mew=0)
                middle = [statistics.median(values) for values in zip(*points, strict=True)]
                axes.loglog(*middle, marker, color=colour, markersize=9, mec="white")
        axes.set_title(f"{size:,} operators", fontsize=9)
        axes.set_xlabel("time, s (wall, one core)")
    panels[0][0].set_ylabel("gap to the best proved optimum or bound\n(relative; 1e-6: proved equal)")
    _legend(panels[0][-1], [m for m in STYLES if any(m in record["runs"] for record in records)])
    _save(figure, path)


def time_against_size(quality: list[Record], beside: list[Record], path: Path) -> None:
    """Medians of the times by size, over runs that a limit may have ended."""
    figure, axes = plt.subplots(figsize=(6.2, 3.8))
    shown = []
    for method, (colour, marker) in STYLES.items():
        source = quality if method in ("greedy", "exact") else beside
        by_size: dict[int, list[Record]] = {}
        for record in source:
            if method in record["runs"]:
                by_size.setdefault(record["size"], []).append(record["runs"][method])
        if not by_size:
            continue
        shown.append(method)
        sizes = sorted(by_size)
        medians = [statistics.median(run["wall_s"] for run in by_size[size]) for size in sizes]
        axes.loglog(sizes, medians, marker=marker, color=colour, markersize=6, linewidth=1.2)
        lows = [np.quantile([run["wall_s"] for run in by_size[size]], 0.1) for size in sizes]
        highs = [np.quantile([run["wall_s"] for run in by_size[size]], 0.9) for size in sizes]
        axes.fill_between(sizes, lows, highs, color=colour, alpha=0.08, linewidth=0)
    axes.axhline(60, color="#999999", linewidth=0.8, linestyle=":")
    text = "limit of general solvers from 1,000 operators"
    axes.text(0.02, 63, text, fontsize=7, color="#666666", transform=axes.get_yaxis_transform())
    _mark_sizes(axes, {record["size"] for record in (*quality, *beside)})
    axes.set_xlabel("adjustable operators")
    axes.set_ylabel("time, s (wall, one core)\nmedian, and 10th to 90th percentile")
    _legend(axes, shown)
    _save(figure, path)


def growth(records: list[Record], fit: Record, path: Path) -> None:
    """Every solve by `greedy`, by family, and the fitted power."""
    figure, axes = plt.subplots(figsize=(6.2, 3.6))
    families = sorted({record["family"] for record in records})
    colours = [colour for colour, _ in STYLES.values()]
    for number, family in enumerate(families):
        points = [
            (r["operators"], r["runs"]["greedy"]["wall_s"])
            for r in records
            if r["family"] == family and "greedy" in r["runs"]
        ]
        marker = list(STYLES.values())[number % len(STYLES)][1]
        axes.loglog(
            *zip(*points, strict=True), marker, color=colours[number % len(colours)], markersize=4, alpha=0.6, mew=0,
            label=family.replace("_", "-"),
        )  # fmt: skip
    sizes = np.array([min(r["operators"] for r in records), max(r["operators"] for r in records)], float)
    for label, name, style in (("all", "all sizes", "-"), ("from_1000", "from 1,000", "--")):
        if fit[label]:
            power = fit[label]["exponent"]
            span = sizes if label == "all" else np.array([900.0, sizes[1]])
            text = f"{name}: operators to the power {power:.2f}"
            axes.loglog(span, fit[label]["seconds_at_1"] * span**power, style, color="#333333", lw=1, label=text)
    axes.set_xlabel("adjustable operators")
    axes.set_ylabel("time of greedy, s (wall, one core)")
    axes.legend(loc="upper left", fontsize=7)
    _mark_sizes(axes, {record["size"] for record in records})
    _save(figure, path)


def write_plots(data: Record, folder: Path, stem: str) -> None:
    """Write the plots that the sections at hand allow."""
    sections = data["sections"]
    references = References(sections)
    quality = [record for record in merged_cases(sections, "quality") if record["family"] not in WIDE]
    beside = merged_cases(sections, "baselines", "general")
    with mpl.rc_context(_LOOK):
        if beside:
            gap_against_time(beside, references, folder / f"{stem}-gap-time.svg")
        if quality or beside:
            time_against_size(quality, beside, folder / f"{stem}-time-size.svg")
        if data["report"]["growth"]:
            growth(quality, data["report"]["growth"], folder / f"{stem}-growth.svg")
