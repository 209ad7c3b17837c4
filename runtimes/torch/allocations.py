"""How much memory does a piece of work take, at its peak and when it is over, by the allocator's own account?

On cuda the caching allocator keeps the peak. On cpu there is no such counter: the allocations and releases that
``torch.profiler`` reports are added up. Buffers that a library allocates past torch's allocator are not seen.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Bytes beyond those in use at the start: the most at any time, and what is left at the end."""

    peak_bytes: int
    kept_bytes: int


def allocation_of(work: Callable[[], T], device: torch.device) -> tuple[T, Allocation]:
    """Run ``work`` once and account for its memory on ``device``."""
    if device.type == "cuda":
        return _cuda_allocation(work, device)
    return _cpu_allocation(work)


def _cuda_allocation(work: Callable[[], T], device: torch.device) -> tuple[T, Allocation]:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = work()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    return result, Allocation(peak_bytes=peak, kept_bytes=torch.cuda.memory_allocated(device) - before)


def _cpu_allocation(work: Callable[[], T]) -> tuple[T, Allocation]:
    with (
        _silent_profiler(),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        result = work()
    now = peak = 0
    for event in sorted(_memory_events(profiler), key=lambda event: float(event["ts"])):
        now += int(event["args"]["Bytes"])
        peak = max(peak, now)
    return result, Allocation(peak_bytes=peak, kept_bytes=now)


def _memory_events(profiler: torch.profiler.profile) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="qsync-opt-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text(encoding="utf-8"))
    for event in trace["traceEvents"]:
        # Device type 0 is the cpu.
        if event.get("name") == "[memory]" and event["args"]["Device Type"] == 0:
            yield event


@contextlib.contextmanager
def _silent_profiler() -> Iterator[None]:
    """Newer profilers write a line to standard error at each start; their log level is read from the environment."""
    name = "KINETO_LOG_LEVEL"
    before = os.environ.get(name)
    os.environ.setdefault(name, "99")
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
