"""What a later start must have in common with this one, and what ranks must agree on before they wait."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import qsync_opt
from qsync_opt.runtimes.torch.ddp.agreement import together
from qsync_opt.runtimes.torch.job.file import save_job
from qsync_opt.runtimes.torch.job.job_sensitivities import job_indicator
from qsync_opt.runtimes.torch.job.measuring import DeviceTypes, Job
from qsync_opt.runtimes.torch.job.options import PlanningOptions
from qsync_opt.runtimes.torch.job.plan import JobPlan


def steering(options: PlanningOptions) -> dict[str, Any]:
    """Options by which ranks wait for each other: all must go the same way."""
    names = ("compare", "compiled", "capture", "local_batches", "trial")
    return {**{name: getattr(options, name) for name in names}, "job_file": options.job_file is not None}


def job_facts(job: Job) -> dict[str, Any]:
    """What two starts must have in common for one to use the other's measurements."""
    leaves = tree_leaves((job.example.args, dict(job.example.kwargs)))
    return {
        "versions": {"qsync_opt": qsync_opt.__version__, "torch": torch.__version__},
        "parameters": [[name, list(p.shape), p.requires_grad] for name, p in job.model.named_parameters()],
        "compiled": job.options.compiled,
        "indicator": str(job_indicator(job)),
        "batch": [[str(x.dtype), list(x.shape)] for x in leaves if isinstance(x, torch.Tensor)],
        "kernels": {
            field.name: getattr(job.options.kernels, field.name)
            for field in dataclasses.fields(job.options.kernels)
            if field.name not in ("seed", "offset", "step")
        },
    }


def keep_job(job: Job, plan: JobPlan, types: DeviceTypes) -> None:
    """Write the job file, with what the trials left of the memory and what it was before them."""
    path, made = job.options.job_file, plan.model
    if path is None:
        return
    facts = {**job_facts(job), "memory_bytes": dict(types.memory_bytes)}
    together(lambda: None if made is None else save_job(made, path, facts))
