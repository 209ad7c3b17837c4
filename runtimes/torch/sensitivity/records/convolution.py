"""The records of calls of convolutions until the end of their batch: samples, small vectors and a few numbers.

Rounding errors are computed at some positions of all images. Those that contribute to gradients are sampled where the
gradient is large, see `qsync_opt.runtimes.torch.sensitivity.samples`. This happens when the gradient arrives, while
autograd still keeps the operand; rounding itself waits until no activation is kept, for many calls at once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qsync_opt.numerics import GRADIENT_KINDS, Granularity, Rounding
from qsync_opt.runtimes.torch.interception import OperatorCall
from qsync_opt.runtimes.torch.sensitivity.errors import ErrorRequest, fixed_point_errors, run_batched
from qsync_opt.runtimes.torch.sensitivity.products import ConvolutionForm, product_of
from qsync_opt.runtimes.torch.sensitivity.records.operator import (
    INTEGER_KINDS,
    RESULT_KINDS,
    SCALED_KINDS,
    OperatorRecord,
)
from qsync_opt.runtimes.torch.sensitivity.reductions import by_place, stacked, summed, totals
from qsync_opt.runtimes.torch.sensitivity.samples import (
    Positions,
    SizedPositions,
    even_positions,
    positions_by_size,
    weights_by_size,
)

_WEIGHTED_PART = 1 / 4
"""Part of the sample size that is enough for a sum whose terms determine the sampling."""


class FirstSample(NamedTuple):
    """A sample of a first operand (B, C, ...) at P evenly spaced positions, and sums over all of it.

    Attributes:
        part: The sample, (P, C).
        positions: The positions.
        rows: Largest magnitudes of images, (B,).
        channels: Largest magnitudes of channels, (C,).
        contracted: Squares reduced by contraction.
        by_row: Squares reduced by row, (B, groups, ...) of the result.
    """

    part: Tensor
    positions: Positions
    rows: Tensor
    channels: Tensor
    contracted: Tensor
    by_row: Tensor


class WeightedSample(NamedTuple):
    """A sample of a first operand at positions that are chosen by the gradient they are multiplied with.

    Attributes:
        part: The sample, (P, C).
        sampled: The positions.
        sizes: Sums of the squared gradient that each position is multiplied with, (B, groups, ...). Positions are
            chosen by these times one plus ``image_shares``.
    """

    part: Tensor
    sampled: SizedPositions
    sizes: Tensor


class GradientSample(NamedTuple):
    """A sample of the gradient of a result at positions that are chosen by it and by its factors.

    Attributes:
        part: The sample, (P, channels).
        amax: Largest magnitude of the gradient, once it is known.
        sampled: The positions.
        rows: Squares of the gradient by row, their roots, these roots times squares of the first operand by row, and
            the latter squares, (4, B, groups, ...).
        shares: Weights of the first three of these in the choice of positions, (3,).
    """

    part: Tensor
    amax: list[Tensor]
    sampled: SizedPositions
    rows: Tensor
    shares: Tensor


def image_shares(rows: Tensor) -> Tensor:
    """Squares of images' largest magnitudes (..., B) over their mean: relative errors with a scale per image."""
    squares = rows.square()
    return squares / squares.mean(-1, keepdim=True)


