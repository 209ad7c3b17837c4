"""Trial iterations of a plan, to measure whether it fits into memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from qsync_opt.errors import UnsupportedError, first_line
from qsync_opt.kernels import KernelOptions
from qsync_opt.model import OpGraph
from qsync_opt.runtimes.plans import DevicePlans
from qsync_opt.runtimes.torch.execution import under_plan
from qsync_opt.runtimes.torch.support import TrainingExample, allocation_of, model_unchanged, resident_bytes


def try_plan(
    example: TrainingExample,
    plan: Mapping[str, str] | DevicePlans,
    graph: OpGraph | None,
    kernels: KernelOptions,
    **options: Any,
) -> int | None:
    """Run one forward and backward pass under a plan and leave the model unchanged.

    Args:
        example: Model, batch and loss.
        plan: Of the job, or operator to precision.
        graph: The captured graph, if it is known.
        kernels: Rounding and granularity.
        options: Those of `ApplyOptions` beside the kernels'.

    Returns:
        Peak memory in bytes, parameters included, without the optimizer's state and the all-reduce buckets; None if
        memory ran out.

    Raises:
        UnsupportedError: An operation of the model, or of the loss, refuses what the plan gives it.
    """
    model = example.model
    with model_unchanged(model), under_plan(model, plan, graph, kernels, **options):
        try:
            _, allocation = allocation_of(example.run, example.device)
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            return None
        except RuntimeError as failure:
            raise UnsupportedError(
                f"the model does not run under its plan ({first_line(failure)}): cast the inputs of the operation "
                "that refuses them up in the model (.float()), or plan without the precision "
                "(PlanningOptions(precisions=...))"
            ) from failure
    return resident_bytes(model) + allocation.peak_bytes
