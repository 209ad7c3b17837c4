"""Probed rates of a device: products, copies in and out of the cache, and the time of a call without work."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from qsync_opt.cluster import DATA_SHEETS
from qsync_opt.costs.learned import DeviceVector
from qsync_opt.kernels import backend
from qsync_opt.numerics import number_format
from qsync_opt.runtimes.torch.profiling import DTYPES
from qsync_opt.runtimes.torch.support import Stopwatch, device_identity, make_stopwatch

_RUNS = 7
_SIDE = {"cpu": 768, "cuda": 8192}
_LARGE_BYTES = {"cpu": 192 * 2**20, "cuda": 2**31}
_DEFAULT_CACHE_BYTES = 8 * 2**20


def probe_device(device: torch.device, name: str | None = None, multiprocessors: int | None = None) -> DeviceVector:
    """Measure the rates of a device; a whole card's data sheet counts where it has more.

    Args:
        device: Which one.
        name: Instead of the hardware's, for a partition.
        multiprocessors: Of the partition that this runs in, see `qsync_opt.runtimes.torch.support.partition`.
    """
    stopwatch = make_stopwatch(device)
    cache_bytes, all_multiprocessors = _sizes(device)
    if multiprocessors is not None and name is None:
        name = f"{torch.cuda.get_device_properties(device).name}, {multiprocessors} multiprocessors"
    identity = device_identity(device, name)
    own = [p for p in backend.device_precisions(device) if not number_format(p).eight_bit_backward]
    product_ns = {p: _product_ns(p, device, stopwatch) for p in own}
    side = _SIDE[device.type]
    peaks = {p: 2e9 * side**3 / ns for p, ns in product_ns.items()}
    sheet = next((s for key, s in DATA_SHEETS.items() if device.type == "cuda" and key in identity.name), None)
    memory = _copy_rate(_LARGE_BYTES[device.type], device, stopwatch)
    source = "probed"
    if sheet is not None and name is None:
        peaks = {p: max(rate, sheet.peak_flops.get(p, 0.0)) for p, rate in peaks.items()}
        memory = max(memory, sheet.bandwidth_bytes_per_s)
        source = f"probed, or {sheet.source} where that has more"
    threads = f", {identity.threads} threads" if device.type == "cpu" and name is None else ""
    return DeviceVector(
        name=identity.name + threads,
        kind=device.type,
        peak_flops=peaks,
        bandwidth_bytes_per_s=memory,
        cache_bytes=float(cache_bytes),
        cache_bytes_per_s=max(memory, _copy_rate(cache_bytes // 4, device, stopwatch)),
        multiprocessors=multiprocessors or all_multiprocessors,
        launch_ns=_launch_ns(device, stopwatch),
        source=source,
    )


def _best_ns(work: Callable[[], Any], stopwatch: Stopwatch, *, flush: bool) -> float:
    times = []
    for _ in range(_RUNS + 1):
        stopwatch.settle(flush=flush)
        times.append(stopwatch.time(work)[1].device_ns)
    return max(1.0, min(times[1:]))


def _product_ns(precision: str, device: torch.device, stopwatch: Stopwatch) -> float:
    """Time of a large product in a precision; TF32 and 8-bit formats by the framework's own kernels."""
    side = _SIDE[device.type]
    a = torch.randn(side, side, device=device)
    if precision == "INT8":
        codes = a.clamp(-3, 3).mul(40).to(torch.int8)
        return _best_ns(lambda: torch._int_mm(codes, codes), stopwatch, flush=False)
    if precision == "FP8":
        codes8 = a.to(torch.float8_e4m3fn)
        one = torch.ones((), device=device)
        column = codes8.t().contiguous().t()
        return _best_ns(
            lambda: torch._scaled_mm(codes8, column, one, one, out_dtype=torch.bfloat16), stopwatch, flush=False
        )
    x = a.to(DTYPES[precision])
    if precision != "TF32":
        return _best_ns(lambda: x @ x, stopwatch, flush=False)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        return _best_ns(lambda: x @ x, stopwatch, flush=False)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _copy_rate(num_bytes: int, device: torch.device, stopwatch: Stopwatch) -> float:
    """Bytes read and written per second by a copy of ``num_bytes`` in total."""
    source = torch.zeros(max(1, num_bytes // 8), device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    return 1e9 * 8 * source.numel() / _best_ns(lambda: target.copy_(source), stopwatch, flush=False)


def _launch_ns(device: torch.device, stopwatch: Stopwatch) -> float:
    """The least of some medians: what lengthens calls comes in bursts."""
    x = torch.zeros(16, device=device)
    medians = []
    for _ in range(_RUNS):
        times = []
        for _ in range(5):
            stopwatch.settle(flush=False)
            times.append(stopwatch.time(lambda: x.add_(1.0))[1].device_ns)
        medians.append(statistics.median(times))
    return max(100.0, min(medians))


def _sizes(device: torch.device) -> tuple[int, int]:
    """Bytes of the last-level cache, and multiprocessors (threads of a cpu)."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return int(getattr(properties, "L2_cache_size", 0)) or _DEFAULT_CACHE_BYTES, properties.multi_processor_count
    # Shared with other cores, so that a process has no more than some of it.
    caches = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    sizes = [int(text[:-1]) * 1024 for path in caches if (text := path.read_text().strip()).endswith("K")]
    largest = max(sizes, default=_DEFAULT_CACHE_BYTES)
    return min(largest, 32 * 2**20, max(1, os.cpu_count() or 1) * _DEFAULT_CACHE_BYTES), torch.get_num_threads()
