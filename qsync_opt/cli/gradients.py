"""Further commands of the system gradients."""

from __future__ import annotations

from typing import Annotated

import typer

from qsync_opt.cli.console import (
    EXIT_OK,
    Json,
    PlanFile,
    ProblemFile,
    Verbose,
    check_outputs,
    option,
    print_json,
    print_table,
)

app = typer.Typer(rich_markup_mode=None)


@app.command()
def schemes(
    workers: Annotated[int, option("N", "number of workers that reduce", min=1)] = 2,
    elements: Annotated[int, option("D", "elements of the bucket", min=0)] = 6_553_600,
    json: Json = False,
    verbose: Verbose = False,
) -> int:
    """List the registered schemes, with what each worker sends for one bucket."""
    from qsync_opt.gradients import schemes

    rows = [
        {
            "name": name,
            "bits": each.bits,
            "block": each.block,
            "transport": str(each.transport),
            "wire_bytes": each.wire_bytes(elements, workers) if each.supports(workers) else None,
        }
        for name, each in schemes().items()
    ]
    if json:
        print_json(rows)
        return EXIT_OK
    print_table(
        ("scheme", "bits", "block", "transport", "bytes sent"),
        [
            (
                str(row["name"]),
                str(row["bits"]),
                "-" if row["block"] is None else str(row["block"]),
                str(row["transport"]),
                f"too many workers: {workers}" if row["wire_bytes"] is None else str(row["wire_bytes"]),
            )
            for row in rows
        ],
    )
    return EXIT_OK


@app.command()
def audit(
    recorded: Annotated[str, typer.Argument(metavar="RECORDED", help="recorded reductions of a run under the plan")],
    problem: ProblemFile,
    plan: PlanFile,
    trace: Annotated[str | None, option("FILE", "also write both as one trace for Perfetto")] = None,
    json: Json = False,
    verbose: Verbose = False,
) -> int:
    """Compare recorded reductions with predicted ones, bucket by bucket."""
    from qsync_opt.cli.joint import print_measured
    from qsync_opt.errors import ProblemError
    from qsync_opt.gradients import Plan, Problem, load_recorded_reductions, predicted_reductions, reductions_timeline
    from qsync_opt.io import encode
    from qsync_opt.systems import load_plan, load_problem
    from qsync_opt.training import write_trace

    check_outputs([trace], [recorded, problem, plan])
    loaded, chosen = load_problem(problem), load_plan(plan)
    if not isinstance(loaded, Problem) or not isinstance(chosen, Plan):
        raise ProblemError(f"{problem} and {plan} must be a compression problem and its plan")
    predicted = predicted_reductions(loaded, chosen)
    measured = load_recorded_reductions(recorded).under([each.scheme for each in predicted], loaded.tail_ns)
    if trace is not None:
        write_trace(trace, reductions_timeline(loaded.name, {"predicted": predicted, "measured": measured}))
    if json:
        print_json({"predicted": [encode(each) for each in predicted], "measured": [encode(each) for each in measured]})
    else:
        print_measured(predicted, measured)
    return EXIT_OK


@app.callback()
def _no_command_alone() -> None: ...
