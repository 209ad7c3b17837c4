"""The command ``qsync-opt plan``: from an ONNX file and a cluster file to a plan, without a GPU."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from qsync_opt.cli.app import EXIT_INFEASIBLE, EXIT_OK, Runner, print_json
from qsync_opt.cli.console import add_quiet, check_outputs, estimate_notice
from qsync_opt.errors import UnsupportedError

if TYPE_CHECKING:
    from qsync_opt.cluster import Cluster, DeviceType
    from qsync_opt.costs import DeviceProfile
    from qsync_opt.model import OpGraph
    from qsync_opt.sensitivity import ModelKnowledge, SensitivityValues
    from qsync_opt.training import Problem

_LOGGER = logging.getLogger(__name__)
_STEPS = 5


def add_plan(parser: argparse.ArgumentParser) -> Runner:
    """Plan an ONNX model on a cluster; where nothing was measured, from labelled estimates."""
    parser.add_argument("model", metavar="MODEL.onnx", help="model file, with fixed shapes")
    parser.add_argument("cluster", metavar="CLUSTER.yaml", help="cluster file; a type without profile is estimated")
    parser.add_argument(
        "--costs", default="auto", help="cost model: auto (default: a profile where there is one, else roofline), ..."
    )
    parser.add_argument(
        "--indicator",
        help="sensitivities from: weights (default), formats, ...; of statistics (default: what they hold): probed, "
        "propagated, progress, loss, depth, hessian, fisher, weight, random",
    )
    parser.add_argument(
        "--statistics", metavar="FILE", help="collected statistics of this model, from which sensitivities are made"
    )
    parser.add_argument("--method", help="greedy (default; exact with --noise-budget), exact, ...")
    parser.add_argument("--solver", help="as in solve")
    parser.add_argument("--time-limit", type=float, metavar="S", help="seconds for the solve")
    parser.add_argument(
        "--latency-limit", metavar="TIME", help="such as '120 ms'; the fastest plan that fits, by default"
    )
    parser.add_argument(
        "--noise-budget",
        type=float,
        metavar="SHARE",
        help="turn the problem round: the fastest plan that raises the variance of the averaged gradient by at most "
        "this share of what it has anyway, such as 0.05; needs --statistics of two batches or more",
    )
    parser.add_argument("--slack", type=float, default=0.0, metavar="X", help="lengthen the fastest plan's time by X")
    parser.add_argument("--optimizer", default="adamw", help="for estimates: adamw (default), momentum or sgd")
    parser.add_argument("--output", metavar="PLAN", help="write the plan to this file")
    parser.add_argument("--save-problem", metavar="PROBLEM", help="write the problem to this file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_quiet(parser)
    return _plan


def _plan(options: argparse.Namespace) -> int:
    from qsync_opt.cli.solving import print_solution
    from qsync_opt.io import reporting
    from qsync_opt.training import solve

    check_outputs([options.output, options.save_problem], [options.model, options.cluster, options.statistics])
    if options.noise_budget is not None:
        return _plan_within(options)
    method = options.method or "greedy"
    with reporting(False if options.quiet else None, "plan") as report:
        problem = _problem(options, report)
        report(_STEPS - 1, _STEPS, f"solving by {method}")
        solution = solve(problem, method, solver=options.solver, time_limit_s=options.time_limit)
        report(_STEPS, _STEPS, "done")
    if options.save_problem is not None:
        problem.save(options.save_problem)
    if solution.plan is not None and options.output is not None:
        solution.plan.save(options.output)
    if options.json:
        print_json({**solution.to_json(), **_labels(problem)})
    else:
        print_solution(problem, solution)
        estimate_notice(problem.extras)
    return EXIT_OK if solution.plan is not None else EXIT_INFEASIBLE


def _labels(problem: Problem) -> dict[str, Any]:
    note = {path[0]: value for path, value in problem.extras.items() if len(path) == 1}
    return {"problem": problem.name, "estimates": note.get("x-estimates")}


def _plan_within(options: argparse.Namespace) -> int:
    """The fastest plan under a budget of gradient noise; the problem that is saved has its time as the limit."""
    from dataclasses import replace

    from qsync_opt.cli.solving import print_turned, turned_json, why_not_fast
    from qsync_opt.io import check_number, reporting
    from qsync_opt.training import fastest

    for name, given in (("--latency-limit", options.latency_limit), ("--slack", options.slack or None)):
        if given is not None:
            raise UnsupportedError(f"{name} does not go with --noise-budget, which seeks least time; leave it out")
    method, budget = options.method or "exact", options.noise_budget
    check_number(budget, "--noise-budget")
    with reporting(False if options.quiet else None, "plan") as report:
        problem = _problem(options, report)
        report(_STEPS - 1, _STEPS, "seeking the least iteration time")
        found = fastest(
            problem, method, sensitivity_budget=budget, solver=options.solver, time_limit_s=options.time_limit
        )
        report(_STEPS, _STEPS, "done")
    if found is not None:
        problem = replace(problem, latency_limit_ns=found.iteration_ns)
        if options.output is not None:
            found.plan.save(options.output)
    if options.save_problem is not None:
        problem.save(options.save_problem)
    why = ("", None) if found else why_not_fast(problem, budget, options.solver, options.time_limit)
    if options.json:
        print_json({**turned_json(found, method, *why), **_labels(problem)})
    else:
        print_turned(problem, found, budget, why[1])
    return EXIT_OK if found is not None else EXIT_INFEASIBLE


def _without_absent(table: Any, formats: Iterable[str]) -> Any:
    """Another package's table, which leaves out the precisions that an operator must not get, with these excluded."""
    from qsync_opt.sensitivity import SensitivityTable, SensitivityValues

    if isinstance(table, SensitivityTable | SensitivityValues):
        return table
    absent = {
        name: {precision: "the indicator leaves it out" for precision in formats if precision not in (*row, "FP32")}
        for name, row in table.items()
    }
    return SensitivityValues(unit="of the indicator", values_of=table, excluded=absent)


