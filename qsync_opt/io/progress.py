"""Show how far a long run is: a bar with the remaining time on standard error, a caller's function, or nothing."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

Report = Callable[[int, int, str], None]
"""Called with what is done, how much there is in all, and what comes next."""


@contextlib.contextmanager
def lasting_interrupts() -> Iterator[Callable[[], None]]:
    """Keep Ctrl-C from getting lost: yield a function that raises KeyboardInterrupt again if one was swallowed.

    Native code (numpy's, at times) clears an exception that arrives while it asks an object for something, and long
    work would go on as if nothing had been said. Work outside the main thread, or under a handler of the caller's, is
    left alone.
    """
    came = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        raise KeyboardInterrupt

    def check() -> None:
        if came:
            raise KeyboardInterrupt

    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield check
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield check
        check()
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def held_interrupts() -> Iterator[None]:
    """Hold Ctrl-C back until the block ends; it must be a short one.

    For work in which native code calls Python functions: one that arrives there is printed as a traceback and lost, or
    leaves a package half imported. Outside the main thread nothing arrives, and nothing is held back.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    held: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda number, frame: held.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            handler(signal.SIGINT, held[0])


@contextlib.contextmanager
def reporting(progress: Report | bool | None, title: str) -> Iterator[Report]:
    """Yield the function to report to; after Ctrl-C it raises KeyboardInterrupt, whatever became of the first one.

    Args:
        progress: A function; True for a bar, False for nothing, None for a bar if standard error is a terminal.
        title: Stands before the bar.
    """
    with lasting_interrupts() as check, _shown(progress, title) as show:

        def report(done: int, total: int, label: str) -> None:
            check()
            show(done, total, label)

        yield report


@contextlib.contextmanager
def _shown(progress: Report | bool | None, title: str) -> Iterator[Report]:
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


@contextlib.contextmanager
def waiting(show: bool | None, title: str, limit_s: float | None = None) -> Iterator[None]:
    """Show that something of unknown length goes on, how long it did, and how long it may at most.

    Args:
        show: As in `reporting`: True, False, or None for a terminal only.
        title: Stands before the bar.
        limit_s: Time limit in seconds, if there is one.
    """
    if show is False or (show is None and not _is_terminal()):
        with lasting_interrupts():
            yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    limit = "no time limit" if limit_s is None else f"of at most {limit_s:g} s"
    columns = (TextColumn(title), BarColumn(), TimeElapsedColumn(), TextColumn(limit))
    with lasting_interrupts(), Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        bar.add_task("", total=None)
        yield


def _is_terminal() -> bool:
    # Standard error may be closed.
    return sys.stderr is not None and sys.stderr.isatty()
