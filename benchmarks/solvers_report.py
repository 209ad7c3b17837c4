"""Tables (Markdown) and plots (SVG) of the solver benchmark, from its results file alone."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from solvers_plots import write_plots

Record = dict[str, Any]
_LOADED = 1.1
"""A core this much slower than at its quickest was shared."""


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _percent(value: float | None) -> str:
    if value is None:
        return "-"
    return "0 %" if value < 1e-12 else f"{100 * value:.2g} %" if value < 1 else f"{100 * value:,.0f} %"


def _three(found: Record | None, show: Any) -> str:
    """Median / 95th percentile / worst."""
    return "-" if found is None else " / ".join(show(found[key]) for key in ("median", "p95", "worst"))


def _table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> list[str]:
    titles = list(head)
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    return [*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows), ""]


def _requirements(summary: Record) -> list[str]:
    words = {True: "yes", False: "**no**", None: "-"}
    rows = [(r["what"], r["asked"], r["measured"], words[r["met"]]) for r in summary["requirements"]]
    return ["## Asked and measured", "", *_table(("What", "Asked", "Measured", "Met"), rows)]


def _without_load(summary: Record) -> list[str]:
    """Where other load slowed the cores: what the times would be without it, by the fixed piece of work."""
    found = {size: row for size, row in summary.get("without_load", {}).items() if row["slower"] > _LOADED}
    if not found:
        return []
    rows = [
        (
            f"{int(size):,}", f"{row['slower']:.2f}", _time(row["greedy_s"]), _time(row["greedy_asked_s"]),
            f"{row['exact_in_time']} of {row['cases']} within {row['exact_asked_s']:g} s",
        )
        for size, row in found.items()
    ]  # fmt: skip
    head = ("Operators", "Slower (median)", "`greedy`, median", "asked", "`exact` proved")
    text = (
        "Other load shared the hardware: the fixed piece of work was slower by this than at its quickest. With every "
        "time divided by its own slowdown, which is an estimate and counts for nothing above:"
    )
    return [text, "", *_table(head, rows)]


def _rows(found: Record) -> list[str]:
    """Errors, gaps and times by size and method."""
    rows = []
    for name, row in found.items():
        size, method = name.split(" ", 1)
        rows.append(
            (
                f"{int(size):,}", f"`{method}`", row["cases"], _three(row["error"], _percent), row["against_bound"],
                _three(row["share_of_range"], lambda v: f"{v:.1g}"), _three(row["gap"], _percent),
                _three(row["wall_s"], _time), _time((row["cpu_s"] or {}).get("median")),
                f"{row['proved']} of {row['cases']}",
            )
        )  # fmt: skip
    head = (
        "Operators", "Method", "Problems", "Error", "of it against a bound", "Error as a share of the range",
        "Own gap", "Time", "Median processor time", "Proved",
    )  # fmt: skip
    return _table(head, rows)


def _quality(summary: Record) -> list[str]:
    text = [
        "## Errors, gaps and times",
        "",
        "Each entry is median / 95th percentile / worst. Errors are relative to the best proved optimum; where "
        "none was proved, to the best proved bound, so that they are at most what is shown. The range is the "
        "sensitivity of all lowest precisions less the optimum. Times are of the whole call from a problem in memory: "
        "building, search, certificate and the independent evaluation of the plan.",
        "",
    ]
    wide = [
        "Graphs of larger treewidth (an encoder read by every layer of a decoder; dense concatenation), from which "
        "only a correct answer is asked:",
        "",
        *_rows(summary["wide"]),
    ]
    return [
        *text, *_rows(summary["quality"]), *_open(summary), *(wide if summary["wide"] else []), *_growth(summary),
    ]  # fmt: skip


def _open(summary: Record) -> list[str]:
    left = [(size, run) for size, row in summary["exact"].items() for run in row["open"]]
    if not left:
        return ["`exact` left no problem open.", ""]
    rows = [(f"{int(size):,}", f"`{run['name']}`", _percent(run["gap"]), _time(run["wall_s"])) for size, run in left]
    return ["Left open by `exact`:", "", *_table(("Operators", "Problem", "Gap", "Time"), rows)]


def _growth(summary: Record) -> list[str]:
    fit = summary["growth"]
    if fit is None:
        return []
    text = f"The time of `greedy` grows like operators to the power {fit['all']['exponent']:.2f} over all sizes"
    if fit["from_1000"]:
        text += f", {fit['from_1000']['exponent']:.2f} from 1,000 on"
    return [f"{text} (least squares of logarithms).", "", "![Growth](solvers-growth.svg)", ""]


def _beside(summary: Record) -> list[str]:
    if not summary["beside"]:
        return []
    rows = []
    for name, row in summary["beside"].items():
        size, method = name.split(" ", 1)
        rows.append(
            (
                f"{int(size):,}", method, row["cases"], _three(row["error"], _percent),
                _percent((row["gap"] or {}).get("median")), row["proved"], row["no_plan"],
                _three(row["wall_s"], _time), _time((row["inside_solver_s"] or {}).get("median")),
            )
        )  # fmt: skip
    head = (
        "Operators", "Method", "Problems", "Error", "Own gap (median)", "Proved", "No plan", "Time",
        "of it in the solver (median)",
    )  # fmt: skip
    text = [
        "## Beside it",
        "",
        "The same problems of three formats for all methods (the ladder of QSync's paper had no FP8). `qsync` is the "
        "paper's greedy; `ratio` raises by sensitivity per use of the slack, without prices; `lp-rounding` rounds the "
        "relaxation solved by GLOP, repairs and fills. General solvers get the compact formulation of `ilp`, a warm "
        "objective scale and a time limit of 20 s up to 200 operators and 60 s above; a run without proof keeps its "
        "best plan. All single-threaded on one core.",
        "",
    ]
    return [*text, *_table(head, rows), *_speedup(summary), "![Gap against time](solvers-gap-time.svg)", "",
            "![Time against size](solvers-time-size.svg)", ""]  # fmt: skip


def _speedup(summary: Record) -> list[str]:
    lines = []
    for size, found in summary["speedup"].items():
        if found is None:
            continue
        solvers = ", ".join(
            f"{name} {own['ratio']:.3g} ({own['cases']} problems)" for name, own in found["by_solver"].items()
        )
        lines.append(
            f"At {int(size):,} operators `exact` is at least {found['best']:.3g} times faster than the best general "
            f"solver of each problem (geometric mean over {found['cases']}; within the solver alone, without building: "
            f"{found['inside']:.3g}); by solver: {solvers}. Whoever had no proof within {found['limit_s']:g} s counts "
            f"as {found['limit_s']:g} s, so these are lower bounds: on {found['no_general_solver_proved']} problems no "
            "general solver had one."
        )
    return [line for text in lines for line in (text, "")]


def _front(summary: Record) -> list[str]:
    found = summary["front"]
    if found is None:
        return []
    rows = [
        (
            f"`{method}`", row["cases"], _three(row["solve_s"], _time), _three(row["front_s"], _time),
            _three(row["ratio"], lambda v: f"{v:.3g}"), _percent(row["worst_gap"]),
            _percent((row.get("within_gap") or {}).get("median")), _three(row["resolve_ratio"], lambda v: f"{v:.2g}"),
        )
        for method, row in found.items()
    ]  # fmt: skip
    head = (
        "Against",
        "Problems",
        "One solve",
        "50 points",
        "Ratio",
        "Worst gap of a point",
        "Points within the gap (median)",
        "Re-solve over first solve",
    )
    text = [
        "## Fronts",
        "",
        "Latency fronts: near (gap 1 %, the package's default, with a bounded search for each point) against one solve "
        "by `greedy`; the same, searched on as by `greedy` where a point misses the gap (`thorough`); and "
        "proved point by point against one by `exact`. "
        "A re-solve lowers the latency limit by 2 % and uses what the last one left. Entries are median / 95th "
        "percentile / worst.",
        "",
    ]
    return [*text, *_table(head, rows)]


def _checks(summary: Record) -> list[str]:
    lines = ["## Checks", ""]
    found = summary["agreement"]
    if found:
        lines.append(
            f"- {found['problems']:,} random problems of up to seven operators ({found['feasible']:,} feasible, "
            f"{found['infeasible']:,} infeasible), solved exhaustively, by `exact` (alone, with HiGHS, with CBC), by "
            f"`ilp` with HiGHS, SCIP and CBC, and by the textbook program: {found['disagreements']} disagreements."
        )
    lines += [
        f"- {wrong['method']} on `{wrong['name']}`: {wrong['termination']} {wrong['objective']!r}, bound "
        f"{wrong['bound']!r}, against the optimum {wrong['optimum']!r}."
        for wrong in summary["disagreements"]
    ]
    if not summary["disagreements"]:
        lines.append("- No proof contradicts another, and no bound is above a proved optimum, on any problem here.")
    lines += [
        f"- No outcome ({failed['section']}): {failed['title']}, {failed['failure'].splitlines()[-1]}."
        for failed in summary["failures"]
    ]
    for name, row in {**summary["wide"], **summary["quality"], **summary["beside"]}.items():
        lines += [f"- {name}: {error}" for error in row["errors"]]
    return [*lines, ""]


def _header(data: Record) -> list[str]:
    rows = []
    for name, section in data["sections"].items():
        e = section["environment"]
        versions = ", ".join(f"{package} {number}" for package, number in e["versions"].items() if number)
        if "compiled_loops" in e:
            versions += ", loops compiled" if e["compiled_loops"] else ", loops not compiled"
        rows.append(
            (
                name, e["date"][:16].replace("T", " "), _hardware(e),
                f"Python {e['python']}, {versions}", _revisions(section), f"`{' '.join(e['command'])}`",
                _time(e["seconds"]), _probe(e.get("probe_s")),
            )
        )  # fmt: skip
    head = ("Section", "Date (UTC)", "Hardware", "Versions", "Revision", "Command", "Took", "A fixed piece of work")
    note = (
        "The fixed piece of work is done before and after every measurement, on its core: least / median / most time. "
        "Where the median is far above the least, other load shared the hardware, and times here are too long by as "
        "much."
    )
    return ["# Solvers: measured", "", *_table(head, rows), note, ""]


def _hardware(e: Record) -> str:
    """The processor and how many of its cores measured at a time, one measurement on each."""
    found = f"{e['cpu']}, {e['cores_used']} of {e['cores']} cores"
    return f"{found}, in {e['runs']} runs that shared the work" if e.get("runs", 1) > 1 else found


def _revisions(section: Record) -> str:
    """The commit measured, and those of records that were measured once more."""
    again = collections.Counter(r["again"]["revision"] for r in section["records"] if "again" in r)
    parts = [f"{count} of {len(section['records'])} records at {revision}" for revision, count in again.items()]
    return "; ".join([str(section["environment"]["revision"]), *parts])


def _probe(found: Record | None) -> str:
    return "-" if found is None else " / ".join(_time(found[key]) for key in ("least_s", "median_s", "most_s"))


def markdown(data: Record, stem: str = "solvers") -> str:
    """The whole report of a results file as Markdown; ``stem`` begins the names of the plots."""
    summary = data["report"]
    parts = (_requirements, _without_load, _quality, _beside, _front, _checks)
    lines = [*_header(data), *(line for part in parts for line in part(summary))]
    return "\n".join(lines).rstrip().replace("](solvers-", f"]({stem}-") + "\n"


def write_report(data: Record, results: Path) -> None:
    """Write ``<results>.md`` and the plots beside a results file."""
    results.with_suffix(".md").write_text(markdown(data, results.stem))
    write_plots(data, results.parent, results.stem)
