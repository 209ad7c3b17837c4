"""Compares the first training steps under a plan with its predictions."""

from __future__ import annotations

import logging
import statistics
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from qsync_opt.io import check_integer
from qsync_opt.runtimes.torch.support import intervals_ns, is_capturing, time_mark

_LOGGER = logging.getLogger(__name__)
_TOLERANCE = 0.15
"""Relative error of the iteration time from which on the log warns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditResult:
    """Predicted and measured iteration time in nanoseconds (median), and peak memory in bytes.

    Memory is None if it was not measured (on a CPU), or not predicted for steps as they are.
    """

    predicted_ns: int
    measured_ns: int
    predicted_bytes: int | None
    measured_bytes: int | None
    steps: int

    @property
    def time_error(self) -> float:
        """Predicted relative to measured time, minus 1."""
        return self.predicted_ns / self.measured_ns - 1

    def describe(self) -> str:
        """One line for the log."""
        text = (
            f"iteration predicted {self.predicted_ns / 1e6:.2f} ms, measured {self.measured_ns / 1e6:.2f} ms "
            f"({self.time_error:+.1%}, median of {self.steps} steps)"
        )
        if self.measured_bytes is None or self.predicted_bytes is None:
            return text
        error = self.predicted_bytes / self.measured_bytes - 1
        return (
            f"{text}; memory predicted {self.predicted_bytes / 2**20:.0f} MiB, "
            f"measured {self.measured_bytes / 2**20:.0f} MiB ({error:+.1%})"
        )


class StepAudit:
    """Times a model's first training steps, logs the result and removes itself.

    A step lasts from the beginning of one training pass to the beginning of the next, so that it includes the backward
    pass, the all-reduce, the optimizer and the data loader. With gradient accumulation it is one micro-step. The device
    is waited for once, at the end.
    """

    def __init__(
        self, model: nn.Module, *, predicted_ns: int, predicted_bytes: int | None, steps: int = 20, warm_up: int = 5
    ) -> None:
        """Begin to watch the passes of ``model`` in training mode with gradients, ``steps`` after some warm-up.

        ``predicted_ns`` is the time of one iteration of the job; ``predicted_bytes`` the peak on this worker, None if
        memory is not to be measured.
        """
        check_integer(steps, "steps", minimum=1)
        check_integer(warm_up, "warm_up")
        self.result: AuditResult | None = None
        self._predicted_ns = predicted_ns
        self._predicted_bytes = predicted_bytes
        self._skipped = warm_up
        self._steps = steps
        self._marks: list[Any] = []
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._handle: Any = model.register_forward_pre_hook(self._mark)

    def stop(self) -> None:
        """Stop watching; without enough steps there is no result."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        self._marks = []

    def _mark(self, module: nn.Module, _: tuple[Any, ...]) -> None:
        if not (module.training and torch.is_grad_enabled()) or torch.compiler.is_compiling():
            return
        on_cuda = self._device.type == "cuda"
        if on_cuda and is_capturing():
            return
        if self._skipped:
            self._skipped -= 1
            return
        if on_cuda and not self._marks:
            torch.cuda.reset_peak_memory_stats(self._device)
        self._marks.append(time_mark(self._device))
        if len(self._marks) > self._steps:
            self._finish()

    def _finish(self) -> None:
        peak = None
        if self._device.type == "cuda":
            self._marks[-1].synchronize()
            if self._predicted_bytes is not None:
                peak = torch.cuda.max_memory_allocated(self._device)
        spans = intervals_ns(self._marks)
        self.stop()
        self.result = AuditResult(
            predicted_ns=self._predicted_ns,
            measured_ns=round(statistics.median(spans)),
            predicted_bytes=self._predicted_bytes,
            measured_bytes=peak,
            steps=len(spans),
        )
        level = logging.INFO if abs(self.result.time_error) <= _TOLERANCE else logging.WARNING
        _LOGGER.log(level, "audit of the plan: %s", self.result.describe())
