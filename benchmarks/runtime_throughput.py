"""Throughput on a hybrid cluster: plain ways, the plan, local batches sized by speed, and both together."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from runtime_training import Batch, Run, Worker, everywhere, kinds
from torch import nn

import qsync_opt
from qsync_opt.runtimes.torch.agreement import broadcast_json, gather_json
from qsync_opt.runtimes.torch.example_models import example
from qsync_opt.runtimes.torch.job_plan import JobPlan
from qsync_opt.runtimes.torch.job_ways import Way

BATCHES = {"bert-base": 32, "gpt2": 32, "resnet50": 64, "vit-base": 32}
BLOCK_S, BLOCKS = 0.4, 3
"""Seconds of steps that are timed together, and how often; the median counts."""
SMALL_BATCH = 4  # of the small models that stand for these on a CPU


def rows(kwargs: Mapping[str, Any], count: int, device: torch.device) -> Batch:
    """A batch of so many samples, from an example's."""
    return {name: x[torch.arange(count) % len(x)].to(device) for name, x in kwargs.items()}


def shares(speeds: list[float], total: int) -> list[int]:
    """Whole samples per worker, as their speeds are, none without any; together ``total``."""
    wanted = [total * speed / sum(speeds) for speed in speeds]
    found = [max(1, int(count)) for count in wanted]
    while sum(found) != total:  # to whom most is missing, or from whom has most too much and more than one
        step = 1 if sum(found) < total else -1
        places = [i for i, count in enumerate(found) if count + step >= 1]
        found[max(places, key=lambda i: step * (wanted[i] - found[i]))] += step
    return found


def timed(run: Run) -> float:
    """Seconds of a step: median of some blocks."""
    first = run.timed(1)
    steps = broadcast_json(max(2 if first < BLOCK_S else 1, min(20, int(BLOCK_S / first))))
    return statistics.median(run.timed(steps) for _ in range(BLOCKS))


def maker(name: str, *, small: bool) -> tuple[Callable[[], nn.Module], Mapping[str, Any]]:
    """What builds the model again and again, with the same weights, and a batch of few samples."""
    torch.manual_seed(0)
    chosen = example(name, small=small)
    if hasattr(chosen.model, "config"):  # keys and values are kept for generation alone
        chosen.model.config.use_cache = False
    return lambda: copy.deepcopy(chosen.model), chosen.kwargs


class Measuring:
    """One model on one cluster: measures ways of training, each of which becomes a record as soon as it is known."""

    def __init__(self, worker: Worker, name: str) -> None:
        small = worker.device.type == "cpu"
        self.worker, self.name = worker, name
        self.label = name + (" (small)" if small else "")
        self.make, self.kwargs = maker(name, small=small)
        self.per_worker = SMALL_BATCH if small else BATCHES[name]
        self.total = self.per_worker * worker.world
        self.batch = rows(self.kwargs, self.per_worker, worker.device)
        self.speeds: dict[str, float] = {
            label: record.get("samples_per_s") or 0.0 for label, record in worker.known.items()
        }

        self.alone: dict[str, list[float]] = {}
        """Speeds of the workers with equal batches, each by itself."""

    def failed_before(self, what: str) -> bool:
        """Whether workers before these ended in it."""
        return what in self.worker.known and bool(self.worker.known[what].get("failure"))

    def measure(
        self, label: str, counts: list[int] | None = None, facts: Mapping[str, Any] | None = None, **how: Any
    ) -> None:
        """Samples per second; where it does not run, a record that says why."""
        worker, total = self.worker, self.total
        if label in worker.known:
            return
        worker.begin(label)
        local = self.batch if counts is None else rows(self.kwargs, counts[worker.rank], worker.device)
        weight = 1.0 if counts is None else worker.world * counts[worker.rank] / total
        said, seconds, alone = "", 0.0, 0.0
        run = None
        try:
            run = Run(worker, self.make, local, weight=weight, **how)
            alone = run.alone_s(3)
        except (RuntimeError, qsync_opt.QSyncError) as failure:  # memory; what a part of a card refuses
            said = f"rank {worker.rank}: {str(failure).splitlines()[0][:120]}"
        failed = [text for text in gather_json(said) if text]
        peaks: list[int] = []
        if not failed and run is not None:
            seconds, peaks = timed(run), run.peaks()
        self.speeds[label] = total / seconds if seconds else 0.0
        alone_s = gather_json(alone)
        if all(alone_s):
            self.alone[label] = [1 / found for found in alone_s]
        worker.write(
            model=self.label,
            configuration=label,
            samples_per_s=self.speeds[label] or None,
            step_ms=1e3 * seconds or None,
            local_batches=counts or [self.per_worker] * worker.world,
            alone_ms=[1e3 * t for t in alone_s],
            peak_bytes=peaks or None,
            failure="; ".join(failed) or None,
            **(facts or {}),
        )
        if run is not None:
            run.close()

    def by_speed(
        self, label: str, speeds: list[float] | None = None, facts: Mapping[str, Any] | None = None, **how: Any
    ) -> None:
        """Measure with local batches for which all workers take as long, found in two rounds.

        ``speeds`` are of the workers, as far as they are known with equal batches; then one round follows.
        """
        label = f"local batches by speed, {label}"
        worker = self.worker
        if label in worker.known:
            return
        worker.begin(label)
        counts = [self.per_worker] * worker.world
        if speeds is not None:
            counts = shares(speeds, self.total)
        for _ in range(2 if speeds is None else 1):
            run = Run(worker, self.make, rows(self.kwargs, counts[worker.rank], worker.device), **how)
            found = [n / t for n, t in zip(counts, gather_json(run.alone_s(5)), strict=True)]
            run.close()
            counts = broadcast_json(shares(found, self.total))
        self.measure(label, counts, facts, **how)

    def plan(self, **changes: Any) -> JobPlan:
        """From `auto_plan`; it measures the first time, and solves from what was measured then."""
        # Where workers ended in planning, the next ones leave out what no plan needs.
        failed = self.failed_before(PLANNING)
        options = self.worker.options(
            self.name, capture=self.worker.device.type == "cuda", compare="passes" if failed else True, **changes
        )
        return qsync_opt.auto_plan(self.make().to(self.worker.device), self.batch, options=options)

    def first_plan(self) -> JobPlan:
        """The plan, with a record of sensitivities and of how long it took until a step ran under it."""
        worker = self.worker
        worker.begin(PLANNING_BY_PASSES if self.failed_before(PLANNING) else PLANNING)
        began = time.perf_counter()
        plan = self.plan()
        planning_s = time.perf_counter() - began
        run = Run(worker, self.make, self.batch, plan=plan)
        run.step()
        worker.wait()
        # Clocks of one host: from the start of the processes to the end of the slowest worker's first step.
        first_step_s = max(gather_json(time.time())) - worker.task.started
        run.close()
        worker.write(
            model=self.label,
            sensitivities={**{other.name: other.sensitivity for other in plan.alternatives}, "plan": plan.sensitivity},
            planning_s=planning_s,
            first_planned_step_s=first_step_s,
            predicted_ms=(plan.expected_ns or plan.iteration_ns) / 1e6,
            taken=dict(plan.taken),
            measured=dict(plan.measured),
            reason=plan.reason,
            stages_s={stage: round(spent, 2) for stage, spent in plan.stages_s.items()},
            steps=[] if plan.model is None else [step.to_json() for step in plan.model.steps],
            ways=[] if plan.model is None else ways_told(plan),
        )
        return plan


