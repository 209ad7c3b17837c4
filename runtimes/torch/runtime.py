"""PyTorch as a registered runtime."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

import qsync_opt.runtimes.torch.capture as capturing
import qsync_opt.runtimes.torch.execution as execution
from qsync_opt.costs import DeviceProfile
from qsync_opt.runtimes.torch.profiling import profile


class TorchRuntime:
    """Plans for PyTorch models, on ``cpu`` and ``cuda``."""

    name = "torch"
    trains = True
    capture = staticmethod(capturing.capture)
    device_formats = staticmethod(execution.device_formats)
    operator_precisions = staticmethod(execution.operator_precisions)
    apply = staticmethod(execution.apply)
    undo = staticmethod(execution.undo)

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
            capturing.capture_model(model, args, kwargs),
            device,
            precisions=precisions,
            cache_dir=cache_dir,
            repeats=repeats,
            name=name,
            progress=False,
        )
