"""Peak memory of a step under a plan, and where in the step it is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from qsync_opt.model import OpGraph
from qsync_opt.steps.costs import Case, CaseCost, RecordedTimelines, StepCosts
from qsync_opt.steps.memory_timeline import (
    MemoryTimeline,
    backward_moment,
    forward_moment,
    mean_timeline,
    moment_of,
    moments,
)
from qsync_opt.training import gradient_users


class Releases(NamedTuple):
    """Results that are freed during or after the forward or backward pass of each operator (positions).

    All others live until the end of the step.
    """

    forward: Mapping[int, Sequence[int]]
    backward: Mapping[int, Sequence[int]]


class Lifetimes:
    """Lifetimes of results in a graph; for ``roots`` and ``held`` see `StepCosts`."""

    def __init__(self, graph: OpGraph, roots: Mapping[str, str], held: Mapping[str, str]) -> None:
        index = {operator.name: i for i, operator in enumerate(graph)}
        self._roots = [index[self._root(graph, roots, operator.name)] for operator in graph]
        self._inputs = [tuple(self._roots[index[source]] for source in operator.inputs) for operator in graph]
        self._held = [index.get(held.get(operator.name, ""), -1) for operator in graph]

    @staticmethod
    def _root(graph: OpGraph, roots: Mapping[str, str], name: str) -> str:
        seen = {name}
        while True:
            root = roots.get(name, name)
            if root in seen or root not in graph:
                return name
            seen.add(root)
            name = root

    def releases(self, kept: Sequence[tuple[tuple[int, ...], bool]]) -> Releases:
        """Operators that free each result.

        ``kept`` is what each operator keeps for its backward pass, in order: positions of inputs, whether the result.
        """
        first: dict[int, int] = {}
        # Backward runs from the last operator to the first: the first keeper is the last to release.
        for position in range(len(kept) - 1, -1, -1):
            inputs, output = kept[position]
            for i in inputs:
                first[self._inputs[position][i]] = position
            if output:
                first[self._roots[position]] = position
        forward: dict[int, list[int]] = {}
        backward: dict[int, list[int]] = {}
        for position, root in enumerate(self._roots):
            if root != position or self._held[position] < 0:
                continue
            keeper = first.get(position)
            if keeper is None:
                forward.setdefault(self._held[position], []).append(position)
            else:
                backward.setdefault(keeper, []).append(position)
        return Releases(forward, backward)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """Peak of one worker in bytes, and where it is: a phase, and the operator then running ("" outside of all)."""

    peak_bytes: int
    phase: str
    operator: str


def step_memory(
    graph: OpGraph, costs: StepCosts, lifetimes: Lifetimes, cases: Sequence[CaseCost], micro_batches: int = 1
) -> StepMemory:
    """Peak of a step that runs operator by operator.

    From the second micro-batch on, all gradients exist, and each new one is added to its sum at once. ``cases`` are the
    costs of the operators under the plan, in order.

    Source: ours; bytes follow the step moment by moment, as torch's allocator was observed to allocate and free them.
    """
    releases = lifetimes.releases([(case.saves_inputs, case.saves_output) for case in cases])
    begin = now = peak = costs.resident_bytes + costs.phase_peaks.get("copies", 0)
    where = ("copies", "") if now > costs.resident_bytes else ("forward", "")
    for repeated in range(min(micro_batches, 2)):
        gradients = _gradients(graph, now - begin) if repeated else [0] * len(cases)
        for phase, position, high, net in _changes(costs, cases, releases):
            if now + high > peak:
                peak, where = now + high, (phase, "" if position < 0 else graph.operators[position].name)
            now += net - (gradients[position] if position >= 0 and phase == "backward" else 0)
    for phase in ("clip", "optimizer"):
        if now + costs.phase_peaks.get(phase, 0) > peak:
            peak, where = now + costs.phase_peaks[phase], (phase, "")
    return StepMemory(peak_bytes=peak, phase=where[0], operator=where[1])


def _gradients(graph: OpGraph, num_bytes: int) -> list[int]:
    """Bytes that one backward pass left behind, by the operator that completes each gradient.

    Zeros if gradients live in buckets, which exist all the time.
    """
    users = gradient_users(graph)
    own = [0] * len(graph)
    for parameter in graph.parameters:
        if parameter.name in users:
            own[users[parameter.name][0]] += parameter.spec.num_bytes
    total = sum(own)
    left = max(0, num_bytes)
    return [left * size // total for size in own] if total else own


def _changes(costs: StepCosts, cases: Sequence[CaseCost], releases: Releases) -> Iterator[tuple[str, int, int, int]]:
    """(phase, operator, peak beyond the memory before it, change) through forward and backward pass."""
    peaks = costs.phase_peaks
    for i, case in enumerate(cases):
        freed = sum(cases[r].result_bytes for r in releases.forward.get(i, ()))
        yield "forward", i, case.forward_peak_bytes, case.forward_net_bytes - freed
    yield "forward", -1, max(peaks["forward|end"], peaks["backward"]), 0
    late = 0
    for i, case in reversed(list(enumerate(cases))):
        freed = sum(cases[r].result_bytes for r in releases.backward.get(i, ()))
        yield "backward", i, case.backward_peak_bytes, case.backward_net_bytes + late - freed
        late = case.backward_late_bytes
    yield "backward", -1, peaks["backward|end"], 0


def compiled_step_memory(
    graph: OpGraph,
    costs: StepCosts,
    cases: Sequence[CaseCost],
    timelines: Sequence[MemoryTimeline],
    micro_batches: int = 1,
) -> StepMemory:
    """Peak of a compiled step: of the sum of all operators in the passes, or of the optimizer.

    If the costs hold timelines, the peak is at the moment of the largest sum; else the memory of each operator at the
    peak of its recorded plan is summed, which is inexact where those moments differ. With several micro-batches, all
    gradients are counted besides the memory of a pass, though some of them arise in it: that is at most too much.
    """
    gradients = sum(parameter.spec.num_bytes for parameter in graph.parameters) if micro_batches > 1 else 0
    peaks = costs.phase_peaks
    later = max(peaks["optimizer"], peaks.get("clip", 0))
    if costs.outside or any(timelines):
        passes, phase, position = _peak_of_timelines(costs, timelines, len(graph))
    else:
        used = [case.forward_net_bytes + case.backward_net_bytes for case in cases]
        passes = sum(peaks[label] for label in ("forward", "forward|end", "backward", "backward|end")) + sum(used)
        phase, position = "backward", used.index(max(used)) if used else -1
    if later > passes + gradients:
        return StepMemory(peak_bytes=costs.resident_bytes + later, phase="optimizer", operator="")
    operator = graph.operators[position].name if 0 <= position < len(graph) else ""
    return StepMemory(peak_bytes=costs.resident_bytes + passes + gradients, phase=phase, operator=operator)


def _peak_of_timelines(costs: StepCosts, timelines: Sequence[MemoryTimeline], count: int) -> tuple[int, str, int]:
    """Bytes, phase and operator (position) at the peak of the sum of all timelines."""
    changes = [0] * moments(count)
    for moment, num_bytes in costs.outside:
        changes[moment] += num_bytes
    for position, timeline in enumerate(timelines):
        for entry in timeline:
            changes[moment_of(entry, position, count)] += entry[2]
    used = list(itertools.accumulate(changes))
    peak = max(used)
    moment = used.index(peak)
    if moment <= count:
        return peak, "forward", moment - forward_moment(0)
    return peak, "backward", backward_moment(0, count) - moment


_NEAR, _FAR = 3, 12
"""Operators to each side that are compared; those beyond the near ones only where the near ones are equally alike."""
_Place = tuple[RecordedTimelines, int]
"""A recorded plan, and the position of an operator."""


class TimelineLookup:
    """Timelines of compiled operators, from the recorded plan whose operators around them are most alike.

    The operator that a compiler's tensor is charged to depends on its neighbours: of two tensors of equal size that a
    kernel writes, one is kept and the other not, and the kernel that writes a tensor differs from plan to plan. Two
    plans may therefore disagree on the memory of an operator in the same case. The memory of an operator and its
    neighbours together is right in each plan, so that neighbours are looked up in the same plan where possible. The
    readers of its result count first: the formats in which they need it decide how many copies of it exist.

    ``users`` are the positions of the readers of each operator's result.

    Source: ours.
    """

    def __init__(self, recorded: Sequence[RecordedTimelines], users: Sequence[Sequence[int]]) -> None:
        self._recorded = recorded
        self._users = users
        self._places: dict[Case, list[_Place]] = {}
        for plan in recorded:
            for position, case in enumerate(plan.cases):
                self._places.setdefault(case, []).append((plan, position))
        self._cache: dict[tuple[int, tuple[Case, ...], tuple[Case, ...]], list[_Place]] = {}

    def recorded(self, cases: Sequence[Case]) -> bool:
        """Whether a plan with these cases was recorded."""
        return any(plan.cases == tuple(cases) for plan in self._recorded)

    def timelines(self, cases: Sequence[Case], costs: Sequence[CaseCost]) -> list[MemoryTimeline]:
        """Timelines of all operators of a plan, in order; of a case that was never recorded, that of its cost."""
        result = []
        differences: dict[int, int] = {}
        for position, (case, cost) in enumerate(zip(cases, costs, strict=True)):
            if case not in self._places:
                result.append(cost.timeline)
                continue
            alike = self._most_alike(cases, position)
            if len(alike) > 1:  # then the plan counts that is most alike as a whole
                for plan, _ in alike:
                    if id(plan) not in differences:
                        differences[id(plan)] = sum(a != b for a, b in zip(plan.cases, cases, strict=False))
                fewest = min(differences[id(plan)] for plan, _ in alike)
                alike = [(plan, place) for plan, place in alike if differences[id(plan)] == fewest]
            result.append(mean_timeline([plan.timelines[place] for plan, place in alike]))
        return result

    def _readers(self, cases: Sequence[Case], position: int) -> tuple[Case, ...]:
        return tuple([cases[user] for user in self._users[position]])

    def _most_alike(self, cases: Sequence[Case], position: int) -> list[_Place]:
        """The places of an operator's case whose surroundings are most like those of ``position`` in ``cases``."""
        readers = self._readers(cases, position)
        key = (position, tuple(cases[max(0, position - _FAR) : position + _FAR + 1]), readers)
        if key not in self._cache:

            def rank(plan: RecordedTimelines, place: int) -> tuple[int, int, int, bool]:
                pairs = itertools.zip_longest(self._readers(plan.cases, place), readers)
                near, far = _differences(plan.cases, place, cases, position)
                return sum(a != b for a, b in pairs), near, far, place != position

            places = self._places[cases[position]]
            ranks = [rank(plan, place) for plan, place in places]
            best = min(ranks)
            self._cache[key] = [place for place, rank in zip(places, ranks, strict=True) if rank == best]
        return self._cache[key]


def _differences(some: Sequence[Case], i: int, others: Sequence[Case], k: int) -> tuple[int, int]:
    """How many cases differ near two places, and far from them; an end of the model equals only another end."""
    counts = [0, 0]
    for distance in range(1, _FAR + 1):
        for step in (-distance, distance):
            a = some[i + step] if 0 <= i + step < len(some) else None
            b = others[k + step] if 0 <= k + step < len(others) else None
            if a is not b and a != b:
                counts[distance > _NEAR] += 1
    return counts[0], counts[1]
