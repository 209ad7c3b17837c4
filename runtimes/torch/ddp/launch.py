"""Worker processes on this host that are handed work through pipes, and report their progress and results."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

from qsync_opt.errors import QSyncError

RESULT = "result"
"""Kind of the message that ends a piece of work; all others report progress."""


class WorkerError(QSyncError):
    """A worker process ended without a result; the text holds the end of what it printed."""


class Workers:
    """Processes that call ``module.serve(rank, connection, *arguments)``, for the time of a ``with`` block.

    A worker receives pieces of work until it receives None, and sends pairs: progress as often as it likes, and one
    `RESULT` for each piece. It fails as soon as whoever started it is gone.

    Args:
        module: Name of the module, which this process does not load.
        arguments: Of every worker.
        count: Number of workers; each computes with one thread.
        log_folder: Where the output of each goes (``worker-<rank>.log``).
    """

    def __init__(self, module: str, *arguments: Any, count: int, log_folder: Path) -> None:
        self._logs = [log_folder / f"worker-{rank}.log" for rank in range(count)]
        self._connections: list[Any] = []
        self._processes = []
        context = multiprocessing.get_context("spawn")
        for rank, log in enumerate(self._logs):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(log, module, rank, there, *arguments), daemon=True)
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for process, connection in zip(self._processes, self._connections, strict=True):
            if kind is not None:
                process.terminate()
            else:
                connection.send(None)
        for process, connection in zip(self._processes, self._connections, strict=True):
            process.join()
            connection.close()

    def run(self, work: Any, on_progress: Callable[[int, Any], None]) -> list[Any]:
        """Let every worker do a piece of work, and return their results in rank order.

        Args:
            work: Anything but None that can be pickled.
            on_progress: Called with the rank and each report of progress.

        Raises:
            WorkerError: A worker failed.
        """
        for connection in self._connections:
            with contextlib.suppress(BrokenPipeError):  # the end of a worker that has ended is received below
                connection.send(work)
        results: dict[int, Any] = {}
        while len(results) < len(self._connections):
            ready = wait(self._connections)
            for rank, connection in enumerate(self._connections):
                if connection not in ready:
                    continue
                try:
                    kind, value = connection.recv()
                except (EOFError, ConnectionResetError):
                    raise WorkerError(self._failure(rank)) from None
                if kind == RESULT:
                    results[rank] = value
                else:
                    on_progress(rank, value)
        return [results[rank] for rank in range(len(self._connections))]

    def _failure(self, rank: int) -> str:
        self._processes[rank].join()
        lines = self._logs[rank].read_text().strip().splitlines()
        status, last = self._processes[rank].exitcode, lines[-1] if lines else "it printed nothing"
        return f"worker {rank} ended with status {status}: {last} (all of it: {self._logs[rank]})"


def _serve(log: Path, module: str, rank: int, connection: Connection, *arguments: Any) -> None:
    with log.open("w") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    importlib.import_module(module).serve(rank, connection, *arguments)
