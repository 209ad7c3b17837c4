"""Every method for serving plans on problems in the shapes of real models; writes one record per case and method.

    python benchmarks/serving_solvers.py                     # writes benchmarks/results/serving-solvers.json
    python benchmarks/serving_solvers.py --quick --output /tmp/smoke.json

``seconds`` is the median wall time of some solves of the same problem, ``cpu_seconds`` the least processor time.
``best_bound`` of a case is the highest bound that any method proved; ``load_average`` says how busy the machine was.
Costs are rooflines of data-sheet rates and harms are drawn: what is compared are methods, not machines.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

from serving_cases import case

import qsync_opt
from qsync_opt.errors import QSyncError
from qsync_opt.io import write_json
from qsync_opt.registry import Kind, entries
from qsync_opt.serving import Problem

FORMAT = "qsync-bench-serving-solvers/1"
# Layers, devices, schemes; how many seeds.
SIZES = (("small", (4, 3, 3), 4), ("80 x 4", (80, 4, 4), 4), ("32 x 4", (32, 4, 3), 2), ("80 x 8", (80, 8, 4), 1))
ILP_SIZES = ("small", "32 x 4")
LINEAR = ("highs", "scip", "pulp")


def measure(problem: Problem, method: str, solver: str | None, limit_s: float, repeats: int) -> dict[str, Any]:
    """Solve some times; what was found last, and how long it took."""
    wall, cpu, solution = [], [], None
    for _ in range(repeats):
        began, used = time.perf_counter(), time.process_time()
        try:
            solution = qsync_opt.solve(problem, method, solver=solver, time_limit_s=limit_s)
        except QSyncError as failure:
            return {"method": method, "solver": solver, "failure": str(failure)}
        wall.append(time.perf_counter() - began)
        cpu.append(time.process_time() - used)
    assert solution is not None
    return {
        "method": method,
        "solver": solution.solver,
        "termination": str(solution.termination),
        "objective_ns": solution.objective,
        "bound_ns": solution.bound,
        "gap": solution.gap,
        "seconds": round(statistics.median(wall), 4),
        "cpu_seconds": round(min(cpu), 4),
        "stages": [[s.device, len(s.groups)] for s in solution.plan.stages] if solution.plan else None,
    }


def subjects(size: str) -> list[tuple[str, str | None, int]]:
    """Method, solver and repeats of a size."""
    result: list[tuple[str, str | None, int]] = [("chain", None, 5), ("exact", None, 1)]
    if size != "80 x 8":
        result.append(("llm-pq", None, 1))
    if size in ILP_SIZES:
        available = entries(Kind.SOLVER)
        result += [("ilp", name, 1) for name in LINEAR if name in available and available[name].available]
    return result


def main() -> None:
    """Run all sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default=str(Path(__file__).parent / "results" / "serving-solvers.json"))
    parser.add_argument("--time-limit", type=float, default=30.0)
    parser.add_argument("--sizes", nargs="*", default=[name for name, _, _ in SIZES])
    parser.add_argument("--quick", action="store_true", help="one seed a size, two seconds a solve")
    options = parser.parse_args()
    limit_s = 2.0 if options.quick else options.time_limit
    records = []
    for size, shape, seeds in SIZES:
        if size not in options.sizes:
            continue
        for seed in range(1 if options.quick else seeds):
            problem = case(*shape, seed=seed, tightness=0.25 if seed % 2 else 0.6)
            results = [measure(problem, *subject[:2], limit_s, subject[2]) for subject in subjects(size)]
            bound = max((r["bound_ns"] for r in results if r.get("bound_ns")), default=None)
            records.append({"size": size, "seed": seed, "best_bound_ns": bound, "results": results})
            for r in results:
                above = r["objective_ns"] / bound - 1 if bound and r.get("objective_ns") else float("nan")
                print(
                    f"{size:8} seed {seed}  {r['method']:7} {r['solver'] or '':24} "
                    f"{r.get('seconds', float('nan')):8.3f} s {r.get('cpu_seconds', float('nan')):8.3f} s cpu  "
                    f"{above:8.3%} above the best bound  {r.get('termination', r.get('failure'))}",
                    flush=True,
                )
    write_json(
        options.output,
        {
            "format": FORMAT,
            "date": datetime.date.today().isoformat(),
            "machine": platform.processor() or platform.machine(),
            "python": platform.python_version(),
            "time_limit_s": limit_s,
            "load_average": [round(value, 2) for value in os.getloadavg()],
            "records": records,
        },
    )


if __name__ == "__main__":
    main()
