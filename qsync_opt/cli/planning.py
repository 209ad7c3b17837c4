"""The command plan: from an ONNX file and a cluster file to a plan, without a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qsync_opt.cli.console import (
    EXIT_INFEASIBLE,
    EXIT_OK,
    Json,
    Method,
    PlanOutput,
    Quiet,
    Solver,
    TimeLimit,
    Verbose,
    check_outputs,
    gap_text,
    milliseconds,
    option,
    print_estimates,
    print_json,
    registered,
)
from qsync_opt.cli.solving import fastest, finish, refuse_options
from qsync_opt.errors import UnsupportedError

if TYPE_CHECKING:
    from qsync_opt.cluster import Cluster, DeviceType
    from qsync_opt.costs import DeviceProfile
    from qsync_opt.gradients import JointProblem
    from qsync_opt.io import Report
    from qsync_opt.model import OpGraph
    from qsync_opt.sensitivity import ModelKnowledge, SensitivityValues
    from qsync_opt.training import Problem

_STEPS = 5


def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL.onnx", help="model file, with fixed shapes")],
    cluster: Annotated[
        str, typer.Argument(metavar="CLUSTER.yaml", help="cluster file; a type without profile is estimated")
    ],
    costs: Annotated[
        str,
        option(
            "NAME",
            "cost model: auto (a profile where there is one, else roofline), ...",
            autocompletion=registered("cost model"),
        ),
    ] = "auto",
    indicator: Annotated[
        str | None,
        option(
            "NAME",
            "sensitivities from: weights (default), formats, ...; of statistics (default: what they hold): "
            "probed, propagated, progress, loss, depth, hessian, fisher, weight, random",
            autocompletion=registered("indicator"),
        ),
    ] = None,
    statistics: Annotated[
        str | None, option("FILE", "statistics collected of this model, for the sensitivities")
    ] = None,
    method: Method = None,
    solver: Solver = None,
    time_limit: TimeLimit = None,
    latency_limit: Annotated[
        str | None, option("TIME", "such as '120 ms'; the fastest plan that fits, by default")
    ] = None,
    noise_budget: Annotated[
        float | None,
        option(
            "SHARE",
            "minimise the iteration time, raising the variance of the averaged gradient by at most this share of "
            "what it has anyway, such as 0.05; needs --statistics of two batches or more",
        ),
    ] = None,
    slack: Annotated[float, option("X", "lengthen the fastest plan's time by X")] = 0.0,
    compress: Annotated[
        str | None,
        option(
            "COSTS",
            "choose a scheme for every gradient bucket too, by this file of measured gradients and times of schemes "
            "(auto_plan(compress=True) measures them: plan.gradient_costs.save(FILE)); the plan is of both",
        ),
    ] = None,
    optimizer: Annotated[str, option("NAME", "for estimates: adamw, momentum or sgd")] = "adamw",
    output: PlanOutput = None,
    save_problem: Annotated[str | None, option("PROBLEM", "write the problem to this file")] = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Plan an ONNX model on a cluster; where nothing was measured, from labelled estimates."""
    from qsync_opt import training
    from qsync_opt.gradients import load_gradient_costs
    from qsync_opt.io import check_number, reporting
    from qsync_opt.systems import solve

    check_outputs([output, save_problem], [model, cluster, statistics, compress])
    method = method or ("greedy" if noise_budget is None else "exact")
    if noise_budget is not None:
        refuse_options("--noise-budget", {"--latency-limit": latency_limit, "--slack": slack or None})
        check_number(noise_budget, "--noise-budget")
        refuse_options("--noise-budget", {"--compress": compress})
    bound_ns = None
    with reporting(False if quiet else None, "plan") as report:
        problem = _problem(
            report, model, cluster, costs=costs, optimizer=optimizer, indicator=indicator, statistics=statistics,
            latency_limit=latency_limit, slack=slack, relative=noise_budget is not None,
        )  # fmt: skip
        if compress is not None:
            report(_STEPS - 1, _STEPS, f"solving by {method}")
            joint = load_gradient_costs(compress).joint(problem)
            answer = solve(joint, method, solver=solver, time_limit_s=time_limit)
        elif noise_budget is None:
            report(_STEPS - 1, _STEPS, f"solving by {method}")
            solution = training.solve(problem, method, solver=solver, time_limit_s=time_limit)
        else:
            report(_STEPS - 1, _STEPS, "minimising the iteration time")
            solution, bound_ns = fastest(problem, method, noise_budget, solver, time_limit)
            if solution.iteration_ns is not None:
                problem = replace(problem, latency_limit_ns=solution.iteration_ns)
        report(_STEPS, _STEPS, "done")
    if compress is not None:
        return _finish_joint(joint, answer, output=output, save_problem=save_problem, json=json)
    if save_problem is not None:
        problem.save(save_problem)
    labels = {"problem": problem.name, "estimates": problem.extras.get(("x-estimates",))}
    return finish(problem, solution, output=output, json=json, budget=noise_budget, bound_ns=bound_ns, **labels)


