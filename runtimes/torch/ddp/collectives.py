"""What all-reduces cost by size, measured back to back as buckets follow one another.

Also by how much they slow down what a worker computes at the same time: their kernels take multiprocessors and
bandwidth.
"""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from qsync_opt.errors import NotReadyError, ProblemError
from qsync_opt.io import check_number
from qsync_opt.runtimes.torch.ddp.workers import fit_all_reduce


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCost:
    """Time of an all-reduce by size, interpolated between the measured sizes.

    ``latency_s`` and ``bandwidth_bytes_per_s`` are one fit over all sizes, with its relative residual (root mean
    square); `ns` follows the measurements themselves, because libraries change algorithm with size. Where a larger
    all-reduce was measured to be faster than a smaller one, both count with their mean.
    """

    sizes_bytes: tuple[int, ...]
    measured_ns: tuple[float, ...]
    latency_s: float
    bandwidth_bytes_per_s: float
    relative_residual: float

    def __post_init__(self) -> None:
        sizes, times = self.sizes_bytes, self.measured_ns
        rising = all(a < b for a, b in itertools.pairwise((-1, *sizes)))
        if len(sizes) < 2 or len(sizes) != len(times) or not rising:
            raise ProblemError(
                f"all-reduces of {list(sizes)} bytes took {list(times)} ns: at least two sizes that rise, and a time "
                "for each, are needed"
            )
        for time_ns in times:
            check_number(time_ns, "time of an all-reduce in nanoseconds")

    def ns(self, num_bytes: int) -> int:
        """Time of an all-reduce of ``num_bytes`` per worker, in nanoseconds; it never falls as the size grows."""
        sizes, times = self.sizes_bytes, never_falling(self.measured_ns)
        k = min(max(bisect.bisect_left(sizes, num_bytes), 1), len(sizes) - 1)
        known, rate = k - 1, (times[k] - times[k - 1]) / (sizes[k] - sizes[k - 1])
        if num_bytes > sizes[-1]:
            known = k
            if rate == 0.0:
                rate = 1e9 / self.bandwidth_bytes_per_s  # the two largest sizes took the same time
        return max(round(times[0]), round(times[known] + rate * (num_bytes - sizes[known])))

    def to_json(self) -> dict[str, Any]:
        """As plain JSON data."""
        return {
            "sizes_bytes": list(self.sizes_bytes),
            "measured_us": [round(t / 1e3, 2) for t in self.measured_ns],
            "latency_us": self.latency_s * 1e6,
            "bandwidth_gb_per_s": self.bandwidth_bytes_per_s / 1e9,
            "relative_residual": self.relative_residual,
        }


def never_falling(times: Sequence[float]) -> list[float]:
    """The least-squares approximation of the times that never falls: neighbors that do are set to their mean.

    Source: pool adjacent violators (Ayer et al., 1955).
    """
    pools: list[tuple[float, int]] = []
    for time_ns in times:
        mean, count = time_ns, 1
        while pools and pools[-1][0] > mean:
            before, others = pools.pop()
            mean, count = (before * others + mean * count) / (others + count), others + count
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


