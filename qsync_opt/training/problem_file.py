"""How a `Problem` looks in a file: JSON in, JSON out, nothing lost on the way."""

from __future__ import annotations

import os
from typing import Any

from qsync_opt.errors import ProblemError
from qsync_opt.io import Fields, merge_extras, near_match, read_json, split_extras
from qsync_opt.model import Role
from qsync_opt.numerics import PrecisionFormats
from qsync_opt.training.problem import (
    PROBLEM_FORMAT,
    CastCost,
    Communication,
    OperatorCost,
    Optimum,
    Problem,
    ProblemDevice,
    ProblemOperator,
)


def load_problem(path: str | os.PathLike[str]) -> Problem:
    """Read and check a problem file.

    Raises:
        ProblemError: The file is missing, truncated, of another format version, or breaks a rule of the format; one
            line that names the file, the place and what is allowed.

    Source: the problem file format of this package, "qsync-problem/1".
    """
    data = read_json(path, (PROBLEM_FORMAT,))
    try:
        return problem_from_json(data)
    except ProblemError as failure:
        raise ProblemError(f"{os.fspath(path)}: {failure}") from failure


def problem_from_json(data: Any) -> Problem:
    """Build a `Problem` from the JSON data of a problem file; see `load_problem`."""
    clean, extras = split_extras(data)
    fields = Fields(clean, "problem")
    fields.version(PROBLEM_FORMAT)
    communication = Fields(fields.take("communication"), "communication")
    optimum = fields.take_or("optimum", None)
    arguments = {
        "name": fields.text("name"),
        "formats": fields.mapping("formats"),
        "operators": tuple(_operator(item, i) for i, item in enumerate(fields.sequence("operators"))),
        "communication": Communication(
            allreduce_ns=communication.integers("allreduce_ns"),
            peer_ready_ns=communication.integers("peer_ready_ns"),
        ),
        "optimizer_ns": fields.integer("optimizer_ns"),
        "latency_limit_ns": fields.integer("latency_limit_ns"),
        "devices": tuple(_device(item, i) for i, item in enumerate(fields.sequence("devices"))),
        "cast_sharing": fields.take_or("cast_sharing", "edge"),
        "optimum": None if optimum is None else _optimum(optimum),
    }
    communication.finish()
    fields.finish()
    return Problem(**arguments, extras=extras)


def _operator(data: Any, index: int) -> ProblemOperator:
    name = data.get("name") if isinstance(data, dict) else None
    fields = Fields(data, f"operator {name!r}" if name else f"operators[{index}]")
    role = fields.text("role")
    if role not in set(Role):
        fields.fail(f"role is {role!r}{near_match(role, Role)}; allowed are {', '.join(Role)}")
    operator = ProblemOperator(
        name=fields.text("name"),
        type=fields.text("type"),
        role=Role(role),
        inputs=fields.texts("inputs"),
        output_elements=fields.integer("output_elements"),
        bucket=None if fields.take("bucket") is None else fields.integer("bucket"),
    )
    fields.finish()
    return operator


def _device(data: Any, index: int) -> ProblemDevice:
    name = data.get("name") if isinstance(data, dict) else None
    fields = Fields(data, f"device {name!r}" if name else f"devices[{index}]")
    precisions = {}
    for precision, entry in fields.children("precisions"):
        precisions[precision] = PrecisionFormats(
            output=entry.text("output"),
            gradient_input=entry.text("gradient_input"),
            gradient_output=entry.text("gradient_output"),
        )
        entry.finish()
    casts = {}
    for pair, entry in fields.children("casts"):
        source, separator, target = pair.partition(">")
        if not separator or not source or not target:
            entry.fail("the key must read FROM>TO, such as 'FP16>INT8'")
        casts[source, target] = CastCost(
            base_ns=entry.integer("base_ns"), ns_per_mi_elements=entry.integer("ns_per_mi_elements")
        )
        entry.finish()
    operators = {}
    for operator, table in fields.children("operators"):
        operators[operator] = _table(table)
    device = ProblemDevice(
        name=fields.text("name"),
        count=fields.integer("count", minimum=1),
        memory_limit_kib=fields.integer("memory_limit_kib"),
        precisions=precisions,
        casts=casts,
        operators=operators,
    )
    fields.finish()
    return device


def _table(table: Fields) -> dict[str, OperatorCost]:
    costs = {}
    for precision in table:
        entry = Fields(table.take(precision), f"{table.where} {precision}")
        costs[precision] = OperatorCost(
            forward_ns=entry.integer("forward_ns"),
            backward_ns=entry.integer("backward_ns"),
            memory_kib=entry.integer("memory_kib"),
            sensitivity=entry.number("sensitivity"),
        )
        entry.finish()
    return costs


def _optimum(data: Any) -> Optimum:
    fields = Fields(data, "optimum")
    devices = {}
    for device, plan in fields.children("devices"):
        devices[device] = {operator: plan.text(operator) for operator in plan}
    optimum = Optimum(objective=fields.number("objective"), bound=fields.number("bound"), devices=devices)
    fields.finish()
    return optimum


def problem_to_json(problem: Problem) -> dict[str, Any]:
    """Return the JSON data of a problem file, extension keys where they were."""
    data: dict[str, Any] = {
        "format": PROBLEM_FORMAT,
        "name": problem.name,
        "formats": dict(problem.formats),
        "operators": [
            {
                "name": operator.name,
                "type": operator.type,
                "role": operator.role.value,
                "inputs": list(operator.inputs),
                "output_elements": operator.output_elements,
                "bucket": operator.bucket,
            }
            for operator in problem.operators
        ],
        "communication": {
            "allreduce_ns": list(problem.communication.allreduce_ns),
            "peer_ready_ns": list(problem.communication.peer_ready_ns),
        },
        "optimizer_ns": problem.optimizer_ns,
        "latency_limit_ns": problem.latency_limit_ns,
        "devices": [_device_to_json(device) for device in problem.devices],
        "optimum": None,
    }
    if problem.cast_sharing != "edge":
        data["cast_sharing"] = problem.cast_sharing
    if problem.optimum is not None:
        data["optimum"] = {
            "objective": problem.optimum.objective,
            "bound": problem.optimum.bound,
            "devices": {device: dict(plan) for device, plan in problem.optimum.devices.items()},
        }
    return merge_extras(data, problem.extras)


def _device_to_json(device: ProblemDevice) -> dict[str, Any]:
    return {
        "name": device.name,
        "count": device.count,
        "memory_limit_kib": device.memory_limit_kib,
        "precisions": {
            precision: {
                "output": borders.output,
                "gradient_input": borders.gradient_input,
                "gradient_output": borders.gradient_output,
            }
            for precision, borders in device.precisions.items()
        },
        "casts": {
            f"{source}>{target}": {"base_ns": cost.base_ns, "ns_per_mi_elements": cost.ns_per_mi_elements}
            for (source, target), cost in device.casts.items()
        },
        "operators": {
            operator: {
                precision: {
                    "forward_ns": cost.forward_ns,
                    "backward_ns": cost.backward_ns,
                    "memory_kib": cost.memory_kib,
                    "sensitivity": cost.sensitivity,
                }
                for precision, cost in table.items()
            }
            for operator, table in device.operators.items()
        },
    }
