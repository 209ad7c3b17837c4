"""How the command line writes numbers, tables, notes and files."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from qsync_opt.errors import ProblemError
from qsync_opt.io import Extras, check_writable, format_gap

_NS_PER_MS = 1e6
_KIB_PER_MIB = 1024


def add_quiet(parser: argparse.ArgumentParser) -> None:
    """Add the option that takes the progress bar away."""
    parser.add_argument("--quiet", action="store_true", help="no progress bar (there is none without a terminal)")


def check_outputs(outputs: Iterable[str | Path | None], inputs: Iterable[str | Path | None]) -> None:
    """Refuse files that cannot be written, or would take the place of a file that is read: before the work.

    Raises:
        ProblemError: One of ``outputs`` (None: not asked for) cannot be written, is one of ``inputs``, or another one.
    """
    taken = {_place(path): "is read" for path in inputs if path is not None}
    for path in outputs:
        if path is None:
            continue
        check_writable(path)
        place = _place(path)
        if place in taken:
            raise ProblemError(
                f"cannot write {os.fspath(path)!r}: that file {taken[place]} too; give another file name"
            )
        taken[place] = "is written"


def _place(path: str | Path) -> str:
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


def signed(text: str, value: float) -> str:
    """The text of a change, with its sign where it is positive; a negative one has it already."""
    return f"+{text}" if value > 0 else text


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows under a header, columns aligned."""
    lines = [tuple(header), *(tuple(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def estimate_notice(extras: Extras) -> None:
    """Print what a problem or plan was estimated from, if anything was."""
    from qsync_opt.costs import estimate_lines

    for line in estimate_lines(extras):
        print(f"note: {line}")
