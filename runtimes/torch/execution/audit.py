"""Compares the first training steps under a plan with its predictions."""

from __future__ import annotations

import logging
import statistics
from typing import Any

import torch
from torch import nn

from qsync_opt.runtimes.torch.support import first_device, intervals_ns, is_capturing, time_mark

_LOGGER = logging.getLogger(__name__)
_TOLERANCE = 0.15
"""Relative error of the iteration time from which on the log warns."""


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
        self._predicted_ns = predicted_ns
        self._predicted_bytes = predicted_bytes
        self._skipped = warm_up
        self._steps = steps
        self._marks: list[Any] = []
        self._device = first_device(model)
        self._handle: Any = model.register_forward_pre_hook(self._mark)

    def stop(self) -> None:
        """Stop watching; without enough steps there is no result."""
        self._handle.remove()
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
        measured_ns = statistics.median(spans)
        level = logging.INFO if abs(self._predicted_ns / measured_ns - 1) <= _TOLERANCE else logging.WARNING
        text = self.describe(self._predicted_ns, measured_ns, len(spans), self._predicted_bytes, peak)
        _LOGGER.log(level, "audit of the plan: %s", text)

    @staticmethod
    def describe(
        predicted_ns: float, measured_ns: float, steps: int, predicted_bytes: int | None, measured_bytes: int | None
    ) -> str:
        """Iteration time and, if it was both predicted and measured, peak memory, in a line for the log."""
        text = (
            f"iteration predicted {predicted_ns / 1e6:.2f} ms, measured {measured_ns / 1e6:.2f} ms "
            f"({predicted_ns / measured_ns - 1:+.1%}, median of {steps} steps)"
        )
        if predicted_bytes is not None and measured_bytes is not None:
            text += (
                f"; memory predicted {predicted_bytes / 2**20:.0f} MiB, measured {measured_bytes / 2**20:.0f} MiB "
                f"({predicted_bytes / measured_bytes - 1:+.1%})"
            )
        return text
