"""Computations that are replayed as CUDA graphs from their second run on."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from qsync_opt.runtimes.torch.support import capture_stream, is_capturing

Labels = TypeVar("Labels")
Computation = Callable[..., tuple[Labels, list[Tensor]]]
"""From tensors to labels and tensors; the labels depend on shapes alone."""

_LARGEST = 1 << 23
"""Elements of the inputs, at most, of a graph; larger computations keep the card busy without one."""


@dataclass(frozen=True, slots=True)
class _Graph(Generic[Labels]):
    """A captured computation: its inputs, and its outputs, also joined by type."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    labels: Labels
    outputs: list[Tensor]
    flat: dict[torch.dtype, Tensor]

    def replay(self, inputs: Sequence[Tensor]) -> tuple[Labels, list[Tensor]]:
        for place, x in zip(self.inputs, inputs, strict=True):
            place.copy_(x)
        self.graph.replay()
        parts = {
            dtype: iter(torch.split(whole.clone(), [x.numel() for x in self.outputs if x.dtype is dtype]))
            for dtype, whole in self.flat.items()
        }
        return self.labels, [next(parts[x.dtype]).view(x.shape) for x in self.outputs]


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection: freeing tensors of other graphs would invalidate the capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Replays:
    """Runs computations, on a card as CUDA graphs from the second run on."""

    def __init__(self) -> None:
        self._graphs: dict[Hashable, _Graph[object] | None] = {}
        self._pool: Any = None

    def __call__(self, key: Hashable, computation: Computation[Labels], *inputs: Tensor) -> tuple[Labels, list[Tensor]]:
        """Run a computation.

        Args:
            key: Identifies the computation, with shapes, strides and types of the inputs.
            computation: Reads no other tensors, does not synchronize, and is not differentiated.
            inputs: Tensors on one device.

        Returns:
            The result of the computation.
        """
        if not inputs[0].is_cuda or sum(x.numel() for x in inputs) > _LARGEST or is_capturing():
            return computation(*inputs)
        signature = (key, *((x.shape, x.stride(), x.dtype, x.device) for x in inputs))
        if signature not in self._graphs:
            self._graphs[signature] = None
            return computation(*inputs)
        graph = self._graphs[signature]
        if graph is None:
            graph = self._graphs[signature] = self._captured(computation, inputs)
        return graph.replay(inputs)  # type: ignore[return-value]

    def _captured(self, computation: Computation[Labels], inputs: Sequence[Tensor]) -> _Graph[Labels]:
        device = inputs[0].device
        places = [torch.empty_like(x).copy_(x) for x in inputs]
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.device(device):
            stream = capture_stream()
        graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream), _no_collection():
            # Not torch.cuda.graph, which collects garbage and empties the cache. Other threads may use the card.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                labels, outputs = computation(*places)
                flat = {
                    dtype: torch.cat([x.reshape(-1) for x in outputs if x.dtype is dtype])
                    for dtype in dict.fromkeys(x.dtype for x in outputs)
                }
            finally:
                graph.capture_end()
        torch.cuda.current_stream(device).wait_stream(stream)
        return _Graph(graph, places, labels, outputs, flat)
