"""Capture on a card what a stream does, in a way that other threads, parts of cards and failures bear."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch

_OTHER_THREADS = "thread_local"
"""They may go on: those of NCCL and of data loaders ask the device for events and memory at any time."""


def capture_stream() -> torch.cuda.Stream:
    """The stream to capture on: the present one, unless that is the card's default, on which nothing can be captured.

    It may belong to a part of the card, which what is captured on another one would leave.
    """
    present = torch.cuda.current_stream()
    return _side_stream(torch.cuda.current_device()) if present == torch.cuda.default_stream() else present


@functools.cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """Always the same: cuBLAS keeps a workspace for every stream that it has seen."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def capturing(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> Iterator[None]:
    """Capture into a graph, in memory of its own; after a failure torch is as it was.

    torch leaves the memory pool of a capture that failed open, and the random generator in the belief that it is being
    captured, so that later passes with dropout would fail and memory would not come back.
    """
    pool, device = torch.cuda.graph_pool_handle(), torch.cuda.current_device()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=_OTHER_THREADS):
            yield
    except RuntimeError:
        with contextlib.suppress(RuntimeError):  # it was closed after all
            torch._C._cuda_endAllocateToPool(device, pool)
            torch._C._cuda_releasePool(device, pool)
        generator = torch.cuda.default_generators[device]
        generator.graphsafe_set_state(generator.clone_state())
        raise
