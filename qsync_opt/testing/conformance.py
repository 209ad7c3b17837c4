"""Checks for authors of indicators, cost models and runtimes; those of solvers and formulations are in `testing`.

A check calls the plug-in on small made-up models and raises AssertionError with the first thing that is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from qsync_opt.cluster import Cluster, DeviceType, Network
from qsync_opt.costs import DeviceProfile
from qsync_opt.errors import QSyncError
from qsync_opt.model import OpGraph, ParameterSpec, Role, TensorSpec, WeightStatistics
from qsync_opt.numerics import FORMATS, PrecisionFormats, formats_for
from qsync_opt.registry import Kind, create
from qsync_opt.runtime import Runtime
from qsync_opt.sensitivity import FormatIndicator, ModelKnowledge
from qsync_opt.testing.synthetic import make_operator
from qsync_opt.training import build_problem, solve


def sample_graph() -> OpGraph:
    """Two linear layers with an activation and a residual between, a normalization and a look-up."""
    operators = (
        make_operator("embed", op_type="embedding", parameters=("embed.weight",)),
        make_operator("norm", Role.FIXED, ["embed"], parameters=("norm.weight",)),
        make_operator("fc1", inputs=["norm"], parameters=("fc1.weight",)),
        make_operator("act", Role.DEPENDENT, ["fc1"], op_type="gelu"),
        make_operator("fc2", inputs=["act"], parameters=("fc2.weight",)),
        make_operator("add", Role.DEPENDENT, ["fc2", "embed"]),
    )
    shapes = {"embed.weight": (64, 64), "norm.weight": (64,), "fc1.weight": (64, 64), "fc2.weight": (64, 64)}
    parameters = tuple(
        ParameterSpec(name=name, spec=TensorSpec(shape=shape, dtype="float32")) for name, shape in shapes.items()
    )
    return OpGraph(name="sample", operators=operators, parameters=parameters)


def sample_knowledge(graph: OpGraph) -> ModelKnowledge:
    """Weights of a sample graph, normally distributed; no statistics."""
    return ModelKnowledge(
        weights={
            parameter.name: WeightStatistics(
                elements=parameter.spec.elements,
                mean_square=1.0,
                mean_square_amax={"first": 9.0, "last": 9.0},
                first_size=64,
                last_size=64,
            )
            for parameter in graph.parameters
        }
    )


def check_indicator(
    indicator: Any, *, graph: OpGraph | None = None, knowledge: ModelKnowledge | None = None
) -> Mapping[str, Mapping[str, float]]:
    """Check an indicator (a name or an instance) on a model.

    Args:
        indicator: The indicator.
        graph: The model; a made-up one by default.
        knowledge: What is known of it; made-up weights by default, which an indicator of statistics cannot use.

    Returns:
        The sensitivities.

    Raises:
        AssertionError: A value is missing, negative or not finite, FP32 is not 0, or an equal call gives other values.
    """
    plugin = create(Kind.INDICATOR, indicator)
    graph = graph or sample_graph()
    knowledge = knowledge or sample_knowledge(graph)
    formats = formats_for(("INT8", "BF16", "FP32"), "BF16")
    label = plugin.estimate
    expect(label is None or (isinstance(label, str) and bool(label)), f"estimate is {label!r}: a text or None")
    table: Mapping[str, Mapping[str, float]] = plugin.sensitivities(graph, knowledge, formats)
    adjustable = {operator.name for operator in graph.by_role(Role.ADJUSTABLE)}
    expect(set(table) >= adjustable, f"no sensitivities for {sorted(adjustable - set(table))}")
    for operator in adjustable:
        row = table[operator]
        for precision, value in row.items():
            what = f"sensitivity of {operator!r} in {precision}"
            expect(precision in formats, f"{what}: the device has {', '.join(formats)} only")
            expect(
                _is_number(value) and math.isfinite(value) and value >= 0, f"{what} is {value!r}: finite, at least 0"
            )
        expect(row.get("FP32", 0.0) == 0.0, f"sensitivity of {operator!r} in FP32 is {row.get('FP32')!r}: must be 0")
    again = plugin.sensitivities(graph, knowledge, formats)
    expect(all(dict(again[name]) == dict(table[name]) for name in adjustable), "an equal call gives other values")
    return table


def check_cost_model(model: Any, *, device: DeviceType, graph: OpGraph | None = None) -> None:
    """Check a cost model (a name or an instance): its profile must price a whole problem.

    Args:
        model: The cost model.
        device: A planned device type that it knows, with at least one precision below FP32 and FP32.
        graph: The model whose operators are priced; a made-up one by default.

    Raises:
        AssertionError: The profile is of another graph, lacks a precision or a cast, or does not make a problem that
            can be solved.
    """
    plugin = create(Kind.COST_MODEL, model)
    graph = graph or sample_graph()
    profile = plugin.profile(graph, device)
    expect(profile.fingerprint == graph.fingerprint(), "the profile is of another graph")
    lacking = [precision for precision in device.precisions if precision not in profile.formats]
    expect(not lacking, f"the profile lacks {', '.join(lacking)} of device type {device.name!r}")
    for operator in graph.by_role(Role.ADJUSTABLE):
        expect(bool(set(profile.cost(operator.name)) & set(device.precisions)), f"no cost for {operator.name!r}")
    table = FormatIndicator().sensitivities(graph, ModelKnowledge(), profile.formats)
    try:
        network = Network(latency_s=1e-5, bandwidth_bytes_per_s=1e9, source="made up")
        cluster = Cluster(name="sample", devices=(device,), network=network)
        problem = build_problem(graph, {device.name: profile}, table, cluster)
        solution = solve(problem)
    except QSyncError as failure:
        raise AssertionError(f"the profile makes no usable problem: {failure}") from failure
    expect(solution.plan is not None, f"the problem of the profile has no plan: {solution.reason}")
    expect(plugin.profile(graph, device) == profile, "an equal call gives another profile")


def check_runtime(
    runtime: Any, *, model: Any, args: tuple[Any, ...], device: Any, outputs_equal: Any, step: Any
) -> None:
    """Check a runtime (a name or an instance) on a model of its framework.

    Args:
        runtime: The runtime.
        model: A model in FP32 on ``device`` whose results depend on its arguments alone.
        args: Arguments of one forward pass.
        device: The device, as the runtime names it.
        outputs_equal: ``outputs_equal(a, b)`` says whether two results of the model are the same, bit for bit.
        step: ``step(model, args)`` runs forward, and backward if the runtime trains, and returns the result of forward.

    Raises:
        AssertionError: A part of the contract is missing, formats are unknown or FP32 is missing, names change from one
            capture to the next, a plan does not run, is not refused twice, ``undo`` does not give the model back as it
            was, or the profile makes no problem whose plan can be applied.
    """
    plugin = create(Kind.RUNTIME, runtime)
    lacking = [name for name in ("name", "trains", *_RUNTIME_METHODS) if not hasattr(plugin, name)]
    expect(not lacking, f"the runtime lacks {', '.join(lacking)}")
    expect(isinstance(plugin, Runtime), "the runtime does not keep to the protocol qsync_opt.runtime.Runtime")
    expect(isinstance(plugin.name, str) and bool(plugin.name), f"name is {plugin.name!r}: a text is needed")
    expect(isinstance(plugin.trains, bool), f"trains is {plugin.trains!r}: True or False is needed")
    formats = plugin.device_formats(device)
    _check_formats(formats)
    graph = plugin.capture(model, args)
    again = plugin.capture(model, args)
    expect(graph.fingerprint() == again.fingerprint(), "two captures of one model differ")
    before = step(model, args)
    plan = {}
    for operator in graph.by_role(Role.ADJUSTABLE):
        can = plugin.operator_precisions(operator.op_type, device)
        expect(bool(can) and set(can) <= set(formats), f"operator {operator.name!r} can run in {can!r}")
        plan[operator.name] = can[0]

    def check_plan(choices: Mapping[str, str]) -> None:
        applied = plugin.apply(model, choices, graph=graph)
        step(applied, args)
        expect(_refuses(plugin, applied, choices, graph), "a second plan is applied over the first without undo")
        restored = plugin.undo(applied)
        expect(bool(outputs_equal(step(restored, args), before)), "undo does not give the model back as it was")

    check_plan(plan)
    check_plan(dict.fromkeys(plan, "FP32"))
    # Last, because measuring takes longest.
    check_plan(_plan_from(plugin.profile(model, args, device=device, repeats=2), graph, plugin.trains))


_RUNTIME_METHODS = ("capture", "device_formats", "operator_precisions", "profile", "apply", "undo")


def _plan_from(profile: DeviceProfile, graph: OpGraph, trains: bool) -> dict[str, str]:
    """The adjustable part of a plan that is solved from a measured profile."""
    expect(profile.fingerprint == graph.fingerprint(), "the profile is of another graph")
    expect(DeviceProfile.from_json(profile.to_json()) == profile, "the profile is not the same after a file")
    backward = {cost.backward_ns for table in profile.measurements.values() for cost in table.values()}
    expect(trains or backward == {0}, "a runtime that does not train has backward times in its profile")
    device = DeviceType(name="here", count=1, memory_limit_bytes=2**50, precisions=tuple(profile.formats))
    network = Network(latency_s=1e-5, bandwidth_bytes_per_s=1e9, source="made up")
    table = FormatIndicator().sensitivities(graph, ModelKnowledge(), profile.formats)
    try:
        problem = build_problem(
            graph, {"here": profile}, table, Cluster(name="sample", devices=(device,), network=network), slack=0.1
        )
        solution = solve(problem)
    except QSyncError as failure:
        raise AssertionError(f"the profile makes no usable problem: {failure}") from failure
    expect(solution.plan is not None, f"the problem of the profile has no plan: {solution.reason}")
    assert solution.plan is not None
    names = {operator.name for operator in graph.by_role(Role.ADJUSTABLE)}
    return {name: precision for name, precision in solution.plan.devices["here"].items() if name in names}


def _refuses(plugin: Any, model: Any, plan: Mapping[str, str], graph: OpGraph) -> bool:
    try:
        plugin.apply(model, plan, graph=graph)
    except QSyncError:
        return True
    return False


def _check_formats(formats: Mapping[str, PrecisionFormats]) -> None:
    expect("FP32" in formats, f"the device's precisions are {', '.join(formats)}: FP32 is needed")
    for precision, borders in formats.items():
        for name in (precision, borders.output, borders.gradient_input, borders.gradient_output):
            expect(name in FORMATS, f"unknown format {name!r}: allowed are {', '.join(FORMATS)}")
    ranks = [FORMATS[name].rank for name in formats]
    expect(ranks == sorted(ranks), f"precisions must stand coarsest first, but are {', '.join(formats)}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def expect(holds: bool, text: str) -> None:
    """Raise AssertionError with a text unless something holds."""
    if not holds:
        raise AssertionError(text)
