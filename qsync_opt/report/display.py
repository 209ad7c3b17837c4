"""How graphs, problems, plans, solutions and fronts show themselves: a line of text, HTML in a notebook, a table.

Tables are those of pandas, an optional package; times in them are integer nanoseconds, memory is integer KiB, as in the
files.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import singledispatch
from html import escape
from typing import Any

from qsync_opt.costs import estimate_lines
from qsync_opt.errors import NotInstalledError
from qsync_opt.io import Extras, format_gap, format_memory, format_sensitivity, format_time
from qsync_opt.model import OpGraph, Role
from qsync_opt.numerics import FORMATS
from qsync_opt.training import Evaluation, Front, Plan, Problem, Solution

COLORS: Mapping[str, str] = {
    "INT8-BWD8": "#4a1600",
    "INT8": "#8c2d04",
    "FP8-BWD8": "#b83c01",
    "FP8": "#d94801",
    "BF16": "#fdae6b",
    "FP16": "#fdd49e",
    "TF32": "#9ecae1",
    "FP32": "#2171b5",
}
"""Precision to color, from warm (coarse) to cold (fine); told apart by lightness too."""
OTHER_COLOR = "#969696"
_MAX_ROWS = 200
_CELL = 'style="text-align:left;padding:2px 10px 2px 0"'


@singledispatch
def text(value: object) -> str:
    """One line about a graph, problem, plan, solution or front, in angle brackets."""
    raise TypeError(f"a {type(value).__name__} has no display")


@text.register
def _(graph: OpGraph) -> str:
    roles = ", ".join(f"{len(graph.by_role(role))} {role}" for role in Role)
    elements = sum(parameter.spec.elements for parameter in graph.parameters)
    return f"<OpGraph {graph.name!r}: {len(graph)} operators ({roles}), {_count(elements)} parameters>"


@text.register
def _(problem: Problem) -> str:
    devices = ", ".join(
        f"{device.count} {device.name} up to {format_memory(device.memory_limit_kib)}" for device in problem.devices
    )
    return (
        f"<Problem {problem.name!r}: {len(problem.operators)} operators ({len(problem.adjustable)} adjustable), "
        f"{devices}, iteration up to {format_time(problem.latency_limit_ns)}{_estimated(problem.extras)}>"
    )


@text.register
def _(plan: Plan) -> str:
    devices = "; ".join(f"{device}: {levels(choices.values())}" for device, choices in plan.devices.items())
    return f"<Plan for {plan.problem!r}: {devices}{_estimated(plan.extras)}>"


@text.register
def _(solution: Solution) -> str:
    by = solution.method if solution.solver is None else f"{solution.method} with {solution.solver}"
    if solution.plan is None or solution.evaluation is None:
        return f"<Solution {solution.termination} by {by}: no plan, {solution.reason}>"
    gap = "no bound" if solution.gap is None else f"gap {format_gap(solution.gap)}"
    return (
        f"<Solution {solution.termination} by {by}: sensitivity {format_sensitivity(solution.evaluation.objective)} "
        f"({gap}), iteration {format_time(solution.evaluation.iteration_ns)}, {text(solution.plan)[1:-1]}>"
    )


@text.register
def _(front: Front) -> str:
    resource, form = traded(front)
    if not front.points:
        return f"<Front of {front.problem.name!r} against {resource}: no point>"
    first, last = front.points[0], front.points[-1]
    return (
        f"<Front of {front.problem.name!r} against {resource}: {len(front)} points by {front.method}, "
        f"from {form(first.use)} at sensitivity {format_sensitivity(first.objective)} to {form(last.use)} at "
        f"{format_sensitivity(last.objective)}>"
    )


@singledispatch
def html(value: object) -> str:
    """A graph, problem, plan, solution or front as HTML for a notebook: its line, then tables and drawings."""
    raise TypeError(f"a {type(value).__name__} has no display")


@html.register
def _(graph: OpGraph) -> str:
    header = ("operator", "type", "role", "inputs", "output elements", "FLOPs")
    rows = [
        (o.name, o.op_type, o.role.value, ", ".join(o.inputs), _count(o.output_elements), _count(o.flops))
        for o in graph.operators[:_MAX_ROWS]
    ]
    return _heading(graph) + _folded("operators", _table(header, rows), len(graph))


@html.register
def _(problem: Problem) -> str:
    rows = [(d.name, str(d.count), ", ".join(d.precisions), format_memory(d.memory_limit_kib)) for d in problem.devices]
    table = _table(("device type", "count", "precisions", "memory limit"), rows)
    return _heading(problem) + table + _notes(problem.extras)


@html.register
def _(plan: Plan) -> str:
    legend = "".join(
        f'<span style="display:inline-block;width:0.8em;height:0.8em;background:{color(name)}"></span> {escape(name)} '
        for name in by_rank(name for choices in plan.devices.values() for name in choices.values())
    )
    parts = [_heading(plan), f"<div>{legend}</div>"]
    for device, choices in plan.devices.items():
        table = _table(("operator", "precision"), list(choices.items())[:_MAX_ROWS])
        parts.append(f"<div>{escape(device)}</div>{_strip(choices)}")
        parts.append(_folded(f"operators on {device}", table, len(choices)))
    return "".join(parts) + _notes(plan.extras)


@html.register
def _(solution: Solution) -> str:
    if solution.plan is None or solution.evaluation is None:
        return _heading(solution)
    evaluation = solution.evaluation
    rows = [("iteration time", format_time(evaluation.iteration_ns), format_time(evaluation.latency_limit_ns))]
    rows += [
        (f"memory of {device.name}", format_memory(device.memory_kib), format_memory(device.memory_limit_kib))
        for device in evaluation.devices.values()
    ]
    return _heading(solution) + _table(("", "used", "limit"), rows) + html(solution.plan)


@html.register
def _(front: Front) -> str:
    from qsync_opt.report.figures import front_svg

    devices = [device.name for device in front.problem.devices]
    header = ("iteration time", *(f"memory of {name}" for name in devices), "sensitivity", "gap", "limits")
    rows = [
        (
            format_time(point.iteration_ns),
            *(format_memory(point.memory_kib[name]) for name in devices),
            format_sensitivity(point.objective),
            "" if point.gap is None else format_gap(point.gap),
            "kept" if point.feasible else "broken",
        )
        for point in front.points
    ]
    table = _folded("points", _table(header, rows), len(rows))
    return _heading(front) + front_svg(front) + table + _notes(front.problem.extras)


def levels(precisions: Iterable[str]) -> str:
    """How many of each precision, coarsest first: ``"7 INT8, 39 FP16"``."""
    counts = Counter(precisions)
    return ", ".join(f"{counts[name]} {name}" for name in by_rank(counts)) or "nothing"


def by_rank(precisions: Iterable[str]) -> list[str]:
    """Each precision once, coarsest first; formats that this package does not know come last, by name."""
    return sorted(set(precisions), key=lambda name: (FORMATS[name].rank if name in FORMATS else len(FORMATS), name))


def color(precision: str) -> str:
    """Color of a precision; one grey for formats that this package does not know."""
    return COLORS.get(precision, OTHER_COLOR)


def traded(front: Front) -> tuple[str, Callable[[float], str]]:
    """The resource that a front trades for sensitivity, and how its amounts are written."""
    return ("iteration time", format_time) if front.device is None else (f"memory of {front.device}", format_memory)


def _count(value: int) -> str:
    for factor, letter in ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k")):
        if value >= factor:
            return f"{value / factor:.3g} {letter}"
    return str(value)


def _estimated(extras: Extras) -> str:
    return " from estimates" if estimate_lines(extras) else ""


def _heading(value: object) -> str:
    return f"<div><b>{escape(text(value)[1:-1])}</b></div>"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th scope='col' {_CELL}>{escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td {_CELL}>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    style = "border-collapse:collapse;font-size:0.9em"
    return f'<table style="{style}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _folded(title: str, content: str, total: int) -> str:
    summary = f"the first {_MAX_ROWS} of {total} {title}" if total > _MAX_ROWS else f"{total} {title}"
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def _strip(choices: Mapping[str, str]) -> str:
    """A box per operator in the color of its precision."""
    boxes = "".join(
        f'<span title="{escape(name)}: {escape(precision)}" '
        f'style="flex:1 1 2px;height:18px;background:{color(precision)}"></span>'
        for name, precision in choices.items()
    )
    return f'<div style="display:flex;max-width:900px" role="img" aria-label="{levels(choices.values())}">{boxes}</div>'


def _notes(extras: Extras) -> str:
    return "".join(f"<div><i>Note: {escape(line)}</i></div>" for line in estimate_lines(extras))


@singledispatch
def table(value: object) -> Any:
    """A ``pandas.DataFrame`` of a graph, problem, plan, evaluation or front.

    Raises:
        NotInstalledError: pandas is missing; the text holds the install line.
    """
    raise TypeError(f"a {type(value).__name__} has no table")


@table.register
def _(graph: OpGraph) -> Any:
    """One row per operator."""
    columns = ("operator", "type", "role", "module", "inputs", "output_elements", "parameters", "flops", "num_bytes")
    return _frame(
        columns,
        (
            (
                o.name,
                o.op_type,
                o.role.value,
                o.module,
                list(o.inputs),
                o.output_elements,
                list(o.parameters),
                o.flops,
                o.num_bytes,
            )
            for o in graph
        ),
    )


@table.register
def _(problem: Problem) -> Any:
    """One row per device type, operator and precision."""
    columns = ("device", "operator", "type", "role", "precision")
    costs = ("forward_ns", "backward_ns", "memory_kib", "sensitivity")
    return _frame(
        columns + costs,
        (
            (device.name, o.name, o.type, o.role.value, precision, *(getattr(cost, name) for name in costs))
            for device in problem.devices
            for o in problem.operators
            for precision, cost in device.operators[o.name].items()
        ),
    )


@table.register
def _(plan: Plan) -> Any:
    """One row per device type and operator that the plan names."""
    return _frame(
        ("device", "operator", "precision"),
        ((device, *choice) for device, choices in plan.devices.items() for choice in choices.items()),
    )


@table.register
def _(evaluation: Evaluation) -> Any:
    """One row per device type and operator: its times and those of the casts that are charged to it."""
    columns = ("device", "operator", "precision")
    times = ("forward_ns", "backward_ns", "forward_casts_ns", "backward_casts_ns")
    return _frame(
        columns + times,
        (
            (device.name, time.name, time.precision, *(getattr(time, name) for name in times))
            for device in evaluation.devices.values()
            for time in device.operators
        ),
    )


@table.register
def _(front: Front) -> Any:
    """One row per point; a memory column per device type."""
    names = [device.name for device in front.problem.devices]
    columns = ("iteration_ns", *(f"memory_kib of {name}" for name in names), "objective", "bound", "gap", "feasible")
    return _frame(
        columns,
        (
            (p.iteration_ns, *(p.memory_kib[name] for name in names), p.objective, p.bound, p.gap, p.feasible)
            for p in front.points
        ),
    )


def _frame(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Any:
    if importlib.util.find_spec("pandas") is None:
        raise NotInstalledError("to_pandas needs pandas, which is not installed: pip install 'qsync-opt[figures]'")
    return importlib.import_module("pandas").DataFrame(list(rows), columns=list(columns))
