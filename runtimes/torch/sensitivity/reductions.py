"""Sums over tensors that keep nothing of a large tensor's size, and samples of them."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from qsync_opt.runtimes.torch.sensitivity.products import MatrixForm, ProductForm
from qsync_opt.runtimes.torch.support import capture_stream, is_capturing


class RandomSigns:
    """Tensors of +1 and -1 with equal chance; the same for the same seed on the same kind of device."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def like(self, x: Tensor) -> Tensor:
        """Signs of the shape, type and device of a tensor."""
        generator = self._generators.get(x.device)
        if generator is None:
            generator = torch.Generator(device=x.device).manual_seed(self._seed)
            self._generators[x.device] = generator
        return torch.empty_like(x).bernoulli_(0.5, generator=generator).mul_(2).sub_(1)


_MULTIPLIER = 6364136223846793005
_generators: dict[torch.device, torch.Generator] = {}


def signs_like(x: Tensor, key: tuple[int, ...], count: int | None = None) -> Tensor:
    """Signs of the type and device of a tensor, which depend on the key alone and can be drawn again.

    Args:
        x: Whose shape they have, too,
        key: Of them.
        count: Unless there shall be so many in a row.
    """
    generator = _generators.get(x.device)
    if generator is None:
        generator = _generators[x.device] = torch.Generator(device=x.device)
    mixed = 0
    for part in key:
        mixed = (mixed + part + 2) * _MULTIPLIER % (1 << 63)
    generator.manual_seed(mixed)
    found = torch.empty(x.shape if count is None else (count,), dtype=x.dtype, device=x.device)
    return torch.add(_minus_one(x.dtype, x.device), found.bernoulli_(0.5, generator=generator), alpha=2, out=found)


@functools.lru_cache(maxsize=16)
def _minus_one(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), -1.0, dtype=dtype, device=device)


Labels = TypeVar("Labels")
Computation = Callable[..., tuple[Labels, list[Tensor]]]
"""From tensors to tensors; what else it returns depends on shapes alone."""

_LARGEST = 1 << 23
"""Elements at most of what is copied into a graph; more keep the card busy enough without one."""


@dataclass(frozen=True, slots=True)
class _Graph(Generic[Labels]):
    """A captured computation: where it reads, and what it writes, flat and by type."""

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
    """No garbage collection: freeing what belongs to other graphs would spoil the capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Replays:
    """Runs computations, those met for the second time on a card as graphs from then on."""

    def __init__(self) -> None:
        self._graphs: dict[Hashable, _Graph[object] | None] = {}
        self._pool: Any = None

    def __call__(self, key: Hashable, computation: Computation[Labels], *inputs: Tensor) -> tuple[Labels, list[Tensor]]:
        """Run a computation.

        Args:
            key: Says, with shapes, strides and types of the inputs, which computation it is.
            computation: Reads nothing of any tensor but its inputs, waits for nothing, and is not differentiated.
            inputs: On one device.

        Returns:
            What the computation returns.
        """
        if not inputs[0].is_cuda or sum(x.numel() for x in inputs) > _LARGEST or is_capturing():
            return computation(*inputs)
        known = (key, *((x.shape, x.stride(), x.dtype, x.device) for x in inputs))
        if known not in self._graphs:
            self._graphs[known] = None
            return computation(*inputs)
        graph = self._graphs[known]
        if graph is None:
            graph = self._graphs[known] = self._captured(computation, inputs)
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
            # Not torch.cuda.graph, which collects garbage and empties the cache. Other threads may go on meanwhile.
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


_CHUNK = 1 << 19
"""Elements of a large tensor that are looked at together where all of them are."""
_CHUNK_ON_CARD = 1 << 21
"""The same where a kernel takes the host longer to launch than the card to run."""


Place = tuple[torch.dtype, torch.device]
_Item = TypeVar("_Item")


def by_place(items: Iterable[_Item], tensor_of: Callable[[_Item], Tensor]) -> dict[Place, list[_Item]]:
    """What can be looked at in one kernel: items whose tensors have one type and lie on one device, in their order."""
    found: dict[Place, list[_Item]] = {}
    for item in items:
        x = tensor_of(item)
        found.setdefault((x.dtype, x.device), []).append(item)
    return found


def total(x: Tensor) -> Tensor:
    """Sum in FP64; on a card in FP32, pairwise, as PyTorch would first make a copy of twice the size."""
    return x.sum(dtype=_wide(x))


def _on_card(x: Tensor) -> bool:
    return x.is_cuda and x.dtype is torch.float32


def _wide(x: Tensor) -> torch.dtype:
    return x.dtype if _on_card(x) else torch.float64


def summed(x: Tensor, dim: int) -> Tensor:
    """Sums over one dimension, in the precision of ``total``."""
    return x.sum(dim, dtype=_wide(x))


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of one shape, stacked as vectors: with more dimensions a card takes one kernel for each of them."""
    return torch.stack([x.reshape(-1) for x in tensors]).view(len(tensors), *tensors[0].shape)