def _relative(table: Any, knowledge: ModelKnowledge, cluster: Cluster) -> SensitivityValues:
    """Sensitivities as shares of the noise that the averaged gradient has anyway."""
    from qsync_opt.sensitivity import SensitivityTable

    if knowledge.statistics is None or not isinstance(table, SensitivityTable):
        raise UnsupportedError(
            "--noise-budget is a share of the gradient's own noise: give --statistics FILE, and an indicator of it "
            "whose values are variances of the gradient (probed, propagated, depth)"
        )
    return table.relative_to(knowledge.statistics.gradient_noise, workers=cluster.num_workers)


def _problem(options: argparse.Namespace, report: Any) -> Problem:
    from qsync_opt.cluster import load_cluster
    from qsync_opt.io import TIME_S, parse_quantity
    from qsync_opt.model.onnx import read_onnx
    from qsync_opt.training import NO_LIMIT_NS, build_problem

    limit_ns = None
    if options.latency_limit is not None:
        limit_ns = round(1e9 * parse_quantity(options.latency_limit, TIME_S, "--latency-limit"))
    elif options.noise_budget is not None:
        limit_ns = NO_LIMIT_NS
    indicator = _indicator(options)
    cluster = load_cluster(options.cluster)
    report(0, _STEPS, "reading the model")
    graph = read_onnx(options.model)
    report(1, _STEPS, "costs of every operator")
    profiles = _profiles(graph, cluster, options)
    report(2, _STEPS, "sensitivities")
    # Border formats differ between device types, and with them the noise.
    knowledge = _knowledge(options)
    tables = {
        d.name: _without_absent(
            indicator.sensitivities(graph, knowledge, profiles[d.name].formats), profiles[d.name].formats
        )
        for d in cluster.planned
    }
    if options.noise_budget is not None:
        tables = {name: _relative(table, knowledge, cluster) for name, table in tables.items()}
    report(3, _STEPS, "building the problem")
    return build_problem(
        graph,
        profiles,
        {},
        cluster,
        slack=options.slack,
        latency_limit_ns=limit_ns,
        by_device=tables,
        sensitivity_estimate=indicator.estimate,
    )


def _indicator(options: argparse.Namespace) -> Any:
    """The indicator of that name; if none is named that of the statistics, or else of the weights."""
    from qsync_opt.registry import Kind, create

    return create(Kind.INDICATOR, options.indicator or ("weights" if options.statistics is None else "statistics"))


def _profiles(graph: OpGraph, cluster: Cluster, options: argparse.Namespace) -> dict[str, DeviceProfile]:
    from qsync_opt.costs import Assumptions, RooflineCosts
    from qsync_opt.registry import Kind, create

    def cost_model(device: DeviceType) -> Any:
        name = options.costs
        if name == "auto":
            name = "roofline" if device.profile is None else "profile"
        if name == "roofline":
            return RooflineCosts(Assumptions(optimizer=options.optimizer))
        return create(Kind.COST_MODEL, name)

    return {device.name: cost_model(device).profile(graph, device) for device in cluster.devices}


def _knowledge(options: argparse.Namespace) -> ModelKnowledge:
    from qsync_opt.model.onnx import read_weights
    from qsync_opt.sensitivity import IndicatorKind, ModelKnowledge, load_statistics

    statistics = None if options.statistics is None else load_statistics(options.statistics)
    # Reading every weight takes most of the time; the formats alone need none, nor do indicators of statistics.
    needless = (None, "formats", "statistics", *IndicatorKind) if statistics is not None else ("formats",)
    weights = None if options.indicator in needless else read_weights(options.model)
    return ModelKnowledge(statistics=statistics, weights=weights)
