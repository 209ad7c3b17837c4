"""Prediction of a worker's step under any plan: its time and its peak memory.

Times are those of two queues (`qsync_opt.steps.queues`), composed from observed cases (`qsync_opt.steps.costs`). A case
that was not observed is derived from the nearest one that was, with casts for the inputs in which they differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from qsync_opt.errors import ProblemError
from qsync_opt.io import check_integer, near_match
from qsync_opt.model import OpGraph, Role
from qsync_opt.steps.cases import CaseComposer, StepFlow
from qsync_opt.steps.costs import Case, CaseCost, StepCosts, check_step_costs, on_one_queue
from qsync_opt.steps.memory import Lifetimes, StepMemory, TimelineLookup, compiled_step_memory, step_memory
from qsync_opt.steps.memory_timeline import MemoryTimeline, moments
from qsync_opt.steps.queues import NOTHING, Work, compose

_Entry = tuple[CaseCost, str, int, int, int]
"""Cost of a case, format of the result, time on the host, on the device forward and backward."""


@dataclass(slots=True)
class PlannedStep:
    """A plan on one worker with the format and cost of each operator, in order, and their sums.

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
        borders: Positions of operators (in forward order) whose backward pass completes a gradient bucket, in the order
            of the backward pass; each ends a segment of the work.
        slowed: Nanoseconds by which each segment takes longer on the device because of all-reduces that run beside it
            (`qsync_opt.steps.cluster.slowed_segments`); empty: none.
        micro_batches: Forward and backward passes per step, whose gradients are accumulated; buckets are reduced in the
            last one alone.

    Raises:
        ProblemError: The costs are invalid or of another model, or there is no micro-batch.
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
        self._flow = flow = StepFlow(graph, costs.half_format)
        inputs = {flow.signature(i): len(sources) for i, sources in enumerate(flow.inputs)}
        check_step_costs(costs, inputs, moments(len(graph)))
        check_integer(micro_batches, "micro_batches", minimum=1)
        self.micro_batches = micro_batches
        self.graph = graph
        self.costs = costs = on_one_queue(costs) if costs.device.kind == "cpu" else costs
        self._lifetimes = Lifetimes(graph, costs.roots, costs.held)
        self._timelines = TimelineLookup(costs.timelines, flow.users)
        self._cases: dict[Case, CaseCost] = dict(costs.cases)
        self._composer = CaseComposer(graph, costs, flow)
        self._position = {operator.name: i for i, operator in enumerate(graph)}
        count = len(graph)
        if list(borders) != sorted(set(borders), reverse=True) or any(not 0 <= b < count for b in borders):
            raise ProblemError(
                f"bucket borders {list(borders)} are not falling positions below {count}, as backward meets them"
            )
        self._borders = tuple(borders)
        self._tables: list[dict[tuple[str, ...], _Entry]] = [{} for _ in range(count)]
        self._slots = []
        for position, operator in enumerate(graph):
            first, *others = flow.inputs[position] or (-1,)
            # Backward of an operator belongs to the first segment whose border it does not lie before.
            segment = sum(position < border for border in borders)
            name = operator.name if operator.role is Role.ADJUSTABLE else ""
            self._slots.append((name, first, tuple(others), self._tables[position], segment))
        phases = costs.phases
        self._copies = phases.get("copies", NOTHING)
        self.finish = phases["backward|end"]
        self.optimizer = compose([phases.get("clip", NOTHING), phases["optimizer"], phases["zero_grad"]])
        self._slowed = tuple(slowed) or (0,) * self.segments
        self._slowed_ns = sum(self._slowed)
        if len(self._slowed) != self.segments or not all(n >= 0 for n in self._slowed):
            raise ProblemError(
                f"segments slowed down by {list(slowed)} ns: {self.segments} numbers from 0 are needed, one per segment"
            )

    def plan(self, plan: Mapping[str, str]) -> PlannedStep:
        """Predict all operators under a plan, the precision of every adjustable operator.

        Raises:
            ProblemError: It leaves an adjustable operator out, names one that the model lacks, or one was never
                recorded in its precision.
        """
        if not plan.keys() <= self._position.keys():
            self._refuse(next(name for name in plan if name not in self._position))
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
            entry = table.get(key) or self._new_entry(position, key)
            cost, output, host_ns, forward_ns, backward_ns = entry
            costs.append(cost)
            formats.append(output)
            host += host_ns
            forward += forward_ns
            devices[segment] += backward_ns
        devices[0] += forward
        return PlannedStep(plan=dict(plan), formats=formats, costs=costs, host_ns=host, device_ns=devices)

    def change(self, step: PlannedStep, name: str, precision: str) -> None:
        """Give one operator another precision; only operators that this affects are predicted again.

        Raises:
            ProblemError: The operator is no adjustable one of the model, or it was never recorded in this precision, or
                one that follows it was not in the format that it then gets. The step stays as it was.
        """
        if self._slots[self._position.get(name, 0)][0] != name:
            self._refuse(name)
        before = step.plan[name]
        step.plan[name] = precision
        try:
            self._update_from(step, self._position[name])
        except ProblemError:
            step.plan[name] = before
            self._update_from(step, self._position[name])
            raise

    def _refuse(self, name: str) -> NoReturn:
        what = "is not adjustable" if name in self._position else f"is not in model {self.graph.name!r}"
        adjustable = [own for own, *_ in self._slots if own]
        raise ProblemError(
            f"operator {name!r} {what}, so no plan gives it a precision{near_match(name, adjustable)}; name adjustable "
            "operators of this model"
        )

    def _update_from(self, step: PlannedStep, position: int) -> None:
        """Predict an operator again, and every operator that its result affects."""
        pending = [position]
        formats, costs = step.formats, step.costs
        while pending:
            position = min(pending)
            pending.remove(position)
            own, _, _, table, segment = self._slots[position]
            inputs = self._flow.inputs[position]
            key = (step.plan[own] if own else "", *[formats[source] for source in inputs])
            cost, output, host_ns, forward_ns, backward_ns = table.get(key) or self._new_entry(position, key)
            before = costs[position]
            if cost is before:
                continue
            costs[position] = cost
            step.host_ns += host_ns - before.forward.host - before.backward.host
            step.device_ns[0] += forward_ns - before.forward.device
            step.device_ns[segment] += backward_ns - before.backward.device
            if output != formats[position]:
                formats[position] = output
                pending += [user for user in self._flow.users[position] if user not in pending]

    def _new_entry(self, position: int, key: tuple[str, ...]) -> _Entry:
        cost = self.cost(position, Case(self._flow.signature(position), key[0], key[1:]))
        host = cost.forward.host + cost.backward.host
        entry = (cost, cost.output, host, cost.forward.device, cost.backward.device)
        self._tables[position][key] = entry
        return entry

    def steady_ns(self, step: PlannedStep, tails: Sequence[tuple[int, int]] = ()) -> int:
        """Least time of one step of this worker when steps follow one another without a pause.

        It is the longest of three cycles: the host's, the device's own, and the one through the network, where a bucket
        is ready at the end of a segment and its all-reduce and all later ones follow. In a cluster the slowest worker's
        time is everybody's: a cycle that runs through several workers is never longer than the longest of theirs,
        because the times before and after the network add up. `qsync_opt.steps.cluster` simulates this step by step. A
        host that waits for its device in every step cannot run ahead: then it is the time of a single step.

        Args:
            step: A predicted plan.
            tails: For each bucket its segment, and the time of its all-reduce and all later ones.

        Source: maximum cycle mean of a max-plus linear system (Baccelli et al., 1992).
        """
        if self.costs.graphs == 1:
            tails = [(self.segments - 1, tail) for _, tail in tails]
        on_cpu = self.costs.device.kind == "cpu"
        if self.costs.waits and not on_cpu:
            return self._standing_ns(step, tails)
        copies, finish, optimizer = self._copies, self.finish, self.optimizer
        now, host = copies.device, copies.host + step.host_ns + finish.host + optimizer.host
        if earlier := self.micro_batches - 1:
            now += earlier * (copies.device + sum(step.device_ns) - self._slowed_ns + finish.device)
            host += earlier * (copies.host + step.host_ns + finish.host)
        ready = []
        for segment_ns in step.device_ns:
            now += segment_ns
            ready.append(now)
        longest = now
        try:
            for segment, tail in tails:
                if ready[segment] + tail > longest:
                    longest = ready[segment] + tail
        except IndexError:
            raise ProblemError(
                f"a bucket is ready after segment {segment}, but there are {len(ready)}: give the predictor the "
                "borders of these buckets"
            ) from None
        device = longest + finish.device + optimizer.device
        share = self.costs.resting_share
        if share < 1.0 and all(precision == "FP32" for precision in step.plan.values()):
            # The runtime stands aside for a plan of FP32 alone. On a cpu the host is the device.
            host, device = round(share * host), round((share if on_cpu else 1.0) * device)
        return max(host, device)

    def _standing_ns(self, step: PlannedStep, tails: Sequence[tuple[int, int]]) -> int:
        """Time of a step that begins on an idle device, because the host waits for it in every step."""
        host, device = self.lead_of(step).run(0, 0)
        network = 0
        last = dict(tails[::-1])  # of buckets ready at once, the first is followed by all their collectives
        for k, segment in enumerate(self.segments_of(step)):
            host, device = segment.run(host, device)
            network = max(network, device + last.get(k, 0))
        return max(compose([self.finish, self.optimizer]).run(host, max(device, network)))

    def captured_ns(self, step: PlannedStep, tails: Sequence[tuple[int, int]] = ()) -> int:
        """As `steady_ns`, when forward and backward pass are replayed as CUDA graphs (`qsync_opt.graphed`).

        The host launches them at once, so that it counts only outside of the passes; gradients are delivered after the
        whole backward pass, so that no all-reduce overlaps it.
        """
        copies, finish, optimizer, passes = self._copies, self.finish, self.optimizer, self.micro_batches
        pass_ns = copies.device + sum(step.device_ns) - self._slowed_ns + finish.device
        network = max((tail for _, tail in tails), default=0)
        host = passes * (copies.host + finish.host) + optimizer.host
        return max(host, passes * pass_ns + network + optimizer.device)

    @property
    def segments(self) -> int:
        """Number of segments of forward and backward pass: one per border, and the rest."""
        return len(self._borders) + 1

    def segments_of(self, step: PlannedStep) -> list[Work]:
        """Work of each segment."""
        phases, costs = self.costs.phases, step.costs
        pieces = [phases["forward"], *[cost.forward for cost in costs], phases["forward|end"], phases["backward"]]
        segments, end = [], len(costs)
        for border, slowed in zip((*self._borders, 0), self._slowed, strict=True):
            pieces += [cost.backward for cost in reversed(costs[border:end])]
            segment = compose(pieces)  # where the device waits for the host, a slower device loses nothing
            segments.append(segment._replace(device=segment.device + slowed))
            pieces, end = [], border
        return segments

    def lead_of(self, step: PlannedStep) -> Work:
        """Work before the last micro-batch of a step: earlier ones, and copies from the host's memory."""
        if self.micro_batches == 1:
            return self._copies
        # No all-reduce runs beside an earlier micro-batch.
        pairs = zip(self.segments_of(step), self._slowed, strict=True)
        passes = [segment._replace(device=segment.device - slowed) for segment, slowed in pairs]
        return compose([*[self._copies, *passes, self.finish] * (self.micro_batches - 1), self._copies])

    def memory(self, step: PlannedStep) -> StepMemory:
        """Peak memory of a step under a predicted plan.

        For a compiled step that was not recorded it is the larger of two estimates, because too little is worse than
        too much: one with the operators' memory in the recorded plans that are most alike around them, and one with its
        mean over all plans.
        """
        if not self.costs.graphs:
            return step_memory(self.graph, self.costs, self._lifetimes, step.costs, self.micro_batches)
        cases = [
            self._flow.case(position, step.plan.get(operator.name, ""), step.formats)
            for position, operator in enumerate(self.graph)
        ]

        def with_timelines(timelines: Sequence[MemoryTimeline]) -> StepMemory:
            return compiled_step_memory(self.graph, self.costs, step.costs, timelines, self.micro_batches)

        nearest = with_timelines(self._timelines.timelines(cases, step.costs))
        if self._timelines.recorded(cases):
            return nearest
        mean = with_timelines([cost.timeline for cost in step.costs])
        return max(nearest, mean, key=lambda memory: memory.peak_bytes)

    @property
    def composed(self) -> Mapping[Case, Case]:
        """Cases that were not observed, each with the observed one that it is derived from."""
        return self._composer.composed

    def cost(self, position: int, case: Case) -> CaseCost:
        """Cost of a case; if it was not observed, of the nearest one with casts.

        Raises:
            ProblemError: The operator was never recorded in this precision.
        """
        cost = self._cases.get(case)
        if cost is None:
            cost = self._cases[case] = self._composer.compose(position, case)
        return cost

    def signature(self, position: int) -> str:
        """Signature of an operator in its cases."""
        return self._flow.signature(position)

    def precisions(self, name: str) -> tuple[str, ...]:
        """Precisions in which an operator was recorded, coarsest first."""
        return self._composer.precisions(self._flow.signature(self._position[name]))
