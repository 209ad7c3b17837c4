"""What commands share: options, exit status, and how numbers, tables, notes and files are written."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from qsync_opt.errors import ProblemError
from qsync_opt.io import Extras, check_writable, format_gap, near_match

EXIT_OK, EXIT_DIFFERENT, EXIT_UNUSABLE, EXIT_INFEASIBLE, EXIT_INTERRUPTED = 0, 1, 2, 3, 130

_NS_PER_MS = 1e6
_KIB_PER_MIB = 1024


def option(metavar: str, help: str | None = None, *flags: str, **more: Any) -> Any:
    """An option with a value."""
    return typer.Option(*flags, metavar=metavar, help=help, **more)


def choice(*allowed: str) -> dict[str, Any]:
    """What an option with few values needs: a check that names the nearest one, and completion."""

    def check(value: str) -> str:
        if value not in allowed:
            raise typer.BadParameter(f"{value!r}{near_match(value, allowed)}; allowed are {', '.join(allowed)}")
        return value

    return {"callback": check, "autocompletion": lambda: list(allowed)}


def registered(kind: str) -> Callable[[], list[str]]:
    """Completion of an option whose values are registered names of ``kind``."""

    def names() -> list[str]:
        from qsync_opt.registry import Kind, entries

        return list(entries(Kind(kind)))

    return names


def _log_everything(verbose: bool) -> None:
    if verbose:
        logging.getLogger().setLevel(logging.INFO)


Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="log what is done to standard error", callback=_log_everything)
]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object")]
Quiet = Annotated[bool, typer.Option("--quiet", help="no progress bar (there is none without a terminal)")]
ProblemFile = Annotated[str, typer.Argument(metavar="PROBLEM", help="problem file")]
PlanFile = Annotated[str, typer.Argument(metavar="PLAN", help="plan file")]
PlanOutput = Annotated[str | None, option("PLAN", "write the plan to this file", "--output")]
Method = Annotated[
    str | None,
    option(
        "NAME",
        "greedy (default; exact with a budget), qsync, exact, exhaustive, ...",
        autocompletion=registered("formulation"),
    ),
]
Solver = Annotated[
    str | None,
    option(
        "NAME",
        "ortools, pulp, highs, scip, cp-sat, ...; the first installed by default",
        autocompletion=registered("solver"),
    ),
]
TimeLimit = Annotated[float | None, option("S", "seconds for a whole solve")]
Cache = Annotated[Path | None, option("FOLDER", "where points are kept (default: ~/.cache/qsync-opt)")]
NoCache = Annotated[bool, typer.Option("--no-cache", help="compute every point anew and keep none")]


def front_cache(cache: Path | None, no_cache: bool) -> Path | None:
    """The folder that points of fronts are kept in, or None for nowhere."""
    from qsync_opt.io import default_cache_folder

    return None if no_cache else (cache or default_cache_folder()) / "fronts"


def check_outputs(outputs: Iterable[str | Path | None], inputs: Iterable[str | Path | None]) -> None:
    """Refuse files that cannot be written, or would replace a file that is read: before the work.

    Raises:
        ProblemError: One of ``outputs`` (None: not wanted) cannot be written, is one of ``inputs``, or another one.
    """
    uses = {_real_path(path): "is read" for path in inputs if path is not None}
    for path in outputs:
        if path is None:
            continue
        check_writable(path)
        place = _real_path(path)
        if place in uses:
            raise ProblemError(f"cannot write {os.fspath(path)!r}: that file {uses[place]} too; give another file name")
        uses[place] = "is written"


def _real_path(path: str | Path) -> str:
    try:
        return os.path.realpath(path)
    except (OSError, ValueError):  # who reads the file says what is wrong with its name
        return os.fspath(path)


def milliseconds(value_ns: int) -> str:
    """A time for people."""
    return f"{value_ns / _NS_PER_MS:.3f} ms"


def mebibytes(value_kib: int) -> str:
    """A size for people."""
    return f"{value_kib / _KIB_PER_MIB:.1f} MiB"


def number(value: float | None) -> str:
    """A number to nine places, or a dash."""
    return "-" if value is None else f"{value:.9g}"


def gap_text(value: float | None) -> str:
    """A relative gap in percent, or a dash."""
    return "-" if value is None else format_gap(value)


def signed(show: Callable[[Any], str], change: float) -> str:
    """A change as ``show`` writes it, with a plus where it is positive."""
    return f"+{show(change)}" if change > 0 else show(change)


def print_json(data: object) -> None:
    """Print one JSON value to standard output."""
    print(json.dumps(data, allow_nan=False))


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows under a header, columns aligned."""
    lines = [tuple(header), *(tuple(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def estimates_json(extras: Extras) -> dict[str, Any]:
    """What ``--json`` prints of what a problem or plan was estimated from: nothing if all was measured."""
    from qsync_opt.io import ESTIMATES_KEY

    note = extras.get((ESTIMATES_KEY,))
    return {} if note is None else {"estimates": note}


def print_estimates(extras: Extras) -> None:
    """Print what a problem or plan was estimated from, if anything was."""
    from qsync_opt.costs import estimate_lines

    for line in estimate_lines(extras):
        print(f"note: {line}")
