"""How long does a worker's step take under a plan that was never run, and how much memory does it need?

Times are those of two queues (`qsync_opt.two_queues`), put together from observed cases (`qsync_opt.step_costs`). A
case that was never met is made of the nearest one that was, with casts for the inputs in which they differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from qsync_opt.errors import ProblemError
from qsync_opt.graph import OpGraph, Role
from qsync_opt.lifetimes import Kept, Lifetimes
from qsync_opt.precision import number_format
from qsync_opt.step_costs import Case, CaseCost, StepCosts
from qsync_opt.step_flow import StepFlow
from qsync_opt.two_queues import NEVER, Work, WorkTree, compose

BLOCK_BYTES = 512
"""Sizes that torch's caching allocator rounds up to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """Peak of one worker in bytes, and where it is: a phase, and the operator then running ("" outside of all)."""

    peak_bytes: int
    phase: str
    operator: str


@dataclass(slots=True)
class PlannedStep:
    """A plan on one worker, as the predictor holds it: a case and a cost per operator, in order."""

    plan: dict[str, str]
    cases: list[Case]
    formats: list[str]
    costs: list[CaseCost]
    trees: list[WorkTree]


class StepPredictor:
    """Predicts steps of one model on one device.

    Args:
        graph: The model.
        costs: Recorded on the device.
        borders: Positions of operators (in forward order) in whose backward pass a gradient bucket is completed, in
            the order of the backward pass; the work is cut behind each.

    Raises:
        ProblemError: The costs are of another model.
    """

    def __init__(self, graph: OpGraph, costs: StepCosts, borders: Sequence[int] = ()) -> None:
        costs.check_graph(graph)
        self.graph = graph
        self.costs = costs
        self._flow = StepFlow(graph, costs.half_format)
        self._lifetimes = Lifetimes(graph, costs.roots, costs.held)
        self._cases: dict[Case, CaseCost] = dict(costs.cases)
        self._seen: dict[tuple[str, str], list[Case]] = {}
        for case in costs.cases:
            self._seen.setdefault((case.signature, case.precision), []).append(case)
        self._position = {operator.name: i for i, operator in enumerate(graph)}
        self._elements = [operator.output_elements for operator in graph]
        self.composed: dict[Case, Case] = {}
        self._set_borders(borders)

    def _set_borders(self, borders: Sequence[int]) -> None:
        count = len(self.graph)
        if list(borders) != sorted(set(borders), reverse=True) or any(not 0 <= b < count for b in borders):
            raise ProblemError(
                f"bucket borders {list(borders)} are not falling positions below {count}, as backward meets them"
            )
        self._borders = tuple(borders)
        # Slots of the step: begin, forward, end, begin of backward, backward in reverse, then its end.
        starts = [0, *(count + 3 + count - border for border in borders)]
        self._starts = starts
        self._slots = 2 * count + 3

    @property
    def segments(self) -> int:
        """Number of pieces that the step is cut into by the borders, the last one ends with the last operator."""
        return len(self._starts)

    def cost(self, position: int, case: Case) -> CaseCost:
        """Cost of a case; where it was never met, of the nearest one with casts.

        Raises:
            ProblemError: The operator was never met in this precision.
        """
        known = self._cases.get(case)
        if known is None:
            known = self._cases[case] = self._compose(position, case)
        return known

    def _compose(self, position: int, case: Case) -> CaseCost:
        candidates = self._seen.get((case.signature, case.precision))
        if not candidates:
            there = ", ".join(sorted(p for s, p in self._seen if s == case.signature)) or "none"
            raise ProblemError(
                f"operator {self.graph.operators[position].name!r} was never recorded in {case.precision or 'any format'}"
                f" on {self.costs.device.name!r}, only in {there}; record a plan that has it"
            )
        best = min(candidates, key=lambda seen: sum(a != b for a, b in zip(seen.inputs, case.inputs, strict=True)))
        self.composed[case] = best
        cost = self.costs.cases[best]
        operator = self.graph.operators[position]
        output = self._flow.output(position, case, None)
        target = output if operator.role is not Role.ADJUSTABLE else _arrival(case.precision)
        forward, backward = cost.forward, cost.backward
        for source, old, new in zip(self._flow.inputs[position], best.inputs, case.inputs, strict=True):
            if old != new:
                forward = self._recast(forward, self._elements[source], old, new, target)
                backward = self._recast(backward, self._elements[source], old, new, target)
        return replace(cost, forward=forward, backward=backward, output=output, samples=0)

    def _recast(self, work: Work, elements: int, old: str, new: str, target: str) -> Work:
        """Take the cast of ``old`` off and put that of ``new`` on."""
        host, device, lag = work
        for source, sign in ((old, -1), (new, 1)):
            fit = self.costs.casts.get(f"{source}>{target}")
            if source == target or not target or fit is None:
                continue
            nanoseconds = sign * fit.ns(elements)
            host += sign * self.costs.cast_host_ns
            device += nanoseconds
            lag = NEVER if lag == NEVER else lag + nanoseconds + sign * self.costs.cast_host_ns
        return Work(max(0, host), max(0, device), lag if lag == NEVER else max(0, lag))

    def _cost_list(self, plan: Mapping[str, str]) -> tuple[list[Case], list[str], list[CaseCost]]:
        flow, known = self._flow, self._cases
        cases: list[Case] = []
        formats: list[str] = []
        costs: list[CaseCost] = []
        for i, operator in enumerate(self.graph.operators):
            case = flow.case(i, plan.get(operator.name, "FP32"), formats)
            cost = known.get(case)
            if cost is None:
                cost = self.cost(i, case)
            cases.append(case)
            costs.append(cost)
            formats.append(cost.output)
        return cases, formats, costs

    def plan(self, plan: Mapping[str, str]) -> PlannedStep:
        """Work a plan out in full.

        Args:
            plan: Precision of every adjustable operator.
        """
        cases, formats, costs = self._cost_list(plan)
        pieces = self._pieces(costs)
        ends = [*self._starts[1:], self._slots]
        trees = [WorkTree(pieces[a:b]) for a, b in zip(self._starts, ends, strict=True)]
        return PlannedStep(plan=dict(plan), cases=cases, formats=formats, costs=costs, trees=trees)

    def segments_of(self, plan: Mapping[str, str]) -> list[Work]:
        """Work of each segment of a plan, without what is needed to change it afterwards."""
        pieces = self._pieces(self._cost_list(plan)[2])
        ends = [*self._starts[1:], self._slots]
        return [compose(pieces[a:b]) for a, b in zip(self._starts, ends, strict=True)]

    def _pieces(self, costs: Sequence[CaseCost]) -> list[Work]:
        phases = self.costs.phases
        pieces = [phases["forward"]]
        pieces += [cost.forward for cost in costs]
        pieces += [phases["forward|end"], phases["backward"]]
        pieces += [cost.backward for cost in reversed(costs)]
        return pieces

    def change(self, step: PlannedStep, name: str, precision: str) -> None:
        """Give one operator another precision; everything that follows from it is worked out again, nothing else."""
        flow, count = self._flow, len(self.graph)
        step.plan[name] = precision
        waiting = {self._position[name]}
        while waiting:
            i = min(waiting)
            waiting.discard(i)
            operator = self.graph.operators[i]
            case = flow.case(i, step.plan.get(operator.name, "FP32"), step.formats)
            if case == step.cases[i]:
                continue
            cost = self.cost(i, case)
            step.cases[i], step.costs[i] = case, cost
            self._set(step, 1 + i, cost.forward)
            self._set(step, 2 + count + count - i, cost.backward)
            if cost.output != step.formats[i]:
                step.formats[i] = cost.output
                waiting.update(flow.users[i])

    def _set(self, step: PlannedStep, slot: int, work: Work) -> None:
        for k in range(len(self._starts) - 1, -1, -1):
            if slot >= self._starts[k]:
                step.trees[k].set(slot - self._starts[k], work)
                return

    def memory(self, costs: Sequence[CaseCost]) -> StepMemory:
        """Peak memory of a step.

        Args:
            costs: Per operator, as in a `PlannedStep`.
        """
        lifetimes = self._lifetimes
        releases = lifetimes.releases([Kept(cost.saves_inputs, cost.saves_output) for cost in costs])
        now = peak = self.costs.resident_bytes
        where = ("forward", "")
        for phase, position, high, net in self._moments(costs, releases.forward, releases.backward):
            if now + high > peak:
                peak, where = now + high, (phase, "" if position < 0 else self.graph.operators[position].name)
            now += net
        return StepMemory(peak_bytes=peak, phase=where[0], operator=where[1])

    def _moments(
        self,
        costs: Sequence[CaseCost],
        forward: Mapping[int, Sequence[int]],
        backward: Mapping[int, Sequence[int]],
    ) -> Iterator[tuple[str, int, int, int]]:
        """(phase, operator, bytes beyond what is there, change) through the step."""
        peaks = self.costs.phase_peaks
        for i, cost in enumerate(costs):
            freed = sum(costs[r].result_bytes for r in forward.get(i, ()))
            yield "forward", i, cost.forward_peak_bytes, cost.forward_net_bytes - freed
        yield "forward", -1, max(peaks["forward|end"], peaks["backward"]), 0
        for i in range(len(costs) - 1, -1, -1):
            freed = sum(costs[r].result_bytes for r in backward.get(i, ()))
            yield "backward", i, costs[i].backward_peak_bytes, costs[i].backward_net_bytes - freed
        yield "backward", -1, peaks["backward|end"], 0
        yield "optimizer", -1, peaks["optimizer"], 0

    def precisions(self, name: str) -> tuple[str, ...]:
        """Precisions in which an operator was recorded, coarsest first."""
        signature = self._flow.signature(self._position[name])
        found = {precision for s, precision in self._seen if s == signature and precision}
        return tuple(sorted(found, key=lambda p: number_format(p).rank))


def _arrival(precision: str) -> str:
    """Format in which a precision wants its inputs; "" for 8 bits, whose quantizers read every format."""
    return {"INT8": "", "FP8": "", "TF32": "FP32"}.get(precision, precision)
