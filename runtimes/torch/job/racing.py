"""Time whole training steps of a few ways to go together, with all workers, before one of them is handed out."""

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
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map

from qsync_opt.errors import UnsupportedError, first_line
from qsync_opt.model import OpGraph
from qsync_opt.runtimes.torch.ddp import broadcast_json, gather_json, together, world
from qsync_opt.runtimes.torch.execution import LossScaler, is_sharded
from qsync_opt.runtimes.torch.job.candidates import (
    StepTime,
    Way,
    is_captured,
    most_of,
    times_of_race,
    total_sensitivity,
    undecided,
)
from qsync_opt.runtimes.torch.job.choosing import worth_racing
from qsync_opt.runtimes.torch.job.measuring import DeviceTypes, Job
from qsync_opt.runtimes.torch.job.plan import JobModel, JobPlan
from qsync_opt.runtimes.torch.job.steps import own_optimizer, parameters_put_back
from qsync_opt.runtimes.torch.job.timing import carried_out
from qsync_opt.runtimes.torch.support import TrainingExample, cpu_clock, model_unchanged


def batch_size(example: TrainingExample) -> int | None:
    """Samples of a batch: the first dimension that all its tensors share; None if they do not share one."""
    leaves = tree_leaves((example.args, dict(example.kwargs)))
    sizes = {leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()}
    return int(sizes.pop()) if len(sizes) == 1 else None


