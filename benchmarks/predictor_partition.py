"""A number of a card's multiprocessors as a device of its own: a green context.

Libraries choose kernels for the whole card. Some of them launch clusters of thread blocks that a partition cannot hold
(CUDA_ERROR_INVALID_CLUSTER_SIZE from cuLaunchKernelEx, which cuBLAS and cuDNN report as EXECUTION_FAILED), depending on
where its multiprocessors lie. So a partition is tried, and made in another way if need be: ``clusters`` asks the driver
for multiprocessors that can hold the largest clusters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

WAYS = ("plain", "clusters")


@contextlib.contextmanager
def partition(device: torch.device, multiprocessors: int | None, way: str = "plain") -> Iterator[int | None]:
    """Run everything inside on a number of the card's multiprocessors; None: on all of them.

    Yields:
        How many there are, which may be more than asked for.
    """
    if multiprocessors is None or device.type == "cpu":
        yield multiprocessors
        return
    torch.cuda.synchronize(device)
    context: Any
    if way == "plain":
        context = torch.cuda.GreenContext.create(num_sms=multiprocessors, device_id=device.index)
        stream, count = context.Stream(), multiprocessors
    else:
        context, stream, count = _holding_clusters(device, multiprocessors)
    with torch.cuda.stream(stream):
        yield count
        torch.cuda.synchronize(device)
    del context


def _holding_clusters(device: torch.device, multiprocessors: int) -> tuple[Any, torch.cuda.Stream, int]:
    from cuda.bindings import driver

    def told(answer: tuple[Any, ...]) -> Any:
        status, *values = answer
        if status != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"the driver refuses a partition of {multiprocessors} multiprocessors: {status}")
        return values[0] if len(values) == 1 else tuple(values)

    torch.cuda.current_stream(device).synchronize()  # the primary context exists
    handle = told(driver.cuDeviceGet(device.index))
    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    flag = driver.CUdevSmResourceSplitByCount_flags.CU_DEV_SM_RESOURCE_SPLIT_MAX_POTENTIAL_CLUSTER_SIZE
    whole = told(driver.cuDeviceGetDevResource(handle, kind))
    groups, _, _ = told(driver.cuDevSmResourceSplitByCount(1, whole, int(flag), multiprocessors))
    description = told(driver.cuDevResourceGenerateDesc([groups[0]], 1))
    default = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    context = told(driver.cuGreenCtxCreate(description, handle, int(default)))
    not_blocking = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
    stream = told(driver.cuGreenCtxStreamCreate(context, int(not_blocking), 0))
    return context, torch.cuda.ExternalStream(int(stream), device=device), groups[0].sm.smCount


def usable(
    device: torch.device, multiprocessors: int | None, attempts: dict[str, Callable[[], None]]
) -> tuple[str, dict[str, str]]:
    """The way of making a partition in which most attempts succeed, and why the others fail there."""
    best: tuple[str, dict[str, str]] = (WAYS[0], {})
    if multiprocessors is None or device.type == "cpu":
        return best
    for way in WAYS:
        failed: dict[str, str] = {}
        try:
            with partition(device, multiprocessors, way):
                for name, attempt in attempts.items():
                    try:
                        attempt()
                        torch.cuda.synchronize(device)
                    except RuntimeError as error:
                        failed[name] = str(error).splitlines()[0][:200]
        except (RuntimeError, ImportError) as error:
            failed = {name: f"{way}: {str(error)[:150]}" for name in attempts}
        if way == WAYS[0] or len(failed) < len(best[1]):
            best = (way, failed)
        if not failed:
            break
    return best
