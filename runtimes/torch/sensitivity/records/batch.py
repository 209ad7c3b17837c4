"""The remaining computations of all records of a batch, many at once, and their transfer to the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from qsync_opt.numerics import GRADIENT_KINDS, Granularity, Rounding
from qsync_opt.runtimes.torch.sensitivity.errors import (
    NEAREST_FORMATS,
    ErrorRequest,
    fixed_point_errors,
    rounding_errors,
    run_batched,
)
from qsync_opt.runtimes.torch.sensitivity.records.convolution import (
    ConvolutionRecord,
    FirstSample,
    GradientSample,
    WeightedSample,
    image_shares,
)
from qsync_opt.runtimes.torch.sensitivity.records.operator import OperatorRecord
from qsync_opt.runtimes.torch.sensitivity.records.summary import (
    CAST_KINDS,
    INTEGER_KINDS,
    RESULT_KINDS,
    SCALED_KINDS,
    alignments,
    check_finite,
    measured_errors,
    tensor_statistics,
)
from qsync_opt.runtimes.torch.sensitivity.reductions import by_place, on_host, stacked, summed, totals
from qsync_opt.runtimes.torch.sensitivity.samples import SizedPositions, SizedRuns, weights_by_size
from qsync_opt.sensitivity import OperatorKind, OperatorStatistics

_INTEGER = slice(SCALED_KINDS.index(INTEGER_KINDS[0]), SCALED_KINDS.index(INTEGER_KINDS[-1]) + 1)
_SHAPES = tuple(Granularity(kind.partition("/")[2]) for kind in INTEGER_KINDS)
_EIGHT_BITS = RESULT_KINDS.index(GRADIENT_KINDS["INT8"])
_TOGETHER = 10 << 20
"""Errors computed at a time, at most, unless those of one call are more."""

_Sample = TypeVar("_Sample")
_Numbers = list[tuple[tuple[str, ...], Tensor]]
"""Names, and numbers (names, M) of M calls."""


def finish_convolutions(calls: Sequence[ConvolutionRecord]) -> None:
    """Compute all numbers that depend on rounding, after the backward pass."""
    firsts = [(call, call.release_first()) for call in calls]
    kinds = len(SCALED_KINDS)
    _run(firsts, _seconds, _second_key, lambda call, _: call.form.sample_second(call.limit)[0].numel() * kinds)
    _run(firsts, _firsts, _first_key, lambda _, first: first.part.numel() * kinds)
    samples = [(call, (first, call.weighted)) for call, first in firsts if call.weighted is not None]
    for group in _alike(samples, _weighted_key, lambda _, sample: sample[1].part.numel() * len(_SHAPES)):
        _add_numbers(group, _weighted(group[0][0], [sample for _, sample in group]))
    gradients = [(call, call.gradient) for call in calls if call.gradient is not None]
    _run(gradients, _gradients, _gradient_key, lambda _, gradient: gradient.part.numel() * len(RESULT_KINDS))
    _by_row(calls)
    for call in calls:
        call.clear()


_Steps = Generator[ErrorRequest, Tensor, _Numbers]


def _run(
    samples: Sequence[tuple[ConvolutionRecord, _Sample]],
    steps: Callable[[Sequence[ConvolutionRecord], Sequence[_Sample]], _Steps],
    key: Callable[[ConvolutionRecord, _Sample], Hashable],
    size: Callable[[ConvolutionRecord, _Sample], int],
) -> None:
    """Run steps for groups of calls; several groups compute their errors together."""
    groups = _alike(samples, key, size)
    computations = ((group, steps([call for call, _ in group], [sample for _, sample in group])) for group in groups)
    for group, numbers in run_batched(computations, _TOGETHER):
        _add_numbers(group, numbers)


def _alike(
    every: Sequence[tuple[ConvolutionRecord, _Sample]],
    key: Callable[[ConvolutionRecord, _Sample], Hashable],
    size: Callable[[ConvolutionRecord, _Sample], int],
) -> Iterator[list[tuple[ConvolutionRecord, _Sample]]]:
    """Groups of calls with one key, and with sizes that sum up to the limit at most."""
    groups: dict[Hashable, list[tuple[ConvolutionRecord, _Sample]]] = {}
    for call, sample in every:
        form = call.form
        common = form.first.device, form.second.shape[2:].numel(), form.sizes.products, form.geometry, call.loss_scale
        groups.setdefault((*map(str, common), key(call, sample)), []).append((call, sample))
    for group in groups.values():
        count = max(1, _TOGETHER // max(1, size(*group[0])))
        yield from (group[start : start + count] for start in range(0, len(group), count))


def _add_numbers(calls: Sequence[tuple[ConvolutionRecord, _Sample]], numbers: _Numbers) -> None:
    """Add the numbers to the calls."""
    names = tuple(name for some, _ in numbers for name in some)
    table = torch.cat([values for _, values in numbers]).T.contiguous()
    for (call, _), values in zip(calls, table, strict=True):
        call.numbers.append((names, values))


def _means(tensor: str, kinds: Sequence[str], values: Tensor) -> tuple[tuple[str, ...], Tensor]:
    """Names and numbers of mean errors (2, K, M)."""
    return tuple(f"{tensor}.{kind}.{rounding}" for rounding in Rounding for kind in kinds), values.flatten(0, 1)


def _norms(x: Tensor) -> Tensor:
    """Norms of M tensors, (1, M)."""
    norms: Tensor = torch.linalg.vector_norm(x.flatten(1), dim=1)
    return norms.unsqueeze(0)


# -- operands --------------------------------------------------------------------------------------------------------


def _second_key(call: ConvolutionRecord, first: FirstSample) -> Hashable:
    return call.form.second.shape, first.contracted.shape, call.columns is None, call.limit


def _seconds(calls: Sequence[ConvolutionRecord], firsts: Sequence[FirstSample]) -> _Steps:
    form = calls[0].form
    weights = stacked([call.form.second for call in calls])
    squares = weights.square()
    contracted_w2, columns_w2 = form.by_input_channel(squares), form.by_output_channel(squares)
    del squares
    for i, call in enumerate(calls):
        call.contracted_second, call.by_column = contracted_w2[i], columns_w2[i]
    _, rows = form.sample_second(calls[0].limit)
    part = weights[:, :, rows]
    amaxes = {
        g: torch.linalg.vector_norm(weights, float("inf"), [d + 1 for d in form.slice_dims("second", g)], keepdim=True)
        for g in (Granularity.CHANNEL, Granularity.ROW)
    }
    row_amax = amaxes[Granularity.ROW]
    amaxes[Granularity.TENSOR] = row_amax.amax(tuple(range(1, row_amax.dim())), keepdim=True)
    numbers: _Numbers = [
        (("second.greatest",), amaxes[Granularity.TENSOR].view(1, -1)),
        (("second.square_sum",), summed(contracted_w2.flatten(1), 1).unsqueeze(0)),
        *((((f"~second.{g}",), _norms(amaxes[g]))) for g in (Granularity.CHANNEL, Granularity.ROW)),
    ]
    if part.numel() < weights.numel():
        amaxes[Granularity.ROW] = row_amax[:, :, rows]
    errors = yield ErrorRequest(part, SCALED_KINDS, amaxes)
    numbers.append(_means("second", SCALED_KINDS, errors.flatten(3).mean(3)))
    noise = errors[0, _INTEGER]
    x2 = stacked([first.contracted for first in firsts])
    some_x2 = x2[:, :, rows]
    numbers.append((("xw/floating",), summed((x2 * contracted_w2).flatten(1), 1).unsqueeze(0)))
    sums = summed((form.by_input_channel(noise) * some_x2).flatten(2), 2)
    numbers.append((tuple(f"xw/second/{shape}" for shape in _SHAPES), sums))
    g2 = [call.columns for call in calls if call.columns is not None]
    if g2:
        columns = torch.cat([columns_w2.unsqueeze(0), form.by_output_channel(noise)])
        names = ("gw/floating", *(f"gw/{shape}" for shape in _SHAPES))
        numbers.append((names, summed((columns * stacked(g2)).flatten(2), 2)))
    if part.numel() < weights.numel():
        x2, sizes = x2.flatten(3).sum(3).flatten(1), row_amax.square().flatten(1)
        terms = torch.stack([x2, sizes, x2 * sizes])
        numbers += [
            (("~second.part",), _norms(part)),
            (("~x2", "~row", "~x2.row"), summed(terms, 2)),
            (("~some.x2", "~some.row", "~some.x2.row"), summed(terms[:, :, rows], 2)),
        ]
    return numbers


def _first_key(call: ConvolutionRecord, _: FirstSample) -> Hashable:
    return call.form.first.shape, call.form.second.shape[2:], call.limit


def _firsts(calls: Sequence[ConvolutionRecord], firsts: Sequence[FirstSample]) -> _Steps:
    parts, rows, channels = (torch.stack(x) for x in zip(*((f.part, f.rows, f.channels) for f in firsts), strict=True))
    positions = firsts[0].positions
    units, largest = rows[:, positions.images], rows.amax(1)
    amaxes = {
        Granularity.TENSOR: largest.view(-1, 1, 1),
        Granularity.CHANNEL: channels.unsqueeze(1),
        Granularity.ROW: units.unsqueeze(2),
    }
    errors = yield ErrorRequest(parts, SCALED_KINDS, amaxes)
    spreads = torch.cat([_spread(call) for call in calls])
    noise = errors[0, _INTEGER]
    numbers: _Numbers = [
        (("first.greatest",), largest.unsqueeze(0)),
        *(((f"~first.{name}",), _norms(x)) for name, x in (("row", rows), ("channel", channels), ("part", parts))),
        (("~first.units",), _norms(units)),
        _means("first", SCALED_KINDS, errors.flatten(3).mean(3)),
    ]
    if spreads.shape[2:].numel() == 1:  # one place stands for all
        sums = summed(noise.sum(2) * spreads.flatten(1), 2)
    else:
        weights = spreads.flatten(2)[:, :, positions.places].mT
        sums = summed((noise * weights).flatten(2), 2)
        weights = weights.sum(2)
        numbers += [
            (("~spread",), summed(spreads.flatten(1), 1).unsqueeze(0)),
            (("~some.spread",), summed(weights, 1).unsqueeze(0)),
            (("~some.spread.row",), summed(weights * units.square(), 1).unsqueeze(0)),
        ]
    return [*numbers, (tuple(f"xw/first/{shape}" for shape in _SHAPES), sums)]


def _spread(call: ConvolutionRecord) -> Tensor:
    assert call.contracted_second is not None
    return call.form.contraction_by_position(call.contracted_second)


# -- gradients -------------------------------------------------------------------------------------------------------


def _weights(sizes: Tensor, sampled: Sequence[SizedPositions]) -> Tensor:
    """Weights of the positions in sums, from the sizes that they were chosen by, (M, P)."""
    totals = torch.stack([s.total for s in sampled]).unsqueeze(1)
    return weights_by_size(sizes, totals, sampled[0].number, sampled[0].requested)


def _weighted_key(call: ConvolutionRecord, samples: tuple[FirstSample, WeightedSample]) -> Hashable:
    return call.form.first.shape, samples[1].sampled.requested


def _weighted(call: ConvolutionRecord, every: Sequence[tuple[FirstSample, WeightedSample]]) -> _Numbers:
    """T(noise of the first operand, 1, g**2) for fixed-point rounding."""
    rows, channels = (torch.stack(x) for x in zip(*((f.rows, f.channels) for f, _ in every), strict=True))
    parts, gradient_squares, indices = (
        torch.stack(x) for x in zip(*((m.part, m.sizes.flatten(2), m.sampled.indices) for _, m in every), strict=True)
    )
    images = indices // gradient_squares.shape[3]
    by_image = gradient_squares.flatten(2).sum(2)
    sizes = _at(gradient_squares.unsqueeze(1), indices).squeeze(2)
    units = rows.gather(1, images)
    scales = {
        Granularity.TENSOR: rows.amax(1).view(-1, 1, 1),
        Granularity.CHANNEL: channels.unsqueeze(1),
        Granularity.ROW: units.unsqueeze(2),
    }
    noise = fixed_point_errors(parts, [scales[shape] for shape in _SHAPES])
    chosen_by = sizes.sum(2)
    weights = _weights(
        torch.addcmul(chosen_by, chosen_by, image_shares(rows).gather(1, images)), [m.sampled for _, m in every]
    )
    weighted = sizes * weights.unsqueeze(2)
    sums = summed((_by_group(noise, call) * weighted).flatten(2), 2)
    weighted = weighted.sum(2)
    terms = [by_image, by_image * rows.square()], [weighted, weighted * units.square()]
    return [
        (tuple(f"xg/{shape}" for shape in _SHAPES), sums),
        (("~g2", "~g2.row"), summed(torch.stack(terms[0]), 2)),
        (("~some.g2", "~some.g2.row"), summed(torch.stack(terms[1]), 2)),
    ]


def _at(x: Tensor, indices: Tensor) -> Tensor:
    """The elements of (M, R, B, G, ...) at positions (M, P), counted through all images: (M, P, R, G)."""
    by_place = x.movedim(2, 3).flatten(3)
    index = indices.view(indices.shape[0], 1, 1, -1).expand(-1, *by_place.shape[1:3], -1)
    return by_place.gather(3, index).movedim(3, 1)


def _by_group(x: Tensor, call: ConvolutionRecord) -> Tensor:
    """Sums over the channels of each group: (..., C) to (..., G)."""
    return x.reshape(*x.shape[:-1], call.form.sizes.products, -1).sum(-1)


def _gradient_key(call: ConvolutionRecord, gradient: GradientSample) -> Hashable:
    windows = None if call.form.pointwise else call.form.first.shape
    return windows, gradient.part.shape, gradient.sampled.number, gradient.sampled.requested


def _gradients(calls: Sequence[ConvolutionRecord], gradients: Sequence[GradientSample]) -> _Steps:
    form, scale = calls[0].form, calls[0].loss_scale
    parts, amax, every, shares, indices = (
        torch.stack(x)
        for x in zip(
            *((g.part, *g.amax, g.rows.flatten(3), g.shares, g.sampled.indices) for g in gradients), strict=True
        )
    )
    rows, places = _at(every, indices), indices % every.shape[4]
    by_row = rows[:, :, 3]
    largest = amax.view(-1, 1, 1)
    if scale != 1.0:
        parts, largest = parts * scale, largest * scale
    errors = yield ErrorRequest(parts, RESULT_KINDS, {Granularity.TENSOR: largest})
    chosen_by = (rows[:, :, :3] * shares.view(-1, 1, 3, 1)).flatten(2).sum(2)
    weights = _weights(chosen_by, [g.sampled for g in gradients])
    if scale != 1.0:
        errors.div_(scale**2)
    columns = torch.cat([form.columns_by_position(c.by_column) for c in calls if c.by_column is not None])
    noise = errors[0, _EIGHT_BITS] * weights.unsqueeze(2)  # (M, P, C)
    if form.pointwise:
        by_column = summed(noise.sum(1) * columns.flatten(1), 1)
    else:
        at = columns.flatten(2).gather(2, places.unsqueeze(1).expand(-1, columns.shape[1], -1))
        by_column = summed((noise.mT * at).flatten(1), 1)
    return [
        (("output_gradient.greatest",), amax.unsqueeze(0)),
        _means("output_gradient", RESULT_KINDS, summed(errors.sum(4) * weights, 3)),
        (("output_gradient.sample.square",), summed(rows[:, :, 0].sum(2) * weights, 1).unsqueeze(0)),
        (("xg/gradient",), summed((_by_group(noise, calls[0]) * by_row).flatten(1), 1).unsqueeze(0)),
        (("gw/gradient",), by_column.unsqueeze(0)),
    ]


def _by_row(calls: Sequence[ConvolutionRecord]) -> None:
    """T(squares of the first operand, 1, squares of the gradient)."""
    every = [(call, *call.by_row) for call in calls if call.by_row is not None]
    for some in by_place(every, lambda one: one[1]).values():
        products = torch._foreach_mul([first for _, first, _ in some], [gradient for *_, gradient in some])
        for (call, *_), value in zip(some, totals(products), strict=True):
            call.numbers.append((("xg/floating",), value.view(1)))


# -- on the host -----------------------------------------------------------------------------------------------------


def _ratio(whole: float, part: float) -> float:
    """The factor from a sum over a sample to that over all; 1 where the sample's sum is 0."""
    return whole / part if part else 1.0


