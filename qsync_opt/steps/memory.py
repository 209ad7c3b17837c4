"""How much memory does a step need at most, and where?"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from qsync_opt.model import OpGraph
from qsync_opt.steps.costs import CaseCost, StepCosts
from qsync_opt.steps.courses import Course, backward_moment, forward_moment, moment_of, moments
from qsync_opt.training import gradient_users


class Kept(NamedTuple):
    """What an operator keeps for its backward pass: inputs by position, and whether its result."""

    inputs: tuple[int, ...]
    output: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Releases:
    """Which results are given back when: during or after the forward or backward pass of an operator (positions).

    Those of neither live until the step is over.
    """

    forward: Mapping[int, tuple[int, ...]]
    backward: Mapping[int, tuple[int, ...]]


class Lifetimes:
    """Lifetimes of results in a graph.

    Args:
        graph: The model.
        roots: Operator to the one whose storage its result lives in, where that is another.
        held: Operator to the operator after which the program lets go of its result; "" or missing: after the step.
    """

    def __init__(self, graph: OpGraph, roots: Mapping[str, str], held: Mapping[str, str]) -> None:
        index = {operator.name: i for i, operator in enumerate(graph)}
        self._roots = [index[self._root(graph, roots, operator.name)] for operator in graph]
        self._inputs = [tuple(self._roots[index[source]] for source in operator.inputs) for operator in graph]
        self._held = [index.get(held.get(operator.name, ""), -1) for operator in graph]

    @staticmethod
    def _root(graph: OpGraph, roots: Mapping[str, str], name: str) -> str:
        seen = {name}
        while True:
            after = roots.get(name, name)
            if after in seen or after not in graph:
                return name
            seen.add(after)
            name = after

    def root(self, position: int) -> int:
        """Position of the operator in whose storage a result lives."""
        return self._roots[position]

    def releases(self, kept: Sequence[Kept]) -> Releases:
        """When each result is given back.

        Args:
            kept: Per operator, in order.
        """
        first: dict[int, int] = {}
        # Backward runs from the last operator to the first: the first keeper is the last to let go.
        for position in range(len(kept) - 1, -1, -1):
            saves = kept[position]
            for i in saves.inputs:
                first[self._inputs[position][i]] = position
            if saves.output:
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
        return Releases(
            forward={k: tuple(v) for k, v in forward.items()}, backward={k: tuple(v) for k, v in backward.items()}
        )


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

    From the second micro-batch on the gradients are there all along, and those that a backward pass makes are added to
    them at once.

    Args:
        graph: The model.
        costs: Recorded steps of it, for what is there outside of operators.
        lifetimes: Of what the operators deliver.
        cases: Per operator, in order, what it costs under the plan.
        micro_batches: Forward and backward passes whose gradients are added up before the optimizer's step.

    Source: ours; bytes follow the step moment by moment, as torch's allocator was seen to give and take them.
    """
    releases = lifetimes.releases([Kept(case.saves_inputs, case.saves_output) for case in cases])
    begin = now = peak = costs.resident_bytes + costs.phase_peaks.get("copies", 0)
    where = ("copies", "") if now > costs.resident_bytes else ("forward", "")
    for repeated in range(min(micro_batches, 2)):
        gradients = _gradients(graph, now - begin) if repeated else [0] * len(cases)
        for phase, position, high, net in _moments(costs, cases, releases.forward, releases.backward):
            if now + high > peak:
                peak, where = now + high, (phase, "" if position < 0 else graph.operators[position].name)
            now += net - (gradients[position] if position >= 0 and phase == "backward" else 0)
    for phase in ("clip", "optimizer"):
        if now + costs.phase_peaks.get(phase, 0) > peak:
            peak, where = now + costs.phase_peaks[phase], (phase, "")
    return StepMemory(peak_bytes=peak, phase=where[0], operator=where[1])


