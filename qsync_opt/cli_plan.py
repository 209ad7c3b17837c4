"""The command ``qsync-opt plan``: from an ONNX file and a cluster file to a plan, without a GPU."""

from __future__ import annotations

import argparse
import logging
from typing import TYPE_CHECKING, Any

from qsync_opt.cli import EXIT_INFEASIBLE, EXIT_OK, Runner, print_json
from qsync_opt.cli_text import add_quiet, check_outputs, estimate_notice

if TYPE_CHECKING:
    from qsync_opt.cluster import Cluster, DeviceType
    from qsync_opt.device_profile import DeviceProfile
    from qsync_opt.graph import OpGraph
    from qsync_opt.plugins import ModelKnowledge
    from qsync_opt.problem import Problem

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
        default="weights",
        help="sensitivities from: weights (default), formats, ...; of statistics: probed, progress, hessian, ...",
    )
    parser.add_argument(
        "--statistics", metavar="FILE", help="collected statistics of this model, from which sensitivities are made"
    )
    parser.add_argument("--method", default="greedy", help="greedy (default), exact, ...")
    parser.add_argument("--solver", help="as in solve")
    parser.add_argument("--time-limit", type=float, metavar="S", help="seconds for the solve")
    parser.add_argument(
        "--latency-limit", metavar="TIME", help="such as '120 ms'; the fastest plan that fits, by default"
    )
    parser.add_argument("--slack", type=float, default=0.0, metavar="X", help="lengthen the fastest plan's time by X")
    parser.add_argument("--optimizer", default="adamw", help="for estimates: adamw (default), momentum or sgd")
    parser.add_argument("--output", metavar="PLAN", help="write the plan to this file")
    parser.add_argument("--save-problem", metavar="PROBLEM", help="write the problem to this file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_quiet(parser)
    return _plan


def _plan(options: argparse.Namespace) -> int:
    from qsync_opt.cli_solve import print_solution
    from qsync_opt.planner import solve
    from qsync_opt.progress import reporting

    check_outputs([options.output, options.save_problem], [options.model, options.cluster, options.statistics])
    with reporting(False if options.quiet else None, "plan") as report:
        problem = _problem(options, report)
        report(_STEPS - 1, _STEPS, f"solving by {options.method}")
        solution = solve(problem, options.method, solver=options.solver, time_limit_s=options.time_limit)
        report(_STEPS, _STEPS, "done")
    if options.save_problem is not None:
        problem.save(options.save_problem)
    if solution.plan is not None and options.output is not None:
        solution.plan.save(options.output)
    if options.json:
        note = {path[0]: value for path, value in problem.extras.items() if len(path) == 1}
        print_json({**solution.to_json(), "problem": problem.name, "estimates": note.get("x-estimates")})
    else:
        print_solution(problem, solution)
        estimate_notice(problem.extras)
    return EXIT_OK if solution.plan is not None else EXIT_INFEASIBLE


def _problem(options: argparse.Namespace, report: Any) -> Problem:
    from qsync_opt.build import build_problem
    from qsync_opt.cluster import load_cluster
    from qsync_opt.onnx_reader import read_onnx
    from qsync_opt.units import TIME_S, parse_quantity

    limit_ns = None
    if options.latency_limit is not None:
        limit_ns = round(1e9 * parse_quantity(options.latency_limit, TIME_S, "--latency-limit"))
    indicator = _indicator(options)
    cluster = load_cluster(options.cluster)
    report(0, _STEPS, "reading the model")
    graph = read_onnx(options.model)
    report(1, _STEPS, "costs of every operator")
    profiles = _profiles(graph, cluster, options)
    report(2, _STEPS, "sensitivities")
    # Border formats differ between device types, and with them the noise.
    knowledge = _knowledge(options)
    tables = {d.name: indicator.sensitivities(graph, knowledge, profiles[d.name].formats) for d in cluster.planned}
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
    """The indicator of that name; with statistics, the way they are weighed, which they decide if none is named."""
    from qsync_opt.indicators import StatisticsIndicator
    from qsync_opt.registry import Kind, create
    from qsync_opt.sensitivity_table import IndicatorKind

    if options.statistics is None:
        return create(Kind.INDICATOR, options.indicator)
    named = options.indicator in list(IndicatorKind)
    return StatisticsIndicator(IndicatorKind(options.indicator) if named else None)


def _profiles(graph: OpGraph, cluster: Cluster, options: argparse.Namespace) -> dict[str, DeviceProfile]:
    from qsync_opt.cost_models import RooflineCosts
    from qsync_opt.registry import Kind, create
    from qsync_opt.roofline import Assumptions

    def cost_model(device: DeviceType) -> Any:
        name = options.costs
        if name == "auto":
            name = "roofline" if device.profile is None else "profile"
        if name == "roofline":
            return RooflineCosts(Assumptions(optimizer=options.optimizer))
        return create(Kind.COST_MODEL, name)

    return {device.name: cost_model(device).profile(graph, device) for device in cluster.devices}


def _knowledge(options: argparse.Namespace) -> ModelKnowledge:
    from qsync_opt.onnx_reader import read_weights
    from qsync_opt.plugins import ModelKnowledge
    from qsync_opt.statistics_file import load_statistics

    if options.statistics is not None:
        return ModelKnowledge(statistics=load_statistics(options.statistics))
    # Reading every weight takes most of the time; the formats alone need none.
    return ModelKnowledge(weights=None if options.indicator == "formats" else read_weights(options.model))
