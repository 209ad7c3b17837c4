"""Time whole training steps of a few ways to go together, with all workers, before one of them is handed out."""

from __future__ import annotations

import contextlib
import gc
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from qsync_opt.errors import UnsupportedError
from qsync_opt.graph import OpGraph
from qsync_opt.runtimes.torch.agreement import broadcast_json, gather_json, together, world
from qsync_opt.runtimes.torch.apply_checks import is_sharded
from qsync_opt.runtimes.torch.job_choice import worth_racing
from qsync_opt.runtimes.torch.job_measuring import DeviceTypes, Job
from qsync_opt.runtimes.torch.job_plan import JobModel, JobPlan
from qsync_opt.runtimes.torch.job_steps import own_optimizer, parameters_put_back
from qsync_opt.runtimes.torch.job_timing import carried_out
from qsync_opt.runtimes.torch.job_ways import StepTime, Way
from qsync_opt.runtimes.torch.loss_scaling import LossScaler
from qsync_opt.runtimes.torch.stopwatch import cpu_clock
from qsync_opt.runtimes.torch.unchanged import model_unchanged

_LOGGER = logging.getLogger(__name__)
_ROUNDS = 3
_BLOCK_NS = 0.25e9
_MOST_STEPS = 10
_LONGEST_S = 8.0
"""After so long, no further round begins."""
_FIRST_SCALE = 2.0**10
"""Low enough that hardly any step is skipped for an overflow."""


def measure_steps(job: Job, made: JobModel | None, found: JobPlan, types: DeviceTypes) -> JobModel | None:
    """The job with times of whole steps; every rank must call it.

    Each way to go together is trained with for a few steps on all ranks, in ``DistributedDataParallel`` if there are
    several, with an optimizer like the job's and loss scaling where gradients pass through FP16. Parameters, buffers,
    gradients and random state are put back.

    Args:
        job: Whose model, batch and optimizer are used.
        made: With times of passes, on rank 0.
        found: The plan by those.
        types: Device types and their ranks.

    Returns:
        ``made`` with ``steps``, where it was given. Where memory ran out, the ways of those workers have none left.
        Where steps cannot be taken at all, the log says why, and passes alone decide.
    """

    def draft() -> list[dict[str, Way]]:
        if made is None or found.problem is None or found.solution is None:
            return []
        solution = found.solution
        assert solution.plan is not None
        assert solution.evaluation is not None
        return worth_racing(made, found.problem, solution.plan, solution.evaluation, job.options)

    drafts = together(draft)
    told = broadcast_json([{name: way.to_json() for name, way in entry.items()} for entry in drafts])
    mine = [Way.from_json(entry[types.mine], "a way") for entry in told]
    if not mine or any(gather_json(is_sharded(job.model))):
        return made
    graph = None if made is None else made.graph
    with parameters_put_back(job.model), model_unchanged(job.model):
        times, short = _Race(job, mine, graph).run()
    gc.collect()
    if job.example.device.type == "cuda":
        torch.cuda.empty_cache()
    if made is None or world()[0]:  # rank 0 plans
        return made
    steps = tuple(
        StepTime(taken={name: way.label for name, way in entry.items()}, step_ns=max(1, round(found_ns)))
        for entry, found_ns in zip(drafts, times, strict=True)
        if found_ns is not None
    )
    lacking = {
        (name, entry[name].label)
        for entry, ranks in zip(drafts, short, strict=True)
        for name, members in types.ranks.items()
        if set(members) & set(ranks)
    }
    ways = {
        name: tuple(replace(way, needed_bytes=None) if (name, way.label) in lacking else way for way in found_ways)
        for name, found_ways in made.ways.items()
    }
    return replace(made, ways=ways, steps=steps)


