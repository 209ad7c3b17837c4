"""What the measurements say: quantiles by size and method, growth, ratios, and each requirement with its figure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from solvers_asked import EXACT_ASKED, GREEDY_ASKED_S, requirements

SAME = 1e-6
"""Largest relative difference between two optima that agree; `PROOF` of the package is the same."""
WIDE = ("encoder_decoder", "dense")
"""Families of larger treewidth, which are shown by themselves: no figure is asked of them but a correct answer."""
GENERAL = ("HiGHS", "SCIP", "CBC", "CP-SAT")

Record = dict[str, Any]


def quantiles(values: Iterable[float]) -> Record | None:
    """Median, 95th percentile, worst and number of values; None without any."""
    found = sorted(values)
    if not found:
        return None
    return {
        "median": float(np.median(found)),
        "p95": float(np.quantile(found, 0.95)),
        "worst": found[-1],
        "count": len(found),
    }


def cases(sections: Record, *names: str) -> Iterator[Record]:
    """Records of problems in some sections, the failed ones left out."""
    for name in names:
        for record in sections.get(name, {}).get("records", ()):
            if "runs" in record:
                yield record


def merged_cases(sections: Record, *names: str) -> list[Record]:
    """One record per problem with all its runs; of two runs of a method the later section's."""
    found: dict[str, Record] = {}
    for record in cases(sections, *names):
        known = found.setdefault(record["name"], {**record, "runs": {}})
        known["runs"].update(record["runs"])
    return list(found.values())


class References:
    """The best that any run knows of each problem."""

    def __init__(self, sections: Record) -> None:
        self.optima: dict[str, float] = {}
        self.bounds: dict[str, float] = {}
        self.disagreements: list[Record] = []
        records = list(cases(sections, "quality", "baselines", "general"))
        for record in records:
            name, known = record["name"], record.get("recorded_optimum")
            if known is not None:
                self.optima[name] = known
            for run in record["runs"].values():
                if run["termination"] == "optimal":
                    self.optima[name] = min(run["objective"], self.optima.get(name, math.inf))
                if run.get("bound") is not None:
                    self.bounds[name] = max(run["bound"], self.bounds.get(name, 0.0))
        for record in records:
            self._check(record)

    def _check(self, record: Record) -> None:
        optimum = self.optima.get(record["name"])
        if optimum is None:
            return
        slack = SAME * abs(optimum)
        for method, run in record["runs"].items():
            wrong = run["termination"] == "optimal" and run["objective"] > optimum + slack
            bound = run.get("bound")
            if wrong or (bound is not None and bound > optimum + slack):
                claims = {"termination": run["termination"], "objective": run.get("objective"), "bound": bound}
                self.disagreements.append({"name": record["name"], "method": method, "optimum": optimum, **claims})

    def error(self, record: Record, run: Record) -> tuple[float | None, bool]:
        """Relative error, and whether it is against a proved optimum (else against the best bound: at most that)."""
        objective = run.get("objective")
        best = self.optima.get(record["name"])
        proved = best is not None
        if best is None:
            best = self.bounds.get(record["name"])
        if objective is None or best is None:
            return None, proved
        if best <= 0.0:
            return (0.0 if objective <= 0.0 else None), proved
        return max(0.0, objective / best - 1), proved

    def share_of_range(self, record: Record, run: Record) -> float | None:
        """Excess over the best known, in units of what all lowest precisions have more than it."""
        best = self.optima.get(record["name"], self.bounds.get(record["name"]))
        if run.get("objective") is None or best is None or record["lowest"] <= best:
            return None
        return max(0.0, run["objective"] - best) / (record["lowest"] - best)


def method_row(own: list[Record], method: str, references: References) -> Record | None:
    """One method on some problems."""
    have = [(record, record["runs"][method]) for record in own if method in record["runs"]]
    if not have:
        return None
    errors = [references.error(record, run) for record, run in have]
    shares = [references.share_of_range(record, run) for record, run in have]
    gaps = [run["gap"] for _, run in have if run.get("gap") is not None]
    return {
        "cases": len(have),
        "error": quantiles(error for error, _ in errors if error is not None),
        "against_bound": sum(error is not None and not proved for error, proved in errors),
        "share_of_range": quantiles(share for share in shares if share is not None),
        "gap": quantiles(gaps),
        "gap_at_most_1_percent": sum(gap <= 0.01 for gap in gaps) / len(have),
        "wall_s": quantiles(run["wall_s"] for _, run in have),
        "cpu_s": quantiles(run["cpu_s"] for _, run in have),
        "inside_solver_s": quantiles(run["inside_solver_s"] for _, run in have if "inside_solver_s" in run),
        "proved": sum(run["termination"] == "optimal" for _, run in have),
        "no_plan": sum(run.get("objective") is None for _, run in have),
        "errors": sorted({run["error"] for _, run in have if "error" in run}),
    }


