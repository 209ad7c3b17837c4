"""When the all-reduce of gradient buckets cuts a device's backward into segments, and what must follow each cut."""

from __future__ import annotations

from dataclasses import dataclass

from qsync_opt.training.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """When gradient buckets close on one device.

    ``segment`` is, by operator in forward order, the number of closings before its backward has run; forward counts
    into segment 0. ``tail_ns[s]`` is what must still follow closing s: the all-reduces from its first bucket on, and
    the optimizer. The last segment ends with backward itself.
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
    first: dict[int, int] = {}  # bucket -> earliest operator in forward order, the last one in backward order
    for position, operator in enumerate(problem.operators):
        if operator.bucket is not None:
            first.setdefault(operator.bucket, position)
    allreduce_ns = problem.communication.allreduce_ns
    tail_by_position: dict[int, int] = {}
    for bucket, position in first.items():
        tail_ns = sum(allreduce_ns[bucket:]) + problem.optimizer_ns
        tail_by_position[position] = max(tail_ns, tail_by_position.get(position, 0))
    closings = sorted(tail_by_position, reverse=True)
    tails = [tail_by_position[position] for position in closings]
    # A closing is implied by a later one that leaves no more time: prefix sums only grow.
    kept = [i for i, tail in enumerate(tails) if all(later < tail for later in [*tails[i + 1 :], problem.optimizer_ns])]
    positions = [closings[i] for i in kept]
    segment = tuple(sum(position < closing for closing in positions) for position in range(len(problem.operators)))
    return Segments(segment=segment, tail_ns=(*(tails[i] for i in kept), problem.optimizer_ns))


def peers_ns(problem: Problem) -> int:
    """Iteration time below which the fixed-precision peers and the all-reduces cannot go, in ns."""
    communication = problem.communication
    return max(
        (ready + sum(communication.allreduce_ns[k:]) for k, ready in enumerate(communication.peer_ready_ns)), default=0
    ) + (problem.optimizer_ns)
