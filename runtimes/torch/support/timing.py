"""Time of pieces of work on a device and on its host, with caches in the state of a training step.

In a step, an operator mostly reads tensors written long before: weights, tensors that the forward pass saved, results
larger than the caches. The caches are therefore flushed before each piece of work. The interpreter and the autograd
engine, in constant use in a step, are warmed up again after the flush.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from qsync_opt.errors import UnsupportedError

T = TypeVar("T")
CPU_FLUSH_BYTES = 16 * 2**20
"""More than second-level caches and address translation caches hold; the third level stays as in a step."""
CUDA_FLUSH_BYTES = 256 * 2**20
"""More than the second-level cache of any card."""
_READINGS = 100
_LARGE_BYTES = 31 * 2**20
_LARGE_COUNT = 8
_LONGEST_HEAD_START_NS = 20e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Elapsed:
    """Nanoseconds on the device, and on the host (0 if the device is the cpu)."""

    device_ns: float
    host_ns: float = 0.0


def synchronize(device: torch.device) -> None:
    """Wait until a card has done all that it was given; a cpu is never waited for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_mark(device: torch.device) -> Any:
    """The present time of a device for `intervals_ns`: a recorded event on cuda, the wall clock elsewhere."""
    if device.type != "cuda":
        return time.perf_counter_ns()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def intervals_ns(marks: Sequence[Any]) -> list[float]:
    """Nanoseconds between one mark and the next; events must have been waited for."""
    pairs = itertools.pairwise(marks)
    return [float(b - a) if isinstance(a, int) else float(a.elapsed_time(b)) * 1e6 for a, b in pairs]


def cpu_clock() -> Callable[[], int]:
    """The clock in nanoseconds for cpu work: of a single thread its processor time, of several the wall clock."""
    return time.thread_time_ns if torch.get_num_threads() == 1 else time.perf_counter_ns


class CpuStopwatch:
    """Work is timed by `cpu_clock`."""

    def __init__(self) -> None:
        self._clock = cpu_clock()
        _keep_freed_memory()
        self._scratch = torch.zeros(CPU_FLUSH_BYTES // 4)
        self._warm_up = _WarmUp(torch.device("cpu"))
        # Reading the clock takes time itself: the minimum of many readings.
        self._own_ns = 0.0
        self._own_ns = min(self.time(lambda: None)[1].device_ns for _ in range(_READINGS))

    def settle(self, *, flush: bool = True) -> None:
        """Bring caches into the state of a training step; without ``flush``, only the interpreter's."""
        if flush:
            self._scratch.add_(1.0)
        self._warm_up()

    def time(self, work: Callable[[], T]) -> tuple[T, Elapsed]:
        """Run ``work`` once; returns its result and its time."""
        start_ns = self._clock()
        result = work()
        elapsed_ns = self._clock() - start_ns
        return result, Elapsed(device_ns=max(0.0, elapsed_ns - self._own_ns))


def _keep_freed_memory() -> None:
    """Make the C allocator keep freed memory, as it does in a training loop that has run for a while.

    A fresh process returns memory to the system at once and then pays page faults, which a step does not. glibc raises
    its thresholds to the largest mapped block that was freed, up to 32 MiB; several are requested at once so that at
    least one is not cut from the heap. They are never touched, so they occupy no memory.
    """
    blocks = [torch.empty(_LARGE_BYTES, dtype=torch.uint8) for _ in range(_LARGE_COUNT)]
    del blocks


class CudaStopwatch:
    """Device time by events, in a queue long enough to hide launches; host time by the wall clock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._scratch = torch.zeros(CUDA_FLUSH_BYTES // 4, device=device)
        self._warm_up = _WarmUp(device)
        self._host_times_ns: deque[float] = deque(maxlen=3)
        self._own_ns, self._flush_ns = 0.0, math.inf
        for _ in range(3):
            self._warm_up()
            self._flush_ns = max(1.0, min(self._flush_ns, self.time(lambda: self._scratch.add_(1.0))[1].device_ns))
        idle_ns = []
        for _ in range(_READINGS // 10):
            self.settle()
            idle_ns.append(self.time(lambda: None)[1].device_ns)
        self._own_ns = min(idle_ns)

    def settle(self, *, flush: bool = True) -> None:
        """Bring caches into the state of a training step, and give the host a head start over the device."""
        torch.cuda.synchronize(self._device)
        self._warm_up()
        # Enough flushes for the host to launch all of the work before the device reaches it. The maximum is of recent
        # times: work that once took very long on the host (a library that loads itself) says nothing about the next.
        head_start_ns = min(2 * max(self._host_times_ns, default=0.0), _LONGEST_HEAD_START_NS)
        for _ in range(int(flush) + math.ceil(head_start_ns / self._flush_ns)):
            self._scratch.add_(1.0)

    def time(self, work: Callable[[], T]) -> tuple[T, Elapsed]:
        """Run ``work`` once; returns its result and its time."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        start_ns = time.perf_counter_ns()
        result = work()
        host_ns = float(time.perf_counter_ns() - start_ns)
        end.record()
        torch.cuda.synchronize(self._device)
        self._host_times_ns.append(host_ns)
        device_ns = max(0.0, intervals_ns((start, end))[0] - self._own_ns)
        return result, Elapsed(device_ns=device_ns, host_ns=host_ns)


class _WarmUp:
    """The smallest forward and backward pass, which brings interpreter and autograd engine into the caches."""

    def __init__(self, device: torch.device) -> None:
        self._x = torch.zeros(1, device=device, requires_grad=True)
        self._gradient = torch.zeros(1, device=device)

    def __call__(self) -> None:
        torch.autograd.grad([self._x.view(1) * 2.0], [self._x], [self._gradient])


Stopwatch = CpuStopwatch | CudaStopwatch
"""Times pieces of work one by one."""


def make_stopwatch(device: torch.device) -> Stopwatch:
    """The stopwatch of a device.

    Raises:
        UnsupportedError: Neither cpu nor cuda.
    """
    if device.type == "cpu":
        return CpuStopwatch()
    if device.type == "cuda":
        return CudaStopwatch(device)
    raise UnsupportedError(f"cannot time work on {device}: allowed are cpu and cuda")