def settle(call: ConvolutionRecord, values: dict[str, float]) -> dict[str, float]:
    """Numbers of a call by name; those that start with ``~`` are factors of others."""
    numbers = {name: value for name, value in values.items() if not name.startswith("~")}
    for name, sizes in (("first", call.form.first.shape), ("second", call.form.second.shape)):
        numbers[f"{name}.amax.{Granularity.TENSOR}"] = values[f"{name}.greatest"] ** 2
        for granularity in (Granularity.CHANNEL, Granularity.ROW):
            shared = call.form.slice_dims(name, granularity)
            slices = math.prod(size for dim, size in enumerate(sizes) if dim not in shared)
            numbers[f"{name}.amax.{granularity}"] = values[f"~{name}.{granularity}"] ** 2 / slices
    _settle_first(call, values, numbers)
    _settle_second(call, values, numbers)
    for shape in _SHAPES:
        if "~g2" in values:
            key = ".row" if shape is Granularity.ROW else ""
            numbers[f"xg/{shape}"] *= _ratio(values[f"~g2{key}"], values[f"~some.g2{key}"])
    if call.gradient_elements:
        elements = call.gradient_elements
        numbers[f"output_gradient.amax.{Granularity.TENSOR}"] = values["output_gradient.greatest"] ** 2
        numbers["output_gradient.sample.square"] /= elements
        for rounding in Rounding:
            for kind in RESULT_KINDS:
                numbers[f"output_gradient.{kind}.{rounding}"] /= elements
    return numbers