def by_size(records: list[Record], references: References) -> dict[str, Record]:
    """Rows ``"<size> <method>"``."""
    rows = {}
    for size in sorted({record["size"] for record in records}):
        own = [record for record in records if record["size"] == size]
        methods = dict.fromkeys(method for record in own for method in record["runs"])
        for method in methods:
            rows[f"{size} {method}"] = method_row(own, method, references)
    return {name: row for name, row in rows.items() if row is not None}


def proofs(records: list[Record]) -> dict[str, Record]:
    """By size: how many `exact` proved within what is asked, and what it left open."""
    result = {}
    for size, (share, seconds) in EXACT_ASKED.items():
        own = [record for record in records if record["size"] == size and "exact" in record["runs"]]
        if not own:
            continue
        runs = [(record["name"], record["runs"]["exact"]) for record in own]
        in_time = sum(run["termination"] == "optimal" and run["wall_s"] <= seconds for _, run in runs)
        result[str(size)] = {
            "cases": len(runs),
            "asked_share": share,
            "asked_s": seconds,
            "proved_in_time": in_time,
            "proved": sum(run["termination"] == "optimal" for _, run in runs),
            "wall_s": quantiles(run["wall_s"] for _, run in runs),
            "open": [
                {"name": name, "gap": run.get("gap"), "wall_s": round(run["wall_s"], 2)}
                for name, run in runs
                if run["termination"] != "optimal"
            ],
        }
    return result


def without_load(records: list[Record]) -> dict[str, Record]:
    """By size: times divided by how much slower the fixed piece of work was than at its quickest; estimates."""
    turns = ("probe_before_s", "probe_after_s")
    least = min((record[turn] for record in records for turn in turns if turn in record), default=None)
    result = {}
    for size, asked_s in GREEDY_ASKED_S.items():
        own = [r for r in records if r["size"] == size and all(turn in r for turn in turns) and "exact" in r["runs"]]
        if least is None or not own:
            continue
        slower = [sum(r[turn] for turn in turns) / 2 / least for r in own]
        exact_s = EXACT_ASKED[size][1]
        result[str(size)] = {
            "slower": statistics.median(slower),
            "greedy_s": statistics.median(
                r["runs"]["greedy"]["wall_s"] / share for r, share in zip(own, slower, strict=True)
            ),
            "greedy_asked_s": asked_s,
            "exact_in_time": sum(
                r["runs"]["exact"]["termination"] == "optimal" and r["runs"]["exact"]["wall_s"] / share <= exact_s
                for r, share in zip(own, slower, strict=True)
            ),
            "exact_asked_s": exact_s,
            "cases": len(own),
        }
    return result


def growth(records: list[Record]) -> Record | None:
    """Exponent of the time of `greedy` in the number of adjustable operators, by least squares of logarithms."""
    points = [
        (record["operators"], record["runs"]["greedy"]["wall_s"]) for record in records if "greedy" in record["runs"]
    ]
    large = [(n, seconds) for n, seconds in points if n >= 900]

    def fit(chosen: list[tuple[int, float]]) -> Record | None:
        if len({n for n, _ in chosen}) < 2:
            return None
        slope, intercept = np.polyfit(*np.log(np.array(chosen)).T, 1)
        return {"exponent": float(slope), "seconds_at_1": math.exp(float(intercept)), "points": len(chosen)}

    everything = fit(points)
    return None if everything is None else {"all": everything, "from_1000": fit(large)}


def speedup(records: list[Record], size: int, limit_s: float) -> Record | None:
    """How many times faster `exact` is, in geometric mean; whoever has no proof counts as the limit.

    ``best`` takes the fastest general solver of each problem; ``by_solver`` one solver throughout; ``inside`` counts
    only the time within the solver, without building, for the fastest of each problem. A censored time makes every
    such figure a lower bound.
    """

    def seconds(run: Record, key: str = "wall_s") -> float:
        return min(run[key], limit_s) if run["termination"] == "optimal" else limit_s

    best, inside, by_solver, censored = [], [], {name: [] for name in GENERAL}, 0
    for record in records:
        runs = {name: run for name, run in record["runs"].items() if name in GENERAL and "wall_s" in run}
        if record["size"] != size or "exact" not in record["runs"] or not runs:
            continue
        own = seconds(record["runs"]["exact"])
        for name, run in runs.items():
            by_solver[name].append(seconds(run) / own)
        best.append(min(map(seconds, runs.values())) / own)
        inside.append(min(seconds(run, "inside_solver_s") for run in runs.values() if "inside_solver_s" in run) / own)
        censored += all(run["termination"] != "optimal" for run in runs.values())
    if not best:
        return None
    return {
        "cases": len(best),
        "limit_s": limit_s,
        "best": statistics.geometric_mean(best),
        "inside": statistics.geometric_mean(inside),
        "by_solver": {
            name: {"ratio": statistics.geometric_mean(ratios), "cases": len(ratios)}
            for name, ratios in by_solver.items()
            if ratios
        },
        "no_general_solver_proved": censored,
    }


