"""Simulation of steps of a whole cluster, whose workers wait for one another in every all-reduce.

Each worker has a host, a compute and a communication queue. A gradient bucket is reduced as soon as every worker has
completed it and launched its all-reduce, and the bucket before it is reduced. The optimizer waits for the last one.
Steps follow one another without a pause: the host of a worker may run ahead of its device, so that the time of a step
is that of the slowest cycle and not of one step from a standstill; a few steps are simulated. `StepPredictor.steady_ns`
has the limit in closed form.

Source: QSync's and dPRO's replayers (IPDPS 2024, MLSys 2022), with a queue for the host and steady state; ours.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from qsync_opt.errors import ProblemError
from qsync_opt.io import check_integer, check_number
from qsync_opt.model import OpGraph
from qsync_opt.steps.predictor import PlannedStep, StepPredictor
from qsync_opt.steps.queues import NOTHING, Work
from qsync_opt.training import GradientBucket, Timeline, TimelineEvent

Lane = tuple[str, str, int, int]
"""(stream, what, start, end) in nanoseconds from the beginning of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStep:
    """Work of one worker's step, in order.

    Attributes:
        name: Of the worker.
        segments: Up to each bucket, and up to the end of the backward pass.
        finish: After the last bucket, outside of the optimizer.
        optimizer: With clipping and clearing of gradients.
        lead: Before the first segment: earlier micro-batches, and copies from the host's memory.
    """

    name: str
    segments: tuple[Work, ...]
    finish: Work
    optimizer: Work
    lead: Work = NOTHING


