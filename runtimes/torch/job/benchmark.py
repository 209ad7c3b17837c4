"""Benchmark a shortlist of candidates: time their whole training steps, with all workers, in turns."""

from __future__ import annotations

import contextlib
import gc
import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from qsync_opt.errors import UnsupportedError, first_line
from qsync_opt.io import decode, encode
from qsync_opt.model import OpGraph
from qsync_opt.runtimes.torch.ddp import broadcast_json, gather_json, together, world
from qsync_opt.runtimes.torch.execution import LossScaler, is_sharded
from qsync_opt.runtimes.torch.job.candidates import (
    LAUNCHED,
    Candidate,
    ExecutionMode,
    StepTime,
    form_of,
    labels,
    shortlist,
    total_sensitivity,
)
from qsync_opt.runtimes.torch.job.choosing import modes_now, paired_times, step_tolerance, undecided
from qsync_opt.runtimes.torch.job.measuring import DeviceTypes, Job, batch_size, sized
from qsync_opt.runtimes.torch.job.passes import carried_out
from qsync_opt.runtimes.torch.job.plan import JobModel, JobPlan
from qsync_opt.runtimes.torch.job.steps import own_optimizer, parameters_put_back
from qsync_opt.runtimes.torch.support import cpu_clock, model_unchanged, synchronize

_LOGGER = logging.getLogger(__name__)
_COMMON_ROUNDS, _MOST_ROUNDS, _CAPTURED_BLOCKS = 4, 17, 3
"""Rounds of all candidates that are not far slower, the first included, and rounds at most."""
_BLOCK_NS, _LATER_BLOCK_NS = 0.25e9, 0.4e9
"""About how long the steps of one candidate take in the first round, in which memory is tried, and in later ones."""
_LEAST_STEPS, _MOST_STEPS, _ALONE_STEPS = 2, 10, 3
_FAR_SLOWER = 0.06
"""What takes so much longer than the fastest in the first round is not timed again. On a card that others use too, the
first round of the same mode was off by up to 6 %."""
_FIRST_SCALE = 2.0**10
"""Of losses: low enough that hardly any step is skipped for an overflow."""
_RESIZED = 0.03
"""Batches that would change by less are as good as they are."""


def measure_steps(job: Job, measured: JobModel | None, plan: JobPlan, types: DeviceTypes) -> JobModel | None:
    """The job with times of whole steps; every rank must call it.

    Every shortlisted candidate trains for a few steps on all ranks, in
    ``DistributedDataParallel`` if there are several, with an optimizer like the job's at learning rate 0, and with
    loss scaling where gradients pass through FP16. Parameters, buffers, gradients and random state are put back.
    For local batches by speed every candidate has batches
    of its own, for which all workers take as long by themselves, optimizer included.

    Args:
        job: Whose model, batch and optimizer are used.
        measured: With times of passes, on rank 0.
        plan: With the problem and the solver's solution, on rank 0.
        types: Device types and their ranks.

    Returns:
        ``measured`` with ``steps``, where it was given. Where memory ran out, the modes of those workers no longer fit.
        Where steps cannot be taken at all, or batches cannot be sized, the log says why, and passes alone decide.
    """

    def propose() -> list[dict[str, ExecutionMode]]:
        if measured is None or plan.problem is None or plan.solution is None or not measured.modes:
            return []
        modes = modes_now(measured, plan.problem, plan.solution, job.options)
        workers = measured.workers if job.options.sizes_batches else None
        proposed = shortlist(modes, measured.limits_bytes, slack=job.options.slack, workers=workers)
        return proposed if any(not mode.is_plain for candidate in proposed for mode in candidate.values()) else []

    proposed = together(propose)
    sent = broadcast_json([{name: encode(mode) for name, mode in candidate.items()} for candidate in proposed])
    where = "an execution mode"
    candidates = [{name: decode(ExecutionMode, mode, where) for name, mode in entry.items()} for entry in sent]
    if not candidates or any(gather_json(is_sharded(job.model))):
        return measured
    sizing = None
    if broadcast_json(job.options.sizes_batches):
        samples = gather_json(batch_size(job.example))
        if len(set(samples)) != 1 or samples[0] is None:
            _LOGGER.warning("steps with sized batches are not timed: the batch has no first dimension of samples")
            return measured
        sizing = Sizing({name: len(ranks) for name, ranks in types.ranks.items()}, samples[0])
    graph = None if measured is None else measured.graph
    with parameters_put_back(job.model, job.optimizer), model_unchanged(job.model):
        benchmark = StepBenchmark(job, candidates, types.mine, graph, sizing)
        benchmark.run()
    gc.collect()
    if job.example.device.type == "cuda":
        torch.cuda.empty_cache()
    if measured is None or world()[0]:  # rank 0 plans
        return measured
    kept = tuple(step for step in measured.steps if bool(step.batches) is (sizing is None))
    measured = replace(measured, steps=(*kept, *benchmark.step_times()))
    if sizing is not None:  # what has no room for a sized batch may have it for the one that was planned with
        return measured
    lacking = {
        (name, candidate[name].label)
        for candidate, ranks in zip(candidates, benchmark.short, strict=True)
        for name, members in types.ranks.items()
        if set(members) & set(ranks)
    }
    modes = {
        name: tuple(replace(mode, needed_bytes=None) if (name, mode.label) in lacking else mode for mode in own)
        for name, own in measured.modes.items()
    }
    return replace(measured, modes=modes)


