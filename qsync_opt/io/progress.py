"""Progress of long runs (a bar on standard error, a caller's function, or nothing) and safe handling of Ctrl-C."""

from __future__ import annotations

import contextlib
import functools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

Report = Callable[[int, int, str], None]
"""Called with the number of finished items, their total, and a label of the next one."""


@contextlib.contextmanager
def lasting_interrupts() -> Iterator[Callable[[], None]]:
    """Yield a function that raises KeyboardInterrupt again if Ctrl-C was pressed but swallowed; so does leaving.

    Native code (numpy's, at times) clears an exception that arrives while it calls into Python. Other threads than the
    main one and handlers of the caller's are left alone.
    """
    interrupted = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    def check() -> None:
        if interrupted:
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
def delayed_interrupts() -> Iterator[None]:
    """Delay Ctrl-C until the end of a short block.

    For work in which native code calls Python functions: there a KeyboardInterrupt is printed as a traceback and lost,
    or leaves a package half imported. Does nothing outside the main thread, where no signal arrives.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    delayed: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda number, frame: delayed.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if delayed:
            handler(signal.SIGINT, delayed[0])


@contextlib.contextmanager
def reporting(progress: Report | bool | None, title: str) -> Iterator[Report]:
    """Yield a function to report progress to; after Ctrl-C it raises KeyboardInterrupt (see `lasting_interrupts`).

    ``progress`` is a function, or True for a bar, False for nothing, None for a bar if standard error is a terminal.
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
    with _bar(progress, title, "MofNCompleteColumn", "TimeRemainingColumn", text="{task.description}") as update:
        yield lambda done, total, label: update(completed=done, total=total, description=label)


@contextlib.contextmanager
def waiting(show: bool | None, title: str, limit_s: float | None = None) -> Iterator[None]:
    """Show a bar with the elapsed time of work of unknown length, and its time limit in seconds.

    ``show`` is True, False, or None for a terminal only.
    """
    limit = "no time limit" if limit_s is None else f"of at most {limit_s:g} s"
    with lasting_interrupts(), _bar(show, title, "TimeElapsedColumn", text=limit):
        yield


@contextlib.contextmanager
def _bar(show: bool | None, title: str, *columns: str, text: str) -> Iterator[Callable[..., None]]:
    """Yield a function that changes the task of a bar, if one is shown (None: on a terminal)."""
    if show is False or (show is None and not (sys.stderr is not None and sys.stderr.isatty())):  # it may be closed
        yield lambda **changes: None
        return
    from rich import progress as rich  # only for a bar, so that other commands start faster
    from rich.console import Console

    parts = (rich.TextColumn(title), rich.BarColumn(), *(getattr(rich, name)() for name in columns))
    with rich.Progress(*parts, rich.TextColumn(text), console=Console(stderr=True), transient=True) as bar:
        yield functools.partial(bar.update, bar.add_task("", total=None))
