"""A number of a card's multiprocessors as a device of its own: a green context.

Libraries choose kernels for the whole card. Some of cuDNN's and cuBLAS's start all their blocks at once
(CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE) or in clusters that a partition cannot hold (CUDA_ERROR_INVALID_CLUSTER_SIZE),
which they report as EXECUTION_FAILED. Partitions that the driver makes for the largest clusters fail alike. So every
precision is tried before it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import torch

from qsync_opt.runtimes.torch import support


def partition(device: torch.device, multiprocessors: int | None) -> AbstractContextManager[None]:
    """Run everything inside on a number of the card's multiprocessors; None, or on a cpu: on all of them."""
    return support.partition(device, None if device.type == "cpu" else multiprocessors)


def refused(
    device: torch.device, multiprocessors: int | None, attempts: Mapping[str, Callable[[], None]]
) -> dict[str, str]:
    """Which attempts fail on a partition, and why."""
    failed: dict[str, str] = {}
    if multiprocessors is None or device.type == "cpu":
        return failed
    with partition(device, multiprocessors):
        for name, attempt in attempts.items():
            try:
                attempt()
                torch.cuda.synchronize(device)
            except RuntimeError as error:
                failed[name] = str(error).splitlines()[0][:200]
    return failed