def _settle_first(call: ConvolutionRecord, values: dict[str, float], numbers: dict[str, float]) -> None:
    shape = call.form.first.shape
    positions, count = shape[0] * shape[2:].numel(), call.positions
    mean_units = values["~first.units"] ** 2 / count
    if count < positions:
        numbers["first.sample.square"] = values["~first.part"] ** 2 / (count * shape[1])
        numbers["first.sample.row"] = mean_units
    row = numbers[f"first.amax.{Granularity.ROW}"]
    if "~spread" in values:
        whole = values["~spread"] * shape[0]
        even, by_size = _ratio(whole, values["~some.spread"]), _ratio(whole * row, values["~some.spread.row"])
    else:
        even, by_size = positions / count, _ratio(positions * row, count * mean_units)
    for granularity in _SHAPES:
        numbers[f"xw/first/{granularity}"] *= by_size if granularity is Granularity.ROW else even


def _settle_second(call: ConvolutionRecord, values: dict[str, float], numbers: dict[str, float]) -> None:
    """Scale sums over sampled rows; with a scale per row, a row's error grows with its largest magnitude."""
    if "~second.part" not in values:
        return
    part, _ = call.form.sample_second(call.limit)
    whole, some = call.form.second.shape[1], part.shape[1]
    numbers["second.sample.square"] = values["~second.part"] ** 2 / part.numel()
    numbers["second.sample.row"] = values["~some.row"] / some
    for shape in _SHAPES:
        key, column = "", whole / some
        if shape is Granularity.ROW:
            key, column = ".row", _ratio(values["~row"], values["~some.row"])
        numbers[f"xw/second/{shape}"] *= _ratio(values[f"~x2{key}"], values[f"~some.x2{key}"])
        if f"gw/{shape}" in numbers:
            numbers[f"gw/{shape}"] *= column


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
    if record.convolution is not None:
        values = settle(record.convolution, values)
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
    finish_convolutions([record.convolution for record in records if record.convolution is not None])
    host = iter(on_host([values for record in records for _, values in record.numbers]))
    statistics = []
    for record in records:
        numbers = {name: value for names, _ in record.numbers for name, value in zip(names, next(host), strict=True)}
        record.numbers.clear()
        statistics.append(finish_record(record, numbers, batch))
    return statistics
