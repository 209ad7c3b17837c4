"""What schemes cost on a job's own links, by bucket size, codec included."""

from __future__ import annotations

import concurrent.futures
import math
import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from qsync_opt.errors import NotReadyError, UnsupportedError
from qsync_opt.gradients import GradientScheme, SchemeTimes, scheme
from qsync_opt.kernels.gradients import Codec
from qsync_opt.runtimes.torch.ddp import clamped_share
from qsync_opt.runtimes.torch.gradients.transports import Reducer

_CACHES_BYTES = 64 << 20
_LONGER = 4.0
"""How many times as long as a reduction alone the computation beside it takes."""
_LAYERS = 8
"""Of the model whose backward pass that is."""
DEFAULT_ELEMENTS = (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 23)


def measure_schemes(
    schemes: Iterable[GradientScheme | str],
    elements: Sequence[int] = DEFAULT_ELEMENTS,
    *,
    repeats: int = 5,
    device: torch.device | str = "cpu",
    group: Any = None,
    backend: str = "auto",
    beside: bool = False,
) -> SchemeTimes:
    """Time the reduction of buckets of some sizes under each scheme; every worker of the group must call it.

    Args:
        schemes: Names or objects. Those that would overflow with so many workers are left out.
        elements: Bucket sizes, rising.
        repeats: Repetitions of which the median counts, and of it the slowest worker's.
        device: Where gradients are.
        group: Process group; None: the default one.
        backend: Of the codec.
        beside: Also measure by how much computation, and a reduction of the largest size beside it, take longer, all
            workers computing: on CPUs codec and sums take processor time from the backward pass, and it from them.

    Raises:
        NotReadyError: There is no process group, or it has one worker.
        UnsupportedError: ``beside`` on a card, where `qsync_opt.runtimes.torch.ddp.measure_slowdown` has streams.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        raise NotReadyError("no process group of at least two workers: measure inside process_group(...)")
    workers, device = dist.get_world_size(group), torch.device(device)
    if beside and device.type != "cpu":
        raise UnsupportedError(f"beside=True times threads of the host, but device is {device}; leave it out")
    reducer = Reducer(group=group, codec=Codec(backend))
    chosen = [each for each in map(scheme, schemes) if each.supports(workers)]
    times: dict[str, list[int]] = {each.name: [] for each in chosen}
    # In training, computation between two reductions leaves nothing of them in a processor's caches.
    others = torch.zeros(_CACHES_BYTES // 4) if device.type == "cpu" else None
    for size in elements:
        gradient = torch.randn(size, device=device)
        samples: dict[str, list[float]] = {each.name: [] for each in chosen}
        # Schemes in turn, so that a busy moment does not fall on one of them; the first round warms up.
        for turn in range(repeats + 1):
            for each in chosen:
                if others is not None:
                    others.add_(1.0)
                dist.barrier(group)
                started = _now(device)
                reducer.reduce(gradient, each, turn)
                if turn:
                    samples[each.name].append(_now(device) - started)
        own = torch.tensor([statistics.median(samples[each.name]) for each in chosen], dtype=torch.float64).to(device)
        dist.all_reduce(own, op=dist.ReduceOp.MAX, group=group)
        for each, seconds in zip(chosen, own.tolist(), strict=True):
            times[each.name].append(round(seconds * 1e9))
    slowdowns, stretches = {}, {}
    if beside:
        for each in chosen:
            share, stretch = _beside(reducer, each, elements[-1], times[each.name][-1] / 1e9, repeats)
            slowdowns[each.name], stretches[each.name] = clamped_share(share), max(1.0, stretch)
    return SchemeTimes(
        workers=workers,
        elements=tuple(elements),
        times_ns={name: tuple(own) for name, own in times.items()},
        slowdowns=slowdowns,
        stretches=stretches,
    )


def _beside(reducer: Reducer, each: GradientScheme, size: int, alone_s: float, repeats: int) -> tuple[float, float]:
    """What a reduction and a backward pass beside it cost each other; the mean over workers.

    Returns:
        The share of the reduction's time that the pass loses, and how many times as long as alone the reduction takes.
    """
    gradient, x = torch.randn(size), torch.randn(64, 768)
    weight = torch.randn(768, 768, requires_grad=True)
    for _ in range(_LAYERS):
        x = torch.tanh(x @ weight)
    result = x.sum()

    def work(passes: int) -> float:
        """Seconds of some backward passes, which Python does not interrupt."""
        began = time.perf_counter()
        for _ in range(passes):
            result.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        return time.perf_counter() - began

    def reduce(turn: int) -> float:
        began = time.perf_counter()
        reducer.reduce(gradient, each, turn)
        return time.perf_counter() - began

    work(1)
    # Longer than a reduction that is itself slowed down.
    own = torch.tensor([_LONGER * alone_s / (work(4) / 4)], dtype=torch.float64)
    dist.all_reduce(own, op=dist.ReduceOp.MAX, group=reducer.group)
    passes = max(1, math.ceil(float(own)))
    lost, longer = [], []
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        for turn in range(repeats):
            dist.barrier(reducer.group)
            usual_s = work(passes)
            dist.barrier(reducer.group)
            reducing = thread.submit(reduce, turn)
            took_s = work(passes)
            reduced_s = reducing.result()
            lost.append((took_s - usual_s) / min(took_s, reduced_s))
            longer.append(reduced_s / alone_s)
    both = torch.tensor([statistics.median(lost), statistics.median(longer)], dtype=torch.float64)
    dist.all_reduce(both, group=reducer.group)
    share, stretch = (both / dist.get_world_size(reducer.group)).tolist()
    return share, stretch


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
