"""QSync's own allocator: start from the fastest plan that fits, then give precision back where it matters most.

QSync's recovery keeps one ladder of precisions per operator. A step that lowers sensitivity is taken, largest
decrement first, if memory and latency still hold; else it is undone exactly. `qsync` is one pass, in which an operator
whose step fails tries its next higher level.
"""

from __future__ import annotations

import heapq
import logging
import math
import time
from collections.abc import Iterator
from typing import Any

from qsync_opt.formulations.training.ilp.least_part import Verdict, explain_infeasible, least_time
from qsync_opt.formulations.training.incremental import DeviceState
from qsync_opt.formulations.training.segments import peers_ns
from qsync_opt.model.graph import Role
from qsync_opt.registry import Kind, create, default_solver
from qsync_opt.training.problem import Problem, ProblemDevice
from qsync_opt.training.propagation import ladder
from qsync_opt.training.solution import Answer, SolveOptions, TerminationStatus

_LOGGER = logging.getLogger(__name__)
_SWEEPS = 8
"""Most passes over the operators in one descent; it nearly always settles in three."""
_PRICES = 10
"""Prices of memory that the search for a start tries, each a factor of four above the last."""


def adjustable_positions(problem: Problem, device: ProblemDevice) -> list[int]:
    """Positions of the operators that have a choice on ``device``."""
    return [
        position
        for position, operator in enumerate(problem.operators)
        if operator.role is Role.ADJUSTABLE and len(device.operators[operator.name]) > 1
    ]


def _uniform_starts(problem: Problem, device: ProblemDevice) -> Iterator[dict[str, str]]:
    """Each operator at the level of one format, as near as its table allows; and each at its own fastest."""
    ladders = {operator.name: ladder(problem, device, operator.name) for operator in problem.adjustable}
    for level in range(len(problem.formats)):
        yield {
            name: next((step for step in steps if problem.rank(step) >= level), steps[-1])
            for name, steps in ladders.items()
        }
    fastest = {}
    for name, steps in ladders.items():
        table = device.operators[name]
        times_ns = [table[step].forward_ns + table[step].backward_ns for step in steps]
        fastest[name] = steps[times_ns.index(min(times_ns))]
    yield fastest


def _descend(state: DeviceState, positions: list[int], price_ns_per_kib: float | None, deadline: float) -> None:
    """Take single steps that lower time, within memory (or with memory at a price), until none does."""

    def key() -> tuple[float, ...]:
        excess_kib = max(0, state.memory_kib - state.device.memory_limit_kib)
        if price_ns_per_kib is not None:
            return (state.iteration_ns + price_ns_per_kib * state.memory_kib, excess_kib)
        # Where time is bound by communication the compute time still tells which way is faster.
        return (excess_kib, state.iteration_ns, state.compute_ns, state.memory_kib)

    best = key()
    for _ in range(_SWEEPS):
        improved = False
        for position in positions:
            for precision in state.device.operators[state.problem.operators[position].name]:
                if precision == state.precisions[position]:
                    continue
                moves = state.change(position, precision)
                found = key()
                if found < best:
                    best, improved = found, True
                else:
                    state.undo(moves)
        if not improved or time.monotonic() > deadline:
            return


def fast_start(problem: Problem, device: ProblemDevice, deadline: float) -> DeviceState:
    """The fastest plan within memory that descent finds; it may break a limit where no better one was found.

    Args:
        problem: The problem; its latency limit only tells when to search on.
        device: The device.
        deadline: When to stop improving, on `time.monotonic`'s clock.

    Source: QSync starts from the fastest plan by exhausting blocks of the graph; descent from several uniform plans,
        with memory at growing prices where it does not fit, is ours.
    """
    positions = adjustable_positions(problem, device)
    best: DeviceState | None = None

    def rank(state: DeviceState) -> tuple[int, int]:
        return max(0, state.memory_kib - device.memory_limit_kib), state.iteration_ns

    def consider(choices: dict[str, str], price: float | None) -> None:
        nonlocal best
        state = DeviceState(problem, device, choices)
        _descend(state, positions, price, deadline)
        if price is not None:
            _descend(state, positions, None, deadline)
        if best is None or rank(state) < rank(best):
            best = state

    for choices in _uniform_starts(problem, device):
        if best is None or time.monotonic() < deadline:
            consider(choices, None)
    assert best is not None  # there is always a uniform start
    price = best.iteration_ns / max(1, device.memory_limit_kib) / 64
    for _ in range(_PRICES):
        if rank(best) <= (0, problem.latency_limit_ns) or time.monotonic() > deadline:
            break
        consider(best.choices(), price)
        price *= 4
    return best


