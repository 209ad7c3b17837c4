"""How the kernels are timed: replays of captured graphs, medians, inputs beyond the cache, one copy as yardstick."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

BEYOND_CACHE_BYTES = 200e6
WARM_UPS = 3
REPLAYS = 15


def median_s(function: Callable[[], Any], calls: int = 8) -> float:
    """Seconds of one call, median of replays of a graph of ``calls`` calls: no launch gaps of the host."""
    for _ in range(WARM_UPS):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            function()
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3 / calls)
    return statistics.median(times)


def copies_beyond_cache(num_bytes: int) -> int:
    """How many inputs of so many bytes a graph goes through so that none is found in the cache."""
    return max(2, round(BEYOND_CACHE_BYTES / num_bytes))


def median_in_turn_s(function: Callable[[Any], Any], inputs: Sequence[Any]) -> float:
    """Seconds of one call, median of replays of a graph that calls with each of the inputs."""

    def run() -> None:
        for each in inputs:
            function(each)

    return median_s(run, calls=1) / len(inputs)


def median_eager_s(function: Callable[[], Any], calls: int = 5) -> float:
    """Seconds of one call, median, events around ``calls`` calls launched by the host: where graphs cannot be taken."""
    for _ in range(WARM_UPS):
        function()
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(calls):
            function()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3 / calls)
    return statistics.median(times)


def copy_bandwidth(gigabytes: float = 2.0) -> float:
    """Bytes read plus bytes written per second of a large copy on the device."""
    source = torch.empty(int(gigabytes * 1e9), dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    # Not as a graph: its copies go through the copy engines, which are slower.
    return 2 * source.numel() / median_eager_s(lambda: target.copy_(source))


def kernel_copy_bandwidth(gigabytes: float = 2.0) -> float:
    """The same of a kernel, a negation, which keeps to the multiprocessors of its stream."""
    source = torch.empty(int(gigabytes * 1e9 / 4), device="cuda").normal_()
    target = torch.empty_like(source)
    return 2 * 4 * source.numel() / median_eager_s(lambda: torch.neg(source, out=target))
