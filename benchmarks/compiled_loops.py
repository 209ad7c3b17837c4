"""What do compiled loops save? The same solves with and without them, in turn in one process.

Writes results/compiled-loops.json: seconds of both forms (medians), their ratio, and whether plans and bounds agree.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from families import Recipe, generate
from solvers import environment
from solvers_cases import FAMILIES

from qsync_opt import solve
from qsync_opt.formulations.assignment import compiled
from qsync_opt.training import Problem

RESULTS = Path(__file__).parent / "results" / "compiled-loops.json"
SIZES = (200, 1000, 5000)
TURNS = 3


def _solved(problem: Problem, method: str, switch: str) -> tuple[float, tuple[Any, ...]]:
    """Seconds of a solve with the loops compiled (1) or not (0), and what came out."""
    os.environ[compiled.SWITCH] = switch
    compiled.compiled_by.cache_clear()
    for loop in compiled.LOOPS:
        loop.forget()
    compiled.prepare()
    started = time.perf_counter()
    solution = solve(problem, method)
    seconds = time.perf_counter() - started
    return seconds, (solution.plan and solution.plan.devices, solution.objective, solution.bound)


def measure(family: str, size: int, seed: int, method: str) -> dict[str, Any]:
    """One problem in both forms, by turns."""
    problem = generate(Recipe(family=family, operators=size, seed=seed))
    seconds: dict[str, list[float]] = {"0": [], "1": []}
    found = []
    for turn in range(TURNS + 1):
        for switch, times in seconds.items():
            took, outcome = _solved(problem, method, switch)
            found.append(outcome)
            if turn:  # the first warms up
                times.append(took)
    plain, fast = (statistics.median(seconds[switch]) for switch in ("0", "1"))
    return {
        "family": family, "operators": size, "seed": seed, "method": method, "plain_s": plain, "compiled_s": fast,
        "ratio": plain / fast, "same": all(outcome == found[0] for outcome in found),
    }  # fmt: skip


def main() -> None:
    """Measure and write after every problem."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--seeds", type=int, default=2)
    arguments = parser.parse_args()
    os.environ[compiled.SWITCH] = "1"
    described = environment([min(os.sched_getaffinity(0))])
    described["command"] = ["python", "-P", "benchmarks/compiled_loops.py", "--seeds", str(arguments.seeds)]
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    records: list[dict[str, Any]] = []
    for size in SIZES:
        for seed in range(arguments.seeds):
            for family in FAMILIES:
                records.append(measure(family, size, seed, "greedy"))
                print(records[-1], flush=True)
                summary = {
                    str(each): math.exp(
                        statistics.fmean(math.log(r["ratio"]) for r in records if r["operators"] == each)
                    )
                    for each in sorted({r["operators"] for r in records})
                }
                data = {"environment": described, "times_as_fast": summary, "records": records}
                temporary = arguments.output.with_suffix(".tmp")
                temporary.write_text(json.dumps(data, indent=1) + "\n")
                temporary.replace(arguments.output)


if __name__ == "__main__":
    main()
