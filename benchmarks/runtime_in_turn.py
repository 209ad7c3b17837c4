"""Throughput of a hybrid cluster from one card: its partition and its whole are timed one after the other.

A step of the cluster is taken to last as long as that of its slower worker. What workers lose by waiting for each other
in an all-reduce is not in it, and the records say so.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from runtime_throughput import BATCHES, SMALL_BATCH, maker, rows, shares, timed
from runtime_training import Run, Worker

import qsync_opt
from qsync_opt.io import encode
from qsync_opt.runtimes.torch.job import JobModel, JobPlan, PlanningOptions, plan_job, uniform_times

NEAR = 1.5
"""Ways whose passes take more than so many times the fastest one's are not trained with."""
How = Mapping[str, dict[str, Any]]


class Cluster:
    """The workers of a cluster, of which one computes at a time."""

    def __init__(self, worker: Worker, name: str) -> None:
        small = worker.device.type == "cpu"
        self.worker = worker
        self.name = name
        self.label = name + (" (small)" if small else "")
        self.make, self.kwargs = maker(name, small=small)
        self.per_worker = SMALL_BATCH if small else BATCHES[name]
        self.kinds: dict[str, bool] = {}
        self.made: dict[str, JobModel] = {}

    def plan_each(self) -> None:
        """Let each worker plan for itself, which measures all that there is to measure; the slow one first."""
        for partition in (True, False):
            self.worker.become(partition=partition)
            kind = self.worker.kind
            self.kinds[kind] = partition
            with self.worker.compute():
                batch = rows(self.kwargs, self.per_worker, self.worker.device)
                began = time.perf_counter()
                plan = qsync_opt.auto_plan(
                    self.make().to(self.worker.device), batch, options=self.worker.options(self.name)
                )
            assert plan.model is not None
            self.made[kind] = plan.model
            self.worker.write(
                model=self.label,
                worker=kind,
                planning_s=time.perf_counter() - began,
                taken=plan.taken.get(kind),
                measured=dict(plan.measured),
                ways=[{**encode(mode), "precisions": None} for mode in plan.model.modes[kind]],
            )

    def job(self) -> JobModel:
        """The job of both workers, from what each of them measured."""
        models = list(self.made.values())
        devices = tuple(device for model in models for device in model.cluster.devices)
        return JobModel(
            graph=models[0].graph,
            profiles={name: profile for model in models for name, profile in model.profiles.items()},
            sensitivities={name: values for model in models for name, values in model.sensitivities.items()},
            cluster=replace(models[0].cluster, devices=devices),
            modes={name: modes for model in models for name, modes in model.modes.items()},
        )

    def step_s(self, kind: str, count: int, how: dict[str, Any]) -> float | None:
        """Seconds of a whole step of one worker; None where it has no room."""
        self.worker.become(partition=self.kinds[kind])
        with self.worker.compute():
            try:
                run = Run(self.worker, self.make, rows(self.kwargs, count, self.worker.device), **how)
                found = timed(run)
            except torch.cuda.OutOfMemoryError:
                return None
            run.close()
        return found

    def measure(self, label: str, how: How, counts: Mapping[str, int], **more: Any) -> dict[str, float | None]:
        """Train with a way on every worker, and write a record; seconds of a step by worker."""
        times = {kind: self.step_s(kind, counts[kind], how[kind]) for kind in self.kinds}
        known = [found for found in times.values() if found is not None]
        step_s = max(known) if len(known) == len(times) else None
        self.worker.write(
            model=self.label,
            configuration=label,
            samples_per_s=None if step_s is None else sum(counts.values()) / step_s,
            step_ms=None if step_s is None else 1e3 * step_s,
            workers=list(self.kinds),
            local_batches=[counts[kind] for kind in self.kinds],
            alone_ms=[None if found is None else 1e3 * found for found in times.values()],
            workers_in_turn=True,
            **more,
        )
        return times

    def measure_by_speed(self, label: str, how: How, times: Mapping[str, float | None], **more: Any) -> None:
        """The same with local batches for which all take as long, given the steps with equal ones."""
        total = self.per_worker * len(self.kinds)
        if None in times.values():
            return
        speeds = [1 / (times[kind] or 1.0) for kind in self.kinds]
        counts = dict(zip(self.kinds, shares(speeds, total), strict=True))
        steps = {kind: self.step_s(kind, counts[kind], how[kind]) for kind in self.kinds}
        if None not in steps.values():
            speeds = [counts[kind] / (steps[kind] or 1.0) for kind in self.kinds]
            counts = dict(zip(self.kinds, shares(speeds, total), strict=True))
        self.measure(f"local batches by speed, {label}", how, counts, **more)


def in_turn(worker: Worker, name: str) -> None:
    """Records of one model: the fastest single way, the plan, both with local batches by speed, then other ways."""
    cluster = Cluster(worker, name)
    cluster.plan_each()
    job, first = cluster.job(), next(iter(cluster.kinds))
    equal = dict.fromkeys(cluster.kinds, cluster.per_worker)
    passes = {label: found for label, found in uniform_times(job.modes, job.limits_bytes).items() if label != "TF32"}

    def how_of(label: str) -> How:
        return {kind: {"plan": mode} for kind in cluster.kinds for mode in job.modes[kind] if mode.name == label}

    def sensitivity_of(label: str) -> float:
        return sum(mode.sensitivity for modes in job.modes.values() for mode in modes if mode.name == label)

    def on_each(plan: JobPlan) -> How:
        return {kind: {"plan": replace(plan, device_type=kind)} for kind in cluster.kinds}

    best = min(passes, key=passes.__getitem__)
    times = cluster.measure(best, how_of(best), equal, sensitivity=sensitivity_of(best))
    plan = plan_job(job, first, PlanningOptions())
    told = {
        "predicted_ms": (plan.expected_ns or plan.iteration_ns) / 1e6,
        "taken": dict(plan.taken),
        "reason": plan.reason,
    }
    cluster.measure("plan", on_each(plan), equal, sensitivity=plan.sensitivity, **told)
    cluster.measure_by_speed(best, how_of(best), times, sensitivity=sensitivity_of(best))
    plan = plan_job(job, first, PlanningOptions(local_batches="by speed"))
    shared = {kind: 1 / share for kind, share in plan.shares.items()}
    cluster.measure_by_speed("plan", on_each(plan), shared, sensitivity=plan.sensitivity, taken=dict(plan.taken))
    for label, found in sorted(passes.items(), key=lambda entry: entry[1]):
        if label != best and found <= NEAR * passes[best]:
            cluster.measure(label, how_of(label), equal, sensitivity=sensitivity_of(label))
    if worker.device.type == "cuda":
        cluster.measure("TF32", {kind: {"tf32": True} for kind in cluster.kinds}, equal)
