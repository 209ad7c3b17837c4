"""The command ``qsync-opt pareto``: what sensitivity costs in time, or in the memory of a device type."""

from __future__ import annotations

import argparse
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qsync_opt.cli import EXIT_INFEASIBLE, EXIT_OK, Runner, print_json
from qsync_opt.cli_text import add_quiet, estimate_notice, milliseconds, number, percent, print_table
from qsync_opt.errors import SolverError, UnsupportedError

if TYPE_CHECKING:
    from qsync_opt.front_cache import FrontCache
    from qsync_opt.problem import Problem

FRONT_FORMAT = "qsync-front/1"
_GAPS = {"greedy": 5e-3, "exact": 0.0}
_AGREEMENT = 1e-6


def add_pareto(parser: argparse.ArgumentParser) -> Runner:
    """The front of sensitivity against iteration time, or against the memory of a device type."""
    parser.add_argument("problem", metavar="PROBLEM", help="problem file")
    parser.add_argument("--against", choices=("latency", "memory"), default="latency", help="default: latency")
    parser.add_argument("--device", metavar="NAME", help="whose memory; the only planned type by default")
    parser.add_argument(
        "--method", choices=tuple(_GAPS), default="greedy", help="greedy (default), or exact: all proved"
    )
    parser.add_argument("--points", type=int, default=30, metavar="N", help="how many limits to try (default: 30)")
    parser.add_argument("--whole", action="store_true", help="every point of the latency front, however many")
    parser.add_argument("--csv", metavar="FILE", help="write the points as CSV")
    parser.add_argument("--svg", metavar="FILE", help="write the front as a picture")
    parser.add_argument("--plans", metavar="FOLDER", type=Path, help="write the plan of every point into this folder")
    parser.add_argument(
        "--cache", metavar="FOLDER", type=Path, help="where points are kept (default: ~/.cache/qsync-opt)"
    )
    parser.add_argument("--no-cache", action="store_true", help="seek every point anew and keep none")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_quiet(parser)
    return _pareto


def _pareto(options: argparse.Namespace) -> int:
    from qsync_opt.jsonio import check_writable, write_text
    from qsync_opt.problem_file import load_problem

    for path in (options.csv, options.svg):
        if path is not None:
            check_writable(path)
    problem = load_problem(options.problem)
    device = _device(problem, options)
    points, cache = _front(problem, device, options)
    rows = [_checked(problem, point, device) for point in points]
    if options.csv is not None:
        write_text(options.csv, _csv(problem, rows))
    if options.svg is not None:
        from qsync_opt.front_svg import front_svg

        write_text(options.svg, front_svg(problem, rows, device))
    if options.plans is not None:
        _write_plans(options.plans, points)
    if options.json:
        print_json(
            {
                "format": FRONT_FORMAT,
                "problem": problem.name,
                "against": options.against,
                "device": device,
                "method": options.method,
                "whole": options.whole,
                "reused_points": cache.num_reused,
                "points": rows,
            }
        )
    else:
        _print(problem, rows, cache, options)
    return EXIT_OK if rows else EXIT_INFEASIBLE


def _device(problem: Problem, options: argparse.Namespace) -> str | None:
    """The device type whose memory counts, or None for a front against time."""
    if options.against == "latency":
        if options.device is not None:
            raise UnsupportedError(f"--device {options.device!r} is for --against memory; time is that of all devices")
        return None
    if options.whole:
        raise UnsupportedError("--whole is for --against latency; give --points for memory")
    names = [device.name for device in problem.devices]
    if options.device is not None:
        return problem.device(options.device).name
    if len(names) > 1:
        raise UnsupportedError(f"--against memory needs --device NAME; the problem has {', '.join(names)}")
    return names[0]


