"""Training runs of one seed, all policies side by side in one process.

On a card the pass forward and backward of every run is captured as a graph and replayed on a stream of its own, so that
the host costs next to nothing; batches are made once for all runs of a seed. Without a card the runs take turns.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from noisy import MagnifiedPlan
from plans import HIGH
from subjects import Batch, Subject, subject_of
from torch import Tensor

from qsync_opt.graph import OpGraph
from qsync_opt.graph_file import load_graph
from qsync_opt.kernels.options import KernelOptions
from qsync_opt.runtimes.torch.apply import ApplyOptions
from qsync_opt.variances import NoiseOptions

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


def cached_subject(name: str, device: torch.device, scale: str) -> Subject:
    """A subject, its data made once per process."""
    if (name, scale) not in _CACHE:
        _CACHE[name, scale] = subject_of(name, device, scale=scale)
    return _CACHE[name, scale]


def rate_at(step: int, steps: int) -> float:
    """Share of the learning rate: a short warm-up, then a cosine down to a tenth."""
    warm = max(1, steps // 20)
    if step < warm:
        return (step + 1) / warm
    return 0.55 + 0.45 * math.cos(math.pi * (step - warm) / max(1, steps - warm))


class Run:
    """One model in training under a plan."""

    def __init__(self, job: Job, subject: Subject, batch: Batch) -> None:
        self.job, device = job, torch.device(job.device)
        self.model = subject.model(job.seed, device)
        self._optimizer = subject.optimizer(self.model)
        self._rates = [group["lr"] for group in self._optimizer.param_groups]
        graph: OpGraph = load_graph(job.graph)
        options = ApplyOptions(kernels=job.setting.kernels.at(seed=job.seed, offset=0), evaluate_in="FP32")
        MagnifiedPlan(self.model, job.plan, graph, options, factor=job.setting.factor, reference=HIGH)
        self._sum = torch.zeros((), dtype=torch.float64, device=device)
        self._inputs = [x.clone() for x in batch]
        self._stream: torch.cuda.Stream | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._loss = torch.zeros((), device=device)
        if device.type == "cuda":
            self._stream = torch.cuda.Stream()
            if job.captured:
                self._capture(self._stream)

    def _capture(self, stream: torch.cuda.Stream) -> None:
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._pass()
            graph = torch.cuda.CUDAGraph()
            self._optimizer.zero_grad(set_to_none=True)
            with torch.cuda.graph(graph, stream=stream):
                self._loss = self._pass()
            with torch.no_grad():  # the statistics of batch normalization have seen passes that do not count
                for buffer, before in zip(self.model.buffers(), buffers, strict=True):
                    buffer.copy_(before)
        stream.synchronize()
        self._graph = graph

    def _pass(self) -> Tensor:
        self._optimizer.zero_grad(set_to_none=True)
        loss: Tensor = self.model(*self._inputs)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def step(self, number: int, batch: Batch) -> None:
        """One training step."""
        if self._stream is None:
            self._step(number, batch)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._step(number, batch)
        torch.cuda.current_stream().wait_stream(self._stream)

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


def alike(jobs: Sequence[Job]) -> dict[int, int]:
    """Index of a job to that of the first that trains the very same; policies may agree on a plan."""
    found: dict[int, int] = {}
    for i, job in enumerate(jobs):
        nameless = dataclasses.replace(job, policy="")
        found[i] = next(j for j in range(i + 1) if dataclasses.replace(jobs[j], policy="") == nameless)
    return found


def train_together(jobs: Sequence[Job], until: float) -> list[dict[str, Any]]:
    """Train all policies of one seed from scratch; scores of the results, and of the models on the way.

    Args:
        jobs: Of one subject, seed and number of steps.
        until: ``time.time()`` at which to stop; what is there then says how many steps it has taken.
    """
    torch.set_num_threads(1)
    first = jobs[0]
    device = torch.device(first.device)
    subject = cached_subject(first.subject, device, first.scale)
    same = alike(jobs)
    batch = subject.batch(first.seed * 10**5)
    runs = {i: Run(jobs[i], subject, batch) for i in dict.fromkeys(same.values())}
    held_out = subject.held_out(40 if first.scale == "full" else 2)
    curves: dict[int, dict[str, float]] = {i: {} for i in runs}
    begin, done = time.perf_counter(), 0
    for step in range(first.steps):
        if step % 10 == 0:
            if device.type == "cuda":
                torch.cuda.synchronize()
            if time.time() > until:
                break
        batch = subject.batch(first.seed * 10**5 + step)
        for run in runs.values():
            run.step(step, batch)
        done = step + 1
        if done % max(1, first.steps // 5) == 0 and done < first.steps:
            for i, run in runs.items():
                curves[i][str(done)] = run.score(held_out[:8])
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    scores = {i: run.score(held_out) for i, run in runs.items()}
    return [
        {
            "policy": job.policy,
            "setting": job.setting.name,
            "seed": job.seed,
            "steps": done,
            "score": scores[same[i]],
            "last_training_loss": runs[same[i]].last_training_loss if done == job.steps else None,
            "on_the_way": curves[same[i]],
            "same_plan_as": None if same[i] == i else jobs[same[i]].policy,
            "seconds_of_all": seconds,
        }
        for i, job in enumerate(jobs)
    ]


def by_seed(jobs: Iterator[Job]) -> dict[int, list[Job]]:
    """Jobs of each seed."""
    found: dict[int, list[Job]] = {}
    for job in jobs:
        found.setdefault(job.seed, []).append(job)
    return found
