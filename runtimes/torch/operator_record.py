"""What one call of one operator leaves behind: scalars on the device, and small vectors until its gradient arrives.

Nothing of the size of an activation is kept beyond what autograd keeps anyway. All scalars of a call travel to the
host together, when the call's gradients are complete.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from qsync_opt.errors import ModelError
from qsync_opt.rounding import GRADIENT_KINDS, Granularity, Rounding, closed_form_variance, noise_kinds
from qsync_opt.runtimes.torch.attention_error import AttentionCall, attention_errors
from qsync_opt.runtimes.torch.product_calls import Product
from qsync_opt.runtimes.torch.product_forms import ProductForm
from qsync_opt.runtimes.torch.rounding_error import ElementErrors, cast_errors, kind_errors
from qsync_opt.statistics import (
    GRADIENTS,
    SHAPES,
    MeasuredErrors,
    OperatorKind,
    OperatorStatistics,
    ProductSizes,
    RoundingFactor,
    TensorStatistics,
)

_INTEGER_GRADIENT = GRADIENT_KINDS["INT8"]


def _total(x: Tensor) -> Tensor:
    return x.sum(dtype=torch.float64)


def _mean(x: Tensor) -> Tensor:
    return x.mean(dtype=torch.float64)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return _total(a * b)


def _strided(x: Tensor, limit: int) -> Tensor:
    """About ``limit`` evenly spaced elements."""
    flat = x.reshape(-1)
    return flat[:: max(1, flat.numel() // limit)]


def _slices(form: ProductForm, operand: str) -> dict[Granularity, tuple[int, ...]]:
    return {granularity: form.slice_dims(operand, granularity) for granularity in Granularity}


def _shape_of_kind(kind: str) -> str | None:
    """The alignment shape that a noise kind of an operand stands for."""
    name, _, granularity = kind.partition("/")
    return granularity if name == "INT8" else None


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
    scalars: dict[str, Tensor] = field(default_factory=dict)
    # Of a product, from its forward to its backward pass: per shape the reductions that wait for the gradient.
    form: ProductForm | None = None
    factor: float = 1.0
    by_row: dict[str, tuple[Tensor, slice]] = field(default_factory=dict)
    by_column: dict[str, Tensor] = field(default_factory=dict)
    fraction: float = 1.0
    sampled: slice = field(default_factory=lambda: slice(None))
    attention: AttentionCall | None = None
    # Of a lookup: which rows of the result count in the gradient of the table (all but those of padding).
    counted: Tensor | None = None

    # -- measuring -----------------------------------------------------------------------------------------------

    def moments(self, tensor: str, x: Tensor) -> None:
        """Largest magnitude and squared norm."""
        self.elements[tensor] = x.numel()
        self.scalars[f"{tensor}.amax"] = torch.maximum(x.amax(), -x.amin()).to(torch.float64)
        self.scalars[f"{tensor}.square_sum"] = _total(x.square())

    def plain(self, tensor: str, x: Tensor) -> None:
        """Moments and cast errors of a tensor that is no operand."""
        self.moments(tensor, x)
        part = _strided(x, self.sample)
        for kind in noise_kinds(scaled=False):
            self._errors(tensor, kind, cast_errors(part, kind), part)

    def _errors(self, tensor: str, kind: str, errors: ElementErrors, part: Tensor) -> None:
        """Mean errors of a tensor from those of a part of it.

        Floating formats err in proportion to the square, so that a few large elements may hold most of the error: the
        part's error is scaled from its mean square to that of the tensor.
        """
        share: Tensor | float = 1.0
        if part.numel() < self.elements[tensor] and _shape_of_kind(kind) is None:
            own = _mean(part.square())
            whole = self.scalars[f"{tensor}.square_sum"] / self.elements[tensor]
            share = torch.where(own > 0, whole / own.clamp(min=torch.finfo(torch.float64).tiny), 1.0)
        self.scalars[f"{tensor}.{kind}.stochastic"] = _mean(errors.stochastic) * share
        self.scalars[f"{tensor}.{kind}.nearest"] = _mean(errors.nearest) * share

    def _amaxes(self, tensor: str, x: Tensor, dims: dict[Granularity, tuple[int, ...]]) -> dict[Granularity, Tensor]:
        amaxes = {}
        for granularity in Granularity:
            amax = x.abs().amax(dims[granularity], keepdim=True)
            self.scalars[f"{tensor}.amax.{granularity}"] = _mean(amax.square())
            amaxes[granularity] = amax
        return amaxes

    def product(self, product: Product) -> None:
        """Everything about the operands of a bilinear operator that its forward pass can tell."""
        form, self.factor = product
        self.form, self.products = form, (form.sizes,)
        x2, w2 = form.first.square(), form.second.square()
        contracted_x2, contracted_w2 = form.first_by_contraction(x2), form.second_by_contraction(w2)
        self.scalars["xw/floating"] = _dot(contracted_x2, contracted_w2)
        part, rows = form.sample(self.sample)
        self.fraction, self.sampled = part.numel() / form.first.numel(), rows
        self.by_row["floating"] = (form.first_by_row(x2), slice(None))
        self.by_column["floating"] = form.second_by_column(w2)

        self.moments("first", form.first)
        amaxes = self._amaxes("first", form.first, _slices(form, "first"))
        amaxes[Granularity.ROW] = form.sampled_rows(amaxes[Granularity.ROW], rows)
        for kind in noise_kinds(scaled=True):
            errors = kind_errors(part, kind, amaxes)
            self._errors("first", kind, errors, part)
            shape = _shape_of_kind(kind)
            if shape:
                self.scalars[f"xw/first/{shape}"] = _dot(form.first_by_contraction(errors.stochastic), contracted_w2)
                self.by_row[shape] = (form.first_by_row(errors.stochastic), rows)

        self.moments("second", form.second)
        amaxes = self._amaxes("second", form.second, _slices(form, "second"))
        for kind in noise_kinds(scaled=True):
            errors = kind_errors(form.second, kind, amaxes)
            self._errors("second", kind, errors, form.second)
            shape = _shape_of_kind(kind)
            if shape:
                self.scalars[f"xw/second/{shape}"] = _dot(contracted_x2, form.second_by_contraction(errors.stochastic))
                self.by_column[shape] = form.second_by_column(errors.stochastic)

    def lookup(self, table: Tensor, indices: Tensor, padding: int | None) -> None:
        """Everything about a lookup that its forward pass can tell: a product with a one-hot first operand."""
        size = ProductSizes(products=1, rows=indices.numel(), contraction=table.shape[0], columns=table.shape[1])
        self.products = (size,)
        one = torch.ones((), dtype=torch.float64, device=table.device)
        self.elements["first"] = size.rows * size.contraction
        self.scalars["first.amax"] = one
        self.scalars["first.square_sum"] = one * size.rows
        for granularity in Granularity:
            self.scalars[f"first.amax.{granularity}"] = one
        for kind in noise_kinds(scaled=True):  # zeros and ones are exact in every format
            self.scalars[f"first.{kind}.stochastic"] = self.scalars[f"first.{kind}.nearest"] = one * 0
        used = indices.reshape(-1)
        self.scalars["xw/floating"] = _total(table.square().sum(1)[used])
        self.moments("second", table)
        dims = {Granularity.TENSOR: (0, 1), Granularity.CHANNEL: (0,), Granularity.ROW: (1,)}
        amaxes = self._amaxes("second", table, dims)
        for kind in noise_kinds(scaled=True):
            errors = kind_errors(table, kind, amaxes)
            self._errors("second", kind, errors, table)
            shape = _shape_of_kind(kind)
            if shape:
                self.scalars[f"xw/second/{shape}"] = _total(errors.stochastic.sum(1)[used])
        self.counted = None if padding is None else (used != padding)

    def output(self, z: Tensor) -> None:
        """The result."""
        self.plain("output", z)

    def output_gradient(self, g: Tensor) -> None:
        """The gradient of the result: completes what waits for it."""
        self.plain("output_gradient", g)
        if self._runs_backward_in_8_bits:
            # It is quantized with one scale there.
            amax = torch.maximum(g.amax(), -g.amin())
            self.scalars[f"output_gradient.amax.{Granularity.TENSOR}"] = amax.to(torch.float64).square()
            part = _strided(g, self.sample)
            for kind in GRADIENT_KINDS.values():
                self._errors("output_gradient", kind, kind_errors(part, kind, {Granularity.TENSOR: amax}), part)
        if self.attention is not None:
            for name, errors in attention_errors(self.attention, g).items():
                for target, error in zip(("output", *GRADIENTS), errors, strict=True):
                    self.scalars[f"measured.{name}.{target}"] = error
            self.attention = None
        if self.kind is OperatorKind.LOOKUP:
            rows = g.square().reshape(-1, g.shape[-1]).sum(1)
            self.scalars["xg/floating"] = _total(rows if self.counted is None else rows[self.counted])
        if self.form is not None:
            self._meet_gradient(self.form, self.form.result(g))

    @property
    def _runs_backward_in_8_bits(self) -> bool:
        """Whether there are 8-bit kernels for its backward pass: of matrix products and convolutions."""
        return self.kind is OperatorKind.PRODUCT and "transpose" not in self.op_type

    def _meet_gradient(self, form: ProductForm, g: Tensor) -> None:
        g2 = g.square()
        row_g2, column_g2 = form.result_by_row(g2), form.result_by_column(g2)
        for shape, (reduced, rows) in self.by_row.items():
            self.scalars[f"xg/{shape}"] = _dot(reduced, form.sampled_rows(row_g2, rows))
        for shape, reduced in self.by_column.items():
            self.scalars[f"gw/{shape}"] = _dot(reduced, column_g2)
        if self.fraction < 1.0:
            # A few rows may hold most of the gradient: what it is in the sampled rows and in all, under even noise.
            rows = self.sampled
            window = form.first_by_row(torch.ones_like(form.first))
            self.scalars["g/all"] = _dot(window, row_g2)
            self.scalars["g/sampled"] = _dot(form.sampled_rows(window, rows), form.sampled_rows(row_g2, rows))
        if self._runs_backward_in_8_bits:
            errors = kind_errors(g, _INTEGER_GRADIENT, {Granularity.TENSOR: g.abs().amax()}).stochastic
            self.scalars["gradient_error"] = _mean(errors)
            self.scalars["xg/gradient"] = _dot(self.by_row["floating"][0], form.result_by_row(errors))
            self.scalars["gw/gradient"] = _dot(self.by_column["floating"], form.result_by_column(errors))
        self.form = None
        self.by_row.clear()
        self.by_column.clear()

    # -- finishing -----------------------------------------------------------------------------------------------

    @property
    def lacks_gradient(self) -> bool:
        """True if a gradient could have come and none did."""
        return bool(self.needs_gradient) and "output_gradient" not in self.elements

    def values(self, batch: int) -> dict[str, float]:
        """All scalars on the host.

        Raises:
            ModelError: One of them is not finite; the text names operator, tensor and batch.
        """
        if not self.scalars:
            return {}
        host = torch.stack(list(self.scalars.values())).tolist()
        values = dict(zip(self.scalars, host, strict=True))
        for key, value in sorted(values.items(), key=lambda item: "/" in item[0]):  # tensors before sums over two
            if not -float("inf") < value < float("inf"):
                tensor = key.partition(".")[0].replace("_", " ")
                raise ModelError(
                    f"operator {self.name!r}: {tensor} is not finite in batch {batch}; "
                    "statistics need finite values in full precision; check the batch, the loss and the weights"
                )
        return values

    def finish(self, batch: int) -> OperatorStatistics:
        """Statistics of the call; gradients that never came are zero.

        Args:
            batch: Number of the batch, for error texts.

        Raises:
            ModelError: A value is not finite.
        """
        for name, size in self.needs_gradient.items():
            self.elements.setdefault(name, size)
        self.elements.setdefault("output_gradient", self.elements["output"])
        values = self.values(batch)
        tensors: dict[str, Any] = {name: _tensor_statistics(name, size, values) for name, size in self.elements.items()}
        return OperatorStatistics(
            name=self.name,
            op_type=self.op_type,
            kind=self.kind,
            calls=1,
            products=self.products,
            first_parameter=self.parameters[0],
            second_parameter=self.parameters[1],
            alignment={} if self.kind is OperatorKind.ATTENTION else self._alignment(tensors, values),
            measured=_measured(values),
            **tensors,
        )

    def _alignment(self, tensors: dict[str, TensorStatistics], values: dict[str, float]) -> dict[str, float]:
        sizes = self.products[0]
        squares = {name: tensors[name].mean_square for name in ("first", "second", "output_gradient")}
        square = self.factor**2

        def ratio(key: str, *means: float, fraction: float = 1.0) -> float:
            scale = sizes.volume * fraction
            for mean in means:
                scale *= mean
            return square * values.get(key, 0.0) / scale if scale else 0.0

        sampled = self.fraction
        if values.get("g/sampled", 0.0) > 0:
            sampled = values["g/sampled"] / values["g/all"]
        found = {}
        for shape in SHAPES:
            noise = {
                name: squares[name] if shape == "floating" else values.get(f"{name}.INT8/{shape}.stochastic", 0.0)
                for name in ("first", "second")
            }
            part = 1.0 if shape == "floating" else self.fraction
            first, second = (
                (("xw/floating",) * 2) if shape == "floating" else (f"xw/first/{shape}", f"xw/second/{shape}")
            )
            found[f"first>output/{shape}"] = ratio(first, noise["first"], squares["second"], fraction=part)
            found[f"second>output/{shape}"] = ratio(second, noise["second"], squares["first"])
            found[f"first>second_gradient/{shape}"] = ratio(
                f"xg/{shape}",
                noise["first"],
                squares["output_gradient"],
                fraction=1.0 if shape == "floating" else sampled,
            )
            found[f"second>first_gradient/{shape}"] = ratio(f"gw/{shape}", noise["second"], squares["output_gradient"])
        # Both ends of these paths are squares: the same sum, whichever of the two is noisy.
        found["gradient>second_gradient/floating"] = found["first>second_gradient/floating"]
        found["gradient>first_gradient/floating"] = found["second>first_gradient/floating"]
        if "gradient_error" in values:
            error = values["gradient_error"]
            found["gradient>second_gradient/tensor"] = ratio("xg/gradient", squares["first"], error)
            found["gradient>first_gradient/tensor"] = ratio("gw/gradient", squares["second"], error)
        return found


def _tensor_statistics(name: str, elements: int, values: dict[str, float]) -> TensorStatistics:
    square_sum = values.get(f"{name}.square_sum", 0.0)
    amaxes = {str(g): values[f"{name}.amax.{g}"] for g in Granularity if f"{name}.amax.{g}" in values}
    factors = {}
    for kind in dict.fromkeys((*noise_kinds(scaled=bool(amaxes)), *GRADIENT_KINDS.values())):
        if f"{name}.{kind}.nearest" not in values:
            continue
        ratios = {}
        for rounding in Rounding:
            closed = closed_form_variance(kind, rounding, mean_square=square_sum / elements, mean_square_amax=amaxes)
            ratios[str(rounding)] = values[f"{name}.{kind}.{rounding}"] / closed if closed else 0.0
        factors[kind] = RoundingFactor(**ratios)
    return TensorStatistics(
        elements=elements,
        amax=values.get(f"{name}.amax", 0.0),
        square_sum=square_sum,
        mean_square_amax=amaxes,
        rounding=factors,
    )


def _measured(values: dict[str, float]) -> dict[str, MeasuredErrors]:
    formats = dict.fromkeys(key.split(".")[1] for key in values if key.startswith("measured."))
    return {
        name: MeasuredErrors(**{target: values[f"measured.{name}.{target}"] for target in ("output", *GRADIENTS)})
        for name in formats
    }
