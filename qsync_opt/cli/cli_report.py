"""The sub-command report."""

from __future__ import annotations

import argparse
import logging
import time
from pathlib import Path

from qsync_opt.cli.app import EXIT_INFEASIBLE, EXIT_OK, Runner, print_json
from qsync_opt.cli.console import add_quiet, check_outputs, estimate_notice

_LOGGER = logging.getLogger(__name__)
_KB = 1000


def add_report(parser: argparse.ArgumentParser) -> Runner:
    """Write a page that shows and explains a plan."""
    parser.add_argument("problem", metavar="PROBLEM", help="problem file")
    parser.add_argument("plan", metavar="PLAN", help="plan file")
    parser.add_argument(
        "--output",
        "--out",
        dest="out",
        default="report.html",
        metavar="FILE",
        help="page to write (default: report.html)",
    )
    parser.add_argument(
        "--front",
        default="greedy",
        metavar="METHOD",
        help="greedy (default), exact (every point proved; may take long) or none",
    )
    parser.add_argument("--measured", metavar="FILE", help="measurements of the plan, to show beside what is predicted")
    parser.add_argument(
        "--cache", metavar="FOLDER", type=Path, help="where points of fronts are kept (default: ~/.cache/qsync-opt)"
    )
    parser.add_argument("--no-cache", action="store_true", help="seek every point anew and keep none")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_quiet(parser)
    return _report


def _report(options: argparse.Namespace) -> int:
    from qsync_opt.io import default_cache_folder, reporting
    from qsync_opt.report import check_front, load_measured, make_report, write_report
    from qsync_opt.training import load_plan, load_problem

    check_outputs([options.out], [options.problem, options.plan, options.measured])
    check_front(options.front)
    problem, plan = load_problem(options.problem), load_plan(options.plan)
    measured = None if options.measured is None else load_measured(options.measured)
    started = time.monotonic()
    _LOGGER.info("explaining %s operators, front %s", len(problem.operators), options.front)
    cache = None if options.no_cache else (options.cache or default_cache_folder()) / "fronts"
    with reporting(False if options.quiet else None, "report") as progress:
        report = make_report(problem, plan, front=options.front, measured=measured, cache=cache, progress=progress)
    today = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    size = write_report(report, options.out, note=f"From {options.problem} and {options.plan}, {today}.")
    seconds = time.monotonic() - started
    if options.json:
        print_json(
            {
                "report": options.out,
                "bytes": size,
                "operators": len(problem.operators),
                "front": options.front,
                "feasible": report.evaluation.feasible,
                "seconds": seconds,
            }
        )
    else:
        print(f"{options.out}: {len(problem.operators)} operators, {size / _KB:.0f} kB, {seconds:.1f} s")
        estimate_notice(problem.extras)
        if not report.evaluation.feasible:
            print("\n".join(f"violated: {text}" for text in report.evaluation.violations))
    return EXIT_OK if report.evaluation.feasible else EXIT_INFEASIBLE
