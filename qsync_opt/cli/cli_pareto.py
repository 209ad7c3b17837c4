"""The command ``qsync-opt pareto``: what sensitivity costs in time, or in the memory of a device type."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from qsync_opt.cli.app import EXIT_INFEASIBLE, EXIT_OK, Runner, print_json
from qsync_opt.cli.console import add_quiet, check_outputs, estimate_notice, gap_text, milliseconds, number, print_table

if TYPE_CHECKING:
    from qsync_opt.training import Front

_LOGGER = logging.getLogger(__name__)


def add_pareto(parser: argparse.ArgumentParser) -> Runner:
    """The front of sensitivity against iteration time, or against the memory of a device type."""
    parser.add_argument("problem", metavar="PROBLEM", help="problem file")
    parser.add_argument("--against", choices=("latency", "memory"), default="latency", help="default: latency")
    parser.add_argument("--device", metavar="NAME", help="whose memory; the only planned type by default")
    parser.add_argument(
        "--method", choices=("greedy", "exact"), default="greedy", help="greedy (default), or exact: all proved"
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
    from qsync_opt.io import default_cache_folder, reporting, write_text
    from qsync_opt.report import front_svg
    from qsync_opt.training import load_problem, pareto_front

    check_outputs([options.csv, options.svg], [options.problem])
    problem = load_problem(options.problem)
    with reporting(False if options.quiet else None, "pareto") as report:
        front = pareto_front(
            problem,
            options.against,
            device=options.device,
            method=options.method,
            points=None if options.whole else options.points,
            cache=None if options.no_cache else (options.cache or default_cache_folder()) / "fronts",
            progress=lambda done, total, reused: report(done, total or done, f"points, {reused} from the cache"),
        )
    if options.csv is not None:
        write_text(options.csv, _csv(front))
    if options.svg is not None:
        write_text(options.svg, front_svg(front))
    if options.plans is not None:
        _write_plans(options.plans, front)
    if options.json:
        print_json(front.to_json())
    else:
        _print(front)
    return EXIT_OK if front.points else EXIT_INFEASIBLE


def _print(front: Front) -> None:
    from qsync_opt.io import format_memory
    from qsync_opt.report import levels

    problem = front.problem
    if not front.points:
        print(f"{problem.name}: no plan keeps the limits; qsync-opt solve says which one stands in the way")
        return
    names = [device.name for device in problem.devices]
    header = ("iteration", *(f"memory of {name}" for name in names), "sensitivity", "gap", "limits", "precisions")
    table = [
        (
            milliseconds(point.iteration_ns),
            *(format_memory(point.memory_kib[name]) for name in names),
            number(point.objective),
            gap_text(point.gap),
            "kept" if point.feasible else "broken",
            "; ".join(levels(choices.values()) for choices in point.plan.devices.values()),
        )
        for point in front.points
    ]
    print(f"{problem.name}: {len(front)} points against {front.against}, {front.reused} limits from the cache")
    print_table(header, table)
    estimate_notice(problem.extras)


def _csv(front: Front) -> str:
    """One line per point."""
    import csv
    import io

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [device.name for device in front.problem.devices]
    writer.writerow(["iteration_ns", *(f"memory_kib of {name}" for name in names), "objective", "bound", "feasible"])
    for point in front.points:
        memory = [point.memory_kib[name] for name in names]
        writer.writerow([point.iteration_ns, *memory, point.objective, point.bound, str(point.feasible).lower()])
    return text.getvalue()


def _write_plans(folder: Path, front: Front) -> None:
    from qsync_opt.errors import ProblemError

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise ProblemError(
            f"cannot make the folder {str(folder)!r}: {failure.strerror or failure}; name another one"
        ) from failure
    for position, point in enumerate(front.points):
        point.plan.save(folder / f"plan-{position:03}.json")
    written = {f"plan-{position:03}.json" for position in range(len(front.points))}
    others = sorted(path.name for path in folder.glob("plan-*.json") if path.name not in written)
    if others:
        _LOGGER.warning(
            "%s also holds %d plans that are not of this front, first %s; remove them, or name an empty folder",
            folder, len(others), others[0],
        )  # fmt: skip
