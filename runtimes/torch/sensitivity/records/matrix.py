"""The record of one call of a matrix product, measured in two computations that a card replays."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from qsync_opt.numerics import GRADIENT_KINDS, Granularity, Rounding
from qsync_opt.runtimes.torch.interception import OperatorCall
from qsync_opt.runtimes.torch.sensitivity.errors import rounding_errors
from qsync_opt.runtimes.torch.sensitivity.products import MatrixForm, product_of
from qsync_opt.runtimes.torch.sensitivity.records.operator import (
    INTEGER_KINDS,
    RESULT_KINDS,
    SCALED_KINDS,
    OperatorRecord,
)
from qsync_opt.runtimes.torch.sensitivity.reductions import dot, mean, ratio, reduce_result, summed, total

_FIXED_POINT = {Granularity(kind.partition("/")[2]): kind for kind in INTEGER_KINDS}

Numbers = dict[tuple[str, ...], Tensor]


@dataclass(slots=True, kw_only=True)
class MatrixRecord(OperatorRecord):
    """The measurements of one call, with reductions of squares and, per granularity, of errors until its gradient.

    Attributes:
        by_row: Reductions of the first operand.
        by_column: Reductions of the second operand.
        row_sizes: Squared largest magnitude of every row of ``first``, shaped like a row's reduction; None without
            sampling.
        sampled: The sampled rows.
    """

    form: MatrixForm | None = None
    by_row: dict[str, Tensor] = field(default_factory=dict)
    by_column: dict[str, Tensor] = field(default_factory=dict)
    row_sizes: Tensor | None = None
    sampled: slice = field(default_factory=lambda: slice(None))

    def measure(self, call: OperatorCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Measure both operands."""
        form, self.factor = product_of(call.op_type, call.function, args, kwargs)
        assert isinstance(form, MatrixForm)
        self.form, self.products = form, (form.sizes,)

        def operands(first: Tensor, second: Tensor) -> tuple[Any, ...]:
            scratch = self._scratch(by_row={}, by_column={})
            scratch._measure_operands(dataclasses.replace(form, first=first, second=second))
            return (*scratch._results(), scratch.by_row, scratch.by_column, scratch.row_sizes, scratch.sampled)

        key = ("operands", self.op_type, form.sizes, self.sample)
        numbers, elements, self.by_row, self.by_column, self.row_sizes, self.sampled = self.replays(
            key, operands, form.first, form.second
        )
        self._add(numbers, elements)

    def output_gradient(self, g: Tensor) -> None:
        """Measure the gradient with the reductions of the operands; of a weight, with the first operand itself too."""
        form, self.form = self.form, None
        if form is None:
            return
        shapes = form.first.shape, form.second.shape

        def gradient(
            g: Tensor,
            first: Tensor | None,
            by_row: dict[str, Tensor],
            by_column: dict[str, Tensor],
            row_sizes: Tensor | None,
        ) -> tuple[Numbers, dict[str, int]]:
            scratch = self._scratch(by_row=by_row, by_column=by_column, row_sizes=row_sizes)
            nothing = g.new_zeros(())  # for operands of which only the shape matters
            shape_only = dataclasses.replace(form, first=nothing.expand(shapes[0]), second=nothing.expand(shapes[1]))
            if first is not None:
                scratch.add_nearest(dataclasses.replace(shape_only, first=first), g)
            scratch._measure_gradient(shape_only, g)
            return scratch._results()

        key = ("gradient", self.op_type, form.sizes, *shapes, self.sampled.step)
        first = form.first if self.trains_weight else None
        sums = self.by_row, self.by_column, self.row_sizes
        self._add(*self.replays(key, gradient, form.result(g), first, *sums))
        self.by_row, self.by_column, self.row_sizes = {}, {}, None

    def _scratch(self, **sums: Any) -> MatrixRecord:
        """A record of the same operator without numbers."""
        return dataclasses.replace(self, form=None, numbers=[], elements={}, **sums)

    def _results(self) -> tuple[Numbers, dict[str, int]]:
        numbers: Numbers = {}
        for dtype in dict.fromkeys(values.dtype for _, values in self.numbers):
            alike = [(names, values) for names, values in self.numbers if values.dtype is dtype]
            names = tuple(name for some, _ in alike for name in some)
            numbers[names] = torch.cat([values for _, values in alike])
        return numbers, self.elements

    def _add(self, numbers: Numbers, elements: dict[str, int]) -> None:
        self.numbers += numbers.items()
        self.elements |= elements

    def _measure_operands(self, form: MatrixForm) -> None:
        squares = form.first.square()
        contracted_x2 = squares.sum(1)
        self.by_row["floating"] = squares.sum(2)
        self.put("first.square_sum", total(self.by_row["floating"]))
        squares = form.second.square()
        contracted_w2 = squares.sum(2)
        self.by_column["floating"] = squares.sum(1)
        self.put("second.square_sum", total(self.by_column["floating"]))
        del squares
        self.put("xw/floating", dot(contracted_x2, contracted_w2))
        self._first(form, contracted_w2)
        self._second(form, contracted_x2)

    def _first(self, form: MatrixForm, contracted_w2: Tensor) -> None:
        """Errors of the first operand, from some of its rows."""
        part, self.sampled = form.sample(self.sample)
        errors, row_amax, some_amax = self._operand_errors("first", form.first, part, self.sampled)
        by_size: Tensor | float = 1.0
        fraction = part.numel() / form.first.numel()
        if fraction < 1.0:
            self.row_sizes = row_amax.square()
            some = mean(some_amax.square())
            self.put("first.sample.row", some)
            by_size = ratio(mean(self.row_sizes), some)
        for shape, noise in errors.items():
            share = by_size if shape == Granularity.ROW else 1.0
            self.put(f"xw/first/{shape}", dot(noise.sum(1), contracted_w2) / fraction * share)
            self.by_row[shape] = noise.sum(2)

    def _second(self, form: MatrixForm, contracted_x2: Tensor) -> None:
        """Errors of the second operand, from some of its rows if it is a large weight.

        With a scale per row, a row's error grows with its largest magnitude, which is known for all rows.
        """
        part, rows = form.sample_second(self.sample)
        errors, row_amax, _ = self._operand_errors("second", form.second, part, rows)
        some_x2 = contracted_x2[:, rows]
        # Factors from sums over sampled rows to sums over all: for the output and for a column.
        even: tuple[Tensor | float, Tensor | float] = 1.0, 1.0
        by_size = even
        if part.numel() < form.second.numel():
            extent = contracted_x2.numel() / some_x2.numel()
            sizes = row_amax.square().reshape(contracted_x2.shape)
            some_sizes = sizes[:, rows]
            some = mean(some_sizes)
            even = ratio(total(contracted_x2), total(some_x2)), extent
            by_size = ratio(dot(contracted_x2, sizes), dot(some_x2, some_sizes)), ratio(mean(sizes), some) * extent
            self.put("second.sample.row", some)
        for shape, noise in errors.items():
            output_scale, column_scale = by_size if shape is Granularity.ROW else even
            self.put(f"xw/second/{shape}", dot(some_x2, noise.sum(2)) * output_scale)
            self.by_column[shape] = noise.sum(1) * column_scale

    def _operand_errors(
        self, tensor: str, x: Tensor, part: Tensor, rows: slice
    ) -> tuple[dict[Granularity, Tensor], Tensor, Tensor]:
        amaxes = self.amaxes(tensor, x, channel=1, row=2)
        row_amax = amaxes[Granularity.ROW]
        if part.numel() < x.numel():
            amaxes[Granularity.ROW] = row_amax[:, rows]
        errors = rounding_errors(part, SCALED_KINDS, amaxes)
        self.add_errors(tensor, SCALED_KINDS, errors, part)
        fixed_point = {shape: errors[0, SCALED_KINDS.index(kind)] for shape, kind in _FIXED_POINT.items()}
        return fixed_point, row_amax, amaxes[Granularity.ROW]

    def _measure_gradient(self, form: MatrixForm, g: Tensor) -> None:
        row_g2, column_g2 = reduce_result(g, torch.square)
        self.put("xg/floating", dot(self.by_row["floating"], row_g2))
        columns = torch.stack(tuple(self.by_column.values())) * column_g2
        names = tuple(f"gw/{shape}" for shape in self.by_column)
        self.numbers.append((names, summed(columns.flatten(1), 1)))
        some_g2 = row_g2[:, self.sampled]

        def from_sampled(noise: Tensor) -> Tensor:
            """Factor from a sum over sampled rows to that over all, as a few rows may hold most of the gradient."""
            window = noise.sum(2)
            return ratio(dot(window, row_g2), dot(window[:, self.sampled], some_g2))

        even: Tensor | float = 1.0
        by_size = even
        if self.row_sizes is not None:
            even = from_sampled(torch.ones_like(form.first))
            by_size = from_sampled(self.row_sizes.expand_as(form.first))
        for shape in _FIXED_POINT:
            scale = by_size if shape is Granularity.ROW else even
            self.put(f"xg/{shape}", dot(self.by_row[shape], some_g2) * scale)
        self._add_gradient_errors(g, row_g2)

    def _add_gradient_errors(self, g: Tensor, row_g2: Tensor) -> None:
        """Errors of rounding the gradient, from all elements, as a few may hold most of it; INT8 has one scale."""
        amax = torch.linalg.vector_norm(g, float("inf"))
        self.elements["output_gradient"] = g.numel()
        self.put("output_gradient.greatest", amax)
        self.put("output_gradient.square_sum", total(row_g2))
        self.put(f"output_gradient.amax.{Granularity.TENSOR}", amax.square())
        scale, amaxes = self.loss_scale, {Granularity.TENSOR: amax * self.loss_scale}
        totals: list[Tensor] = []

        def integer_errors(part: Tensor) -> Tensor:
            errors = rounding_errors(part if scale == 1.0 else part * scale, RESULT_KINDS, amaxes)
            totals.append(summed(errors.flatten(2), 2))
            errors_8bit = errors[0, RESULT_KINDS.index(GRADIENT_KINDS["INT8"])]
            return errors_8bit if scale == 1.0 else errors_8bit / scale**2

        rows, columns = reduce_result(g, integer_errors)
        means = (totals[0] if len(totals) == 1 else torch.stack(totals).sum(0)) / (g.numel() * scale**2)
        names = tuple(f"output_gradient.{kind}.{rounding}" for rounding in Rounding for kind in RESULT_KINDS)
        self.numbers.append((names, means.flatten()))
        self.put("xg/gradient", dot(self.by_row["floating"], rows))
        self.put("gw/gradient", dot(self.by_column["floating"], columns))
