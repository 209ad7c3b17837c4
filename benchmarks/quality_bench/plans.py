"""Plans at equal predicted time, one per indicator, by a cost model that is simple on purpose.

Time of an operator is its scalar multiplications over the rate of the format: 8-bit units multiply twice as fast as
16-bit ones. With a 16-bit backward pass only one of the three products of an 8-bit operator gains.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import qsync_opt
from qsync_opt.model import Role
from qsync_opt.numerics import FORMATS, PrecisionFormats
from qsync_opt.sensitivity import ModelStatistics, OperatorStatistics, RoundingFactor, TensorStatistics
from qsync_opt.training import CastCost, Communication, OperatorCost, Problem, ProblemDevice, ProblemOperator

LOW, HIGH = "INT8", "BF16"
COST_MODEL = "multiplications; 8-bit products take half the time of 16-bit ones, nothing else costs anything"
_DEVICE = "worker"
_HALF = PrecisionFormats(output=HIGH, gradient_input=HIGH, gradient_output=HIGH)
_UNIT = 1 << 12
"""Multiplications per unit of time, small beside any operator."""


def operator_cost(multiplications: int, precision: str, backward: str, sensitivity: float) -> OperatorCost:
    """Time of forward and backward pass, in units of two 8-bit multiplications each."""
    work = max(1, multiplications // _UNIT)
    fast = precision == LOW
    return OperatorCost(
        forward_ns=work if fast else 2 * work,
        backward_ns=2 * work if fast and backward == "eight" else 4 * work,
        memory_kib=0,
        sensitivity=sensitivity,
    )


def problem(
    multiplications: Mapping[str, int], sensitivities: Mapping[str, Mapping[str, float]], backward: str
) -> Problem:
    """Choice of LOW or HIGH for every operator, at most half way between all LOW and all HIGH."""
    tables = {
        name: {p: operator_cost(work, p, backward, sensitivities[name][p]) for p in (LOW, HIGH)}
        for name, work in multiplications.items()
    }
    ends = [sum(t[p].forward_ns + t[p].backward_ns for t in tables.values()) for p in (LOW, HIGH)]
    free = CastCost(base_ns=0, ns_per_mi_elements=0)
    device = ProblemDevice(
        name=_DEVICE,
        count=1,
        memory_limit_kib=0,
        precisions={LOW: _HALF, HIGH: _HALF},
        casts={(a, b): free for a in (LOW, HIGH) for b in (LOW, HIGH) if a != b},
        operators=tables,
    )
    operators = tuple(
        ProblemOperator(name=name, type="product", role=Role.ADJUSTABLE, inputs=(), output_elements=0, bucket=None)
        for name in multiplications
    )
    return Problem(
        name="half way",
        formats={LOW: FORMATS[LOW].num_bytes, HIGH: FORMATS[HIGH].num_bytes},
        operators=operators,
        communication=Communication(),
        optimizer_ns=0,
        latency_limit_ns=sum(ends) // 2,
        devices=(device,),
    )


def plan_half_way(
    multiplications: Mapping[str, int], sensitivities: Mapping[str, Mapping[str, float]], backward: str
) -> dict[str, str]:
    """The plan of least total sensitivity at the time half way between uniform LOW and uniform HIGH.

    Raises:
        RuntimeError: The solver found none, which cannot happen: uniform LOW fits.
    """
    solution = qsync_opt.solve(problem(multiplications, sensitivities, backward))
    if solution.plan is None:
        raise RuntimeError(f"no plan: {solution.reason}")
    return dict(solution.plan.devices[_DEVICE])


def low_share(plan: Mapping[str, str], multiplications: Mapping[str, int]) -> float:
    """Share of the multiplications that run LOW."""
    return sum(work for name, work in multiplications.items() if plan[name] == LOW) / sum(multiplications.values())


def magnified(statistics: ModelStatistics, factor: float) -> ModelStatistics:
    """Statistics as they would be if 8-bit rounding erred ``factor`` times as much."""

    def tensor(found: TensorStatistics) -> TensorStatistics:
        rounding = {
            kind: RoundingFactor(stochastic=r.stochastic * factor**2, nearest=r.nearest * factor**2)
            if kind.startswith(("INT8", "FP8"))
            else r
            for kind, r in found.rounding.items()
        }
        return dataclasses.replace(found, rounding=rounding)

    def operator(found: OperatorStatistics) -> OperatorStatistics:
        return dataclasses.replace(found, **{name: tensor(part) for name, part in found.tensors()})

    return dataclasses.replace(statistics, operators=tuple(map(operator, statistics.operators)))