def norm(x: Tensor) -> Tensor:
    """Root of the sum of squares, which may be squared on the host; large tensors a part at a time."""
    if _on_card(x):
        found: Tensor = torch.linalg.vector_norm(x)
        return found
    return square_sum(x).sqrt()


def norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """What ``norm`` has, of each; on a card in few kernels."""
    return list(torch._foreach_norm(list(tensors))) if _on_card(tensors[0]) else [norm(x) for x in tensors]


def largest(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Largest magnitude of each; on a card in few kernels."""
    return list(torch._foreach_norm(list(tensors), float("inf")))


def totals(tensors: Sequence[Tensor]) -> list[Tensor]:
    """What ``total`` has, of each, where nothing is negative; on a card in few kernels."""
    return list(torch._foreach_norm(list(tensors), 1)) if _on_card(tensors[0]) else [total(x) for x in tensors]


def square_sum(x: Tensor) -> Tensor:
    """Sum of squares, large tensors a part at a time; on a card in one pass that sums pairwise."""
    if x.is_cuda and x.dtype is torch.float32:
        norm: Tensor = torch.linalg.vector_norm(x)
        return norm.double().square()
    if x.numel() <= _CHUNK:
        return total(x.square())
    return torch.stack([total(part.square()) for part in torch.split(x.reshape(-1), _CHUNK)]).sum()


def mean(x: Tensor) -> Tensor:
    """Mean, in the precision of ``total``."""
    return x.mean(dtype=_wide(x))


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Sum of products, in the precision of ``total``."""
    if _on_card(a) and a.shape == b.shape and not is_capturing():
        return torch.dot(a.reshape(-1), b.reshape(-1))
    return total(a * b)


def strided(x: Tensor, limit: int) -> Tensor:
    """About ``limit`` evenly spaced elements, at no distance that some dimension repeats at."""
    flat = x.reshape(-1)
    step = max(1, flat.numel() // limit)
    while math.gcd(step, flat.numel()) > 1 and step > 1:
        step += 1
    return flat[::step]


def reduced(form: ProductForm, g: Tensor, function: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Reductions by row and by column of a function of the elements of a gradient, large ones a few rows at a time.

    Rows are rows of a matrix, (P, N, M), or samples of a convolution, (B, C, ...).
    """
    chunk = _CHUNK_ON_CARD if _on_card(g) else _CHUNK
    if g.numel() <= chunk:
        values = function(g)
        return form.result_by_row(values), form.result_by_column(values)
    dim = 1 if isinstance(form, MatrixForm) else 0
    rows, columns = [], []
    for part in torch.split(g, max(1, chunk * g.shape[dim] // g.numel()), dim):
        values = function(part)
        rows.append(form.result_by_row(values))
        columns.append(form.result_by_column(values))
    return torch.cat(rows, dim), torch.stack(columns).sum(0)


def ratio(whole: Tensor, part: Tensor) -> Tensor:
    """By what a sum over a sample is to be multiplied; 1 where the sample holds nothing."""
    return (whole / part).nan_to_num_(1.0, 1.0)


def channel_variances(x: Tensor) -> Tensor:
    """Variance of each channel of (samples, channels, ...)."""
    return x.detach().var([dim for dim in range(x.dim()) if dim != 1], correction=0)


def shares_of_mean(squares: Mapping[tuple[str, str, int], float]) -> dict[tuple[str, str, int], float]:
    """Mean square of every call's tensor over the mean of all calls of that operator; 1 where all are zero.

    Args:
        squares: Mean squares by operator, tensor and number of the call.
    """
    calls: dict[tuple[str, str], list[float]] = {}
    for key, square in squares.items():
        calls.setdefault(key[:2], []).append(square)
    means = {key: sum(values) / len(values) for key, values in calls.items()}
    return {key: square / means[key[:2]] if means[key[:2]] > 0 else 1.0 for key, square in squares.items()}
