"""The command ``qsync-opt diff``: what changed from one plan to another, and what it costs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from qsync_opt.cli.app import EXIT_OK, Runner, print_json
from qsync_opt.cli.console import estimate_notice, print_table, signed

if TYPE_CHECKING:
    from qsync_opt.training import Evaluation, PlanDifference

EXIT_DIFFERENT = 1
_SHOWN = 40


def add_diff(parser: argparse.ArgumentParser) -> Runner:
    """Show what changed between two plans, per device and operator."""
    parser.add_argument("first", metavar="PLAN", help="plan file before")
    parser.add_argument("second", metavar="PLAN", help="plan file after")
    parser.add_argument("--problem", metavar="PROBLEM", help="their problem: also shows what the change costs")
    parser.add_argument("--all", action="store_true", help=f"list every operator, not the first {_SHOWN} of a device")
    parser.add_argument("--exit-code", action="store_true", help=f"exit with {EXIT_DIFFERENT} if the plans differ")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return _diff


def _diff(options: argparse.Namespace) -> int:
    from qsync_opt.training import compare_plans, load_plan, load_problem

    problem = None if options.problem is None else load_problem(options.problem)
    difference = compare_plans(load_plan(options.first), load_plan(options.second), problem)
    if options.json:
        print_json(difference.to_json())
    else:
        _print(difference, None if options.all else _SHOWN)
        if problem is not None:
            estimate_notice(problem.extras)
    return EXIT_DIFFERENT if options.exit_code and not difference.equal else EXIT_OK


def _print(difference: PlanDifference, shown: int | None) -> None:
    if difference.first.problem != difference.second.problem:
        print(f"note: the plans are for {difference.first.problem!r} and {difference.second.problem!r}")
    for device, changes in difference.changes.items():
        if not changes:
            print(f"{device}: no change")
            continue
        counts = ", ".join(
            f"{n} {before or '-'} > {after or '-'}" for (before, after), n in difference.counts(device).items()
        )
        following = sum(not change.decided for change in changes)
        print(f"{device}: {counts or 'no decision'}" + (f"; {following} operators follow" if following else ""))
        print_table(
            ("  operator", "before", "after"),
            [
                (f"  {c.operator}", c.before or "-", (c.after or "-") + ("" if c.decided else " (follows)"))
                for c in changes[:shown]
            ],
        )
        if shown is not None and len(changes) > shown:
            print(f"  ... and {len(changes) - shown} more (--all shows them)")
    if difference.before is not None and difference.after is not None:
        _print_cost(difference.before, difference.after)


def _print_cost(before: Evaluation, after: Evaluation) -> None:
    from qsync_opt.io import format_memory, format_sensitivity, format_time

    longer_ns, worse = after.iteration_ns - before.iteration_ns, after.objective - before.objective
    rows = [
        (
            "iteration time",
            format_time(before.iteration_ns),
            format_time(after.iteration_ns),
            signed(format_time(longer_ns), longer_ns),
        ),
        (
            "sensitivity",
            format_sensitivity(before.objective),
            format_sensitivity(after.objective),
            signed(format_sensitivity(worse), worse),
        ),
    ]
    for device, old in before.devices.items():
        more_kib = after.devices[device].memory_kib - old.memory_kib
        rows.append(
            (
                f"memory of {device}",
                format_memory(old.memory_kib),
                format_memory(after.devices[device].memory_kib),
                signed(format_memory(more_kib), more_kib),
            )
        )
    rows.append(("limits", _limits(before), _limits(after), ""))
    print_table(("", "before", "after", "change"), rows)


def _limits(evaluation: Evaluation) -> str:
    return "kept" if evaluation.feasible else f"{len(evaluation.violations)} broken"
