"""Small problems with known optima, and random problems and plans.

The optima are derived in the docstrings.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qsync_opt.model import Role
from qsync_opt.numerics import PrecisionFormats, formats_for
from qsync_opt.training import (
    CastCost,
    Communication,
    OperatorCost,
    Plan,
    Problem,
    ProblemDevice,
    ProblemOperator,
    evaluate,
)

FORMATS = {"INT8": 1, "FP16": 2, "FP32": 4}
BORDERS = formats_for(FORMATS, "FP16")


def cost(forward_ns: int, backward_ns: int, memory_kib: int, sensitivity: float = 0.0) -> OperatorCost:
    """An `OperatorCost` from its four numbers."""
    return OperatorCost(forward_ns=forward_ns, backward_ns=backward_ns, memory_kib=memory_kib, sensitivity=sensitivity)


def operator(
    name: str, inputs: Sequence[str] = (), *, role: Role = Role.ADJUSTABLE, elements: int = 0, bucket: int | None = None
) -> ProblemOperator:
    """A `ProblemOperator` whose type follows from its role."""
    kind = {Role.ADJUSTABLE: "MatMul", Role.DEPENDENT: "Add", Role.FIXED: "Loss"}[role]
    return ProblemOperator(
        name=name, type=kind, role=role, inputs=tuple(inputs), output_elements=elements, bucket=bucket
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A problem and its optimum; ``objective`` is None if no plan meets the limits.

    ``reason`` holds texts that the reason for infeasibility must contain.
    """

    problem: Problem
    objective: float | None
    reason: tuple[str, ...] = ()


def _instance(
    name: str,
    operators: Sequence[ProblemOperator],
    tables: Mapping[str, Mapping[str, OperatorCost]],
    *,
    objective: float,
    memory_limit_kib: int,
    cast_ns: int = 0,
    **limits: Any,
) -> Instance:
    """A problem of one device; ``limits`` are further fields of `Problem`."""
    cast = CastCost(base_ns=cast_ns, ns_per_mi_elements=0)
    device = ProblemDevice(
        name="T4",
        count=1,
        memory_limit_kib=memory_limit_kib,
        precisions=BORDERS,
        casts={(a, b): cast for a in FORMATS for b in FORMATS if a != b},
        operators=tables,
    )
    fields = {"communication": Communication(), "optimizer_ns": 0, **limits}
    problem = Problem(name=name, formats=FORMATS, operators=tuple(operators), devices=(device,), **fields)
    return Instance(problem=problem, objective=objective)


def _two_levels(sensitivity: float) -> dict[str, OperatorCost]:
    """FP16 at (1000, 2000) ns and 10 KiB; FP32 at twice all that, and not sensitive."""
    return {"FP16": cost(1000, 2000, 10, sensitivity), "FP32": cost(2000, 4000, 20)}


def chain() -> Instance:
    """Three operators in a row, free casts.

    All FP16 takes 9000 ns and 30 KiB; each raise adds 3000 ns and 10 KiB. The limits of 15000 ns and 50 KiB both allow
    two raises, so the least sensitive of 1, 0.5 and 0.25 stays: 0.25.
    """
    tables = {"a": _two_levels(1.0), "b": _two_levels(0.5), "c": _two_levels(0.25)}
    operators = (operator("a"), operator("b", ["a"]), operator("c", ["b"]))
    return _instance("chain", operators, tables, latency_limit_ns=15000, memory_limit_kib=50, objective=0.25)


def cast_coupling() -> Instance:
    """Three operators in a row where a cast costs 2000 ns, so that neighbours should be raised together.

    All FP16: 9000 ns. Raising one end adds 3000 and a forward and a backward cast of 2000 each: 16000. Raising the
    middle adds four casts: 20000. Raising a and b, or b and c, adds 6000 and two casts: 19000. All: 18000, no cast.
    With 19000 ns and sensitivities 1, 1, 1 all FP32 fits: 0. With memory for two raises (50 KiB): 1.
    """
    tables = {name: _two_levels(1.0) for name in "abc"}
    operators = (operator("a"), operator("b", ["a"]), operator("c", ["b"]))
    return _instance(
        "cast_coupling", operators, tables, latency_limit_ns=19000, memory_limit_kib=50, cast_ns=2000, objective=1.0
    )


