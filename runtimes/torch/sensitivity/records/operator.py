"""The record of one call of one operator: scalars on the device, and small vectors until its gradient arrives.

Nothing of the size of an activation is kept beyond what autograd keeps anyway. All scalars of a batch travel to the
host together. What is looked at element by element is a sample, but for moments and reductions, which take all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from qsync_opt.numerics import GRADIENT_KINDS, Granularity, Rounding
from qsync_opt.runtimes.torch.sensitivity.errors import (
    AttentionCall,
    ElementErrors,
    attention_errors,
    paired_errors,
    stacked_errors,
    weight_gradient_errors,
)
from qsync_opt.runtimes.torch.sensitivity.products import ConvolutionForm, MatrixForm, Product, ProductForm
from qsync_opt.runtimes.torch.sensitivity.records.convolution import ConvolutionRecord
from qsync_opt.runtimes.torch.sensitivity.records.moments import MomentQueue, add_moments, moment_receiver
from qsync_opt.runtimes.torch.sensitivity.records.summary import INTEGER_KINDS, RESULT_KINDS, SCALED_KINDS
from qsync_opt.runtimes.torch.sensitivity.reductions import dot, mean, norm, ratio, reduced, strided, summed, total
from qsync_opt.runtimes.torch.sensitivity.replays import Replays
from qsync_opt.runtimes.torch.sensitivity.samples import SizedRuns, even_runs, runs_by_size
from qsync_opt.sensitivity import GRADIENTS, OperatorKind, ProductSizes

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
    shares = []
    for noise in (torch.ones_like(form.first), row_sizes.expand_as(form.first)):
        window = form.first_by_row(noise)
        shares.append(ratio(dot(window, row_g2), dot(form.sampled_rows(window, sampled), some_g2)))
    return shares[0], shares[1]


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
        errors_8bit = errors[0, kinds.index(GRADIENT_KINDS["INT8"])]
        return errors_8bit if loss_scale == 1.0 else errors_8bit / loss_scale**2

    rows, columns = reduced(form, g, integer_errors)
    means = (totals[0] if len(totals) == 1 else torch.stack(totals).sum(0)) / (g.numel() * loss_scale**2)
    return means, {"xg/gradient": dot(by_row, rows), "gw/gradient": dot(by_column, columns)}


_FIXED_POINT = {Granularity(kind.partition("/")[2]): kind for kind in INTEGER_KINDS}
SAMPLE = 1 << 15
"""Elements at most of a tensor that is no operand, whose rounding is looked at one by one."""


def _slices(form: ProductForm, operand: str) -> dict[Granularity, tuple[int, ...]]:
    return {granularity: form.slice_dims(operand, granularity) for granularity in Granularity}


class _Labels(NamedTuple):
    """What a record has measured, but for the tensors; the same for all operators of one shape."""

    names: tuple[tuple[str, ...], ...]
    elements: dict[str, int]
    by_row: tuple[str, ...]
    by_column: tuple[str, ...]
    sized: bool
    sampled: slice


@dataclass(slots=True, kw_only=True)
class OperatorRecord:
    """One call in the making. ``sample`` bounds the elements whose rounding is looked at one by one."""

    name: str
    op_type: str
    kind: OperatorKind
    sample: int
    parameters: tuple[str | None, ...]
    products: tuple[ProductSizes, ...] = ()
    needs_gradient: dict[str, int] = field(default_factory=dict)
    """Elements of each operand that a gradient is due for, by the gradient's name."""
    elements: dict[str, int] = field(default_factory=dict)
    numbers: list[tuple[tuple[str, ...], Tensor]] = field(default_factory=list)
    """Names and values, on the device until ``finish_batch``."""
    pending: list[tuple[str, Tensor | SizedRuns]] = field(default_factory=list)
    """Some elements of tensors that are no operands, until ``cast_waiting``."""
    # Of a product, from its forward to its backward pass: per shape the reductions that wait for the gradient.
    form: ProductForm | None = None
    factor: float = 1.0
    loss_scale: float = 1.0
    """By which gradients are multiplied while they are rounded to 16 bits."""
    by_row: dict[str, Tensor] = field(default_factory=dict)
    by_column: dict[str, Tensor] = field(default_factory=dict)
    convolution: ConvolutionRecord | None = None
    """What a convolution leaves, instead of the form."""
    differentiated: bool = False
    """Whether autograd keeps a first operand whose weight has a gradient."""
    row_sizes: Tensor | None = None
    """Squared largest magnitude of every row of ``first``, shaped like a row's reduction; None without sampling."""
    sampled: slice = field(default_factory=lambda: slice(None))
    attention: AttentionCall | None = None
    # Of a lookup: which rows of the result count in the gradient of the table (all but those of padding).
    counted: Tensor | None = None
    replays: Replays = field(default_factory=Replays)
    """Shared by the records of a collection, like what follows."""
    queue: MomentQueue | None = None

    # -- measuring -----------------------------------------------------------------------------------------------

    def put(self, name: str, value: Tensor) -> None:
        """Keep one number."""
        self.numbers.append(((name,), value.reshape(1)))

    def moments(self, tensor: str, x: Tensor, root: Tensor | None = None) -> None:
        """Largest magnitude and norm; ``root`` is that norm, if it is known already."""
        self.elements[tensor] = x.numel()
        queue = self.queue if tensor in GRADIENTS else None
        add_moments(queue, x, moment_receiver(tensor, self.numbers), root=root is None)
        if root is not None:
            self.put(f"{tensor}.norm", root)

    def add_tensor(self, tensor: str, x: Tensor, root: Tensor | None = None) -> None:
        """Moments of a tensor that is no operand, and some elements, whose cast errors are found with all others.

        Of the gradient of a convolution's operand, which sits on few positions, elements are chosen by their size.
        """
        some = min(self.sample, SAMPLE)
        convolution = self.op_type.startswith("conv") and tensor != "second_gradient"
        if convolution and tensor != "output" and x.numel() > some:
            runs = runs_by_size(x, some)
            self.elements[tensor] = x.numel()
            add_moments(self.queue, x, moment_receiver(tensor, self.numbers), root=False)
            self.put(f"{tensor}.square_sum", runs.total)
            self.pending.append((tensor, runs))
            return
        self.moments(tensor, x, root)
        self.pending.append((tensor, even_runs(x, some) if convolution else strided(x, some).clone()))

    def add_errors(self, tensor: str, kinds: tuple[str, ...], errors: ElementErrors, part: Tensor) -> None:
        """Mean errors of a part of a tensor, and what they are scaled by to stand for the whole.

        Floating formats err in proportion to the square, so that a few large elements may hold most of the error: the
        part's error is scaled from its mean square to that of the tensor.
        """
        for rounding, values in zip(Rounding, errors, strict=True):
            names = tuple(f"{tensor}.{kind}.{rounding}" for kind in kinds)
            self.numbers.append((names, values.flatten(1).mean(1)))
        if part.numel() < self.elements[tensor]:
            self.put(f"{tensor}.sample.square", mean(part.square()))

    def amaxes(self, tensor: str, x: Tensor, dims: Mapping[Granularity, tuple[int, ...]]) -> dict[Granularity, Tensor]:
        """Largest magnitude of every slice, per granularity."""
        largest = float("inf")
        amaxes = {
            g: torch.linalg.vector_norm(x, largest, dims[g], keepdim=True)
            for g in (Granularity.CHANNEL, Granularity.ROW)
        }
        rows = amaxes[Granularity.ROW]
        amaxes[Granularity.TENSOR] = rows.amax(tuple(range(rows.dim())), keepdim=True)
        self.elements[tensor] = x.numel()
        self.put(f"{tensor}.greatest", amaxes[Granularity.TENSOR])
        for granularity, amax in amaxes.items():
            self.put(f"{tensor}.amax.{granularity}", mean(amax.square()))
        return amaxes

    def product(self, product: Product) -> None:
        """Everything about the operands of a bilinear operator that its forward pass can tell.

        Of a convolution whose first operand autograd keeps, that is put off until the gradient arrives; the norm of
        its first operand is known already.
        """
        form, self.factor = product
        self.products = (form.sizes,)
        if isinstance(form, ConvolutionForm):
            self.elements |= {"first": form.first.numel(), "second": form.second.numel()}
            self.convolution = ConvolutionRecord(
                form=form, limit=self.sample, numbers=self.numbers, loss_scale=self.loss_scale, queue=self.queue
            )
            if not (self.differentiated and "second_gradient" in self.needs_gradient):
                self.convolution.release_first()
            return
        assert isinstance(form, MatrixForm)
        self.form = form

        def measure(first: Tensor, second: Tensor) -> tuple[_Labels, list[Tensor]]:
            scratch = self._scratch()
            scratch._measure_operands(dataclasses.replace(form, first=first, second=second))
            return scratch._packed()

        self._unpack(
            *self.replays(("operands", self.op_type, form.sizes, self.sample), measure, form.first, form.second)
        )

    def _measure_operands(self, form: MatrixForm) -> None:
        squares = form.first.square()
        contracted_x2 = form.first_by_contraction(squares)
        self.by_row["floating"] = form.first_by_row(squares)
        self.put("first.square_sum", total(self.by_row["floating"]))
        squares = form.second.square()
        contracted_w2 = form.second_by_contraction(squares)
        self.by_column["floating"] = form.second_by_column(squares)
        self.put("second.square_sum", total(self.by_column["floating"]))
        del squares
        self.put("xw/floating", dot(contracted_x2, contracted_w2))
        self._first(form, contracted_w2)
        self._second(form, contracted_x2)

    def _first(self, form: MatrixForm, contracted_w2: Tensor) -> None:
        """Errors of the first operand, from some of its rows."""
        part, rows = form.sample(self.sample)
        self.sampled = rows
        amaxes = self.amaxes("first", form.first, _slices(form, "first"))
        row_amax = amaxes[Granularity.ROW]
        amaxes[Granularity.ROW] = form.sampled_rows(row_amax, rows)
        errors = stacked_errors(part, SCALED_KINDS, amaxes)
        self.add_errors("first", SCALED_KINDS, errors, part)
        by_size: Tensor | float = 1.0
        fraction = part.numel() / form.first.numel()
        if fraction < 1.0:
            # With a scale per row, rows err by their own largest magnitude, which is known of all of them.
            self.row_sizes = row_amax.square()
            self.put("first.sample.row", mean(amaxes[Granularity.ROW].square()))
            by_size = ratio(mean(self.row_sizes), mean(amaxes[Granularity.ROW].square()))
        for shape, kind in _FIXED_POINT.items():
            noise = errors.stochastic[SCALED_KINDS.index(kind)]
            share = by_size if shape == Granularity.ROW else 1.0
            self.put(f"xw/first/{shape}", dot(form.first_by_contraction(noise), contracted_w2) / fraction * share)
            self.by_row[shape] = form.first_by_row(noise)

    def _second(self, form: MatrixForm, contracted_x2: Tensor) -> None:
        """Errors of the second operand, from some of its rows if it is a large weight."""
        part, rows = form.sample_second(self.sample)
        amaxes = self.amaxes("second", form.second, _slices(form, "second"))
        row_amax = amaxes[Granularity.ROW]
        if part.numel() < form.second.numel():
            amaxes[Granularity.ROW] = form.sampled_contraction(row_amax, rows)
        errors = stacked_errors(part, SCALED_KINDS, amaxes)
        self.add_errors("second", SCALED_KINDS, errors, part)
        sampled = part.numel() < form.second.numel()
        some_x2 = form.sampled_contraction(contracted_x2, rows)
        shares: dict[Granularity, Shares] = {}
        if sampled:
            shares, some = shares_of_weights(form, contracted_x2, row_amax, rows)
            self.put("second.sample.row", some)
        for shape, kind in _FIXED_POINT.items():
            noise = errors.stochastic[SCALED_KINDS.index(kind)]
            output, column = dot(some_x2, form.second_by_contraction(noise)), form.second_by_column(noise)
            if sampled:
                share, columns = shares[shape]
                output, column = output * share, column * columns
            self.put(f"xw/second/{shape}", output)
            self.by_column[shape] = column

    def output_gradient(self, g: Tensor) -> None:
        """The gradient of the result: completes what waits for it."""
        if not self._runs_backward_in_8_bits:
            self.add_tensor("output_gradient", g)
        if self.attention is not None:
            self._attention_errors(self.attention, g)
            self.attention = None
        if self.kind is OperatorKind.LOOKUP:
            rows = g.square().reshape(-1, g.shape[-1]).sum(1)
            self.put("xg/floating", total(rows if self.counted is None else rows[self.counted]))
        form: ProductForm | None = self.form if self.convolution is None else self.convolution.form
        if form is None:
            return
        gradient = form.result(g)
        trained = "second_gradient" in self.needs_gradient
        weight = len(self.parameters) > 1 and self.parameters[1] is not None and trained
        if self.convolution is not None:
            if weight:
                self._nearest(form, gradient)
            eight = self._runs_backward_in_8_bits
            self.elements["output_gradient"] = gradient.numel()
            self.convolution.add_gradient(gradient, trained=trained, rounded=eight)
        elif isinstance(form, MatrixForm):
            self._complete(form, gradient, weight=weight)

    def _nearest(self, form: ProductForm, g: Tensor) -> None:
        """What rounding to nearest does to a weight's gradient."""
        for name, value in weight_gradient_errors(form, g, self.loss_scale).items():
            self.put(f"nearest.{name}", value)

    def _attention_errors(self, attention: AttentionCall, g: Tensor) -> None:
        operands = [attention.query, attention.key, attention.value, g * self.loss_scale]
        if attention.mask is not None:
            operands.append(attention.mask)

        def measure(q: Tensor, k: Tensor, v: Tensor, g: Tensor, *mask: Tensor) -> tuple[tuple[str, ...], list[Tensor]]:
            call = dataclasses.replace(attention, query=q, key=k, value=v, mask=mask[0] if mask else None)
            errors = attention_errors(call, g)
            return tuple(errors), list(errors.values())

        key = ("attention", attention.is_causal, attention.scale, attention.repeats)
        for name, measured in zip(*self.replays(key, measure, *operands), strict=True):
            if self.loss_scale != 1.0:  # of the gradients' errors, not of the output's
                measured[1:] /= self.loss_scale**2
            self.numbers.append((tuple(f"measured.{name}.{target}" for target in ("output", *GRADIENTS)), measured))

    def _complete(self, form: MatrixForm, g: Tensor, *, weight: bool) -> None:
        """Let what waits for the gradient meet it; with a weight, the first operand too."""
        row, column = tuple(self.by_row), tuple(self.by_column)
        vectors = [*self.by_row.values(), *self.by_column.values()]
        sized, sampled = self.row_sizes is not None, self.sampled
        if self.row_sizes is not None:
            vectors.append(self.row_sizes)
        shapes = form.first.shape, form.second.shape
        operands = [form.first] if weight else []

        def meet(g: Tensor, *tensors: Tensor) -> tuple[_Labels, list[Tensor]]:
            scratch, nothing = self._scratch(), g.new_zeros(())  # otherwise the operands' shapes matter alone
            shape_only = dataclasses.replace(form, first=nothing.expand(shapes[0]), second=nothing.expand(shapes[1]))
            vectors = tensors[len(operands) :]
            if operands:
                scratch._nearest(dataclasses.replace(shape_only, first=tensors[0]), g)
            scratch.by_row = dict(zip(row, vectors, strict=False))
            scratch.by_column = dict(zip(column, vectors[len(row) :], strict=False))
            scratch.row_sizes, scratch.sampled = vectors[-1] if sized else None, sampled
            scratch._meet_gradient(shape_only, g)
            return scratch._packed()

        key = ("gradient", self.op_type, form.sizes, *shapes, row, column, sized, sampled.step, weight)
        self._unpack(*self.replays(key, meet, g, *operands, *vectors))
        self.form = self.row_sizes = None
        self.by_row.clear()
        self.by_column.clear()

    def _scratch(self) -> OperatorRecord:
        """A record of the same operator, empty."""
        return OperatorRecord(
            name=self.name,
            op_type=self.op_type,
            kind=self.kind,
            sample=self.sample,
            parameters=self.parameters,
            loss_scale=self.loss_scale,
        )

    def _packed(self) -> tuple[_Labels, list[Tensor]]:
        """What was measured, apart from its tensors: numbers of one type together, then what waits for the gradient."""
        names: list[tuple[str, ...]] = []
        tensors: list[Tensor] = []
        for dtype in dict.fromkeys(values.dtype for _, values in self.numbers):
            alike = [(keys, values) for keys, values in self.numbers if values.dtype is dtype]
            names.append(tuple(key for keys, _ in alike for key in keys))
            tensors.append(torch.cat([values for _, values in alike]))
        pending = [*self.by_row.values(), *self.by_column.values()]
        if self.row_sizes is not None:
            pending.append(self.row_sizes)
        labels = _Labels(
            names=tuple(names),
            elements=dict(self.elements),
            by_row=tuple(self.by_row),
            by_column=tuple(self.by_column),
            sized=self.row_sizes is not None,
            sampled=self.sampled,
        )
        return labels, [*tensors, *pending]

    def _unpack(self, labels: _Labels, tensors: Sequence[Tensor]) -> None:
        """Take over what a scratch record measured."""
        rest = iter(tensors)
        self.numbers.extend((names, next(rest)) for names in labels.names)
        self.elements |= labels.elements
        self.by_row = {shape: next(rest) for shape in labels.by_row}
        self.by_column = {shape: next(rest) for shape in labels.by_column}
        self.row_sizes, self.sampled = next(rest) if labels.sized else None, labels.sampled

    @property
    def _runs_backward_in_8_bits(self) -> bool:
        """Whether there are 8-bit kernels for its backward pass: of matrix products and convolutions."""
        return self.kind is OperatorKind.PRODUCT and "transpose" not in self.op_type

    def _meet_gradient(self, form: MatrixForm, g: Tensor) -> None:
        row_g2, column_g2 = reduced(form, g, torch.square)
        self.put("xg/floating", dot(self.by_row["floating"], row_g2))
        columns = torch.stack(tuple(self.by_column.values())) * column_g2
        names = tuple(f"gw/{shape}" for shape in self.by_column)
        self.numbers.append((names, summed(columns.flatten(1), 1)))
        self._meet_sample(form, row_g2)
        self._gradient_errors(form, g, row_g2)
        self.by_row, self.by_column, self.row_sizes = {}, {}, None

    def _meet_sample(self, form: MatrixForm, row_g2: Tensor) -> None:
        """Errors of sampled rows of the first operand times the gradient there."""
        some_g2 = form.sampled_rows(row_g2, self.sampled)
        even, by_size = outside_sample(form, self.row_sizes, self.sampled, row_g2)
        for shape in _FIXED_POINT:
            share = by_size if shape is Granularity.ROW else even
            self.put(f"xg/{shape}", dot(self.by_row[shape], some_g2) * share)

    def _gradient_errors(self, form: MatrixForm, g: Tensor, row_g2: Tensor) -> None:
        """What rounding the gradient does; in 8 bits it is quantized with one scale."""
        amax = torch.linalg.vector_norm(g, float("inf"))
        self.elements["output_gradient"] = g.numel()
        self.put("output_gradient.greatest", amax)
        self.put("output_gradient.square_sum", total(row_g2))
        self.put(f"output_gradient.amax.{Granularity.TENSOR}", amax.square())
        means, sums = matrix_gradient_errors(
            form,
            g,
            self.by_row["floating"],
            self.by_column["floating"],
            RESULT_KINDS,
            amax=amax,
            loss_scale=self.loss_scale,
        )
        names = tuple(f"output_gradient.{kind}.{rounding}" for rounding in Rounding for kind in RESULT_KINDS)
        self.numbers.append((names, means.flatten()))
        for name, value in sums.items():
            self.put(name, value)

    @property
    def lacks_gradient(self) -> bool:
        """True if a gradient could have come and none did; of what ran without gradients, none could."""
        return self.differentiated and bool(self.needs_gradient) and "output_gradient" not in self.elements


