"""What messages between workers cost: a fixed time and one per byte, measured."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

SMALL, LARGE = 1 << 10, 1 << 20
"""Bytes of the two probes."""
_REPEATS = 5


def probe_links(group: Any, device: torch.device | str) -> list[list[tuple[int, float]]]:
    """Nanoseconds and nanoseconds per byte from each worker to each other, the same table on every rank.

    All pairs of a ring round send at once, as in an exchange, and a pair's time is its receiver's, the least of some.

    Source: AdaQP (MLSys 2023), section 4.2, with minima instead of a regression.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    measured = torch.zeros(world, 2, dtype=torch.float64)
    for step in range(1, world):
        for column, size in enumerate((SMALL, LARGE)):
            sizes = [0] * world
            sizes[(rank + step) % world] = size
            arrivals = [0] * world
            arrivals[(rank - step) % world] = size
            data = torch.zeros(size, dtype=torch.uint8, device=device)
            out = torch.empty_like(data)
            least = float("inf")
            for _ in range(_REPEATS):
                dist.barrier(group)
                started = time.perf_counter()
                dist.all_to_all_single(out, data, arrivals, sizes, group=group)
                if out.is_cuda:
                    torch.cuda.synchronize(out.device)
                least = min(least, time.perf_counter() - started)
            measured[(rank - step) % world, column] = 1e9 * least
    everyone = [torch.zeros(world, 2, dtype=torch.float64, device=device) for _ in range(world)]
    dist.all_gather(everyone, measured.to(device), group=group)
    table: list[list[tuple[int, float]]] = []
    for sender in range(world):
        row = []
        for receiver in range(world):
            small, large = everyone[receiver][sender].tolist()
            per_byte = max(large - small, 0.0) / (LARGE - SMALL)
            row.append((int(max(small - per_byte * SMALL, 0.0)), per_byte))
        table.append(row)
    return table
