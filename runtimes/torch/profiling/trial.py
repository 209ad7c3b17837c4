"""Trial iterations of a plan, to measure whether it fits into memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from qsync_opt.errors import UnsupportedError, first_line
from qsync_opt.kernels import KernelOptions
from qsync_opt.model import OpGraph
from qsync_opt.runtimes.plans import DevicePlans
from qsync_opt.runtimes.torch.execution import ApplyOptions, apply, undo
from qsync_opt.runtimes.torch.support import TrainingExample, allocation_of, model_unchanged, resident_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Peak memory of one forward and backward pass, parameters included; or that memory ran out."""

    peak_bytes: int
    out_of_memory: bool

    def exceeds(self, limit_bytes: int) -> bool:
        """Whether the plan does not fit into a limit."""
        return self.out_of_memory or self.peak_bytes > limit_bytes

    def to_json(self) -> dict[str, Any]:
        """As plain JSON data."""
        return {"peak_bytes": self.peak_bytes, "out_of_memory": self.out_of_memory}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Trial:
        """Read what `to_json` wrote."""
        return cls(peak_bytes=int(data["peak_bytes"]), out_of_memory=bool(data["out_of_memory"]))


def try_plan(
    model: nn.Module, example: TrainingExample, plan: DevicePlans, graph: OpGraph, kernels: KernelOptions
) -> Trial:
    """Run one forward and backward pass under a plan and leave the model unchanged.

    The peak excludes the optimizer's state and the all-reduce buckets. Running out of memory is a result, not an
    exception.

    Raises:
        UnsupportedError: An operation of the model, or of the loss, refuses what the plan gives it.
    """
    device = example.device

    def iterate() -> None:
        example.forward().backward()  # type: ignore[no-untyped-call]

    with model_unchanged(model):
        apply(model, plan, graph=graph, options=ApplyOptions(kernels=kernels))
        try:
            _, allocation = allocation_of(iterate, device)
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            return Trial(peak_bytes=0, out_of_memory=True)
        except RuntimeError as failure:
            raise UnsupportedError(
                f"the model does not run under its plan ({first_line(failure)}): cast the inputs of the operation "
                "that refuses them up in the model (.float()), or plan without the precision "
                "(PlanningOptions(precisions=...))"
            ) from failure
        finally:
            undo(model)
    return Trial(peak_bytes=resident_bytes(model) + allocation.peak_bytes, out_of_memory=False)
