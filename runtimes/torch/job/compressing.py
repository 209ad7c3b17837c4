"""The compression of a job's gradients: sampled, timed on its links, planned on rank 0, and the same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from qsync_opt import solve
from qsync_opt.errors import ProblemError
from qsync_opt.gradients import (
    BucketStatistics,
    GradientCosts,
    Plan,
    Problem,
    SchemeTimes,
    build_problem,
    evaluate,
    uniform_plan,
)
from qsync_opt.io import format_time
from qsync_opt.runtimes.torch.ddp import broadcast_json, together, world
from qsync_opt.runtimes.torch.gradients import bucket_statistics, measure_schemes
from qsync_opt.runtimes.torch.job.measuring import Job
from qsync_opt.runtimes.torch.job.plan import JobPlan
from qsync_opt.runtimes.torch.support import model_unchanged
from qsync_opt.training import evaluate as evaluate_precisions
from qsync_opt.training import gradient_buckets

MENU = ("FP32", "BF16", "two8", "sum8", "packed8", "sum16")
"""Schemes that a job's buckets choose from; the paper's own and those of very few bits are for other uses."""
_SIZES = (1 << 10, 1 << 16, 1 << 20)
_REPEATS = 3


def with_compression(job: Job, plan: JobPlan) -> JobPlan:
    """The plan with schemes for the buckets of ``DistributedDataParallel``; every rank must call it.

    The iteration is made as short as it can be while the schemes' variance stays within a share
    (`PlanningOptions.noise_share`) of the noise that the workers' batches give the averaged gradient anyway. Buckets
    are those of DDP's default sizes.

    Raises:
        NotReadyError: Another rank failed, and the text repeats its error.
    """
    _, workers = world()
    if workers == 1:
        return replace(plan, compression_note="one worker has nothing to compress")
    buckets: list[list[str]] = broadcast_json(together(lambda: _buckets(plan)))
    gradients = together(lambda: _gradients(job, buckets))
    statistics = [bucket_statistics(gradient) for gradient in gradients]
    elements = [bucket.elements for bucket in statistics]
    sizes = sorted({*_SIZES, max(elements, default=0), min(elements, default=0)} - {0})
    times = measure_schemes(MENU, sizes, repeats=_REPEATS, device=job.example.device)
    sent = broadcast_json(together(lambda: _solved(job, plan, statistics, times)))
    if sent is None:
        return replace(plan, compression_note="the model has no gradients to reduce")
    costs = GradientCosts(statistics=tuple(statistics), times=times) if plan.model is not None else None
    return replace(plan, compression=Plan.from_json(sent["plan"]), compression_note=sent["note"], gradient_costs=costs)


def _buckets(plan: JobPlan) -> list[list[str]] | None:
    """Names of the parameters of each bucket, on rank 0."""
    if plan.model is None:
        return None
    return [list(bucket.parameters) for bucket in gradient_buckets(plan.model.graph)]


def _gradients(job: Job, buckets: Sequence[Sequence[str]]) -> list[Tensor]:
    """This worker's gradient of its batch, flat for each bucket."""
    named = dict(job.model.named_parameters())
    with model_unchanged(job.model):
        job.example.forward().backward()  # type: ignore[no-untyped-call]
        return [
            torch.cat(
                [
                    torch.zeros(named[name].numel(), device=named[name].device)
                    if (gradient := named[name].grad) is None
                    else gradient.detach().flatten().float()
                    for name in names
                ]
            )
            for names in buckets
        ]


def _solved(
    job: Job, plan: JobPlan, statistics: Sequence[BucketStatistics], times: SchemeTimes
) -> dict[str, object] | None:
    if plan.model is None or plan.problem is None or not statistics:
        return None
    problem = _problem(job, plan, statistics, times)
    solution = solve(problem)
    if solution.plan is None or solution.evaluation is None:
        raise ProblemError(f"there is no compression of this job's gradients: {solution.reason}")
    chosen = solution.plan
    plain = evaluate(problem, uniform_plan("FP32", chosen.elements or (), times.workers)).iteration_ns
    counts = {name: list(chosen.schemes.values()).count(name) for name in dict.fromkeys(chosen.schemes.values())}
    note = (
        f"{', '.join(f'{name} in {count}' for name, count in counts.items())} of {len(statistics)} buckets: an "
        f"iteration of {format_time(solution.evaluation.iteration_ns)} is predicted, {format_time(plain)} without "
        "compression"
    )
    return {"plan": chosen.to_json(), "note": note}


def _problem(job: Job, plan: JobPlan, statistics: Sequence[BucketStatistics], times: SchemeTimes) -> Problem:
    """When the slowest device type has each bucket ready under the plan of precisions, and what the schemes cost."""
    assert plan.model is not None
    assert plan.problem is not None
    evaluation = evaluate_precisions(plan.problem, plan.plan)
    ready_ns = [0] * len(statistics)
    operators = [bucket.operator for bucket in gradient_buckets(plan.model.graph)]
    for device in evaluation.devices.values():
        clock, done = device.forward_end_ns, {}
        for operator in reversed(device.operators):
            clock += operator.backward_total_ns
            done[operator.name] = clock
        ready_ns = [max(ready, done[name]) for ready, name in zip(ready_ns, operators, strict=True)]
    return build_problem(
        statistics,
        times,
        ready_ns,
        max(device.backward_end_ns for device in evaluation.devices.values()),
        name=plan.problem.name,
        tail_ns=plan.problem.optimizer_ns,
        noise_share=job.options.noise_share,
    )
