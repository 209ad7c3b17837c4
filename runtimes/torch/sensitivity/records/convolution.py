"""The record of one call of a convolution until the end of its batch: samples, small vectors and a few numbers.

Rounding errors are computed at some positions of all images. Those that contribute to gradients are sampled where the
gradient is large, see `qsync_opt.runtimes.torch.sensitivity.samples`. This happens when the gradient arrives, while
autograd still keeps the operand; rounding itself waits until no activation is kept, for many calls at once, see
`qsync_opt.runtimes.torch.sensitivity.records.batch`.
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
"""Part of the sample size that is enough for a sum whose terms determine the sampling."""


@dataclass(frozen=True, slots=True)
class FirstSample:
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


@dataclass(frozen=True, slots=True)
class WeightedSample:
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


@dataclass(frozen=True, slots=True)
class GradientSample:
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
class ConvolutionRecord:
    """The measurements of one call.

    Attributes:
        form: The convolution; only the shape of its first operand remains after its release.
        limit: Approximate sample size of the operands.
        numbers: Names and numbers of the `OperatorRecord`.
        loss_scale: Factor of the gradient while it is rounded.
        queue: Computes largest magnitudes later; None for at once.
        by_row: Squares of the first operand and of the gradient by row.
        columns: Squares of the gradient summed over the results that each weight reaches, by output channel.
        contracted_second: Squares of the weight by contraction, once they are known.
        by_column: Squares of the weight by output channel, once they are known.
        positions: Number of sampled positions of the first operand.
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
        """The sample of the first operand, drawn by the first call."""
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
        """Release the first operand, apart from its shape, after sampling it."""
        first = self.sample_first()
        self.form = dataclasses.replace(self.form, first=first.rows[0].expand(self.form.first.shape))
        return first

    def clear(self) -> None:
        """Release all samples and vectors."""
        self.first = self.weighted = self.gradient = self.by_row = None
        self.columns = self.contracted_second = self.by_column = None

    def add_gradient(self, g: Tensor, *, trained: bool, rounded: bool) -> None:
        """Measure the gradient of the result.

        Args:
            g: The gradient, (B, channels, ...).
            trained: Whether the weight has a gradient, to which the first operand's errors add.
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
        # Errors grow with the square in floating formats, in INT8 with its root where most elements are below a step.
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
