"""Formats of a model's tensors under a plan, the cases that follow from them, and costs of cases not observed.

Such a cost is composed from a case of the same precision with casts (`CaseComposer`), or scaled from another precision
(`scaled_costs`).

The runtime's rules: an adjustable operator delivers the format of its precision; a fixed one FP32; every other follows
torch's type promotion, in which different formats, or an FP32 parameter, give FP32. The format that an observed case
delivered takes precedence over the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from qsync_opt.errors import ProblemError
from qsync_opt.model import Operator, OpGraph, Role
from qsync_opt.numerics import border_format, is_eight_bit, number_format
from qsync_opt.steps.costs import SIZES, Case, CaseCost, StepCosts
from qsync_opt.steps.memory_timeline import scaled_timeline
from qsync_opt.steps.queues import NEVER, Work

Lookup = Callable[[Case], CaseCost | None]


def result_format(operator: Operator, precision: str, inputs: Sequence[str], half_format: str) -> str:
    """Format of a result by the rules; "" if it is not floating."""
    if not operator.is_floating:
        return ""
    if operator.role is Role.ADJUSTABLE:
        return border_format(precision, half_format)
    formats = set(inputs)
    if operator.role is Role.FIXED or len(formats) != 1 or operator.parameters:
        return "FP32"
    return formats.pop()


class StepFlow:
    """Formats of tensors through a graph, in which 8-bit operators deliver ``half_format``."""

    def __init__(self, graph: OpGraph, half_format: str) -> None:
        self.graph = graph
        index = {operator.name: i for i, operator in enumerate(graph)}
        self.inputs = [tuple(index[source] for source in operator.inputs) for operator in graph]
        users: list[list[int]] = [[] for _ in graph]
        for i, sources in enumerate(self.inputs):
            for source in dict.fromkeys(sources):
                users[source].append(i)
        self.users = [tuple(u) for u in users]
        self._operators = graph.operators
        self._adjustable = [operator.role is Role.ADJUSTABLE for operator in graph]
        self._signatures = []
        for i, operator in enumerate(graph):
            # Gradients that it adds to those which later users of the same results delivered before.
            sums = sum(users[source][-1] > i for source in self.inputs[i])
            self._signatures.append(f"{operator.signature}+{sums}" if sums else operator.signature)
        self._half_format = half_format
        self._cache: dict[tuple[int, str, tuple[str, ...]], Case] = {}

    def signature(self, position: int) -> str:
        """Signature of an operator in its cases."""
        return self._signatures[position]

    def case(self, position: int, precision: str, formats: Sequence[str]) -> Case:
        """Case of an operator, by the formats of all results before it."""
        inputs = tuple([formats[source] for source in self.inputs[position]])
        if not self._adjustable[position]:
            precision = ""
        key = (position, precision, inputs)
        case = self._cache.get(key)
        if case is None:
            case = self._cache[key] = Case(self._signatures[position], precision, inputs)
        return case

    def output(self, position: int, case: Case) -> str:
        """Format of a case's result by the rules."""
        return result_format(self._operators[position], case.precision, case.inputs, self._half_format)

    def cases(self, plan: Mapping[str, str], lookup: Lookup) -> tuple[list[Case], list[str]]:
        """Cases and formats of all operators, in order.

        ``plan`` has the precision of every adjustable operator; entries for others are ignored. ``lookup`` returns the
        observed cost of a case, or None.
        """
        formats: list[str] = []
        cases = []
        for i, operator in enumerate(self._operators):
            case = self.case(i, plan.get(operator.name, "FP32"), formats)
            cases.append(case)
            cost = lookup(case)
            formats.append(self.output(i, case) if cost is None else cost.output)
        return cases, formats


def arrival(precision: str) -> str:
    """Format in which a precision needs its inputs; "" for 8 bits, whose quantizers read every format."""
    return "" if is_eight_bit(precision) else "FP32" if precision == "TF32" else precision


def width(output: str) -> int:
    """Bytes per element of a result's format; 1 for none, which has no effect."""
    return number_format(output).num_bytes if output else 1


