"""Sums, norms and reductions of tensors that need no memory of a large tensor's size."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from qsync_opt.runtimes.torch.support import is_capturing

_CHUNK = 1 << 19
"""Elements of a large tensor that are reduced at a time."""
_CHUNK_ON_CARD = 1 << 21
"""The same on a card, where a smaller kernel takes the host longer to launch than the card to run."""


Place = tuple[torch.dtype, torch.device]
_Item = TypeVar("_Item")


def by_place(items: Iterable[_Item], tensor_of: Callable[[_Item], Tensor]) -> dict[Place, list[_Item]]:
    """Items grouped by type and device of their tensors, in their order: one kernel can process a group."""
    groups: dict[Place, list[_Item]] = {}
    for item in items:
        x = tensor_of(item)
        groups.setdefault((x.dtype, x.device), []).append(item)
    return groups


class Queue(Generic[_Item]):
    """Tensors, each with an item, that wait to be reduced together with others of the same type and device.

    Nothing may write into a tensor while it waits. What autograd hands to a hook is such a tensor: it adds to a
    gradient in place only where nobody else refers to its memory.
    """

    def __init__(self, limit: int) -> None:
        """Start an empty queue of ``limit`` elements at most, unless one tensor has more."""
        self.limit = limit
        self._waiting: list[tuple[Tensor, _Item]] = []
        self._elements = 0

    def wait(self, x: Tensor, item: _Item) -> None:
        """Queue a tensor until the next ``flush``, which happens now if there would be too many elements."""
        if self._elements + x.numel() > self.limit:
            self.flush()
        self._waiting.append((x, item))
        self._elements += x.numel()

    def flush(self) -> None:
        """Reduce all that waits."""
        alike = by_place(self._waiting, lambda one: one[0])
        self.clear()
        while alike:
            self.reduce(alike.popitem()[1])

    def clear(self) -> None:
        """Release all that waits."""
        self._waiting.clear()
        self._elements = 0

    def reduce(self, some: list[tuple[Tensor, _Item]]) -> None:
        """Reduce tensors of one type and device; the last reference to each is in the list."""
        raise NotImplementedError


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies on the host; one transfer per type and device."""
    parts = {
        place: iter(torch.split(torch.cat([x.reshape(-1) for x in some]).cpu(), [x.numel() for x in some]))
        for place, some in by_place(tensors, lambda x: x).items()
    }
    return [next(parts[x.dtype, x.device]).view(x.shape) for x in tensors]


def on_host(tensors: Sequence[Tensor]) -> list[list[float]]:
    """Elements of each tensor, flat; one transfer per type and device."""
    groups = by_place(tensors, lambda x: x)
    host = {place: iter(torch.cat([x.reshape(-1) for x in some]).tolist()) for place, some in groups.items()}
    return [list(itertools.islice(host[x.dtype, x.device], x.numel())) for x in tensors]


def total(x: Tensor) -> Tensor:
    """Sum in FP64; on a card in FP32, pairwise, as PyTorch would make an FP64 copy first."""
    return x.sum(dtype=_wide(x))


def _on_card(x: Tensor) -> bool:
    return x.is_cuda and x.dtype is torch.float32


def _wide(x: Tensor) -> torch.dtype:
    return x.dtype if _on_card(x) else torch.float64


def summed(x: Tensor, dim: int) -> Tensor:
    """Sums over one dimension, in the precision of ``total``."""
    return x.sum(dim, dtype=_wide(x))


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """A stack of tensors of one shape, copied as vectors: with more dimensions a card takes a kernel for each."""
    return torch.stack([x.reshape(-1) for x in tensors]).view(len(tensors), *tensors[0].shape)


def norm(x: Tensor) -> Tensor:
    """Euclidean norm; large tensors a part at a time."""
    if _on_card(x):
        result: Tensor = torch.linalg.vector_norm(x)
        return result
    return square_sum(x).sqrt()


def norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """``norm`` of each tensor; on a card in few kernels."""
    return list(torch._foreach_norm(list(tensors))) if _on_card(tensors[0]) else [norm(x) for x in tensors]


def largest(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Largest magnitude of each; on a card in few kernels."""
    return list(torch._foreach_norm(list(tensors), float("inf")))


def totals(tensors: Sequence[Tensor]) -> list[Tensor]:
    """``total`` of each tensor, none with negative elements; on a card in few kernels."""
    return list(torch._foreach_norm(list(tensors), 1)) if _on_card(tensors[0]) else [total(x) for x in tensors]


def as_real(x: Tensor) -> Tensor:
    """A tensor, or of a complex one its real and imaginary parts in a last dimension."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def square_sum(x: Tensor) -> Tensor:
    """Sum of squared magnitudes; large tensors a part at a time, on a card in one pass that sums pairwise."""
    x = as_real(x)
    if _on_card(x):
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
    """About ``limit`` evenly spaced elements, at a distance coprime to their number, so that no dimension aliases."""
    flat = x.reshape(-1)
    step = max(1, flat.numel() // limit)
    while math.gcd(step, flat.numel()) > 1 and step > 1:
        step += 1
    return flat[::step]


def reduce_result(g: Tensor, function: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Sums by row (P, N) and by column (P, M) of a function of the elements of (P, N, M), large ones in parts."""
    chunk = _CHUNK_ON_CARD if _on_card(g) else _CHUNK
    rows, columns = [], []
    for part in torch.split(g, max(1, chunk * g.shape[1] // max(chunk, g.numel())), 1):
        values = function(part)
        rows.append(values.sum(2))
        columns.append(values.sum(1))
    return (rows[0], columns[0]) if len(rows) == 1 else (torch.cat(rows, 1), torch.stack(columns).sum(0))


def ratio(whole: Tensor, part: Tensor) -> Tensor:
    """The factor from a sum over a sample to that over all; 1 where the sample's sum is 0."""
    return (whole / part).nan_to_num_(1.0, 1.0)


def channel_variances(x: Tensor) -> Tensor:
    """Variance of each channel of (samples, channels, ...)."""
    return x.detach().var([dim for dim in range(x.dim()) if dim != 1], correction=0)
