"""Trace with torch's profiler, and leave the process as fast as it was.

CUPTI, from which the profiler has its kernels, stays attached to a process when a trace is over, and every call of CUDA
takes the host longer from then on: what is timed afterwards, and the training that follows. torch takes it off if the
environment says so (``TEARDOWN_CUPTI``), in the exit of a later call of CUDA's runtime. With CUDA before 12.6 that
crashed where CUDA graphs are used; there it stays.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

import torch
from torch.profiler import ProfilerActivity
from torch.torch_version import TorchVersion

from qsync_opt.runtimes.torch.allocations import silent_profiler

_TEARDOWN = "TEARDOWN_CUPTI"
_CALLS, _PAUSE_S = 12, 0.005


@contextlib.contextmanager
def traced(device: torch.device, *, memory: bool = False) -> Iterator[torch.profiler.profile]:
    """Profile what runs inside: the host and, unless it is for memory, the kernels of a card.

    Args:
        device: Where the work runs.
        memory: Record allocations instead of kernels.
    """
    kernels = device.type == "cuda" and not memory
    if kernels and TorchVersion(torch.version.cuda or "0.0") >= "12.6":
        os.environ.setdefault(_TEARDOWN, "1")  # for good: how a later trace begins depends on it too
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if kernels else [])]
    with silent_profiler(), torch.profiler.profile(activities=activities, profile_memory=memory, acc_events=True) as p:
        yield p
    if kernels and os.environ.get(_TEARDOWN) == "1":
        for _ in range(_CALLS):  # a thread of the profiler waits for such a call
            time.sleep(_PAUSE_S)
            torch.cuda.synchronize(device)
