"""Profile a captured model on a device: every operator in every precision, casts, optimizer, whole iterations."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from qsync_opt.costs.profile import DeviceProfile
from qsync_opt.errors import ModelError, UnsupportedError
from qsync_opt.io.cache import MeasurementCache
from qsync_opt.io.codec import check_integer
from qsync_opt.io.progress import Report, reporting
from qsync_opt.kernels import backend
from qsync_opt.kernels.options import KernelOptions
from qsync_opt.model.graph import OpGraph
from qsync_opt.numerics.formats import PrecisionFormats
from qsync_opt.runtimes.torch.capture.calls import RecordedCall
from qsync_opt.runtimes.torch.execution.capabilities import device_formats
from qsync_opt.runtimes.torch.profiling.profile_run import ProfileRun, option_values
from qsync_opt.runtimes.torch.profiling.uniform_iterations import measure_uniform
from qsync_opt.runtimes.torch.support.identity import identify
from qsync_opt.runtimes.torch.support.iteration import TrainingExample
from qsync_opt.runtimes.torch.support.timing import make_stopwatch
from qsync_opt.training.calibration import calibrate


class Captured(Protocol):
    """What is profiled: a graph, and the call of each of its operators (a ``CapturedModel`` has both)."""

    @property
    def graph(self) -> OpGraph:
        """The operators."""

    @property
    def calls(self) -> Mapping[str, RecordedCall]:
        """Operator to recorded call."""


METHOD = 1
"""Version of the way of measuring; measurements made in another way are not taken from the cache."""


def profile(
    captured: Captured,
    device: torch.device | str = "cpu",
    *,
    precisions: Sequence[str] | None = None,
    options: KernelOptions | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    example: TrainingExample | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: Report | bool | None = None,
    repeats: int = 6,
    name: str | None = None,
) -> DeviceProfile:
    """Measure a captured model on a device.

    Operators of equal signature are measured once. With a cache folder, what was measured before on an equal device,
    by this or any other process, is not measured again; a run that was interrupted goes on where it stopped.

    Args:
        captured: The model, by `capture`.
        device: ``cpu`` or a CUDA device. Set the number of threads before (`torch.set_num_threads`).
        precisions: Those that plans may use; None: all of the device. FP32 is always among them.
        options: Of the 8-bit kernels; as they will be used in training.
        optimizer: Whose step to time, over the model's parameters; a copy is stepped. None: AdamW.
        example: The model with a batch. With it whole iterations are run in each precision, and what an iteration
            costs beyond its operators is fitted to them (`qsync_opt.training.calibration`). Parameters and buffers are
            not changed. Without it that overhead is left at zero.
        cache_dir: Folder of measurements; None keeps none.
        progress: True shows a bar on standard error, None does so if that is a terminal, False shows nothing; or a
            function that is called with (done, total, what comes next).
        repeats: Runs per round; there are rounds until two agree (`qsync_opt.runtimes.timing`).
        name: Of the device, where that of the hardware does not tell it from others (a partition of a card).

    Returns:
        The profile; ``profile.save(path)`` writes it.

    Raises:
        UnsupportedError: The device has no such precision, is neither cpu nor cuda, or is not there.
        ModelError: What is given is no captured model, or an operator cannot run by itself.
        ProblemError: The cache folder cannot be used.

    Source: QSync profiles whole runs per precision and matches names (IPDPS 2024); measuring each operator by itself,
        with casts apart and a fitted overhead, is ours.
    """
    if not hasattr(captured, "calls"):
        raise ModelError(
            f"captured is a {type(captured).__name__}, but the calls of all operators are needed: give what "
            "capture_model returns"
        )
    device = backend.known_device(device)
    formats = wanted_formats(device, precisions)
    check_integer(repeats, "repeats", minimum=1)
    options = dataclasses.replace(options or KernelOptions(), half_format=backend.half_format(device))
    identity = identify(device, name)
    environment = {
        "device": identity.to_json(),
        "options": option_values(options),
        "method": METHOD,
        "repeats": repeats,
    }
    run = ProfileRun(
        graph=captured.graph,
        calls=captured.calls,
        device=device,
        formats=formats,
        options=options,
        stopwatch=make_stopwatch(device),
        repeats=repeats,
        cache=MeasurementCache(cache_dir, environment),
    )
    tasks = run.tasks()
    total = len(tasks) + 1 + (example is not None)
    with reporting(progress, "profile") as report:
        for done, task in enumerate(tasks):
            report(done, total, task.label)
            run.do(task)
        report(len(tasks), total, "optimizer")
        result = run.assemble(identity, run.optimizer(optimizer))
        if example is not None:
            report(len(tasks) + 1, total, "whole iterations")
            measured = measure_uniform(example, result, captured.graph, options, repeats)
            result = calibrate(captured.graph, result, measured)
        report(total, total, "done")
    return result


def wanted_formats(device: torch.device, precisions: Sequence[str] | None) -> dict[str, PrecisionFormats]:
    """Formats to profile: those asked for (None: all of the device), FP32, and what 8-bit operators answer in.

    Raises:
        UnsupportedError: The device lacks a precision.
    """
    available = device_formats(device)
    if precisions is None:
        return available
    for precision in precisions:
        if precision not in available:
            raise UnsupportedError(f"{device} cannot run in {precision!r}: allowed are {', '.join(available)}")
    needed = {*precisions, "FP32"}
    needed |= {available[precision].output for precision in needed}
    return {precision: borders for precision, borders in available.items() if precision in needed}
