"""What does an all-reduce cost on the group at hand, by size? Measured back to back, as buckets follow one another.

And by how much does it slow down what a worker computes beside it: its kernels take multiprocessors and bandwidth.
"""

from __future__ import annotations

import bisect
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from qsync_opt.errors import NotReadyError
from qsync_opt.runtimes.torch.ddp import fit_all_reduce


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCost:
    """Time of an all-reduce by size: a start-up time and a rate between each two measured sizes.

    ``latency_s`` and ``bandwidth_bytes_per_s`` are one fit over all sizes, with its relative residual (root mean
    square); `ns` follows the measurements themselves, because libraries change algorithm with size.
    """

    sizes_bytes: tuple[int, ...]
    measured_ns: tuple[float, ...]
    latency_s: float
    bandwidth_bytes_per_s: float
    relative_residual: float

    def ns(self, num_bytes: int) -> int:
        """Time of an all-reduce of ``num_bytes`` per worker, in nanoseconds."""
        sizes, times = self.sizes_bytes, self.measured_ns
        k = min(max(bisect.bisect_left(sizes, num_bytes), 1), len(sizes) - 1)
        rate = max(0.0, (times[k] - times[k - 1]) / (sizes[k] - sizes[k - 1]))
        return max(round(min(times)), round(times[k - 1] + rate * (num_bytes - sizes[k - 1])))

    def to_json(self) -> dict[str, Any]:
        """As plain JSON data."""
        return {
            "sizes_bytes": list(self.sizes_bytes),
            "measured_us": [round(t / 1e3, 2) for t in self.measured_ns],
            "latency_us": self.latency_s * 1e6,
            "bandwidth_gb_per_s": self.bandwidth_bytes_per_s / 1e9,
            "relative_residual": self.relative_residual,
        }


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
        ProblemError: Times do not grow with size.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        raise NotReadyError("no process group of at least two workers: measure inside process_group(...)")
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
    fit = fit_all_reduce(list(sizes_bytes), [t / 1e9 for t in measured], dist.get_world_size(group))
    return CollectiveCost(
        sizes_bytes=tuple(sizes_bytes),
        measured_ns=tuple(measured),
        latency_s=fit.latency_s,
        bandwidth_bytes_per_s=fit.bandwidth_bytes_per_s,
        relative_residual=fit.relative_residual,
    )


def measure_slowdown(
    cost: CollectiveCost,
    *,
    num_bytes: int = 25 << 20,
    repeats: int = 5,
    device: torch.device | str = "cpu",
    group: Any = None,
    work: Callable[[], object] | None = None,
) -> float:
    """By what share of an all-reduce's time does computation beside it take longer on this worker?

    0 where both run as if alone, 1 where computation stands still meanwhile. Every worker of the group must call it, on
    the stream that it trains on; each computes for equally long.

    Args:
        cost: Of an all-reduce alone, from `measure_collectives` on this group.
        num_bytes: Size of an all-reduce; the default is that of a bucket of ``DistributedDataParallel``.
        repeats: Blocks with and without all-reduces, in turn; the median of their differences counts.
        device: Where the tensors are.
        group: Process group; None: the default one.
        work: What is computed, without any exchange between workers: a training step of the model itself says most,
            where the device paces it. None: a matrix product and an element-wise function. On a small part of a card
            those few blocks of a product wait for the one that an all-reduce disturbs, which larger products do not.

    Raises:
        NotReadyError: There is no process group, or it has one worker.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        raise NotReadyError("no process group of at least two workers: measure inside process_group(...)")
    device = torch.device(device)
    payload = torch.zeros(max(1, num_bytes // 4), device=device)
    once = work or _product(device)

    def compute(times: int) -> None:
        for _ in range(times):
            once()

    alone = cost.ns(num_bytes)
    compute(3)
    own = _timed(lambda: compute(8), device) / 8
    longest = torch.tensor([max(own, 2.0 * alone)], dtype=torch.float64, device=device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=group)
    times = max(1, math.ceil(float(longest) / own))
    count = max(1, int(float(longest) / (_LONGER * alone)))  # seen in steps that take much longer than an all-reduce

    def block(beside: bool) -> float:
        pending: list[Any] = []

        def run() -> None:
            for _ in range(_BESIDE):
                if beside:
                    pending.extend(dist.all_reduce(payload, group=group, async_op=True) for _ in range(count))
                compute(times)

        dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=group)  # all workers are here
        taken = _timed(run, device)
        for handle in pending:
            handle.wait()
        return taken

    block(True)
    longer = [block(True) - block(False) for _ in range(repeats)]
    return max(0.0, statistics.median(longer) / (_BESIDE * count * alone))


_BESIDE = 8
"""Times in a block that all-reduces run beside computation."""
_LONGER = 8.0
"""What is computed takes about this many times what the all-reduces beside it take, if it takes longer at all."""


def _product(device: torch.device) -> Callable[[], object]:
    width = 1024 if device.type == "cuda" else 128
    a, b = (torch.randn(width, width, device=device) for _ in range(2))
    return lambda: torch.tanh(a @ b)


def _timed(run: Callable[[], None], device: torch.device) -> float:
    """Nanoseconds that the present stream takes for some work."""
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
    dist.all_reduce(payload, group=group)  # both workers are here
    first.record()
    for _ in range(runs):
        dist.all_reduce(payload, group=group)
    last.record()
    torch.cuda.synchronize(payload.device)
    return float(first.elapsed_time(last)) * 1e6 / runs