def diamond() -> Instance:
    """A feeds b and c, a dependent add joins them, a fixed FP32 loss ends it; a cast costs 500 ns and 4 KiB or 2 KiB.

    Own costs of a, b, c are (1000, 2000) ns, 10 KiB in FP16 and double in FP32; the add costs (100, 100), 1 KiB in
    either; the loss nothing. Outputs have 1024 elements: a buffer is 4 KiB into FP32 and 2 KiB into FP16.

    Sensitivities are 1 (a), 2 (b), 4 (c). Plans by what is raised, with casts as (edges that cast) * (500 + 500) ns:

    * none: 9000 + 200 + add>loss = 10200 ns, 31 + 4 = 35 KiB, objective 7
    * c: add turns FP32. 12200 + a>c, b>add = 14200 ns, 41 + 4 + 4 = 49 KiB, objective 3
    * b: the same with b and c exchanged, objective 5
    * a: 12200 + a>b, a>c, add>loss = 15200 ns, objective 6
    * b, c: 15200 + a>b, a>c = 17200 ns, 51 + 8 = 59 KiB, objective 1
    * a, c: 15200 + a>b, b>add = 17200 ns, 51 + 2 + 4 = 57 KiB, objective 2
    * all: 18200 ns and no cast, 61 KiB, objective 0

    The limits of 18200 ns and 58 KiB exclude "b, c" and "all": 2.
    """
    operators = (
        operator("a", elements=1024),
        operator("b", ["a"], elements=1024),
        operator("c", ["a"], elements=1024),
        operator("add", ["b", "c"], role=Role.DEPENDENT, elements=1024),
        operator("loss", ["add"], role=Role.FIXED, elements=1),
    )
    tables: dict[str, dict[str, OperatorCost]] = {
        "a": _two_levels(1.0),
        "b": _two_levels(2.0),
        "c": _two_levels(4.0),
        "add": {"FP16": cost(100, 100, 1), "FP32": cost(100, 100, 1)},
        "loss": {"FP32": cost(0, 0, 0)},
    }
    return _instance(
        "diamond", operators, tables, latency_limit_ns=18200, memory_limit_kib=58, cast_ns=500, objective=2.0
    )


def buckets() -> Instance:
    """Two operators and two gradient buckets: the first all-reduce is long, so the *last* operator must stay fast.

    b (bucket 0) runs backward first. With D = (5000, 1000): R_0 + 6000 <= limit, R_1 + 1000 <= limit. All FP16:
    forward 2000, R_0 = 4000, R_1 = 6000. Raising a: forward 3000, R_0 = 5000, R_1 = 9000; raising b: forward 3000,
    R_0 = 7000, R_1 = 9000. With 12000 ns, a alone may rise (5000 + 6000 = 11000; b: 7000 + 6000 = 13000), although b
    is more sensitive (4 against 1): 4.
    """
    tables = {"a": _two_levels(1.0), "b": _two_levels(4.0)}
    operators = (operator("a", bucket=1), operator("b", ["a"], bucket=0))
    return _instance(
        "buckets",
        operators,
        tables,
        latency_limit_ns=12000,
        memory_limit_kib=1000,
        communication=Communication(allreduce_ns=(5000, 1000), peer_ready_ns=(0, 0)),
        objective=4.0,
    )


def shared_casts() -> Instance:
    """One producer, three consumers that only have FP32: with sharing its cast is paid once, not three times.

    FP16 producer: 1000 + 2000 own, one shared forward cast of 1000 and three backward casts of 1000, three consumers
    of (100, 100): 7600 ns. FP32: 2000 + 4000 and no cast: 6600 ns. Memory: 10 + one buffer of 4 KiB against 20 KiB. At
    7600 ns and 14 KiB only the first fits: its sensitivity 3 is the optimum (edge-wise it would need 22 KiB).
    """
    operators = (
        operator("a", elements=1024),
        *(operator(name, ["a"], role=Role.FIXED, elements=1) for name in ("x", "y", "z")),
    )
    tables: dict[str, dict[str, OperatorCost]] = {"a": _two_levels(3.0)}
    tables |= {name: {"FP32": cost(100, 100, 0)} for name in ("x", "y", "z")}
    return _instance(
        "shared_casts",
        operators,
        tables,
        latency_limit_ns=7600,
        memory_limit_kib=14,
        cast_ns=1000,
        cast_sharing="producer",
        objective=3.0,
    )


