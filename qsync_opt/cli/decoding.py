"""The commands of speculative decoding beside ``solve`` and ``evaluate``."""

from typing import Annotated

import typer

from qsync_opt.cli.console import EXIT_OK, Json, PlanOutput, Verbose, check_outputs, choice, option, print_json
from qsync_opt.errors import SolverError

app = typer.Typer(rich_markup_mode=None)


@app.command("plan")
def plan(
    measurements: Annotated[str, typer.Argument(metavar="MEASUREMENTS", help="file of measured times and acceptances")],
    confidence: Annotated[
        str,
        option(
            "low|mid|high",
            "limit of the acceptance intervals to plan by; low speculates only where it surely gains",
            **choice("low", "mid", "high"),
        ),
    ] = "low",
    method: Annotated[str, option("NAME", "default, exact, ilp, exhaustive")] = "default",
    problem: Annotated[str | None, option("FILE", "write the problem that is solved to this file")] = None,
    output: PlanOutput = None,
    json: Json = False,
    verbose: Verbose = False,
) -> int:
    """Plan from measured times and acceptances, and say why each regime speculates or not."""
    from qsync_opt.decoding import build_problem, explain, load_measurements
    from qsync_opt.systems import solve

    check_outputs([problem, output], [measurements])
    built = build_problem(load_measurements(measurements), confidence)
    solution = solve(built, method)
    if solution.plan is None or solution.evaluation is None:  # plain decoding needs no memory
        raise SolverError(f"method {method!r} found no plan, but plain decoding always is one; use another method")
    if problem is not None:
        built.save(problem)
    if output is not None:
        solution.plan.save(output)
    reasons = explain(built, solution.plan)
    if json:
        print_json({**solution.to_json(), "evaluation": solution.evaluation.to_json(), "reasons": reasons})
        return EXIT_OK
    print(f"{built.name}: {solution.termination} by {solution.method}, {solution.objective:.9g} ns per token by weight")
    for name, reason in reasons.items():
        print(f"{name}: {reason}")
    return EXIT_OK
