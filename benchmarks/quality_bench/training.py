"""Does a plan by the indicator train better than others of the same predicted time? Training from scratch.

All policies share seeds, that is initial weights, batches and their order; a policy differs from another in nothing
but precision. Full precision and uniform INT8 are trained in every setting, plans in the one in which they are
compared: one where uniform INT8 is worse than full precision by more than three standard errors.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from estimates import paired, recovered, standard_error
from plans import HIGH, LOW, low_share, magnified, plan_half_way
from runs import Job, Setting, cached_subject, mean_square_rate
from subjects import train_briefly

import qsync_opt
from qsync_opt.kernels import ops
from qsync_opt.model import Role, save_graph
from qsync_opt.runtimes.torch.capture import capture
from qsync_opt.runtimes.torch.execution import device_formats
from qsync_opt.runtimes.torch.sensitivity import collect_statistics
from qsync_opt.sensitivity import sensitivities

PLANNERS = ("progress", "probed", "depth", "hessian", "fisher", "random")
PEER = "fisher"
"""The indicator that others plan by; plans are also compared with its, seed by seed."""
WORSE = 3.0
"""Standard errors by which uniform INT8 must be worse for a setting to tell plans apart."""


SETTINGS: Mapping[str, tuple[Setting, ...]] = {
    "gpt": (
        Setting(name="INT8 forward and backward, per tensor", backward="eight"),
        Setting(name="INT8 forward, per tensor, error x 4", factor=4.0),
        Setting(name="INT8 forward and backward, per tensor, error x 4", backward="eight", factor=4.0),
        Setting(name="INT8 forward and backward, per tensor, error x 8", backward="eight", factor=8.0),
    ),
    "cnn": (
        Setting(name="INT8 forward, per tensor"),
        Setting(name="INT8 forward, per tensor, error x 4", factor=4.0),
    ),
}
"""From the finest to the harshest, in which plans are compared. An error times 4 is that of 6 bits."""


class Comparison:
    """What is common to all runs of a subject: graph, statistics of a model that has trained a little, plans."""

    def __init__(self, name: str, device: torch.device, scale: str, folder: Path, steps: int) -> None:
        self.name, self.scale, self.device = name, scale, device
        subject = cached_subject(name, device, scale)
        self.what = subject.what
        model = subject.model(0, device)
        optimizer = train_briefly(subject, model, 3 if scale == "tiny" else 150, first=10**7)
        batches = [subject.batch(10**6 + i) for i in range(2)]
        self.graph = capture(model, batches[0], name=name)
        self.path = folder / f"{name}-graph.json"
        save_graph(self.graph, self.path)
        self.statistics = collect_statistics(
            model,
            batches,
            graph=self.graph,
            probes=2 if scale == "tiny" else 4,
            adaptive_probes=2 if scale == "tiny" else 4,
            curvature_probes=2 if scale == "tiny" else 16,
            whole_batches=True,
        )
        self.horizon = qsync_opt.noise_horizon(
            optimizer,
            steps=steps,
            statistics=self.statistics,
            learning_rate=optimizer.param_groups[0]["lr"] * mean_square_rate(steps) ** 0.5,
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
            horizon=self.horizon,
        )
        return {**self._high, **plan_half_way(self.multiplications, table, setting.backward)}

    def job(self, policy: str, setting: Setting, seed: int, steps: int, captured: bool) -> Job:
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
            captured=captured,
        )

    def compared_at(self, factor: float) -> Setting:
        """The last setting with an error of this factor, where plans are compared; the harshest if there is none."""
        settings = SETTINGS[self.name]
        return next((s for s in reversed(settings) if s.factor == factor), settings[-1])

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


def scores(runs: Sequence[Mapping[str, Any]], policy: str, setting: str, measure: str = "score") -> dict[int, float]:
    """Seed to score, or to another number of a run. Full precision is the same in all settings."""
    return {
        int(run["seed"]): float(run[measure])
        for run in runs
        if run["policy"] == policy and (run["setting"] == setting or policy in ("full precision", f"uniform {HIGH}"))
    }


def deficit(
    runs: Sequence[Mapping[str, Any]], policy: str, setting: str, sign: float, measure: str = "score"
) -> tuple[float, float]:
    """By how much a policy is worse than full precision, over the seeds that both have: mean and standard error."""
    ours, full = (scores(runs, which, setting, measure) for which in (policy, "full precision"))
    seeds = sorted(ours.keys() & full.keys())
    mean, error = paired([ours[s] for s in seeds], [full[s] for s in seeds])
    return sign * mean, error


def clearly_worse(runs: Sequence[Mapping[str, Any]], setting: str, sign: float) -> bool:
    """Whether uniform INT8 is worse than full precision by more than three standard errors."""
    mean, error = deficit(runs, f"uniform {LOW}", setting, sign)
    return mean > WORSE * error


def summary(runs: Sequence[Mapping[str, Any]], setting: str, sign: float) -> dict[str, Any]:
    """Per policy: mean, spread, deficit against full precision, and the share of the gap that is recovered.

    The share is also given by the training loss of the last steps, which scatters less than a score of few batches.
    """
    found: dict[str, Any] = {}
    finished = all(run["last_training_loss"] is not None for run in runs)

    def loss_deficit(policy: str) -> float:
        return deficit(runs, policy, setting, 1.0, "last_training_loss")[0]

    policies = dict.fromkeys(str(run["policy"]) for run in runs)
    peer = scores(runs, PEER, setting)
    gap = deficit(runs, f"uniform {LOW}", setting, sign)[0]
    for policy in policies:
        values = list(scores(runs, policy, setting).values())
        if not values:
            continue
        mean, error = deficit(runs, policy, setting, sign)
        ours = scores(runs, policy, setting)
        shared = sorted(ours.keys() & peer.keys())
        beside = paired([sign * ours[s] for s in shared], [sign * peer[s] for s in shared]) if shared else None
        found[policy] = {
            "seeds": len(values),
            "mean": statistics.fmean(values),
            "spread": statistics.stdev(values) if len(values) > 1 else None,
            "standard_error": standard_error(values) if len(values) > 1 else None,
            "worse_than_full": mean,
            "worse_than_full_error": error if math.isfinite(error) else None,
            "recovered": recovered(gap, 0.0, mean),
            "recovered_error": error / abs(gap) if gap and math.isfinite(error) else None,
            f"worse_than_{PEER}": None if beside is None else beside[0],
            f"worse_than_{PEER}_error": None if beside is None or len(shared) < 2 else beside[1],
            "recovered_in_training_loss": recovered(loss_deficit(f"uniform {LOW}"), 0.0, loss_deficit(policy))
            if finished
            else None,
        }
    return found


def key(run: Mapping[str, Any] | Job) -> tuple[str, str, int]:
    """What tells runs apart."""
    if isinstance(run, Job):
        return run.policy, run.setting.name, run.seed
    return str(run["policy"]), str(run["setting"]), int(run["seed"])


def jobs(
    comparison: Comparison,
    seeds: Sequence[int],
    steps: int,
    captured: bool,
    chosen: Setting | None = None,
    policies: Sequence[str] = (),
) -> Iterator[Job]:
    """Per seed: full precision, uniform INT8 in all settings, and in the chosen one the plans of equal predicted time.

    Args:
        comparison: What is common to all.
        seeds: Of the runs.
        steps: Of every run.
        captured: Whether steps run as CUDA graphs on a card.
        chosen: Setting in which plans are compared; None: the harshest.
        policies: These alone, in the chosen setting; none: all of them.
    """
    settings = SETTINGS[comparison.name]
    chosen = chosen or settings[-1]
    for seed in seeds:
        if policies:
            for policy in policies:
                at = settings[0] if policy == "full precision" else chosen  # the same in all settings
                yield comparison.job(policy, at, seed, steps, captured)
            continue
        yield comparison.job("full precision", settings[0], seed, steps, captured)
        yield comparison.job(f"uniform {HIGH}", chosen, seed, steps, captured)
        for setting in settings:
            yield comparison.job(f"uniform {LOW}", setting, seed, steps, captured)
        for policy in PLANNERS:
            yield comparison.job(policy, chosen, seed, steps, captured)


def merged(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Shards of one model and length as one record: all runs, each once, and every plan that differs between shards.

    Statistics are collected anew by every shard; where a card sums in another order, a plan may come out otherwise.
    Plans of another setting than the first shard's stand under ``other_plans``.
    """
    found: list[dict[str, Any]] = []
    groups: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault((record["hardware"], record["what"], record["steps"]), []).append(record)
    for group in groups.values():
        one = dict(group[0])
        for part in ("runs", "unfinished"):
            every = {key(run): run for record in group for run in record.get(part, [])}
            one[part] = [every[which] for which in sorted(every)]
        one["plans_differ"] = sorted(
            policy
            for policy, plan in one["plans"].items()
            if any(r.get("chosen") == one.get("chosen") and r["plans"].get(policy, plan) != plan for r in group[1:])
        )
        others = {r["chosen"]: r["plans"] for r in group if r.get("chosen") != one.get("chosen")}
        one["other_plans"] = {**one.get("other_plans", {}), **others}
        found.append(one)
    return found
