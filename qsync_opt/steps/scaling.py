"""Costs of operators in precisions that they were not recorded in, scaled from precisions that they were."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from qsync_opt.model import Operator, OpGraph, Role
from qsync_opt.numerics import number_format
from qsync_opt.steps.cases import StepFlow, arrival, result_format, width
from qsync_opt.steps.costs import SIZES, Case, CaseCost, StepCosts
from qsync_opt.steps.memory_timeline import scaled_timeline
from qsync_opt.steps.queues import NEVER, Work

_Pairs = Sequence[tuple[CaseCost, CaseCost]]
"""Costs of operators in the precision scaled from, and in the one scaled to."""


def scaled_costs(graph: OpGraph, costs: StepCosts, available: Mapping[str, Sequence[str]]) -> StepCosts:
    """Step costs in which every adjustable operator has each of its precisions, scaled where it was not recorded.

    Args:
        graph: The model.
        costs: Observed.
        available: Precisions of every adjustable operator; one that no operator was recorded in is left out, because
            its cost is unknown.

    Source: ours.
    """
    flow = StepFlow(graph, costs.half_format)
    table = _by_operator(costs)
    kinds = {flow.signature(i): operator.op_type for i, operator in enumerate(graph)}
    added: dict[Case, CaseCost] = {}
    for i, operator in enumerate(graph):
        if operator.role is not Role.ADJUSTABLE:
            continue
        recorded = table.get(flow.signature(i), {})
        for precision in available.get(operator.name, ()):
            if precision in recorded or not recorded:
                continue
            rank, bytes_wide = number_format(precision).rank, width(arrival(precision))
            source = min(recorded, key=lambda p: (width(arrival(p)) != bytes_wide, abs(number_format(p).rank - rank)))
            pairs = _pairs(table, kinds, operator.op_type, source, precision)
            if pairs:
                case, cost = _scaled(operator, *recorded[source], precision, pairs, costs.half_format)
                added[case] = cost
    return replace(costs, cases={**costs.cases, **added}) if added else costs


def scaled_operators(graph: OpGraph, costs: StepCosts) -> dict[tuple[str, str], tuple[str, ...]]:
    """(Precision, precision that it was scaled from) to the operators concerned, in the order of the graph."""
    flow = StepFlow(graph, costs.half_format)
    sources: dict[str, dict[str, str]] = {}
    for case, cost in costs.cases.items():
        if cost.scaled_from:
            sources.setdefault(case.signature, {})[case.precision] = cost.scaled_from
    names: dict[tuple[str, str], list[str]] = {}
    for i, operator in enumerate(graph):
        for pair in sources.get(flow.signature(i), {}).items():
            names.setdefault(pair, []).append(operator.name)
    return {pair: tuple(operators) for pair, operators in names.items()}


def _by_operator(costs: StepCosts) -> dict[str, dict[str, tuple[Case, CaseCost]]]:
    """Signature to precision to the case that was observed most often."""
    table: dict[str, dict[str, tuple[Case, CaseCost]]] = {}
    for case, cost in costs.cases.items():
        if case.precision and not cost.scaled_from:
            row = table.setdefault(case.signature, {})
            if case.precision not in row or row[case.precision][1].samples < cost.samples:
                row[case.precision] = (case, cost)
    return table


def _pairs(
    table: Mapping[str, Mapping[str, tuple[Case, CaseCost]]],
    kinds: Mapping[str, str],
    kind: str,
    source: str,
    target: str,
) -> _Pairs:
    """Costs of operators that were recorded in both precisions: of the same kind if there are any, else all."""

    def both(signatures: Iterable[str]) -> Iterator[tuple[CaseCost, CaseCost]]:
        for signature in signatures:
            row = table[signature]
            if source in row and target in row:
                yield row[source][1], row[target][1]

    return list(both(s for s in table if kinds.get(s) == kind)) or list(both(table))


def _scaled(
    operator: Operator, case: Case, cost: CaseCost, precision: str, pairs: _Pairs, half_format: str
) -> tuple[Case, CaseCost]:
    """Case and cost in another precision, as many times as expensive as the operators of ``pairs`` are in it."""
    wanted = arrival(precision)
    inputs = tuple(wanted if name else "" for name in case.inputs) if wanted else case.inputs
    changes: dict[str, Any] = {
        name: _scaled_work(getattr(cost, name), [(getattr(a, name), getattr(b, name)) for a, b in pairs])
        for name in ("forward", "backward")
    }
    same_width = width(arrival(case.precision)) == width(wanted)
    for name in ("kernel_ns",) if same_width else (*SIZES, "kernel_ns"):  # equal widths take equal memory
        before, after = (sum(abs(getattr(pair[k], name)) for pair in pairs) for k in (0, 1))
        changes[name] = round(getattr(cost, name) * after / before) if before else getattr(cost, name)
    if cost.timeline and not same_width:
        before, after = (sum(abs(entry[2]) for pair in pairs for entry in pair[k].timeline) for k in (0, 1))
        changes["timeline"] = scaled_timeline(cost.timeline, after / before if before else 1.0)
    output = result_format(operator, precision, inputs, half_format)
    scaled = replace(cost, output=output, samples=0, scaled_from=case.precision, **changes)
    return Case(case.signature, precision, inputs), scaled


def _scaled_work(work: Work, pairs: Sequence[tuple[Work, Work]]) -> Work:
    host, device = (_ratio([(a[k], b[k]) for a, b in pairs]) for k in (0, 1))
    lag = work.lag if work.lag == NEVER else round(work.lag * (device if work.device else host))
    return Work(round(work.host * host), round(work.device * device), lag)


def _ratio(pairs: Sequence[tuple[int, int]]) -> float:
    before, after = (sum(pair[k] for pair in pairs) for k in (0, 1))
    return after / before if before and after else 1.0
