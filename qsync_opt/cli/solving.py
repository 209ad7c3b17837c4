"""The commands solve, compare and pareto."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qsync_opt.cli.console import (
    EXIT_INFEASIBLE,
    EXIT_OK,
    Cache,
    Json,
    Method,
    NoCache,
    PlanOutput,
    ProblemFile,
    Quiet,
    Solver,
    TimeLimit,
    Verbose,
    check_outputs,
    choice,
    front_cache,
    gap_text,
    mebibytes,
    milliseconds,
    number,
    option,
    print_estimates,
    print_json,
    print_table,
)
from qsync_opt.errors import ProblemError, UnsupportedError
from qsync_opt.io import format_memory, write_text

if TYPE_CHECKING:
    from qsync_opt.training import Evaluation, Front, Plan, Problem, Solution, TerminationStatus

_LOGGER = logging.getLogger(__name__)


def solve(
    problem: ProblemFile,
    method: Method = None,
    solver: Solver = None,
    time_limit: TimeLimit = None,
    gap: Annotated[float | None, option("G", "relative gap at which to stop, such as 0.01")] = None,
    start: Annotated[str | None, option("PLAN", "plan file to start from; it need not be feasible")] = None,
    tied: Annotated[
        list[str] | None,
        option(
            "GROUP",
            "operators that share one precision, names with commas between, or the word 'blocks': the same "
            "operator of identical blocks; may be given several times",
        ),
    ] = None,
    sensitivity_budget: Annotated[
        float | None,
        option(
            "B",
            "minimise the iteration time with at most this sensitivity: proved by the method exact, searched for "
            "by greedy",
        ),
    ] = None,
    output: PlanOutput = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Choose a precision for every operator."""
    from qsync_opt import training
    from qsync_opt.io import waiting

    check_outputs([output], [problem])  # a plan to start from may be replaced
    loaded = training.load_problem(problem)
    groups = _tied_groups(loaded, tied or [])
    show = False if quiet else None
    if sensitivity_budget is not None:
        refuse_options("--sensitivity-budget", {"--start": start, "--gap": gap})
        method = method or "exact"
        with waiting(show, "minimising the iteration time", time_limit):
            solution, bound_ns = fastest(loaded, method, sensitivity_budget, solver, time_limit, tied=groups)
        return finish(loaded, solution, output=output, json=json, budget=sensitivity_budget, bound_ns=bound_ns)
    start_plan = None if start is None else training.load_plan(start)
    method = method or "greedy"
    with waiting(show, f"solving by {method}", time_limit):
        solution = training.solve(
            loaded, method, solver=solver, time_limit_s=time_limit, gap=gap, start=start_plan, tied=groups
        )
    return finish(loaded, solution, output=output, json=json)


def _tied_groups(problem: Problem, texts: list[str]) -> list[tuple[str, ...]]:
    from qsync_opt.training import identical_blocks

    groups: list[tuple[str, ...]] = []
    for text in texts:
        if text == "blocks":
            groups += identical_blocks(problem)
            continue
        names = tuple(name.strip() for name in text.split(",") if name.strip())
        if len(names) < 2:
            raise UnsupportedError(
                f"--tied {text!r} names {len(names)} operators; give at least two with commas between, or 'blocks'"
            )
        groups.append(names)
    return groups


def refuse_options(budget: str, options: dict[str, object]) -> None:
    """Refuse options that have no meaning where the iteration time is minimised under a budget."""
    for name, value in options.items():
        if value is not None:
            raise UnsupportedError(f"{name} does not go with {budget}, which minimises time; leave it out")


def finish(
    problem: Problem,
    solution: Solution,
    /,
    *,
    output: str | None,
    json: bool,
    budget: float | None = None,
    bound_ns: int | None = None,
    **labels: Any,
) -> int:
    """Write and print a solution, or why there is none; return the exit status.

    ``budget`` and ``bound_ns`` are the budget of `fastest` and the bound that it returned, ``labels`` further keys of
    the JSON object.
    """
    if solution.plan is not None and output is not None:
        solution.plan.save(output)
    if json:
        bound = {} if budget is None else {"iteration_bound_ns": bound_ns}
        print_json({**solution.to_json(), **bound, **labels})
    elif budget is not None and solution.plan is None:
        print(f"{problem.name}: {solution.reason}")
    else:
        _print_solution(problem, solution, budget, bound_ns)
        print_estimates(problem.extras)
    return EXIT_OK if solution.plan is not None else EXIT_INFEASIBLE


