"""One measurement in a process of its own: reads a job (JSON) from standard input, writes its outcome to a file.

Solvers print what they like to standard output, so nothing is expected there.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import solvers_agreement
from solvers_baselines import BASELINES
from solvers_cases import Case

from qsync_opt import Plan, evaluate, load_problem, solve
from qsync_opt.errors import QSyncError
from qsync_opt.formulations.assignment import prepare
from qsync_opt.formulations.training import Sweep, latency_front
from qsync_opt.registry import Kind, create
from qsync_opt.testing import chain
from qsync_opt.training import PROOF_GAP, Problem, relative_gap, uniform_plan

REPEATS = 3
NEAR = 1e-2
"""Relative gap of a near front's points, the package's default."""
CHANGED_LIMIT = 0.98
"""A re-solve takes this share of the latency limit, still above the fastest plan."""


class Stopwatch:
    """Wall time and processor time of this process and of its ended children (CBC is one)."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), self._processor()

    @staticmethod
    def _processor() -> float:
        own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
        return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime

    def read(self) -> dict[str, float]:
        """Seconds since it was made."""
        return {"wall_s": time.perf_counter() - self._wall, "cpu_s": self._processor() - self._cpu}


class TimedSolver:
    """A solver that adds up the time spent inside it, hand-over of the model included."""

    def __init__(self, name: str) -> None:
        self._solver = create(Kind.SOLVER, name)
        self.name, self.version, self.continuous = self._solver.name, self._solver.version, self._solver.continuous
        self.seconds = 0.0

    def solve(self, model: Any, options: Any) -> Any:
        """Pass on; see `LinearSolver.solve`."""
        started = time.perf_counter()
        try:
            return self._solver.solve(model, options)
        finally:
            self.seconds += time.perf_counter() - started


def probe_s() -> float:
    """Least time of three turns of a fixed piece of work: how much of a processor this process has just now.

    A core that shares its hardware with a busy one is slower by up to half, which no processor time tells.
    """
    numbers = np.arange(200_000, dtype=np.float64)
    shuffled = np.random.default_rng(0).permutation(len(numbers))
    turns = []
    for _ in range(3):
        started = time.perf_counter()
        for _ in range(10):
            numbers.take(shuffled).min()
        sum(range(200_000))
        turns.append(time.perf_counter() - started)
    return min(turns)


def run_method(problem: Problem, method: str, solver: str | None, limit_s: float | None) -> dict[str, Any]:
    """One solve, its claims and its times; a failure is an outcome too."""
    watch = Stopwatch()
    try:
        if method in BASELINES:
            found = BASELINES[method](problem, time.monotonic() + (limit_s or 600.0))
            times = watch.read()
            return _baseline_outcome(problem, found, times)
        timed = None if solver is None else TimedSolver(solver)
        solution = solve(problem, method, solver=timed, time_limit_s=limit_s)
        outcome: dict[str, Any] = {
            "objective": solution.objective,
            "bound": solution.bound,
            "gap": solution.gap,
            "termination": solution.termination.value,
            **watch.read(),
            "build_s": solution.build_seconds,
        }
        if timed is not None:
            outcome["inside_solver_s"] = timed.seconds
    except QSyncError as failure:
        return {"termination": "error", "error": f"{type(failure).__name__}: {failure}", **watch.read()}
    return outcome


def _baseline_outcome(problem: Problem, found: Any, times: dict[str, float]) -> dict[str, Any]:
    objective = None
    if found.devices is not None:
        evaluation = evaluate(problem, Plan(problem=problem.name, devices=found.devices))
        if not evaluation.feasible:
            return {"termination": "error", "error": f"breaks limits: {'; '.join(evaluation.violations)}", **times}
        objective = evaluation.objective
    gap = relative_gap(objective, found.bound) if found.bound is not None else None
    termination = "time_limit" if objective is None else "feasible"
    return {"objective": objective, "bound": found.bound, "gap": gap, "termination": termination, **times}