PLANNING, PLANNING_BY_PASSES = "planning", "planning without whole steps"
BOTH = "local batches by speed, plan"


def ways_told(plan: JobPlan) -> list[dict[str, Any]]:
    """What `auto_plan` measured of every way, without the operators' precisions."""
    assert plan.model is not None
    return [
        {"worker": kind, "name": way.label, "pass_ms": way.pass_ns / 1e6, "sensitivity": way.sensitivity}
        for kind, ways in plan.model.ways.items()
        for way in ways
    ]


def throughput(worker: Worker, name: str) -> None:
    """The plan, then plain ways from the fastest, then local batches by speed with the best of them and with a plan."""
    measuring = Measuring(worker, name)
    small = worker.device.type == "cpu"
    device, make = worker.device, measuring.make
    planned = not measuring.failed_before(PLANNING_BY_PASSES)
    operators: list[tuple[str, str]] | None = None
    if planned and "plan" not in worker.known:
        plan = measuring.first_plan()
        measuring.measure("plan", plan=plan)
        operators = broadcast_json(None if plan.model is None else kinds(plan.model.graph))
    ways: dict[str, dict[str, Any]] = {"BF16 autocast": {"autocast": torch.bfloat16}}
    if not small:
        ways["FP16 autocast"] = {"autocast": torch.float16}
    eight_bits = ("INT8",) if small else ("INT8", "FP8")
    if operators is None:
        worker.begin("capture for uniform precisions")
        operators = kinds(qsync_opt.capture(make().to(device), (), measuring.batch))
    for precision in eight_bits:
        ways[f"uniform {precision}"] = {"plan": everywhere(operators, precision, device)}
    for label, how in ways.items():
        measuring.measure(label, **how)
    best, second = broadcast_json(sorted(ways, key=lambda label: -measuring.speeds[label])[:2])
    measuring.by_speed(best, measuring.alone.get(best), **ways[best])
    if planned and BOTH not in worker.known:
        # Nobody waits now, so that another plan is best; it is solved from what was measured.
        worker.begin(BOTH)
        plan = measuring.plan(local_batches="by speed")
        facts = {"sensitivity": plan.sensitivity, "taken": dict(plan.taken), "reason": plan.reason}
        measuring.by_speed("plan", gather_json(plan.shares[plan.device_type]), facts, plan=plan)
    if not small:
        measuring.measure("TF32", tf32=True)
    measuring.measure("FP32")
    measuring.by_speed(second, measuring.alone.get(second), **ways[second])
    if not small:
        name = best.removeprefix("uniform ").removesuffix(" autocast")
        autocast = name if best.endswith(" autocast") else None
        way = Way(name=best, precisions=everywhere(operators, name, device), autocast=autocast, captured=True)
        measuring.measure(way.label, plan=way)
