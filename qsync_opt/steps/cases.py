"""In which formats do tensors flow through a model under a plan, and which cases does the plan therefore consist of?

The runtime's rules: an adjustable operator delivers the format of its precision; a fixed one FP32; every other follows
torch's type promotion, in which unlike formats, or an FP32 parameter, give FP32. Where a case was observed, what it
delivered then goes before the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from qsync_opt.errors import ProblemError
from qsync_opt.model import Operator, OpGraph, Role
from qsync_opt.numerics import number_format
from qsync_opt.steps.costs import SIZES, Case, CaseCost, StepCosts
from qsync_opt.steps.courses import scaled_course
from qsync_opt.steps.queues import NEVER, Work

Lookup = Callable[[Case], CaseCost | None]


def delivered(operator: Operator, precision: str, inputs: Sequence[str], half_format: str) -> str:
    """Format of a result by the rules, "" for an operator without floating result."""
    if not operator.is_floating:
        return ""
    if operator.role is Role.ADJUSTABLE:
        return {"TF32": "FP32", "INT8": half_format, "FP8": half_format}.get(precision, precision)
    formats = set(inputs)
    if operator.role is Role.FIXED or len(formats) != 1 or operator.parameters:
        return "FP32"
    return formats.pop()


def _with_sums(operator: Operator, sums: int) -> str:
    """Signature, with how many gradients it adds to ones that a later user of the same result delivered before."""
    return f"{operator.signature}+{sums}" if sums else operator.signature


class StepFlow:
    """Follows formats through a graph.

    Args:
        graph: The model.
        half_format: 16-bit format that 8-bit operators deliver.
    """

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
        self._signatures = [
            _with_sums(operator, sum(self.users[source][-1] > i for source in self.inputs[i]))
            for i, operator in enumerate(graph)
        ]
        self._half_format = half_format
        self._known: dict[tuple[int, str, tuple[str, ...]], Case] = {}

    def signature(self, position: int) -> str:
        """Signature of an operator in its cases."""
        return self._signatures[position]

    def case(self, position: int, precision: str, formats: Sequence[str]) -> Case:
        """Case of an operator, given the formats of all results before it."""
        inputs = tuple([formats[source] for source in self.inputs[position]])
        if not self._adjustable[position]:
            precision = ""
        key = (position, precision, inputs)
        case = self._known.get(key)
        if case is None:
            case = self._known[key] = Case(self._signatures[position], precision, inputs)
        return case

    def output(self, position: int, case: Case, cost: CaseCost | None) -> str:
        """Format that a case delivers."""
        if cost is not None:
            return cost.output
        return delivered(self._operators[position], case.precision, case.inputs, self._half_format)

    def cases(self, plan: Mapping[str, str], lookup: Lookup) -> tuple[list[Case], list[str]]:
        """Cases and formats of all operators, in order.

        Args:
            plan: Precision of every adjustable operator; what it says of others does not count.
            lookup: Observed cost of a case, None if there is none.
        """
        formats: list[str] = []
        cases = []
        for i, operator in enumerate(self._operators):
            case = self.case(i, plan.get(operator.name, "FP32"), formats)
            cases.append(case)
            formats.append(self.output(i, case, lookup(case)))
        return cases, formats


def arrival(precision: str) -> str:
    """Format in which a precision wants its inputs; "" for 8 bits, whose quantizers read every format."""
    return {"INT8": "", "FP8": "", "TF32": "FP32"}.get(precision, precision)


def width(output: str) -> int:
    """Bytes per element of a format delivered; 1 for none, so that it never matters."""
    return number_format(output).num_bytes if output else 1


class CaseComposer:
    """Makes costs of cases that were never met.

    Args:
        graph: The model.
        costs: Recorded.
        flow: Of formats through the graph.
    """

    def __init__(self, graph: OpGraph, costs: StepCosts, flow: StepFlow) -> None:
        self.graph, self.costs, self._flow = graph, costs, flow
        self._elements = [operator.output_elements for operator in graph]
        self._seen: dict[tuple[str, str], list[Case]] = {}
        for case in costs.cases:
            self._seen.setdefault((case.signature, case.precision), []).append(case)
        self.composed: dict[Case, Case] = {}

    def precisions(self, signature: str) -> tuple[str, ...]:
        """Precisions in which operators of a signature were met, coarsest first."""
        found = {precision for s, precision in self._seen if s == signature and precision}
        return tuple(sorted(found, key=lambda p: number_format(p).rank))

    def compose(self, position: int, case: Case) -> CaseCost:
        """Cost of a case that was never met.

        Raises:
            ProblemError: The operator was never met in this precision.
        """
        candidates = self._seen.get((case.signature, case.precision))
        if not candidates:
            there = ", ".join(sorted(p for s, p in self._seen if s == case.signature)) or "none"
            name, wanted = self.graph.operators[position].name, case.precision or "any format"
            raise ProblemError(
                f"operator {name!r} was never recorded in {wanted} on {self.costs.device.name!r}, only in {there}; "
                "record a plan that has it"
            )
        operator = self.graph.operators[position]
        output = self._flow.output(position, case, None)

        dependent = operator.role is Role.DEPENDENT

        def distance(seen: Case) -> tuple[bool, bool, int]:
            before = self.costs.cases[seen].output
            differing = sum(a != b for a, b in zip(seen.inputs, case.inputs, strict=True))
            return dependent and width(before) != width(output), dependent and before != output, differing

        best = min(candidates, key=distance)
        self.composed[case] = best
        cost = self.costs.cases[best]
        if dependent:
            return self._follows(position, cost, best, case, output)
        target = output if operator.role is not Role.ADJUSTABLE else arrival(case.precision)
        forward, backward = cost.forward, cost.backward
        for source, old, new in zip(self._flow.inputs[position], best.inputs, case.inputs, strict=True):
            if old != new:
                forward = self._recast(forward, self._elements[source], old, new, target)
                backward = self._recast(backward, self._elements[source], old, new, target)
        recast = replace(cost, forward=forward, backward=backward, output=output, samples=0)
        return self._rekept(recast, position, best.inputs, case.inputs, target)

    def _follows(self, position: int, cost: CaseCost, seen: Case, case: Case, output: str) -> CaseCost:
        """An operator that follows its inputs, made of a case of it that was met in other formats.

        Its kernels read unlike formats as they come, only gradients are cast back. Time and memory go with the width of
        what it delivers.
        """
        backward = cost.backward
        for source, old, new in zip(self._flow.inputs[position], seen.inputs, case.inputs, strict=True):
            for before, after, sign in ((old, cost.output, -1), (new, output, 1)):
                if old != new:
                    backward = self._with_cast(backward, self._elements[source], before, after, sign)
        made = replace(cost, backward=backward, output=output, samples=0)
        share = width(output) / width(cost.output)
        if share != 1.0:
            sizes: dict[str, Any] = {name: round(getattr(made, name) * share) for name in (*SIZES, "kernel_ns")}
            sizes["course"] = scaled_course(made.course, share)
            made = replace(made, forward=_wider(made.forward, share), backward=_wider(made.backward, share), **sizes)
        # Each input gets a gradient in the format in which it arrived. One that is cast is new; the one that it was
        # cast from was shared by the inputs, and lives until the next operator (the other input's) is done with it.
        copied = gone = 0
        for source, old, new in zip(self._flow.inputs[position], seen.inputs, case.inputs, strict=True):
            shared, own = round(self._elements[source] * width(old) * share), self._elements[source] * width(new)
            if old and new and shared != own:
                copied, gone = copied + own, gone - shared
        return replace(
            made,
            backward_net_bytes=made.backward_net_bytes + copied,
            backward_late_bytes=made.backward_late_bytes + gone,
        )

    def _rekept(
        self, cost: CaseCost, position: int, before: Sequence[str], after: Sequence[str], target: str
    ) -> CaseCost:
        """Memory of a case made of another: an input that is kept is kept as a copy where it has to be cast."""
        if self.graph.operators[position].role is not Role.ADJUSTABLE or not target:
            return cost
        saves, copied, own = set(cost.saves_inputs), 0, 0
        # Of a compiled step, what only this operator reads is its own in any format, so that a copy takes no more.
        held = sum(entry[2] for entry in cost.course if not entry[0])
        for i, (source, old, new) in enumerate(zip(self._flow.inputs[position], before, after, strict=True)):
            num_bytes = self._elements[source] * number_format(target).num_bytes
            if old == target != new:
                saves.discard(i)
                copied += num_bytes
                if held >= num_bytes:
                    held -= num_bytes
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
            course=(*cost.course, (0, 0, own), (1, 1, -own)) if cost.course and own else cost.course,
        )

    def _recast(self, work: Work, elements: int, old: str, new: str, target: str) -> Work:
        """Take the cast of ``old`` off and put that of ``new`` on."""
        return self._with_cast(self._with_cast(work, elements, old, target, -1), elements, new, target, 1)

    def _with_cast(self, work: Work, elements: int, source: str, target: str, sign: int) -> Work:
        """Put a cast on (1) or take it off (-1)."""
        fit = self.costs.casts.get(f"{source}>{target}")
        if source == target or not target or fit is None:
            return work
        nanoseconds, host_ns = sign * fit.ns(elements), sign * self.costs.cast_host_ns
        lag = work.lag if work.lag == NEVER else max(0, work.lag + nanoseconds + host_ns)
        return Work(max(0, work.host + host_ns), max(0, work.device + nanoseconds), lag)


def _wider(work: Work, share: float) -> Work:
    device = round(work.device * share)
    return Work(work.host, device, work.lag if work.lag == NEVER else max(0, work.lag + device - work.device))