def measure_collectives(
    sizes_bytes: Sequence[int], *, repeats: int = 5, device: torch.device | str = "cpu", group: Any = None
) -> CollectiveCost:
    """Time FP32 all-reduces of some sizes; every worker of the group must call it.

    Args:
        sizes_bytes: At least two, rising.
        repeats: Blocks of back-to-back all-reduces per size; their median counts, and of it the slowest worker's.
        device: Where the tensors are.
        group: Process group; None: the default one.

    Raises:
        NotReadyError: There is no process group, or it has one worker.
        ProblemError: Fewer than two sizes, or sizes that do not rise; or times do not grow with size.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        raise NotReadyError("no process group of at least two workers: measure inside process_group(...)")
    if len(sizes_bytes) < 2 or any(a >= b for a, b in itertools.pairwise((0, *sizes_bytes))):
        raise ProblemError(f"sizes of all-reduces are {list(sizes_bytes)} bytes: at least two that rise are needed")
    device = torch.device(device)
    measured = []
    for size in sizes_bytes:
        payload = torch.zeros(max(1, size // 4), device=device)
        runs = 4 if size <= 1 << 24 else 2
        _block(payload, runs, group)
        own = torch.tensor(
            [statistics.median(_block(payload, runs, group) for _ in range(repeats))],
            dtype=torch.float64,
            device=device,
        )
        dist.all_reduce(own, op=dist.ReduceOp.MAX, group=group)
        measured.append(float(own))
        del payload
    fit = fit_all_reduce(sizes_bytes, [t / 1e9 for t in measured])
    return CollectiveCost(sizes_bytes=tuple(sizes_bytes), measured_ns=tuple(measured), **fit._asdict())


def measure_slowdown(
    cost: CollectiveCost,
    *,
    num_bytes: int = 25 << 20,
    repeats: int = 5,
    device: torch.device | str = "cpu",
    group: Any = None,
) -> float:
    """Share of an all-reduce's time by which computation beside it takes longer on this worker.

    0 where both run as if alone, 1 where computation stands still meanwhile. Every worker of the group must call it, on
    the stream that it trains on. Workers take turns in computing matrix products and an element-wise function while the
    others wait in the all-reduces: the worker that sets the pace of training never waits in an all-reduce, and one that
    waits occupies multiprocessors for longer than the all-reduce lasts.

    Args:
        cost: Of an all-reduce alone, from `measure_collectives` on this group.
        num_bytes: Size of an all-reduce; the default is that of a bucket of ``DistributedDataParallel``.
        repeats: Blocks with and without all-reduces, in turn; the median of their differences counts.
        device: Where the tensors are.
        group: Process group; None: the default one.

    Raises:
        NotReadyError: There is no process group, or it has one worker.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        raise NotReadyError("no process group of at least two workers: measure inside process_group(...)")
    device = torch.device(device)
    width = 1024 if device.type == "cuda" else 128
    payload = torch.zeros(max(1, num_bytes // 4), device=device)
    here = torch.zeros(1, device=device)
    a, b = (torch.randn(width, width, device=device) for _ in range(2))

    def work(times: int) -> None:
        for _ in range(times):
            torch.tanh(a @ b)

    alone = cost.ns(num_bytes)
    work(3)
    own = _timed(lambda: work(8), device) / 8
    times = max(1, math.ceil(2.0 * alone / own))

    def block(beside: bool, mine: bool) -> float:
        pending: list[Any] = []

        def run() -> None:
            for _ in range(_BESIDE):
                if beside:
                    pending.append(dist.all_reduce(payload, group=group, async_op=True))
                if mine:
                    work(times)

        dist.all_reduce(here, group=group)  # a barrier
        spent_ns = _timed(run, device)
        for handle in pending:
            handle.wait()
        return spent_ns

    share = 0.0
    for turn in range(dist.get_world_size(group)):
        mine = turn == dist.get_rank(group)
        block(True, mine)
        longer = statistics.median([block(True, mine) - block(False, mine) for _ in range(repeats)])
        if mine:
            share = longer / (_BESIDE * alone)
    return clamped_share(share)


def clamped_share(share: float) -> float:
    """The share limited to 0 to 1: computation stands still at most for as long as an all-reduce lasts."""
    return min(max(0.0, share), 1.0)


_BESIDE = 8
"""All-reduces in a block."""


def _timed(run: Callable[[], None], device: torch.device) -> float:
    """Nanoseconds that the current stream takes for some work."""
    if device.type != "cuda":
        start = time.perf_counter_ns()
        run()
        return float(time.perf_counter_ns() - start)
    torch.cuda.synchronize(device)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    first.record()
    run()
    last.record()
    torch.cuda.synchronize(device)
    return float(first.elapsed_time(last)) * 1e6


def _block(payload: torch.Tensor, runs: int, group: Any) -> float:
    """Nanoseconds of one all-reduce in a row of them."""
    dist.barrier(group)
    if payload.device.type != "cuda":
        start = time.perf_counter_ns()
        for _ in range(runs):
            dist.all_reduce(payload, group=group)
        return (time.perf_counter_ns() - start) / runs
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(payload.device)
    dist.all_reduce(payload, group=group)  # a barrier
    first.record()
    for _ in range(runs):
        dist.all_reduce(payload, group=group)
    last.record()
    torch.cuda.synchronize(payload.device)
    return float(first.elapsed_time(last)) * 1e6 / runs
