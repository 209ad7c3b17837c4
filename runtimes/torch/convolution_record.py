"""What the record of a convolution measures element by element: at some positions of all images, not at all of some.

Errors of the first operand meet the gradient of the result once it is there, so that the positions can be those where
the gradient is; see ``sized_samples``. The operand is still what autograd keeps for the weight's gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qsync_opt.rounding import GRADIENT_KINDS, Granularity
from qsync_opt.runtimes.torch.operator_summary import SCALED_KINDS
from qsync_opt.runtimes.torch.product_forms import ConvolutionForm
from qsync_opt.runtimes.torch.reductions import dot, mean, ratio, total
from qsync_opt.runtimes.torch.rounding_error import ElementErrors, fixed_point_errors, stacked_errors
from qsync_opt.runtimes.torch.sized_samples import Positions, even_positions, positions_by_size

_WHERE_THE_GRADIENT_IS = 1 / 4
"""Part of a sample's size that is enough for one sum whose terms the positions are chosen by."""


@dataclass(frozen=True, slots=True)
class OperandErrors:
    """Errors of some elements, and what they come to in the result: numbers by name."""

    part: Tensor
    errors: ElementErrors
    sums: dict[str, Tensor]


def _units(amaxes: Mapping[Granularity, Tensor], positions: Positions) -> dict[Granularity, Tensor]:
    """Largest magnitudes beside positions, (positions, channels) or broadcasting."""
    return {
        Granularity.TENSOR: amaxes[Granularity.TENSOR].view(1, 1),
        Granularity.CHANNEL: amaxes[Granularity.CHANNEL].view(1, -1),
        Granularity.ROW: amaxes[Granularity.ROW].flatten()[positions.images].unsqueeze(1),
    }


def operand_errors(
    form: ConvolutionForm,
    amaxes: Mapping[Granularity, Tensor],
    contracted_w2: Tensor,
    kinds: Mapping[Granularity, str],
    limit: int,
) -> OperandErrors:
    """Errors of evenly spaced positions of the first operand, and what they add to the result.

    Args:
        form: Of the convolution.
        amaxes: Largest magnitudes of the operand's slices.
        contracted_w2: Squares of the weights, reduced by contraction.
        kinds: Fixed-point rounding by granularity.
        limit: About how many elements are looked at.
    """
    x = form.first
    positions = even_positions(x, limit // x.shape[1])
    part, units = positions.of(x), _units(amaxes, positions)
    errors = stacked_errors(part, SCALED_KINDS, units)
    spread = form.contraction_by_position(contracted_w2)
    weights = positions.of(spread)
    whole = total(spread) * (x.numel() // spread.numel())
    even = ratio(whole, total(weights))
    row_sizes = units[Granularity.ROW].square()
    by_size = ratio(whole * mean(amaxes[Granularity.ROW].square()), total(weights * row_sizes))
    sums = {
        f"xw/first/{shape}": dot(errors.stochastic[SCALED_KINDS.index(kind)], weights)
        * (by_size if shape is Granularity.ROW else even)
        for shape, kind in kinds.items()
    }
    if part.numel() < x.numel():
        sums["first.sample.row"] = mean(row_sizes)
    return OperandErrors(part, errors, sums)


def errors_met_by_gradient(
    form: ConvolutionForm,
    amaxes: Mapping[Granularity, Tensor],
    row_g2: Tensor,
    shapes: Sequence[Granularity],
    limit: int,
) -> dict[str, Tensor]:
    """T(noise of the first operand, 1, g**2) for fixed-point rounding, from positions chosen by the gradient there.

    Args:
        form: Of the convolution.
        amaxes: Largest magnitudes of the first operand's slices.
        row_g2: Squares of the gradient, reduced by row.
        shapes: Granularities of INT8.
        limit: About how many elements an evenly spaced sample has.
    """
    x, groups = form.first, form.sizes.products
    sizes = form.rows_by_position(row_g2)
    by_image = amaxes[Granularity.ROW].square()
    whole, whole_by_image = total(sizes), dot(sizes, by_image)
    # Of all shapes together: with a scale per image, images err by their own largest magnitude.
    wanted = sizes * (by_image * ratio(whole, whole_by_image)).add_(1.0)
    positions = positions_by_size(wanted, int(limit * _WHERE_THE_GRADIENT_IS) // x.shape[1])
    units = _units(amaxes, positions)
    errors = fixed_point_errors(positions.of(x), [units[shape] for shape in shapes])
    met = positions.of(sizes) * positions.weights.unsqueeze(1)  # (positions, groups)
    sums = (errors.view(*errors.shape[:2], groups, -1).sum(3) * met).sum((1, 2), dtype=torch.float64)
    row_sizes = units[Granularity.ROW].square()
    even = ratio(whole, total(met))
    by_size = ratio(whole_by_image, dot(met, row_sizes))
    return {f"xg/{shape}": sums[i] * (by_size if shape is Granularity.ROW else even) for i, shape in enumerate(shapes)}


@dataclass(frozen=True, slots=True)
class GradientErrors:
    """Mean errors of a gradient per kind, to nearest or not, and what INT8's come to in both other gradients.

    ``mean_square`` is that of the sample, None where every element was looked at.
    """

    stochastic: Tensor
    nearest: Tensor
    mean_square: Tensor | None
    sums: dict[str, Tensor]


def gradient_errors(
    form: ConvolutionForm,
    g: Tensor,
    by_row: Tensor,
    by_column: Tensor,
    row_g2: Tensor,
    kinds: tuple[str, ...],
    *,
    amax: Tensor,
    loss_scale: float,
    limit: int,
) -> GradientErrors:
    """Errors of rounding the gradient, from positions chosen by it and by what it is multiplied with.

    Args:
        form: Of the convolution.
        g: Gradient of the result, (samples, channels, ...).
        by_row: Squares of the first operand, reduced by row.
        by_column: Squares of the second, reduced by column.
        row_g2: Squares of the gradient, reduced by row.
        kinds: Noise kinds, that of INT8 gradients among them.
        amax: Largest magnitude of the gradient.
        loss_scale: By which it is multiplied while it is rounded.
        limit: About how many elements an evenly spaced sample has.
    """
    groups = form.sizes.products
    # Floating formats err by the square, INT8 by the root of it where most of a gradient is below a step.
    norm = row_g2.sqrt()
    met = norm * by_row
    sizes = row_g2 + norm * ratio(total(row_g2), total(norm)) + met * ratio(total(row_g2), total(met))
    positions = positions_by_size(sizes, 2 * limit // g.shape[1])
    part = positions.of(g) * loss_scale
    errors = stacked_errors(part, kinds, {Granularity.TENSOR: amax * loss_scale})
    weights = positions.weights.unsqueeze(1) / loss_scale**2
    noise = errors.stochastic[kinds.index(GRADIENT_KINDS["INT8"])] * weights
    met = dot(noise.view(noise.shape[0], groups, -1).sum(2), positions.of(by_row))
    means = [(values * weights).sum((1, 2), dtype=torch.float64) / g.numel() for values in errors]
    return GradientErrors(
        stochastic=means[0],
        nearest=means[1],
        mean_square=dot(part.square(), weights) / g.numel(),
        sums={"xg/gradient": met, "gw/gradient": dot(noise, positions.of(by_column))},
    )
