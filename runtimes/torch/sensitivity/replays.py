"""Computations that are replayed as CUDA graphs from their second run on."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from qsync_opt.runtimes.torch.support import capture_stream, is_capturing, no_collection

Result = TypeVar("Result")

_LARGEST = 1 << 23
"""Elements of the inputs, at most, of a graph; larger computations keep the card busy without one."""


@dataclass(frozen=True, slots=True)
class _Graph(Generic[Result]):
    """A captured computation: its inputs, and the leaves of its result, whose tensors are also joined by type."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    leaves: list[Any]
    spec: TreeSpec
    flat: dict[torch.dtype, Tensor]

    def replay(self, inputs: Sequence[Tensor]) -> Result:
        for place, x in zip(self.inputs, inputs, strict=True):
            place.copy_(x)
        self.graph.replay()
        outputs = _tensors(self.leaves)
        parts = {
            dtype: iter(torch.split(whole.clone(), [x.numel() for x in outputs if x.dtype is dtype]))
            for dtype, whole in self.flat.items()
        }
        leaves = [next(parts[x.dtype]).view(x.shape) if isinstance(x, Tensor) else x for x in self.leaves]
        result: Result = tree_unflatten(leaves, self.spec)
        return result


def _tensors(leaves: Sequence[Any]) -> list[Tensor]:
    return [x for x in leaves if isinstance(x, Tensor)]


class Replays:
    """Runs computations, on a card as CUDA graphs from the second run on."""

    def __init__(self) -> None:
        self._graphs: dict[Hashable, _Graph[Any] | None] = {}
        self._pool: Any = None

    def __call__(self, key: Hashable, computation: Callable[..., Result], *inputs: Any) -> Result:
        """Run a computation.

        Args:
            key: Identifies the computation, with shapes, strides and types of the inputs.
            computation: From trees of tensors to a tree of tensors and of values that depend on shapes alone. Reads no
                other tensors, does not synchronize, and is not differentiated.
            inputs: Trees of tensors on one device.

        Returns:
            The result of the computation.
        """
        leaves = tree_leaves(inputs)
        tensors = _tensors(leaves)
        if not tensors[0].is_cuda or sum(x.numel() for x in tensors) > _LARGEST or is_capturing():
            return computation(*inputs)
        signature = (
            key,
            *((x.shape, x.stride(), x.dtype, x.device) if isinstance(x, Tensor) else x for x in leaves),
        )
        if signature not in self._graphs:
            self._graphs[signature] = None
            return computation(*inputs)
        graph = self._graphs[signature]
        if graph is None:
            graph = self._graphs[signature] = self._captured(computation, inputs)
        return graph.replay(tensors)  # type: ignore[no-any-return]

    def _captured(self, computation: Callable[..., Result], inputs: Sequence[Any]) -> _Graph[Result]:
        places = tree_map_only(Tensor, lambda x: torch.empty_like(x).copy_(x), inputs)
        device = _tensors(tree_leaves(places))[0].device
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.device(device):
            stream = capture_stream()
        graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream), no_collection():
            # Not torch.cuda.graph, which collects garbage and empties the cache. Other threads may use the card.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                leaves, spec = tree_flatten(computation(*places))
                outputs = _tensors(leaves)
                flat = {
                    dtype: torch.cat([x.reshape(-1) for x in outputs if x.dtype is dtype])
                    for dtype in dict.fromkeys(x.dtype for x in outputs)
                }
            finally:
                graph.capture_end()
        torch.cuda.current_stream(device).wait_stream(stream)
        return _Graph(graph, _tensors(tree_leaves(places)), leaves, spec, flat)
