"""Profile an ONNX model on a device: every operator alone in every format, and casts. Inference: nothing runs backward.

Each operator is a model of its own that gets the values it gets in the whole, in the format that they would arrive in,
so that casts are not in its time; casts are timed by themselves and fitted. What starting a run costs is taken off, and
what an iteration costs beyond its operators is fitted to runs of the whole model in each precision.
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
from qsync_opt.io import Fields, MeasurementCache, Report, check_integer, encode, reporting
from qsync_opt.model import Operator, Role, TensorSpec
from qsync_opt.numerics import PrecisionFormats
from qsync_opt.runtimes.onnxruntime.graph_rewrite import rewrite
from qsync_opt.runtimes.onnxruntime.number_types import ELEMENT_TYPE
from qsync_opt.runtimes.onnxruntime.parts import Part, record_values
from qsync_opt.runtimes.onnxruntime.prepared import Array
from qsync_opt.runtimes.onnxruntime.runnable import RunnableModel
from qsync_opt.runtimes.onnxruntime.sessions import Device, bound_run, start_session, tensor_on
from qsync_opt.runtimes.onnxruntime.support import FORMATS, Support, border_formats
from qsync_opt.runtimes.timing import cast_pairs, edge_sizes, steady_medians
from qsync_opt.training import MeasuredPasses, calibrate, problem_role, uniform_precisions

METHOD = 1
"""Version of the way of measuring; measurements made in another way are not taken from the cache."""
_ROUND_NS = 1e6
_MOST_AT_ONCE = 200
_OPSET = 21


def profile(
    model: RunnableModel,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    precisions: Sequence[str] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: Report | bool | None = None,
    repeats: int = 6,
    name: str | None = None,
) -> DeviceProfile:
    """Measure a model on its device.

    Args:
        model: Without a plan.
        args: Inputs in the model's order, of the kind that it will get; operators are timed on what becomes of them.
        kwargs: Inputs by name.
        precisions: Those that plans may use; None: all that some operator can run in. FP32 is always among them.
        cache_dir: Folder of measurements that equal runs share; None keeps none.
        progress: As in the torch runtime's `profile`.
        repeats: Runs per round; there are rounds until two agree.
        name: Of the device, where that of the hardware does not tell it from others.

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
    stopwatch = _Stopwatch(model.device, repeats)
    bench = _Bench(
        model=model,
        support=support,
        formats=formats,
        stopwatch=stopwatch,
        cache=MeasurementCache(cache_dir, environment),
    )
    rows = {o.name: bench.precisions(o) for o in model.graph}
    pairs = cast_pairs(formats)
    specs = edge_sizes(model.graph)
    total = sum(map(len, rows.values())) + len(pairs) * len(specs) + len(formats)
    measurements: dict[str, dict[str, MeasuredCost]] = {}
    keys = {o.name: f"{o.signature} {problem_role(o)}" for o in model.graph}
    done = 0
    with reporting(progress, "profile") as report:
        for operator in model.graph:
            for precision in rows[operator.name]:
                report(done, total, f"{operator.name} {precision}")
                done += 1
                if precision not in measurements.setdefault(keys[operator.name], {}):
                    measurements[keys[operator.name]][precision] = bench.cost(operator, precision)
        casts = {}
        for source, target in pairs:
            report(done, total, f"cast {source}>{target}")
            done += len(specs)
            casts[f"{source}>{target}"] = bench.cast(source, target, specs)
        result = DeviceProfile(
            device=identity,
            model=model.graph.name,
            fingerprint=model.graph.fingerprint(),
            options=options,
            formats=formats,
            measurements=measurements,
            operators=keys,
            casts=casts,
            gradient_sums={"FP32": CostFit(base_ns=0, ns_per_mi_elements=0)},
            optimizer=OptimizerCost(name="none", step_ns=0, zero_grad_ns=0, state_bytes=0, workspace_bytes=0),
        )
        whole = {}
        for precision in formats:
            report(done, total, f"whole model in {precision}")
            done += 1
            whole[precision] = bench.whole(result, precision, feeds)
        result = calibrate(model.graph, result, whole)
        report(total, total, "done")
    return result


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
        """What an operator is measured in."""
        role = problem_role(operator)
        if role is Role.FIXED:
            return ["FP32"]
        able = self.support.precisions(operator)
        if role is Role.DEPENDENT:
            delivered = {borders.output for borders in self.formats.values()}
            return [precision for precision in able if precision in delivered]
        return [precision for precision in able if precision in self.formats]

    def cost(self, operator: Operator, precision: str) -> MeasuredCost:
        if operator.op_type == "input":
            return MeasuredCost(forward_ns=0, backward_ns=0)
        return MeasuredCost(
            forward_ns=round(
                self._known(
                    f"operator {operator.signature} {problem_role(operator)} {precision}",
                    lambda: self._time_operator(operator, precision),
                )
            ),
            backward_ns=0,
        )

    def cast(self, source: str, target: str, specs: Sequence[TensorSpec]) -> CostFit:
        samples = []
        for spec in specs:
            measure = functools.partial(self._time_cast, source, target, spec)
            time_ns = self._known(f"cast {source}>{target} {list(spec.shape)}", measure)
            samples.append((spec.elements, max(1.0, time_ns)))
        return fit_cost(samples)

    def whole(self, profile: DeviceProfile, precision: str, feeds: Mapping[str, Array]) -> MeasuredPasses:
        """One run of the whole model with every operator in a precision, or the next finer that it has."""
        tables = {o.name: profile.cost(o.name) for o in self.model.graph}
        uniform = uniform_precisions(self.model.graph, profile, tables, precision)
        proto = self.model.prepared.proto
        if set(uniform.values()) != {"FP32"}:
            proto = rewrite(self.model.prepared, [uniform[owner] for owner in self.model.prepared.owners]).proto
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
        formats = [precision] * len(part.model.proto.graph.node)
        arrivals = part.arrivals(precision)
        mixed = rewrite(part.model, formats, arrivals=arrivals, results_as_they_are=True)
        device = self.model.device
        session = start_session(mixed.proto, device, f"operator {operator.name!r} in {precision}")
        taken = {entry.name for entry in session.get_inputs()}
        tensors = {k: v for k, v in _arriving(part, arrivals, device).items() if k in taken}
        return self.stopwatch.time(session, tensors)

    def _time_cast(self, source: str, target: str, spec: TensorSpec) -> float:
        inputs = [helper.make_tensor_value_info("x", ELEMENT_TYPE[source], spec.shape)]
        nodes, wide = [], "x"
        if target == "INT8":
            if source != "FP32":
                nodes.append(helper.make_node("Cast", ["x"], ["wide"], to=TensorProto.FLOAT))
                wide = "wide"
            nodes.append(helper.make_node("DynamicQuantizeLinear", [wide], ["y", "scale", "zero"]))
        else:
            nodes.append(helper.make_node("Cast", ["x"], ["y"], to=ELEMENT_TYPE[target]))
        result = TensorProto.UINT8 if target == "INT8" else ELEMENT_TYPE[target]
        outputs = [helper.make_tensor_value_info("y", result, spec.shape)]
        proto = helper.make_model(
            helper.make_graph(nodes, "cast", inputs, outputs),
            opset_imports=[helper.make_opsetid("", _OPSET)],
            ir_version=10,
        )
        session = start_session(proto, self.model.device, f"a cast from {source} to {target}")
        values = np.random.default_rng(0).standard_normal(spec.shape, dtype=np.float32)
        return self.stopwatch.time(session, {"x": tensor_on(values, source, self.model.device)})


def _arriving(part: Part, arrivals: Mapping[str, str], device: Device) -> dict[str, Any]:
    """The inputs of a part, in the formats that they arrive in."""
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
    """Times runs of sessions. Caches are left warm: in inference what an operator reads has just been written."""

    def __init__(self, device: Device, repeats: int) -> None:
        self._device = device
        self._repeats = repeats
        self._idle_ns = 0.0
        x = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "y")]
        graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "idle", x[:1], x[1:])
        proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=10)
        idle = start_session(proto, device, "an empty model")
        self._idle_ns = self.time(idle, {"x": tensor_on(np.zeros(1, np.float32), "FP32", device)})

    def time(self, session: Any, tensors: Mapping[str, Any]) -> float:
        """Nanoseconds of one run, less what an empty model takes; short ones are timed several at once."""
        try:
            binding = bound_run(session, tensors, self._device)
            self._runs_ns(session, binding, 2)  # allocates results and packs weights
            at_once = max(1, min(_MOST_AT_ONCE, round(_ROUND_NS / max(1.0, self._runs_ns(session, binding, 1)))))

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
