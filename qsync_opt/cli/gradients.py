"""Further commands of the system gradients."""

from __future__ import annotations

from typing import Annotated

import typer

from qsync_opt.cli.console import EXIT_OK, Json, Verbose, option, print_json, print_table

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


@app.callback()
def _no_command_alone() -> None: ...
