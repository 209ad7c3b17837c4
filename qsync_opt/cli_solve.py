"""The sub-commands solve, evaluate and compare."""

from __future__ import annotations

import argparse
import logging
from typing import TYPE_CHECKING

from qsync_opt.cli import EXIT_INFEASIBLE, EXIT_OK, Runner, print_json
from qsync_opt.cli_text import add_quiet, estimate_notice, mebibytes, milliseconds, number, percent, print_table
from qsync_opt.errors import UnsupportedError

if TYPE_CHECKING:
    from qsync_opt.problem import Problem
    from qsync_opt.solution import Solution

_LOGGER = logging.getLogger(__name__)


def add_solve(parser: argparse.ArgumentParser) -> Runner:
    """Choose a precision for every operator."""
    parser.add_argument("problem", metavar="PROBLEM", help="problem file")
    parser.add_argument("--method", default="greedy", help="greedy (default), qsync, exact, exhaustive, ...")
    parser.add_argument("--solver", help="ortools, pulp, highs, scip, cp-sat, ...; the first installed by default")
    parser.add_argument("--time-limit", type=float, metavar="S", help="seconds for the whole solve")
    parser.add_argument("--gap", type=float, metavar="G", help="relative gap at which to stop, such as 0.01")
    parser.add_argument("--output", metavar="PLAN", help="write the plan to this file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_quiet(parser)
    return _solve


def _solve(options: argparse.Namespace) -> int:
    from qsync_opt.jsonio import check_writable
    from qsync_opt.planner import solve
    from qsync_opt.problem_file import load_problem
    from qsync_opt.progress import waiting

    if options.output is not None:
        check_writable(options.output)  # before the work, not after it
    problem = load_problem(options.problem)
    with waiting(False if options.quiet else None, f"solving by {options.method}", options.time_limit):
        solution = solve(
            problem, options.method, solver=options.solver, time_limit_s=options.time_limit, gap=options.gap
        )
    if solution.plan is not None and options.output is not None:
        solution.plan.save(options.output)
    if options.json:
        print_json(solution.to_json())
    else:
        print_solution(problem, solution)
        estimate_notice(problem.extras)
    return EXIT_OK if solution.plan is not None else EXIT_INFEASIBLE


def add_evaluate(parser: argparse.ArgumentParser) -> Runner:
    """Time, memory and sensitivity of a plan, by code that trusts no solver."""
    parser.add_argument("problem", metavar="PROBLEM", help="problem file")
    parser.add_argument("plan", metavar="PLAN", help="plan file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return _evaluate


def _evaluate(options: argparse.Namespace) -> int:
    from qsync_opt.evaluation import evaluate
    from qsync_opt.plan import load_plan
    from qsync_opt.problem_file import load_problem

    problem = load_problem(options.problem)
    evaluation = evaluate(problem, load_plan(options.plan))
    if options.json:
        print_json(evaluation.to_json())
    else:
        limit = milliseconds(problem.latency_limit_ns)
        print(f"objective       {evaluation.objective:.9g}")
        print(f"iteration time  {milliseconds(evaluation.iteration_ns)} (limit {limit})")
        for device in evaluation.devices.values():
            print(
                f"{device.name:<15} {mebibytes(device.memory_kib)} of {mebibytes(device.memory_limit_kib)}, "
                f"sensitivity {device.sensitivity:.9g}"
            )
        print("feasible" if evaluation.feasible else "\n".join(f"violated: {text}" for text in evaluation.violations))
        estimate_notice(problem.extras)
    return EXIT_OK if evaluation.feasible else EXIT_INFEASIBLE


def add_compare(parser: argparse.ArgumentParser) -> Runner:
    """Solve by several methods and show them side by side."""
    parser.add_argument("problem", metavar="PROBLEM", help="problem file")
    parser.add_argument("--methods", default="greedy,exact", help="names with commas between (default: greedy,exact)")
    parser.add_argument("--time-limit", type=float, metavar="S", help="seconds for each method")
    parser.add_argument("--json", action="store_true", help="print one JSON list")
    add_quiet(parser)
    return _compare


def _compare(options: argparse.Namespace) -> int:
    from qsync_opt.planner import solve
    from qsync_opt.problem_file import load_problem
    from qsync_opt.progress import waiting
    from qsync_opt.registry import Kind, find

    methods = [name.strip() for name in options.methods.split(",") if name.strip()]
    if not methods:
        raise UnsupportedError("--methods is empty; give at least one, such as greedy,exact")
    for name in methods:
        find(Kind.FORMULATION, name)  # all names are checked before the first one runs
    problem = load_problem(options.problem)
    results = []
    for name in methods:
        _LOGGER.info("solving %s by %s", problem.name, name)
        with waiting(False if options.quiet else None, f"solving by {name}", options.time_limit):
            results.append(solve(problem, name, time_limit_s=options.time_limit))
    if options.json:
        print_json([{**solution.to_json(), "feasible": solution.plan is not None} for solution in results])
    else:
        _print_comparison(results)
    return EXIT_OK if any(solution.plan is not None for solution in results) else EXIT_INFEASIBLE


def print_solution(problem: Problem, solution: Solution) -> None:
    """Print a solution for people."""
    solver = f" with {solution.solver}" if solution.solver else ""
    seconds = solution.build_seconds + solution.solve_seconds
    print(f"{problem.name}: {solution.termination} by {solution.method}{solver} in {seconds:.2f} s")
    if solution.plan is None or solution.evaluation is None:
        print(f"no plan: {solution.reason}")
        return
    print(f"objective       {solution.objective:.9g}  (bound {number(solution.bound)}, gap {percent(solution.gap)})")
    iteration_ns, limit_ns = solution.evaluation.iteration_ns, problem.latency_limit_ns
    print(f"iteration time  {milliseconds(iteration_ns)} (limit {milliseconds(limit_ns)})")
    for device in problem.devices:
        found = solution.evaluation.devices[device.name]
        counts: dict[str, int] = {}
        for precision in solution.plan.devices[device.name].values():
            counts[precision] = counts.get(precision, 0) + 1
        levels = ", ".join(f"{counts[p]} {p}" for p in problem.formats if p in counts)
        memory = f"{mebibytes(found.memory_kib)} of {mebibytes(found.memory_limit_kib)}"
        print(
            f"{device.name:<15} {memory}, sensitivity {found.sensitivity:.9g}, adjustable operators: {levels or 'none'}"
        )


def _print_comparison(results: list[Solution]) -> None:
    header = ("method", "ended", "objective", "bound", "gap", "iteration", "seconds")
    rows = (
        (
            solution.method,
            solution.termination.value,
            number(solution.objective),
            number(solution.bound),
            percent(solution.gap),
            "-" if solution.iteration_ns is None else milliseconds(solution.iteration_ns),
            f"{solution.build_seconds + solution.solve_seconds:.2f}",
        )
        for solution in results
    )
    print_table(header, rows)
    for solution in results:
        if solution.reason:
            print(f"{solution.method}: {solution.reason}")
