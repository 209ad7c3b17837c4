"""Pieces to build problems from in tests, and random problems that keep every rule of the format."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from qsync_opt.model.graph import Role
from qsync_opt.numerics.formats import PrecisionFormats
from qsync_opt.training.evaluation import evaluate
from qsync_opt.training.plan import Plan
from qsync_opt.training.problem import CastCost, Communication, OperatorCost, Problem, ProblemDevice, ProblemOperator

FORMATS = {"INT8": 1, "FP16": 2, "FP32": 4}
BORDERS: Mapping[str, PrecisionFormats] = {
    "INT8": PrecisionFormats(output="FP16", gradient_input="FP16", gradient_output="FP16"),
    "FP16": PrecisionFormats(output="FP16", gradient_input="FP16", gradient_output="FP16"),
    "FP32": PrecisionFormats(output="FP32", gradient_input="FP32", gradient_output="FP32"),
}
FREE = CastCost(base_ns=0, ns_per_mi_elements=0)


def cost(forward_ns: int, backward_ns: int, memory_kib: int, sensitivity: float = 0.0) -> OperatorCost:
    """An `OperatorCost` from its four numbers."""
    return OperatorCost(forward_ns=forward_ns, backward_ns=backward_ns, memory_kib=memory_kib, sensitivity=sensitivity)


def operator(
    name: str, inputs: Sequence[str] = (), *, role: Role = Role.ADJUSTABLE, elements: int = 0, bucket: int | None = None
) -> ProblemOperator:
    """A `ProblemOperator` whose type does not matter."""
    kind = {Role.ADJUSTABLE: "MatMul", Role.DEPENDENT: "Add", Role.FIXED: "Loss"}[role]
    return ProblemOperator(
        name=name, type=kind, role=role, inputs=tuple(inputs), output_elements=elements, bucket=bucket
    )


def all_casts(cast: CastCost = FREE, formats: Sequence[str] = tuple(FORMATS)) -> dict[tuple[str, str], CastCost]:
    """The same cost for every pair of different formats."""
    return {(a, b): cast for a in formats for b in formats if a != b}


def random_problem(source: random.Random, *, max_operators: int = 7, max_devices: int = 2) -> Problem:
    """A small random problem that keeps every rule of the format, feasible or not.

    It mixes all roles, operators with several and with repeated inputs, precisions whose border formats are their own
    or another's, sensitivities with zeros, ties and many decades, buckets in any order, and both ways of counting
    casts. Limits are drawn around those of a random plan.

    Args:
        source: Where randomness comes from; Hypothesis' ``randoms()`` makes this a strategy that shrinks.
        max_operators: Most operators.
        max_devices: Most device types.

    Source: ours.
    """
    names = ("INT8", "FP8", "FP16", "FP32")
    formats = {name: size for name, size in zip(names, (1, 1, 2, 4), strict=True) if source.random() < 0.8}
    formats = formats or {"FP32": 4}
    num_buckets = source.randint(0, 3)
    operators: list[ProblemOperator] = []
    for position in range(source.randint(1, max_operators)):
        earlier = [o.name for o in operators]
        inputs = [source.choice(earlier) for _ in range(source.choice((0, 1, 1, 2, 2, 3)))] if earlier else []
        role = source.choice((Role.ADJUSTABLE, Role.ADJUSTABLE, Role.DEPENDENT, Role.FIXED))
        bucket = source.randrange(num_buckets) if num_buckets and source.random() < 0.6 else None
        elements = source.choice((0, 1, 1000, 2**20))
        operators.append(operator(f"op{position}", inputs, role=role, elements=elements, bucket=bucket))
    devices = tuple(
        _random_device(source, f"D{i}", tuple(formats), operators) for i in range(source.randint(1, max_devices))
    )
    communication = Communication(
        allreduce_ns=tuple(source.randint(0, 3000) for _ in range(num_buckets)),
        peer_ready_ns=tuple(source.choice((0, source.randint(0, 9000))) for _ in range(num_buckets)),
    )
    problem = Problem(
        name="random",
        formats=formats,
        operators=tuple(operators),
        communication=communication,
        optimizer_ns=source.randint(0, 100),
        latency_limit_ns=2**40,
        devices=devices,
        cast_sharing=source.choice(("edge", "producer")),
    )
    return _with_random_limits(source, problem)


def _random_device(
    source: random.Random, name: str, formats: tuple[str, ...], operators: Sequence[ProblemOperator]
) -> ProblemDevice:
    def borders(precision: str) -> PrecisionFormats:
        other = source.choice(formats) if source.random() < 0.4 else precision
        return PrecisionFormats(output=other, gradient_input=source.choice((precision, other)), gradient_output=other)

    def table(role: Role) -> dict[str, OperatorCost]:
        count = 1 if role is Role.FIXED else source.randint(1, len(formats))
        levels = [0.0, 0.5, 1.0, source.random(), 10 ** source.uniform(-9, 2)]
        return {
            precision: cost(
                source.randint(0, 1000), source.randint(0, 2000), source.randint(0, 4000), source.choice(levels)
            )
            for precision in source.sample(formats, count)
        }

    return ProblemDevice(
        name=name,
        count=source.randint(1, 4),
        memory_limit_kib=2**40,
        precisions={precision: borders(precision) for precision in formats},
        casts={
            pair: CastCost(base_ns=source.randint(0, 300), ns_per_mi_elements=source.randint(0, 900))
            for pair in all_casts(formats=formats)
        },
        operators={o.name: table(o.role) for o in operators},
    )


def random_plan(source: random.Random, problem: Problem) -> Plan:
    """Any precision of its table for every adjustable operator."""
    return Plan(
        problem=problem.name,
        devices={
            device.name: {o.name: source.choice(list(device.operators[o.name])) for o in problem.adjustable}
            for device in problem.devices
        },
    )


def _with_random_limits(source: random.Random, problem: Problem) -> Problem:
    found = evaluate(problem, random_plan(source, problem))
    devices = tuple(
        replace(device, memory_limit_kib=int(found.memory_kib[device.name] * source.uniform(0.9, 1.4)))
        for device in problem.devices
    )
    latency_limit_ns = int(found.iteration_ns * source.uniform(0.9, 1.4))
    return replace(problem, devices=devices, latency_limit_ns=latency_limit_ns)