def fastest(
    problem: Problem, method: str, budget: float, solver: str | None, time_limit_s: float | None, **options: Any
) -> tuple[Solution, int | None]:
    """The fastest plan within a budget of sensitivity as a solution, and the bound of its iteration time."""
    from qsync_opt import training

    quickest = training.fastest(
        problem, method, sensitivity_budget=budget, solver=solver, time_limit_s=time_limit_s, **options
    )
    if quickest is None:
        ended, reason = _infeasibility(problem, budget, solver, time_limit_s)
    else:
        ended, reason = (
            training.TerminationStatus.OPTIMAL if quickest.proved else training.TerminationStatus.FEASIBLE,
            None,
        )
    solution = training.Solution(
        termination=ended,
        plan=None if quickest is None else quickest.plan,
        evaluation=None if quickest is None else quickest.evaluation,
        bound=None,  # of the sensitivity, which is not minimised
        method=method,
        solver=None if quickest is None else quickest.method,
        build_seconds=0.0,
        solve_seconds=0.0 if quickest is None else quickest.solve_seconds,
        reason=reason,
    )
    return solution, None if quickest is None else quickest.bound_ns


def _infeasibility(
    problem: Problem, budget: float, solver: str | None, time_limit_s: float | None
) -> tuple[TerminationStatus, str | None]:
    """Termination and reason where no plan keeps the budget: the least sensitivity that memory allows."""
    from qsync_opt import training

    unhurried = replace(problem, latency_limit_ns=training.NO_LIMIT_NS)
    least = training.solve(unhurried, "exact", solver=solver, time_limit_s=time_limit_s)
    if least.objective is None:
        return least.termination, least.reason
    if least.bound is not None and least.bound > budget:
        text = f"no plan within the memory limits keeps a sensitivity of {budget:.9g}; the least that could be met is "
        return training.TerminationStatus.INFEASIBLE, text + f"{least.objective:.9g}"
    text = f"no plan with a sensitivity of at most {budget:.9g} was found; allow more time"
    return training.TerminationStatus.TIME_LIMIT, text


def _print_solution(problem: Problem, solution: Solution, budget: float | None, bound_ns: int | None) -> None:
    solver = f" with {solution.solver}" if solution.solver else ""
    seconds = solution.build_seconds + solution.solve_seconds
    title = f"{solution.termination} by {solution.method}{solver}" if budget is None else solution.solver
    print(f"{problem.name}: {title} in {seconds:.2f} s")
    if solution.plan is None or solution.evaluation is None:
        print(f"no plan: {solution.reason}")
        return
    objective, time = f"objective       {solution.objective:.9g}", milliseconds(solution.evaluation.iteration_ns)
    if budget is None:
        print(f"{objective}  (bound {number(solution.bound)}, gap {gap_text(solution.gap)})")
        print(f"iteration time  {time} (limit {milliseconds(problem.latency_limit_ns)})")
    else:
        proved = bound_ns is None or solution.termination == "optimal"
        print(f"iteration time  {time} ({'proved least' if proved else f'at least {milliseconds(bound_ns or 0)}'})")
        print(f"{objective} (budget {budget:.9g})")
    _print_devices(problem, solution.plan, solution.evaluation)


def _print_devices(problem: Problem, plan: Plan, evaluation: Evaluation) -> None:
    for name, device in evaluation.devices.items():
        precisions = list(plan.devices[name].values())
        counts = ", ".join(f"{precisions.count(p)} {p}" for p in problem.formats if p in precisions)
        memory = f"{mebibytes(device.memory_kib)} of {mebibytes(device.memory_limit_kib)}"
        print(f"{name:<15} {memory}, sensitivity {device.sensitivity:.9g}, adjustable operators: {counts or 'none'}")


