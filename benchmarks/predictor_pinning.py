"""Every worker its own cores, the threads that launch work each one of its own; nothing else happens while timing."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

TOPOLOGY = Path("/sys/devices/system/cpu")


def cores_of(rank: int, workers: int) -> list[int]:
    """This worker's share of the cores that the program may use, one hardware thread of each physical core first."""
    mine = sorted(os.sched_getaffinity(0))
    share = mine[rank * len(mine) // workers : (rank + 1) * len(mine) // workers] or mine
    first, second, met = [], [], set()
    for core in share:
        siblings = _siblings(core)
        (second if siblings in met else first).append(core)
        met.add(siblings)
    return first + second


def _siblings(core: int) -> str:
    try:
        return (TOPOLOGY / f"cpu{core}" / "topology" / "thread_siblings_list").read_text()
    except OSError:
        return str(core)


def quietest(cores: Sequence[int]) -> list[int]:
    """Cores by how quickly each does a small piece of work just now, the quickest first.

    Two virtual cores may share one, and the other half of it another program: then everything takes half as long again.
    """
    before, times = os.sched_getaffinity(0), {}
    try:
        for core in cores:
            os.sched_setaffinity(0, {core})
            times[core] = min(_spin_ns() for _ in range(4))
    finally:
        os.sched_setaffinity(0, before)
    return sorted(cores, key=lambda core: times[core])


def _spin_ns() -> int:
    start, total = time.perf_counter_ns(), 0
    for i in range(10_000):
        total += i
    return time.perf_counter_ns() - start


def pin_threads(cores: list[int], device: torch.device) -> dict[str, int] | None:
    """Give this thread and autograd's thread of the device a core each, the quietest two, and all others the rest.

    Returns:
        The cores of the two, None where there are too few.
    """
    if len(cores) < 4:
        return None
    cores = quietest(cores)
    found: list[int] = []
    x = torch.ones(1, device=device, requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: found.append(threading.get_native_id()))
    y.sum().backward()
    main, autograd = threading.get_native_id(), found[0]
    for task in os.listdir("/proc/self/task"):
        thread = int(task)
        wanted = {main: cores[:1], autograd: cores[1:2]}.get(thread, cores[2:])
        with contextlib.suppress(ProcessLookupError):  # a thread may have ended meanwhile
            os.sched_setaffinity(thread, wanted)
    return {"main": cores[0], "autograd": cores[1] if autograd != main else cores[0]}


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Do not collect garbage inside."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def stolen_s() -> float:
    """Seconds that the hypervisor has withheld from all processors so far; 0 where it does not say."""
    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()
    except OSError:
        return 0.0
    return int(fields[8]) / os.sysconf("SC_CLK_TCK") if len(fields) > 8 else 0.0
