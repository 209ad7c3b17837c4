"""In which formats do tensors flow through a model under a plan, and which cases does the plan therefore consist of?

The runtime's rules: an adjustable operator delivers the format of its precision; a fixed one FP32; every other follows
torch's type promotion, in which unlike formats, or an FP32 parameter, give FP32. Where a case was observed, what it
delivered then goes before the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from qsync_opt.model.graph import Operator, OpGraph, Role
from qsync_opt.numerics.formats import number_format
from qsync_opt.steps.costs import Case, CaseCost

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
