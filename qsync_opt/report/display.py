"""How graphs, problems, plans, solutions and fronts show themselves: one line of text, or HTML in a notebook."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from qsync_opt.costs import estimate_lines
from qsync_opt.io import format_gap, format_memory, format_sensitivity, format_time
from qsync_opt.model import Role
from qsync_opt.numerics import FORMATS

if TYPE_CHECKING:
    from qsync_opt.io import Extras
    from qsync_opt.model import OpGraph
    from qsync_opt.training import Front, Plan, Problem, Solution

COLORS: Mapping[str, str] = {
    "INT8": "#8c2d04",
    "FP8": "#d94801",
    "BF16": "#fdae6b",
    "FP16": "#fdd49e",
    "TF32": "#9ecae1",
    "FP32": "#2171b5",
}
"""Precision to color, from warm (coarse) to cold (fine); told apart by lightness too."""
OTHER_COLOR = "#969696"
_MAX_ROWS = 200
_TABLE = '<table style="border-collapse:collapse;font-size:0.9em">'
_CELL = 'style="text-align:left;padding:2px 10px 2px 0"'


def graph_text(graph: OpGraph) -> str:
    """One line about a graph."""
    roles = ", ".join(f"{len(graph.by_role(role))} {role}" for role in Role)
    elements = sum(parameter.spec.elements for parameter in graph.parameters)
    return f"<OpGraph {graph.name!r}: {len(graph)} operators ({roles}), {_count(elements)} parameters>"


def problem_text(problem: Problem) -> str:
    """One line about a problem."""
    devices = ", ".join(
        f"{device.count} {device.name} up to {format_memory(device.memory_limit_kib)}" for device in problem.devices
    )
    estimated = " from estimates" if estimate_lines(problem.extras) else ""
    return (
        f"<Problem {problem.name!r}: {len(problem.operators)} operators ({len(problem.adjustable)} adjustable), "
        f"{devices}, iteration up to {format_time(problem.latency_limit_ns)}{estimated}>"
    )


def plan_text(plan: Plan) -> str:
    """One line about a plan."""
    devices = "; ".join(f"{device}: {levels(choices.values())}" for device, choices in plan.devices.items())
    return f"<Plan for {plan.problem!r}: {devices}{' from estimates' if estimate_lines(plan.extras) else ''}>"


def solution_text(solution: Solution) -> str:
    """One line about a solution."""
    by = solution.method if solution.solver is None else f"{solution.method} with {solution.solver}"
    if solution.plan is None or solution.evaluation is None:
        return f"<Solution {solution.termination} by {by}: no plan, {solution.reason}>"
    gap = "no bound" if solution.gap is None else f"gap {format_gap(solution.gap)}"
    return (
        f"<Solution {solution.termination} by {by}: sensitivity {format_sensitivity(solution.evaluation.objective)} "
        f"({gap}), iteration {format_time(solution.evaluation.iteration_ns)}, {plan_text(solution.plan)[1:-1]}>"
    )


def front_text(front: Front) -> str:
    """One line about a front."""
    form = format_time if front.device is None else format_memory
    what = "iteration time" if front.device is None else f"memory of {front.device}"
    if not front.points:
        return f"<Front of {front.problem.name!r} against {what}: no point>"
    first, last = front.points[0], front.points[-1]
    return (
        f"<Front of {front.problem.name!r} against {what}: {len(front)} points by {front.method}, "
        f"from {form(first.use)} at sensitivity {format_sensitivity(first.objective)} to {form(last.use)} at "
        f"{format_sensitivity(last.objective)}>"
    )


def levels(precisions: Iterable[str]) -> str:
    """How many of each precision, coarsest first: ``"7 INT8, 39 FP16"``."""
    counts = Counter(precisions)
    ordered = sorted(counts, key=lambda name: (FORMATS[name].rank if name in FORMATS else len(FORMATS), name))
    return ", ".join(f"{counts[name]} {name}" for name in ordered) or "nothing"


def graph_html(graph: OpGraph) -> str:
    """A graph as a table of its operators, the first ones if there are many."""
    rows = [
        (o.name, o.op_type, o.role.value, ", ".join(o.inputs), _count(o.output_elements), _count(o.flops))
        for o in graph.operators[:_MAX_ROWS]
    ]
    header = ("operator", "type", "role", "inputs", "output elements", "FLOPs")
    return _section(graph_text(graph)) + _folded("operators", _table(header, rows), len(graph))


def problem_html(problem: Problem) -> str:
    """A problem as a table of its device types."""
    rows = [(d.name, str(d.count), ", ".join(d.precisions), format_memory(d.memory_limit_kib)) for d in problem.devices]
    table = _table(("device type", "count", "precisions", "memory limit"), rows)
    return _section(problem_text(problem)) + table + _notes(problem.extras)


def plan_html(plan: Plan) -> str:
    """A plan as a colored strip per device type, and a table of its operators."""
    used = dict.fromkeys(precision for choices in plan.devices.values() for precision in choices.values())
    parts = [_section(plan_text(plan)), _legend(tuple(used))]
    for device, choices in plan.devices.items():
        parts.append(f"<div>{escape(device)}</div>{_strip(choices)}")
        rows = [(name, precision) for name, precision in list(choices.items())[:_MAX_ROWS]]
        parts.append(_folded(f"operators on {device}", _table(("operator", "precision"), rows), len(choices)))
    return "".join(parts) + _notes(plan.extras)


def solution_html(solution: Solution) -> str:
    """A solution: its line, what it uses of each limit, and its plan."""
    if solution.plan is None or solution.evaluation is None:
        return _section(solution_text(solution))
    found = solution.evaluation
    rows = [("iteration time", format_time(found.iteration_ns), format_time(found.latency_limit_ns))]
    rows += [
        (f"memory of {device.name}", format_memory(device.memory_kib), format_memory(device.memory_limit_kib))
        for device in found.devices.values()
    ]
    return _section(solution_text(solution)) + _table(("", "used", "limit"), rows) + plan_html(solution.plan)


def front_html(front: Front) -> str:
    """A front as a picture and a table."""
    from qsync_opt.report.figures import front_svg

    header = ("iteration time", *(f"memory of {d.name}" for d in front.problem.devices), "sensitivity", "gap", "limits")
    rows = [
        (
            format_time(point.iteration_ns),
            *(format_memory(point.memory_kib[d.name]) for d in front.problem.devices),
            format_sensitivity(point.objective),
            "" if point.gap is None else format_gap(point.gap),
            "kept" if point.feasible else "broken",
        )
        for point in front.points
    ]
    table = _folded("points", _table(header, rows), len(rows))
    return _section(front_text(front)) + front_svg(front) + table + _notes(front.problem.extras)


def _count(value: int) -> str:
    """A large number, short."""
    for factor, letter in ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k")):
        if value >= factor:
            return f"{value / factor:.3g} {letter}"
    return str(value)


def _section(text: str) -> str:
    return f"<div><b>{escape(text[1:-1])}</b></div>"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th scope='col' {_CELL}>{escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td {_CELL}>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"{_TABLE}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _folded(title: str, content: str, total: int) -> str:
    shown = f"the first {_MAX_ROWS} of {total} {title}" if total > _MAX_ROWS else f"{total} {title}"
    return f"<details><summary>{escape(shown)}</summary>{content}</details>"


def _legend(precisions: Sequence[str]) -> str:
    boxes = (
        f'<span style="display:inline-block;width:0.8em;height:0.8em;background:{color(name)}"></span> {escape(name)} '
        for name in sorted(precisions, key=lambda name: FORMATS[name].rank if name in FORMATS else len(FORMATS))
    )
    return f"<div>{''.join(boxes)}</div>"


def color(precision: str) -> str:
    """Color of a precision; one grey for formats that this package does not know."""
    return COLORS.get(precision, OTHER_COLOR)


def _strip(choices: Mapping[str, str]) -> str:
    boxes = "".join(
        f'<span title="{escape(name)}: {escape(precision)}" '
        f'style="flex:1 1 2px;height:18px;background:{color(precision)}"></span>'
        for name, precision in choices.items()
    )
    return f'<div style="display:flex;max-width:900px" role="img" aria-label="{levels(choices.values())}">{boxes}</div>'


def _notes(extras: Extras) -> str:
    return "".join(f"<div><i>Note: {escape(line)}</i></div>" for line in estimate_lines(extras))
