"""Capture on a card what a stream does, in a way that other threads, parts of cards and failures bear."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator

import torch

is_capturing = torch.cuda.is_current_stream_capturing
"""Whether the present stream is being captured, also where the model is not to notice (`unnoticed`)."""
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


@contextlib.contextmanager
def unnoticed() -> Iterator[None]:
    """Tell the model's Python code that nothing is being captured, so that it takes the branches of an eager pass.

    Libraries ask, and take a slower branch where a value would decide: transformers up to 5.17 makes a mask that hides
    nothing for a vision model that needs none, and attention with a mask of odd length takes several times as long. A
    model that really looks at values cannot be captured like that: it waits for the device, which fails.
    """
    torch.cuda.is_current_stream_capturing = lambda: False
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = is_capturing


@contextlib.contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Attention takes another of torch's implementations within the block."""
    enabled = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(enabled)


@contextlib.contextmanager
def waits_noted() -> Iterator[list[str]]:
    """Fill a list with what torch says of every operation in the block for which the host waits for the device."""
    found: list[str] = []
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode(max(1, before))
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)
            found += [str(w.message) for w in told if "synchronizing CUDA operation" in str(w.message)]
