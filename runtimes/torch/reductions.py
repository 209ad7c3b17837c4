"""Sums over tensors that keep nothing of a large tensor's size, and samples of them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from qsync_opt.runtimes.torch.product_forms import MatrixForm, ProductForm

_CHUNK = 1 << 19
"""Elements of a large tensor that are looked at together where all of them are."""


def total(x: Tensor) -> Tensor:
    """Sum in FP64; on a card in FP32, pairwise, as PyTorch would first make a copy of twice the size."""
    if x.is_cuda and x.dtype is torch.float32:
        return x.sum().double()
    return x.sum(dtype=torch.float64)


def square_sum(x: Tensor) -> Tensor:
    """Sum of squares, large tensors a part at a time; on a card in one pass that sums pairwise."""
    if x.is_cuda and x.dtype is torch.float32:
        norm: Tensor = torch.linalg.vector_norm(x)
        return norm.double().square()
    if x.numel() <= _CHUNK:
        return total(x.square())
    return torch.stack([total(part.square()) for part in torch.split(x.reshape(-1), _CHUNK)]).sum()


def mean(x: Tensor) -> Tensor:
    """Mean in FP64, like ``total``."""
    if x.is_cuda and x.dtype is torch.float32:
        return x.mean().double()
    return x.mean(dtype=torch.float64)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Sum of products in FP64."""
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
    if g.numel() <= _CHUNK:
        values = function(g)
        return form.result_by_row(values), form.result_by_column(values)
    dim = 1 if isinstance(form, MatrixForm) else 0
    rows, columns = [], []
    for part in torch.split(g, max(1, _CHUNK * g.shape[dim] // g.numel()), dim):
        values = function(part)
        rows.append(form.result_by_row(values))
        columns.append(form.result_by_column(values))
    return torch.cat(rows, dim), torch.stack(columns).sum(0)


def ratio(whole: Tensor, part: Tensor) -> Tensor:
    """By what a sum over a sample is to be multiplied; 1 where the sample holds nothing."""
    return (whole / part).nan_to_num_(1.0, 1.0)


def channel_spread(entering: Tensor, output: Tensor) -> Tensor:
    """Mean over channels of by how much a normalization enlarges their variance."""
    dims = [dim for dim in range(entering.dim()) if dim != 1]
    before, after = (x.detach().var(dims, correction=0) for x in (entering, output))
    return torch.where(before > 0, after / before, 0.0).mean().double()
