"""Statistics of every operator, measured in a few full-precision training steps, and the file that holds them.

The tensors of an operator are named by their place in the product ``output = first x second``: ``first`` (activation),
``second`` (weight, or the second activation), ``third`` (attention's values only), ``output``, ``output_gradient``
(gradient of the loss with respect to the output) and ``first_gradient``, ``second_gradient``, ``third_gradient``
(what *this* operator contributes to the gradients of its operands, before accumulation).
"""

from __future__ import annotations

import enum
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any

from qsync_opt.errors import ProblemError
from qsync_opt.io import Json, check_fields, check_number, decode, encode, freeze, read_json, write_json
from qsync_opt.numerics import CAST_FORMATS, GRADIENT_KINDS, Granularity, Rounding, closed_form_variance, noise_kinds

_AGAIN = "; or collect the statistics again"
_Positive = Annotated[int, Json(minimum=1)]
_AnySign = Annotated[float, Json(minimum=-(10**308))]


class _Numbers:
    """Base of statistics whose integers and numbers are checked when they are built."""

    __slots__ = ()

    def __post_init__(self) -> None:
        try:
            check_fields(self, type(self).__name__)
        except ProblemError as failure:
            raise ProblemError(f"{failure}{_AGAIN}") from None


def _check_table(table: Mapping[str, Any], allowed: Iterable[str], what: str) -> None:
    names = tuple(allowed)
    for key, value in table.items():
        if key not in names:
            raise ProblemError(f"{what}: unknown key {key!r}: allowed are {', '.join(names)}")
        if not isinstance(value, _Numbers):
            check_number(value, f"{what}: {key}")


def check_loss_scale(value: float, what: str) -> None:
    """Check that a loss scale is a power of two of at least 1, which leaves the digits of gradients as they are.

    Raises:
        ProblemError: It is not.
    """
    check_number(value, what)
    if value < 1 or math.frexp(value)[0] != 0.5:
        raise ProblemError(f"{what} is {value!r}: a power of two of at least 1 is needed, such as 65536")


