"""ONNX Runtime behind the common interface of runtimes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import onnx

from qsync_opt.costs import DeviceProfile
from qsync_opt.errors import ModelError, UnsupportedError
from qsync_opt.model import OpGraph
from qsync_opt.numerics import PrecisionFormats
from qsync_opt.runtimes.onnxruntime.profiler import profile
from qsync_opt.runtimes.onnxruntime.runnable import RunnableModel
from qsync_opt.runtimes.onnxruntime.sessions import find_device
from qsync_opt.runtimes.onnxruntime.support import FORMATS, border_formats, kind_precisions
from qsync_opt.runtimes.plans import DevicePlans

Model = RunnableModel | onnx.ModelProto | str | os.PathLike[str]
"""A model with a session, or a source of one, which then runs on the processor."""


class OnnxRuntime:
    """Plans for ONNX models, on ``cpu`` and, where ``onnxruntime-gpu`` is installed, ``cuda``; inference only."""

    name = "onnxruntime"
    trains = False

    def load(self, source: Model, device: str = "cpu", **options: Any) -> RunnableModel:
        """Return a model with a session; device and options (threads, roles, name) are those of `RunnableModel`."""
        return source if isinstance(source, RunnableModel) else RunnableModel(source, device, **options)

    def capture(self, model: Model, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> OpGraph:
        """Operators of the model; inputs, which are not needed, must fit where they are given."""
        runnable = self.load(model)
        if args or kwargs:
            runnable.feeds(args, kwargs)
        return runnable.graph

    def device_formats(self, device: Any) -> dict[str, PrecisionFormats]:
        """Precisions in which matrix products run on a device; a model's own operators may have fewer."""
        able = {p for kind in ("MatMul", "Gather") for p in kind_precisions(kind, find_device(device))}
        return {precision: border_formats(precision) for precision in FORMATS if precision in able}

    def operator_precisions(self, op_type: str, device: Any) -> tuple[str, ...]:
        """Precisions of a small operator of a kind on a device; only FP32 for kinds that are not adjustable."""
        return kind_precisions(op_type, find_device(device))

    def profile(
        self,
        model: Model,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None = None,
        *,
        device: Any = "cpu",
        precisions: Sequence[str] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        repeats: int = 6,
        name: str | None = None,
    ) -> DeviceProfile:
        """Measure a model on a device; see `profile`.

        Raises:
            UnsupportedError: The model is on another device already.
        """
        runnable = self.load(model, device)
        if runnable.device.kind != find_device(device).kind:
            raise UnsupportedError(
                f"the model is on {runnable.device.kind}, but device is {device!r}: load it on that device"
            )
        return profile(runnable, args, kwargs, precisions=precisions, cache_dir=cache_dir, repeats=repeats, name=name)

    def apply(
        self,
        model: Model,
        plan: Mapping[str, str] | DevicePlans,
        device_type: str | None = None,
        *,
        graph: OpGraph | None = None,
    ) -> RunnableModel:
        """Run a model as a mixed-precision graph; see `RunnableModel.apply`.

        Raises:
            ModelError: ``graph`` is of another model; else as there.
        """
        runnable = self.load(model)
        if graph is not None and graph.fingerprint() != runnable.graph.fingerprint():
            raise ModelError(f"the graph {graph.name!r} is of another model than {runnable.graph.name!r}: capture this")
        runnable.apply(plan, device_type)
        return runnable

    def undo(self, model: RunnableModel) -> RunnableModel:
        """Run the model as before `apply`."""
        runnable = self.load(model)
        runnable.undo()
        return runnable
