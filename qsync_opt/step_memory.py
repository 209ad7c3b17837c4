"""How much memory does a step need at most, and where?"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from qsync_opt.compiled_memory import Course, backward_moment, forward_moment, moment_of, moments
from qsync_opt.graph import OpGraph
from qsync_opt.lifetimes import Kept, Lifetimes
from qsync_opt.step_costs import CaseCost, StepCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """Peak of one worker in bytes, and where it is: a phase, and the operator then running ("" outside of all)."""

    peak_bytes: int
    phase: str
    operator: str


def step_memory(graph: OpGraph, costs: StepCosts, lifetimes: Lifetimes, cases: Sequence[CaseCost]) -> StepMemory:
    """Peak of a step that runs operator by operator.

    Args:
        graph: The model.
        costs: Recorded steps of it, for what is there outside of operators.
        lifetimes: Of what the operators deliver.
        cases: Per operator, in order, what it costs under the plan.

    Source: ours; bytes follow the step moment by moment, as torch's allocator was seen to give and take them.
    """
    releases = lifetimes.releases([Kept(case.saves_inputs, case.saves_output) for case in cases])
    now = peak = costs.resident_bytes
    where = ("forward", "")
    for phase, position, high, net in _moments(costs, cases, releases.forward, releases.backward):
        if now + high > peak:
            peak, where = now + high, (phase, "" if position < 0 else graph.operators[position].name)
        now += net
    return StepMemory(peak_bytes=peak, phase=where[0], operator=where[1])


def compiled_step_memory(
    graph: OpGraph, costs: StepCosts, cases: Sequence[CaseCost], courses: Sequence[Course]
) -> StepMemory:
    """What all operators of a compiled step have in use when the passes need most, or what the optimizer needs.

    Where the costs tell from when until when memory is in use, most is needed at the moment at which the sum is
    largest; else what each had when its plan needed most is summed up, which is off where those moments differ.

    Args:
        graph: As in `step_memory`.
        costs: As in `step_memory`.
        cases: As in `step_memory`.
        courses: Per operator, in order, how its memory comes and goes; all empty if that was not recorded.
    """
    if costs.outside or any(courses):
        return _peak_of_courses(graph, costs, courses)
    peaks = costs.phase_peaks
    outside = sum(peaks[label] for label in ("forward", "forward|end", "backward", "backward|end"))
    used = [case.forward_net_bytes + case.backward_net_bytes for case in cases]
    passes, later = outside + sum(used), peaks["optimizer"]
    largest = graph.operators[used.index(max(used))].name if used else ""
    where = ("backward", largest) if passes >= later else ("optimizer", "")
    return StepMemory(peak_bytes=costs.resident_bytes + max(passes, later), phase=where[0], operator=where[1])


def _peak_of_courses(graph: OpGraph, costs: StepCosts, courses: Sequence[Course]) -> StepMemory:
    """The moment at which most is in use, of those that blocks of memory come and go at."""
    count = len(graph)
    changes = [0] * moments(count)
    for moment, num_bytes in costs.outside:
        changes[moment] += num_bytes
    for position, course in enumerate(courses):
        for entry in course:
            changes[moment_of(entry, position, count)] += entry[2]
    used = list(itertools.accumulate(changes))
    most, later = max(used), costs.phase_peaks["optimizer"]
    if later > most:
        return StepMemory(peak_bytes=costs.resident_bytes + later, phase="optimizer", operator="")
    moment = used.index(most)
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
    """(phase, operator, bytes beyond what is there, change) through the step."""
    peaks = costs.phase_peaks
    for i, case in enumerate(cases):
        freed = sum(cases[r].result_bytes for r in forward.get(i, ()))
        yield "forward", i, case.forward_peak_bytes, case.forward_net_bytes - freed
    yield "forward", -1, max(peaks["forward|end"], peaks["backward"]), 0
    for i in range(len(cases) - 1, -1, -1):
        freed = sum(cases[r].result_bytes for r in backward.get(i, ()))
        yield "backward", i, cases[i].backward_peak_bytes, cases[i].backward_net_bytes - freed
    yield "backward", -1, peaks["backward|end"], 0
    yield "optimizer", -1, peaks["optimizer"], 0