@dataclass(frozen=True, slots=True)
class Sizing:
    """How local batches are sized: workers of every device type, and samples of the batch that is planned with."""

    workers: Mapping[str, int]
    samples: int

    @property
    def total(self) -> int:
        """Samples of a step of all workers."""
        return self.samples * sum(self.workers.values())

    def split(self, speeds: Mapping[str, float]) -> dict[str, int]:
        """Samples of one worker of every type for which all take as long: at least one, and `total` nearly in all.

        Args:
            speeds: Samples per second of one worker.
        """
        pace = sum(speeds[name] * self.workers[name] for name in speeds)
        return {name: max(1, round(self.total * speeds[name] / pace)) for name in speeds}

    def scale(self, counts: Mapping[str, int]) -> float:
        """The factor from the time of a step with these samples per worker to that of `total` samples."""
        return self.total / sum(count * self.workers[name] for name, count in counts.items()) if counts else 1.0


class StepBenchmark:
    """One rank's part in timing candidates: each in the mode of this rank's device type.

    Attributes:
        rounds: Nanoseconds of a step by round and candidate; equal on all ranks.
        short: By candidate the ranks whose memory did not suffice for a step.
        batches: By candidate the samples of one worker of every type; empty with equal batches.
    """

    def __init__(
        self,
        job: Job,
        candidates: Sequence[Candidate],
        device_type: str,
        graph: OpGraph | None,
        sizing: Sizing | None = None,
    ) -> None:
        self.rounds: list[dict[int, float]] = []
        self.short: list[list[int]] = [[] for _ in candidates]
        self.batches: list[dict[str, int]] = [
            sizing.split({name: 1 / max(1, mode.pass_ns) for name, mode in candidate.items()}) if sizing else {}
            for candidate in candidates
        ]
        self._job, self._candidates, self._device_type, self._graph = job, candidates, device_type, graph
        self._sizing = sizing
        self._captured = {i for i, candidate in enumerate(candidates) if form_of(candidate) != LAUNCHED}
        self._device = job.example.device
        self._rank, self._size = world()
        self._model: nn.Module = job.model
        self._example = job.example
        self._optimizer: torch.optim.Optimizer | None = None
        self._scaler: LossScaler | None = None
        self._steps: dict[int, int] = {}
        alone = self._device.type != "cuda" and self._size == 1
        self._clock: Callable[[], int] = cpu_clock() if alone else time.perf_counter_ns

    def run(self) -> None:
        """Time the candidates in rounds until it is known which to take, or no time is left."""
        began = time.perf_counter()
        # Rank 0's clock and options: all ranks must take the same turns.
        while indices := broadcast_json(self._next_round(time.perf_counter() - began)):
            turn = len(self.rounds)
            self.rounds.append({})
            for index in sorted(indices, key=lambda i: (i + turn) % len(self._candidates)):
                label = self._candidates[index][self._device_type].label
                _LOGGER.info("round %d, candidate %d: %s", turn + 1, index + 1, label)
                failure = self._time(index, turn)
                if failure:
                    _LOGGER.warning("whole steps are not timed: %s", failure)
                    self.rounds.clear()
                    return
            if not turn:
                self._steps = {}  # later blocks are longer

    def step_times(self) -> list[StepTime]:
        """The results: of every candidate that has room and could be timed."""
        # Captured passes do not wait for the host, whose pace is what changes between rounds.
        captured = {i: time for i, time in self.rounds[0].items() if i in self._captured} if self.rounds else {}
        launched = [{i: ns for i, ns in times.items() if i not in captured} for times in self.rounds]
        times = {**paired_times(launched), **captured}
        return [
            StepTime(
                taken=labels(self._candidates[i]),
                step_ns=max(1, round(times[i])),
                batches=self.batches[i],
                rounds_ns=() if i in captured else tuple(round(entry.get(i, 0.0)) for entry in launched),
            )
            for i in sorted(times)
        ]

    def _next_round(self, spent_s: float) -> list[int]:
        """The candidates of the next round; none where the choice is clear, or no time is left."""
        options, turn = self._job.options, len(self.rounds)
        if not turn:
            return [*range(len(self._candidates))]
        if spent_s > options.race_seconds or turn >= _MOST_ROUNDS:
            return []
        first = self.rounds[0]
        far_ns = (1 + options.slack) * (1 + _FAR_SLOWER) * min(first.values(), default=0.0)
        # Capturing takes as long as several steps: once.
        near = [i for i, ns in first.items() if ns <= far_ns and i not in self._captured]
        if turn < _COMMON_ROUNDS:
            return near
        rounds = [{i: times[i] for i in near if i in times} for times in self.rounds]
        sensitivities = {i: total_sensitivity(self._candidates[i]) for i in near}
        return undecided(rounds, sensitivities, step_tolerance(options.slack, sized=self._sizing is not None))

    def _time(self, index: int, turn: int) -> str:
        """Let a candidate take its turn; why no steps can be taken at all, or nothing."""
        mode = self._candidates[index][self._device_type]
        for resized in (False, True):
            if self._sizing is not None:
                self._example = replace(
                    sized(self._job.example, self.batches[index][self._device_type]), model=self._model
                )
            with carried_out(self._job.model, mode, self._graph, self._job.options.kernels):
                self.short[index], failure = self._prepare(first=not turn)
                if failure or self.short[index]:
                    return failure
                if not turn and not resized and self._resize(index):
                    continue  # with other batches
                if index not in self._steps:
                    wanted = int((_LATER_BLOCK_NS if turn else _BLOCK_NS) / max(1.0, self._block_ns(1)))
                    self._steps[index] = int(broadcast_json(max(_LEAST_STEPS, min(_MOST_STEPS, wanted))))
                blocks = _CAPTURED_BLOCKS if index in self._captured else 1
                step_ns = statistics.median(self._block_ns(self._steps[index]) for _ in range(blocks))
                scale = 1.0 if self._sizing is None else self._sizing.scale(self.batches[index])
                self.rounds[turn][index] = scale * step_ns
                return ""
        return ""

    def _prepare(self, *, first: bool) -> tuple[list[int], str]:
        """Take a step; the ranks without memory for it, and what failed on a rank otherwise."""
        fits, failure = True, ""
        try:
            if self._optimizer is None:
                self._optimizer = own_optimizer(self._job.optimizer, self._job.model)
                for group in self._optimizer.param_groups:  # as much work, but nothing moves
                    if isinstance(group.get("lr"), float | int | torch.Tensor):
                        group["lr"] = 0.0 * group["lr"]
            self._scaler = None
            if first:  # by itself: what does not fit or cannot be done shows here, while nobody waits
                with self._alone():
                    self._step()
                    self._step()  # beside the optimizer's state, which the first one made
            synchronize(self._device)
        except (torch.cuda.OutOfMemoryError, UnsupportedError) as error:
            fits = False
            _LOGGER.warning("a candidate takes no step: %s", first_line(error))
        except Exception as error:  # sent to all ranks below
            failure = f"rank {self._rank}: {type(error).__name__}: {first_line(error)}"
        unused = first and fits and any(p.requires_grad and p.grad is None for p in self._job.model.parameters())
        ranks: list[Any] = gather_json({"fits": fits, "failure": failure, "unused": unused})
        failure = next((entry["failure"] for entry in ranks if entry["failure"]), "")
        short = [rank for rank, entry in enumerate(ranks) if not entry["fits"]]
        if failure or short:
            self._job.model.zero_grad()
            return short, failure
        if dist.is_available() and dist.is_initialized() and self._model is self._job.model:
            self._model = DistributedDataParallel(
                self._job.model, find_unused_parameters=any(entry["unused"] for entry in ranks)
            )
            self._example = replace(self._example, model=self._model)
        self._scaler = LossScaler(self._job.model, init_scale=_FIRST_SCALE)
        self._step()
        return short, failure

    def _resize(self, index: int) -> bool:
        """Size a candidate's batches by how long its workers take by themselves; whether they change."""
        if self._sizing is None:
            return False
        spent_ns, scaler, self._scaler = 0.0, self._scaler, None
        try:
            with self._alone():
                self._step()
                spent_ns = self._steps_ns(_ALONE_STEPS)
        except Exception as failure:  # all ranks must come to the next line
            _LOGGER.warning("batches are not sized anew: %s", failure)
        self._scaler = scaler
        spent = gather_json([self._device_type, spent_ns])
        if not all(ns for _, ns in spent):
            return False
        before = self.batches[index]
        slowest = {name: max(ns for kind, ns in spent if kind == name) for name in before}
        now = self._sizing.split({name: before[name] / slowest[name] for name in before})
        if max(abs(now[name] / count - 1) for name, count in before.items()) <= _RESIZED:
            return False
        self.batches[index] = now
        return True

    def _alone(self) -> contextlib.AbstractContextManager[None]:
        if isinstance(self._model, DistributedDataParallel):
            return self._model.no_sync()
        return contextlib.nullcontext()

    def _block_ns(self, steps: int) -> float:
        """Nanoseconds of a step on the slowest worker; all begin together."""
        gather_json(0)
        return max(float(spent) for spent in gather_json(self._steps_ns(steps)))

    def _steps_ns(self, steps: int) -> float:
        """Nanoseconds of a step on this worker."""
        synchronize(self._device)
        began = self._clock()
        for _ in range(steps):
            self._step()
        synchronize(self._device)
        return (self._clock() - began) / steps

    def _step(self) -> None:
        assert self._optimizer is not None
        self._optimizer.zero_grad()
        loss = self._example.forward()
        if self._scaler is None:
            self._example.backward(loss)
            self._optimizer.step()
            return
        self._example.backward(self._scaler.scale(loss))
        self._scaler.step(self._optimizer)
        self._scaler.update()
