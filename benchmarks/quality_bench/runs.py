"""Training runs, all policies and seeds side by side in one process.

On a card the pass forward and backward of every run is captured as a graph and replayed, on a few streams, so that the
host costs next to nothing; batches are made once for all runs of a seed. Without a card the runs take turns.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from noisy import MagnifiedPlan
from plans import HIGH
from subjects import Batch, Subject, subject_of
from torch import Tensor, nn

from qsync_opt.kernels import KernelOptions
from qsync_opt.model import OpGraph, load_graph
from qsync_opt.runtimes.torch.execution import ApplyOptions
from qsync_opt.sensitivity import NoiseOptions

LAST = 50
"""Steps at the end whose training loss is averaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How coarse INT8 is: bits of the backward pass, and by what the kernels' error is multiplied."""

    name: str
    backward: str = "half"
    factor: float = 1.0

    @property
    def kernels(self) -> KernelOptions:
        """Scales per tensor on both sides."""
        return KernelOptions(weight_granularity="tensor", backward=self.backward)

    @property
    def noise(self) -> NoiseOptions:
        """What the indicator is told."""
        return NoiseOptions(weight_granularity="tensor", backward=self.backward)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training run."""

    subject: str
    policy: str
    setting: Setting
    seed: int
    steps: int
    plan: Mapping[str, str]
    graph: str
    scale: str
    device: str
    captured: bool = True
    """Whether the step is captured as a graph on a card."""


_CACHE: dict[tuple[str, str], Subject] = {}
_MODELS: dict[tuple[str, str, int, str], nn.Module] = {}
_GRAPHS: dict[str, OpGraph] = {}


def cached_subject(name: str, device: torch.device, scale: str) -> Subject:
    """A subject, its data made once per process."""
    if (name, scale) not in _CACHE:
        _CACHE[name, scale] = subject_of(name, device, scale=scale)
    return _CACHE[name, scale]


def _fresh_model(subject: Subject, job: Job) -> nn.Module:
    """The model of a seed, drawn once per process."""
    key = (job.subject, job.scale, job.seed, job.device)
    if key not in _MODELS:
        _MODELS[key] = subject.model(job.seed, torch.device(job.device))
    return copy.deepcopy(_MODELS[key])


def _graph(path: str) -> OpGraph:
    if path not in _GRAPHS:
        _GRAPHS[path] = load_graph(path)
    return _GRAPHS[path]


def rate_at(step: int, steps: int) -> float:
    """Share of the learning rate: a short warm-up, then a cosine down to a tenth."""
    warm = max(1, steps // 20)
    if step < warm:
        return (step + 1) / warm
    return 0.55 + 0.45 * math.cos(math.pi * (step - warm) / max(1, steps - warm))


def mean_square_rate(steps: int) -> float:
    """Mean square of ``rate_at``."""
    return sum(rate_at(step, steps) ** 2 for step in range(steps)) / steps


class Run:
    """One model in training under a plan."""

    def __init__(self, job: Job, subject: Subject, batch: Batch, place: Place | None) -> None:
        self.job, device = job, torch.device(job.device)
        self.model = _fresh_model(subject, job)
        self._optimizer = subject.optimizer(self.model)
        self._rates = [group["lr"] for group in self._optimizer.param_groups]
        graph = _graph(job.graph)
        options = ApplyOptions(kernels=job.setting.kernels.at(seed=job.seed, offset=0), evaluate_in="FP32")
        MagnifiedPlan(self.model, job.plan, graph, options, factor=job.setting.factor, reference=HIGH)
        self._sum = torch.zeros((), dtype=torch.float64, device=device)
        self._inputs = [x.clone() for x in batch]
        self.place, self._graph = place, None
        self._loss = torch.zeros((), device=device)
        if place is not None and job.captured:
            self._graph = self._capture(place)

    def _capture(self, place: Place) -> torch.cuda.CUDAGraph:
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        place.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(place.stream):
            self._pass()
            self._optimizer.zero_grad(set_to_none=True)
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            # Not torch.cuda.graph, which collects garbage: with all these models that takes longer than the capture.
            graph.capture_begin(pool=place.pool)
            try:
                self._loss = self._pass()
            finally:
                graph.capture_end()
            with torch.no_grad():  # the statistics of batch normalization have seen passes that do not count
                for buffer, before in zip(self.model.buffers(), buffers, strict=True):
                    buffer.copy_(before)
        place.stream.synchronize()
        return graph

    def _pass(self) -> Tensor:
        self._optimizer.zero_grad(set_to_none=True)
        loss: Tensor = self.model(*self._inputs)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def step(self, number: int, batch: Batch) -> None:
        """One training step."""
        if self.place is None:
            self._step(number, batch)
            return
        stream = self.place.stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step(number, batch)

    def _step(self, number: int, batch: Batch) -> None:
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * rate_at(number, self.job.steps)
        for place, x in zip(self._inputs, batch, strict=True):
            place.copy_(x)
        if self._graph is None:
            self._loss = self._pass()
        else:
            self._graph.replay()
        self._optimizer.step()
        if number >= self.job.steps - LAST:
            self._sum += self._loss

    def score(self, batches: Sequence[Batch]) -> float:
        """Mean over held-out batches, in full precision."""
        self.model.eval()
        with torch.no_grad():
            found = torch.stack([self.model(*batch) for batch in batches]).double().mean()
        self.model.train()
        return float(found)

    @property
    def last_training_loss(self) -> float:
        """Mean over the last steps."""
        return float(self._sum) / min(LAST, self.job.steps)


@dataclass(frozen=True, slots=True)
class Place:
    """A stream, and the memory of the graphs that are replayed on it one after the other."""

    stream: torch.cuda.Stream
    pool: tuple[int, int]


def places(device: torch.device, count: int = 4) -> Iterator[Place | None]:
    """Places in turn; None without a card."""
    if device.type != "cuda":
        return itertools.repeat(None)
    return itertools.cycle([Place(torch.cuda.Stream(), torch.cuda.graph_pool_handle()) for _ in range(count)])


def alike(jobs: Sequence[Job]) -> dict[int, int]:
    """Index of a job to that of the first that trains the very same; policies may agree on a plan."""
    found: dict[int, int] = {}
    for i, job in enumerate(jobs):
        nameless = dataclasses.replace(job, policy="")
        found[i] = next(j for j in range(i + 1) if dataclasses.replace(jobs[j], policy="") == nameless)
    return found


class Training:
    """Several runs of one subject, side by side, step by step."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        first = jobs[0]
        self._jobs, self._steps = jobs, first.steps
        self._device = torch.device(first.device)
        self._subject = cached_subject(first.subject, self._device, first.scale)
        self._same = alike(jobs)
        place = places(self._device)
        self._runs = {
            i: Run(jobs[i], self._subject, self._batch(jobs[i].seed, 0), next(place))
            for i in dict.fromkeys(self._same.values())
        }
        self._held_out = self._subject.held_out(40 if first.scale == "full" else 2)
        self._curves: dict[int, dict[str, float]] = {i: {} for i in self._runs}
        self.done = 0

    def _batch(self, seed: int, step: int) -> Batch:
        return self._subject.batch(seed * 10**5 + step)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def run(self, until: float) -> Iterator[list[dict[str, Any]]]:
        """Train from scratch; yields what is known several times on the way, and at the end.

        If the time does not suffice for all seeds, which a few steps show, the last ones are left out.

        Args:
            until: ``time.monotonic()`` at which to stop; what is there then says how many steps it has taken.
        """
        begin = time.monotonic()
        left = until - time.monotonic()
        print(f"{len(self._runs)} runs side by side, {left:.0f} s left", flush=True)
        measured = min(30, self._steps // 2)
        for step in range(self._steps):
            if step == 10:
                self._wait()
                begin = time.monotonic()
            if step == measured and measured > 10:
                self._wait()
                self._leave_out((time.monotonic() - begin) / (measured - 10), until)
            if step % 10 == 0:
                self._wait()
                if time.monotonic() > until:
                    break
            self._advance(step)
            if self.done % max(1, self._steps // 5) == 0 and self.done < self._steps:
                self._wait()
                for i, run in self._runs.items():
                    self._curves[i][str(self.done)] = run.score(self._held_out[:8])
                print(f"{self.done} steps, {time.monotonic() - begin:.1f} s", flush=True)
                yield self._found({i: self._curves[i][str(self.done)] for i in self._runs})
        self._wait()
        yield self._found({i: run.score(self._held_out) for i, run in self._runs.items()})

    def _advance(self, step: int) -> None:
        batches: dict[int, Batch] = {}
        for i, run in self._runs.items():
            seed = self._jobs[i].seed
            if seed not in batches:
                batches[seed] = self._batch(seed, step)
            run.step(step, batches[seed])
        if self._device.type == "cuda":  # the batches may go only when all have read them
            for run in self._runs.values():
                if run.place is not None:
                    torch.cuda.current_stream().wait_stream(run.place.stream)
        self.done = step + 1

    def _leave_out(self, seconds: float, until: float) -> None:
        """Drop the last seeds, but for one, as long as all steps of all runs would take too long."""
        seeds = sorted({self._jobs[i].seed for i in self._runs})
        left = until - time.monotonic()
        kept = len(seeds)
        while kept > 1 and seconds * kept / len(seeds) * (self._steps - self.done) > left:
            kept -= 1
        print(f"{seconds * 1e3:.0f} ms for one step of all, {left:.0f} s left: {kept} seeds", flush=True)
        self._runs = {i: run for i, run in self._runs.items() if self._jobs[i].seed in seeds[:kept]}

    def _found(self, scores: Mapping[int, float]) -> list[dict[str, Any]]:
        return [
            {
                "policy": job.policy,
                "setting": job.setting.name,
                "seed": job.seed,
                "steps": self.done,
                "score": scores[self._same[i]],
                "last_training_loss": self._runs[self._same[i]].last_training_loss if self.done == job.steps else None,
                "on_the_way": self._curves[self._same[i]],
                "same_plan_as": None if self._same[i] == i else self._jobs[self._same[i]].policy,
            }
            for i, job in enumerate(self._jobs)
            if self._same[i] in self._runs
        ]
