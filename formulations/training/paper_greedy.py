"""QSync's own allocator: start from the fastest plan that fits, then raise precision where it matters most.

Recovery walks one ladder of precisions per operator: the step of the largest decrement of sensitivity comes first, and
is undone exactly if it breaks a limit. `qsync` is one pass, in which an operator whose step fails tries its next level.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from qsync_opt.formulations.training.collapsed import collapse
from qsync_opt.formulations.training.exact import exact_effort
from qsync_opt.formulations.training.infeasible import prove_infeasible
from qsync_opt.formulations.training.latency import least_latency
from qsync_opt.formulations.training.tables import peers_ns, segments
from qsync_opt.model import Role
from qsync_opt.registry import Kind, create, default_solver
from qsync_opt.training import (
    BYTES_PER_KIB,
    Answer,
    Problem,
    ProblemDevice,
    SolveOptions,
    TerminationStatus,
    follow_inputs,
    precisions_by_rank,
    propagate,
)

Move = tuple[int, str]
"""Operator (position in forward order) and a precision."""


@dataclass(frozen=True, slots=True)
class _Edge:
    """One use of an output: the other end, and (forward ns, backward ns, buffer KiB) by pair of precisions."""

    producer: int
    consumer: int
    costs: Mapping[tuple[str, str], tuple[int, int, int]]


class DeviceState:
    """One device under a changing plan.

    Attributes:
        precisions: Precision of every operator, in forward order.
        memory_kib: Memory of the plan.

    Source: ours; QSync's released allocator copies the whole graph for each trial instead.
    """

    def __init__(self, problem: Problem, device: ProblemDevice, choices: Mapping[str, str]) -> None:
        self.problem = problem
        self.device = device
        cut = segments(problem)
        self._segment, self._tail_ns = cut.segment, cut.tail_ns
        self._tables = [device.operators[operator.name] for operator in problem.operators]
        self._ladders = [precisions_by_rank(problem, device, operator.name) for operator in problem.operators]
        self._shared = problem.cast_sharing == "producer"
        self._outputs = {p: borders.output for p, borders in device.precisions.items()}
        self._into: list[list[_Edge]] = [[] for _ in problem.operators]
        self._out_of: list[list[_Edge]] = [[] for _ in problem.operators]
        for position, operator in enumerate(problem.operators):
            for source in operator.inputs:
                edge = self._edge(problem.index(source), position)
                self._into[position].append(edge)
                self._out_of[edge.producer].append(edge)
        resolved = propagate(problem, device, choices)
        self.precisions = [resolved[operator.name] for operator in problem.operators]
        self.memory_kib = 0
        self._times_ns = [0] * cut.count
        self._wanted: list[dict[str, int]] = [{} for _ in problem.operators]
        for position in range(len(problem.operators)):
            self._add_operator(position, 1)
            for edge in self._into[position]:
                self._add_edge(edge, 1)

    def _edge(self, producer: int, consumer: int) -> _Edge:
        device, elements = self.device, self.problem.operators[producer].output_elements
        costs = {}
        for source in self._tables[producer]:
            for target in self._tables[consumer]:
                gradient = device.precisions[target].gradient_output
                backward_ns, _ = self._cast(gradient, device.precisions[source].gradient_input, elements)
                forward_ns, buffer_kib = (0, 0) if self._shared else self._cast(self._outputs[source], target, elements)
                costs[source, target] = forward_ns, backward_ns, buffer_kib
        return _Edge(producer, consumer, costs)

    def _cast(self, source: str, target: str, elements: int) -> tuple[int, int]:
        """Time and buffer of a cast; pairs that cannot occur together may have none."""
        if source == target or (source, target) not in self.device.casts:
            return 0, 0
        buffer_kib = -(-elements * self.problem.formats[target] // BYTES_PER_KIB)
        return self.device.cast_ns(source, target, elements), buffer_kib

    # -- contributions, added (sign 1) or subtracted (sign -1) at the current precisions -------------------------

    def _add_operator(self, position: int, sign: int) -> None:
        cost = self._tables[position][self.precisions[position]]
        self._times_ns[0] += sign * cost.forward_ns
        self._times_ns[self._segment[position]] += sign * cost.backward_ns
        self.memory_kib += sign * cost.memory_kib

    def _add_edge(self, edge: _Edge, sign: int) -> None:
        wanted = self.precisions[edge.consumer]
        forward_ns, backward_ns, buffer_kib = edge.costs[self.precisions[edge.producer], wanted]
        self._times_ns[0] += sign * forward_ns
        self._times_ns[self._segment[edge.producer]] += sign * backward_ns
        self.memory_kib += sign * buffer_kib
        if self._shared:
            users = self._wanted[edge.producer]
            before = users.get(wanted, 0)
            users[wanted] = before + sign
            if before == (0 if sign > 0 else 1):
                output = self._outputs[self.precisions[edge.producer]]
                elements = self.problem.operators[edge.producer].output_elements
                forward_ns, buffer_kib = self._cast(output, wanted, elements)
                self._times_ns[0] += sign * forward_ns
                self.memory_kib += sign * buffer_kib

    def _move(self, position: int, precision: str) -> None:
        edges = [*self._into[position], *self._out_of[position]]
        for edge in edges:
            self._add_edge(edge, -1)
        self._add_operator(position, -1)
        self.precisions[position] = precision
        self._add_operator(position, 1)
        for edge in edges:
            self._add_edge(edge, 1)

    def change(self, position: int, precision: str) -> list[Move]:
        """Change the precision of an adjustable operator, and of the dependent ones; returns the moves for `undo`."""
        undo: list[Move] = [(position, self.precisions[position])]
        self._move(position, precision)
        waiting = [edge.consumer for edge in self._out_of[position]]
        heapq.heapify(waiting)
        last = -1
        while waiting:
            consumer = heapq.heappop(waiting)
            if consumer == last or self.problem.operators[consumer].role is not Role.DEPENDENT:
                continue
            last = consumer
            delivered = max(
                self.problem.rank(self._outputs[self.precisions[edge.producer]]) for edge in self._into[consumer]
            )
            precision = follow_inputs(self.problem, self._ladders[consumer], delivered)
            if precision != self.precisions[consumer]:
                undo.append((consumer, self.precisions[consumer]))
                self._move(consumer, precision)
                for edge in self._out_of[consumer]:
                    heapq.heappush(waiting, edge.consumer)
        return undo

    def undo(self, moves: Iterable[Move]) -> None:
        """Undo a change."""
        for position, precision in reversed(list(moves)):
            self._move(position, precision)

    def sensitivity_change(self, moves: Iterable[Move]) -> float:
        """Change of sensitivity by moves, as `change` returned them."""
        return math.fsum(
            term
            for position, before in moves
            for term in (
                self._tables[position][self.precisions[position]].sensitivity,
                -self._tables[position][before].sensitivity,
            )
        )

    @property
    def compute_ns(self) -> int:
        """Forward and backward together, casts included."""
        return sum(self._times_ns)

    @property
    def iteration_ns(self) -> int:
        """Iteration time that this device alone allows (the peers' part is `peers_ns`)."""
        elapsed, longest = 0, 0
        for time_ns, tail_ns in zip(self._times_ns, self._tail_ns, strict=True):
            elapsed += time_ns
            longest = max(longest, elapsed + tail_ns)
        return longest

    @property
    def sensitivity(self) -> float:
        """Total sensitivity of the device."""
        pairs = zip(self._tables, self.precisions, strict=True)
        return math.fsum(table[precision].sensitivity for table, precision in pairs)

    def choices(self) -> dict[str, str]:
        """Precision of every adjustable operator."""
        operators = zip(self.problem.operators, self.precisions, strict=True)
        return {operator.name: precision for operator, precision in operators if operator.role is Role.ADJUSTABLE}


_SWEEPS = 8
"""Most passes over the operators in one descent; three are nearly always enough."""
_PRICES = 10
"""Number of memory prices in the search for a start, each a factor of four above the last."""


def adjustable_positions(problem: Problem, device: ProblemDevice) -> list[int]:
    """Positions of the operators that have a choice on ``device``."""
    return [
        position
        for position, operator in enumerate(problem.operators)
        if operator.role is Role.ADJUSTABLE and len(device.operators[operator.name]) > 1
    ]


def _uniform_starts(problem: Problem, device: ProblemDevice) -> Iterator[dict[str, str]]:
    """Each operator at the level of one format, as nearly as its table allows; then each at its own fastest."""
    ladders = {operator.name: precisions_by_rank(problem, device, operator.name) for operator in problem.adjustable}
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
        # Where communication bounds the iteration time, the compute time still shows what is faster.
        return (excess_kib, state.iteration_ns, state.compute_ns, state.memory_kib)

    best = key()
    for _ in range(_SWEEPS):
        improved = False
        for position in positions:
            for precision in state.device.operators[state.problem.operators[position].name]:
                if precision == state.precisions[position]:
                    continue
                moves = state.change(position, precision)
                value = key()
                if value < best:
                    best, improved = value, True
                else:
                    state.undo(moves)
        if not improved or time.monotonic() > deadline:
            return


def fast_start(problem: Problem, device: ProblemDevice, deadline: float) -> DeviceState:
    """Find a fast plan within memory by descent; it may break a limit where none better was found.

    Args:
        problem: The problem; its latency limit only decides whether to search on.
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
    """Raise precisions, largest decrement of sensitivity first, while the limits hold.

    Args:
        state: A plan that keeps the limits; changed in place, to one that keeps them and is no more sensitive.
        passes: Most passes over all operators; None for as long as they help.
        deadline: When to stop, on `time.monotonic`'s clock.

    Source: QSync's precision recovery (IPDPS 2024). Ours: a level that does not lower sensitivity is skipped instead
        of ending the operator's ladder, and a refused level is undone exactly.
    """
    problem, device = state.problem, state.device
    positions = adjustable_positions(problem, device)
    steps = {position: precisions_by_rank(problem, device, problem.operators[position].name) for position in positions}
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
    """Push the next level above ``level`` that is less sensitive than the current one."""
    table = state.device.operators[state.problem.operators[position].name]
    current = table[state.precisions[position]].sensitivity
    for higher in range(level + 1, len(steps)):
        decrement = current - table[steps[higher]].sensitivity
        if decrement > 0:
            heapq.heappush(heap, (-decrement, position, higher))
            return


def feasible_start(problem: Problem, device: ProblemDevice, solver: Any, deadline: float) -> DeviceState | None:
    """Find a fast plan that keeps both limits; None if there is none, or none was found.

    Where descent fails, bound and fix finds the fastest plan within memory (``solver``: an instance, a name, or None),
    so that a plan is missed only without time.
    """
    if peers_ns(problem) > problem.latency_limit_ns:
        return None
    state = fast_start(problem, device, deadline)
    if not keeps_limits(state):
        collapsed = collapse(problem, device, latency_limit_ns=0)
        effort = exact_effort(0.0, None if solver is None else create(Kind.SOLVER, solver))
        labels_N = least_latency(collapsed, deadline, effort)[2]
        if labels_N is None:
            return None
        state = DeviceState(problem, device, collapsed.choices(labels_N))
    return state if keeps_limits(state) else None


def keeps_limits(state: DeviceState) -> bool:
    """True if the plan keeps the device's memory limit and the problem's latency limit."""
    in_time = state.iteration_ns <= state.problem.latency_limit_ns
    return in_time and state.memory_kib <= state.device.memory_limit_kib


class QsyncFormulation:
    """The method ``qsync``: the paper's allocator with one pass of recovery.

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
                return self._no_plan(prove_infeasible(problem, device, deadline), deadline, started)
            recover(state, passes=self.passes, deadline=deadline)
            devices[device.name] = state.choices()
        return Answer(
            termination=TerminationStatus.TIME_LIMIT if time.monotonic() > deadline else TerminationStatus.FEASIBLE,
            devices=devices,
            solve_seconds=time.monotonic() - started,
        )

    @staticmethod
    def _no_plan(proof: str | None, deadline: float, started: float) -> Answer:
        if proof is not None:
            termination = TerminationStatus.INFEASIBLE
        elif time.monotonic() > deadline:
            termination = TerminationStatus.TIME_LIMIT
        else:
            termination = TerminationStatus.ERROR
        reason = proof or "no plan within the limits was found, which proves nothing; allow more time or try 'exact'"
        return Answer(termination=termination, solve_seconds=time.monotonic() - started, reason=reason)