class OperatorKind(enum.StrEnum):
    """Formula that an operator's noise follows."""

    PRODUCT = "product"
    """Bilinear in two operands: linear, convolution, matrix products, einsum."""
    LOOKUP = "lookup"
    """Embedding: a product whose first operand is one-hot, hence exact."""
    ATTENTION = "attention"
    """Scaled dot-product attention: two products around a softmax; its errors are measured, not derived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundingFactor(_Numbers):
    """Measured mean squared rounding error, as a multiple of the closed form in ``qsync_opt.numerics``.

    1 for elements spread evenly over many steps; below 1 for zeros and elements far smaller than one step; far above 1
    for elements that are subnormal in a float format, or flushed to zero.
    """

    stochastic: float
    nearest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStatistics(_Numbers):
    """Moments of one tensor in one call, averaged over calls and batches (``amax``: the largest of all).

    ``square_sum`` is the squared Frobenius norm. ``mean_square_amax`` maps granularity to the mean over slices of the
    squared largest magnitude, so that the mean squared scale of INT8 is that value over 127 squared; it is empty for
    tensors that are never quantized with a scale. ``rounding`` maps a noise kind to its measured factor.
    """

    elements: _Positive
    amax: float
    square_sum: float
    mean_square_amax: Mapping[str, float] = field(default_factory=dict)
    rounding: Mapping[str, RoundingFactor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _Numbers.__post_init__(self)
        freeze(self, "mean_square_amax", "rounding")

    def check_keys(self, what: str) -> None:
        """Refuse unknown granularities and kinds of rounding; ``what`` names the tensor."""
        scaled = bool(self.mean_square_amax)
        kinds = dict.fromkeys((*noise_kinds(scaled=scaled), *(GRADIENT_KINDS.values() if scaled else ())))
        _check_table(self.mean_square_amax, Granularity, f"{what}: mean_square_amax")
        _check_table(self.rounding, kinds, f"{what}: rounding")

    @property
    def mean_square(self) -> float:
        """Mean square of the elements."""
        return self.square_sum / self.elements

    def variance(self, kind: str | None, rounding: Rounding) -> float:
        """Mean squared rounding error per element: the closed form times the measured factor.

        ``kind`` is one of ``noise_kinds``; None means not rounded at all.
        """
        if kind is None:
            return 0.0
        closed = closed_form_variance(
            kind, rounding, mean_square=self.mean_square, mean_square_amax=self.mean_square_amax
        )
        factor = self.rounding.get(kind)
        if factor is None:
            return closed
        return closed * (factor.stochastic if rounding is Rounding.STOCHASTIC else factor.nearest)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductSizes(_Numbers):
    """``products`` independent products of an (N, K) by a (K, M) matrix.

    ``rows`` is N, ``contraction`` K, ``columns`` M. A convolution counts as the product of im2col: one per group,
    N = batch times output positions, K = input channels per group times kernel size, M = output channels per group. A
    transposed convolution counts as the product whose columns col2im adds up: N = batch times *input* positions,
    K = input channels per group, M = output channels per group times kernel size.
    """

    products: _Positive
    rows: _Positive
    contraction: _Positive
    columns: _Positive

    @property
    def volume(self) -> int:
        """Scalar multiplications in all products."""
        return self.products * self.rows * self.contraction * self.columns


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredErrors(_Numbers):
    """Squared errors of one operator when it runs in a format, summed over the elements of each result."""

    output: float
    first_gradient: float
    second_gradient: float
    third_gradient: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain(_Numbers):
    """How strongly noise on one tensor of an operator perturbs the gradient of all parameters.

    Noise of variance v per element adds ``gain * v`` to the variance of the gradient, summed over all parameters.
    ``uniform`` holds for fixed-point noise, whose variance is the same on every element except those near or below one
    step; ``floating`` for noise proportional to the element's square (floating point), with mean v. Sign changes of
    rectifiers and changed maxima of max-pools are added separately (``Signal.flips``).
    """

    uniform: float
    floating: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Curvature(_Numbers):
    """Trace of the loss's Hessian over one tensor of an operator, by Hutchinson's estimator; may be negative.

    To second order, noise of variance v per element raises the expected loss by ``uniform * v / 2`` if it is equal on
    every element, and by ``floating * v / 2`` if it is proportional to the element's square, with mean v.
    """

    uniform: _AnySign
    floating: _AnySign


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientNoise(_Numbers):
    """Scatter of one worker's gradient from batch to batch, without any rounding.

    ``mean_square_norm`` is the mean over batches of the squared norm of the whole gradient; ``variance`` the unbiased
    estimate of its variance, summed over all parameters.
    """

    mean_square_norm: float
    variance: float


# An alignment is named "path/shape", with the path "noisy tensor>target". Noise of shape "floating" is proportional to
# the element's square; the others are INT8 noise with one scale per tensor, channel or row.
PATHS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "first>output": ("first", "second"),
        "second>output": ("second", "first"),
        "first>second_gradient": ("first", "output_gradient"),
        "gradient>second_gradient": ("output_gradient", "first"),
        "second>first_gradient": ("second", "output_gradient"),
        "gradient>first_gradient": ("output_gradient", "second"),
    }
)
"""Paths with the noisy tensor and the tensor that multiplies its noise."""
SHAPES: tuple[str, ...] = ("floating", *Granularity)
OPERANDS: tuple[str, ...] = ("first", "second", "third")
GRADIENTS: tuple[str, ...] = ("first_gradient", "second_gradient", "third_gradient")
TENSORS: tuple[str, ...] = (*OPERANDS, "output", "output_gradient", *GRADIENTS)


_KEYS: Mapping[str, tuple[str, ...]] = {
    "alignment": tuple(f"{path}/{shape}" for path in PATHS for shape in SHAPES),
    **dict.fromkeys(("measured", "nearest"), tuple(CAST_FORMATS)),
    **dict.fromkeys(("gains", "curvatures", "adaptive_gains"), TENSORS),
}
"""Allowed keys of the tables of an operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorStatistics(_Numbers):
    """Measurements of one adjustable operator, per call.

    Attributes:
        name: As in the graph.
        op_type: As in the graph.
        kind: Formula of its noise.
        calls: Executions in one training step; more than 1 if the step runs the model several times.
        products: Matrix products that it computes.
        first_parameter: The parameter that the operand is, or is a view of; None if it is none.
        second_parameter: The same of the second operand.
        first: Statistics of a tensor, as are the next seven; a gradient is None if the operand needs none (input data,
            frozen parameter, integer indices).
        alignment: By ``path/shape`` the exact sum of noise times signal over the value of the mean-field formula; 1 if
            missing.
        measured: Errors by precision (attention only).
        gains: By tensor; empty unless probed.
        curvatures: By tensor; empty unless probed.
        adaptive_gains: Gains with the variance of each parameter's gradient divided by the root mean square of that
            gradient; empty unless probed.
        nearest: By 16-bit format the squared error, bias included, of the weight's gradient when operands and gradient
            are rounded to it; the second operand must be a weight.
        loss_scale: Factor of the gradients while they were rounded.
    """

    name: str
    op_type: str
    kind: OperatorKind
    calls: _Positive
    products: tuple[ProductSizes, ...]
    first_parameter: str | None
    second_parameter: str | None
    first: TensorStatistics
    second: TensorStatistics
    output: TensorStatistics
    output_gradient: TensorStatistics
    third: TensorStatistics | None = None
    first_gradient: TensorStatistics | None = None
    second_gradient: TensorStatistics | None = None
    third_gradient: TensorStatistics | None = None
    alignment: Mapping[str, float] = field(default_factory=dict)
    measured: Mapping[str, MeasuredErrors] = field(default_factory=dict)
    gains: Mapping[str, Gain] = field(default_factory=dict)
    curvatures: Mapping[str, Curvature] = field(default_factory=dict)
    adaptive_gains: Mapping[str, Gain] = field(default_factory=dict)
    nearest: Mapping[str, float] = field(default_factory=dict)
    loss_scale: float = 1.0

    def __post_init__(self) -> None:
        where = f"operator {self.name!r}"
        _Numbers.__post_init__(self)
        if not self.products:
            raise ProblemError(f"{where} has no product sizes: at least one product is needed")
        check_loss_scale(self.loss_scale, f"{where}: loss_scale")
        for name, tensor in self.tensors():
            tensor.check_keys(f"{where}: {name}")
        for name, allowed in _KEYS.items():
            _check_table(getattr(self, name), allowed, f"{where}: {name.replace('_', ' ')}")
        freeze(self, *_KEYS)

    def tensors(self) -> Iterator[tuple[str, TensorStatistics]]:
        """Names and statistics of the measured tensors."""
        for name in TENSORS:
            statistics = getattr(self, name)
            if statistics is not None:
                yield name, statistics


