"""Conformance checks for plug-ins: solvers, formulations, indicators, cost models and runtimes.

A check calls the plug-in, by name or instance, on small made-up models through the public interface, and raises
AssertionError with the first thing that is wrong.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

from qsync_opt.cluster import Cluster, DeviceType
from qsync_opt.costs import DeviceProfile
from qsync_opt.errors import QSyncError
from qsync_opt.model import OpGraph, Role
from qsync_opt.numerics import FORMATS, PrecisionFormats, formats_for
from qsync_opt.registry import Feature, Kind, create, features
from qsync_opt.runtime import Runtime
from qsync_opt.sensitivity import FormatIndicator, ModelKnowledge
from qsync_opt.testing.problems import INSTANCES, Instance, random_problem
from qsync_opt.testing.synthetic import NETWORK, sample_graph, sample_knowledge
from qsync_opt.training import Plan, PointStatus, Solution, TerminationStatus, build_problem, solve

_AGREEMENT = 1e-6
"""Relative difference of objectives that counts as equal: for all checks."""


def expect(holds: bool, text: str) -> None:
    """Raise AssertionError with ``text`` unless ``holds``."""
    if not holds:
        raise AssertionError(text)


def check_solution(instance: Instance, solution: Solution, *, proves: bool) -> None:
    """Compare a solution with the known optimum of an instance; ``proves``: by a method that proves optimality.

    Raises:
        AssertionError: Status, objective, bound or reason is wrong.
    """
    name = f"{instance.problem.name} by {solution.method}"
    if instance.objective is None:
        expect(solution.termination is TerminationStatus.INFEASIBLE, f"{name}: ended {solution.termination}")
        missing = [text for text in instance.reason if text not in (solution.reason or "")]
        expect(not missing, f"{name}: the reason {solution.reason!r} lacks {missing}")
        return
    expect(solution.point is PointStatus.FEASIBLE, f"{name}: no plan, {solution.termination}: {solution.reason}")
    objective = solution.objective
    slack = _AGREEMENT * max(1e-300, abs(instance.objective))
    expect(
        objective is not None and objective >= instance.objective - slack, f"{name}: {objective} is below the optimum"
    )
    expect(
        solution.bound is None or solution.bound <= instance.objective + slack,
        f"{name}: the bound {solution.bound} is above the optimum {instance.objective}",
    )
    if proves:
        expect(solution.termination is TerminationStatus.OPTIMAL, f"{name}: ended {solution.termination}")
        expect(
            objective is not None and objective <= instance.objective + slack,
            f"{name}: {objective} is above the optimum {instance.objective}",
        )


def check_formulation(method: Any, **options: Any) -> None:
    """Solve all instances by a formulation (a name or an instance) and check the solutions.

    ``options`` are those of `solve`, such as ``solver``.

    Raises:
        AssertionError: A solution is wrong; the planner's own checks raise `SolverError`.
    """
    proves = Feature.PROOF in features(Kind.FORMULATION, method)
    for make in INSTANCES:
        instance = make()
        check_solution(instance, solve(instance.problem, method, **options), proves=proves)


def check_solver(solver: Any, *, random_problems: int = 20, seed: int = 0) -> None:
    """Solve all instances, and small random problems, with a solver (a name or an instance) and check the solutions.

    The random problems, of this ``seed``, are compared with exhaustive search.

    Raises:
        AssertionError: A solution is wrong; the planner's own checks raise `SolverError`.
    """
    check_formulation("exact", solver=solver)
    source = random.Random(seed)
    for _ in range(random_problems):
        problem = random_problem(source, max_operators=6)
        instance = Instance(problem=problem, objective=solve(problem, "exhaustive").objective)
        check_solution(instance, solve(problem, "exact", solver=solver), proves=True)


def check_indicator(
    indicator: Any, *, graph: OpGraph | None = None, knowledge: ModelKnowledge | None = None
) -> Mapping[str, Mapping[str, float]]:
    """Check an indicator (a name or an instance) on a model, a made-up one by default, and return its sensitivities.

    The default of ``knowledge`` is made-up weights, which suit no indicator that needs statistics.

    Raises:
        AssertionError: A value is missing, negative or not finite, not 0 in FP32, or differs in a second call.
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
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            expect(is_number and math.isfinite(value) and value >= 0, f"{what} is {value!r}: finite, at least 0")
        expect(row.get("FP32", 0.0) == 0.0, f"sensitivity of {operator!r} in FP32 is {row.get('FP32')!r}: must be 0")
    again = plugin.sensitivities(graph, knowledge, formats)
    expect(all(dict(again[name]) == dict(table[name]) for name in adjustable), "an equal call gives other values")
    return table


