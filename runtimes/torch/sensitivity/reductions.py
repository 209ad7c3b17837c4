"""Sums, norms and reductions of tensors that need no memory of a large tensor's size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from qsync_opt.runtimes.torch.sensitivity.products import MatrixForm, ProductForm
from qsync_opt.runtimes.torch.support import is_capturing

_CHUNK = 1 << 19
"""Elements of a large tensor that are looked at together where all of them are."""
_CHUNK_ON_CARD = 1 << 21
"""The same where a kernel takes the host longer to launch than the card to run."""


Place = tuple[torch.dtype, torch.device]
_Item = TypeVar("_Item")


def by_place(items: Iterable[_Item], tensor_of: Callable[[_Item], Tensor]) -> dict[Place, list[_Item]]:
    """What can be looked at in one kernel: items whose tensors have one type and lie on one device, in their order."""
    groups: dict[Place, list[_Item]] = {}
    for item in items:
        x = tensor_of(item)
        groups.setdefault((x.dtype, x.device), []).append(item)
    return groups


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
        result: Tensor = torch.linalg.vector_norm(x)
        return result
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
