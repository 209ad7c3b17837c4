"""What is asked of the solvers, each requirement with its measured figure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

EXACT_ASKED = {50: (1.0, 10.0), 200: (1.0, 10.0), 1000: (0.9, 2.0), 5000: (0.9, 5.0), 20000: (0.8, 30.0)}
"""By size: share of problems that must be proved, and within how many seconds."""
GREEDY_ASKED_S = {200: 0.05, 1000: 0.2, 5000: 1.0, 20000: 5.0}

Record = dict[str, Any]


def requirements(summary: Record) -> list[Record]:
    """Each requirement: what, asked, measured, met (None where it was not measured)."""
    return [row for part in (_near, _fast, _sure, _other) for row in part(summary)]


def _row(what: str, asked: str, measured: str | None, met: bool | None) -> Record:
    return {"what": what, "asked": asked, "measured": measured, "met": met if measured is not None else None}


def _near(summary: Record) -> Iterator[Record]:
    greedy = summary["all_sizes"]
    error = greedy and greedy["error"]
    if not error:
        return
    for key, word, limit in (("median", "median", 1e-3), ("p95", "95th percentile", 5e-3), ("worst", "worst", 3e-2)):
        measured = f"{100 * error[key]:.3g} %"
        yield _row(f"greedy: error, {word}", f"at most {100 * limit:g} %", measured, error[key] <= limit)
    share = greedy["gap_at_most_1_percent"]
    yield _row("greedy: own gap at most 1 %", "95 % of cases", f"{100 * share:.1f} %", share >= 0.95)
    if greedy["share_of_range"]:
        worst = greedy["share_of_range"]["worst"]
        yield _row("greedy: worst error as a share of the range", "to be stated", f"{worst:.2g}", True)


def _fast(summary: Record) -> Iterator[Record]:
    for size, limit in GREEDY_ASKED_S.items():
        row = summary["quality"].get(f"{size} greedy")
        if row:
            median = row["wall_s"]["median"]
            yield _row(f"greedy: median time at {size:,}", f"{limit:g} s", f"{median:.3g} s", median <= limit)
    fit = summary["growth"]
    if fit and fit["from_1000"]:
        exponent = fit["from_1000"]["exponent"]
        yield _row("greedy: exponent of growth from 1,000", "close to 1", f"{exponent:.2f}", exponent <= 1.15)
    peak = summary["memory_peak_kib"]
    if peak:
        what = f"greedy: peak memory at {summary['memory_operators']:,}"
        yield _row(what, "under 1 GiB", f"{peak / 2**20:.2f} GiB", peak < 2**20)


def _sure(summary: Record) -> Iterator[Record]:
    for size, row in summary["exact"].items():
        share = row["proved_in_time"] / row["cases"]
        asked = f"{100 * row['asked_share']:g} % within {row['asked_s']:g} s"
        measured = f"{row['proved_in_time']} of {row['cases']}"
        yield _row(f"exact: proved at {int(size):,}", asked, measured, share >= row["asked_share"])
        if size == "1000":
            worst = max((run["gap"] if run["gap"] is not None else math.inf for run in row["open"]), default=0.0)
            measured = f"{100 * worst:.2g} %, {len(row['open'])} open"
            yield _row("exact: gap of the rest at 1,000 after 15 s", "at most 0.2 %", measured, worst <= 2e-3)
    speed = summary["speedup"].get("1000")
    if speed:
        measured = f"at least {speed['best']:.3g}"
        what = "exact against the best general solver of each problem at 1,000"
        yield _row(what, "at least 20 times", measured, speed["best"] >= 20)


def _other(summary: Record) -> Iterator[Record]:
    found = summary["agreement"]
    if found:
        measured = f"{found['problems']:,} problems, {found['disagreements']} disagreements"
        met = found["problems"] >= 2000 and not found["disagreements"] and not found["failed_batches"]
        yield _row("same optimum every way", "2,000 problems, none", measured, met)
    front = summary["front"]
    for label in front or ():
        ratio = front[label]["ratio"]["median"]
        within = front[label]["within_gap"]
        measured = f"{ratio:.3g}" + (f" ({100 * within['median']:.0f} % of points within the gap)" if within else "")
        yield _row(f"front of 50 points over one solve ({label})", "under 10", measured, ratio < 10)
        if label == "thorough":
            continue  # its re-solve is that of greedy
        again = front[label]["resolve_ratio"]["median"]
        yield _row(f"re-solve over first solve ({label})", "at most 0.1", f"{again:.2g}", again <= 0.1)
