"""The sub-commands solve, evaluate and compare."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from qsync_opt.cli.app import EXIT_INFEASIBLE, EXIT_OK, Runner, print_json
from qsync_opt.cli.console import (
    add_quiet,
    check_outputs,
    estimate_notice,
    gap_text,
    mebibytes,
    milliseconds,
    number,
    print_table,
)
from qsync_opt.errors import UnsupportedError

if TYPE_CHECKING:
    from qsync_opt.training import Evaluation, FastestPlan, Plan, Problem, Solution


def add_solve(parser: argparse.ArgumentParser) -> Runner:
    """Choose a precision for every operator."""
    parser.add_argument("problem", metavar="PROBLEM", help="problem file")
    parser.add_argument(
        "--method", help="greedy (default; exact with --sensitivity-budget), qsync, exact, exhaustive, ..."
    )
    parser.add_argument("--solver", help="ortools, pulp, highs, scip, cp-sat, ...; the first installed by default")
    parser.add_argument("--time-limit", type=float, metavar="S", help="seconds for the whole solve")
    parser.add_argument("--gap", type=float, metavar="G", help="relative gap at which to stop, such as 0.01")
    parser.add_argument("--start", metavar="PLAN", help="plan file to start from; it need not be feasible")
    parser.add_argument(
        "--tied", metavar="GROUP", action="append", default=[],
        help="operators that share one precision, names with commas between, or the word 'blocks': the same operator "
        "of identical blocks; may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--sensitivity-budget", type=float, metavar="B",
        help="turn the problem round: the least iteration time with at most this sensitivity, proved by the method "
        "exact, sought by greedy",
    )  # fmt: skip
    parser.add_argument("--output", metavar="PLAN", help="write the plan to this file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_quiet(parser)
    return _solve


def _solve(options: argparse.Namespace) -> int:
    from qsync_opt.io import waiting
    from qsync_opt.training import load_plan, load_problem, solve

    check_outputs([options.output], [options.problem])  # a plan to start from may be replaced
    problem = load_problem(options.problem)
    tied = _tied(problem, options.tied)
    if options.sensitivity_budget is not None:
        return _solve_turned(problem, options, tied)
    start = None if options.start is None else load_plan(options.start)
    method = options.method or "greedy"
    with waiting(False if options.quiet else None, f"solving by {method}", options.time_limit):
        solution = solve(
            problem, method, solver=options.solver, time_limit_s=options.time_limit, gap=options.gap,
            start=start, tied=tied,
        )  # fmt: skip
    if solution.plan is not None and options.output is not None:
        solution.plan.save(options.output)
    if options.json:
        print_json(solution.to_json())
    else:
        print_solution(problem, solution)
        estimate_notice(problem.extras)
    return EXIT_OK if solution.plan is not None else EXIT_INFEASIBLE


def _tied(problem: Problem, groups: list[str]) -> list[tuple[str, ...]]:
    """Groups as they were asked for on the command line."""
    from qsync_opt.training import identical_blocks

    tied: list[tuple[str, ...]] = []
    for text in groups:
        if text == "blocks":
            tied += identical_blocks(problem)
            continue
        names = tuple(name.strip() for name in text.split(",") if name.strip())
        if len(names) < 2:
            raise UnsupportedError(
                f"--tied {text!r} names {len(names)} operators; give at least two with commas between, or 'blocks'"
            )
        tied.append(names)
    return tied


def _solve_turned(problem: Problem, options: argparse.Namespace, tied: list[tuple[str, ...]]) -> int:
    """The least iteration time under a budget of sensitivity; the problem's latency limit is set aside."""
    from qsync_opt.io import waiting
    from qsync_opt.training import fastest

    for name, given in (("--start", options.start), ("--gap", options.gap)):
        if given is not None:
            raise UnsupportedError(
                f"{name} does not go with --sensitivity-budget, which seeks least time; leave it out"
            )
    method = options.method or "exact"
    with waiting(False if options.quiet else None, "seeking the least iteration time", options.time_limit):
        found = fastest(
            problem, method, sensitivity_budget=options.sensitivity_budget, solver=options.solver,
            time_limit_s=options.time_limit, tied=tied,
        )  # fmt: skip
    if found is not None and options.output is not None:
        found.plan.save(options.output)
    why: tuple[str, str | None] = ("", None)
    if found is None:
        why = why_not_fast(problem, options.sensitivity_budget, options.solver, options.time_limit)
    if options.json:
        print_json(turned_json(found, method, *why))
    else:
        print_turned(problem, found, options.sensitivity_budget, why[1])
    return EXIT_OK if found is not None else EXIT_INFEASIBLE