def fronts(sections: Record) -> Record | None:
    """Fifty points and a re-solve against one solve: near (greedy), near and kept (thorough), proved (exact)."""
    result: Record = {}
    for method in ("greedy", "thorough", "exact"):
        records = [r for r in sections.get("front", {}).get("records", ()) if r.get("method") == method]
        if records:
            result[method] = {
                "cases": len(records),
                "solve_s": quantiles(record["solve"]["wall_s"] for record in records),
                "front_s": quantiles(record["front"]["wall_s"] for record in records),
                "ratio": quantiles(record["ratio_wall"] for record in records),
                "resolve_ratio": quantiles(record["resolve"]["ratio_wall"] for record in records),
                "worst_gap": max(record["worst_gap"] or 0.0 for record in records),
                "within_gap": quantiles(
                    record["within_gap"] for record in records if record.get("within_gap") is not None
                ),
                "points": quantiles(record["points"] for record in records),
            }
    return result or None


def agreement(sections: Record) -> Record | None:
    """Random problems on which all exact ways were compared."""
    records = sections.get("agreement", {}).get("records", ())
    if not records:
        return None
    whole = [record for record in records if "failure" not in record]
    return {
        "problems": sum(record["count"] for record in whole),
        "feasible": sum(record["feasible"] for record in whole),
        "infeasible": sum(record["infeasible"] for record in whole),
        "disagreements": sum(len(record["disagreements"]) for record in whole),
        "failed_batches": len(records) - len(whole),
    }


def analyse(sections: Record) -> Record:
    """Everything that the report shows."""
    references = References(sections)
    measured = merged_cases(sections, "quality")
    quality = [record for record in measured if record["family"] not in WIDE]
    wide = [record for record in measured if record["family"] in WIDE]
    beside = merged_cases(sections, "baselines", "general")
    memory = [r for r in sections.get("memory", {}).get("records", ()) if "peak_kib" in r]
    failures = [
        {"section": name, "title": record["job"]["title"], "failure": record["failure"]}
        for name, section in sections.items()
        for record in section["records"]
        if "failure" in record
    ]
    summary = {
        "quality": by_size(quality, references),
        "wide": by_size(wide, references),
        "all_sizes": method_row(quality, "greedy", references),
        "exact": proofs(quality),
        "growth": growth(quality),
        "without_load": without_load(quality),
        "beside": by_size(beside, references),
        "speedup": {str(size): speedup(beside, size, limit) for size, limit in ((200, 20.0), (1000, 60.0))},
        "front": fronts(sections),
        "memory_peak_kib": max((record["peak_kib"] for record in memory), default=None),
        "memory_operators": max((record["operators"] for record in memory), default=None),
        "agreement": agreement(sections),
        "disagreements": references.disagreements,
        "failures": failures,
    }
    return {"requirements": requirements(summary), **summary}


COMMAND_LINE = {"HiGHS": "ilp-ortools", "SCIP": "ilp-scip", "CBC": "ilp-pulp", "CP-SAT": "ilp-cp-sat"}
"""General solvers as method and solver of the command line."""


def flat(report: Record) -> Record:
    """``"<size> <method>"`` to the figures that are quoted most; proofs counted over all time that was given."""
    rows = {**report["beside"], **report["quality"]}
    table = {}
    for name in sorted(rows, key=lambda name: (int(name.split(" ")[0]), name)):
        row = rows[name]
        size, method = name.split(" ", 1)
        if row["error"] and row["share_of_range"]:
            table[f"{size} {COMMAND_LINE.get(method, method)}"] = {
                "error": row["error"],
                "error_share_of_range": row["share_of_range"],
                "printed_gap": row["gap"],
                "seconds": row["wall_s"],
                "optimal": row["proved"],
                "no_plan": row["no_plan"],
                "cases": row["cases"],
            }
    return table


def comparisons(report: Record) -> Record:
    """The ratios that are quoted most, as far as they were measured."""
    found: Record = {}
    for size, speed in report["speedup"].items():
        if speed:
            found[f"exact_speedup_{size}"] = speed["best"]
    if report["growth"]:
        found["greedy_growth_exponent"] = report["growth"]["all"]["exponent"]
        found["greedy_growth_constant"] = report["growth"]["all"]["seconds_at_1"]
    return found