def _front(problem: Problem, device: str | None, options: argparse.Namespace) -> tuple[tuple[Any, ...], FrontCache]:
    """The points from the most use to the least; an interrupt says what the cache kept."""
    from qsync_opt.front_cache import FrontCache, default_cache_folder
    from qsync_opt.progress import reporting

    fronts = import_module("qsync_opt.formulations.front")  # formulations are reached by name only
    gap = _GAPS[options.method]
    folder = None if options.no_cache else (options.cache or default_cache_folder()) / "fronts"
    cache = FrontCache(folder, problem, gap, fronts.FrontPoint)
    with reporting(False if options.quiet else None, "pareto") as report:

        def progress(done: int, total: int) -> None:
            report(done, total or done, f"points, {cache.num_reused} from the cache")

        common = {"gap": gap, "store": cache, "progress": progress}
        try:
            if device is not None:
                return fronts.memory_front(problem, device, points=options.points, **common), cache
            count = None if options.whole else options.points
            return fronts.latency_front(problem, points=count, **common), cache
        except KeyboardInterrupt:
            kept = cache.num_new + cache.num_reused
            where = "nothing is kept (--no-cache)" if folder is None else f"{kept} points are kept in {folder}"
            raise KeyboardInterrupt(where if folder is None else f"{where}, run it again to go on") from None


def _checked(problem: Problem, point: Any, device: str | None) -> dict[str, Any]:
    """A point as its plan evaluates to, which must be what the front claims."""
    from qsync_opt.evaluation import evaluate
    from qsync_opt.solution import relative_gap

    found = evaluate(problem, point.plan)
    agrees = (
        found.iteration_ns == point.iteration_ns
        and found.memory_kib == dict(point.memory_kib)
        and abs(found.objective - point.objective) <= _AGREEMENT * max(abs(found.objective), 1e-300)
    )
    if not agrees:
        raise SolverError(
            f"the front claims {point.iteration_ns} ns and sensitivity {point.objective!r} for a plan that takes "
            f"{found.iteration_ns} ns with {found.objective!r}; empty the cache folder and try again"
        )
    return {
        "iteration_ns": found.iteration_ns,
        "memory_kib": found.memory_kib,
        "objective": found.objective,
        "bound": point.bound,
        "gap": relative_gap(found.objective, point.bound),
        "feasible": found.feasible,
        "use": found.iteration_ns if device is None else found.memory_kib[device],
        "precisions": {name: dict(Counter(plan.values())) for name, plan in point.plan.devices.items()},
    }


def _print(problem: Problem, rows: list[dict[str, Any]], cache: FrontCache, options: argparse.Namespace) -> None:
    from qsync_opt.quantities import format_memory

    if not rows:
        print(f"{problem.name}: no plan keeps the limits; qsync-opt solve says which one stands in the way")
        return
    names = [device.name for device in problem.devices]
    header = ("iteration", *(f"memory of {name}" for name in names), "sensitivity", "gap", "limits", "precisions")
    table = [
        (
            milliseconds(row["iteration_ns"]),
            *(format_memory(row["memory_kib"][name]) for name in names),
            number(row["objective"]),
            percent(row["gap"]),
            "kept" if row["feasible"] else "broken",
            "; ".join(_levels(problem, counts) for counts in row["precisions"].values()),
        )
        for row in rows
    ]
    print(f"{problem.name}: {len(rows)} points against {options.against}, {cache.num_reused} from the cache")
    print_table(header, table)
    estimate_notice(problem.extras)


def _levels(problem: Problem, counts: dict[str, int]) -> str:
    return ", ".join(f"{counts[name]} {name}" for name in problem.formats if name in counts)


def _csv(problem: Problem, rows: list[dict[str, Any]]) -> str:
    """One line per point; device names stand in quotes where they hold a comma."""
    import csv
    import io

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [device.name for device in problem.devices]
    writer.writerow(["iteration_ns", *(f"memory_kib of {name}" for name in names), "objective", "bound", "feasible"])
    for row in rows:
        memory = [row["memory_kib"][name] for name in names]
        writer.writerow([row["iteration_ns"], *memory, row["objective"], row["bound"], row["feasible"]])
    return text.getvalue()


def _write_plans(folder: Path, points: tuple[Any, ...]) -> None:
    from qsync_opt.errors import ProblemError

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise ProblemError(
            f"cannot make the folder {str(folder)!r}: {failure.strerror or failure}; name another one"
        ) from failure
    for position, point in enumerate(points):
        point.plan.save(folder / f"plan-{position:03}.json")
