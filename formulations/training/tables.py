"""One device type of a problem as arrays; the only module that walks its operators' objects.

Axes: O operators in forward order, P precisions by rank (a precision's name is a number format), X operator edges,
K rows of the latency limit.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace

import numpy as np

from qsync_opt.formulations.assignment import Bools, Floats, Ints
from qsync_opt.model import Role
from qsync_opt.training import BYTES_PER_KIB, MI_ELEMENTS, Problem, ProblemDevice


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """Work segments of backward on one device, cut where gradient buckets close.

    ``segment`` is, by operator in forward order, the number of closings before its backward has run; forward counts
    into segment 0. ``tail_ns[s]`` must still follow closing s: the all-reduces from its first bucket on, and the
    optimizer. The last segment ends with backward itself.
    """

    segment: tuple[int, ...]
    tail_ns: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of segments."""
        return len(self.tail_ns)


def segments(problem: Problem) -> Segments:
    """Cut backward where buckets close; the same for every device.

    Source: unrolling S_k = max(R_k, peer_k, S_{k-1} + D_{k-1}), so that R_k + sum of D_j (j >= k) bounds the iteration.
    """
    positions: dict[int, int] = {}  # earliest operator of each bucket in forward order, the last one in backward order
    for position, operator in enumerate(problem.operators):
        if operator.bucket is not None:
            positions.setdefault(operator.bucket, position)
    tail_by_position: dict[int, int] = {}
    for bucket, position in positions.items():
        tail_ns = sum(problem.communication.allreduce_ns[bucket:]) + problem.optimizer_ns
        tail_by_position[position] = max(tail_ns, tail_by_position.get(position, 0))
    # A closing is implied by a later one that leaves no more time: prefix sums only grow.
    closings: list[int] = []
    longest = problem.optimizer_ns
    for position, tail_ns in sorted(tail_by_position.items()):
        if tail_ns > longest:
            closings.append(position)
            longest = tail_ns
    segment = [len(closings) - bisect_right(closings, position) for position in range(len(problem.operators))]
    tails_ns = [tail_by_position[position] for position in reversed(closings)]
    return Segments(segment=tuple(segment), tail_ns=(*tails_ns, problem.optimizer_ns))


def peers_ns(problem: Problem) -> int:
    """Iteration time in ns that the fixed-precision peers, the all-reduces and the optimizer take alone."""
    communication = problem.communication
    return max(
        (ready + sum(communication.allreduce_ns[k:]) for k, ready in enumerate(communication.peer_ready_ns)), default=0
    ) + (problem.optimizer_ns)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GraphTables:
    """What all device types share: the operators and their edges."""

    names: tuple[str, ...]
    dependent_O: tuple[bool, ...]
    adjustable: tuple[tuple[int, str], ...]  # row and name
    inputs: tuple[tuple[int, ...], ...]
    source_X: Ints
    target_X: Ints
    elements_O: Ints
    bucket_O: Ints  # -1: none


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceTables:
    """Costs of one device type; entries of precisions that an operator lacks are zero and not available."""

    available_OP: Bools
    forward_OP: Ints
    backward_OP: Ints
    memory_OP: Ints
    sensitivity_OP: Floats
    output_P: Ints
    gradient_input_P: Ints
    gradient_output_P: Ints
    cast_base_PP: Ints
    cast_slope_PP: Ints
    bytes_P: Ints


def graph_tables(problem: Problem) -> GraphTables:
    """Read the operators of a problem."""
    index = {operator.name: i for i, operator in enumerate(problem.operators)}
    inputs = tuple(tuple(index[name] for name in operator.inputs) for operator in problem.operators)
    counts = [len(sources) for sources in inputs]
    return GraphTables(
        names=tuple(index),
        dependent_O=tuple(operator.role is Role.DEPENDENT for operator in problem.operators),
        adjustable=tuple((row, op.name) for row, op in enumerate(problem.operators) if op.role is Role.ADJUSTABLE),
        inputs=inputs,
        source_X=np.array([u for sources in inputs for u in sources], dtype=np.int64),
        target_X=np.repeat(np.arange(len(inputs)), counts),
        elements_O=np.array([operator.output_elements for operator in problem.operators], dtype=np.int64),
        bucket_O=np.array(
            [-1 if operator.bucket is None else operator.bucket for operator in problem.operators], dtype=np.int64
        ),
    )


