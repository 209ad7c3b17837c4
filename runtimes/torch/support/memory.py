"""Memory of pieces of work by the allocator's own account, and the memory that a plan may use.

On cuda the caching allocator counts the peak. On cpu the allocations and releases that ``torch.profiler`` reports are
added up; it reports no release of memory allocated before it started, and no buffer that a library allocates itself.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from qsync_opt.errors import UnsupportedError
from qsync_opt.io import SIZE_BYTES, parse_quantity

_RESERVE = 0.05
"""Share left for fragmentation and for libraries that allocate without torch."""


def wanted_bytes(wanted: str | int) -> int:
    """Bytes of a requested amount of memory, such as ``"12 GiB"``.

    Raises:
        ProblemError: It is no quantity of memory.
        UnsupportedError: It is not above 0.
    """
    number = wanted if isinstance(wanted, int) else round(parse_quantity(wanted, SIZE_BYTES, "memory"))
    if isinstance(wanted, bool) or number <= 0:
        raise UnsupportedError(f"memory is {wanted!r}: bytes above 0 are needed, or a text such as '12 GiB'")
    return number


def memory_budget(device: torch.device, wanted: str | int | None = None) -> int:
    """Bytes that a plan may use.

    Args:
        device: ``cpu`` or a CUDA device.
        wanted: A limit such as ``"12 GiB"`` or bytes; None: the memory that is free or held by this process, less
            5 %. A limit set by ``torch.cuda.set_per_process_memory_fraction`` applies in any case.

    Returns:
        Bytes, at least 1.

    Raises:
        ProblemError: ``wanted`` is no quantity of memory.
        UnsupportedError: ``wanted`` is more than the device has.
    """
    limit = None if wanted is None else wanted_bytes(wanted)
    total, free = _cuda_memory(device) if device.type == "cuda" else _host_memory()
    if limit is None:
        return max(1, int(free * (1 - _RESERVE)))
    if not 0 < limit <= total:
        raise UnsupportedError(f"memory is {wanted!r}: above 0 and at most the {total} bytes of {device} are possible")
    return limit


def _cuda_memory(device: torch.device) -> tuple[int, int]:
    free, total = torch.cuda.mem_get_info(device)
    allowed = int(total * torch.cuda.get_per_process_memory_fraction(device))
    return allowed, min(allowed, free + torch.cuda.memory_reserved(device))


def _host_memory() -> tuple[int, int]:
    """Total bytes of the host, and this process's share of the free ones among those that the launcher started."""
    page = os.sysconf("SC_PAGE_SIZE")
    total, free = page * os.sysconf("SC_PHYS_PAGES"), page * os.sysconf("SC_AVPHYS_PAGES")
    processes = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return total, free // processes


@contextlib.contextmanager
def out_of_memory_by_type() -> Iterator[None]:
    """Have a kernel of ours that finds no room raise what torch's own kernels raise.

    The interface through which kernels are called from torch knows one type of error only.

    Raises:
        torch.OutOfMemoryError: In place of a ``RuntimeError`` that says so.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if "CUDA out of memory: no room for a result of" in str(error):  # behind the name of the source file
            raise torch.OutOfMemoryError(str(error)) from error
        raise


T = TypeVar("T")
_PHASE = "qsync-opt phase"


def storage_of(tensor: torch.Tensor) -> int:
    """Address of a tensor's memory, which views share."""
    return tensor.untyped_storage().data_ptr()


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Bytes beyond those in use at the start: at the peak, and at the end."""

    peak_bytes: int
    kept_bytes: int


def allocation_of(work: Callable[[], T], device: torch.device) -> tuple[T, Allocation]:
    """Run ``work`` once; returns its result and its memory on ``device``."""
    result, (allocation,) = allocations_of([lambda _: work()], device)
    return result, allocation


def allocations_of(phases: Sequence[Callable[[Any], Any]], device: torch.device) -> tuple[Any, list[Allocation]]:
    """Run phases one after the other; returns the last result, and the memory of each phase on ``device``.

    Each is called with the result of the one before, the first with None. It may release memory of an earlier one.
    """
    if device.type == "cuda":
        return _cuda_allocations(phases, device)
    return _cpu_allocations(phases)


def _cuda_allocations(phases: Sequence[Callable[[Any], Any]], device: torch.device) -> tuple[Any, list[Allocation]]:
    result: Any = None
    allocations = []
    for phase in phases:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = phase(result)
        torch.cuda.synchronize(device)
        peak_bytes = torch.cuda.max_memory_allocated(device) - before
        kept_bytes = torch.cuda.memory_allocated(device) - before
        allocations.append(Allocation(peak_bytes=peak_bytes, kept_bytes=kept_bytes))
    return result, allocations


def _cpu_allocations(phases: Sequence[Callable[[Any], Any]]) -> tuple[Any, list[Allocation]]:
    result: Any = None
    with (
        silent_profiler(),
        torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
        ) as profiler,
    ):
        for i, phase in enumerate(phases):
            with torch.profiler.record_function(f"{_PHASE} {i}"):
                result = phase(result)
    finished: Any = profiler.profiler
    events, cpu = finished.kineto_results.events(), torch._C._autograd.DeviceType.CPU
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]" and e.device_type() == cpu)
    spans = {e.name(): (e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if e.name().startswith(_PHASE)}
    allocations = []
    for i in range(len(phases)):
        start, end = spans[f"{_PHASE} {i}"]
        steps = [0, *itertools.accumulate(num_bytes for time, num_bytes in changes if start <= time <= end)]
        allocations.append(Allocation(peak_bytes=max(steps), kept_bytes=steps[-1]))
    return result, allocations


@contextlib.contextmanager
def silent_profiler() -> Iterator[None]:
    """Let a profiler neither write a line at each start nor leave its instrumentation of launches behind.

    CUPTI would otherwise stay attached to the process, and every later launch would take a third longer on the host.
    """
    own = {"KINETO_LOG_LEVEL": "99", **({"TEARDOWN_CUPTI": "1"} if torch.cuda.is_available() else {})}
    added = {name: value for name, value in own.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