SIGN_CHANGE_RATIOS: tuple[float, ...] = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
"""Noise-to-signal ratios at which sign changes of rectifiers are measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal(_Numbers):
    """Measurements around an operator that is not adjustable, per call, mean over batches.

    Attributes:
        elements: Of its result.
        input_square_sum: Squared norm of its first floating input.
        output_square_sum: Squared norm of its result.
        curvature: Of losses, else 0: relative energy of the change of the input's gradient by noise on the input, per
            unit of noise-to-signal ratio.
        noise_weight: Of batch normalizations, else 1: growth of the noise-to-signal ratio from input to output, for
            noise spread evenly over channels whose variances differ.
        flips: Of probed rectifiers and max-pools, else empty: variance of the gradient caused by elements whose sign,
            or whose place as the largest of a window, noise changes; at each of ``SIGN_CHANGE_RATIOS`` at the input.
        adaptive_flips: The same in the unit of the adaptive gains.
        noise_ratio: Noise-to-signal ratio at that input when all products round their operands to INT8; else 0.
    """

    elements: _Positive
    input_square_sum: float
    output_square_sum: float
    curvature: float = 0.0
    noise_weight: float = 1.0
    flips: tuple[float, ...] = ()
    adaptive_flips: tuple[float, ...] = ()
    noise_ratio: float = 0.0

    def __post_init__(self) -> None:
        _Numbers.__post_init__(self)
        for name in ("flips", "adaptive_flips"):
            if len(values := getattr(self, name)) not in (0, len(SIGN_CHANGE_RATIOS)):
                raise ProblemError(f"{name} has {len(values)} values: {len(SIGN_CHANGE_RATIOS)} or none are needed")
            for value in values:
                check_number(value, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatistics(_Numbers):
    """Statistics of a whole model.

    Attributes:
        batches: How many were seen.
        operators: Adjustable operators.
        signals: By other operator; they show how strong residual streams are.
        model_fingerprint: Of the graph, None if none was given.
        gradient_noise: None if fewer than two batches were seen.
        shift: Of probed models with rectifiers, else 0: squared norm of the shift of the mean gradient when products
            round their operands to INT8, beyond the effect of independent sign changes.
    """

    batches: _Positive
    operators: tuple[OperatorStatistics, ...]
    signals: Mapping[str, Signal] = field(default_factory=dict)
    model_fingerprint: str | None = None
    gradient_noise: GradientNoise | None = None
    shift: float = 0.0
    _by_name: Mapping[str, OperatorStatistics] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _Numbers.__post_init__(self)
        by_name = {operator.name: operator for operator in self.operators}
        if len(by_name) != len(self.operators):
            counts = Counter(operator.name for operator in self.operators)
            twice = next(name for name, count in counts.items() if count > 1)
            raise ProblemError(f"operator {twice!r} has statistics twice: names must be unique")
        freeze(self, "signals")
        object.__setattr__(self, "_by_name", by_name)

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __getitem__(self, name: str) -> OperatorStatistics:
        try:
            return self._by_name[name]
        except KeyError:
            raise ProblemError(
                f"no statistics for operator {name!r}: collect them again with the model that was captured"
            ) from None

    def find(self, name: str) -> OperatorStatistics | None:
        """The statistics of an operator, or None."""
        return self._by_name.get(name)


FORMAT = "qsync-statistics/3"


def save_statistics(statistics: ModelStatistics, path: str | os.PathLike[str]) -> None:
    """Write statistics to ``path``, complete or not at all.

    Raises:
        ProblemError: The folder cannot be written.
    """
    write_json(path, encode(statistics, version=FORMAT), digest=True)


def load_statistics(path: str | os.PathLike[str]) -> ModelStatistics:
    """Read statistics from ``path``.

    Raises:
        ProblemError: The file is missing or holds anything but valid statistics.
    """
    data, where = read_json(path, (FORMAT,)), os.fspath(path)
    try:
        return decode(ModelStatistics, data, where, version=FORMAT)
    except ProblemError as failure:
        place = "" if str(failure).startswith(where) else f"{where}: "
        raise ProblemError(f"{place}{failure}{_AGAIN}") from None