@dataclass(slots=True, kw_only=True)
class ConvolutionRecord(OperatorRecord):
    """The measurements of one call.

    Attributes:
        form: The convolution; only the shape of its first operand remains after its release.
        row_g2: Squares of the gradient by row.
        columns: Squares of the gradient summed over the results that each weight reaches, by output channel.
        contracted_second: Squares of the weight by contraction, once they are known.
        by_column: Squares of the weight by output channel, once they are known.
        positions: Number of sampled positions of the first operand.
    """

    form: ConvolutionForm = field(init=False)
    first: FirstSample | None = None
    columns: Tensor | None = None
    weighted: WeightedSample | None = None
    gradient: GradientSample | None = None
    row_g2: Tensor | None = None
    contracted_second: Tensor | None = None
    by_column: Tensor | None = None
    positions: int = 0

    def measure(self, call: OperatorCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Keep both operands; the first is sampled when the gradient arrives, if autograd keeps it until then."""
        form, self.factor = product_of(call.op_type, call.function, args, kwargs)
        assert isinstance(form, ConvolutionForm)
        self.form, self.products = form, (form.sizes,)
        self.elements |= {"first": form.first.numel(), "second": form.second.numel()}
        if not (self.differentiated and "second_gradient" in self.needs_gradient):
            self.release_first()

    @property
    def transposed(self) -> bool:
        """Whether it is a transposed convolution, for whose backward pass there are no 8-bit kernels."""
        return "transpose" in self.op_type

    def output_gradient(self, g: Tensor) -> None:
        """Sample the gradient of the result, (B, channels, ...)."""
        if self.transposed:
            self.add_tensor("output_gradient", g)
        g = self.form.result(g)
        if self.trains_weight:
            self.add_nearest(self.form, g)
        self.elements["output_gradient"] = g.numel()
        form, first = self.form, self.sample_first()
        squares = g.square()
        self.row_g2 = row_g2 = form.merge_groups(squares)
        self.columns = form.columns_of_weight(squares)
        del squares
        if "second_gradient" in self.needs_gradient:
            self.weighted = self._sample_weighted(first, row_g2)
        if not self.transposed:
            self.gradient = self._sample_gradient(first, g, row_g2)
        self.release_first()

    def sample_first(self) -> FirstSample:
        """The sample of the first operand, drawn by the first call."""
        if self.first is not None:
            return self.first
        form, x = self.form, self.form.first
        squares = x.square()
        positions = even_positions(x, self.sample // x.shape[1])
        self.positions = positions.places.numel()
        self.first = FirstSample(
            part=positions.of(x),
            positions=positions,
            rows=_largest(form, Granularity.ROW),
            channels=_largest(form, Granularity.CHANNEL),
            contracted=form.first_by_contraction(squares),
            by_row=form.first_by_row(squares),
        )
        return self.first

    def release_first(self) -> None:
        """Release the first operand, apart from its shape, after sampling it."""
        first = self.sample_first()
        self.form = dataclasses.replace(self.form, first=first.rows[0].expand(self.form.first.shape))

    def clear(self) -> None:
        """Release all samples and vectors."""
        self.first = self.weighted = self.gradient = self.row_g2 = None
        self.columns = self.contracted_second = self.by_column = None

    def _sample_weighted(self, first: FirstSample, row_g2: Tensor) -> WeightedSample:
        form, x = self.form, self.form.first
        sizes = form.rows_by_position(row_g2)
        chosen_by = torch.addcmul(sizes, sizes, image_shares(first.rows).view(-1, *(1,) * (x.dim() - 1)))
        sampled = positions_by_size(chosen_by, int(self.sample * _WEIGHTED_PART) // x.shape[1])
        return WeightedSample(sampled.positions.of(x), sampled, sizes)

    def _sample_gradient(self, first: FirstSample, g: Tensor, row_g2: Tensor) -> GradientSample:
        # Errors grow with the square in floating formats, in INT8 with its root where most elements are below a step.
        norm = row_g2.sqrt()
        every = stacked([row_g2, norm, norm * first.by_row, first.by_row])
        terms = every[:3].flatten(1)
        totals = summed(terms, 1)
        self.numbers.append((("output_gradient.square_sum",), totals[:1]))
        shares = totals.clamp(min=torch.finfo(g.dtype).tiny).reciprocal_().to(g.dtype)
        sizes = torch.mv(terms.T, shares).view(row_g2.shape)
        sampled = positions_by_size(sizes, 2 * self.sample // g.shape[1])
        amax: list[Tensor] = []
        self.queue.add(g, lambda largest, _: amax.append(largest), root=False)
        return GradientSample(sampled.positions.of(g), amax, sampled, every, shares)

    def settled(self, values: dict[str, float]) -> dict[str, float]:
        """Numbers by name; those that start with ``~`` are factors of others."""
        numbers = {name: value for name, value in values.items() if not name.startswith("~")}
        for name, sizes in (("first", self.form.first.shape), ("second", self.form.second.shape)):
            numbers[f"{name}.amax.{Granularity.TENSOR}"] = values[f"{name}.greatest"] ** 2
            for granularity in (Granularity.CHANNEL, Granularity.ROW):
                shared = self.form.slice_dims(name, granularity)
                slices = math.prod(size for dim, size in enumerate(sizes) if dim not in shared)
                numbers[f"{name}.amax.{granularity}"] = values[f"~{name}.{granularity}"] ** 2 / slices
        self._settle_first(values, numbers)
        self._settle_second(values, numbers)
        for shape in _SHAPES:
            if "~g2" in values:
                key = ".row" if shape is Granularity.ROW else ""
                numbers[f"xg/{shape}"] *= _ratio(values[f"~g2{key}"], values[f"~some.g2{key}"])
        if "xg/gradient" in values:
            elements = self.elements["output_gradient"]
            numbers[f"output_gradient.amax.{Granularity.TENSOR}"] = values["output_gradient.greatest"] ** 2
            numbers["output_gradient.sample.square"] /= elements
            for rounding in Rounding:
                for kind in RESULT_KINDS:
                    numbers[f"output_gradient.{kind}.{rounding}"] /= elements
        return numbers

    def _settle_first(self, values: dict[str, float], numbers: dict[str, float]) -> None:
        shape = self.form.first.shape
        positions, count = shape[0] * shape[2:].numel(), self.positions
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

    def _settle_second(self, values: dict[str, float], numbers: dict[str, float]) -> None:
        """Scale sums over sampled rows; with a scale per row, a row's error grows with its largest magnitude."""
        if "~second.part" not in values:
            return
        part, _ = self.form.sample_second(self.sample)
        whole, some = self.form.second.shape[1], part.shape[1]
        numbers["second.sample.square"] = values["~second.part"] ** 2 / part.numel()
        numbers["second.sample.row"] = values["~some.row"] / some
        for shape in _SHAPES:
            key, column = "", whole / some
            if shape is Granularity.ROW:
                key, column = ".row", _ratio(values["~row"], values["~some.row"])
            numbers[f"xw/second/{shape}"] *= _ratio(values[f"~x2{key}"], values[f"~some.x2{key}"])
            if f"gw/{shape}" in numbers:
                numbers[f"gw/{shape}"] *= column


def _ratio(whole: float, part: float) -> float:
    """The factor from a sum over a sample to that over all; 1 where the sample's sum is 0."""
    return whole / part if part else 1.0


def _largest(form: ConvolutionForm, granularity: Granularity) -> Tensor:
    amplitude: Tensor = torch.linalg.vector_norm(form.first, float("inf"), form.slice_dims("first", granularity))
    return amplitude


_INTEGER = slice(SCALED_KINDS.index(INTEGER_KINDS[0]), SCALED_KINDS.index(INTEGER_KINDS[-1]) + 1)
_SHAPES = tuple(Granularity(kind.partition("/")[2]) for kind in INTEGER_KINDS)
_EIGHT_BITS = RESULT_KINDS.index(GRADIENT_KINDS["INT8"])
_TOGETHER = 10 << 20
"""Errors computed at a time, at most, unless those of one call are more."""

_Numbers = list[tuple[tuple[str, ...], Tensor]]
"""Names, and numbers (names, M) of M calls."""
_Steps = Generator[ErrorRequest, Tensor, _Numbers]


def finish_convolutions(calls: Sequence[ConvolutionRecord]) -> None:
    """Compute all numbers that depend on rounding, after the backward pass."""
    for call in calls:
        call.release_first()
    _run(
        calls,
        _seconds,
        lambda call: (call.form.second.shape, call.sample_first().contracted.shape, call.columns is None, call.sample),
        lambda call: call.form.sample_second(call.sample)[0].numel() * len(SCALED_KINDS),
    )
    _run(
        calls,
        _firsts,
        lambda call: (call.form.first.shape, call.form.second.shape[2:], call.sample),
        lambda call: call.sample_first().part.numel() * len(SCALED_KINDS),
    )
    weighted = [call for call in calls if call.weighted is not None]
    for group in _alike(
        weighted,
        lambda call: (call.form.first.shape, call.sample),
        lambda call: _elements(call.weighted) * len(_SHAPES),
    ):
        _add_numbers(group, _weighted(group))
    gradients = [call for call in calls if call.gradient is not None]
    _run(gradients, _gradients, _gradient_key, lambda call: _elements(call.gradient) * len(RESULT_KINDS))
    _by_row(calls)
    for call in calls:
        call.clear()


def _elements(sample: WeightedSample | GradientSample | None) -> int:
    return 0 if sample is None else sample.part.numel()


def _run(
    calls: Sequence[ConvolutionRecord],
    steps: Callable[[Sequence[ConvolutionRecord]], _Steps],
    key: Callable[[ConvolutionRecord], Hashable],
    size: Callable[[ConvolutionRecord], int],
) -> None:
    """Run steps for groups of calls; several groups compute their errors together."""
    for group, numbers in run_batched(((group, steps(group)) for group in _alike(calls, key, size)), _TOGETHER):
        _add_numbers(group, numbers)


def _alike(
    calls: Sequence[ConvolutionRecord],
    key: Callable[[ConvolutionRecord], Hashable],
    size: Callable[[ConvolutionRecord], int],
) -> Iterator[list[ConvolutionRecord]]:
    """Groups of calls with one key, and with sizes that sum up to the limit at most."""
    groups: dict[Hashable, list[ConvolutionRecord]] = {}
    for call in calls:
        form = call.form
        common = form.first.device, form.second.shape[2:].numel(), form.sizes.products, form.geometry, call.loss_scale
        groups.setdefault((*map(str, common), key(call)), []).append(call)
    for group in groups.values():
        count = max(1, _TOGETHER // max(1, size(group[0])))
        yield from (group[start : start + count] for start in range(0, len(group), count))


def _add_numbers(calls: Sequence[ConvolutionRecord], numbers: _Numbers) -> None:
    names = tuple(name for some, _ in numbers for name in some)
    table = torch.cat([values for _, values in numbers]).T.contiguous()
    for call, values in zip(calls, table, strict=True):
        call.numbers.append((names, values))


def _means(tensor: str, kinds: Sequence[str], values: Tensor) -> tuple[tuple[str, ...], Tensor]:
    """Names and numbers of mean errors (2, K, M)."""
    return tuple(f"{tensor}.{kind}.{rounding}" for rounding in Rounding for kind in kinds), values.flatten(0, 1)


def _norms(x: Tensor) -> Tensor:
    """Norms of M tensors, (1, M)."""
    norms: Tensor = torch.linalg.vector_norm(x.flatten(1), dim=1)
    return norms.unsqueeze(0)


# -- operands --------------------------------------------------------------------------------------------------------


def _seconds(calls: Sequence[ConvolutionRecord]) -> _Steps:
    form = calls[0].form
    weights = stacked([call.form.second for call in calls])
    squares = weights.square()
    contracted_w2, columns_w2 = form.by_input_channel(squares), form.by_output_channel(squares)
    del squares
    for i, call in enumerate(calls):
        call.contracted_second, call.by_column = contracted_w2[i], columns_w2[i]
    _, rows = form.sample_second(calls[0].sample)
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
    x2 = stacked([call.sample_first().contracted for call in calls])
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


def _firsts(calls: Sequence[ConvolutionRecord]) -> _Steps:
    firsts = [call.sample_first() for call in calls]
    parts, rows, channels = (torch.stack(x) for x in zip(*((f.part, f.rows, f.channels) for f in firsts), strict=True))
    positions = firsts[0].positions
    units, largest = rows[:, positions.images], rows.amax(1)
    amaxes = {
        Granularity.TENSOR: largest.view(-1, 1, 1),
        Granularity.CHANNEL: channels.unsqueeze(1),
        Granularity.ROW: units.unsqueeze(2),
    }
    errors = yield ErrorRequest(parts, SCALED_KINDS, amaxes)
    contracted = [call.contracted_second for call in calls if call.contracted_second is not None]
    spreads = torch.cat([calls[0].form.contraction_by_position(second) for second in contracted])
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


# -- gradients -------------------------------------------------------------------------------------------------------


def _weights(sizes: Tensor, sampled: Sequence[SizedPositions]) -> Tensor:
    """Weights of the positions in sums, from the sizes that they were chosen by, (M, P)."""
    totals = torch.stack([s.total for s in sampled]).unsqueeze(1)
    return weights_by_size(sizes, totals, sampled[0].number, sampled[0].requested)


def _weighted(calls: Sequence[ConvolutionRecord]) -> _Numbers:
    """T(noise of the first operand, 1, g**2) for fixed-point rounding."""
    firsts = [call.sample_first() for call in calls]
    every = [call.weighted for call in calls if call.weighted is not None]
    rows, channels = torch.stack([f.rows for f in firsts]), torch.stack([f.channels for f in firsts])
    parts, gradient_squares, indices = (
        torch.stack(x) for x in zip(*((m.part, m.sizes.flatten(2), m.sampled.indices) for m in every), strict=True)
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
        torch.addcmul(chosen_by, chosen_by, image_shares(rows).gather(1, images)), [m.sampled for m in every]
    )
    weighted = sizes * weights.unsqueeze(2)
    sums = summed((_by_group(noise, calls[0]) * weighted).flatten(2), 2)
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


def _gradient_key(call: ConvolutionRecord) -> Hashable:
    gradient = call.gradient
    assert gradient is not None
    windows = None if call.form.pointwise else call.form.first.shape
    return windows, gradient.part.shape, gradient.sampled.number, gradient.sampled.requested


def _gradients(calls: Sequence[ConvolutionRecord]) -> _Steps:
    gradients = [call.gradient for call in calls if call.gradient is not None]
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
    every = [(call, call.sample_first().by_row, call.row_g2) for call in calls if call.row_g2 is not None]
    for some in by_place(every, lambda one: one[1]).values():
        products = torch._foreach_mul([first for _, first, _ in some], [gradient for *_, gradient in some])
        for (call, *_), value in zip(some, totals(products), strict=True):
            call.numbers.append((("xg/floating",), value.view(1)))
