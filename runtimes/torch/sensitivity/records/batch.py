"""From the records of a batch to statistics: what is computed for many at once, and numbers on the host."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from qsync_opt.errors import ModelError
from qsync_opt.numerics import GRADIENT_KINDS, Granularity, Rounding, closed_form_variance
from qsync_opt.runtimes.torch.sensitivity.errors import NEAREST_FORMATS, rounding_errors
from qsync_opt.runtimes.torch.sensitivity.records.convolution import ConvolutionRecord, finish_convolutions
from qsync_opt.runtimes.torch.sensitivity.records.operator import (
    CAST_KINDS,
    OUTPUT_GRADIENT_KINDS,
    SCALED_KINDS,
    OperatorRecord,
)
from qsync_opt.runtimes.torch.sensitivity.reductions import on_host
from qsync_opt.runtimes.torch.sensitivity.samples import SizedRuns, weights_by_size
from qsync_opt.sensitivity import (
    GRADIENTS,
    SHAPES,
    MeasuredErrors,
    OperatorKind,
    OperatorStatistics,
    RoundingFactor,
    TensorStatistics,
)

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


def _check_finite(operator: str, values: dict[str, float], batch: int) -> dict[str, float]:
    if all(map(math.isfinite, values.values())):
        return values
    for key, value in sorted(values.items(), key=lambda item: "/" in item[0]):  # tensors before sums over two
        if value == float("inf") and key.startswith("measured."):
            continue  # the format cannot hold the operands
        if not -float("inf") < value < float("inf"):
            tensor = key.partition(".")[0].replace("_", " ")
            raise ModelError(
                f"operator {operator!r}: {tensor} is not finite in batch {batch}; "
                "statistics need finite values in full precision; check the batch, the loss and the weights"
            )
    return values


def _alignments(
    record: OperatorRecord, tensors: dict[str, TensorStatistics], values: dict[str, float]
) -> dict[str, float]:
    """Exact sums of noise times signal over those of the mean-field formulas, per path and shape."""
    squares = {name: tensors[name].mean_square for name in ("first", "second", "output_gradient")}
    square_factor, volume = record.factor**2, float(record.products[0].volume)

    def ratio(key: str, *means: float) -> float:
        scale = math.prod(means, start=volume)
        return square_factor * values.get(key, 0.0) / scale if scale else 0.0

    ratios = {}
    for shape in SHAPES:
        noise = squares
        first = second = "xw/floating"
        if shape != "floating":
            kind, first, second = f"INT8/{shape}", f"xw/first/{shape}", f"xw/second/{shape}"
            noise = {
                name: _scaled(
                    values.get(f"{name}.{kind}.{Rounding.STOCHASTIC}", 0.0), name, kind, values, squares[name]
                )
                for name in ("first", "second")
            }
        ratios[f"first>output/{shape}"] = ratio(first, noise["first"], squares["second"])
        ratios[f"second>output/{shape}"] = ratio(second, noise["second"], squares["first"])
        ratios[f"first>second_gradient/{shape}"] = ratio(f"xg/{shape}", noise["first"], squares["output_gradient"])
        ratios[f"second>first_gradient/{shape}"] = ratio(f"gw/{shape}", noise["second"], squares["output_gradient"])
    # Both ends of these paths are squares: the same sum, whichever of the two is noisy.
    ratios["gradient>second_gradient/floating"] = ratios["first>second_gradient/floating"]
    ratios["gradient>first_gradient/floating"] = ratios["second>first_gradient/floating"]
    if "xg/gradient" in values:
        error = values[f"output_gradient.{GRADIENT_KINDS['INT8']}.{Rounding.STOCHASTIC}"]
        ratios["gradient>second_gradient/tensor"] = ratio("xg/gradient", squares["first"], error)
        ratios["gradient>first_gradient/tensor"] = ratio("gw/gradient", squares["second"], error)
    return ratios


@functools.cache
def _keys(tensor: str, *, scaled: bool) -> tuple[tuple[str, tuple[str, ...]], ...]:
    kinds = dict.fromkeys((*(SCALED_KINDS if scaled else CAST_KINDS), *OUTPUT_GRADIENT_KINDS))
    return tuple((kind, tuple(f"{tensor}.{kind}.{rounding}" for rounding in Rounding)) for kind in kinds)


def _scaled(error: float, tensor: str, kind: str, values: dict[str, float], mean_square: float) -> float:
    """Mean squared error of a whole tensor from that of a part.

    Errors of floating formats grow with the square of the element, those of INT8 with a scale per row with the square
    of the row's largest magnitude.
    """
    whole = part = 1.0
    if not kind.startswith("INT8"):
        whole, part = mean_square, values.get(f"{tensor}.sample.square", mean_square)
    elif kind == f"INT8/{Granularity.ROW}":
        whole = values[f"{tensor}.amax.{Granularity.ROW}"]
        part = values.get(f"{tensor}.sample.row", whole)
    return error * whole / part if part else error


def _tensor_statistics(name: str, elements: int, values: dict[str, float]) -> TensorStatistics:
    """Statistics of one tensor from recorded numbers by name."""
    square_sum = values.get(f"{name}.square_sum", 0.0)
    mean_square = square_sum / elements
    amaxes = {str(g): values[f"{name}.amax.{g}"] for g in Granularity if f"{name}.amax.{g}" in values}
    factors = {}
    for kind, keys in _keys(name, scaled=bool(amaxes)):
        if keys[-1] not in values:
            continue
        ratios = {}
        for rounding, key in zip(Rounding, keys, strict=True):
            closed = closed_form_variance(kind, rounding, mean_square=mean_square, mean_square_amax=amaxes)
            error = _scaled(values[key], name, kind, values, mean_square)
            ratios[str(rounding)] = error / closed if closed else 0.0
        factors[kind] = RoundingFactor(**ratios)
    return TensorStatistics(
        elements=elements,
        amax=values.get(f"{name}.greatest", 0.0),
        square_sum=square_sum,
        mean_square_amax=amaxes,
        rounding=factors,
    )


def _measured_errors(values: dict[str, float]) -> dict[str, MeasuredErrors]:
    """Measured errors by format, without formats that cannot hold the operands."""
    measured = [key for key, value in values.items() if key.startswith("measured.") and value < float("inf")]
    formats = dict.fromkeys(key.split(".")[1] for key in measured)
    return {
        name: MeasuredErrors(**{target: values[f"measured.{name}.{target}"] for target in ("output", *GRADIENTS)})
        for name in formats
    }


def _finish_record(record: OperatorRecord, values: dict[str, float], batch: int) -> OperatorStatistics:
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
    values = _check_finite(record.name, values, batch)
    tensors: dict[str, Any] = {name: _tensor_statistics(name, size, values) for name, size in record.elements.items()}
    aligned: dict[str, float] = {}
    if record.kind is not OperatorKind.ATTENTION:
        aligned = _alignments(record, tensors, values)
    return OperatorStatistics(
        name=record.name,
        op_type=record.op_type,
        kind=record.kind,
        calls=1,
        products=record.products,
        first_parameter=record.parameters[0],
        second_parameter=record.parameters[1],
        alignment=aligned,
        measured=_measured_errors(values),
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
        statistics.append(_finish_record(record, numbers, batch))
    return statistics
