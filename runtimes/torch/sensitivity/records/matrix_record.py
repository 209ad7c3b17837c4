"""What the record of a matrix product sums up where some rows stand for all, and of its gradient element by element."""

from __future__ import annotations

import torch
from torch import Tensor

from qsync_opt.numerics.rounding import GRADIENT_KINDS, Granularity
from qsync_opt.runtimes.torch.sensitivity.errors import paired_errors
from qsync_opt.runtimes.torch.sensitivity.product_forms import MatrixForm
from qsync_opt.runtimes.torch.sensitivity.reductions import dot, mean, ratio, reduced, summed, total

Shares = tuple[Tensor | float, Tensor | float]


def shares_of_weights(
    form: MatrixForm, contracted_x2: Tensor, row_amax: Tensor, rows: slice
) -> tuple[dict[Granularity, Shares], Tensor]:
    """By what sums over sampled rows of the second operand are multiplied, for the output and for a column.

    With a scale per row, rows err by their own largest magnitude, which is known of all of them.

    Args:
        form: Of the product.
        contracted_x2: Squares of the first operand, reduced by contraction.
        row_amax: Largest magnitude of every row of the second operand.
        rows: Those sampled.

    Returns:
        The shares by granularity, and the mean square of the sampled rows' largest magnitudes.
    """
    some_x2 = form.sampled_contraction(contracted_x2, rows)
    even = contracted_x2.numel() / some_x2.numel()
    sizes = row_amax.square().reshape(contracted_x2.shape)
    some_sizes = form.sampled_contraction(sizes, rows)
    whole, some = mean(sizes), mean(some_sizes)
    shares: dict[Granularity, Shares] = dict.fromkeys(Granularity, (ratio(total(contracted_x2), total(some_x2)), even))
    by_size = ratio(dot(contracted_x2, sizes), dot(some_x2, some_sizes))
    shares[Granularity.ROW] = by_size, ratio(whole, some) * even
    return shares, some


def outside_sample(form: MatrixForm, row_sizes: Tensor | None, sampled: slice, row_g2: Tensor) -> Shares:
    """By what sums over sampled rows are multiplied: with even noise, and with noise by the rows' magnitudes.

    A few rows may hold most of the gradient, and the sample may have caught or missed them.

    Args:
        form: Of the product.
        row_sizes: Squared largest magnitude of every row of the first operand; None without sampling.
        sampled: Which rows were.
        row_g2: Squares of the gradient, reduced by row.
    """
    if row_sizes is None:
        return 1.0, 1.0
    some_g2 = form.sampled_rows(row_g2, sampled)
    found = []
    for noise in (torch.ones_like(form.first), row_sizes.expand_as(form.first)):
        window = form.first_by_row(noise)
        found.append(ratio(dot(window, row_g2), dot(form.sampled_rows(window, sampled), some_g2)))
    return found[0], found[1]


def matrix_gradient_errors(
    form: MatrixForm,
    g: Tensor,
    by_row: Tensor,
    by_column: Tensor,
    kinds: tuple[str, ...],
    *,
    amax: Tensor,
    loss_scale: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Errors of rounding the gradient; every element is counted, as a few may hold most of it.

    Args:
        form: Of the product.
        g: Gradient of the result, in the layout of the form.
        by_row: Squares of the first operand, reduced by row.
        by_column: Squares of the second, reduced by column.
        kinds: Noise kinds, that of INT8 gradients among them.
        amax: Largest magnitude of the gradient.
        loss_scale: By which it is multiplied while it is rounded.

    Returns:
        Mean errors by rounding and kind, (2, kinds), and what INT8's come to in both other gradients, by name.
    """
    amaxes = {Granularity.TENSOR: amax * loss_scale}
    totals: list[Tensor] = []

    def integer_errors(part: Tensor) -> Tensor:
        errors = paired_errors(part if loss_scale == 1.0 else part * loss_scale, kinds, amaxes)
        totals.append(summed(errors.flatten(2), 2))
        found = errors[0, kinds.index(GRADIENT_KINDS["INT8"])]
        return found if loss_scale == 1.0 else found / loss_scale**2

    rows, columns = reduced(form, g, integer_errors)
    means = (totals[0] if len(totals) == 1 else torch.stack(totals).sum(0)) / (g.numel() * loss_scale**2)
    return means, {"xg/gradient": dot(by_row, rows), "gw/gradient": dot(by_column, columns)}
