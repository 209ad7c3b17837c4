"""The command ``qsync-opt explain``: why an operator has its precision, and what another one would cost."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from qsync_opt.cli.app import EXIT_OK, Runner, print_json
from qsync_opt.cli.console import estimate_notice, print_table, signed

if TYPE_CHECKING:
    from qsync_opt.training import Alternative, Explainer, Explanation, Overview, Problem, Saving


_LEAST_SHARE = 0.005
"""A smaller share of the sensitivity would be rounded to none."""


def add_explain(parser: argparse.ArgumentParser) -> Runner:
    """Say why an operator has its precision, and what raising or lowering it would cost."""
    parser.add_argument("problem", metavar="PROBLEM", help="problem file")
    parser.add_argument("plan", metavar="PLAN", help="plan file")
    parser.add_argument(
        "operator", metavar="OPERATOR", nargs="?",
        help="name of an operator, or a part that only one name has; without it the operators are listed that cost "
        "most sensitivity or could save most time",
    )  # fmt: skip
    parser.add_argument("--device", metavar="NAME", help="only this device type; all by default")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return _explain


def _explain(options: argparse.Namespace) -> int:
    from qsync_opt.training import Explainer, load_plan, load_problem

    problem = load_problem(options.problem)
    explainer = Explainer(problem, load_plan(options.plan))
    names = [device.name for device in problem.devices]
    if options.device is not None:
        names = [problem.device(options.device).name]
    if options.operator is None:
        return _overview(explainer, names, options)
    operator = _find(problem, options.operator)
    explanations = [explainer.explain(operator, name) for name in names]
    if options.json:
        print_json({"operator": operator, "devices": {e.device: e.to_json() for e in explanations}})
        return EXIT_OK
    for explanation in explanations:
        _print(explanation)
    estimate_notice(problem.extras)
    return EXIT_OK


def _overview(explainer: Explainer, names: list[str], options: argparse.Namespace) -> int:
    """What can be told without the name of an operator."""
    from qsync_opt.training import overview

    found = [overview(explainer, name) for name in names]
    if options.json:
        print_json({"operator": None, "devices": {each.device: each.to_json() for each in found}})
        return EXIT_OK
    for each in found:
        _print_overview(each)
    print("all of one operator: qsync-opt explain PROBLEM PLAN OPERATOR")
    estimate_notice(explainer.problem.extras)
    return EXIT_OK


def _print_overview(found: Overview) -> None:
    from qsync_opt.io import format_sensitivity

    total = f"sensitivity {format_sensitivity(found.sensitivity)}"
    print(f"{found.device}: {found.adjustable} adjustable operators, {total}")
    if found.sensitive:
        print("most sensitivity, and what the next higher precision would change")
        header = ("  operator", "precision", "sensitivity", "share", "raised to", "iteration", "memory", "limits")
        print_table(header, [_sensitive_row(each, found.sensitivity) for each in found.sensitive])
    if found.savings:
        print("most computing time to save")
        header = ("  operator", "precision", "instead", "computing", "iteration", "sensitivity", "memory", "limits")
        print_table(header, [_saving_row(each) for each in found.savings])
    if not found.sensitive and not found.savings:
        print("no operator adds sensitivity, and no other precision would save time")


def _sensitive_row(explanation: Explanation, total: float) -> tuple[str, ...]:
    from qsync_opt.io import format_sensitivity

    higher = explanation.next_higher
    share = explanation.sensitivity / total
    return (
        f"  {explanation.operator}",
        explanation.precision,
        format_sensitivity(explanation.sensitivity),
        f"{100 * share:.0f} %" if share >= _LEAST_SHARE else "under 1 %",
        *(("-",) * 4 if higher is None else (higher.precision, _iteration(higher), _memory(higher), _limits(higher))),
    )


def _saving_row(saving: Saving) -> tuple[str, ...]:
    instead = saving.instead
    return (
        f"  {saving.explanation.operator}",
        saving.explanation.precision,
        instead.precision,
        _computing(instead),
        _iteration(instead),
        _sensitivity(instead),
        _memory(instead),
        _limits(instead),
    )


def _find(problem: Problem, text: str) -> str:
    """The operator called ``text``, or the only one whose name holds it."""
    from qsync_opt.errors import ProblemError
    from qsync_opt.io import near_match

    names = [operator.name for operator in problem.operators]
    if text in names:
        return text
    found = [name for name in names if text in name]
    if len(found) == 1:
        return found[0]
    if found:
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        raise ProblemError(
            f"operator {text!r} could be {', '.join(map(repr, found[:5]))}{more}; give the whole name of one"
        )
    if not near_match(text, names):
        adjustable = [operator.name for operator in problem.adjustable]
        more = f" and {len(adjustable) - 3} more" if len(adjustable) > 3 else ""
        raise ProblemError(
            f"problem {problem.name!r} has no operator {text!r}; adjustable are {', '.join(map(repr, adjustable[:3]))}"
            f"{more}; give a name or a part of one"
        )
    return problem.operators[problem.index(text)].name  # raises, with the nearest name


def _print(explanation: Explanation) -> None:
    from qsync_opt.io import format_memory, format_sensitivity, format_time

    print(f"{explanation.operator} ({explanation.type}, {explanation.role}) on {explanation.device}: "
          f"{explanation.precision}")  # fmt: skip
    print(f"  {explanation.reason}")
    casts = [*explanation.forward_casts, *explanation.backward_casts]
    print(
        f"  forward {format_time(explanation.forward_ns)}, backward {format_time(explanation.backward_ns)}, "
        f"{len(casts)} casts {format_time(sum(cast.duration_ns for cast in casts))}, "
        f"memory {format_memory(explanation.memory_kib)}, sensitivity {format_sensitivity(explanation.sensitivity)}"
    )
    if explanation.alternatives:
        header = ("  precision", "sensitivity", "iteration", "own compute", "memory", "casts", "limits")
        print_table(header, [_row(alternative) for alternative in explanation.alternatives])
    for alternative in explanation.alternatives:
        for pushed in alternative.pushed:
            print(f"  {alternative.precision} would push {pushed.operator} from {pushed.before} to {pushed.after}")


def _row(alternative: Alternative) -> tuple[str, ...]:
    return (
        f"  {alternative.precision}",
        _sensitivity(alternative),
        _iteration(alternative),
        _computing(alternative),
        _memory(alternative),
        f"+{len(alternative.added_casts)} -{len(alternative.removed_casts)}",
        _limits(alternative),
    )


def _sensitivity(alternative: Alternative) -> str:
    from qsync_opt.io import format_sensitivity

    return signed(format_sensitivity(alternative.sensitivity_change), alternative.sensitivity_change)


def _iteration(alternative: Alternative) -> str:
    from qsync_opt.io import format_time

    return signed(format_time(alternative.iteration_change_ns), alternative.iteration_change_ns)


def _computing(alternative: Alternative) -> str:
    from qsync_opt.io import format_time

    return signed(format_time(alternative.compute_change_ns), alternative.compute_change_ns)


def _memory(alternative: Alternative) -> str:
    from qsync_opt.io import format_memory

    return signed(format_memory(alternative.memory_change_kib), alternative.memory_change_kib)


def _limits(alternative: Alternative) -> str:
    return "kept" if alternative.feasible else "; ".join(f"breaks {limit.text}" for limit in alternative.broken)