def _gradients(graph: OpGraph, num_bytes: int) -> list[int]:
    """What one backward pass left behind, by the operator that completes each gradient.

    None where gradients live in buckets, which are there all the time.
    """
    users = gradient_users(graph)
    own = [0] * len(graph)
    for parameter in graph.parameters:
        if parameter.name in users:
            own[users[parameter.name][0]] += parameter.spec.num_bytes
    total = sum(own)
    left = max(0, num_bytes)
    return [left * size // total for size in own] if total else own


def compiled_step_memory(
    graph: OpGraph, costs: StepCosts, cases: Sequence[CaseCost], courses: Sequence[Course], micro_batches: int = 1
) -> StepMemory:
    """What all operators of a compiled step have in use when the passes need most, or what the optimizer needs.

    Where the costs tell from when until when memory is in use, most is needed at the moment at which the sum is
    largest; else what each had when its plan needed most is summed up, which is off where those moments differ.

    Args:
        graph: As in `step_memory`.
        costs: As in `step_memory`.
        cases: As in `step_memory`.
        courses: Per operator, in order, how its memory comes and goes; all empty if that was not recorded.
        micro_batches: As in `step_memory`; with several, all gradients are counted beside what a pass needs, though
            some of them were made in it: that is at most too much.
    """
    there = sum(parameter.spec.num_bytes for parameter in graph.parameters) if micro_batches > 1 else 0
    if costs.outside or any(courses):
        return _peak_of_courses(graph, costs, courses, there)
    peaks = costs.phase_peaks
    outside = sum(peaks[label] for label in ("forward", "forward|end", "backward", "backward|end"))
    used = [case.forward_net_bytes + case.backward_net_bytes for case in cases]
    passes, later = there + outside + sum(used), max(peaks["optimizer"], peaks.get("clip", 0))
    largest = graph.operators[used.index(max(used))].name if used else ""
    where = ("backward", largest) if passes >= later else ("optimizer", "")
    return StepMemory(peak_bytes=costs.resident_bytes + max(passes, later), phase=where[0], operator=where[1])


def _peak_of_courses(graph: OpGraph, costs: StepCosts, courses: Sequence[Course], there: int) -> StepMemory:
    """The moment at which most is in use, of those that blocks of memory come and go at."""
    count = len(graph)
    changes = [0] * moments(count)
    for moment, num_bytes in costs.outside:
        changes[moment] += num_bytes
    for position, course in enumerate(courses):
        for entry in course:
            changes[moment_of(entry, position, count)] += entry[2]
    used = list(itertools.accumulate(changes))
    highest = max(used)
    most, later = highest + there, max(costs.phase_peaks["optimizer"], costs.phase_peaks.get("clip", 0))
    if later > most:
        return StepMemory(peak_bytes=costs.resident_bytes + later, phase="optimizer", operator="")
    moment = used.index(highest)
    position = moment - forward_moment(0) if moment <= count else backward_moment(0, count) - moment
    operator = graph.operators[position].name if 0 <= position < count else ""
    return StepMemory(
        peak_bytes=costs.resident_bytes + most, phase="forward" if moment <= count else "backward", operator=operator
    )


def _moments(
    costs: StepCosts,
    cases: Sequence[CaseCost],
    forward: Mapping[int, Sequence[int]],
    backward: Mapping[int, Sequence[int]],
) -> Iterator[tuple[str, int, int, int]]:
    """(phase, operator, bytes beyond what is there, change) through forward and backward pass."""
    peaks = costs.phase_peaks
    for i, case in enumerate(cases):
        freed = sum(cases[r].result_bytes for r in forward.get(i, ()))
        yield "forward", i, case.forward_peak_bytes, case.forward_net_bytes - freed
    yield "forward", -1, max(peaks["forward|end"], peaks["backward"]), 0
    late = 0
    for i in range(len(cases) - 1, -1, -1):
        freed = sum(cases[r].result_bytes for r in backward.get(i, ()))
        yield "backward", i, cases[i].backward_peak_bytes, cases[i].backward_net_bytes + late - freed
        late = cases[i].backward_late_bytes
    yield "backward", -1, peaks["backward|end"], 0
