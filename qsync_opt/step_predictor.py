"""How long does a worker's step take under a plan that was never run, and how much memory does it need?

Times are those of two queues (`qsync_opt.two_queues`), put together from observed cases (`qsync_opt.step_costs`). A
case that was never met is made of the nearest one that was, with casts for the inputs in which they differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qsync_opt.compiled_memory import Course, scaled_course
from qsync_opt.course_lookup import CourseLookup
from qsync_opt.errors import ProblemError
from qsync_opt.graph import OpGraph, Role
from qsync_opt.jsonio import check_integer
from qsync_opt.lifetimes import Lifetimes
from qsync_opt.precision import number_format
from qsync_opt.step_costs import SIZES, Case, CaseCost, StepCosts, on_one_queue
from qsync_opt.step_cycle import Around
from qsync_opt.step_flow import StepFlow, arrival, width
from qsync_opt.step_memory import StepMemory, compiled_step_memory, step_memory
from qsync_opt.two_queues import NEVER, Work, compose

_Entry = tuple[CaseCost, str, int, int, int]
"""Cost of a case, format delivered, time on the host, on the device forward and backward."""


@dataclass(slots=True)
class PlannedStep:
    """A plan on one worker, as the predictor holds it: format delivered and cost per operator, in order; sums of them.

    ``host_ns`` is the time on the host of forward and backward pass, ``device_ns`` the time on the device of each
    segment.
    """

    plan: dict[str, str]
    formats: list[str]
    costs: list[CaseCost]
    host_ns: int
    device_ns: list[int]


class StepPredictor:
    """Predicts steps of one model on one device.

    Args:
        graph: The model.
        costs: Recorded on the device.
        borders: Positions of operators (in forward order) in whose backward pass a gradient bucket is completed, in
            the order of the backward pass; the work is cut behind each.
        slowed: Nanoseconds by which each segment takes longer on the device, because all-reduces run beside it
            (`qsync_opt.cluster_step.slowed_segments`); empty: by none.
        micro_batches: Forward and backward passes per step, whose gradients are added up; buckets are reduced in the
            last one alone.

    Raises:
        ProblemError: The costs are of another model, or there is no micro-batch.
    """

    def __init__(
        self,
        graph: OpGraph,
        costs: StepCosts,
        borders: Sequence[int] = (),
        slowed: Sequence[int] = (),
        *,
        micro_batches: int = 1,
    ) -> None:
        costs.check_graph(graph)
        check_integer(micro_batches, "micro_batches", minimum=1)
        self.micro_batches = micro_batches
        self.graph = graph
        self.costs = costs = on_one_queue(costs) if costs.device.kind == "cpu" else costs
        self._flow = StepFlow(graph, costs.half_format)
        self._lifetimes = Lifetimes(graph, costs.roots, costs.held)
        self._courses = CourseLookup(costs.courses)
        self._cases: dict[Case, CaseCost] = dict(costs.cases)
        self._seen: dict[tuple[str, str], list[Case]] = {}
        for case in costs.cases:
            self._seen.setdefault((case.signature, case.precision), []).append(case)
        self._position = {operator.name: i for i, operator in enumerate(graph)}
        self._elements = [operator.output_elements for operator in graph]
        self.composed: dict[Case, Case] = {}
        self._set_borders(borders)
        self._around = Around(costs.phases, micro_batches)
        self._slowed = tuple(slowed) or (0,) * self.segments
        self._slowed_ns = sum(self._slowed)
        if len(self._slowed) != self.segments or min(self._slowed) < 0:
            raise ProblemError(
                f"segments slowed down by {list(slowed)} ns: {self.segments} numbers from 0 are needed, one per segment"
            )

    def _set_borders(self, borders: Sequence[int]) -> None:
        count = len(self.graph)
        if list(borders) != sorted(set(borders), reverse=True) or any(not 0 <= b < count for b in borders):
            raise ProblemError(
                f"bucket borders {list(borders)} are not falling positions below {count}, as backward meets them"
            )
        self._borders = tuple(borders)
        self._tables: list[dict[tuple[str, ...], _Entry]] = [{} for _ in range(count)]
        self._slots = []
        for position, operator in enumerate(self.graph):
            first, *others = self._flow.inputs[position] or (-1,)
            # Backward of an operator belongs to the first segment whose border it does not lie before.
            segment = sum(position < border for border in borders)
            name = operator.name if operator.role is Role.ADJUSTABLE else ""
            self._slots.append((name, first, tuple(others), self._tables[position], segment))

    @property
    def segments(self) -> int:
        """Number of pieces that forward and backward pass are cut into: one per border, and the rest."""
        return len(self._borders) + 1

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
        if share == 1.0:
            return made
        sizes: dict[str, Any] = {name: round(getattr(made, name) * share) for name in (*SIZES, "kernel_ns")}
        sizes["course"] = scaled_course(made.course, share)
        return replace(made, forward=_wider(made.forward, share), backward=_wider(made.backward, share), **sizes)

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

    def _slow_entry(self, position: int, key: tuple[str, ...]) -> _Entry:
        cost = self.cost(position, Case(self._flow.signature(position), key[0], key[1:]))
        host = cost.forward.host + cost.backward.host
        entry = (cost, cost.output, host, cost.forward.device, cost.backward.device)
        self._tables[position][key] = entry
        return entry

    def plan(self, plan: Mapping[str, str]) -> PlannedStep:
        """Work a plan out in full.

        Args:
            plan: Precision of every adjustable operator.

        Raises:
            ProblemError: It leaves an adjustable operator out, or one was never recorded in its precision.
        """
        begin = [self.costs.phases[label] for label in ("forward", "forward|end", "backward")]
        host = sum(work.host for work in begin)
        forward = sum(work.device for work in begin)
        devices = list(self._slowed)
        formats: list[str] = []
        costs: list[CaseCost] = []
        for position, (name, first, others, table, segment) in enumerate(self._slots):
            if name and name not in plan:
                raise ProblemError(f"the plan leaves out adjustable operator {name!r}; name a precision")
            precision = plan[name] if name else ""
            key: tuple[str, ...]
            if first < 0:
                key = (precision,)
            elif not others:
                key = (precision, formats[first])
            else:
                key = (precision, formats[first], *[formats[source] for source in others])
            entry = table.get(key) or self._slow_entry(position, key)
            cost, output, host_ns, forward_ns, backward_ns = entry
            costs.append(cost)
            formats.append(output)
            host += host_ns
            forward += forward_ns
            devices[segment] += backward_ns
        devices[0] += forward
        return PlannedStep(plan=dict(plan), formats=formats, costs=costs, host_ns=host, device_ns=devices)

    def change(self, step: PlannedStep, name: str, precision: str) -> None:
        """Give one operator another precision; what follows from it is worked out again, and nothing else."""
        step.plan[name] = precision
        waiting = [self._position[name]]
        formats, costs = step.formats, step.costs
        while waiting:
            position = min(waiting)
            waiting.remove(position)
            own, _, _, table, segment = self._slots[position]
            inputs = self._flow.inputs[position]
            key = (step.plan[own] if own else "", *[formats[source] for source in inputs])
            cost, output, host_ns, forward_ns, backward_ns = table.get(key) or self._slow_entry(position, key)
            before = costs[position]
            if cost is before:
                continue
            costs[position] = cost
            step.host_ns += host_ns - before.forward.host - before.backward.host
            step.device_ns[0] += forward_ns - before.forward.device
            step.device_ns[segment] += backward_ns - before.backward.device
            if output != formats[position]:
                formats[position] = output
                waiting += [user for user in self._flow.users[position] if user not in waiting]

    def steady_ns(self, step: PlannedStep, tails: Sequence[tuple[int, int]] = ()) -> int:
        """Time that one step of this worker takes at least when steps follow one another without a pause.

        It is the longest of three cycles: the host's, the device's own, and the one through the network, where a bucket
        is ready at the end of a segment and the collectives from it on follow. In a cluster the slowest worker's time
        is everybody's: a cycle that runs through several workers is never longer than the longest of theirs, because
        what a worker does before and after the network adds up. `qsync_opt.cluster_step` plays the same step by step.

        Args:
            step: A plan worked out.
            tails: For each bucket its segment, and the time of its all-reduce and all later ones.

        A host that waits for its device in every step cannot run ahead: then it is the time of a single step.

        Source: maximum cycle mean of a max-plus linear system (Baccelli et al., 1992).
        """
        if self.costs.graphs == 1:
            tails = [(self.segments - 1, tail) for _, tail in tails]
        if self.costs.waits and self.costs.device.kind != "cpu":
            return self._around.standing_ns(self.lead_of(step), self.segments_of(step), tails)
        host, device = self._around.steady_ns(step.host_ns, step.device_ns, self._slowed_ns, tails)
        share = self.resting_share(step.plan)
        if share < 1.0:
            # On a cpu the host is the device, and all of it is less when the plan stands aside.
            host, device = round(share * host), round((share if self.costs.device.kind == "cpu" else 1.0) * device)
        return max(host, device)

    def captured_ns(self, step: PlannedStep, tails: Sequence[tuple[int, int]] = ()) -> int:
        """As `steady_ns`, when forward and backward pass are replayed as CUDA graphs (`qsync_opt.graphed`).

        The host launches them at once, so it counts with the optimizer alone; gradients are handed over after the whole
        backward pass, so no all-reduce overlaps it.
        """
        return self._around.captured_ns(sum(step.device_ns) - self._slowed_ns, tails)

    def resting_share(self, plan: Mapping[str, str]) -> float:
        """Share of the host's time that a plan takes: less than 1 for one of FP32 alone, which stands aside."""
        if self.costs.resting_share >= 1.0 or any(precision != "FP32" for precision in plan.values()):
            return 1.0
        return self.costs.resting_share

    def segments_of(self, step: PlannedStep) -> list[Work]:
        """Work of each segment, launches and all."""
        phases, costs = self.costs.phases, step.costs
        pieces = [phases["forward"], *[cost.forward for cost in costs], phases["forward|end"], phases["backward"]]
        found, after = [], len(costs)
        for border, slowed in zip((*self._borders, 0), self._slowed, strict=True):
            pieces += [cost.backward for cost in reversed(costs[border:after])]
            whole = compose(pieces)  # where the device waits for the host it has the time that it loses
            found.append(whole._replace(device=whole.device + slowed))
            pieces, after = [], border
        return found

    def lead_of(self, step: PlannedStep) -> Work:
        """What comes before the last micro-batch of a step: the ones before it, and copies from the host's memory."""
        return self._around.lead(
            lambda: [s._replace(device=s.device - n) for s, n in zip(self.segments_of(step), self._slowed, strict=True)]
        )

    def memory(self, step: PlannedStep) -> StepMemory:
        """Peak memory of a step under a plan that was worked out.

        Of a compiled step that was not recorded it is the larger of two estimates, with the memory of operators in the
        recorded plans that are most alike around them, and in the mean of all: too little is worse than too much.
        """
        if not self.costs.graphs:
            return step_memory(self.graph, self.costs, self._lifetimes, step.costs, self.micro_batches)
        cases = [
            self._flow.case(position, step.plan.get(operator.name, ""), step.formats)
            for position, operator in enumerate(self.graph)
        ]

        def with_courses(courses: Sequence[Course]) -> StepMemory:
            return compiled_step_memory(self.graph, self.costs, step.costs, courses, self.micro_batches)

        nearest = with_courses(self._courses.courses(cases, step.costs))
        if self._courses.recorded(cases):
            return nearest
        mean = with_courses([cost.course for cost in step.costs])
        return max(nearest, mean, key=lambda memory: memory.peak_bytes)

    def signature(self, position: int) -> str:
        """Signature of an operator in its cases."""
        return self._flow.signature(position)

    def cost_at(self, position: int, precision: str, arrival: str) -> CaseCost:
        """Cost of an operator whose floating inputs all arrive in one format."""
        inputs = (arrival,) * len(self._flow.inputs[position])
        return self.cost(position, Case(self._flow.signature(position), precision, inputs))

    def precisions(self, name: str) -> tuple[str, ...]:
        """Precisions in which an operator was recorded, coarsest first."""
        signature = self._flow.signature(self._position[name])
        found = {precision for s, precision in self._seen if s == signature and precision}
        return tuple(sorted(found, key=lambda p: number_format(p).rank))


def _wider(work: Work, share: float) -> Work:
    device = round(work.device * share)
    return Work(work.host, device, work.lag if work.lag == NEVER else max(0, work.lag + device - work.device))