_TABLE_DIMS = {Granularity.CHANNEL: (0,), Granularity.ROW: (1,)}


def measure_lookup(record: OperatorRecord, table: Tensor, indices: Tensor, padding: int | None) -> None:
    """Everything about a lookup that its forward pass can tell: a product with a one-hot first operand."""
    size = ProductSizes(products=1, rows=indices.numel(), contraction=table.shape[0], columns=table.shape[1])
    record.products = (size,)
    one = torch.ones((), dtype=torch.float64, device=table.device)
    record.elements["first"] = size.rows * size.contraction
    record.put("first.greatest", one)
    record.put("first.square_sum", one * size.rows)
    for granularity in Granularity:
        record.put(f"first.amax.{granularity}", one)
    for rounding in Rounding:  # zeros and ones are exact in every format
        names = tuple(f"first.{kind}.{rounding}" for kind in SCALED_KINDS)
        record.numbers.append((names, one.new_zeros(len(names))))
    used = indices.reshape(-1)
    rows = table[used]
    record.put("xw/floating", total(rows.square()))
    record.put("second.norm", norm(table))
    amaxes = record.amaxes("second", table, _TABLE_DIMS)
    step = max(1, min(table.shape[0] // 8, table.numel() // record.sample))
    row_amax = amaxes[Granularity.ROW]
    some = amaxes | {Granularity.ROW: row_amax[::step]}
    record.add_errors("second", SCALED_KINDS, stacked_errors(table[::step], SCALED_KINDS, some), table[::step])
    if step > 1:
        record.put("second.sample.row", mean(some[Granularity.ROW].square()))
    step = max(1, rows.numel() // record.sample)
    used_amaxes = amaxes | {Granularity.ROW: row_amax[used[::step]]}
    errors = stacked_errors(rows[::step], INTEGER_KINDS, used_amaxes).stochastic
    totals = errors.flatten(1).sum(1, dtype=torch.float64) * (used.numel() / len(rows[::step]))
    record.numbers.append((tuple(f"xw/second/{kind.partition('/')[2]}" for kind in INTEGER_KINDS), totals))
    record.counted = None if padding is None else (used != padding)
