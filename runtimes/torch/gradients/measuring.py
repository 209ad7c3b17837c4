"""What schemes cost on a job's own links, by bucket size, codec included."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from qsync_opt.errors import NotReadyError
from qsync_opt.gradients import GradientScheme, SchemeTimes, scheme
from qsync_opt.kernels.gradients import Codec
from qsync_opt.runtimes.torch.gradients.transports import Reducer

DEFAULT_ELEMENTS = (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 23)


def measure_schemes(
    schemes: Iterable[GradientScheme | str],
    elements: Sequence[int] = DEFAULT_ELEMENTS,
    *,
    repeats: int = 5,
    device: torch.device | str = "cpu",
    group: Any = None,
    backend: str = "auto",
) -> SchemeTimes:
    """Time the reduction of buckets of some sizes under each scheme; every worker of the group must call it.

    Args:
        schemes: Names or objects. Those that would overflow with so many workers are left out.
        elements: Bucket sizes, rising.
        repeats: Repetitions of which the median counts, and of it the slowest worker's.
        device: Where gradients are.
        group: Process group; None: the default one.
        backend: Of the codec.

    Raises:
        NotReadyError: There is no process group, or it has one worker.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        raise NotReadyError("no process group of at least two workers: measure inside process_group(...)")
    workers, device = dist.get_world_size(group), torch.device(device)
    reducer = Reducer(group=group, codec=Codec(backend))
    chosen = [each for each in map(scheme, schemes) if each.supports(workers)]
    times: dict[str, list[int]] = {each.name: [] for each in chosen}
    for size in elements:
        gradient = torch.randn(size, device=device)
        samples: dict[str, list[float]] = {each.name: [] for each in chosen}
        # Schemes in turn, so that a busy moment does not fall on one of them; the first round warms up.
        for turn in range(repeats + 1):
            for each in chosen:
                dist.barrier(group)
                started = _now(device)
                reducer.reduce(gradient, each, turn)
                if turn:
                    samples[each.name].append(_now(device) - started)
        own = torch.tensor([statistics.median(samples[each.name]) for each in chosen], dtype=torch.float64).to(device)
        dist.all_reduce(own, op=dist.ReduceOp.MAX, group=group)
        for each, seconds in zip(chosen, own.tolist(), strict=True):
            times[each.name].append(round(seconds * 1e9))
    return SchemeTimes(
        workers=workers, elements=tuple(elements), times_ns={name: tuple(own) for name, own in times.items()}
    )


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
