"""Graphs, problems, plans, evaluations and fronts as pandas tables; pandas is an optional package.

Times are integer nanoseconds, memory is integer KiB, as in the files.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from qsync_opt.errors import NotInstalledError

if TYPE_CHECKING:
    from qsync_opt.model import OpGraph
    from qsync_opt.training import Evaluation, Front, Plan, Problem


def _frame(rows: Iterable[Mapping[str, Any]], columns: tuple[str, ...]) -> Any:
    """A table with these columns, also where there are no rows."""
    if importlib.util.find_spec("pandas") is None:
        raise NotInstalledError("to_pandas needs pandas, which is not installed: pip install 'qsync-opt[figures]'")
    return importlib.import_module("pandas").DataFrame(list(rows), columns=list(columns))


def graph_table(graph: OpGraph) -> Any:
    """One row per operator."""
    columns = ("operator", "type", "role", "module", "inputs", "output_elements", "parameters", "flops", "num_bytes")
    return _frame(
        (
            {
                "operator": o.name,
                "type": o.op_type,
                "role": o.role.value,
                "module": o.module,
                "inputs": list(o.inputs),
                "output_elements": o.output_elements,
                "parameters": list(o.parameters),
                "flops": o.flops,
                "num_bytes": o.num_bytes,
            }
            for o in graph
        ),
        columns,
    )


def problem_table(problem: Problem) -> Any:
    """One row per device type, operator and precision."""
    columns = ("device", "operator", "type", "role", "precision")
    costs = ("forward_ns", "backward_ns", "memory_kib", "sensitivity")
    return _frame(
        (
            {
                "device": device.name,
                "operator": operator.name,
                "type": operator.type,
                "role": operator.role.value,
                "precision": precision,
                **{name: getattr(cost, name) for name in costs},
            }
            for device in problem.devices
            for operator in problem.operators
            for precision, cost in device.operators[operator.name].items()
        ),
        columns + costs,
    )


def plan_table(plan: Plan) -> Any:
    """One row per device type and operator that the plan names."""
    return _frame(
        (
            {"device": device, "operator": operator, "precision": precision}
            for device, choices in plan.devices.items()
            for operator, precision in choices.items()
        ),
        ("device", "operator", "precision"),
    )


def evaluation_table(evaluation: Evaluation) -> Any:
    """One row per device type and operator: its times and those of the casts that are charged to it."""
    columns = ("device", "operator", "precision", "forward_ns", "backward_ns", "forward_casts_ns", "backward_casts_ns")
    return _frame(
        (
            {
                "device": device.name,
                "operator": time.name,
                "precision": time.precision,
                "forward_ns": time.forward_ns,
                "backward_ns": time.backward_ns,
                "forward_casts_ns": time.forward_total_ns - time.forward_ns,
                "backward_casts_ns": time.backward_total_ns - time.backward_ns,
            }
            for device in evaluation.devices.values()
            for time in device.operators
        ),
        columns,
    )


def front_table(front: Front) -> Any:
    """One row per point; a memory column per device type."""
    names = [device.name for device in front.problem.devices]
    memory = tuple(f"memory_kib of {name}" for name in names)
    return _frame(
        (
            {
                "iteration_ns": point.iteration_ns,
                **{f"memory_kib of {name}": point.memory_kib[name] for name in names},
                "objective": point.objective,
                "bound": point.bound,
                "gap": point.gap,
                "feasible": point.feasible,
            }
            for point in front.points
        ),
        ("iteration_ns", *memory, "objective", "bound", "gap", "feasible"),
    )
