"""The end of a batch: what the records of all operators still owe, many at once, and one transfer to the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from qsync_opt.rounding import Rounding
from qsync_opt.runtimes.torch.nearest_error import NEAREST_FORMATS
from qsync_opt.runtimes.torch.operator_record import OperatorRecord
from qsync_opt.runtimes.torch.operator_summary import (
    CAST_KINDS,
    alignments,
    checked,
    measured_errors,
    tensor_statistics,
)
from qsync_opt.runtimes.torch.rounding_error import stacked_errors
from qsync_opt.statistics import OperatorKind, OperatorStatistics

_WAITING = 1 << 22


def _cast_errors(parts: Tensor, scales: Sequence[float]) -> tuple[Tensor, ...]:
    """Errors of rows that are multiplied by a scale, a power of two, while they are rounded."""
    if all(scale == 1.0 for scale in scales):
        return tuple(stacked_errors(parts, CAST_KINDS, {}))
    scale = torch.tensor(scales, dtype=parts.dtype, device=parts.device).unsqueeze(1)
    return tuple(values / scale.square() for values in stacked_errors(parts * scale, CAST_KINDS, {}))


def _weighted_mean(values: Tensor, weights: Tensor | None) -> Tensor:
    """Means over the last dimension, in which every run of elements has a weight, (tensors, runs); in FP64."""
    if weights is None:
        return values.mean(-1, dtype=torch.float64)
    by_run = values.reshape(*values.shape[:-1], weights.shape[1], -1).mean(-1)
    return (by_run * weights).mean(-1, dtype=torch.float64)


def cast_waiting(records: Iterable[OperatorRecord]) -> None:
    """Find the cast errors of all elements that wait, many tensors at once."""
    alike: dict[tuple[torch.device, int, int], list[tuple[OperatorRecord, str, Tensor, Tensor | None]]] = {}
    for record in records:
        for tensor, part, weights in record.waiting:
            count = 0 if weights is None else weights.numel()
            alike.setdefault((part.device, part.numel(), count), []).append((record, tensor, part, weights))
        record.waiting.clear()
    for (_, size, _), every in alike.items():
        count = max(1, _WAITING // size)
        for start in range(0, len(every), count):
            some = every[start : start + count]
            parts = torch.stack([part for _, _, part, _ in some])
            runs = [weights for _, _, _, weights in some if weights is not None]
            counted = torch.stack(runs) if runs else None
            scales = [record.loss_scale if tensor.endswith("gradient") else 1.0 for record, tensor, _, _ in some]
            squares = _weighted_mean(parts.square(), counted)
            means = [_weighted_mean(values, counted) for values in _cast_errors(parts, scales)]
            for i, (record, tensor, _, _) in enumerate(some):
                for rounding, values in zip(Rounding, means, strict=True):
                    record.found.append((tuple(f"{tensor}.{kind}.{rounding}" for kind in CAST_KINDS), values[:, i]))
                if size < record.elements[tensor]:
                    record.put(f"{tensor}.sample.square", squares[i])


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
