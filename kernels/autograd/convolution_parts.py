"""Convolutions in FP32 of values that are kept in fewer bits, part by part of the batch: for processors.

The FP32 copies of a part stay in the caches. Those of a whole batch need more memory than an FP32 model, and pages that
the system clears before each use, which takes longer than a convolution with small kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_PART = 2**19
"""Elements of the input and the result of a part at least, for each thread."""


def parts_of(batch: int, elements: int, weight: Tensor) -> list[slice]:
    """Equal parts, the last perhaps smaller, of a batch whose inputs and results have so many elements.

    A part has at least as many as the weight, which each convolution copies into a layout of its own, and two samples:
    the layout of one is ambiguous. A graph that is compiled takes the batch as a whole: it may be for batches of any
    size.
    """
    if torch.compiler.is_compiling():
        return [slice(None)]
    count = min(batch // 2, elements // max(_PART * torch.get_num_threads(), weight.numel()))
    if count < 2:
        return [slice(None)]
    size = -(-batch // count)
    return [slice(start, start + size) for start in range(0, batch, size)]


def forward_parts(x: Tensor, weight: Tensor, geometry: tuple[Any, ...]) -> list[slice]:
    """Parts of the input (N, C, spatial) of a convolution; geometry as ``torch.convolution`` takes it."""
    if x.numel() == 0 or weight.numel() == 0:
        return [slice(None)]
    stride, _, _, transposed, _, groups = geometry
    pixels, steps = x.numel() // x.shape[1], math.prod(stride)
    results = pixels * steps * weight.shape[1] * groups if transposed else pixels // steps * weight.shape[0]
    return parts_of(x.shape[0], x.numel() + results, weight)


def convolve_parts(compute: Callable[[slice], Tensor], batch: int, parts: list[slice], dtype: torch.dtype) -> Tensor:
    """What ``compute`` returns for the parts of a batch, joined and in ``dtype``."""
    if len(parts) == 1:
        return compute(parts[0]).to(dtype)
    result = None
    for part in parts:
        result = _store(compute(part), result, batch, part, dtype)
    assert result is not None
    return result


def gradients(
    operands: Callable[[slice], tuple[Tensor, Tensor]],
    weight: Tensor,
    bias_sizes: list[int] | None,
    geometry: tuple[Any, ...],
    wanted: list[bool],
    batch: int,
    parts: list[slice],
    dtype: torch.dtype,
) -> tuple[Tensor | None, ...]:
    """Gradients of the input, in ``dtype``, the weight and the bias of a convolution: those ``wanted``.

    ``operands`` returns the gradient of the result and the input for a part of the batch, in the type of the weight.
    """
    backward = torch.ops.aten.convolution_backward
    grad_x: Tensor | None = None
    sums: list[Tensor | None] = []
    for part in parts:
        own, *others = backward(*operands(part), weight, bias_sizes, *geometry, wanted)
        if own is not None:
            grad_x = own.to(dtype) if len(parts) == 1 else _store(own, grad_x, batch, part, dtype)
        for total, each in zip(sums, others, strict=False):
            if total is not None:
                total.add_(each)
        sums = sums or others
    return (grad_x, *sums)


def _store(own: Tensor, whole: Tensor | None, batch: int, part: slice, dtype: torch.dtype) -> Tensor:
    """A tensor of the whole batch with ``own`` in one part, in the layout of the first that is stored."""
    if whole is None:
        whole = torch.empty_strided((batch, *own.shape[1:]), own.stride(), dtype=dtype)
    whole[part] = own
    return whole
