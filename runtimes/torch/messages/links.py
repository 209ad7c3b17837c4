"""What messages between workers cost, measured: links a fixed time and one per byte, packing a time by width."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from qsync_opt.kernels.messages import pack_rows, row_bytes, unpack_rows
from qsync_opt.runtimes.torch.messages.transfer import transfer

_LEAST_SHARE = 1e-9
"""Share of packing's time below which bytes are said to make no difference."""
_REPEATS = 5


@dataclass(frozen=True, slots=True)
class Codec:
    """What packing and unpacking take.

    Attributes:
        call_ns: Nanoseconds of packing the rows that one worker gets in one width, however few, and of unpacking them.
        number_ns: Width to nanoseconds for each number that is packed, and for each that is unpacked, beside that.
    """

    call_ns: tuple[float, float]
    number_ns: Mapping[int, tuple[float, float]]

    def per_byte(self, dim: int) -> tuple[float, float]:
        """Nanoseconds by which each byte of rows of ``dim`` numbers makes packing, and unpacking, longer (`fit_link`).

        0 where narrow rows take as long as wide ones, or longer, as on CPUs.
        """
        sizes = [row_bytes(dim, width) for width in self.number_ns]

        def slope(side: int) -> float:
            times = [dim * both[side] for both in self.number_ns.values()]
            per_byte = fit_link(sizes, times)[1]
            return per_byte if per_byte * max(sizes) > _LEAST_SHARE * max(times) else 0.0

        return slope(0), slope(1)


def probe_links(group: Any, device: torch.device | str, sizes: Sequence[int]) -> list[list[tuple[int, float]]]:
    """Nanoseconds and nanoseconds per byte from each worker to each other, the same table on every rank.

    All pairs of a ring round send at once, by `transfer` as in an exchange, and a pair's time is its receiver's: the
    median of some, since training meets usual times and not the best ones.

    Args:
        group: Process group.
        device: Of the messages.
        sizes: Bytes of the probes, at least two, the same on every rank: about those of the job, because the first
            bytes of a message may be faster than the others, and few bytes between cards take as long as many.

    Source: AdaQP (MLSys 2023), section 4.2.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    measured = torch.zeros(world, len(sizes), dtype=torch.float64)
    for step in range(1, world):
        for column, size in enumerate(sizes):
            departures, arrivals = [0] * world, [0] * world
            departures[(rank + step) % world] = arrivals[(rank - step) % world] = size
            data = torch.zeros(size, dtype=torch.uint8, device=device)
            out = torch.empty_like(data)
            seconds = []
            for _ in range(_REPEATS):
                dist.barrier(group)
                started = time.perf_counter()
                transfer(out, data, arrivals, departures, group).wait()
                if out.is_cuda:
                    torch.cuda.synchronize(out.device)
                seconds.append(time.perf_counter() - started)
            measured[(rank - step) % world, column] = 1e9 * statistics.median(seconds)
    everyone = [torch.zeros(world, len(sizes), dtype=torch.float64, device=device) for _ in range(world)]
    dist.all_gather(everyone, measured.to(device), group=group)
    return [
        [
            (0, 0.0) if sender == receiver else fit_link(sizes, everyone[receiver][sender].tolist())
            for receiver in range(world)
        ]
        for sender in range(world)
    ]


def fit_link(sizes: Sequence[int], times_ns: Sequence[float]) -> tuple[int, float]:
    """The fixed time and the time per byte, both at least 0, by least squares; errors weigh as the inverse of the time.

    So large messages, which take most of an epoch, are not bent to small ones, of which a burst may pass at once.

    Args:
        sizes: Bytes.
        times_ns: Nanoseconds of each, positive.
    """
    bytes_, times = np.asarray(sizes, np.float64), np.asarray(times_ns, np.float64)
    columns = np.stack([np.ones(times.size), bytes_], axis=1) / np.sqrt(times)[:, None]
    fixed, per_byte = np.linalg.lstsq(columns, np.sqrt(times))[0]
    if fixed < 0 or per_byte < 0:  # the other alone fits best then
        only = 1 if fixed < 0 else 0
        value = columns[:, only] @ np.sqrt(times) / np.square(columns[:, only]).sum()
        fixed, per_byte = (0.0, value) if only else (value, 0.0)
    return round(fixed), float(per_byte)


def probe_codec(
    group: Any, device: torch.device | str, widths: Sequence[int], rows: int, dim: int, backend: str
) -> list[Codec]:
    """What packing and unpacking take on each worker, all of them at once, as in training.

    Args:
        group: Process group.
        device: Of the rows.
        widths: Those to measure.
        rows: As many as this worker packs or unpacks at a time, at least 1.
        dim: Numbers of a row.
        backend: See `qsync_opt.kernels.messages.pack_rows`.

    Returns:
        One of each rank, the same list on every rank.
    """
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(rows, dim, generator=generator).to(device)
    order, out = torch.randperm(rows, generator=generator).to(device), torch.empty_like(data)
    word = torch.zeros(8, dtype=torch.uint8, device=device)

    def median_ns(work: Callable[[], object]) -> float:
        seconds = []
        for _ in range(_REPEATS + 1):  # the first compiles
            if out.is_cuda:
                torch.cuda.synchronize(out.device)
            began = time.perf_counter()
            work()
            if out.is_cuda:
                torch.cuda.synchronize(out.device)
            seconds.append(time.perf_counter() - began)
        return 1e9 * statistics.median(seconds[1:])

    def pack(width: int, index: torch.Tensor) -> torch.Tensor:
        packed = pack_rows(data, index, width, 0, backend=backend)
        return torch.cat([word, packed.reshape(-1)])[word.numel() :].view(packed.shape)  # onto the wire, as in training

    measured = []
    dist.barrier(group)
    for width in widths:
        for index in (order[:1], order):
            wire = pack(width, index)
            measured += [
                median_ns(partial(pack, width, index)),
                median_ns(partial(unpack_rows, wire, index, out, width, backend=backend)),
            ]
    one_WS, all_WS = torch.tensor(measured, dtype=torch.float64).view(-1, 2, 2).unbind(1)  # S: packing and unpacking
    number_WS = ((all_WS - one_WS) / (max(rows - 1, 1) * dim)).clamp(min=1e-6)
    own = torch.cat([one_WS.median(0).values[None], number_WS]).to(device)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, own, group=group)
    codecs = []
    for each in everyone:
        call, *number = (tuple(both) for both in each.tolist())
        codecs.append(Codec(call, dict(zip(widths, number, strict=True))))
    return codecs