def print_turned(problem: Problem, found: FastestPlan | None, budget: float, reason: str | None) -> None:
    """Print for people what the problem turned round has given."""
    if found is None:
        print(f"{problem.name}: {reason}")
        return
    proof = "proved least" if found.proved else f"at least {milliseconds(found.bound_ns)}"
    print(f"{problem.name}: {found.method} in {found.solve_seconds:.2f} s")
    print(f"iteration time  {milliseconds(found.iteration_ns)} ({proof})")
    print(f"objective       {found.evaluation.objective:.9g} (budget {budget:.9g})")
    _print_devices(problem, found.plan, found.evaluation)
    estimate_notice(problem.extras)


def why_not_fast(
    problem: Problem, budget: float, solver: str | None, time_limit: float | None
) -> tuple[str, str | None]:
    """Termination and reason where no plan keeps the budget: the least sensitivity that memory allows."""
    from dataclasses import replace

    from qsync_opt.training import NO_LIMIT_NS, solve

    patient = replace(problem, latency_limit_ns=NO_LIMIT_NS)
    least = solve(patient, "exact", solver=solver, time_limit_s=time_limit)
    if least.objective is None or least.bound is None:
        return least.termination.value, least.reason
    if least.bound > budget:
        text = f"no plan within the memory limits keeps a sensitivity of {budget:.9g}; the least that could be met is "
        return "infeasible", text + f"{least.objective:.9g}"
    return "time_limit", f"no plan with a sensitivity of at most {budget:.9g} was found; allow more time"


def turned_json(found: FastestPlan | None, method: str, ended: str, reason: str | None) -> dict[str, Any]:
    """The keys of solve, and the bound of the iteration time; what is minimised has no bound of sensitivity."""
    if found is not None:
        ended = "optimal" if found.proved else "feasible"
    evaluation = None if found is None else found.evaluation
    return {
        "termination": ended,
        "point": "none" if found is None else "feasible",
        "objective": None if evaluation is None else evaluation.objective,
        "bound": None,
        "gap": None,
        "iteration_ns": None if found is None else found.iteration_ns,
        "iteration_bound_ns": None if found is None else found.bound_ns,
        "memory_kib": None if evaluation is None else evaluation.memory_kib,
        "sensitivity": None if evaluation is None else evaluation.sensitivity,
        "method": method,
        "solver": None if found is None else found.method,
        "build_seconds": 0.0,
        "solve_seconds": 0.0 if found is None else found.solve_seconds,
        "reason": reason,
    }


def add_evaluate(parser: argparse.ArgumentParser) -> Runner:
    """Time, memory and sensitivity of a plan, by code that trusts no solver."""
    parser.add_argument("problem", metavar="PROBLEM", help="problem file")
    parser.add_argument("plan", metavar="PLAN", help="plan file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return _evaluate


def _evaluate(options: argparse.Namespace) -> int:
    from qsync_opt.training import evaluate, load_plan, load_problem

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
    from qsync_opt.io import waiting
    from qsync_opt.registry import Kind, find
    from qsync_opt.training import load_problem, solve

    methods = [name.strip() for name in options.methods.split(",") if name.strip()]
    if not methods:
        raise UnsupportedError("--methods is empty; give at least one, such as greedy,exact")
    for name in methods:
        find(Kind.FORMULATION, name)  # all names are checked before the first one runs
    problem = load_problem(options.problem)
    results = []
    for name in methods:
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
    print(f"objective       {solution.objective:.9g}  (bound {number(solution.bound)}, gap {gap_text(solution.gap)})")
    iteration_ns, limit_ns = solution.evaluation.iteration_ns, problem.latency_limit_ns
    print(f"iteration time  {milliseconds(iteration_ns)} (limit {milliseconds(limit_ns)})")
    _print_devices(problem, solution.plan, solution.evaluation)


def _print_devices(problem: Problem, plan: Plan, evaluation: Evaluation) -> None:
    for device in problem.devices:
        found = evaluation.devices[device.name]
        counts: dict[str, int] = {}
        for precision in plan.devices[device.name].values():
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
            gap_text(solution.gap),
            "-" if solution.iteration_ns is None else milliseconds(solution.iteration_ns),
            f"{solution.build_seconds + solution.solve_seconds:.2f}",
        )
        for solution in results
    )
    print_table(header, rows)
    for solution in results:
        if solution.reason:
            print(f"{solution.method}: {solution.reason}")
