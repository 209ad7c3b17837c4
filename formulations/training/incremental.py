"""Time, memory and sensitivity of one device, kept up to date while single operators change: for searching methods.

Every change is a list of moves that can be undone exactly: all sums are integers. The independent evaluation is in
`qsync_opt.training.evaluation`; tests compare the two after every kind of change.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from qsync_opt.formulations.training.segments import segments
from qsync_opt.model.graph import Role
from qsync_opt.training.evaluation import BYTES_PER_KIB
from qsync_opt.training.problem import Problem, ProblemDevice
from qsync_opt.training.propagation import follow, ladder, propagate

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
        self._ladders = [ladder(problem, device, operator.name) for operator in problem.operators]
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
        for given in self._tables[producer]:
            for wanted in self._tables[consumer]:
                output, gradient = device.precisions[given].output, device.precisions[wanted].gradient_output
                # Pairs that cannot occur together may have no cast; a dependent operator never takes them.
                backward_ns = self._cast_ns(gradient, device.precisions[given].gradient_input, elements)
                forward_ns = self._cast_ns(output, wanted, elements)
                buffer_kib = 0 if output == wanted else self._buffer_kib(wanted, elements)
                costs[given, wanted] = (0, backward_ns, 0) if self._shared else (forward_ns, backward_ns, buffer_kib)
        return _Edge(producer, consumer, costs)

    def _cast_ns(self, source: str, target: str, elements: int) -> int:
        if source == target or (source, target) not in self.device.casts:
            return 0
        return self.device.cast_ns(source, target, elements)

    def _buffer_kib(self, target: str, elements: int) -> int:
        return -(-elements * self.problem.formats[target] // BYTES_PER_KIB)

    # -- contributions, added (sign 1) or taken away (sign -1) at the present precisions -------------------------

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
            if (before == 0) if sign > 0 else (before == 1):
                self._add_shared_cast(edge.producer, wanted, sign)

    def _add_shared_cast(self, producer: int, target: str, sign: int) -> None:
        output = self._outputs[self.precisions[producer]]
        if output != target:
            elements = self.problem.operators[producer].output_elements
            self._times_ns[0] += sign * self._cast_ns(output, target, elements)
            self.memory_kib += sign * self._buffer_kib(target, elements)

    def _move(self, position: int, precision: str) -> None:
        edges = [*self._into[position], *self._out_of[position]]
        for edge in edges:
            self._add_edge(edge, -1)
        self._add_operator(position, -1)
        self.precisions[position] = precision
        self._add_operator(position, 1)
        for edge in edges:
            self._add_edge(edge, 1)

    # -- what callers use ----------------------------------------------------------------------------------------

    def change(self, position: int, precision: str) -> list[Move]:
        """Give an adjustable operator another precision and let dependent ones follow; return how to `undo` it."""
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
            found = follow(self.problem, self._ladders[consumer], delivered)
            if found != self.precisions[consumer]:
                undo.append((consumer, self.precisions[consumer]))
                self._move(consumer, found)
                for edge in self._out_of[consumer]:
                    heapq.heappush(waiting, edge.consumer)
        return undo

    def undo(self, moves: Iterable[Move]) -> None:
        """Take back a change."""
        for position, precision in reversed(list(moves)):
            self._move(position, precision)

    def sensitivity_change(self, moves: Iterable[Move]) -> float:
        """Sensitivity now, less what it was before ``moves`` (as `change` returned them) were made."""
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
        """Iteration time that this device alone would allow (the peers' part is `peers_ns`)."""
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