class CaseComposer:
    """Costs of cases that were not observed, composed from those that were."""

    def __init__(self, graph: OpGraph, costs: StepCosts, flow: StepFlow) -> None:
        self.graph, self.costs, self._flow = graph, costs, flow
        self._elements = [operator.output_elements for operator in graph]
        self._observed: dict[tuple[str, str], list[Case]] = {}
        for case in costs.cases:
            self._observed.setdefault((case.signature, case.precision), []).append(case)
        self.composed: dict[Case, Case] = {}

    def precisions(self, signature: str) -> tuple[str, ...]:
        """Precisions in which operators of a signature were observed, coarsest first."""
        precisions = {precision for s, precision in self._observed if s == signature and precision}
        return tuple(sorted(precisions, key=lambda p: number_format(p).rank))

    def compose(self, position: int, case: Case) -> CaseCost:
        """Cost of a case that was not observed.

        Raises:
            ProblemError: The operator was never recorded in this precision.
        """
        candidates = self._observed.get((case.signature, case.precision))
        if not candidates:
            there = ", ".join(sorted(p for s, p in self._observed if s == case.signature)) or "none"
            name, precision = self.graph.operators[position].name, case.precision or "any format"
            raise ProblemError(
                f"operator {name!r} was never recorded in {precision} on {self.costs.device.name!r}, only in {there}; "
                "record a plan that has it"
            )
        operator = self.graph.operators[position]
        output = self._flow.output(position, case)
        dependent = operator.role is Role.DEPENDENT

        def distance(other: Case) -> tuple[bool, bool, int]:
            delivers = self.costs.cases[other].output
            differences = sum(a != b for a, b in zip(other.inputs, case.inputs, strict=True))
            return dependent and width(delivers) != width(output), dependent and delivers != output, differences

        best = min(candidates, key=distance)
        self.composed[case] = best
        cost = self.costs.cases[best]
        if dependent:
            return self._dependent(position, cost, best, case, output)
        target = output if operator.role is not Role.ADJUSTABLE else arrival(case.precision)
        forward, backward = cost.forward, cost.backward
        for source, old, new in zip(self._flow.inputs[position], best.inputs, case.inputs, strict=True):
            if old != new:
                forward = self._recast(forward, self._elements[source], old, new, target)
                backward = self._recast(backward, self._elements[source], old, new, target)
        recast = replace(cost, forward=forward, backward=backward, output=output, samples=0)
        return self._with_saved_copies(recast, position, best.inputs, case.inputs, target)

    def _dependent(self, position: int, cost: CaseCost, observed: Case, case: Case, output: str) -> CaseCost:
        """Cost of an operator that follows its inputs, from an observed case of it in other formats.

        Its kernels read different formats directly, only gradients are cast back. Time and memory are proportional to
        the width of its result.
        """
        changes = list(zip(self._flow.inputs[position], observed.inputs, case.inputs, strict=True))
        backward = cost.backward
        for source, old, new in changes:
            if old != new:
                backward = self._with_cast(backward, self._elements[source], old, cost.output, -1)
                backward = self._with_cast(backward, self._elements[source], new, output, 1)
        result = replace(cost, backward=backward, output=output, samples=0)
        share = width(output) / width(cost.output)
        if share != 1.0:
            sizes: dict[str, Any] = {name: round(getattr(result, name) * share) for name in (*SIZES, "kernel_ns")}
            forward, backward = _widened(result.forward, share), _widened(result.backward, share)
            timeline = scaled_timeline(result.timeline, share)
            result = replace(result, forward=forward, backward=backward, timeline=timeline, **sizes)
        # Each input gets a gradient in its own format. A cast one is new; its source was shared by the inputs and
        # lives until the next operator (the other input's) has read it.
        copied = freed = 0
        for source, old, new in changes:
            shared, own = round(self._elements[source] * width(old) * share), self._elements[source] * width(new)
            if old and new and shared != own:
                copied, freed = copied + own, freed - shared
        return replace(
            result,
            backward_net_bytes=result.backward_net_bytes + copied,
            backward_late_bytes=result.backward_late_bytes + freed,
        )

    def _with_saved_copies(
        self, cost: CaseCost, position: int, before: Sequence[str], after: Sequence[str], target: str
    ) -> CaseCost:
        """Memory of a case composed from another: a saved input that must be cast is saved as a copy."""
        if self.graph.operators[position].role is not Role.ADJUSTABLE or not target:
            return cost
        saves, copied, own = set(cost.saves_inputs), 0, 0
        # In a compiled step, a tensor that only this operator reads is its own in any format: a copy needs no more.
        own_bytes = sum(entry[2] for entry in cost.timeline if not entry[0])
        for i, (source, old, new) in enumerate(zip(self._flow.inputs[position], before, after, strict=True)):
            num_bytes = self._elements[source] * number_format(target).num_bytes
            if old == target != new:
                saves.discard(i)
                copied += num_bytes
                if own_bytes >= num_bytes:
                    own_bytes -= num_bytes
                else:
                    own += num_bytes
            elif new == target != old:
                saves.add(i)
                copied -= num_bytes
                own -= num_bytes if len(self._flow.users[source]) > 1 else 0
        return replace(
            cost,
            saves_inputs=tuple(sorted(saves)),
            forward_net_bytes=cost.forward_net_bytes + copied,
            forward_peak_bytes=max(0, cost.forward_peak_bytes + copied),
            backward_net_bytes=cost.backward_net_bytes - copied,
            timeline=(*cost.timeline, (0, 0, own), (1, 1, -own)) if cost.timeline and own else cost.timeline,
        )

    def _recast(self, work: Work, elements: int, old: str, new: str, target: str) -> Work:
        """Replace the cast from ``old`` by the cast from ``new``."""
        return self._with_cast(self._with_cast(work, elements, old, target, -1), elements, new, target, 1)

    def _with_cast(self, work: Work, elements: int, source: str, target: str, sign: int) -> Work:
        """Add (1) or remove (-1) a cast."""
        fit = self.costs.casts.get(f"{source}>{target}")
        if source == target or not target or fit is None:
            return work
        nanoseconds, host_ns = sign * fit.ns(elements), sign * self.costs.cast_host_ns
        lag = work.lag if work.lag == NEVER else max(0, work.lag + nanoseconds + host_ns)
        return Work(max(0, work.host + host_ns), max(0, work.device + nanoseconds), lag)


def _widened(work: Work, share: float) -> Work:
    device = round(work.device * share)
    return Work(work.host, device, work.lag if work.lag == NEVER else max(0, work.lag + device - work.device))


_Pairs = Sequence[tuple[CaseCost, CaseCost]]
"""Costs of operators in the precision scaled from, and in the one scaled to."""


def scaled_costs(graph: OpGraph, costs: StepCosts, available: Mapping[str, Sequence[str]]) -> StepCosts:
    """Step costs in which every adjustable operator has each of its precisions, scaled where it was not recorded.

    ``available`` are the precisions of every adjustable operator; one that no operator was recorded in is left out,
    because its cost is unknown.

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
    format_in = arrival(precision)
    inputs = tuple(format_in if name else "" for name in case.inputs) if format_in else case.inputs
    changes: dict[str, Any] = {
        name: _scaled_work(getattr(cost, name), [(getattr(a, name), getattr(b, name)) for a, b in pairs])
        for name in ("forward", "backward")
    }
    same_width = width(arrival(case.precision)) == width(format_in)
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
