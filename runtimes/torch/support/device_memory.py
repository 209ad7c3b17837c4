"""How much memory may a training process use on its device?"""

from __future__ import annotations

import os

import torch

from qsync_opt.errors import UnsupportedError
from qsync_opt.io.units import SIZE_BYTES, parse_quantity

_RESERVE = 0.05
"""Share left to fragmentation and to libraries that allocate past torch."""


def memory_budget(device: torch.device, wanted: str | int | None = None) -> int:
    """Bytes that a plan may count on.

    Args:
        device: ``cpu`` or a CUDA device.
        wanted: A limit such as ``"12 GiB"`` or bytes; None: what is free now or held by this process, less 5 %. A
            limit set by ``torch.cuda.set_per_process_memory_fraction`` is kept in any case.

    Returns:
        Bytes, at least 1.

    Raises:
        ProblemError: ``wanted`` is no quantity of memory.
        UnsupportedError: ``wanted`` is more than the device has.
    """
    given = None
    if wanted is not None:
        given = wanted if isinstance(wanted, int) else round(parse_quantity(wanted, SIZE_BYTES, "memory"))
    total, free = _cuda_memory(device) if device.type == "cuda" else _host_memory()
    if given is None:
        return max(1, int(free * (1 - _RESERVE)))
    if not 0 < given <= total:
        raise UnsupportedError(f"memory is {wanted!r}: above 0 and at most the {total} bytes of {device} are possible")
    return given


def _cuda_memory(device: torch.device) -> tuple[int, int]:
    free, total = torch.cuda.mem_get_info(device)
    allowed = int(total * torch.cuda.get_per_process_memory_fraction(device))
    return allowed, min(allowed, free + torch.cuda.memory_reserved(device))


def _host_memory() -> tuple[int, int]:
    """Of the host, shared by the processes that the launcher started on it."""
    page = os.sysconf("SC_PAGE_SIZE")
    total, free = page * os.sysconf("SC_PHYS_PAGES"), page * os.sysconf("SC_AVPHYS_PAGES")
    processes = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return total, free // processes
