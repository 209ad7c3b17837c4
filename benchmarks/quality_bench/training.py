"""Does a plan by the indicator train better than others of the same predicted time? Training from scratch.

All policies share seeds, that is initial weights, batches and their order; a policy differs from another in nothing
but precision. First full precision and uniform INT8 are trained in every setting; the first setting in which uniform
INT8 is worse than full precision by more than three standard errors is the one in which plans are compared.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from estimates import paired, recovered, standard_error
from noisy import MagnifiedPlan
from plans import HIGH, LOW, low_share, magnified, plan_half_way
from subjects import Subject, subject_of, train_briefly

from qsync_opt.graph import OpGraph, Role
from qsync_opt.graph_file import load_graph, save_graph
from qsync_opt.indicator import sensitivities
from qsync_opt.kernels import ops
from qsync_opt.kernels.options import KernelOptions
from qsync_opt.runtimes.torch.apply import ApplyOptions
from qsync_opt.runtimes.torch.capabilities import device_formats
from qsync_opt.runtimes.torch.capture import capture
from qsync_opt.runtimes.torch.statistics import collect_statistics
from qsync_opt.variances import NoiseOptions

PLANNERS = ("probed", "propagated", "hessian", "fisher", "random")
OURS = "probed"
WORSE = 3.0
"""Standard errors by which uniform INT8 must be worse for a setting to tell plans apart."""


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


SETTINGS: Mapping[str, tuple[Setting, ...]] = {
    "gpt": (
        Setting(name="INT8 forward, per tensor"),
        Setting(name="INT8 forward and backward, per tensor", backward="eight"),
        Setting(name="INT8 forward and backward, per tensor, error x 4", backward="eight", factor=4.0),
    ),
    "cnn": (
        Setting(name="INT8 forward, per tensor"),
        Setting(name="INT8 forward, per tensor, error x 4", factor=4.0),
        Setting(name="INT8 forward, per tensor, error x 12", factor=12.0),
    ),
}
"""From the finest to the harshest. An error times 4 is that of 6 bits, times 12 that of between 4 and 5."""


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


_CACHE: dict[tuple[str, str], Subject] = {}


def _subject(name: str, device: torch.device, scale: str) -> Subject:
    if (name, scale) not in _CACHE:
        _CACHE[name, scale] = subject_of(name, device, scale=scale)
    return _CACHE[name, scale]


def rate_at(step: int, steps: int) -> float:
    """Share of the learning rate: a short warm-up, then a cosine down to a tenth."""
    warm = max(1, steps // 20)
    if step < warm:
        return (step + 1) / warm
    return 0.55 + 0.45 * math.cos(math.pi * (step - warm) / max(1, steps - warm))


def train(job: Job) -> dict[str, Any]:
    """Train from scratch under a plan; the score of the result in full precision."""
    torch.set_num_threads(1)
    device = torch.device(job.device)
    subject = _subject(job.subject, device, job.scale)
    model = subject.model(job.seed, device)
    optimizer = subject.optimizer(model)
    rates = [group["lr"] for group in optimizer.param_groups]
    graph: OpGraph = load_graph(job.graph)
    options = ApplyOptions(kernels=job.setting.kernels.at(seed=job.seed, offset=0), evaluate_in="FP32")
    MagnifiedPlan(model, job.plan, graph, options, factor=job.setting.factor, reference=HIGH)
    begin, last = time.perf_counter(), 0.0
    for step in range(job.steps):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * rate_at(step, job.steps)
        optimizer.zero_grad(set_to_none=True)
        loss = model(*subject.batch(job.seed * 10**5 + step))
        loss.backward()
        optimizer.step()
        if step >= job.steps - 50:
            last += float(loss.detach())
    seconds = time.perf_counter() - begin
    model.eval()
    with torch.no_grad():
        scores = [float(model(*batch)) for batch in subject.held_out(2 if job.scale else 40)]
    return {
        "policy": job.policy,
        "setting": job.setting.name,
        "seed": job.seed,
        "score": statistics.fmean(scores),
        "last_training_loss": last / min(50, job.steps),
        "seconds": seconds,
    }


class Comparison:
    """What is common to all runs of a subject: graph, statistics of a model that has trained a little, plans."""

    def __init__(self, name: str, device: torch.device, scale: str, folder: Path) -> None:
        self.name, self.scale, self.device = name, scale, device
        subject = _subject(name, device, scale)
        self.what = subject.what
        model = subject.model(0, device)
        train_briefly(subject, model, 3 if scale == "tiny" else 150, first=10**7)
        batches = [subject.batch(10**6 + i) for i in range(2)]
        self.graph = capture(model, batches[0], name=name)
        self.path = folder / f"{name}-graph.json"
        save_graph(self.graph, self.path)
        self.statistics = collect_statistics(
            model,
            batches,
            graph=self.graph,
            probes=2 if scale == "tiny" else 4,
            curvature_probes=2 if scale == "tiny" else 16,
        )
        adjustable = [o for o in self.graph.by_role(Role.ADJUSTABLE)]
        self.multiplications = {
            o.name: self.statistics[o.name].products[0].volume
            for o in adjustable
            if ops.supports(o.op_type, LOW, device)
        }
        self._high = {o.name: HIGH for o in adjustable}

    def plan(self, policy: str, setting: Setting, seed: int) -> dict[str, str]:
        """Precision of every operator; those that have no INT8 run in BF16 except in full precision."""
        if policy == "full precision":
            return dict.fromkeys(self._high, "FP32")
        if policy == f"uniform {HIGH}":
            return dict(self._high)
        if policy == f"uniform {LOW}":
            return {**self._high, **dict.fromkeys(self.multiplications, LOW)}
        table = sensitivities(
            self.graph,
            magnified(self.statistics, setting.factor),
            device_formats(self.device),
            options=setting.noise,
            kind=policy,  # type: ignore[arg-type]
            seed=seed,
        )
        return {**self._high, **plan_half_way(self.multiplications, table, setting.backward)}

    def job(self, policy: str, setting: Setting, seed: int, steps: int) -> Job:
        """A run."""
        return Job(
            subject=self.name,
            policy=policy,
            setting=setting,
            seed=seed,
            steps=steps,
            plan=self.plan(policy, setting, seed),
            graph=str(self.path),
            scale=self.scale,
            device=str(self.device),
        )

    def planned(self, setting: Setting) -> dict[str, Any]:
        """What the plans look like."""
        found = {}
        for policy in PLANNERS:
            plan = self.plan(policy, setting, 0)
            found[policy] = {
                "low_share": low_share(plan, self.multiplications),
                "low": sorted(name for name, precision in plan.items() if precision == LOW),
            }
        return found


def better_when_higher(subject: str) -> bool:
    """Whether the score is an accuracy rather than a loss."""
    return subject == "cnn"


def scores(runs: Sequence[Mapping[str, Any]], policy: str, setting: str) -> dict[int, float]:
    """Seed to score. Full precision is the same in all settings."""
    return {
        int(run["seed"]): float(run["score"])
        for run in runs
        if run["policy"] == policy and (run["setting"] == setting or policy in ("full precision", f"uniform {HIGH}"))
    }


def deficit(runs: Sequence[Mapping[str, Any]], policy: str, setting: str, sign: float) -> tuple[float, float]:
    """By how much a policy is worse than full precision, over the seeds that both have: mean and standard error."""
    ours, full = scores(runs, policy, setting), scores(runs, "full precision", setting)
    seeds = sorted(ours.keys() & full.keys())
    mean, error = paired([ours[s] for s in seeds], [full[s] for s in seeds])
    return sign * mean, error


def harsh_enough(runs: Sequence[Mapping[str, Any]], settings: Sequence[Setting], sign: float) -> Setting:
    """The first setting where uniform INT8 is worse by more than three standard errors, else the harshest."""
    for setting in settings:
        mean, error = deficit(runs, f"uniform {LOW}", setting.name, sign)
        if mean > WORSE * error:
            return setting
    return settings[-1]


def summary(runs: Sequence[Mapping[str, Any]], setting: str, sign: float) -> dict[str, Any]:
    """Per policy: mean, spread, deficit against full precision, and the share of the gap that is recovered."""
    found: dict[str, Any] = {}
    policies = dict.fromkeys(str(run["policy"]) for run in runs)
    gap = deficit(runs, f"uniform {LOW}", setting, sign)[0]
    for policy in policies:
        values = list(scores(runs, policy, setting).values())
        if not values:
            continue
        mean, error = deficit(runs, policy, setting, sign)
        found[policy] = {
            "seeds": len(values),
            "mean": statistics.fmean(values),
            "spread": statistics.stdev(values) if len(values) > 1 else None,
            "standard_error": standard_error(values) if len(values) > 1 else None,
            "worse_than_full": mean,
            "worse_than_full_error": error if math.isfinite(error) else None,
            "recovered": recovered(gap, 0.0, mean),
        }
    return found


def key(run: Mapping[str, Any] | Job) -> tuple[str, str, int]:
    """What tells runs apart."""
    if isinstance(run, Job):
        return run.policy, run.setting.name, run.seed
    return str(run["policy"]), str(run["setting"]), int(run["seed"])


def first_jobs(comparison: Comparison, seeds: Sequence[int], steps: int) -> Iterator[Job]:
    """Full precision and uniform INT8 in all settings."""
    settings = SETTINGS[comparison.name]
    for seed in seeds:
        yield comparison.job("full precision", settings[0], seed, steps)
        for setting in settings:
            yield comparison.job(f"uniform {LOW}", setting, seed, steps)


def second_jobs(comparison: Comparison, setting: Setting, seeds: Sequence[int], steps: int) -> Iterator[Job]:
    """Plans at equal predicted time, and uniform BF16."""
    for seed in seeds:
        for policy in (*PLANNERS, f"uniform {HIGH}"):
            yield comparison.job(policy, setting, seed, steps)
