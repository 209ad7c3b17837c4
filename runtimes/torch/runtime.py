"""PyTorch as a registered runtime."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from qsync_opt.costs import DeviceProfile
from qsync_opt.model import OpGraph
from qsync_opt.numerics import PrecisionFormats
from qsync_opt.runtimes.torch.capture import capture, capture_model
from qsync_opt.runtimes.torch.execution import (
    ApplyOptions,
    DevicePlans,
    apply,
    device_formats,
    operator_precisions,
    undo,
)
from qsync_opt.runtimes.torch.profiling import profile


class TorchRuntime:
    """Plans for PyTorch models, on ``cpu`` and ``cuda``."""

    name = "torch"
    trains = True

    def capture(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> OpGraph:
        """Operators of one training forward pass; see `capture`."""
        return capture(model, args, kwargs)

    def device_formats(self, device: torch.device | str) -> dict[str, PrecisionFormats]:
        """Precisions of a device with their border formats; see `execution.device_formats`."""
        return device_formats(device)

    def operator_precisions(self, op_type: str, device: torch.device | str) -> tuple[str, ...]:
        """Precisions in which a kind of operator can run; see `execution.operator_precisions`."""
        return operator_precisions(op_type, device)

    def profile(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None = None,
        *,
        device: torch.device | str = "cpu",
        precisions: Sequence[str] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        repeats: int = 6,
        name: str | None = None,
    ) -> DeviceProfile:
        """Capture a model and measure it; see `profile`, which can also measure whole iterations."""
        return profile(
            capture_model(model, args, kwargs),
            device,
            precisions=precisions,
            cache_dir=cache_dir,
            repeats=repeats,
            name=name,
            progress=False,
        )

    def apply(
        self,
        model: nn.Module,
        plan: Mapping[str, str] | DevicePlans,
        device_type: str | None = None,
        *,
        graph: OpGraph | None = None,
        options: ApplyOptions | None = None,
    ) -> nn.Module:
        """Make a model run under a plan; see `apply`."""
        return apply(model, plan, device_type, graph=graph, options=options)

    def undo(self, model: nn.Module) -> nn.Module:
        """Take the plan off again; see `undo`."""
        return undo(model)
