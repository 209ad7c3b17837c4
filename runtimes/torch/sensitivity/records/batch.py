"""The remaining computations of all records of a batch, many at once, and their transfer to the host."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from qsync_opt.numerics import Rounding
from qsync_opt.runtimes.torch.sensitivity.errors import NEAREST_FORMATS, rounding_errors
from qsync_opt.runtimes.torch.sensitivity.records.convolution import ConvolutionRecord, finish_convolutions
from qsync_opt.runtimes.torch.sensitivity.records.operator import OperatorRecord
from qsync_opt.runtimes.torch.sensitivity.records.summary import (
    CAST_KINDS,
    alignments,
    check_finite,
    measured_errors,
    tensor_statistics,
)
from qsync_opt.runtimes.torch.sensitivity.reductions import on_host
from qsync_opt.runtimes.torch.sensitivity.samples import SizedRuns, weights_by_size
from qsync_opt.sensitivity import OperatorKind, OperatorStatistics

_CAST_TOGETHER = 1 << 22
"""Cast errors computed at a time, at most, at the end of a batch."""
CAST_BEFORE_BACKWARD = 1 << 20
"""The same between forward and backward pass, when activations take memory."""


def _cast_errors(parts: Tensor, scales: Sequence[float]) -> Tensor:
    """Errors (2, kinds, rows, elements) of rows that are multiplied by a power of two while rounded."""
    if all(scale == 1.0 for scale in scales):
        return rounding_errors(parts, CAST_KINDS, {})
    scale = torch.tensor(scales, dtype=parts.dtype).to(parts.device).unsqueeze(1)
    return rounding_errors(parts * scale, CAST_KINDS, {}).div_(scale.square())


def _weighted_mean(values: Tensor, weights: Tensor | None) -> Tensor:
    """Means over the last dimension, with a weight for every run of elements, (tensors, runs)."""
    if weights is None:
        return values.mean(-1)
    by_run = values.reshape(*values.shape[:-1], weights.shape[1], -1).mean(-1)
    return (by_run * weights).sum(-1)


def cast_pending(records: Iterable[OperatorRecord], together: int = _CAST_TOGETHER) -> None:
    """Compute the cast errors of all samples of the records, at most ``together`` errors at a time."""
    alike: dict[Hashable, list[tuple[OperatorRecord, str, Tensor | SizedRuns]]] = {}
    for record in records:
        for tensor, part in record.pending:
            x, by_size = (part.runs, part.requested) if isinstance(part, SizedRuns) else (part, 0)
            alike.setdefault((x.device, x.shape, by_size), []).append((record, tensor, part))
        record.pending.clear()
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
                record.numbers.append(((*names, f"{tensor}.sample.square"), values))


def _elements(part: Tensor | SizedRuns) -> Tensor:
    return part.runs if isinstance(part, SizedRuns) else part


def _run_weights(every: Sequence[SizedRuns], squares: Tensor) -> Tensor | None:
    """Weights of the runs in a mean, (tensors, runs), from squares (tensors, runs, length)."""
    if not every:
        return None
    totals = torch.stack([runs.total for runs in every]).unsqueeze(1)
    numbers = torch.tensor([[float(runs.number)] for runs in every], dtype=totals.dtype)
    numbers = numbers.to(totals.device, non_blocking=True)
    return weights_by_size(squares.sum(2), totals, numbers, every[0].requested).div_(numbers)


def finish_record(record: OperatorRecord, values: dict[str, float], batch: int) -> OperatorStatistics:
    """Statistics of one call, from its numbers by name; missing gradients are zero."""
    for name, size in record.needs_gradient.items():
        record.elements.setdefault(name, size)
    record.elements.setdefault("output_gradient", record.elements["output"])
    values = record.settled(values)
    for key in [key for key in values if key.endswith(".norm")]:
        values[f"{key.removesuffix('norm')}square_sum"] = values.pop(key) ** 2
    for key in NEAREST_FORMATS:
        if f"nearest.{key}" in values:  # 0 where the format cannot hold the operands
            error = values[f"nearest.{key}"] * record.factor
            values[f"nearest.{key}"] = error**2 if math.isfinite(error) else 0.0
    values = check_finite(record.name, values, batch)
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
        records: The records of all calls, after the backward pass.
        batch: Number of the batch, for error messages.

    Raises:
        ModelError: A value is not finite.
    """
    cast_pending(records)
    finish_convolutions([record for record in records if isinstance(record, ConvolutionRecord)])
    host = iter(on_host([values for record in records for _, values in record.numbers]))
    statistics = []
    for record in records:
        numbers = {name: value for names, _ in record.numbers for name, value in zip(names, next(host), strict=True)}
        record.numbers.clear()
        statistics.append(finish_record(record, numbers, batch))
    return statistics