def worker_step(name: str, predictor: StepPredictor, step: PlannedStep) -> WorkerStep:
    """A worker's step under a plan that its predictor has predicted."""
    return WorkerStep(
        name=name,
        segments=tuple(predictor.segments_of(step)),
        finish=predictor.finish,
        optimizer=predictor.optimizer,
        lead=predictor.lead_of(step),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStep:
    """Predicted step of a cluster: time in steady state and of the first step, and the last one's lanes by worker."""

    iteration_ns: int
    latency_ns: int
    lanes: Mapping[str, tuple[Lane, ...]] = field(default_factory=dict)


def bucket_borders(graph: OpGraph, buckets: Sequence[GradientBucket]) -> tuple[int, ...]:
    """Positions of the operators that complete buckets, without repetition: the ``borders`` of `StepPredictor`."""
    return tuple(dict.fromkeys(graph.index(bucket.operator) for bucket in buckets))


def bucket_segments(graph: OpGraph, buckets: Sequence[GradientBucket]) -> tuple[int, ...]:
    """Segment after which each bucket is ready."""
    borders = bucket_borders(graph, buckets)
    return tuple(borders.index(graph.index(bucket.operator)) for bucket in buckets)


def network_tails(allreduce_ns: Sequence[int], after_segment: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """For each bucket its segment, and the time of its all-reduce and all later ones, for `StepPredictor.steady_ns`."""
    _check_buckets(allreduce_ns, after_segment)
    behind = list(itertools.accumulate(reversed(allreduce_ns)))
    return tuple(zip(after_segment, reversed(behind), strict=True))


def _check_buckets(allreduce_ns: Sequence[int], after_segment: Sequence[int], segments: int | None = None) -> None:
    valid = all(segment >= 0 and (segments is None or segment < segments) for segment in after_segment)
    if len(allreduce_ns) != len(after_segment) or not valid:
        there = "" if segments is None else f", and there are {segments} segments"
        raise ProblemError(
            f"{len(allreduce_ns)} all-reduces are ready after segments {list(after_segment)}{there}: give one segment "
            "from 0 for each"
        )
    for duration in allreduce_ns:
        check_integer(duration, "all-reduce in nanoseconds")


def slowed_segments(
    allreduce_ns: Sequence[int], after_segment: Sequence[int], segments: int, share: float | Sequence[float]
) -> tuple[int, ...]:
    """Nanoseconds by which each segment takes longer on the device because of all-reduces that run beside it.

    A bucket's all-reduce runs beside the segment after the one that completes it. After the last bucket nothing is left
    to compute.

    Args:
        allreduce_ns: Time of each bucket's all-reduce, in order.
        after_segment: Segment after which each bucket is ready.
        segments: How many there are (`StepPredictor.segments`).
        share: Of an all-reduce's time, by which concurrent computation takes longer on this worker
            (`qsync_opt.runtimes.torch.ddp.collectives.measure_slowdown`); or one for each bucket, where they are
            reduced under schemes (`qsync_opt.gradients.SchemeTimes.network`).

    Source: ours.
    """
    _check_buckets(allreduce_ns, after_segment, segments)
    shares = [share] * len(allreduce_ns) if isinstance(share, int | float) else list(share)
    if len(shares) != len(allreduce_ns):
        raise ProblemError(f"{len(shares)} shares were given for {len(allreduce_ns)} all-reduces; give one for each")
    for each in shares:
        check_number(each, "share of an all-reduce's time")
    slowed = [0] * segments
    last = max(after_segment, default=0)
    for duration, segment, each in zip(allreduce_ns, after_segment, shares, strict=True):
        if segment < last:
            slowed[segment + 1] += round(each * duration)
    return tuple(slowed)


def cluster_step(
    workers: Sequence[WorkerStep],
    allreduce_ns: Sequence[int] = (),
    after_segment: Sequence[int] = (),
    *,
    steps: int = 4,
) -> ClusterStep:
    """Simulate some steps of a cluster; the time of the last one is nearly steady.

    Args:
        workers: One of each kind; equal workers need not be repeated.
        allreduce_ns: Time of each bucket's all-reduce, in order.
        after_segment: Segment after which each bucket is ready on every worker.
        steps: How many to simulate.

    Raises:
        ProblemError: Workers with different numbers of segments or equal names, a bucket after a segment that does not
            exist, an all-reduce without a time, or no step.
    """
    check_integer(steps, "steps to play", minimum=1)
    names = [worker.name for worker in workers]
    if len(set(names)) < len(names):
        raise ProblemError(f"workers are named {', '.join(names)}: give each a name of its own")
    counts = {len(worker.segments) for worker in workers}
    if len(counts) != 1:
        raise ProblemError(f"workers have {sorted(counts)} segments: all must have the same number")
    _check_buckets(allreduce_ns, after_segment, counts.pop())
    free = [(0, 0)] * len(workers)
    network = 0
    ends = [0]
    lanes: dict[str, list[Lane]] = {}

    def run(w: int, what: str, work: Work) -> None:
        lanes[workers[w].name] += [(stream, what, start, end) for stream, start, end in work.lanes(*free[w])]
        free[w] = work.run(*free[w])

    for _ in range(steps):
        begin = max(device for _, device in free)
        lanes.update({name: [] for name in names})
        ready: list[list[int]] = [[] for _ in workers]
        for w, worker in enumerate(workers):
            if worker.lead != NOTHING:
                run(w, "before the last micro-batch", worker.lead)
            for k, segment in enumerate(worker.segments):
                run(w, f"segment {k}", segment)
                ready[w].append(max(free[w]))
        for bucket, (duration, segment_index) in enumerate(zip(allreduce_ns, after_segment, strict=True)):
            start = max(network, *(times[segment_index] for times in ready))
            network = start + duration
            for name in names:
                lanes[name].append(("communication", f"all-reduce {bucket}", start, network))
        for w, worker in enumerate(workers):
            host, device = free[w]
            free[w] = (host, max(device, network) if allreduce_ns else device)
            run(w, "finish", worker.finish)
            run(w, "optimizer", worker.optimizer)
        ends.append(max(max(pair) for pair in free))
    shifted = {
        name: tuple((stream, what, start - begin, end - begin) for stream, what, start, end in events)
        for name, events in lanes.items()
    }
    return ClusterStep(iteration_ns=ends[-1] - ends[-2], latency_ns=ends[1], lanes=shifted)


def cluster_timeline(step: ClusterStep, name: str = "cluster") -> Timeline:
    """The last simulated step, as a timeline for `qsync_opt.write_trace`: a lane per worker and stream.

    Time is zero when the first host begins, which may be before the step before has ended on other workers.
    """
    begin = min((start for lane in step.lanes.values() for _, _, start, _ in lane), default=0)
    events = [
        TimelineEvent(
            worker=worker, stream=stream, name=what, kind=stream, start_ns=start - begin, duration_ns=end - start
        )
        for worker, lane in step.lanes.items()
        for stream, what, start, end in lane
    ]
    return Timeline(name=name, iteration_ns=max((e.end_ns for e in events), default=0), events=tuple(events))
