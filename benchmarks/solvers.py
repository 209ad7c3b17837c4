"""How near, how sure and how fast are the solvers? Writes results/solvers.json and two plots beside it.

Run: python -P benchmarks/solvers.py [--smoke] [--sizes 200,1000] [--seeds 3] [--general-limit 20]
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from families import Recipe, generate

from qsync_opt import evaluate, solve
from qsync_opt.formulations.front import latency_front
from qsync_opt.plan import Plan
from qsync_opt.propagation import ladder

RESULTS = Path(__file__).parent / "results"
FAMILIES = ("cnn", "encoder", "decoder", "moe")
CONFIGURATIONS: tuple[dict[str, Any], ...] = (
    {},
    {"memory": None},
    {"formats": 4, "latency": 0.5},
    {"copies": True, "latency": 0.5, "memory": 0.5},
    {"formats": 2},
)
EXACT_LIMIT_S = {50: 10.0, 200: 10.0, 1000: 15.0, 5000: 5.0, 20000: 20.0}
GENERAL = ("ortools", "scip", "pulp", "cp-sat")
GENERAL_UP_TO = 200


def timed(problem: Any, method: str, **options: Any) -> dict[str, Any]:
    """One solve: what it claims, and the wall time around it."""
    started = time.perf_counter()
    solution = solve(problem, method, **options)
    return {
        "objective": solution.objective,
        "bound": solution.bound,
        "gap": solution.gap,
        "termination": solution.termination.value,
        "seconds": solution.build_seconds + solution.solve_seconds,
        "wall_seconds": time.perf_counter() - started,
    }


def lowest(problem: Any) -> float:
    """Sensitivity of all lowest precisions: the range that errors are also measured in."""
    devices = {d.name: {o.name: ladder(problem, d, o.name)[0] for o in problem.adjustable} for d in problem.devices}
    return evaluate(problem, Plan(problem=problem.name, devices=devices)).objective


def run_case(recipe: Recipe, general_limit_s: float) -> dict[str, Any]:
    """All methods on one problem."""
    problem = generate(recipe)
    size = recipe.operators
    runs = {"greedy": timed(problem, "greedy")}
    runs["exact"] = timed(problem, "exact", time_limit_s=EXACT_LIMIT_S[size])
    if size <= 1000:
        runs["qsync"] = timed(problem, "qsync", time_limit_s=general_limit_s)
    for solver in GENERAL if size <= GENERAL_UP_TO else ("ortools",) if size == 1000 else ():
        runs[f"ilp-{solver}"] = timed(problem, "ilp", solver=solver, time_limit_s=general_limit_s)
    return {
        "name": recipe.name, "family": recipe.family, "operators": len(problem.adjustable), "size": size,
        "formats": recipe.formats, "seed": recipe.seed, "lowest": lowest(problem), "runs": runs,
    }  # fmt: skip


def quantiles(values: list[float]) -> dict[str, float] | None:
    """Median, 95th percentile and worst."""
    if not values:
        return None
    return {
        "median": float(np.median(values)), "p95": float(np.quantile(values, 0.95)), "worst": max(values),
        "count": len(values),
    }  # fmt: skip


def summarise(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """The table: errors against proved optima, printed gaps, times, and shares proved, by size and method."""
    table: dict[str, Any] = {}
    for size in sorted({case["size"] for case in cases}):
        own = [case for case in cases if case["size"] == size]
        for method in sorted({name for case in own for name in case["runs"]}):
            have = [(case, case["runs"][method]) for case in own if method in case["runs"]]
            errors, shares = [], []
            for case, run in have:
                best = max((r["bound"] for r in case["runs"].values() if r["bound"] is not None), default=None)
                proved = [r["objective"] for r in case["runs"].values() if r["termination"] == "optimal"]
                if proved and run["objective"] is not None:
                    errors.append(max(0.0, run["objective"] / min(proved) - 1))
                    shares.append(max(0.0, (run["objective"] - min(proved)) / (case["lowest"] - min(proved))))
                elif best and run["objective"] is not None:
                    errors.append(max(0.0, run["objective"] / best - 1))
            table[f"{size} {method}"] = {
                "error": quantiles(errors),
                "error_share_of_range": quantiles(shares),
                "printed_gap": quantiles([run["gap"] for _, run in have if run["gap"] is not None]),
                "seconds": quantiles([run["seconds"] for _, run in have]),
                "optimal": sum(run["termination"] == "optimal" for _, run in have),
                "no_plan": sum(run["objective"] is None for _, run in have),
                "cases": len(have),
            }
    return table


def comparisons(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """How many times faster `exact` is than the fastest general solver, and how `greedy` grows."""
    result: dict[str, Any] = {}
    for size in sorted({case["size"] for case in cases}):
        ratios = []
        for case in (c for c in cases if c["size"] == size):
            general = [r["seconds"] for name, r in case["runs"].items() if name.startswith("ilp-")]
            if general:
                ratios.append(min(general) / case["runs"]["exact"]["seconds"])
        if ratios:
            result[f"exact_speedup_{size}"] = statistics.geometric_mean(ratios)
    points = [(case["operators"], case["runs"]["greedy"]["seconds"]) for case in cases]
    slope, intercept = np.polyfit(*np.log(np.array(points)).T, 1)
    result["greedy_growth_exponent"], result["greedy_growth_constant"] = float(slope), math.exp(float(intercept))
    return result


def front(size: int) -> dict[str, Any]:
    """Fifty points of a front against one solve."""
    problem = generate(Recipe(family="decoder", operators=size))
    one = timed(problem, "greedy")["seconds"]
    started = time.perf_counter()
    points = latency_front(problem, points=50)
    seconds = time.perf_counter() - started
    return {"size": size, "solve_seconds": one, "front_seconds": seconds, "points": len(points), "ratio": seconds / one}


def plot(cases: list[dict[str, Any]], path: Path, *, by_size: bool) -> None:
    """An SVG scatter plot on logarithmic axes, written by hand: one mark per run."""
    colours = {"greedy": "#1f77b4", "exact": "#2ca02c", "qsync": "#d62728", "ilp-ortools": "#9467bd",
               "ilp-scip": "#8c564b", "ilp-pulp": "#e377c2", "ilp-cp-sat": "#7f7f7f"}  # fmt: skip
    marks = []
    for case in cases:
        for method, run in case["runs"].items():
            if by_size:
                marks.append((method, case["operators"], run["seconds"]))
            elif run["gap"] is not None:
                marks.append((method, run["seconds"], max(run["gap"], 1e-9)))
    logs = np.log10([[x, max(y, 1e-9)] for _, x, y in marks])
    low, high = np.floor(logs.min(axis=0)), np.ceil(logs.max(axis=0))
    span = np.maximum(high - low, 1)
    body = []
    for axis, label in enumerate(("operators", "seconds") if by_size else ("seconds", "relative gap")):
        for power in range(int(low[axis]), int(high[axis]) + 1):
            at = (power - low[axis]) / span[axis]
            x, y = (70 + 500 * at, 395) if axis == 0 else (30, 370 - 340 * at)
            body.append(f'<text x="{x:.0f}" y="{y:.0f}" font-size="11">1e{power}</text>')
        x, y = (300, 420) if axis == 0 else (5, 15)
        body.append(f'<text x="{x}" y="{y}" font-size="12">{label}</text>')
    for (method, _, _), (x, y) in zip(marks, (logs - low) / span, strict=True):
        body.append(f'<circle cx="{70 + 500 * x:.1f}" cy="{370 - 340 * y:.1f}" r="3" fill="{colours[method]}"/>')
    for row, (method, colour) in enumerate(colours.items()):
        body.append(f'<text x="590" y="{40 + 18 * row}" font-size="12" fill="{colour}">{method}</text>')
    frame = '<rect x="70" y="30" width="500" height="340" fill="none" stroke="black"/>'
    head = '<svg xmlns="http://www.w3.org/2000/svg" width="700" height="430" font-family="sans-serif">'
    path.write_text("\n".join([head, frame, *body, "</svg>", ""]))


def environment() -> dict[str, Any]:
    """Hardware, versions and the command."""
    versions = {}
    for package in ("numpy", "ortools", "pulp", "qsync-opt"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    cpus = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": cpus[0].split(":")[1].strip() if cpus else platform.processor(), "cores": len(cpus),
        "python": platform.python_version(), "versions": versions, "command": ["benchmarks/solvers.py", *sys.argv[1:]],
    }  # fmt: skip


def main() -> None:
    """Run all cases and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="one small case, nothing written")
    parser.add_argument("--sizes", default="50,200,1000,5000,20000")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--general-limit", type=float, default=20.0)
    options = parser.parse_args()
    if options.smoke:
        print(json.dumps(run_case(Recipe(family="decoder", operators=50), 5.0)))
        return
    cases = []
    for size in map(int, options.sizes.split(",")):
        for family in FAMILIES:
            for seed in range(options.seeds):
                for number, extra in enumerate(CONFIGURATIONS):
                    # Each seed takes one configuration (small sizes two), different ones each time.
                    turn = (number - seed - FAMILIES.index(family)) % len(CONFIGURATIONS)
                    if turn >= (2 if size <= 200 else 1):
                        continue
                    case = run_case(Recipe(family=family, operators=size, seed=seed, **extra), options.general_limit)
                    cases.append(case)
                    print(case["name"], {m: (round(r["seconds"], 3), r["gap"]) for m, r in case["runs"].items()})
    RESULTS.mkdir(exist_ok=True)
    data = {
        "environment": environment(), "summary": summarise(cases), "comparisons": comparisons(cases),
        "front": front(1000), "cases": cases,
    }  # fmt: skip
    (RESULTS / "solvers.json").write_text(json.dumps(data, indent=1) + "\n")
    plot(cases, RESULTS / "solvers-gap-time.svg", by_size=False)
    plot(cases, RESULTS / "solvers-time-size.svg", by_size=True)


if __name__ == "__main__":
    main()