def sized(example: TrainingExample, count: int) -> TrainingExample:
    """The same with ``count`` samples, the first ones, repeated where there are too few."""

    def rows(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.shape[0] == count:
            return leaf
        chosen = leaf.detach()[torch.arange(count, device=leaf.device) % leaf.shape[0]]
        return chosen.requires_grad_(leaf.requires_grad)

    return replace(example, args=tree_map(rows, example.args), kwargs=tree_map(rows, dict(example.kwargs)))


def split(speeds: Mapping[str, float], workers: Mapping[str, int], total: int) -> dict[str, int]:
    """Samples of one worker of every device type, for which all take as long; at least one.

    Args:
        speeds: Samples per second of one worker.
        workers: How many there are of every type.
        total: Samples of all workers together, which is met as nearly as whole numbers per type allow.
    """
    pace = sum(speeds[name] * workers[name] for name in speeds)
    return {name: max(1, round(total * speeds[name] / pace)) for name in speeds}


_LOGGER = logging.getLogger(__name__)
_ROUNDS, _COMMON_ROUNDS, _MOST_ROUNDS, _CAPTURED_BLOCKS = 4, 3, 17, 3
"""With sized batches; with equal ones, in how many all take turns, and in how many those that matter, the first
included, in which batches are sized and memory is looked at."""
_BLOCK_NS, _LATER_BLOCK_NS = 0.25e9, 0.4e9
_LEAST_STEPS, _MOST_STEPS = 2, 10
_OUT, _SIZED_OUT = 0.06, 0.03
"""What takes so much longer than the fastest in the first round is not timed again. Of two runs of one way on a card
that is shared, the first round was off by up to 6 %."""
_FIRST_SCALE = 2.0**10
"""Low enough that hardly any step is skipped for an overflow."""
_ALONE_STEPS = 3
_RESIZED = 0.03
"""Batches that would change by less are as good as they are."""


def measure_steps(job: Job, made: JobModel | None, found: JobPlan, types: DeviceTypes) -> JobModel | None:
    """The job with times of whole steps; every rank must call it.

    Each way to go together is trained with for a few steps on all ranks, in ``DistributedDataParallel`` if there are
    several, with an optimizer like the job's and loss scaling where gradients pass through FP16. Parameters, buffers,
    gradients and random state are put back. For local batches by speed every way has batches of its own, for which all
    workers take as long by themselves, optimizer included.

    Args:
        job: Whose model, batch and optimizer are used.
        made: With times of passes, on rank 0.
        found: The plan by those.
        types: Device types and their ranks.

    Returns:
        ``made`` with ``steps``, where it was given. Where memory ran out, the ways of those workers have none left.
        Where steps cannot be taken at all, or batches cannot be sized, the log says why, and passes alone decide.
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
    ways = [{name: Way.from_json(way, "a way") for name, way in entry.items()} for entry in told]
    if not ways or any(gather_json(is_sharded(job.model))):
        return made
    sizing = None
    if broadcast_json(job.options.sizes_batches):
        samples = gather_json(batch_size(job.example))
        if len(set(samples)) != 1 or samples[0] is None:
            _LOGGER.warning("steps with sized batches are not timed: the batch has no first dimension of samples")
            return made
        sizing = _Sizing({name: len(ranks) for name, ranks in types.ranks.items()}, samples[0])
    graph = None if made is None else made.graph
    with parameters_put_back(job.model, job.optimizer), model_unchanged(job.model):
        race = _Race(job, ways, types.mine, graph, sizing)
        times, short, batches = race.run()
    gc.collect()
    if job.example.device.type == "cuda":
        torch.cuda.empty_cache()
    if made is None or world()[0]:  # rank 0 plans
        return made
    steps = tuple(
        StepTime(
            taken={name: way.label for name, way in entry.items()},
            step_ns=max(1, round(found_ns)),
            batches=counts,
            rounds_ns=() if sizing is not None else race.turns(place),
        )
        for place, (entry, found_ns, counts) in enumerate(zip(drafts, times, batches, strict=True))
        if found_ns is not None
    )
    if sizing is not None:  # what has no room for a sized batch may have it for the one that was planned with
        return replace(made, steps=(*(step for step in made.steps if not step.batches), *steps))
    lacking = {
        (name, entry[name].label)
        for entry, ranks in zip(drafts, short, strict=True)
        for name, members in types.ranks.items()
        if set(members) & set(ranks)
    }
    left = {
        name: tuple(replace(way, needed_bytes=None) if (name, way.label) in lacking else way for way in found_ways)
        for name, found_ways in made.ways.items()
    }
    return replace(made, ways=left, steps=(*(step for step in made.steps if step.batches), *steps))


@dataclass(frozen=True, slots=True)
class _Sizing:
    """Workers of every device type, and samples of the batch that the job is planned with."""

    workers: Mapping[str, int]
    samples: int

    @property
    def total(self) -> int:
        """Samples of a step of all workers."""
        return self.samples * sum(self.workers.values())

    def split(self, speeds: Mapping[str, float]) -> dict[str, int]:
        """Samples of one worker of every type."""
        return split(speeds, self.workers, self.total)

    def scale(self, counts: Mapping[str, int]) -> float:
        """What the time of a step is multiplied with to be that of a step of `total` samples."""
        return self.total / sum(count * self.workers[name] for name, count in counts.items())


class _Race:
    """One rank's part: the steps of its own way in each candidate."""

    def __init__(
        self,
        job: Job,
        ways: Sequence[Mapping[str, Way]],
        mine: str,
        graph: OpGraph | None,
        sizing: _Sizing | None = None,
    ) -> None:
        self._job, self._ways, self._mine, self._graph, self._sizing = job, ways, mine, graph, sizing
        self._device = job.example.device
        self._rank, self._size = world()
        self._model: nn.Module = job.model
        self._example = job.example
        self._batches: list[dict[str, int]] = [{} for _ in ways]
        if sizing is not None:
            self._batches = [
                sizing.split({name: 1 / max(1, way.pass_ns) for name, way in entry.items()}) for entry in ways
            ]
        self._optimizer: torch.optim.Optimizer | None = None
        self._scaler: LossScaler | None = None
        self._rounds: list[dict[int, float]] = []
        self._steps: dict[int, int] = {}
        alone = self._device.type != "cuda" and self._size == 1
        self._clock: Callable[[], int] = cpu_clock() if alone else time.perf_counter_ns

    def run(self) -> tuple[list[float | None], list[list[int]], list[dict[str, int]]]:
        """Nanoseconds of a step per candidate, None without; the ranks whose memory did not suffice for it; batches."""
        short: list[list[int]] = [[] for _ in self._ways]
        began = time.perf_counter()
        turn = 0
        # Rank 0's clock and slack: all ranks must take the same turns.
        while indices := broadcast_json(self._next(turn, time.perf_counter() - began)):
            times: dict[int, float] = {}
            for index in sorted(indices, key=lambda i: (i + turn) % len(self._ways)):
                captured = is_captured(self._ways[index])
                label = self._ways[index][self._mine].label
                _LOGGER.info("round %d, candidate %d: %s", turn + 1, index + 1, label)
                for again in (False, True):  # with other batches, if these turn out to be wrong
                    with self._going(index):
                        short[index], failed = self._prepared(first=not turn)
                        if failed:
                            _LOGGER.warning("whole steps are not timed: %s", failed)
                            return [None] * len(self._ways), [[] for _ in self._ways], self._batches
                        if short[index]:
                            break
                        if not turn and not again and self._resized(index, captured):
                            continue
                        steps = self._how_many(index, _LATER_BLOCK_NS if turn else _BLOCK_NS)
                        blocks = [self._block(steps) for _ in range(_CAPTURED_BLOCKS if captured else 1)]
                        times[index] = statistics.median(blocks)
                        break
            self._rounds.append(times)
            if not turn:
                self._steps = {}  # later blocks are longer
            turn += 1
        once = {i for i, entry in enumerate(self._ways) if is_captured(entry)}
        found = times_of_race(self._rounds, once)
        scale = [1.0 if self._sizing is None else self._sizing.scale(counts) for counts in self._batches]
        return [found[i] * scale[i] if i in found else None for i in range(len(self._ways))], short, self._batches

    def turns(self, index: int) -> tuple[int, ...]:
        """Nanoseconds of a candidate's steps in each round, 0 where it took no turn; none if it is captured."""
        if is_captured(self._ways[index]):
            return ()
        return tuple(round(times.get(index, 0.0)) for times in self._rounds)

    def _next(self, turn: int, spent_s: float) -> list[int]:
        """Who takes a turn in this round; nobody where all is known that matters, or no time is left."""
        options = self._job.options
        if not turn:
            return [*range(len(self._ways))]
        sized, first = self._sizing is not None, self._rounds[0]
        if spent_s > options.race_seconds or turn >= (_ROUNDS if sized else _MOST_ROUNDS):
            return []
        near = (1 + options.slack) * (1 + (_SIZED_OUT if sized else _OUT)) * min(first.values(), default=0.0)
        # Capturing takes as long as several steps: once.
        stay = [i for i, ns in first.items() if ns <= near and not is_captured(self._ways[i])]
        if sized or turn < _COMMON_ROUNDS:
            return stay
        rounds = [{index: entry[index] for index in stay if index in entry} for entry in self._rounds]
        return undecided(rounds, {i: total_sensitivity(self._ways[i]) for i in stay}, most_of(options.slack))

    def _going(self, index: int) -> contextlib.AbstractContextManager[None]:
        """The model goes this candidate's way within the block, with its batch."""
        if self._sizing is not None:
            example = sized(self._job.example, self._batches[index][self._mine])
            self._example = replace(example, model=self._model)
        return carried_out(self._job.model, self._ways[index][self._mine], self._graph, self._job.options.kernels)

    def _resized(self, index: int, captured: bool) -> bool:
        """Size a candidate's batches by how long its workers take by themselves; whether they are others now."""
        if self._sizing is None:
            return False
        spent_ns, scaler, self._scaler = 0.0, self._scaler, None
        try:
            with self._alone():
                self._step()
                self._wait()
                began = self._clock()
                for _ in range(_ALONE_STEPS):
                    self._step()
                self._wait()
                spent_ns = (self._clock() - began) / _ALONE_STEPS
        except Exception as failure:  # all ranks must come to the next line
            _LOGGER.warning("batches are not sized anew: %s", failure)
        self._scaler = scaler
        told = gather_json([self._mine, spent_ns])
        if not all(spent for _, spent in told):
            return False
        before = self._batches[index]
        slowest = {name: max(spent for kind, spent in told if kind == name) for name in before}
        self._batches[index] = self._sizing.split({name: before[name] / slowest[name] for name in before})
        # What passes did not tell (the optimizer, what a batch of another size costs) is much the same in other ways.
        for other, entry in enumerate(self._ways):
            if other > index and is_captured(entry) is captured:
                off = {n: slowest[n] / before[n] / max(1, way.pass_ns) for n, way in self._ways[index].items()}
                speeds = {n: 1 / (off[n] * max(1, way.pass_ns)) for n, way in entry.items()}
                self._batches[other] = self._sizing.split(speeds)
        changes = [abs(count / before[name] - 1) for name, count in self._batches[index].items()]
        if max(changes) > _RESIZED:
            return True
        self._batches[index] = before
        return False

    def _begin(self) -> None:
        """An optimizer, and no scaler yet."""
        if self._optimizer is None:
            self._optimizer = own_optimizer(self._job.optimizer, self._job.model)
            for group in self._optimizer.param_groups:  # as much work, but nothing moves
                if isinstance(group.get("lr"), float | int | torch.Tensor):
                    group["lr"] = 0.0 * group["lr"]
        self._scaler = None

    def _prepared(self, *, first: bool) -> tuple[list[int], str]:
        """Ranks without memory for a step, and what another failure said; else all is ready for steps together."""
        fits, said = True, ""
        try:
            self._begin()
            if first:  # by itself: what does not fit or cannot be done shows here, while nobody waits
                with self._alone():
                    self._step()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        except (torch.cuda.OutOfMemoryError, UnsupportedError) as failure:
            fits = False
            _LOGGER.warning("no step of this way: %s", first_line(failure))
        except Exception as failure:  # told to all ranks below
            said = f"rank {self._rank}: {type(failure).__name__}: {first_line(failure)}"
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
            self._example = replace(self._example, model=self._model)
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

    def _how_many(self, index: int, block_ns: float) -> int:
        if index not in self._steps:
            wanted = int(block_ns / max(1.0, self._block(1)))
            self._steps[index] = int(broadcast_json(max(_LEAST_STEPS, min(_MOST_STEPS, wanted))))
        return self._steps[index]

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