def _finish_joint(joint: JointProblem, answer: Any, *, output: str | None, save_problem: str | None, json: bool) -> int:
    """Write and print a plan of precisions and schemes, or why there is none; return the exit status."""
    if save_problem is not None:
        joint.save(save_problem)
    if answer.plan is not None and output is not None:
        answer.plan.save(output)
    schemes = {} if answer.plan is None else dict(answer.plan.schemes.schemes)
    if json:
        evaluation = None if answer.evaluation is None else answer.evaluation.to_json()
        print_json({**answer.to_json(), "evaluation": evaluation, "schemes": schemes, "problem": joint.name})
    elif answer.plan is None:
        print(f"{joint.name}: {answer.termination}: {answer.reason}")
    else:
        evaluation, limit_ns = answer.evaluation, joint.training.latency_limit_ns
        print(f"{joint.name}: {answer.termination} by {answer.method}, gap {gap_text(answer.gap)}")
        print(f"objective       {answer.objective:.9g}: precisions {evaluation.sensitivity:.9g}, schemes "
              f"{evaluation.variance:.9g}")  # fmt: skip
        print(f"iteration time  {milliseconds(evaluation.iteration_ns)} (limit {milliseconds(limit_ns)})")
        for name, operators in answer.plan.precisions.devices.items():
            counts = Counter(operators.values())
            print(f"{name:<15} {', '.join(f'{count} {precision}' for precision, count in counts.items())}")
        counts = Counter(schemes.values())
        print(f"{len(schemes)} buckets       {', '.join(f'{count} {name}' for name, count in counts.items())}")
        print_estimates(joint.training.extras)
    return EXIT_OK if answer.plan is not None else EXIT_INFEASIBLE


def _problem(
    report: Report,
    model: str,
    cluster_file: str,
    *,
    costs: str,
    optimizer: str,
    indicator: str | None,
    statistics: str | None,
    latency_limit: str | None,
    slack: float,
    relative: bool,
) -> Problem:
    """The problem that the options describe; ``relative``: sensitivities are shares of the gradient's own noise."""
    from qsync_opt.cluster import load_cluster
    from qsync_opt.io import TIME_S, parse_quantity
    from qsync_opt.model.onnx import read_onnx
    from qsync_opt.registry import Kind, create
    from qsync_opt.training import NO_LIMIT_NS, build_problem

    limit_ns = NO_LIMIT_NS if relative else None
    if latency_limit is not None:
        limit_ns = round(1e9 * parse_quantity(latency_limit, TIME_S, "--latency-limit"))
    source = create(Kind.INDICATOR, indicator or ("weights" if statistics is None else "statistics"))
    cluster = load_cluster(cluster_file)
    report(0, _STEPS, "reading the model")
    graph = read_onnx(model)
    report(1, _STEPS, "costs of every operator")
    profiles = _profiles(graph, cluster, costs, optimizer)
    report(2, _STEPS, "sensitivities")
    # Border formats differ between device types, and with them the noise.
    knowledge = _knowledge(model, indicator, statistics)
    formats = {device.name: profiles[device.name].formats for device in cluster.planned}
    tables = {
        name: _with_exclusions(source.sensitivities(graph, knowledge, formats[name]), formats[name]) for name in formats
    }
    if relative:
        tables = {name: _relative(table, knowledge, cluster) for name, table in tables.items()}
    report(3, _STEPS, "building the problem")
    return build_problem(
        graph,
        profiles,
        {},
        cluster,
        slack=slack,
        latency_limit_ns=limit_ns,
        by_device=tables,
        sensitivity_estimate=source.estimate,
    )


def _profiles(graph: OpGraph, cluster: Cluster, costs: str, optimizer: str) -> dict[str, DeviceProfile]:
    from qsync_opt.costs import Assumptions, RooflineCosts
    from qsync_opt.registry import Kind, create

    def cost_model(device: DeviceType) -> Any:
        name = costs
        if name == "auto":
            name = "roofline" if device.profile is None else "profile"
        if name == "roofline":
            return RooflineCosts(Assumptions(optimizer=optimizer))
        return create(Kind.COST_MODEL, name)

    return {device.name: cost_model(device).profile(graph, device) for device in cluster.devices}


def _knowledge(model: str, indicator: str | None, statistics_file: str | None) -> ModelKnowledge:
    from qsync_opt.model.onnx import read_weights
    from qsync_opt.sensitivity import IndicatorKind, ModelKnowledge, load_statistics

    statistics = None if statistics_file is None else load_statistics(statistics_file)
    # Reading every weight takes most of the time; the formats alone need none, nor do indicators of statistics.
    needless = (None, "formats", "statistics", *IndicatorKind) if statistics is not None else ("formats",)
    weights = None if indicator in needless else read_weights(model)
    return ModelKnowledge(statistics=statistics, weights=weights)


def _with_exclusions(table: Any, formats: Iterable[str]) -> Any:
    """Another package's table, which leaves out the precisions that an operator must not get, with these excluded."""
    from qsync_opt.sensitivity import SensitivityTable, SensitivityValues

    if isinstance(table, SensitivityTable | SensitivityValues):
        return table
    excluded = {
        name: {precision: "the indicator leaves it out" for precision in formats if precision not in (*row, "FP32")}
        for name, row in table.items()
    }
    return SensitivityValues(unit="of the indicator", values_of=table, excluded=excluded)


def _relative(table: Any, knowledge: ModelKnowledge, cluster: Cluster) -> SensitivityValues:
    from qsync_opt.sensitivity import SensitivityTable

    if knowledge.statistics is None or not isinstance(table, SensitivityTable):
        raise UnsupportedError(
            "--noise-budget is a share of the gradient's own noise: give --statistics FILE, and an indicator of it "
            "whose values are variances of the gradient (probed, propagated, depth)"
        )
    return table.relative_to(knowledge.statistics.gradient_noise, workers=cluster.num_workers)
