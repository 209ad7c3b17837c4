"""Does a device wait for its host? Said before a job starts, with what helps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import torch

from qsync_opt.kernels.options import KernelOptions
from qsync_opt.model.graph import OpGraph
from qsync_opt.runtimes.torch.ddp.agreement import gather_json, together
from qsync_opt.runtimes.torch.execution.plans import ApplyOptions, DevicePlans, apply, undo
from qsync_opt.runtimes.torch.job.measuring import DeviceTypes, Job
from qsync_opt.runtimes.torch.job.plan import JobPlan
from qsync_opt.runtimes.torch.support.iteration import TrainingExample
from qsync_opt.runtimes.torch.support.unchanged import model_unchanged

_PASSES = 3


def host_share(
    example: TrainingExample, plan: Mapping[str, str] | DevicePlans, graph: OpGraph | None, kernels: KernelOptions
) -> float | None:
    """Share of a forward and backward pass under a plan in which the host still launches; None without a card.

    Near 1 the device has done everything by the time that the host has launched it: it waits for the host. Parameters,
    gradients, buffers and random state are put back.
    """
    if example.device.type != "cuda":
        return None
    shares = []
    with model_unchanged(example.model):
        apply(example.model, plan, graph=graph, options=ApplyOptions(kernels=kernels))
        try:
            for _ in range(1 + _PASSES):
                torch.cuda.synchronize(example.device)
                begin = time.perf_counter()
                example.forward().backward()  # type: ignore[no-untyped-call]
                launched = time.perf_counter()
                torch.cuda.synchronize(example.device)
                shares.append((launched - begin) / (time.perf_counter() - begin))
                example.model.zero_grad()
        finally:
            undo(example.model)
    return statistics.median(shares[1:])


def with_host_shares(job: Job, plan: JobPlan, graph: OpGraph | None, types: DeviceTypes) -> JobPlan:
    """The plan with the largest share of each device type's workers; every rank must call it.

    A plan that is not worth applying, and one that was not tried, stays as it is.
    """
    if not (job.options.trial and plan.worthwhile):
        return plan
    found = gather_json(together(lambda: host_share(job.example, plan, graph, job.options.kernels)))
    shares: Mapping[str, float] = {
        name: max(known)
        for name, ranks in types.ranks.items()
        if (known := [found[rank] for rank in ranks if found[rank] is not None])
    }
    return replace(plan, host_shares=MappingProxyType(dict(shares)))
