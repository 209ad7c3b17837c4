"""Throughput on a hybrid cluster: plain ways, the plan, local batches sized by speed, and both together.

With two workers these train together. With one card its whole and its partition are timed one after the other, and a
step of the cluster is taken to last as long as that of the slower: what it waits for the other in an all-reduce is not
in it, and the records say so.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from runtime_training import Batch, Run, Worker, everywhere
from torch import nn

import qsync_opt
from qsync_opt.runtimes.torch.agreement import broadcast_json, gather_json
from qsync_opt.runtimes.torch.example_models import example
from qsync_opt.runtimes.torch.job_options import PlanningOptions
from qsync_opt.runtimes.torch.job_plan import JobModel, JobPlan
from qsync_opt.runtimes.torch.planning import plan_job

BATCHES = {"bert-base": 32, "gpt2": 32, "resnet50": 64, "vit-base": 32}
BLOCK_S, BLOCKS = 0.4, 3
"""Seconds of steps that are timed together, and how often; the median counts."""
SMALL_BATCH = 4  # of the small models that stand for these on a CPU


def rows(kwargs: Mapping[str, Any], count: int, device: torch.device) -> Batch:
    """A batch of so many samples, from an example's."""
    return {name: x[torch.arange(count) % len(x)].to(device) for name, x in kwargs.items()}


def shares(speeds: list[float], total: int) -> list[int]:
    """Whole samples per worker, as their speeds are, none without any; together ``total``."""
    found = [max(1, round(total * speed / sum(speeds))) for speed in speeds]
    found[found.index(max(found))] += total - sum(found)
    return found


def timed(run: Run) -> float:
    """Seconds of a step: median of some blocks."""
    steps = broadcast_json(max(2, min(20, int(BLOCK_S / run.timed(2)))))
    return statistics.median(run.timed(steps) for _ in range(BLOCKS))


def maker(name: str, *, small: bool) -> tuple[Callable[[], nn.Module], Mapping[str, Any]]:
    """What builds the model again and again, with the same weights, and a batch of few samples."""
    torch.manual_seed(0)
    chosen = example(name, small=small)
    return lambda: copy.deepcopy(chosen.model), chosen.kwargs


def throughput(worker: Worker, name: str) -> None:
    """Every plain way first, then the plan: a record as soon as it is there, sensitivities in one of their own."""
    small = worker.device.type == "cpu"
    make, kwargs = maker(name, small=small)
    per_worker = SMALL_BATCH if small else BATCHES[name]
    total = per_worker * worker.world
    label_of_model = name + (" (small)" if small else "")
    batch = rows(kwargs, per_worker, worker.device)
    speeds: dict[str, float] = {}

    def measure(label: str, counts: list[int] | None = None, **how: Any) -> None:
        """Samples per second; where it does not run, a record that says why."""
        local = batch if counts is None else rows(kwargs, counts[worker.rank], worker.device)
        weight = 1.0 if counts is None else worker.world * counts[worker.rank] / total
        said, seconds, alone = "", 0.0, 0.0
        run = None
        try:
            run = Run(worker, make, local, weight=weight, **how)
            alone = run.alone_s(3)
        except (torch.cuda.OutOfMemoryError, qsync_opt.QSyncError) as failure:
            said = f"rank {worker.rank}: {str(failure).splitlines()[0][:120]}"
        failed = [text for text in gather_json(said) if text]
        peaks: list[int] = []
        if not failed and run is not None:
            seconds, peaks = timed(run), run.peaks()
        speeds[label] = total / seconds if seconds else 0.0
        worker.write(
            model=label_of_model,
            configuration=label,
            samples_per_s=speeds[label] or None,
            step_ms=1e3 * seconds or None,
            local_batches=counts or [per_worker] * worker.world,
            alone_ms=[1e3 * t for t in gather_json(alone)],
            peak_bytes=peaks or None,
            failure="; ".join(failed) or None,
        )
        if run is not None:
            run.close()

    def by_speed(**how: Any) -> list[int]:
        """Local batches for which all workers take as long, found in two rounds."""
        counts = [per_worker] * worker.world
        for _ in range(2):
            run = Run(worker, make, rows(kwargs, counts[worker.rank], worker.device), **how)
            found = [n / t for n, t in zip(counts, gather_json(run.alone_s(5)), strict=True)]
            run.close()
            counts = broadcast_json(shares(found, total))
        return counts

    ways: dict[str, dict[str, Any]] = {"FP32": {}}
    if not small:
        ways["TF32"] = {"tf32": True}
        ways["FP16 autocast"] = {"autocast": torch.float16}
    ways["BF16 autocast"] = {"autocast": torch.bfloat16}
    for precision in ("INT8",) if small else ("INT8", "FP8"):
        ways[f"uniform {precision}"] = {"plan": everywhere(make().to(worker.device), batch, precision, worker.device)}
    for label, how in ways.items():
        measure(label, **how)
    best = broadcast_json(max(ways, key=lambda label: speeds[label]))
    measure(f"local batches by speed, {best}", by_speed(**ways[best]), **ways[best])
    began = time.perf_counter()
    plan: JobPlan = qsync_opt.auto_plan(make().to(worker.device), batch, options=worker.options(name))
    told = {
        "planning_s": time.perf_counter() - began,
        "predicted_ms": (plan.expected_ns or plan.iteration_ns) / 1e6,
        "taken": dict(plan.taken),
        "measured": dict(plan.measured),
        "reason": plan.reason,
    }
    found = {**{other.name: other.sensitivity for other in plan.alternatives}, "plan": plan.sensitivity}
    worker.write(model=label_of_model, sensitivities=found, **told)
    measure("plan", plan=plan)
    # Nobody waits now, so that another plan is best; it is solved from what was measured.
    options = worker.options(name, local_batches="by speed")
    plan = qsync_opt.auto_plan(make().to(worker.device), batch, options=options)
    measure("local batches by speed, plan", by_speed(plan=plan), plan=plan)


