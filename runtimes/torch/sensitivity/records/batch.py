"""The end of a batch: what the records of all operators still owe, many at once, and one transfer to the host."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from qsync_opt.numerics.rounding import Rounding
from qsync_opt.runtimes.torch.sensitivity.errors import paired_errors
from qsync_opt.runtimes.torch.sensitivity.nearest_error import NEAREST_FORMATS
from qsync_opt.runtimes.torch.sensitivity.records.convolution_batch import finish_convolutions, settled
from qsync_opt.runtimes.torch.sensitivity.records.operator import OperatorRecord
from qsync_opt.runtimes.torch.sensitivity.records.summary import (
    CAST_KINDS,
    alignments,
    checked,
    measured_errors,
    tensor_statistics,
)
from qsync_opt.runtimes.torch.sensitivity.samples import SizedRuns, weights_by_size
from qsync_opt.sensitivity.statistics import OperatorKind, OperatorStatistics

_WAITING = 1 << 22
"""Errors at most that are held together at the end of a batch."""
WHILE_ACTIVATIONS_ARE_KEPT = 1 << 20
"""The same between forward and backward pass."""


def _cast_errors(parts: Tensor, scales: Sequence[float]) -> Tensor:
    """Errors (2, kinds, rows, elements) of rows that are multiplied by a scale, a power of two, while rounded."""
    if all(scale == 1.0 for scale in scales):
        return paired_errors(parts, CAST_KINDS, {})
    scale = torch.tensor(scales, dtype=parts.dtype).to(parts.device).unsqueeze(1)
    return paired_errors(parts * scale, CAST_KINDS, {}).div_(scale.square())


def _weighted_mean(values: Tensor, weights: Tensor | None) -> Tensor:
    """Means over the last dimension, in which every run of elements has a weight, (tensors, runs)."""
    if weights is None:
        return values.mean(-1)
    by_run = values.reshape(*values.shape[:-1], weights.shape[1], -1).mean(-1)
    return (by_run * weights).sum(-1)


def cast_waiting(records: Iterable[OperatorRecord], together: int = _WAITING) -> None:
    """Find the cast errors of all elements that wait, many tensors at once, so many errors together."""
    alike: dict[Hashable, list[tuple[OperatorRecord, str, Tensor | SizedRuns]]] = {}
    for record in records:
        for tensor, part in record.waiting:
            x, by_size = (part.runs, part.asked) if isinstance(part, SizedRuns) else (part, 0)
            alike.setdefault((x.device, x.shape, by_size), []).append((record, tensor, part))
        record.waiting.clear()
    for every in alike.values():
        size = _elements(every[0][2]).numel()
        count = max(1, together // (size * len(CAST_KINDS)))
        for start in range(0, len(every), count):
            some = every[start : start + count]
            parts = torch.stack([_elements(part) for _, _, part in some])
            squares = parts.square()
            weights = _run_weights([part for *_, part in some if isinstance(part, SizedRuns)], squares)
            parts, squares = parts.flatten(1), squares.flatten(1)
            scales = [record.loss_scale if tensor.endswith("gradient") else 1.0 for record, tensor, _ in some]
            mean_squares = _weighted_mean(squares, weights).unsqueeze(0)
            means = _weighted_mean(_cast_errors(parts, scales), weights).flatten(0, 1)
            for (record, tensor, _), values in zip(some, torch.cat([means, mean_squares]).T.contiguous(), strict=True):
                names = [f"{tensor}.{kind}.{rounding}" for rounding in Rounding for kind in CAST_KINDS]
                record.found.append(((*names, f"{tensor}.sample.square"), values))


def _elements(part: Tensor | SizedRuns) -> Tensor:
    return part.runs if isinstance(part, SizedRuns) else part


def _run_weights(every: Sequence[SizedRuns], squares: Tensor) -> Tensor | None:
    """What each run counts in a mean, (tensors, runs), from squares (tensors, runs, length)."""
    if not every:
        return None
    totals = torch.stack([runs.total for runs in every]).unsqueeze(1)
    numbers = torch.tensor([[float(runs.number)] for runs in every], dtype=totals.dtype)
    numbers = numbers.to(totals.device, non_blocking=True)
    return weights_by_size(squares.sum(2), totals, numbers, every[0].asked).div_(numbers)


def finished(record: OperatorRecord, values: dict[str, float], batch: int) -> OperatorStatistics:
    """Statistics of one call; gradients that never came are zero.

    Args:
        record: Complete.
        values: What was found, by name.
        batch: Number of the batch, for error texts.

    Raises:
        ModelError: A value is not finite.
    """
    for name, size in record.needs_gradient.items():
        record.elements.setdefault(name, size)
    record.elements.setdefault("output_gradient", record.elements["output"])
    if record.convolution is not None:
        values = settled(record.convolution, values)
    for key in [key for key in values if key.endswith(".norm")]:
        values[f"{key.removesuffix('norm')}square_sum"] = values.pop(key) ** 2
    for key in NEAREST_FORMATS:
        if f"nearest.{key}" in values:  # 0 where the format cannot hold the operands
            error = values[f"nearest.{key}"] * record.factor
            values[f"nearest.{key}"] = error**2 if math.isfinite(error) else 0.0
    values = checked(record.name, values, batch)
    tensors: dict[str, Any] = {name: tensor_statistics(name, size, values) for name, size in record.elements.items()}
    aligned: dict[str, float] = {}
    if record.kind is not OperatorKind.ATTENTION:
        aligned = alignments(record.products[0], record.factor, tensors, values)
    return OperatorStatistics(
        name=record.name,
        op_type=record.op_type,
        kind=record.kind,
        calls=1,
        products=record.products,
        first_parameter=record.parameters[0],
        second_parameter=record.parameters[1],
        alignment=aligned,
        measured=measured_errors(values),
        nearest={name: values[f"nearest.{name}"] for name in NEAREST_FORMATS if f"nearest.{name}" in values},
        loss_scale=record.loss_scale,
        **tensors,
    )


def finish_batch(records: Sequence[OperatorRecord], batch: int) -> list[OperatorStatistics]:
    """Statistics of every call; one transfer to the host per device and type.

    Args:
        records: Complete.
        batch: Number of the batch, for error texts.

    Raises:
        ModelError: A value is not finite.
    """
    cast_waiting(records)
    finish_convolutions([record.convolution for record in records if record.convolution is not None])
    together: dict[tuple[torch.device, torch.dtype], list[tuple[int, tuple[str, ...], Tensor]]] = {}
    for i, record in enumerate(records):
        for names, values in record.found:
            together.setdefault((values.device, values.dtype), []).append((i, names, values))
        record.found.clear()
    found: list[dict[str, float]] = [{} for _ in records]
    for every in together.values():
        host = iter(torch.cat([values for _, _, values in every]).tolist())
        for i, names, _ in every:
            found[i].update(zip(names, host, strict=False))
    return [finished(record, values, batch) for record, values in zip(records, found, strict=True)]
