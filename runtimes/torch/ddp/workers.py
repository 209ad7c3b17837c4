"""Workers on one host that train together: their process group, and what an all-reduce costs in it."""

from __future__ import annotations

import contextlib
import datetime
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.nn  # its functions' default arguments hold the group that exists when it is loaded
from torch import Tensor

from qsync_opt.errors import NotReadyError, ProblemError, UnsupportedError
from qsync_opt.runtimes.host import free_port as free_port

_RELEASE_S = 0.2
"""Seconds for threads of a process group to finish before it is left."""
_MEASURING_ROUNDS = 4


@contextlib.contextmanager
def process_group(
    rank: int, world_size: int, port: int, *, backend: str = "gloo", timeout_s: float = 120.0
) -> Iterator[None]:
    """Join a process group on this host within the block, and leave it also after an error.

    Args:
        rank: Number of this worker.
        world_size: Number of workers.
        port: The same free port on all of them.
        backend: ``"gloo"`` (CPU, also mixed hosts) or ``"nccl"`` (one CUDA device per worker).
        timeout_s: How long a worker waits for the others, in seconds.

    Raises:
        UnsupportedError: torch was built without the backend.
        NotReadyError: A process group exists already.
    """
    available = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available}
    if backend not in available or not available[backend]():
        present = ", ".join(name for name, check in available.items() if check()) or "none"
        raise UnsupportedError(f"process group backend {backend!r} is not there: this torch has {present}")
    if dist.is_initialized():
        raise NotReadyError("a default process group exists already: leave it before joining another")
    dist.init_process_group(
        backend,
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    try:
        yield
    finally:
        # A thread of gloo frees the tensors of the last collective after all have its result, and needs the GIL for it.
        # Whoever drops the group's last reference meanwhile (DistributedDataParallel holds one) waits for that thread
        # without releasing the GIL: a deadlock. So it is released here first.
        time.sleep(_RELEASE_S)
        dist.destroy_process_group()


class AllReduceFit(NamedTuple):
    """Time of an all-reduce as ``latency_s + bytes / bandwidth_bytes_per_s``.

    ``relative_residual`` is the root mean square of (measured - fitted) / measured.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    relative_residual: float


def fit_all_reduce(sizes_bytes: Sequence[int], measured_s: Sequence[float]) -> AllReduceFit:
    """Fit latency and bandwidth to measured times by least squares of the relative error.

    Relative, because sizes span decades and the largest would decide a plain fit.

    Raises:
        ProblemError: Fewer than two different sizes, a size below zero, or a time that is not positive or not finite.
    """
    if len(sizes_bytes) != len(measured_s) or len(set(sizes_bytes)) < 2:
        raise ProblemError(f"{len(set(sizes_bytes))} sizes and {len(measured_s)} times: at least two pairs are needed")
    if min(sizes_bytes) < 0:
        raise ProblemError(f"an all-reduce of {min(sizes_bytes)} bytes was measured: sizes must be at least 0")
    for second in measured_s:
        if not (second > 0 and math.isfinite(second)):
            raise ProblemError(f"an all-reduce of {second} s was measured: times must be finite and above 0")
    times = torch.tensor(measured_s, dtype=torch.float64)
    columns = torch.tensor([[1.0, float(size)] for size in sizes_bytes], dtype=torch.float64) / times[:, None]
    latency, inverse = torch.linalg.lstsq(columns, torch.ones_like(times)[:, None]).solution.flatten().tolist()
    if latency < 0:  # noise at the small sizes: fit a line through the origin
        latency, inverse = 0.0, float(columns[:, 1].sum() / columns[:, 1].square().sum())
    if inverse <= 0:
        raise ProblemError("all-reduce times do not grow with size: measure larger sizes or more repetitions")
    residual = (columns @ torch.tensor([latency, inverse], dtype=torch.float64) - 1).square().mean().sqrt()
    return AllReduceFit(latency, 1 / inverse, float(residual))


def measure_all_reduce(
    sizes_bytes: Sequence[int] = (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24),
    *,
    repetitions: int = 5,
    device: torch.device | str = "cpu",
) -> AllReduceFit:
    """Time FP32 all-reduces of some sizes in the default process group and fit them; every worker must call it.

    A repetition counts with the slowest worker's time, a size with the median of its repetitions. On a busy host the
    times may not grow with size; then repetitions are added, up to four times as many.

    Raises:
        NotReadyError: There is no process group, or it has one worker.
        ProblemError: The times do not grow with size even so.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        raise NotReadyError("no process group of at least two workers: measure inside process_group(...)")
    payloads = [torch.zeros(max(size // 4, 1), device=torch.device(device)) for size in sizes_bytes]
    for payload in payloads:
        dist.all_reduce(payload)
    times: list[list[float]] = [[] for _ in payloads]
    # Every worker holds the same times, so that all of them stop in the same round.
    for rounds_left in range(_MEASURING_ROUNDS - 1, -1, -1):
        for payload, repeated in zip(payloads, times, strict=True):
            repeated.extend(_timed_all_reduce(payload) for _ in range(repetitions))
        medians = [statistics.median(repeated) for repeated in times]
        if medians[-1] > medians[0] or not rounds_left:
            break
    return fit_all_reduce(sizes_bytes, medians)


def _timed_all_reduce(payload: Tensor) -> float:
    dist.barrier()
    _wait_for(payload)
    start = time.perf_counter()
    dist.all_reduce(payload)
    _wait_for(payload)
    slowest = torch.tensor([time.perf_counter() - start], dtype=torch.float64, device=payload.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def _wait_for(tensor: Tensor) -> None:
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)
