"""Profiling of an ONNX model on a device: every operator alone in every format, and casts. Nothing runs backward.

Each operator is timed as a model of its own, on inputs with the values and formats that they have in the whole model,
so that casts are not in its time; casts are timed separately and fitted. The cost of starting a run is subtracted, and
the cost of an iteration beyond its operators is fitted to runs of the whole model in each precision.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from qsync_opt.costs import CostFit, DeviceProfile, MeasuredCost, OptimizerCost, fit_cost
from qsync_opt.errors import ModelError, UnsupportedError
from qsync_opt.io import Fields, MeasurementCache, check_integer, encode
from qsync_opt.model import Operator, Role, TensorSpec
from qsync_opt.numerics import PrecisionFormats
from qsync_opt.runtimes.onnxruntime.graph_rewrite import rewrite
from qsync_opt.runtimes.onnxruntime.number_types import ELEMENT_TYPE
from qsync_opt.runtimes.onnxruntime.prepared import Array
from qsync_opt.runtimes.onnxruntime.runnable import RunnableModel
from qsync_opt.runtimes.onnxruntime.sessions import (
    Device,
    record_values,
    small_model,
    start_session,
    tensor_on,
)
from qsync_opt.runtimes.onnxruntime.support import FORMATS, Part, Support, border_formats
from qsync_opt.runtimes.timing import cast_pairs, edge_sizes, steady_medians
from qsync_opt.training import MeasuredPasses, calibrate, problem_role, uniform_precisions

METHOD = 1
"""Version of the method of measuring; the cache gives no measurements of other versions."""
_ROUND_NS = 1e6
_MAX_AT_ONCE = 200


def profile(
    model: RunnableModel,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    precisions: Sequence[str] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    repeats: int = 6,
    name: str | None = None,
) -> DeviceProfile:
    """Measure a model on its device.

    Args:
        model: Without a plan.
        args: Typical inputs in the model's order; operators are timed on the values computed from them.
        kwargs: Inputs by name.
        precisions: Those that plans may use; None: all that some operator can run in. FP32 is always included.
        cache_dir: Folder of measurements that equal runs share; None keeps none.
        repeats: Runs per round; rounds are run until two agree.
        name: Of the device, where that of the hardware is ambiguous.

    Returns:
        The profile: times of the forward pass alone, an optimizer that costs nothing.

    Raises:
        UnsupportedError: A precision that nothing in the model can run in on this device.
        ModelError: The inputs do not fit.
        ProblemError: The cache folder cannot be used.
    """
    check_integer(repeats, "repeats", minimum=1)
    feeds = model.feeds(args, kwargs)
    values = record_values(model.prepared, feeds, model.device)
    support = Support(model.prepared, model.device, values)
    formats = _wanted(model, support, precisions)
    identity = model.device.identity(name)
    options: dict[str, str | int | float | bool] = {"pass": "forward", "optimization": "all"}
    environment = {"device": encode(identity), "options": options, "method": METHOD, "repeats": repeats}
    bench = _Bench(
        model=model,
        support=support,
        formats=formats,
        stopwatch=_Stopwatch(model.device, repeats),
        cache=MeasurementCache(cache_dir, environment),
    )
    specs = edge_sizes(model.graph)
    keys = {o.name: f"{o.signature} {problem_role(o)}" for o in model.graph}
    measurements: dict[str, dict[str, MeasuredCost]] = {key: {} for key in keys.values()}
    for operator in model.graph:
        costs = measurements[keys[operator.name]]
        costs |= {p: bench.cost(operator, p) for p in bench.precisions(operator) if p not in costs}
    result = DeviceProfile(
        device=identity,
        model=model.graph.name,
        fingerprint=model.graph.fingerprint(),
        options=options,
        formats=formats,
        measurements=measurements,
        operators=keys,
        casts={f"{source}>{target}": bench.cast(source, target, specs) for source, target in cast_pairs(formats)},
        gradient_sums={"FP32": CostFit(base_ns=0, ns_per_mi_elements=0)},
        optimizer=OptimizerCost(name="none", step_ns=0, zero_grad_ns=0, state_bytes=0, workspace_bytes=0),
    )
    return calibrate(model.graph, result, {precision: bench.whole(result, precision, feeds) for precision in formats})


def _wanted(model: RunnableModel, support: Support, precisions: Sequence[str] | None) -> dict[str, PrecisionFormats]:
    adjustable = model.graph.by_role(Role.ADJUSTABLE)
    able = {"FP32"} | {p for operator in adjustable for p in support.precisions(operator)}
    for precision in precisions or ():
        if precision not in able:
            raise UnsupportedError(
                f"no operator of {model.graph.name!r} can run in {precision!r} on {model.device.kind}: allowed are "
                f"{', '.join(f for f in FORMATS if f in able)}"
            )
    chosen = able if precisions is None else {*precisions, "FP32"}
    return {precision: border_formats(precision) for precision in FORMATS if precision in chosen}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bench:
    model: RunnableModel
    support: Support
    formats: Mapping[str, PrecisionFormats]
    stopwatch: _Stopwatch
    cache: MeasurementCache

    def precisions(self, operator: Operator) -> list[str]:
        """Precisions that an operator is measured in."""
        role = problem_role(operator)
        if role is Role.FIXED:
            return ["FP32"]
        dependent = role is Role.DEPENDENT
        wanted = {borders.output for borders in self.formats.values()} if dependent else self.formats
        return [precision for precision in self.support.precisions(operator) if precision in wanted]

    def cost(self, operator: Operator, precision: str) -> MeasuredCost:
        if operator.op_type == "input" or not operator.onnx_nodes:  # the exporter drops what nobody reads
            return MeasuredCost(forward_ns=0, backward_ns=0)
        key = f"operator {operator.signature} {problem_role(operator)} {precision}"
        time_ns = self._known(key, lambda: self._time_operator(operator, precision))
        return MeasuredCost(forward_ns=round(time_ns), backward_ns=0)

    def cast(self, source: str, target: str, specs: Sequence[TensorSpec]) -> CostFit:
        samples = []
        for spec in specs:
            measure = functools.partial(self._time_cast, source, target, spec)
            time_ns = self._known(f"cast {source}>{target} {list(spec.shape)}", measure)
            samples.append((spec.elements, max(1.0, time_ns)))
        return fit_cost(samples)

    def whole(self, profile: DeviceProfile, precision: str, feeds: Mapping[str, Array]) -> MeasuredPasses:
        """One run of the whole model with every operator in a precision, or its next finer one."""
        tables = {o.name: profile.cost(o.name) for o in self.model.graph}
        uniform = uniform_precisions(self.model.graph, profile, tables, precision)
        proto = self.model.prepared.proto
        if set(uniform.values()) != {"FP32"}:
            prepared = self.model.prepared
            proto = rewrite(prepared, [uniform[owner] for owner in prepared.owners]).proto
        session = start_session(proto, self.model.device, f"the model in {precision}")
        tensors = {name: tensor_on(value, "FP32", self.model.device) for name, value in feeds.items()}
        return MeasuredPasses(forward_ns=max(1, round(self.stopwatch.time(session, tensors))), backward_ns=1)

    def _known(self, key: str, measure: Callable[[], float]) -> float:
        if (known := self.cache.get(key)) is None:
            known = {"ns": measure()}
            self.cache.put(key, known)
        return Fields(known, f"measured {key}").number("ns")

    def _time_operator(self, operator: Operator, precision: str) -> float:
        part = self.support.part(operator)
        session = part.session(precision, self.model.device)
        inputs = _inputs(part, part.arrivals(precision), self.model.device)
        return self.stopwatch.time(session, {entry.name: inputs[entry.name] for entry in session.get_inputs()})

    def _time_cast(self, source: str, target: str, spec: TensorSpec) -> float:
        quantizes, wide = target == "INT8", source == "FP32"
        nodes = []
        if not quantizes:
            nodes.append(helper.make_node("Cast", ["x"], ["y"], to=ELEMENT_TYPE[target]))
        else:
            if not wide:
                nodes.append(helper.make_node("Cast", ["x"], ["wide"], to=TensorProto.FLOAT))
            nodes.append(helper.make_node("DynamicQuantizeLinear", ["x" if wide else "wide"], ["y", "scale", "zero"]))
        x = helper.make_tensor_value_info("x", ELEMENT_TYPE[source], spec.shape)
        y_type = TensorProto.UINT8 if quantizes else ELEMENT_TYPE[target]
        y = helper.make_tensor_value_info("y", y_type, spec.shape)
        session = start_session(small_model(nodes, [x], [y]), self.model.device, f"a cast from {source} to {target}")
        values = np.random.default_rng(0).standard_normal(spec.shape, dtype=np.float32)
        return self.stopwatch.time(session, {"x": tensor_on(values, source, self.model.device)})


def _inputs(part: Part, arrivals: Mapping[str, str], device: Device) -> dict[str, Any]:
    tensors = {}
    for name, value in part.inputs.items():
        arrival = arrivals.get(name, "FP32")
        if arrival != "INT8":
            tensors[name] = tensor_on(value, arrival, device)
            continue
        low, high = min(0.0, float(value.min(initial=0))), max(0.0, float(value.max(initial=0)))
        scale = np.array((high - low) / 255 or 1.0, np.float32)
        zero = np.clip(np.rint(-low / scale), 0, 255).astype(np.uint8)
        codes = np.clip(np.rint(value / scale) + float(zero), 0, 255).astype(np.uint8)
        for what, array in (("codes", codes), ("scale", scale), ("zero", zero)):
            tensors[f"{name}__{what}"] = tensor_on(array, "FP32", device)
    return tensors


class _Stopwatch:
    """A timer of runs of sessions. Caches stay warm: in inference an operator's input has just been written."""

    def __init__(self, device: Device, repeats: int) -> None:
        self._device = device
        self._repeats = repeats
        self._idle_ns = 0.0
        x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "y"))
        idle = start_session(
            small_model([helper.make_node("Identity", ["x"], ["y"])], [x], [y]), device, "an empty model"
        )
        self._idle_ns = self.time(idle, {"x": tensor_on(np.zeros(1, np.float32), "FP32", device)})

    def time(self, session: Any, tensors: Mapping[str, Any]) -> float:
        """Nanoseconds of one run minus those of an empty model; several short runs are timed at once."""
        try:
            # Inputs and results are on the device already, so that a run copies nothing.
            binding = session.io_binding()
            for name, tensor in tensors.items():
                binding.bind_ortvalue_input(name, tensor)
            for output in session.get_outputs():
                binding.bind_output(output.name, self._device.kind, self._device.index)
            self._runs_ns(session, binding, 2)  # allocates results and packs weights
            at_once = max(1, min(_MAX_AT_ONCE, round(_ROUND_NS / max(1.0, self._runs_ns(session, binding, 1)))))

            def run_round() -> list[tuple[float]]:
                return [(self._runs_ns(session, binding, at_once) / at_once,) for _ in range(self._repeats)]

            return max(0.0, steady_medians(run_round)[0] - self._idle_ns)
        except (RuntimeError, ValueError) as error:
            raise ModelError(f"a part of the model does not run by itself: {error}") from error

    @staticmethod
    def _runs_ns(session: Any, binding: Any, count: int) -> float:
        run = session.run_with_iobinding
        start_ns = time.perf_counter_ns()
        for _ in range(count):
            run(binding)
        binding.synchronize_outputs()
        return float(time.perf_counter_ns() - start_ns)
