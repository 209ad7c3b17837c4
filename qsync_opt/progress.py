"""Show how far a long run is: a bar with the remaining time on standard error, a caller's function, or nothing."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

Report = Callable[[int, int, str], None]
"""Called with what is done, how much there is in all, and what comes next."""


@contextlib.contextmanager
def reporting(progress: Report | bool | None, title: str) -> Iterator[Report]:
    """Yield the function to report to.

    Args:
        progress: A function; True for a bar, False for nothing, None for a bar if standard error is a terminal.
        title: Stands before the bar.
    """
    if callable(progress):
        yield progress
        return
    if progress is False or (progress is None and not _is_terminal()):
        yield lambda done, total, label: None
        return
    # Only a bar needs rich: a command that shows none starts without it.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    # Once over, the bar goes: what follows is the result.
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, label: bar.update(task, completed=done, total=total, description=label)


def _is_terminal() -> bool:
    # Standard error may be closed.
    return sys.stderr is not None and sys.stderr.isatty()