def device_tables(problem: Problem, device: ProblemDevice) -> DeviceTables:
    """Read the costs of one device type."""
    rank = {name: i for i, name in enumerate(problem.formats)}
    shape = (len(problem.operators), len(rank))
    position, integers, sensitivities = [], [], []
    tables = device.operators
    for row, operator in enumerate(problem.operators):
        base = row * shape[1]
        for name, cost in tables[operator.name].items():
            position.append(base + rank[name])
            integers.append((cost.forward_ns, cost.backward_ns, cost.memory_kib))
            sensitivities.append(cost.sensitivity)
    where = np.array(position, dtype=np.int64)
    dense = np.zeros((3, shape[0] * shape[1]), dtype=np.int64)
    dense[:, where] = np.array(integers, dtype=np.int64).T
    available, sensitivity = np.zeros(dense.shape[1], dtype=np.bool_), np.zeros(dense.shape[1])
    available[where], sensitivity[where] = True, sensitivities
    borders = np.zeros((3, shape[1]), dtype=np.int64)
    for name, formats in device.precisions.items():
        borders[:, rank[name]] = rank[formats.output], rank[formats.gradient_input], rank[formats.gradient_output]
    casts = np.zeros((2, shape[1], shape[1]), dtype=np.int64)
    for (source, target), cast in device.casts.items():
        if source != target:
            casts[:, rank[source], rank[target]] = cast.base_ns, cast.ns_per_mi_elements
    return DeviceTables(
        available_OP=available.reshape(shape),
        forward_OP=dense[0].reshape(shape),
        backward_OP=dense[1].reshape(shape),
        memory_OP=dense[2].reshape(shape),
        sensitivity_OP=sensitivity.reshape(shape),
        output_P=borders[0],
        gradient_input_P=borders[1],
        gradient_output_P=borders[2],
        cast_base_PP=casts[0],
        cast_slope_PP=casts[1],
        bytes_P=np.array(list(problem.formats.values()), dtype=np.int64),
    )


def cast_forward(tables: DeviceTables, elements: Ints, source: Ints, target: Ints) -> tuple[Ints, Ints]:
    """Forward cast time and buffer of edges whose ends run in the precisions ``source`` and ``target``."""
    output = tables.output_P[source]
    needed = output != target
    time = tables.cast_base_PP[output, target] + tables.cast_slope_PP[output, target] * elements // MI_ELEMENTS
    buffer = -(-elements * tables.bytes_P[target] // BYTES_PER_KIB)
    return np.where(needed, time, 0), np.where(needed, buffer, 0)


def cast_backward(tables: DeviceTables, elements: Ints, source: Ints, target: Ints) -> Ints:
    """Backward cast time of edges whose ends run in the precisions ``source`` and ``target``."""
    output, input_ = tables.gradient_output_P[target], tables.gradient_input_P[source]
    time = tables.cast_base_PP[output, input_] + tables.cast_slope_PP[output, input_] * elements // MI_ELEMENTS
    return np.where(output != input_, time, 0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LatencyRows:
    """The latency limit of one device type as nested prefix rows: all work up to ``segment_K`` within ``limit_K``.

    Attributes:
        segment_O: Segment in which each operator's backward runs; 0 is the first.
        num_segments: Segments in all; the forward lies before segment 0 and counts in every row.
        segment_K: Last segment of each row, ascending.
        limit_K: Right-hand sides in nanoseconds.
    """

    segment_O: Ints
    num_segments: int
    segment_K: Ints
    limit_K: Ints


def latency_rows(problem: Problem, graph: GraphTables, limit_ns: int) -> LatencyRows:
    """Write "iteration time at most ``limit_ns``" as nested prefix rows.

    T = max over k of (ready_k + sum of all-reduces from k on), and the end of backward, plus the optimizer. So the
    limit holds exactly if every ready_k is at most ``limit - optimizer - sum of all-reduces from k on``.

    Source: ours; the recursion of the two serial streams unrolled.
    """
    allreduce = np.array(problem.communication.allreduce_ns, dtype=np.int64)
    rest = np.cumsum(allreduce[::-1])[::-1]
    num_operators = len(graph.names)
    closing: dict[int, int] = {0: limit_ns - problem.optimizer_ns}  # by the first operator that the row waits for
    for bucket in range(len(allreduce)):
        members = np.flatnonzero(graph.bucket_O == bucket)
        if len(members):
            first = int(members[0])
            limit = limit_ns - problem.optimizer_ns - int(rest[bucket])
            closing[first] = min(closing.get(first, limit), limit)
    points = np.array(sorted(closing, reverse=True), dtype=np.int64)
    segment_O = np.searchsorted(-points, -np.arange(num_operators), side="left")
    limit_K = np.array([closing[point] for point in points.tolist()], dtype=np.int64)
    return LatencyRows(segment_O=segment_O, num_segments=len(points), segment_K=np.arange(len(points)), limit_K=limit_K)


def binding_rows(rows: LatencyRows, low_S: Ints, high_S: Ints) -> LatencyRows:
    """Drop rows that an earlier row plus the most work in between, or a later one minus the least, implies.

    ``low_S`` and ``high_S`` are the least and most work of each segment under any plan; the forward is in segment 0.

    Source: ours.
    """
    above = rows.limit_K - np.cumsum(high_S)[rows.segment_K]
    below = rows.limit_K - np.cumsum(low_S)[rows.segment_K]
    kept, least = [], 0  # an empty row with limit 0 stands before all
    for row in range(len(rows.limit_K)):
        if above[row] < least:
            kept.append(row)
            least = int(above[row])
    final: list[int] = []
    least_below: int | None = None
    for row in reversed(kept):
        if least_below is None or below[row] < least_below:
            final.append(row)
            least_below = int(below[row])
    order = np.array(final[::-1], dtype=np.int64)
    return replace(rows, segment_K=rows.segment_K[order], limit_K=rows.limit_K[order])
