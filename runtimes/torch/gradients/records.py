"""What is noted of a job's steps while it trains: statistics of each bucket, and when it is reduced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from qsync_opt.errors import NotReadyError
from qsync_opt.gradients import BucketStatistics, RecordedReductions, Reduction
from qsync_opt.runtimes.torch.gradients.statistics import averaged
from qsync_opt.runtimes.torch.support import intervals_ns

Marks = tuple[str, Any, Any, Any]
"""Scheme of a reduction, and when it was ready, began and ended, as `time_mark` says it."""


class StepRecords:
    """Samples and times of buckets, step by step."""

    def __init__(self) -> None:
        self.sampling = self.recording = False
        self._samples: list[list[BucketStatistics]] = []
        self._steps: list[list[Marks]] = []

    @contextlib.contextmanager
    def sample(self) -> Iterator[None]:
        """A block whose steps are sampled."""
        self._samples, self.sampling = [], True
        try:
            yield
        finally:
            self.sampling = False

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        """A block whose steps are recorded."""
        self._steps, self.recording = [], True
        try:
            yield
        finally:
            self.recording = False

    def add_sample(self, index: int, sample: BucketStatistics) -> None:
        """Note the statistics of one bucket."""
        self._samples += [[] for _ in range(index + 1 - len(self._samples))]
        self._samples[index].append(sample)

    def step_at(self, index: int) -> list[Marks]:
        """The present step's list of marks, to which those of bucket ``index`` are added once they are known."""
        if index == 0:
            self._steps.append([])
        return self._steps[-1] if self._steps else []

    def statistics(self) -> tuple[BucketStatistics, ...]:
        """Statistics of each bucket, the mean of the sampled steps.

        Raises:
            NotReadyError: No step was sampled after the buckets were settled.
        """
        if not self._samples or not all(self._samples):
            raise NotReadyError("no gradients were sampled: run at least two steps inside the block of sampling()")
        return tuple(averaged(samples) for samples in self._samples)

    def recorded(self, workers: int, elements: tuple[int, ...] | None) -> RecordedReductions:
        """The recorded steps, but the first, which says when the second begins.

        Raises:
            NotReadyError: Fewer than two whole steps were recorded.
        """
        marks = [step for step in self._steps if elements is not None and len(step) == len(elements)]
        steps = _times_ns(marks)
        if len(steps) < 2 or elements is None:
            raise NotReadyError(
                f"{len(steps)} steps were recorded, but two are needed: run at least three inside the block of "
                "recording(), with at least two workers"
            )
        return RecordedReductions(
            workers=workers,
            elements=elements,
            steps=tuple(
                tuple(
                    Reduction(scheme=name, ready_ns=ready - before, start_ns=start - before, end_ns=end - before)
                    for name, ready, start, end in step
                )
                for step, before in zip(steps[1:], (step[-1][-1] for step in steps), strict=False)
            ),
        )


def _times_ns(steps: Sequence[Sequence[Marks]]) -> list[list[tuple[str, int, int, int]]]:
    """Nanoseconds of marks. One reduction follows another, also where NCCL has several to do."""
    if not steps:
        return []
    first, last = steps[0][0][1], steps[-1][-1][-1]
    if not isinstance(last, int):
        last.synchronize()
    result = []
    for step in steps:
        times: list[tuple[str, int, int, int]] = []
        for name, *marks in step:
            ready, start, end = (round(intervals_ns((first, mark))[0]) for mark in marks)
            times.append((name, ready, max(start, times[-1][-1]) if times else start, end))
        result.append(times)
    return result
