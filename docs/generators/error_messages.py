"""Wrong inputs and what is said about them, side by side: makes ``docs/error-messages.md``, which a test keeps true.

Run ``python docs/generators/error_messages.py > docs/error-messages.md`` after a message has changed.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from wrong_case import Case
from wrong_inputs import write_inputs
from wrong_models import MODEL_CASES
from wrong_problems import PROBLEM_CASES

from qsync_opt import QSyncError
from qsync_opt.cli import main

CASES = (*PROBLEM_CASES, *MODEL_CASES)


@contextlib.contextmanager
def inputs() -> Iterator[None]:
    """Work in a folder with all inputs, so that messages show short paths."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as name:
        write_inputs(Path(name))
        os.chdir(name)
        try:
            yield
        finally:
            os.chdir(before)


def message(case: Case) -> str:
    """What is said about a wrong input; the one line of standard error, or the text of the exception."""
    if callable(case.run):
        try:
            case.run()
        except QSyncError as failure:
            return f"{type(failure).__name__}: {failure}"
        raise AssertionError(f"{case.what}: nothing was said")
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(case.run)
        except SystemExit as stop:
            status = int(stop.code or 0)
    lines = err.getvalue().splitlines()
    assert status == 2, f"{case.what}: exit status {status}, {lines}"
    assert out.getvalue() == "", f"{case.what}: printed {out.getvalue()!r}"
    assert len(lines) == 1, f"{case.what}: {len(lines)} lines, {lines}"
    return lines[0]


def lacking(case: Case, text: str) -> list[str]:
    """Which of the three parts a message lacks."""
    parts = {"the value": case.value, "what is allowed": case.allowed, "what to do": case.advice}
    return [f"{name} ({part!r})" for name, part in parts.items() if part not in text]


def page() -> str:
    """The Markdown page."""
    lines = [
        "# Error messages",
        "",
        "Wrong inputs and what is said about them: one line that names the value, says what is allowed and what to do.",
        "Commands exit with status 2 and leave standard output empty. This page is made by",
        "`docs/generators/error_messages.py`, and a test compares every line of it with what the program says.",
        "",
    ]
    with inputs():
        for number, case in enumerate(CASES, start=1):
            lines += [f"## {number}. {case.what[0].upper()}{case.what[1:]}", "", "```text", f"$ {case.shown}"]
            lines += [message(case), "```", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    print(page(), end="")
