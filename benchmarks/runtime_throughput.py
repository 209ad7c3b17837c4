"""Throughput on a hybrid cluster: plain ways, the plan, local batches sized by speed, and both together."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from runtime_training import Batch, Run, Worker, everywhere
from torch import nn

import qsync_opt
from qsync_opt.runtimes.torch.agreement import broadcast_json, gather_json
from qsync_opt.runtimes.torch.example_models import example
from qsync_opt.runtimes.torch.job_plan import JobPlan

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
