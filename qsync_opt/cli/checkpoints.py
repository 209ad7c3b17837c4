"""The commands under ``qsync-opt checkpoints``: how often to save, and what a folder of checkpoints holds."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from qsync_opt.cli.console import EXIT_OK, EXIT_UNUSABLE, Json, Verbose, option, print_json, print_table
from qsync_opt.errors import ProblemError

app = typer.Typer(rich_markup_mode=None)
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="folder of a job's checkpoints")]


@app.command()
def interval(
    stall: Annotated[float, option("S", "seconds for which training waits in a save")],
    durable: Annotated[float, option("S", "seconds until a save survives a failure")],
    load: Annotated[float, option("S", "seconds from a failure until training goes on")],
    failures: Annotated[float, option("N", "failures of the whole job per day", "--failures-per-day")],
    json: Json = False,
    verbose: Verbose = False,
) -> int:
    """The time between saves that loses least, and what is lost then."""
    from qsync_opt.checkpoints import best_interval

    best = best_interval(stall_s=stall, durable_s=durable, load_s=load, failures_per_day=failures)
    if json:
        print_json({k: None if isinstance(v, float) and math.isinf(v) else v for k, v in best.to_json().items()})
        return EXIT_OK
    if math.isinf(best.interval_s):
        print("without failures no save is needed: save at the end")
        return EXIT_OK
    reason = " (a save takes as long until it is durable)" if best.limited_by_durable else ""
    print(f"save every {best.interval_s:.3g} s{reason}")
    print(f"a failure then costs {best.loss_per_failure_s:.3g} s in the mean")
    print(f"saves cost {best.stall_share:.3%} of the time; with failures {best.lost_share:.3%} is lost")
    return EXIT_OK


@app.command("list")
def list_checkpoints(folder: Folder, json: Json = False, verbose: Verbose = False) -> int:
    """The checkpoints of a folder: step, size, files and tensors."""
    rows = [_summary(folder, step) for step in _steps(folder)]
    if json:
        print_json({"checkpoints": rows})
    elif not rows:
        print(f"{folder} has no checkpoint")
    else:
        print_table(list(rows[0]), [[str(value) for value in row.values()] for row in rows])
    return EXIT_OK


@app.command()
def verify(
    folder: Folder,
    step: Annotated[int | None, option("N", "only the checkpoint of this step")] = None,
    json: Json = False,
    verbose: Verbose = False,
) -> int:
    """Compare every byte of the checkpoints of a folder with its hashes; exit status 2 if one is damaged."""
    from qsync_opt.checkpoints import step_folder
    from qsync_opt.checkpoints import verify as verify_folder

    steps = _steps(folder)
    if step is not None and step not in steps:
        raise ProblemError(f"{folder} has no checkpoint of step {step}: it has {', '.join(map(str, steps)) or 'none'}")
    if not steps:
        raise ProblemError(f"{folder} has no checkpoint; give the folder that was given to Checkpoints")
    rows: list[dict[str, Any]] = []
    for number in steps if step is None else [step]:
        fault = None
        try:
            verify_folder(step_folder(folder, number))
        except ProblemError as failure:
            fault = str(failure)
        rows.append({"step": number, "whole": fault is None, "fault": fault})
    if json:
        print_json({"checkpoints": rows})
    else:
        for row in rows:
            print(f"step {row['step']}: {row['fault'] or 'whole'}")
    return EXIT_OK if all(row["whole"] for row in rows) else EXIT_UNUSABLE


def _steps(folder: Path) -> list[int]:
    from qsync_opt.checkpoints import steps_in

    if not folder.is_dir():
        raise ProblemError(f"{str(folder)!r} is no folder; give the folder that was given to Checkpoints")
    return steps_in(folder)


def _summary(folder: Path, step: int) -> dict[str, Any]:
    from qsync_opt.checkpoints import read_manifest, step_folder

    try:
        manifest = read_manifest(step_folder(folder, step))
    except ProblemError:
        return {"step": step, "bytes": None, "files": None, "tensors": None, "state": "damaged"}
    return {
        "step": step,
        "bytes": sum(fact.bytes for fact in manifest.files.values()),
        "files": len(manifest.files),
        "tensors": len(manifest.tensors),
        "state": "complete",
    }
