"""The record of one call of a convolution until the end of its batch: samples, small vectors and a few numbers.

Elements are looked at one by one at some positions of all images. Errors of the first operand that meet the gradient of
the result, and the gradient's own, are taken at positions where the gradient is; see `qsync_opt.runtimes.torch.sensitivity.samples`. That happens
when the gradient arrives, while the operand is still what autograd keeps for the weight's gradient; rounding itself is
left to ``records.batch``, when no activation is kept any more, for many calls at once.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from qsync_opt.numerics import Granularity
from qsync_opt.runtimes.torch.sensitivity.products import ConvolutionForm
from qsync_opt.runtimes.torch.sensitivity.records.moments import MomentQueue, add_moments
from qsync_opt.runtimes.torch.sensitivity.reductions import stacked, summed
from qsync_opt.runtimes.torch.sensitivity.samples import Positions, SizedPositions, even_positions, positions_by_size

_WEIGHTED_PART = 1 / 4
"""Part of a sample's size that is enough for one sum whose terms the positions are chosen by."""


@dataclass(frozen=True, slots=True)
class FirstSample:
    """Of a first operand (B, C, ...): P evenly spaced positions, and sums over all of it.

    Attributes:
        part: (P, C).
        positions: Which positions.
        rows: Largest magnitudes of images, (B,).
        channels: Those of channels, (C,).
        contracted: Squares by contraction.
        by_row: Squares by row, (B, groups, ...) of the result.
    """

    part: Tensor
    positions: Positions
    rows: Tensor
    channels: Tensor
    contracted: Tensor
    by_row: Tensor


@dataclass(frozen=True, slots=True)
class WeightedSample:
    """Of a first operand, positions chosen by the gradient that they meet.

    Attributes:
        part: (P, C).
        sampled: Which positions.
        sizes: Squares of the gradient that each position meets, (B, groups, ...); times the one more than its image's
            share in ``image_shares`` they are what positions were chosen by.
    """

    part: Tensor
    sampled: SizedPositions
    sizes: Tensor


@dataclass(frozen=True, slots=True)
class GradientSample:
    """Of the gradient of a result, positions chosen by it and by what it is multiplied with.

    Attributes:
        part: (P, channels).
        amax: Largest magnitude of the gradient, once it is known.
        sampled: Which positions.
        rows: Squares of the gradient by row, their roots, those times squares of the first operand by row, and these
            squares themselves, (4, B, groups, ...).
        shares: Positions were chosen by the first three of these times those, (3,).
    """

    part: Tensor
    amax: list[Tensor]
    sampled: SizedPositions
    rows: Tensor
    shares: Tensor


def image_shares(rows: Tensor) -> Tensor:
    """Squares of images' largest magnitudes (..., B) over their mean.

    With a scale per image, images err by their own largest magnitude; with one for all, alike.
    """
    squares = rows.square()
    return squares / squares.mean(-1, keepdim=True)


@dataclass(slots=True, kw_only=True)
class ConvolutionRecord:
    """One call in the making.

    Attributes:
        form: Of the convolution; without its first operand once that is taken.
        limit: About how many elements of the operands are looked at one by one.
        found: Names and numbers, as the record of the call keeps them.
        loss_scale: By which the gradient is multiplied while it is rounded.
        late: Where largest magnitudes are found, if not at once.
        by_row: Squares of the first operand and of the gradient by row.
        columns: Squares of the gradient summed over the results that each weight reaches, by output channel.
        contracted_second: Squares of the weight by contraction, once they are known.
        by_column: Squares of the weight by output channel, likewise.
        positions: How many of the first operand's positions were taken.
        gradient_elements: Elements of the result.
    """

    form: ConvolutionForm
    limit: int
    numbers: list[tuple[tuple[str, ...], Tensor]]
    loss_scale: float
    queue: MomentQueue | None = None
    first: FirstSample | None = None
    columns: Tensor | None = None
    weighted: WeightedSample | None = None
    gradient: GradientSample | None = None
    by_row: tuple[Tensor, Tensor] | None = None
    contracted_second: Tensor | None = None
    by_column: Tensor | None = None
    positions: int = 0
    gradient_elements: int = 0

    def sample_first(self) -> FirstSample:
        """Look at the first operand, once."""
        if self.first is not None:
            return self.first
        form, x = self.form, self.form.first
        squares = x.square()
        positions = even_positions(x, self.limit // x.shape[1])
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

    def release_first(self) -> FirstSample:
        """Keep nothing of an activation's size; only the first operand's shape matters by now."""
        first = self.sample_first()
        self.form = dataclasses.replace(self.form, first=first.rows[0].expand(self.form.first.shape))
        return first

    def clear(self) -> None:
        """Keep nothing that was taken."""
        self.first = self.weighted = self.gradient = self.by_row = None
        self.columns = self.contracted_second = self.by_column = None

    def add_gradient(self, g: Tensor, *, trained: bool, rounded: bool) -> None:
        """Look at the gradient of the result, (B, channels, ...).

        Args:
            g: The gradient.
            where_it_is: Whether the first operand's errors add to a weight gradient.
            rounded: Whether the gradient itself may be rounded to 8 bits.
        """
        form, first = self.form, self.sample_first()
        squares = g.square()
        row_g2 = form.result_by_row(squares)
        self.columns = form.columns_of_weight(squares)
        del squares
        self.by_row = first.by_row, row_g2
        if trained:
            self.weighted = self._sample_weighted(first, row_g2)
        if rounded:
            self.gradient = self._sample_gradient(first, g, row_g2)
            self.gradient_elements = g.numel()
        self.first = dataclasses.replace(first, by_row=first.by_row.new_empty(0))
        self.release_first()

    def _sample_weighted(self, first: FirstSample, row_g2: Tensor) -> WeightedSample:
        form, x = self.form, self.form.first
        sizes = form.rows_by_position(row_g2)
        chosen_by = torch.addcmul(sizes, sizes, image_shares(first.rows).view(-1, *(1,) * (x.dim() - 1)))
        sampled = positions_by_size(chosen_by, int(self.limit * _WEIGHTED_PART) // x.shape[1])
        return WeightedSample(sampled.positions.of(x), sampled, sizes)

    def _sample_gradient(self, first: FirstSample, g: Tensor, row_g2: Tensor) -> GradientSample:
        # Floating formats err by the square, INT8 by the root of it where most of a gradient is below a step.
        norm = row_g2.sqrt()
        every = stacked([row_g2, norm, norm * first.by_row, first.by_row])
        terms = every[:3].flatten(1)
        totals = summed(terms, 1)
        self.numbers.append((("output_gradient.square_sum",), totals[:1]))
        shares = totals.clamp(min=torch.finfo(g.dtype).tiny).reciprocal_().to(g.dtype)
        sizes = torch.mv(terms.T, shares).view(row_g2.shape)
        sampled = positions_by_size(sizes, 2 * self.limit // g.shape[1])
        amax: list[Tensor] = []
        add_moments(self.queue, g, lambda largest, _: amax.append(largest), root=False)
        return GradientSample(
            part=sampled.positions.of(g),
            amax=amax,
            sampled=sampled,
            rows=every,
            shares=shares,
        )


def _largest(form: ConvolutionForm, granularity: Granularity) -> Tensor:
    amplitude: Tensor = torch.linalg.vector_norm(form.first, float("inf"), form.slice_dims("first", granularity))
    return amplitude
