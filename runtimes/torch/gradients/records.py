"""What is noted of a job's steps while it trains: statistics of each bucket, and when it is reduced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from qsync_opt.errors import NotReadyError, UnsupportedError
from qsync_opt.gradients import BucketStatistics, RecordedReductions, Reduction
from qsync_opt.runtimes.torch.gradients.statistics import averaged

Times = tuple[str, int, int, int]
"""Scheme of a reduction, and by a clock when it was ready, began and ended."""


class StepRecords:
    """Samples and times of buckets, step by step."""

    def __init__(self) -> None:
        self.sampling = self.recording = False
        self._samples: list[list[BucketStatistics]] = []
        self._steps: list[list[Times]] = []

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

    def step_at(self, index: int, device: torch.device) -> list[Times]:
        """The present step's list of times, to which that of bucket ``index`` is added once it is known.

        Raises:
            UnsupportedError: The gradient is not on a CPU.
        """
        if device.type != "cpu":
            raise UnsupportedError(
                f"gradients are on {device}, but recording() reads the host's clock; trace their kernels with "
                "torch.profiler"
            )
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
        steps = [step for step in self._steps if elements is not None and len(step) == len(elements)]
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