def skipped_level() -> Instance:
    """A middle level that is *more* sensitive than the lowest must not stop the climb to the highest.

    INT8 0.5, FP16 0.75, FP32 0, and room for FP32: 0.
    """
    tables = {"a": {"INT8": cost(10, 20, 1, 0.5), "FP16": cost(20, 40, 2, 0.75), "FP32": cost(40, 80, 4)}}
    return _instance("skipped_level", [operator("a")], tables, latency_limit_ns=120, memory_limit_kib=4, objective=0.0)


def tie() -> Instance:
    """Two equal operators and room to raise one: either plan is optimal, 1."""
    tables = {"a": _two_levels(1.0), "b": _two_levels(1.0)}
    operators = (operator("a"), operator("b", ["a"]))
    return _instance("tie", operators, tables, latency_limit_ns=9000, memory_limit_kib=1000, objective=1.0)


def no_memory() -> Instance:
    """The chain with 29 KiB, where its lowest plan takes 30."""
    problem = chain().problem
    device = replace(problem.devices[0], memory_limit_kib=29)
    problem = replace(problem, name="no_memory", devices=(device,))
    return Instance(problem=problem, objective=None, reason=("memory", "'T4'", "30 KiB"))


def no_time() -> Instance:
    """The chain with 8999 ns, where its fastest plan takes 9000."""
    problem = replace(chain().problem, name="no_time", latency_limit_ns=8999)
    return Instance(problem=problem, objective=None, reason=("latency", "'T4'", "9000 ns"))


def late_peers() -> Instance:
    """The buckets where the fixed-precision devices alone need 10000 + 1000 ns and the limit is 10999 ns."""
    communication = Communication(allreduce_ns=(5000, 1000), peer_ready_ns=(0, 10000))
    problem = replace(buckets().problem, name="late_peers", latency_limit_ns=10999, communication=communication)
    return Instance(problem=problem, objective=None, reason=("latency", "11000 ns"))


INSTANCES: tuple[Callable[[], Instance], ...] = (
    chain,
    cast_coupling,
    diamond,
    buckets,
    shared_casts,
    skipped_level,
    tie,
    no_memory,
    no_time,
    late_peers,
)


def random_problem(source: random.Random, *, max_operators: int = 7, max_devices: int = 2) -> Problem:
    """A small random problem, valid but not always feasible.

    It mixes all roles, several and repeated inputs, precisions with border formats of their own and of others,
    sensitivities with zeros, ties and many decades, buckets in any order, and both kinds of cast sharing. Limits are
    near those of a random plan. With Hypothesis' ``randoms()`` as ``source`` this is a strategy that shrinks.

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
            (a, b): CastCost(base_ns=source.randint(0, 300), ns_per_mi_elements=source.randint(0, 900))
            for a in formats
            for b in formats
            if a != b
        },
        operators={o.name: table(o.role) for o in operators},
    )


def random_plan(source: random.Random, problem: Problem) -> Plan:
    """A plan with a random precision of its table for every adjustable operator."""
    return Plan(
        problem=problem.name,
        devices={
            device.name: {o.name: source.choice(list(device.operators[o.name])) for o in problem.adjustable}
            for device in problem.devices
        },
    )


def _with_random_limits(source: random.Random, problem: Problem) -> Problem:
    evaluation = evaluate(problem, random_plan(source, problem))
    devices = tuple(
        replace(device, memory_limit_kib=int(evaluation.memory_kib[device.name] * source.uniform(0.9, 1.4)))
        for device in problem.devices
    )
    latency_limit_ns = int(evaluation.iteration_ns * source.uniform(0.9, 1.4))
    return replace(problem, devices=devices, latency_limit_ns=latency_limit_ns)
