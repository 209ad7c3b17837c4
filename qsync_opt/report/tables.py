"""Graphs, problems, plans, evaluations and fronts as pandas tables; pandas is an optional package.

Times are integer nanoseconds, memory is integer KiB, as in the files.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable, Sequence
from functools import singledispatch
from typing import Any

from qsync_opt.errors import NotInstalledError
from qsync_opt.model import OpGraph
from qsync_opt.training import Evaluation, Front, Plan, Problem


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
