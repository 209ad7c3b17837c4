"""Starts the demo's workers as separate processes, hands them their work, and passes on what they report.

A worker reads the paths of spec files from standard input, a line each, and ends when there are no more; so it also
ends when whoever started it is gone. It talks in lines of JSON on standard output: ``{"event": "progress", ...}`` while
it works and one ``{"event": "result", ...}`` for each spec. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from qsync_opt.errors import QSyncError

Event = Mapping[str, Any]


class WorkerError(QSyncError):
    """A worker process ended without a result; the text holds the end of what it printed."""


def emit(event: str, **fields: Any) -> None:
    """Report one event from inside a worker."""
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


class Workers:
    """Processes ``python -m module arguments... rank``, side by side, for the time of a ``with`` block.

    Args:
        module: Module whose ``__main__`` is the worker.
        arguments: Of every worker, before its rank.
        threads: Compute threads of each worker; as many workers as there are entries.
        log_folder: Where each worker's standard error goes (``worker-<rank>.log``).
    """

    def __init__(self, module: str, *arguments: str, threads: Sequence[int], log_folder: Path) -> None:
        self._command = [sys.executable, "-m", module, *arguments]
        self._threads = tuple(threads)
        self._logs = [log_folder / f"worker-{rank}.log" for rank in range(len(self._threads))]
        self._events: queue.Queue[tuple[int, Event | None]] = queue.Queue()
        self._processes: list[subprocess.Popen[str]] = []
        self._readers: list[threading.Thread] = []

    def __enter__(self) -> Self:
        try:
            for rank, threads in enumerate(self._threads):
                self._start(rank, threads)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            for process in self._processes:
                assert process.stdin is not None
                process.stdin.close()
            for process in self._processes:
                process.wait()
        self._stop()

    def run(self, spec: Path, on_progress: Callable[[int, Event], None]) -> list[Event]:
        """Let every worker do what a spec file says, and return their results in rank order.

        Args:
            spec: JSON file that every worker reads.
            on_progress: Called with the rank and each progress event, from this thread.

        Raises:
            WorkerError: A worker failed.
        """
        for process in self._processes:
            assert process.stdin is not None
            # A worker that has ended cannot be written to; its end is among the events below.
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(f"{spec}\n")
                process.stdin.flush()
        results: dict[int, Event] = {}
        while len(results) < len(self._processes):
            rank, event = self._events.get()
            if event is None:
                raise WorkerError(_failure(rank, self._processes[rank].wait(), self._logs[rank]))
            if event["event"] == "result":
                results[rank] = event
            else:
                on_progress(rank, event)
        return [results[rank] for rank in range(len(self._processes))]

    def _start(self, rank: int, threads: int) -> None:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "PYTHONSAFEPATH": "1",
        }
        with self._logs[rank].open("w") as log:
            process = subprocess.Popen(
                [*self._command, str(rank)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
            )
        self._processes.append(process)
        assert process.stdout is not None
        reader = threading.Thread(target=self._read, args=(rank, process.stdout), daemon=True)
        reader.start()
        self._readers.append(reader)

    def _read(self, rank: int, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self._events.put((rank, json.loads(line)))
        self._events.put((rank, None))

    def _stop(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
        for process in self._processes:
            process.wait()
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # what it was too late to read
                process.stdin.close()
        for reader in self._readers:
            reader.join()


def _failure(rank: int, status: int, log: Path) -> str:
    lines = log.read_text().strip().splitlines()
    last = lines[-1] if lines else "it printed nothing"
    return f"worker {rank} ended with status {status}: {last} (all of it: {log})"
