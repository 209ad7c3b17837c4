"""Capture of CUDA graphs that works beside other threads and on parts of cards, and leaves torch intact if it fails."""

from __future__ import annotations

import contextlib
import functools
import gc
import warnings
from collections.abc import Iterator

import torch

is_capturing = torch.cuda.is_current_stream_capturing
"""Whether the present stream is being captured, also within `hidden_capture`."""
_OTHER_THREADS = "thread_local"
"""Capture mode that lets other threads continue: those of NCCL and data loaders use the device at any time."""


def capture_stream() -> torch.cuda.Stream:
    """The stream to capture on: the present one, or a side stream if that is the default, which cannot be captured.

    The present one may be bound to a part of the card, which a side stream would not be.
    """
    present = torch.cuda.current_stream()
    return _side_stream(torch.cuda.current_device()) if present == torch.cuda.default_stream() else present


@functools.cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """Always the same stream: cuBLAS keeps a workspace for every stream that it has seen."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """No garbage collection within the block.

    It would take time, and freeing other graphs, or their tensors, would invalidate a capture.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def capturing(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> Iterator[None]:
    """Capture into a graph, in memory of its own; restore torch after a failure.

    After a failed capture, torch leaves the memory pool open and the random generator in capture mode, so that memory
    would not be released and later passes with dropout would fail.
    """
    pool, device = torch.cuda.graph_pool_handle(), torch.cuda.current_device()
    try:
        with (
            no_collection(),
            torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=_OTHER_THREADS),
        ):
            yield
    except RuntimeError:
        with contextlib.suppress(RuntimeError):  # it is closed already
            torch._C._cuda_endAllocateToPool(device, pool)
            torch._C._cuda_releasePool(device, pool)
        generator = torch.cuda.default_generators[device]
        generator.graphsafe_set_state(generator.clone_state())
        raise


@contextlib.contextmanager
def hidden_capture() -> Iterator[None]:
    """Hide the capture from the model's Python code, so that it takes the branches of an eager pass.

    Libraries take a slower branch while capturing if a value would decide: transformers up to 5.17 builds a mask that
    hides nothing, and attention with a mask of odd length takes several times as long. A model that does read values
    fails inside, because it waits for the device.
    """
    torch.cuda.is_current_stream_capturing = lambda: False
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = is_capturing


@contextlib.contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Let attention use torch's other implementations within the block."""
    enabled = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(enabled)


@contextlib.contextmanager
def recorded_waits() -> Iterator[list[str]]:
    """List torch's warning for every operation in the block for which the host waits for the device."""
    waits: list[str] = []
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode(max(1, before))
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode(before)
            waits += [str(w.message) for w in caught if "synchronizing CUDA operation" in str(w.message)]
