"""The commands of a system beside training: ``solve`` and ``evaluate`` of its files, and the system's own."""

from typing import Annotated, Any

import typer

from qsync_opt.cli.console import (
    EXIT_INFEASIBLE,
    EXIT_OK,
    Json,
    PlanFile,
    PlanOutput,
    ProblemFile,
    Solver,
    TimeLimit,
    Verbose,
    check_outputs,
    option,
    print_estimates,
    print_json,
)
from qsync_opt.io import load_file
from qsync_opt.registry import attribute
from qsync_opt.systems import System, evaluate, solve


def system_commands(system: System) -> typer.Typer:
    """The commands under a system's name; a command of its own replaces the shared one of that name."""
    commands = typer.Typer(rich_markup_mode=None, no_args_is_help=True)
    if system.commands:
        commands.registered_commands.extend(attribute(system.commands).registered_commands)
    own = {command.name or getattr(command.callback, "__name__", "") for command in commands.registered_commands}
    allowed = ", ".join(dict.fromkeys(["default", *system.methods]))

    def solve_file(
        problem: ProblemFile,
        method: Annotated[str, option("NAME", allowed)] = "default",
        solver: Solver = None,
        time_limit: TimeLimit = None,
        gap: Annotated[float | None, option("G", "relative gap at which to stop")] = None,
        output: PlanOutput = None,
        json: Json = False,
        verbose: Verbose = False,
    ) -> int:
        """Solve a problem file; the plan is checked by code that trusts no solver."""
        check_outputs([output], [problem])
        loaded = _problem(system, problem)
        solution = solve(loaded, method, solver=solver, time_limit_s=time_limit, gap=gap)
        if solution.plan is not None and output is not None:
            solution.plan.save(output)
        _print(solution.to_json(), json)
        if not json:
            print_estimates(getattr(loaded, "extras", {}))
        return EXIT_OK if solution.plan is not None else EXIT_INFEASIBLE

    def evaluate_file(problem: ProblemFile, plan: PlanFile, json: Json = False, verbose: Verbose = False) -> int:
        """Objective, limits and costs of a plan, by code that trusts no solver."""
        plans = {str(system.plan_format): attribute(str(system.plan_class)).from_json}
        evaluation = evaluate(_problem(system, problem), load_file(plan, plans))
        _print(evaluation.to_json(), json)
        return EXIT_OK if evaluation.feasible else EXIT_INFEASIBLE

    if system.problem_format and system.plan_format and system.evaluation:
        for name, command in (("solve", solve_file), ("evaluate", evaluate_file)):
            if name not in own:
                commands.command(name)(command)
    commands.callback()(_no_command_alone)
    return commands


def _no_command_alone() -> None: ...


def _problem(system: System, path: str) -> Any:
    return load_file(path, {str(system.problem_format): attribute(system.problem).from_json})


def _print(data: dict[str, Any], json: bool) -> None:
    if json:
        print_json(data)
        return
    width = max(map(len, data))
    for key, value in data.items():
        if (isinstance(value, dict | list) and not value) or value is None:
            continue
        lines = value if isinstance(value, list) else [value]
        for line in lines:
            print(f"{key:<{width}}  {line:.9g}" if isinstance(line, float) else f"{key:<{width}}  {line}")
