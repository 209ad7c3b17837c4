"""What do casts between formats cost a device, and the host that launches them?"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from qsync_opt.costs.costs import CostFit, fit_cost
from qsync_opt.kernels import ops
from qsync_opt.kernels.options import KernelOptions
from qsync_opt.runtimes.torch.profiling.operators import DTYPES

_ELEMENTS = (1 << 16, 1 << 20, 1 << 23)
_RUNS = 10


def time_casts(device: torch.device, formats: Sequence[str], kernels: KernelOptions) -> tuple[dict[str, CostFit], int]:
    """Device time of the casts between formats, fitted over sizes, and the host's time of one."""
    delivered = [name for name in ("BF16", "FP16", "FP32") if name in formats]
    pairs = [(a, b) for a, b in itertools.product(delivered, [*delivered, "INT8", "FP8"]) if a != b and b in formats]
    fits = {}
    host: list[float] = []
    for source, target in pairs:
        samples = []
        for elements in _ELEMENTS:
            x = torch.randn(elements // 256, 256, device=device).to(DTYPES[source])
            device_ns, host_ns = _run_often(lambda x=x, target=target: ops.cast(x, target, kernels), device)  # type: ignore[misc]
            samples.append((elements, max(1.0, device_ns)))
            if elements == _ELEMENTS[0]:
                host.append(host_ns)
        fits[f"{source}>{target}"] = fit_cost(samples)
    return fits, round(statistics.median(host)) if host and device.type != "cpu" else 0


def _run_often(work: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Time of one run on the device in a full queue, and on the host."""
    work()
    if device.type != "cuda":
        start = time.perf_counter_ns()
        for _ in range(_RUNS):
            work()
        return (time.perf_counter_ns() - start) / _RUNS, 0.0
    torch.cuda.synchronize(device)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start = time.perf_counter_ns()
    torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]  # a head start for the host
    first.record()
    for _ in range(_RUNS):
        work()
    last.record()
    host_ns = (time.perf_counter_ns() - start) / _RUNS
    torch.cuda.synchronize(device)
    return float(first.elapsed_time(last)) * 1e6 / _RUNS, host_ns
