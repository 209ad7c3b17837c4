"""The command ``qsync-opt explain``: why an operator has its precision, and what another one would cost."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from qsync_opt.cli import EXIT_OK, Runner, print_json
from qsync_opt.cli_text import estimate_notice, print_table

if TYPE_CHECKING:
    from qsync_opt.explanation import Alternative, Explanation
    from qsync_opt.problem import Problem


def add_explain(parser: argparse.ArgumentParser) -> Runner:
    """Say why an operator has its precision, and what raising or lowering it would cost."""
    parser.add_argument("problem", metavar="PROBLEM", help="problem file")
    parser.add_argument("plan", metavar="PLAN", help="plan file")
    parser.add_argument("operator", metavar="OPERATOR", help="name of an operator, or a part that only one name has")
    parser.add_argument("--device", metavar="NAME", help="only this device type; all by default")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return _explain


def _explain(options: argparse.Namespace) -> int:
    from qsync_opt.explanation import Explainer
    from qsync_opt.plan import load_plan
    from qsync_opt.problem_file import load_problem

    problem = load_problem(options.problem)
    explainer = Explainer(problem, load_plan(options.plan))
    operator = _find(problem, options.operator)
    names = [device.name for device in problem.devices]
    if options.device is not None:
        names = [problem.device(options.device).name]
    explanations = [explainer.explain(operator, name) for name in names]
    if options.json:
        print_json({"operator": operator, "devices": {e.device: e.to_json() for e in explanations}})
        return EXIT_OK
    for explanation in explanations:
        _print(explanation)
    estimate_notice(problem.extras)
    return EXIT_OK


def _find(problem: Problem, text: str) -> str:
    """The operator called ``text``, or the only one whose name holds it."""
    from qsync_opt.errors import ProblemError
    from qsync_opt.jsonio import near_match

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
    from qsync_opt.quantities import format_memory, format_sensitivity, format_time

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
    from qsync_opt.quantities import format_memory, format_sensitivity, format_time

    def signed(text: str, value: float) -> str:
        return f"+{text}" if value > 0 else text

    return (
        f"  {alternative.precision}",
        signed(format_sensitivity(alternative.sensitivity_change), alternative.sensitivity_change),
        signed(format_time(alternative.iteration_change_ns), alternative.iteration_change_ns),
        signed(format_time(alternative.compute_change_ns), alternative.compute_change_ns),
        signed(format_memory(alternative.memory_change_kib), alternative.memory_change_kib),
        f"+{len(alternative.added_casts)} -{len(alternative.removed_casts)}",
        "kept" if alternative.feasible else "; ".join(f"breaks {limit.text}" for limit in alternative.broken),
    )