def compare(
    problem: ProblemFile,
    methods: Annotated[str, option("NAMES", "names with commas between")] = "greedy,exact",
    time_limit: TimeLimit = None,
    json: Annotated[bool, typer.Option("--json", help="print one JSON list")] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Solve by several methods and show them side by side."""
    from qsync_opt.cli.joint import load_either
    from qsync_opt.io import waiting
    from qsync_opt.registry import Kind, find
    from qsync_opt.systems import solve as solve_any
    from qsync_opt.systems import system_of

    names = [name.strip() for name in methods.split(",") if name.strip()]
    if not names:
        raise UnsupportedError("--methods is empty; give at least one, such as greedy,exact")
    loaded = load_either(problem)
    for name in names:
        find(Kind.FORMULATION, name, system_of(loaded).name)  # all are checked before the first one runs
    solutions: list[Any] = []
    for name in names:
        with waiting(False if quiet else None, f"solving by {name}", time_limit):
            solutions.append(solve_any(loaded, name, time_limit_s=time_limit))
    if json:
        print_json([{**solution.to_json(), "feasible": solution.plan is not None} for solution in solutions])
    else:
        _print_comparison(solutions)
    return EXIT_OK if any(solution.plan is not None for solution in solutions) else EXIT_INFEASIBLE


def _print_comparison(solutions: list[Any]) -> None:
    print_table(
        ("method", "ended", "objective", "bound", "gap", "iteration", "seconds"),
        [
            (
                solution.method,
                solution.termination.value,
                number(solution.objective),
                number(solution.bound),
                gap_text(solution.gap),
                "-" if solution.evaluation is None else milliseconds(solution.evaluation.iteration_ns),
                f"{solution.build_seconds + solution.solve_seconds:.2f}",
            )
            for solution in solutions
        ],
    )
    for solution in solutions:
        if solution.reason:
            print(f"{solution.method}: {solution.reason}")


def pareto(
    problem: ProblemFile,
    against: Annotated[str, option("latency|memory", None, **choice("latency", "memory"))] = "latency",
    device: Annotated[str | None, option("NAME", "whose memory; the only planned type by default")] = None,
    method: Annotated[
        str, option("greedy|exact", "exact: every point is proved", **choice("greedy", "exact"))
    ] = "greedy",
    points: Annotated[int, option("N", "how many limits to try")] = 30,
    whole_front: Annotated[
        bool, typer.Option("--whole", help="every point of the latency front, however many")
    ] = False,
    csv: Annotated[str | None, option("FILE", "write the points as CSV")] = None,
    svg: Annotated[str | None, option("FILE", "write the front as a picture")] = None,
    plans: Annotated[Path | None, option("FOLDER", "write the plan of every point into this folder")] = None,
    cache: Cache = None,
    no_cache: NoCache = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Show the front of sensitivity against iteration time, or against the memory of a device type."""
    from qsync_opt.io import reporting
    from qsync_opt.report import front_svg
    from qsync_opt.training import load_problem, pareto_front

    check_outputs([csv, svg], [problem])
    loaded = load_problem(problem)
    with reporting(False if quiet else None, "pareto") as report:
        front = pareto_front(
            loaded,
            against,
            device=device,
            method=method,
            points=None if whole_front else points,
            cache=front_cache(cache, no_cache),
            progress=lambda done, total, reused: report(done, total or done, f"points, {reused} from the cache"),
        )
    if csv is not None:
        write_text(csv, _csv(front))
    if svg is not None:
        write_text(svg, front_svg(front))
    if plans is not None:
        _write_plans(plans, front)
    if json:
        print_json(front.to_json())
    else:
        _print_front(front)
    return EXIT_OK if front.points else EXIT_INFEASIBLE


def _print_front(front: Front) -> None:
    from qsync_opt.report import levels

    problem = front.problem
    if not front.points:
        print(f"{problem.name}: no plan keeps the limits; qsync-opt solve says which one stands in the way")
        return
    names = [device.name for device in problem.devices]
    print(f"{problem.name}: {len(front)} points against {front.against}, {front.reused} limits from the cache")
    print_table(
        ("iteration", *(f"memory of {name}" for name in names), "sensitivity", "gap", "limits", "precisions"),
        [
            (
                milliseconds(point.iteration_ns),
                *(format_memory(point.memory_kib[name]) for name in names),
                number(point.objective),
                gap_text(point.gap),
                "kept" if point.feasible else "broken",
                "; ".join(levels(choices.values()) for choices in point.plan.devices.values()),
            )
            for point in front.points
        ],
    )
    print_estimates(problem.extras)


def _csv(front: Front) -> str:
    """One line per point."""
    import csv
    import io

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [device.name for device in front.problem.devices]
    writer.writerow(["iteration_ns", *(f"memory_kib of {name}" for name in names), "objective", "bound", "feasible"])
    for point in front.points:
        memory = [point.memory_kib[name] for name in names]
        writer.writerow([point.iteration_ns, *memory, point.objective, point.bound, str(point.feasible).lower()])
    return text.getvalue()


def _write_plans(folder: Path, front: Front) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise ProblemError(
            f"cannot make the folder {str(folder)!r}: {failure.strerror or failure}; name another one"
        ) from failure
    written = {f"plan-{position:03}.json": point.plan for position, point in enumerate(front.points)}
    for name, plan in written.items():
        plan.save(folder / name)
    others = sorted({path.name for path in folder.glob("plan-*.json")} - written.keys())
    if others:
        _LOGGER.warning(
            "%s also holds %d plans that are not of this front, first %s; remove them, or name an empty folder",
            folder, len(others), others[0],
        )  # fmt: skip
