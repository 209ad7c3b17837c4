"""Costs of what a device could not run for lack of memory, scaled from what it could, and marked so.

An operator that was recorded in one precision but not in another is taken to cost as many times more there as the
operators of its kind that were recorded in both; where there are none, as all that were. What it keeps and delivers
grows the same way in bytes, and stays as it is between precisions of equal width (TF32 and FP32, BF16 and FP16), which
are taken first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from qsync_opt.model.graph import Operator, OpGraph, Role
from qsync_opt.numerics.formats import number_format
from qsync_opt.steps.cases import StepFlow, arrival, delivered, width
from qsync_opt.steps.costs import SIZES, Case, CaseCost, StepCosts
from qsync_opt.steps.courses import scaled_course
from qsync_opt.steps.queues import NEVER, Work

_TIMES = ("forward", "backward")


def scaled_costs(graph: OpGraph, costs: StepCosts, available: Mapping[str, Sequence[str]]) -> StepCosts:
    """Step costs in which every adjustable operator has each of its precisions, scaled where it was not recorded.

    Args:
        graph: The model.
        costs: Observed.
        available: Precisions of every adjustable operator; one that no operator was recorded in stays away, because
            nothing tells what it costs.

    Source: ours.
    """
    flow = StepFlow(graph, costs.half_format)
    table = _by_operator(costs)
    added: dict[Case, CaseCost] = {}
    kinds: dict[str, str] = {flow.signature(i): operator.op_type for i, operator in enumerate(graph)}
    for i, operator in enumerate(graph):
        if operator.role is not Role.ADJUSTABLE:
            continue
        signature = flow.signature(i)
        recorded = table.get(signature, {})
        for precision in available.get(operator.name, ()):
            if precision in recorded or not recorded:
                continue
            rank, wide = number_format(precision).rank, width(arrival(precision))
            source = min(recorded, key=lambda p: (width(arrival(p)) != wide, abs(number_format(p).rank - rank)))
            pairs = _pairs(table, kinds, operator.op_type, source, precision)
            if pairs:
                case, cost = _scaled(operator, signature, source, precision, recorded[source], pairs, costs.half_format)
                added[case] = cost
    return replace(costs, cases={**costs.cases, **added}) if added else costs


def scaled_operators(graph: OpGraph, costs: StepCosts) -> dict[tuple[str, str], tuple[str, ...]]:
    """(Precision, precision that it was scaled from) to the operators concerned, in the order of the graph."""
    flow = StepFlow(graph, costs.half_format)
    marked: dict[str, dict[str, str]] = {}
    for case, cost in costs.cases.items():
        if cost.scaled_from:
            marked.setdefault(case.signature, {})[case.precision] = cost.scaled_from
    found: dict[tuple[str, str], list[str]] = {}
    for i, operator in enumerate(graph):
        for precision, source in marked.get(flow.signature(i), {}).items():
            found.setdefault((precision, source), []).append(operator.name)
    return {pair: tuple(names) for pair, names in found.items()}


def _by_operator(costs: StepCosts) -> dict[str, dict[str, tuple[Case, CaseCost]]]:
    """Signature to precision to the case that was met most often."""
    table: dict[str, dict[str, tuple[Case, CaseCost]]] = {}
    for case, cost in costs.cases.items():
        if case.precision and not cost.scaled_from:
            entry = table.setdefault(case.signature, {})
            if case.precision not in entry or entry[case.precision][1].samples < cost.samples:
                entry[case.precision] = (case, cost)
    return table


def _pairs(
    table: Mapping[str, Mapping[str, tuple[Case, CaseCost]]],
    kinds: Mapping[str, str],
    kind: str,
    source: str,
    target: str,
) -> list[tuple[CaseCost, CaseCost]]:
    """Costs of operators that were recorded in both precisions: of the same kind if there are any, else all."""

    def both(signatures: Iterable[str]) -> Iterator[tuple[CaseCost, CaseCost]]:
        for signature in signatures:
            entry = table[signature]
            if source in entry and target in entry:
                yield entry[source][1], entry[target][1]

    return list(both(s for s in table if kinds.get(s) == kind)) or list(both(table))


def _scaled(
    operator: Operator,
    signature: str,
    source: str,
    precision: str,
    known: tuple[Case, CaseCost],
    pairs: Sequence[tuple[CaseCost, CaseCost]],
    half_format: str,
) -> tuple[Case, CaseCost]:
    case, cost = known
    wanted = arrival(precision)
    inputs = tuple(wanted if name else "" for name in case.inputs) if wanted else case.inputs
    changes: dict[str, object] = {
        name: _scaled_work(getattr(cost, name), [(getattr(a, name), getattr(b, name)) for a, b in pairs])
        for name in _TIMES
    }
    alike = width(arrival(source)) == width(wanted)
    for name in ("kernel_ns",) if alike else (*SIZES, "kernel_ns"):  # equal widths take equal memory
        before, after = (sum(abs(getattr(pair[k], name)) for pair in pairs) for k in (0, 1))
        changes[name] = round(getattr(cost, name) * after / before) if before else getattr(cost, name)
    if cost.course and not alike:
        before, after = (sum(abs(entry[2]) for pair in pairs for entry in pair[k].course) for k in (0, 1))
        changes["course"] = scaled_course(cost.course, after / before if before else 1.0)
    changed = replace(
        cost,
        output=delivered(operator, precision, inputs, half_format),
        samples=0,
        scaled_from=source,
        **changes,  # type: ignore[arg-type]
    )
    return Case(signature, precision, inputs), changed


def _scaled_work(work: Work, pairs: Sequence[tuple[Work, Work]]) -> Work:
    host, device = (_ratio([(a[k], b[k]) for a, b in pairs]) for k in (0, 1))
    lag = work.lag if work.lag == NEVER else round(work.lag * (device if work.device else host))
    return Work(round(work.host * host), round(work.device * device), lag)


def _ratio(pairs: Sequence[tuple[int, int]]) -> float:
    before, after = (sum(pair[k] for pair in pairs) for k in (0, 1))
    return after / before if before and after else 1.0
