"""What `apply` takes: a plan for one or more device types, and how it is carried out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch

from qsync_opt.errors import ModelError, UnsupportedError
from qsync_opt.kernels.options import KernelOptions

AUTOCAST_TYPES = {"BF16": torch.bfloat16, "FP16": torch.float16}
"""What ``torch.autocast`` is told for a precision."""


@runtime_checkable
class DevicePlans(Protocol):
    """Anything that holds, per device type, the precision of each operator (a ``Plan`` does)."""

    @property
    def devices(self) -> Mapping[str, Mapping[str, str]]:
        """Device type to operator to precision."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyOptions:
    """How a plan is carried out.

    Attributes:
        kernels: Rounding, granularity and backend of 8-bit operators. Seed and offset in it are starting points: every
            operator, pass and rank has its own stream. ``half_format`` is replaced by the device's.
        evaluate_in: ``"plan"``: a model in evaluation mode obeys the plan too, rounding to nearest, so that equal
            inputs give equal results. ``"FP32"``: it runs in FP32, as the plain model would.
        rank: Which stream of random bits this worker uses; None: the rank in the default process group, 0 without
            one. Workers with different streams make independent rounding errors, which average out.
        autocast: ``"BF16"`` or ``"FP16"`` for a plan that has this precision alone: the forward pass runs under
            ``torch.autocast`` and its operators are not told apart, so that it takes as long as plain mixed precision.
            None: operator by operator. A `JobPlan` says it by itself.
        captured: Capture the first training pass in CUDA graphs and replay it from then on, as `graphed` does. A
            `JobPlan` says it by itself.
        outputs: ``"FP32"``: what the model, or a module of it that the script calls by itself, returns in 16 bits is
            cast up, so that losses and metrics outside of the model compute as they did before; unless the model
            returns its own loss. ``"plan"``: it comes as the last operators made it.

    Raises:
        UnsupportedError: ``evaluate_in``, ``autocast`` or ``outputs`` is something else.
    """

    kernels: KernelOptions = field(default_factory=KernelOptions)
    evaluate_in: str = "plan"
    rank: int | None = None
    autocast: str | None = None
    captured: bool = False
    outputs: str = "FP32"

    def __post_init__(self) -> None:
        if self.evaluate_in not in ("plan", "FP32"):
            raise UnsupportedError(f"option evaluate_in={self.evaluate_in!r}: allowed are plan, FP32")
        if self.outputs not in ("plan", "FP32"):
            raise UnsupportedError(f"option outputs={self.outputs!r}: allowed are plan, FP32")
        if self.autocast not in (None, *AUTOCAST_TYPES):
            raise UnsupportedError(
                f"option autocast={self.autocast!r}: allowed are {', '.join(AUTOCAST_TYPES)} and None"
            )


def of_device_type(plan: Mapping[str, str] | DevicePlans, device_type: str | None) -> dict[str, str]:
    """Operator to precision on one device type, which need not be named where there is one only.

    Raises:
        ModelError: The plan has no such device type, several to choose from, or is no plan.
    """
    if not isinstance(plan, DevicePlans):
        if not isinstance(plan, Mapping) or not all(isinstance(text, str) for entry in plan.items() for text in entry):
            raise ModelError(
                f"the plan is a {type(plan).__name__}: a Plan is needed, or a mapping of texts, operator to precision"
            )
        return dict(plan)
    known = ", ".join(plan.devices)
    if device_type is None:
        if len(plan.devices) != 1:
            raise ModelError(f"the plan has several device types ({known}): say which one with device_type")
        return dict(next(iter(plan.devices.values())))
    if device_type not in plan.devices:
        raise ModelError(f"the plan has no device type {device_type!r}: it has {known}")
    return dict(plan.devices[device_type])