def _repeated(problem: Problem, run: dict[str, Any]) -> dict[str, Any]:
    """Small problems several times, for the median of the times."""
    count = run.get("repeats", 1)
    outcomes = [run_method(problem, run["method"], run.get("solver"), run.get("limit_s")) for _ in range(count)]
    middle = sorted(outcomes, key=lambda outcome: outcome["wall_s"])[count // 2]
    return {**middle, "cpu_s": statistics.median(outcome["cpu_s"] for outcome in outcomes)}


def case(job: dict[str, Any]) -> dict[str, Any]:
    """Methods on one problem."""
    chosen = Case.from_json(job["case"])
    problem = chosen.problem()
    recipe = chosen.recipe
    return {
        "name": chosen.name,
        "size": chosen.size,
        "family": recipe.family if recipe else "file",
        "seed": recipe.seed if recipe else None,
        "operators": len(problem.adjustable),
        "nodes": len(problem.operators),
        "formats": len(problem.formats),
        "devices": len(problem.devices),
        "sharing": problem.cast_sharing,
        "lowest": evaluate(problem, uniform_plan(problem)).objective,
        "recorded_optimum": None if problem.optimum is None else problem.optimum.objective,
        "runs": {run["label"]: _repeated(problem, run) for run in job["runs"]},
    }


def memory(job: dict[str, Any]) -> dict[str, Any]:
    """Peak resident memory of loading and solving a problem file by ``greedy``."""
    path = Path(job["path"])
    before_kib = _peak_kib()
    problem = load_problem(path)
    loaded_kib = _peak_kib()
    outcome = run_method(problem, "greedy", None, None)
    return {
        "name": problem.name,
        "operators": len(problem.adjustable),
        "file_bytes": path.stat().st_size,
        "interpreter_kib": before_kib,
        "loaded_kib": loaded_kib,
        "peak_kib": _peak_kib(),
        "greedy": outcome,
    }


def _peak_kib() -> int:
    """The most resident memory of this process so far, in KiB; the parent's is not in it (Linux)."""
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")))


def write_problem(job: dict[str, Any]) -> dict[str, Any]:
    """Generate a problem and write its file."""
    Case.from_json(job["case"]).problem().save(job["path"])
    return {}


def front(job: dict[str, Any]) -> dict[str, Any]:
    """Fifty points of a front, and a solve under changed limits, against one solve.

    The method is ``greedy`` (near points), ``thorough`` (near points, searched on where one misses the gap; against
    one solve by ``greedy`` too) or ``exact`` (proved points).
    """
    chosen = Case.from_json(job["case"])
    problem = chosen.problem()
    gap = 0.0 if job["method"] == "exact" else NEAR
    method = "exact" if job["method"] == "exact" else "greedy"
    single = _repeated(problem, {"method": method, "limit_s": 60.0, "repeats": REPEATS})
    resolved = _resolve(problem, gap)
    watch = Stopwatch()
    points = latency_front(problem, points=job["points"], gap=gap, thorough=job["method"] == "thorough")
    times = watch.read()
    gaps = [relative_gap(p.objective, p.bound) or 0.0 for p in points]
    return {
        "name": chosen.name,
        "operators": len(problem.adjustable),
        "method": job["method"],
        "solve": single,
        "front": times,
        "points": len(points),
        "worst_gap": max(gaps, default=None),
        "within_gap": sum(found <= max(gap, PROOF_GAP) for found in gaps) / len(gaps) if gaps else None,
        "ratio_wall": times["wall_s"] / single["wall_s"],
        "ratio_cpu": times["cpu_s"] / max(single["cpu_s"], 1e-9),
        "resolve": resolved,
    }


def _resolve(problem: Problem, gap: float) -> dict[str, Any]:
    """A first solve with its building, and one more under changed limits, by the same sweep."""
    watch = Stopwatch()
    sweep = Sweep(problem, gap=gap)
    first = sweep.solve()
    first_times = watch.read()
    again = []
    for step in (1, 2, 3):
        watch = Stopwatch()
        sweep.solve(int(problem.latency_limit_ns * CHANGED_LIMIT**step))
        again.append(watch.read())
    seconds = statistics.median(times["wall_s"] for times in again)
    processor = statistics.median(times["cpu_s"] for times in again)
    return {
        "found": first is not None,
        "first": first_times,
        "again": {"wall_s": seconds, "cpu_s": processor},
        "ratio_wall": seconds / first_times["wall_s"],
        "ratio_cpu": processor / max(first_times["cpu_s"], 1e-9),
    }


def agreement(job: dict[str, Any]) -> dict[str, Any]:
    """Random small problems, every way."""
    return solvers_agreement.run(job["first"], job["count"])


KINDS = {"case": case, "memory": memory, "write": write_problem, "front": front, "agreement": agreement}


def _load_modules(job: dict[str, Any]) -> None:
    """Solve something tiny every way, so that no measurement pays for imports or for loading compiled loops."""
    prepare()
    solve(chain().problem, "exact")
    for run in job.get("runs", ()):
        run_method(chain().problem, run["method"], run.get("solver"), 10.0)


def main() -> None:
    """Do the job."""
    job = json.load(sys.stdin)
    if job.get("core") is not None:
        os.sched_setaffinity(0, {job["core"]})
    if job["kind"] != "memory":
        _load_modules(job)
    before_s = probe_s()
    outcome = {**KINDS[job["kind"]](job), "probe_before_s": before_s, "probe_after_s": probe_s()}
    Path(job["output"]).write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
