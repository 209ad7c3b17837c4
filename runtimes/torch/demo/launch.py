"""Starts the demo's workers as separate processes and passes on what they report.

Workers talk in lines of JSON on standard output: ``{"event": "progress", ...}`` while they work and one
``{"event": "result", ...}`` at the end. Nothing is pickled.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from qsync_opt.errors import QSyncError

Event = Mapping[str, Any]


class WorkerError(QSyncError):
    """A worker process ended without a result; the text holds the end of what it printed."""


def emit(event: str, **fields: Any) -> None:
    """Report one event from inside a worker."""
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


def _read(rank: int, stream: IO[str], events: queue.Queue[tuple[int, Event | None]]) -> None:
    with stream:
        for line in stream:
            events.put((rank, json.loads(line)))
    events.put((rank, None))


def run_workers(
    module: str,
    spec: Path,
    *,
    world_size: int,
    threads: Sequence[int],
    log_folder: Path,
    on_progress: Callable[[int, Event], None],
) -> list[Event]:
    """Run ``python -m module spec rank`` once per rank, side by side, and return their results in rank order.

    Args:
        module: Module whose ``__main__`` is the worker.
        spec: JSON file that every worker reads.
        world_size: Number of workers.
        threads: Compute threads of each worker.
        log_folder: Where each worker's standard error goes (``worker-<rank>.log``).
        on_progress: Called with the rank and each progress event, from this thread.

    Raises:
        WorkerError: A worker failed; the others are stopped.
    """
    events: queue.Queue[tuple[int, Event | None]] = queue.Queue()
    processes: list[subprocess.Popen[str]] = []
    readers: list[threading.Thread] = []
    logs = [log_folder / f"worker-{rank}.log" for rank in range(world_size)]
    results: dict[int, Event] = {}
    try:
        for rank in range(world_size):
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": str(threads[rank]),
                "MKL_NUM_THREADS": str(threads[rank]),
                "PYTHONSAFEPATH": "1",
            }
            with logs[rank].open("w") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", module, str(spec), str(rank)],
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env=environment,
                )
            processes.append(process)
            assert process.stdout is not None
            reader = threading.Thread(target=_read, args=(rank, process.stdout, events), daemon=True)
            reader.start()
            readers.append(reader)
        running = set(range(world_size))
        while running:
            rank, event = events.get()
            if event is None:
                running.discard(rank)
                if processes[rank].wait() != 0 or rank not in results:
                    raise WorkerError(_failure(rank, processes[rank].returncode, logs[rank]))
            elif event["event"] == "result":
                results[rank] = event
            else:
                on_progress(rank, event)
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
        for process in processes:
            process.wait()
        for reader in readers:
            reader.join()
    return [results[rank] for rank in range(world_size)]


def _failure(rank: int, status: int, log: Path) -> str:
    lines = log.read_text().strip().splitlines()
    last = lines[-1] if lines else "it printed nothing"
    return f"worker {rank} ended with status {status}: {last} (all of it: {log})"