def check_cost_model(model: Any, *, device: DeviceType, graph: OpGraph | None = None) -> None:
    """Check that the profile of a cost model (a name or an instance) makes a problem that can be solved.

    ``device`` is a planned device type that it knows, with FP32 and at least one lower precision; the default of
    ``graph`` is a made-up model.

    Raises:
        AssertionError: The profile is of another graph, lacks a precision or a cast, or its problem has no plan.
    """
    plugin = create(Kind.COST_MODEL, model)
    graph = graph or sample_graph()
    profile = plugin.profile(graph, device)
    expect(profile.fingerprint == graph.fingerprint(), "the profile is of another graph")
    missing = [precision for precision in device.precisions if precision not in profile.formats]
    expect(not missing, f"the profile lacks {', '.join(missing)} of device type {device.name!r}")
    for operator in graph.by_role(Role.ADJUSTABLE):
        expect(bool(set(profile.cost(operator.name)) & set(device.precisions)), f"no cost for {operator.name!r}")
    _plan_for(graph, profile, device)
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
        outputs_equal: ``outputs_equal(a, b)`` says whether two results of the model are equal bit for bit.
        step: ``step(model, args)`` runs forward, and backward if the runtime trains, and returns the forward result.

    Raises:
        AssertionError: A method is missing, formats are unknown, FP32 is missing, a second capture has other names, a
            plan does not run, a second plan is not refused, ``undo`` does not restore the model, or the plan of the
            profile's problem cannot be applied.
    """
    plugin = create(Kind.RUNTIME, runtime)
    methods = ("capture", "device_formats", "operator_precisions", "profile", "apply", "undo")
    missing = [name for name in ("name", "trains", *methods) if not hasattr(plugin, name)]
    expect(not missing, f"the runtime lacks {', '.join(missing)}")
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
        precisions = plugin.operator_precisions(operator.op_type, device)
        expect(bool(precisions) and set(precisions) <= set(formats), f"operator {operator.name!r} runs in {precisions}")
        plan[operator.name] = precisions[0]

    def check_plan(choices: Mapping[str, str]) -> None:
        applied = plugin.apply(model, choices, graph=graph)
        step(applied, args)
        try:
            plugin.apply(applied, choices, graph=graph)
        except QSyncError:
            pass
        else:
            raise AssertionError("a second plan is applied over the first without undo")
        restored = plugin.undo(applied)
        expect(bool(outputs_equal(step(restored, args), before)), "undo does not give the model back as it was")

    check_plan(plan)
    check_plan(dict.fromkeys(plan, "FP32"))
    # Last, because profiling takes longest.
    check_plan(_plan_from(plugin.profile(model, args, device=device, repeats=2), graph, plugin.trains))


def _plan_from(profile: DeviceProfile, graph: OpGraph, trains: bool) -> dict[str, str]:
    expect(profile.fingerprint == graph.fingerprint(), "the profile is of another graph")
    expect(DeviceProfile.from_json(profile.to_json()) == profile, "the profile is not the same after a file")
    backward = {cost.backward_ns for table in profile.measurements.values() for cost in table.values()}
    expect(trains or backward == {0}, "a runtime that does not train has backward times in its profile")
    device = DeviceType(name="here", count=1, memory_limit_bytes=2**50, precisions=tuple(profile.formats))
    plan = _plan_for(graph, profile, device, slack=0.1)
    names = {operator.name for operator in graph.by_role(Role.ADJUSTABLE)}
    return {name: precision for name, precision in plan.devices["here"].items() if name in names}


def _plan_for(graph: OpGraph, profile: DeviceProfile, device: DeviceType, *, slack: float = 0.0) -> Plan:
    table = FormatIndicator().sensitivities(graph, ModelKnowledge(), profile.formats)
    try:
        cluster = Cluster(name="sample", devices=(device,), network=NETWORK)
        solution = solve(build_problem(graph, {device.name: profile}, table, cluster, slack=slack))
    except QSyncError as failure:
        raise AssertionError(f"the profile makes no usable problem: {failure}") from failure
    expect(solution.plan is not None, f"the problem of the profile has no plan: {solution.reason}")
    assert solution.plan is not None
    return solution.plan


def _check_formats(formats: Mapping[str, PrecisionFormats]) -> None:
    expect("FP32" in formats, f"the device's precisions are {', '.join(formats)}: FP32 is needed")
    for precision, borders in formats.items():
        for name in (precision, borders.output, borders.gradient_input, borders.gradient_output):
            expect(name in FORMATS, f"unknown format {name!r}: allowed are {', '.join(FORMATS)}")
    ranks = [FORMATS[name].rank for name in formats]
    expect(ranks == sorted(ranks), f"precisions must stand coarsest first, but are {', '.join(formats)}")
