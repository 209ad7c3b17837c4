"""Plans of one simulated time and memory, one per indicator, on a card as its data sheet describes it.

Nothing is measured: the time of an operator is its multiplications at the data sheet's rate of the format, its memory
the saved input in the format's bytes. Every indicator solves the same problem, so that its plan is the best of its kind
within the same two limits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import qsync_opt
from qsync_opt.model import Role
from qsync_opt.numerics import FORMATS, formats_for
from qsync_opt.sensitivity import ModelStatistics
from qsync_opt.solving import TerminationStatus
from qsync_opt.training import CastCost, Communication, OperatorCost, Problem, ProblemDevice, ProblemOperator

CARD = "L4"
SCALE = 1000
"""Batches of the simulated card over those that are trained, so that limits are not of single bytes."""
COST_MODEL = (
    f"simulated, {CARD} at its data sheet's rates: multiplications alone (with a backward pass in 16 bits one product "
    "of three is in 8 bits), memory of saved inputs; both limits half way between uniform lowest and uniform BF16"
)
_BYTES = {"INT8-BWD8": 1, "INT8": 1, "BF16": 2, "FP32": 4}


@dataclass(frozen=True, slots=True)
class Size:
    """Of an operator in one training step: scalar multiplications and elements of its saved input."""

    multiplications: int
    saved: int


def sizes(statistics: ModelStatistics) -> dict[str, Size]:
    """Of every operator that is a product."""
    return {
        o.name: Size(o.calls * sum(p.volume for p in o.products), o.calls * o.first.elements)
        for o in statistics.operators
        if o.products
    }


def operator_cost(size: Size, precision: str, sensitivity: float) -> OperatorCost:
    """Time of both passes and memory of an operator."""
    peak = qsync_opt.data_sheet(CARD).peak_flops

    def nanoseconds(products: int, operands: str) -> int:
        return round(2e9 * SCALE * products * size.multiplications / peak[operands])

    operands = FORMATS[precision].operands
    backward = "BF16" if precision == "INT8" else operands
    return OperatorCost(
        forward_ns=nanoseconds(1, operands),
        backward_ns=nanoseconds(2, backward),
        memory_kib=SCALE * size.saved * _BYTES[precision] // 1024,
        sensitivity=sensitivity,
    )


def problem(
    operators: Mapping[str, Size], sensitivities: Mapping[str, Mapping[str, float]], menu: Mapping[str, tuple[str, ...]]
) -> Problem:
    """Choice among the menu of every operator, within the time and memory half way from its lowest to BF16.

    Args:
        operators: Their sizes.
        sensitivities: Operator to precision to value.
        menu: Operator to precisions, the lowest first; BF16 is among them.
    """
    tables = {
        name: {p: operator_cost(size, p, sensitivities[name][p]) for p in menu[name]}
        for name, size in operators.items()
    }

    def half_way(cost: str) -> int:
        lowest, half = (sum(_total(t[p], cost) for t, p in pairs) for pairs in _ends(tables, menu))
        return (lowest + half) // 2

    precisions = formats_for([p for p in FORMATS if any(p in row for row in menu.values())], "BF16")
    free = CastCost(base_ns=0, ns_per_mi_elements=0)
    device = ProblemDevice(
        name=CARD,
        count=1,
        memory_limit_kib=half_way("memory_kib"),
        precisions=precisions,
        casts={(a, b): free for a in precisions for b in precisions if a != b},
        operators=tables,
    )
    return Problem(
        name="half way",
        formats={name: FORMATS[name].num_bytes for name in precisions},
        operators=tuple(
            ProblemOperator(name=name, type="product", role=Role.ADJUSTABLE, inputs=(), output_elements=0, bucket=None)
            for name in operators
        ),
        communication=Communication(),
        optimizer_ns=0,
        latency_limit_ns=half_way("time"),
        devices=(device,),
    )


def plan(problem: Problem) -> dict[str, str]:
    """The proved plan of least sensitivity.

    Raises:
        RuntimeError: None was proved, which cannot happen for so few operators: uniform lowest fits.
    """
    solution = qsync_opt.solve(problem, method="exact")
    if solution.plan is None or solution.termination is not TerminationStatus.OPTIMAL:
        raise RuntimeError(f"no proved plan: {solution}")
    return dict(solution.plan.devices[CARD])


def _total(cost: OperatorCost, what: str) -> int:
    return cost.memory_kib if what == "memory_kib" else cost.forward_ns + cost.backward_ns


def _ends(
    tables: Mapping[str, Mapping[str, OperatorCost]], menu: Mapping[str, tuple[str, ...]]
) -> tuple[list[tuple[Mapping[str, OperatorCost], str]], list[tuple[Mapping[str, OperatorCost], str]]]:
    return [(tables[n], menu[n][0]) for n in tables], [(tables[n], "BF16") for n in tables]
