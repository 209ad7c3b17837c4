"""The record of one call of an operator: scalars on the device, and small vectors until its gradient arrives.

It keeps nothing of an activation's size beyond what autograd keeps. All scalars of a batch go to the host together.
Moments and reductions take all elements; rounding errors are computed for a sample of them.
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
    attention_errors,
    rounding_errors,
    weight_gradient_errors,
)
from qsync_opt.runtimes.torch.sensitivity.products import ConvolutionForm, MatrixForm, Product, ProductForm
from qsync_opt.runtimes.torch.sensitivity.records.convolution import ConvolutionRecord
from qsync_opt.runtimes.torch.sensitivity.records.moments import MomentQueue, add_moments, moment_receiver
from qsync_opt.runtimes.torch.sensitivity.records.summary import INTEGER_KINDS, RESULT_KINDS, SCALED_KINDS
from qsync_opt.runtimes.torch.sensitivity.reductions import (
    dot,
    mean,
    norm,
    ratio,
    reduce_result,
    strided,
    summed,
    total,
)
from qsync_opt.runtimes.torch.sensitivity.replays import Replays
from qsync_opt.runtimes.torch.sensitivity.samples import SizedRuns, even_runs, runs_by_size
from qsync_opt.sensitivity import GRADIENTS, OperatorKind, ProductSizes

Scales = tuple[Tensor | float, Tensor | float]


def _weight_sample_scales(
    contracted_x2: Tensor, row_amax: Tensor, rows: slice
) -> tuple[dict[Granularity, Scales], Tensor]:
    """Factors from sums over sampled rows of the second operand to sums over all: for the output and for a column.

    With a scale per row, a row's error grows with its largest magnitude, which is known for all rows.

    Args:
        contracted_x2: Squares of the first operand, reduced by contraction.
        row_amax: Largest magnitude of every row of the second operand.
        rows: The sampled rows.

    Returns:
        The factors by granularity, and the mean square of the sampled rows' largest magnitudes.
    """
    some_x2 = contracted_x2[:, rows]
    even = contracted_x2.numel() / some_x2.numel()
    sizes = row_amax.square().reshape(contracted_x2.shape)
    some_sizes = sizes[:, rows]
    whole, some = mean(sizes), mean(some_sizes)
    scales: dict[Granularity, Scales] = dict.fromkeys(Granularity, (ratio(total(contracted_x2), total(some_x2)), even))
    by_size = ratio(dot(contracted_x2, sizes), dot(some_x2, some_sizes))
    scales[Granularity.ROW] = by_size, ratio(whole, some) * even
    return scales, some


def _row_sample_scales(form: MatrixForm, row_sizes: Tensor | None, sampled: slice, row_g2: Tensor) -> Scales:
    """Factors from sums over sampled rows to sums over all: for even noise, and for noise by the rows' magnitudes.

    They correct for the part of the gradient in the sampled rows, as a few rows may hold most of it.

    Args:
        form: The form of the product.
        row_sizes: Squared largest magnitude of every row of the first operand; None without sampling.
        sampled: The sampled rows.
        row_g2: Squares of the gradient, reduced by row.
    """
    if row_sizes is None:
        return 1.0, 1.0
    some_g2 = row_g2[:, sampled]
    scales = []
    for noise in (torch.ones_like(form.first), row_sizes.expand_as(form.first)):
        window = form.first_by_row(noise)
        scales.append(ratio(dot(window, row_g2), dot(window[:, sampled], some_g2)))
    return scales[0], scales[1]


def _gradient_errors(
    form: MatrixForm, g: Tensor, amax: Tensor, loss_scale: float
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Errors of rounding the gradient of the result, from all of its elements, as a few may hold most of it.

    Returns:
        Mean errors by rounding and kind, (2, kinds), and INT8's errors reduced by row and by column.
    """
    amaxes = {Granularity.TENSOR: amax * loss_scale}
    totals: list[Tensor] = []

    def integer_errors(part: Tensor) -> Tensor:
        errors = rounding_errors(part if loss_scale == 1.0 else part * loss_scale, RESULT_KINDS, amaxes)
        totals.append(summed(errors.flatten(2), 2))
        errors_8bit = errors[0, RESULT_KINDS.index(GRADIENT_KINDS["INT8"])]
        return errors_8bit if loss_scale == 1.0 else errors_8bit / loss_scale**2

    reductions = reduce_result(form, g, integer_errors)
    means = (totals[0] if len(totals) == 1 else torch.stack(totals).sum(0)) / (g.numel() * loss_scale**2)
    return means, reductions


