"""A small piece of HTML about a plan, for notebooks: a few figures and a table, styled by the place it stands in."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from qsync_opt.evaluation import evaluate
from qsync_opt.plan import Plan
from qsync_opt.problem import Problem
from qsync_opt.quantities import format_memory, format_sensitivity, format_time


def html_table(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A plain table of texts, escaped."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in body)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def html_fragment(problem: Problem, plan: Plan) -> str:
    """A plan in a few lines of HTML: no style, no code, names escaped.

    Args:
        problem: The problem.
        plan: A plan for it.

    Returns:
        A ``div`` with one sentence and a table of one row per device type.

    Raises:
        ProblemError: The plan does not belong to the problem.
    """
    evaluation = evaluate(problem, plan)
    precisions = plan.resolve(problem)
    adjustable = [operator.name for operator in problem.adjustable]
    body = []
    for device in evaluation.devices.values():
        chosen = [precisions[device.name][name] for name in adjustable]
        mix = ", ".join(f"{chosen.count(name)} {name}" for name in problem.formats if name in chosen)
        memory = f"{format_memory(device.memory_kib)} of {format_memory(device.memory_limit_kib)}"
        body.append([device.name, mix or "none", memory, format_sensitivity(device.sensitivity)])
    state = "feasible" if evaluation.feasible else f"not feasible: {'; '.join(evaluation.violations)}"
    sentence = (
        f"{problem.name}: {format_time(evaluation.iteration_ns)} of {format_time(evaluation.latency_limit_ns)}, "
        f"sensitivity {format_sensitivity(evaluation.objective)}, {state}"
    )
    header = ("device", "adjustable operators", "memory", "sensitivity")
    return f"<div><p>{escape(sentence)}</p>{html_table(header, body)}</div>"
