"""Memory of a process that runs passes: from glibc, and beside torch on a card.

What is freed is used again, and what loading left goes back. By itself glibc asks the system for large blocks and gives
them back, as the order of requests has it: passes then wait for pages of zeros in place of those that the pass before
had. Other C libraries take no notice.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's ``mallopt``."""
_KEPT_BYTES = 1 << 30
"""Freed memory at the end of the heap that is kept."""
_LARGEST_REUSED = 32 << 20
"""Bytes of the largest block that comes from the heap; glibc allows no more."""


def reuse_freed_memory() -> None:
    """Keep what this process frees from now on for its next requests."""
    library = _c_library()
    if hasattr(library, "mallopt"):
        library.mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
        library.mallopt(_MMAP_THRESHOLD, _LARGEST_REUSED)


def give_back_freed_memory() -> None:
    """Give the system what is free now, wherever it stands."""
    library = _c_library()
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def _c_library() -> Any:
    return ctypes.CDLL(None)


def memory_beside_torch(device: torch.device) -> int:
    """Bytes in use on a card, but not by torch's allocator: contexts, kernels, other processes; 0 on a CPU."""
    if device.type == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)