def recover(state: DeviceState, *, passes: int | None, deadline: float) -> None:
    """Give precision back to operators, largest decrement of sensitivity first, while the limits hold.

    Args:
        state: A plan that keeps the limits; changed in place, to one that keeps them and is no more sensitive.
        passes: How many passes over all operators at most; None for as long as they help.
        deadline: When to stop, on `time.monotonic`'s clock.

    Source: QSync's precision recovery (IPDPS 2024). Ours: a level that does not lower sensitivity is skipped instead
        of ending the operator's ladder, and a refused level is undone exactly.
    """
    problem, device = state.problem, state.device
    positions = adjustable_positions(problem, device)
    steps = {position: ladder(problem, device, problem.operators[position].name) for position in positions}
    done = 0
    while passes is None or done < passes:
        done += 1
        helped = False
        # Entries: (negative decrement, position, level); ties go by position, so that runs repeat.
        heap: list[tuple[float, int, int]] = []
        for position in positions:
            _push(heap, state, steps[position], position, steps[position].index(state.precisions[position]))
        while heap and time.monotonic() < deadline:
            _, position, level = heapq.heappop(heap)
            moves = state.change(position, steps[position][level])
            if keeps_limits(state) and state.sensitivity_change(moves) < 0:
                helped = True
            else:
                state.undo(moves)
            _push(heap, state, steps[position], position, level)
        if not helped:
            return


def _push(
    heap: list[tuple[float, int, int]], state: DeviceState, steps: tuple[str, ...], position: int, level: int
) -> None:
    """Offer the next level above ``level`` that is less sensitive than the present one."""
    table = state.device.operators[state.problem.operators[position].name]
    present = table[state.precisions[position]].sensitivity
    for higher in range(level + 1, len(steps)):
        decrement = present - table[steps[higher]].sensitivity
        if decrement > 0:
            heapq.heappush(heap, (-decrement, position, higher))
            return


def feasible_start(problem: Problem, device: ProblemDevice, solver: Any, deadline: float) -> DeviceState | None:
    """A fast plan that keeps both limits, or None if none was found.

    Descent alone is tried first; where it finds none, a solver (an instance, a name, or None for none) looks for the
    fastest plan within memory, so that a plan is missed only where there is no solver or no time.
    """
    if peers_ns(problem) > problem.latency_limit_ns:
        return None
    state = fast_start(problem, device, deadline)
    if keeps_limits(state):
        return state
    if solver is None:
        return None
    _LOGGER.info("device %s: descent found no plan within the limits; asking a solver for the fastest", device.name)
    exact = least_time(problem, device, create(Kind.SOLVER, solver), deadline)
    if exact.choices is None:
        return None
    state = DeviceState(problem, device, exact.choices)
    return state if keeps_limits(state) else None


def keeps_limits(state: DeviceState) -> bool:
    """True if the plan keeps the device's memory limit and the problem's latency limit."""
    in_time = state.iteration_ns <= state.problem.latency_limit_ns
    return in_time and state.memory_kib <= state.device.memory_limit_kib


class QsyncFormulation:
    """The paper's allocator: one pass of recovery.

    Source: QSync (IPDPS 2024), allocator.
    """

    passes: int | None = 1

    def solve(self, problem: Problem, options: SolveOptions) -> Answer:
        """Plan every device type; see `Formulation.solve`."""
        started = time.monotonic()
        deadline = math.inf if options.time_limit_s is None else started + options.time_limit_s
        solver = options.solver or default_solver()
        devices: dict[str, dict[str, str]] = {}
        for device in problem.devices:
            state = feasible_start(problem, device, solver, deadline)
            if state is None:
                verdict = explain_infeasible(problem, solver, deadline)
                return self._no_plan(verdict, deadline, time.monotonic() - started)
            recover(state, passes=self.passes, deadline=deadline)
            devices[device.name] = state.choices()
        return Answer(
            termination=TerminationStatus.TIME_LIMIT if time.monotonic() > deadline else TerminationStatus.FEASIBLE,
            devices=devices,
            solve_seconds=time.monotonic() - started,
        )

    @staticmethod
    def _no_plan(verdict: Verdict | None, deadline: float, seconds: float) -> Answer:
        if verdict is not None and verdict.proved:
            termination = TerminationStatus.INFEASIBLE
        elif time.monotonic() > deadline:
            termination = TerminationStatus.TIME_LIMIT
        else:
            termination = TerminationStatus.ERROR
        reason = "no plan was found in the time allowed" if verdict is None else verdict.reason
        return Answer(termination=termination, solve_seconds=seconds, reason=reason)