_FIXED_POINT = {Granularity(kind.partition("/")[2]): kind for kind in INTEGER_KINDS}
_SAMPLE = 1 << 15
"""Sample size, at most, of a tensor that is no operand."""


def _slices(form: ProductForm, operand: str) -> dict[Granularity, tuple[int, ...]]:
    return {granularity: form.slice_dims(operand, granularity) for granularity in Granularity}


class _Labels(NamedTuple):
    """The measurements of a record apart from tensors; the same for all operators of one shape."""

    names: tuple[tuple[str, ...], ...]
    elements: dict[str, int]
    by_row: tuple[str, ...]
    by_column: tuple[str, ...]
    sized: bool
    sampled: slice


@dataclass(slots=True, kw_only=True)
class OperatorRecord:
    """The measurements of one call. ``sample`` bounds the elements whose rounding errors are computed."""

    name: str
    op_type: str
    kind: OperatorKind
    sample: int
    parameters: tuple[str | None, ...]
    products: tuple[ProductSizes, ...] = ()
    needs_gradient: dict[str, int] = field(default_factory=dict)
    """Elements of each operand that gets a gradient, by the gradient's name."""
    elements: dict[str, int] = field(default_factory=dict)
    numbers: list[tuple[tuple[str, ...], Tensor]] = field(default_factory=list)
    """Names and values, on the device until ``finish_batch``."""
    pending: list[tuple[str, Tensor | SizedRuns]] = field(default_factory=list)
    """Samples of tensors that are no operands, until `cast_pending`."""
    # Of a product, from its forward to its backward pass: reductions of squares and, per granularity, of errors.
    form: ProductForm | None = None
    factor: float = 1.0
    loss_scale: float = 1.0
    """Factor of gradients while they are rounded to 16 bits."""
    by_row: dict[str, Tensor] = field(default_factory=dict)
    by_column: dict[str, Tensor] = field(default_factory=dict)
    convolution: ConvolutionRecord | None = None
    """Of a convolution, instead of the form."""
    differentiated: bool = False
    """Whether autograd records the call."""
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
        """Record one number."""
        self.numbers.append(((name,), value.reshape(1)))

    def moments(self, tensor: str, x: Tensor, root: Tensor | None = None) -> None:
        """Record largest magnitude and norm; ``root`` is the norm if it is known."""
        self.elements[tensor] = x.numel()
        queue = self.queue if tensor in GRADIENTS else None
        add_moments(queue, x, moment_receiver(tensor, self.numbers), root=root is None)
        if root is not None:
            self.put(f"{tensor}.norm", root)

    def add_tensor(self, tensor: str, x: Tensor, root: Tensor | None = None) -> None:
        """Record moments of a tensor that is no operand, and sample elements for its cast errors.

        Gradients of a convolution concentrate on few positions, so their elements are sampled by size.
        """
        some = min(self.sample, _SAMPLE)
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

    def add_errors(self, tensor: str, kinds: tuple[str, ...], errors: Tensor, part: Tensor) -> None:
        """Record mean errors of a part of a tensor, and its mean square.

        Errors of floating formats grow with the square of the element, so a few large ones may hold most of the error:
        the part's error is scaled from its mean square to that of the tensor.
        """
        for rounding, values in zip(Rounding, errors, strict=True):
            names = tuple(f"{tensor}.{kind}.{rounding}" for kind in kinds)
            self.numbers.append((names, values.flatten(1).mean(1)))
        if part.numel() < self.elements[tensor]:
            self.put(f"{tensor}.sample.square", mean(part.square()))

    def amaxes(self, tensor: str, x: Tensor, dims: Mapping[Granularity, tuple[int, ...]]) -> dict[Granularity, Tensor]:
        """Record and return the largest magnitude of every slice, per granularity."""
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
        """Measure the operands of a bilinear operator.

        The first operand of a convolution is measured when the gradient arrives, if autograd keeps it until then.
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
        amaxes[Granularity.ROW] = row_amax[:, rows]
        errors = rounding_errors(part, SCALED_KINDS, amaxes)
        self.add_errors("first", SCALED_KINDS, errors, part)
        by_size: Tensor | float = 1.0
        fraction = part.numel() / form.first.numel()
        if fraction < 1.0:
            self.row_sizes = row_amax.square()
            self.put("first.sample.row", mean(amaxes[Granularity.ROW].square()))
            by_size = ratio(mean(self.row_sizes), mean(amaxes[Granularity.ROW].square()))
        for shape, kind in _FIXED_POINT.items():
            noise = errors[0, SCALED_KINDS.index(kind)]
            share = by_size if shape == Granularity.ROW else 1.0
            self.put(f"xw/first/{shape}", dot(form.first_by_contraction(noise), contracted_w2) / fraction * share)
            self.by_row[shape] = form.first_by_row(noise)

    def _second(self, form: MatrixForm, contracted_x2: Tensor) -> None:
        """Errors of the second operand, from some of its rows if it is a large weight."""
        part, rows = form.sample_second(self.sample)
        sampled = part.numel() < form.second.numel()
        amaxes = self.amaxes("second", form.second, _slices(form, "second"))
        row_amax = amaxes[Granularity.ROW]
        if sampled:
            amaxes[Granularity.ROW] = row_amax[:, rows]
        errors = rounding_errors(part, SCALED_KINDS, amaxes)
        self.add_errors("second", SCALED_KINDS, errors, part)
        some_x2 = contracted_x2[:, rows]
        scales: dict[Granularity, Scales] = {}
        if sampled:
            scales, some = _weight_sample_scales(contracted_x2, row_amax, rows)
            self.put("second.sample.row", some)
        for shape, kind in _FIXED_POINT.items():
            noise = errors[0, SCALED_KINDS.index(kind)]
            output, column = dot(some_x2, form.second_by_contraction(noise)), form.second_by_column(noise)
            if sampled:
                output_scale, column_scale = scales[shape]
                output, column = output * output_scale, column * column_scale
            self.put(f"xw/second/{shape}", output)
            self.by_column[shape] = column

    def output_gradient(self, g: Tensor) -> None:
        """Measure the gradient of the result, and complete what needs it."""
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
        """Error of a weight's gradient from rounding to nearest."""
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
        """Measure the gradient with the reductions of the operands; of a weight, with the first operand itself too."""
        row, column = tuple(self.by_row), tuple(self.by_column)
        vectors = [*self.by_row.values(), *self.by_column.values()]
        sized, sampled = self.row_sizes is not None, self.sampled
        if self.row_sizes is not None:
            vectors.append(self.row_sizes)
        shapes = form.first.shape, form.second.shape
        operands = [form.first] if weight else []

        def measure(g: Tensor, *tensors: Tensor) -> tuple[_Labels, list[Tensor]]:
            scratch, nothing = self._scratch(), g.new_zeros(())  # for operands of which only the shape matters
            shape_only = dataclasses.replace(form, first=nothing.expand(shapes[0]), second=nothing.expand(shapes[1]))
            vectors = tensors[len(operands) :]
            if operands:
                scratch._nearest(dataclasses.replace(shape_only, first=tensors[0]), g)
            scratch.by_row = dict(zip(row, vectors, strict=False))
            scratch.by_column = dict(zip(column, vectors[len(row) :], strict=False))
            scratch.row_sizes, scratch.sampled = vectors[-1] if sized else None, sampled
            scratch._measure_gradient(shape_only, g)
            return scratch._packed()

        key = ("gradient", self.op_type, form.sizes, *shapes, row, column, sized, sampled.step, weight)
        self._unpack(*self.replays(key, measure, g, *operands, *vectors))
        self.form = self.row_sizes = None
        self.by_row.clear()
        self.by_column.clear()

    def _scratch(self) -> OperatorRecord:
        """An empty record of the same operator."""
        return OperatorRecord(
            name=self.name,
            op_type=self.op_type,
            kind=self.kind,
            sample=self.sample,
            parameters=self.parameters,
            loss_scale=self.loss_scale,
        )

    def _packed(self) -> tuple[_Labels, list[Tensor]]:
        """Labels of the measurements, and their tensors: numbers joined by type, then reductions."""
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
        """Take over the measurements of a scratch record."""
        rest = iter(tensors)
        self.numbers.extend((names, next(rest)) for names in labels.names)
        self.elements |= labels.elements
        self.by_row = {shape: next(rest) for shape in labels.by_row}
        self.by_column = {shape: next(rest) for shape in labels.by_column}
        self.row_sizes, self.sampled = next(rest) if labels.sized else None, labels.sampled

    @property
    def _runs_backward_in_8_bits(self) -> bool:
        """Whether there are 8-bit kernels for its backward pass."""
        return self.kind is OperatorKind.PRODUCT and "transpose" not in self.op_type

    def _measure_gradient(self, form: MatrixForm, g: Tensor) -> None:
        row_g2, column_g2 = reduce_result(form, g, torch.square)
        self.put("xg/floating", dot(self.by_row["floating"], row_g2))
        columns = torch.stack(tuple(self.by_column.values())) * column_g2
        names = tuple(f"gw/{shape}" for shape in self.by_column)
        self.numbers.append((names, summed(columns.flatten(1), 1)))
        even, by_size = _row_sample_scales(form, self.row_sizes, self.sampled, row_g2)
        some_g2 = row_g2[:, self.sampled]
        for shape in _FIXED_POINT:
            scale = by_size if shape is Granularity.ROW else even
            self.put(f"xg/{shape}", dot(self.by_row[shape], some_g2) * scale)
        self._add_gradient_errors(form, g, row_g2)
        self.by_row, self.by_column, self.row_sizes = {}, {}, None

    def _add_gradient_errors(self, form: MatrixForm, g: Tensor, row_g2: Tensor) -> None:
        """Errors of rounding the gradient; in 8 bits it has one scale."""
        amax = torch.linalg.vector_norm(g, float("inf"))
        self.elements["output_gradient"] = g.numel()
        self.put("output_gradient.greatest", amax)
        self.put("output_gradient.square_sum", total(row_g2))
        self.put(f"output_gradient.amax.{Granularity.TENSOR}", amax.square())
        means, (rows, columns) = _gradient_errors(form, g, amax, self.loss_scale)
        names = tuple(f"output_gradient.{kind}.{rounding}" for rounding in Rounding for kind in RESULT_KINDS)
        self.numbers.append((names, means.flatten()))
        self.put("xg/gradient", dot(self.by_row["floating"], rows))
        self.put("gw/gradient", dot(self.by_column["floating"], columns))

    @property
    def lacks_gradient(self) -> bool:
        """True if a gradient was expected and none came."""
        return self.differentiated and bool(self.needs_gradient) and "output_gradient" not in self.elements


_TABLE_DIMS = {Granularity.CHANNEL: (0,), Granularity.ROW: (1,)}


def measure_lookup(record: OperatorRecord, table: Tensor, indices: Tensor, padding: int | None) -> None:
    """Measure the operands of a lookup: a product with a one-hot first operand."""
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
    record.add_errors("second", SCALED_KINDS, rounding_errors(table[::step], SCALED_KINDS, some), table[::step])
    if step > 1:
        record.put("second.sample.row", mean(some[Granularity.ROW].square()))
    step = max(1, rows.numel() // record.sample)
    used_amaxes = amaxes | {Granularity.ROW: row_amax[used[::step]]}
    errors = rounding_errors(rows[::step], INTEGER_KINDS, used_amaxes)[0]
    totals = errors.flatten(1).sum(1, dtype=torch.float64) * (used.numel() / len(rows[::step]))
    record.numbers.append((tuple(f"xw/second/{kind.partition('/')[2]}" for kind in INTEGER_KINDS), totals))
    record.counted = None if padding is None else (used != padding)