def in_turn(worker: Worker, name: str) -> None:
    """The same on one card: the partition first, then the whole card, and what a cluster of both would take."""
    small = worker.device.type == "cpu"
    make, kwargs = maker(name, small=small)
    per_worker = SMALL_BATCH if small else BATCHES[name]
    label_of_model = name + (" (small)" if small else "")
    batch = rows(kwargs, per_worker, worker.device)
    made: dict[str, JobModel] = {}
    kinds: dict[str, bool] = {}
    for partition in (True, False):
        worker.become(partition=partition)
        kinds[worker.kind] = partition
        with worker.compute():
            began = time.perf_counter()
            plan = qsync_opt.auto_plan(make().to(worker.device), batch, options=worker.options(name))
            worker.write(
                model=label_of_model,
                worker=worker.kind,
                planning_s=time.perf_counter() - began,
                taken=plan.taken.get(worker.kind),
                measured=dict(plan.measured),
                ways=[
                    {**way.to_json(), "precisions": None, "pass_ms": way.pass_ns / 1e6}
                    for way in (plan.model.ways[worker.kind] if plan.model else ())
                ],
            )
            if plan.model is not None:
                made[worker.kind] = plan.model
    cluster = _together(made)
    options = PlanningOptions()
    plans = {kind: plan_job(cluster, kind, options) for kind in made}
    balanced = {kind: plan_job(cluster, kind, replace(options, local_batches="by speed")) for kind in made}
    chosen = next(iter(plans.values()))

    def seconds_of(kind: str, count: int, **how: Any) -> float | None:
        """Of a whole step of one worker; None where it has no room."""
        worker.become(partition=kinds[kind])
        with worker.compute():
            try:
                run = Run(worker, make, rows(kwargs, count, worker.device), **how)
                found = timed(run)
            except torch.cuda.OutOfMemoryError:
                return None
            run.close()
        return found

    def measure(label: str, how: Mapping[str, dict[str, Any]], counts: Mapping[str, int], **more: Any) -> float:
        times = {kind: seconds_of(kind, counts[kind], **how[kind]) for kind in how}
        known = [time for time in times.values() if time is not None]
        step_s = max(known) if len(known) == len(times) else 0.0
        total = sum(counts.values())
        worker.write(
            model=label_of_model,
            configuration=label,
            samples_per_s=total / step_s if step_s else None,
            step_ms=1e3 * step_s or None,
            local_batches=[counts[kind] for kind in kinds],
            workers=list(kinds),
            alone_ms=[None if times[kind] is None else 1e3 * times[kind] for kind in kinds],  # type: ignore[operator]
            workers_in_turn=True,
            **more,
        )
        return total / step_s if step_s else 0.0

    equal = dict.fromkeys(kinds, per_worker)
    ways: dict[str, tuple[float | None, dict[str, dict[str, Any]]]] = {}
    if not small:
        ways["TF32"] = (None, {kind: {"tf32": True} for kind in kinds})
    for first in made[next(iter(made))].ways[next(iter(made))]:
        found = {kind: way for kind in kinds for way in cluster.ways[kind] if way.name == first.name}
        if first.name not in ("plan", "TF32"):
            total = sum(way.sensitivity for way in found.values())
            ways[first.name] = (total, {kind: {"plan": way} for kind, way in found.items()})
    speeds = {label: measure(label, how, equal, sensitivity=sensitivity) for label, (sensitivity, how) in ways.items()}
    measure(
        "plan",
        {kind: {"plan": plans[kind]} for kind in kinds},
        equal,
        sensitivity=chosen.sensitivity,
        predicted_ms=(chosen.expected_ns or chosen.iteration_ns) / 1e6,
        taken=dict(chosen.taken),
        reason=chosen.reason,
    )
    best = max(speeds, key=speeds.__getitem__)
    other = next(iter(balanced.values()))
    for label, how, sensitivity in (
        (best, ways[best][1], ways[best][0]),
        ("plan", {kind: {"plan": balanced[kind]} for kind in kinds}, other.sensitivity),
    ):
        counts = dict(equal)
        for _ in range(2):
            found_s = {kind: seconds_of(kind, counts[kind], **how[kind]) or 1e9 for kind in kinds}
            counts = dict(
                zip(kinds, shares([counts[k] / found_s[k] for k in kinds], per_worker * len(kinds)), strict=True)
            )
        more = {"taken": dict(other.taken)} if label == "plan" else {}
        measure(f"local batches by speed, {label}", how, counts, sensitivity=sensitivity, **more)


def _together(made: Mapping[str, JobModel]) -> JobModel:
    """The job of both workers, from what each of them measured."""
    first = next(iter(made.values()))
    devices = tuple(device for model in made.values() for device in model.cluster.devices)
    return JobModel(
        graph=first.graph,
        profiles={name: profile for model in made.values() for name, profile in model.profiles.items()},
        sensitivities={name: values for model in made.values() for name, values in model.sensitivities.items()},
        cluster=replace(first.cluster, devices=devices),
        ways={name: ways for model in made.values() for name, ways in model.ways.items()},
    )