class _Race:
    """One rank's part: the steps of its own way in each candidate."""

    def __init__(self, job: Job, ways: Sequence[Way], graph: OpGraph | None) -> None:
        self._job, self._ways, self._graph = job, ways, graph
        self._device = job.example.device
        self._rank, self._size = world()
        self._model: nn.Module = job.model
        self._example = job.example
        self._optimizer: torch.optim.Optimizer | None = None
        self._scaler: LossScaler | None = None
        alone = self._device.type != "cuda" and self._size == 1
        self._clock: Callable[[], int] = cpu_clock() if alone else time.perf_counter_ns

    def run(self) -> tuple[list[float | None], list[list[int]]]:
        """Nanoseconds of a step per candidate, None without; and the ranks whose memory did not suffice for it."""
        times: list[list[float]] = [[] for _ in self._ways]
        short: list[list[int]] = [[] for _ in self._ways]
        steps = [0 for _ in self._ways]
        began = time.perf_counter()
        for turn in range(_ROUNDS):
            if broadcast_json(turn > 0 and time.perf_counter() - began > _LONGEST_S):
                break
            for index, way in enumerate(self._ways):
                captured = any(gather_json(way.captured))
                if short[index] or (turn and captured):  # capturing takes as long as several steps: once
                    continue
                with carried_out(self._job.model, way, self._graph, self._job.options.kernels):
                    _LOGGER.info("round %d, candidate %d: %s", turn + 1, index + 1, way.label)
                    short[index], failed = self._prepared(first=not turn)
                    if failed:
                        _LOGGER.warning("whole steps are not timed: %s", failed)
                        return [None] * len(times), [[] for _ in times]
                    if short[index]:
                        continue
                    if not steps[index]:
                        steps[index] = self._how_many()
                    times[index] += [self._block(steps[index]) for _ in range(_ROUNDS if captured else 1)]
        return [None if s or not t else statistics.median(t) for t, s in zip(times, short, strict=True)], short

    def _prepared(self, *, first: bool) -> tuple[list[int], str]:
        """Ranks without memory for a step, and what another failure said; else all is ready for steps together."""
        fits, said = True, ""
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
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        except (torch.cuda.OutOfMemoryError, UnsupportedError) as failure:
            fits = False
            _LOGGER.warning("no step of this way: %s", str(failure).splitlines()[0])
        except Exception as failure:  # told to all ranks below
            said = (
                f"rank {self._rank}: {type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else ''}"
            )
        told: list[Any] = gather_json(
            {"fits": fits, "said": said, "unused": self._unused() if first and fits else False}
        )
        failed = next((entry["said"] for entry in told if entry["said"]), "")
        short = [rank for rank, entry in enumerate(told) if not entry["fits"]]
        if failed or short:
            self._job.model.zero_grad()
            return short, failed
        if dist.is_available() and dist.is_initialized() and self._model is self._job.model:
            self._model = DistributedDataParallel(
                self._job.model, find_unused_parameters=any(entry["unused"] for entry in told)
            )
            self._example = replace(self._job.example, model=self._model)
        self._scaler = LossScaler(self._job.model, init_scale=_FIRST_SCALE)
        self._step()
        return short, failed

    def _unused(self) -> bool:
        return any(p.requires_grad and p.grad is None for p in self._job.model.parameters())

    def _alone(self) -> contextlib.AbstractContextManager[None]:
        if isinstance(self._model, DistributedDataParallel):
            return self._model.no_sync()
        return contextlib.nullcontext()

    def _step(self) -> None:
        assert self._optimizer is not None
        self._optimizer.zero_grad()
        loss = self._example.forward()
        if self._scaler is None:
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
            return
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self._scaler.step(self._optimizer)
        self._scaler.update()

    def _how_many(self) -> int:
        wanted = int(_BLOCK_NS / max(1.0, self._block(1)))
        return int(broadcast_json(max(2, min(_MOST_STEPS, wanted))))

    def _block(self, steps: int) -> float:
        """Nanoseconds of a step on the slowest worker; all begin together."""
        gather_json(0)
        self._wait()
        began = self._clock()
        for _ in range(steps):
            self._step()
        self._wait()
        return max(float(spent) for spent in gather_json((self._clock() - began) / steps))

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
