"""An ONNX model with a session, to which a plan is applied and undone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import onnx

from qsync_opt.errors import ModelError, NotReadyError, UnsupportedError, first_few
from qsync_opt.io import write_bytes
from qsync_opt.model import OpGraph, Role, RoleTable
from qsync_opt.numerics import number_format
from qsync_opt.runtimes.onnxruntime.graph_rewrite import EdgeCast, MixedGraph, rewrite
from qsync_opt.runtimes.onnxruntime.prepared import Array, PreparedModel, prepare
from qsync_opt.runtimes.onnxruntime.sessions import find_device, reason_of, record_values, sample_feeds, start_session
from qsync_opt.runtimes.onnxruntime.support import FORMATS, Support, border_formats
from qsync_opt.runtimes.plans import DevicePlans, precisions_of
from qsync_opt.training import problem_role


class RunnableModel:
    """An ONNX model with a session.

    Args:
        source: Path of the file, or the model itself, which is left as it is. In FP32, with fixed shapes.
        device: ``cpu``, ``cuda`` or ``cuda:1``.
        threads: For one operator on the processor; None: one per core.
        roles: The role table with changes; None is the shipped one.
        name: Of the graph; None takes the one in the model.

    Attributes:
        graph: Its operators.
        device: Where it runs.
        prepared: The original model, in FP32.
        precisions: Precision of every operator under the applied plan; empty without one.
        mixed: The graph that runs under the plan; None without one, and under one that leaves everything in FP32.

    Raises:
        ModelError: Not a usable model; see `prepare`.
        UnsupportedError: No such device, or ONNX Runtime does not take the model.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | onnx.ModelProto,
        device: str = "cpu",
        *,
        threads: int | None = None,
        roles: RoleTable | None = None,
        name: str | None = None,
    ) -> None:
        self.device = find_device(device, threads)
        self.prepared: PreparedModel = prepare(source, roles=roles, name=name)
        self.graph: OpGraph = self.prepared.graph
        self.precisions: Mapping[str, str] = {}
        self.mixed: MixedGraph | None = None
        self._plain = start_session(self.prepared.proto, self.device, f"the model {self.graph.name!r}")
        self._session = self._plain

    @property
    def proto(self) -> onnx.ModelProto:
        """The model that runs: the original, or rewritten under the applied plan. Do not change it."""
        return self.prepared.proto if self.mixed is None else self.mixed.proto

    @property
    def casts(self) -> tuple[EdgeCast, ...]:
        """The casts of the graph that runs, each value once per format."""
        return () if self.mixed is None else self.mixed.casts

    @cached_property
    def support(self) -> Support:
        """Formats of its operators, by trial with sample inputs."""
        values = record_values(self.prepared, sample_feeds(self.prepared.proto), self.device)
        return Support(self.prepared, self.device, values)

    def feeds(self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> dict[str, Array]:
        """Inputs by name: ``args`` in the model's order, ``kwargs`` by name.

        Raises:
            ModelError: One is missing, unknown, given twice, or of another shape or type.
        """
        names = [entry.name for entry in self._plain.get_inputs()]
        if len(args) > len(names):
            raise ModelError(f"{len(args)} inputs were given, but the model has {', '.join(names)}")
        values = dict(zip(names, args, strict=False))
        for name, value in (kwargs or {}).items():
            if name in values or name not in names:
                raise ModelError(f"input {name!r} is given twice or unknown: the model has {', '.join(names)}")
            values[name] = value
        missing = [name for name in names if name not in values]
        if missing:
            raise ModelError(f"input {missing[0]!r} is missing: the model has {', '.join(names)}")
        feeds = {name: np.asarray(value) for name, value in values.items()}
        types = {info.name: info.type.tensor_type for info in self.prepared.proto.graph.input}
        for name, array in feeds.items():
            shape = tuple(dim.dim_value for dim in types[name].shape.dim)
            dtype = onnx.helper.tensor_dtype_to_np_dtype(types[name].elem_type)
            if array.shape != shape or array.dtype != dtype:
                raise ModelError(
                    f"input {name!r} has shape {array.shape} and type {array.dtype}, but the model takes {shape} and "
                    f"{dtype}"
                )
        return feeds

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Array]:
        """Run the model on inputs as of `feeds`; returns its results by name, FP32 under every plan.

        Raises:
            ModelError: The inputs do not fit, or the model fails on them.
        """
        feeds = self.feeds(args, kwargs)
        names = [entry.name for entry in self._session.get_outputs()]
        try:
            return dict(zip(names, self._session.run(names, feeds), strict=True))
        except Exception as error:  # the library's errors have no base of their own
            raise ModelError(f"the model {self.graph.name!r} does not run: {reason_of(error)}") from error

    def resolve(self, plan: Mapping[str, str] | DevicePlans, device_type: str | None = None) -> dict[str, str]:
        """Precision of every operator under a plan; dependent ones follow what they read.

        Raises:
            ModelError: The plan is for another model or lacks the device type.
            UnsupportedError: An operator cannot run in its precision; the text names it and says why.
        """
        choices = precisions_of(plan, device_type)
        unknown = [name for name in choices if name not in self.graph]
        missing = [o.name for o in self.graph.by_role(Role.ADJUSTABLE) if o.name not in choices]
        if unknown or missing:
            some = first_few([repr(name) for name in unknown or missing])
            what = f"names {some}, which this model does not have" if unknown else f"lacks {some}"
            raise ModelError(f"the plan is for another model: it {what}; plan this model")
        precisions: dict[str, str] = {}
        for operator in self.graph:
            precision = choices.get(operator.name, "FP32")
            if operator.role is Role.ADJUSTABLE:
                number_format(precision)
                reason = self.support.refusal(operator, precision)
                if reason is not None:
                    allowed = ", ".join(self.support.precisions(operator))
                    raise UnsupportedError(
                        f"operator {operator.name!r} cannot run in {precision} on {self.device.kind}: {reason}; "
                        f"allowed are {allowed}"
                    )
            else:
                precision = self._dependent_precision(operator.name, precisions)
                if choices.get(operator.name, precision) != precision:
                    raise UnsupportedError(
                        f"operator {operator.name!r} is {problem_role(operator)} and runs in {precision} under this "
                        f"plan, but the plan says {choices[operator.name]}: leave it out, or plan this model again"
                    )
            precisions[operator.name] = precision
        return precisions

    def _dependent_precision(self, name: str, precisions: Mapping[str, str]) -> str:
        """Precision of an operator that is not adjustable: at least as fine as its inputs."""
        operator = self.graph[name]
        if operator.role is not Role.DEPENDENT or not operator.inputs:
            return "FP32"
        rank = max(number_format(border_formats(precisions[source]).output).rank for source in operator.inputs)
        finer = [f for f in FORMATS if f != "INT8" and number_format(f).rank >= rank]
        return next(f for f in finer if self.support.refusal(operator, f) is None)

    def apply(self, plan: Mapping[str, str] | DevicePlans, device_type: str | None = None) -> None:
        """Run under a plan until `undo`.

        Raises:
            NotReadyError: A plan is applied already.
            ModelError: As in `resolve`, or the rewritten graph is not valid.
            UnsupportedError: As in `resolve`, or ONNX Runtime does not take the rewritten graph.
        """
        if self.precisions:
            raise NotReadyError("a plan is applied to this model already: undo(model) before applying another")
        precisions = self.resolve(plan, device_type)
        if set(precisions.values()) != {"FP32"}:
            mixed = rewrite(self.prepared, [precisions[owner] for owner in self.prepared.owners])
            self._session = start_session(mixed.proto, self.device, f"the model {self.graph.name!r} under the plan")
            self.mixed = mixed
        self.precisions = precisions

    def undo(self) -> None:
        """Run as before `apply`.

        Raises:
            NotReadyError: No plan is applied.
        """
        if not self.precisions:
            raise NotReadyError("no plan is applied to this model: apply(model, plan) comes first")
        self._session, self.mixed, self.precisions = self._plain, None, {}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model that runs as an ONNX file, whole or not at all.

        Raises:
            ModelError: The file cannot be written.
        """
        write_bytes(path, self.proto.SerializeToString(), error=ModelError)
