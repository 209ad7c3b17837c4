"""Statistics of every operator, measured in a few full-precision training steps, and the file that holds them.

The tensors of an operator are named by their place in the product ``output = first x second``: ``first`` (activation),
``second`` (weight, or the second activation), ``third`` (attention's values only), ``output``, ``output_gradient``
(gradient of the loss with respect to the output) and ``first_gradient``, ``second_gradient``, ``third_gradient``
(what *this* operator contributes to the gradients of its operands, before accumulation).
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import os
import sys
import types
import typing
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from qsync_opt.errors import ProblemError
from qsync_opt.io import freeze, parse_json, read_json, write_json
from qsync_opt.numerics import CAST_FORMATS, GRADIENT_KINDS, Granularity, Rounding, closed_form_variance, noise_kinds


def _finite(value: float, what: str) -> None:
    # The comparison does not convert: an integer may be too large for a float.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max:
        raise ProblemError(
            f"{what} is {value!r}: a finite number of at least 0 is needed; collect the statistics again"
        )


def _finite_fields(value: Any, what: str) -> None:
    for name in value.__slots__:
        _finite(getattr(value, name), f"{what} {name!r}")


def _positive_integer(value: int, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ProblemError(f"{what} is {value!r}: a whole number of at least 1 is needed")


def _one_of(key: str, allowed: Iterable[str], what: str, where: str = "") -> None:
    if key not in (names := tuple(allowed)):
        raise ProblemError(f"{what} {key!r}: allowed{where} are {', '.join(names)}")


def check_loss_scale(value: float, what: str) -> None:
    """Check that a loss scale is a power of two of at least 1, which leaves the digits of gradients as they are.

    Raises:
        ProblemError: It is not.
    """
    _finite(value, what)
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
class RoundingFactor:
    """Measured mean squared rounding error, as a multiple of the closed form in ``qsync_opt.numerics``.

    1 for elements spread evenly over many steps; below 1 for zeros and elements far smaller than one step; far above 1
    for elements that are subnormal in a float format, or flushed to zero.
    """

    stochastic: float
    nearest: float

    def __post_init__(self) -> None:
        _finite_fields(self, "rounding factor")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStatistics:
    """Moments of one tensor in one call, averaged over calls and batches (``amax``: the largest of all).

    ``square_sum`` is the squared Frobenius norm. ``mean_square_amax`` maps granularity to the mean over slices of the
    squared largest magnitude, so that the mean squared scale of INT8 is that value over 127 squared; it is empty for
    tensors that are never quantized with a scale. ``rounding`` maps a noise kind to its measured factor.
    """

    elements: int
    amax: float
    square_sum: float
    mean_square_amax: Mapping[str, float] = field(default_factory=dict)
    rounding: Mapping[str, RoundingFactor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _positive_integer(self.elements, "elements")
        _finite(self.amax, "amax")
        _finite(self.square_sum, "square_sum")
        for key, value in self.mean_square_amax.items():
            _one_of(key, Granularity, "unknown granularity")
            _finite(value, f"mean_square_amax[{key!r}]")
        kinds = noise_kinds(scaled=bool(self.mean_square_amax))
        if self.mean_square_amax:
            kinds = tuple(dict.fromkeys((*kinds, *GRADIENT_KINDS.values())))
        for key in self.rounding:
            _one_of(key, kinds, "unknown rounding", " for this tensor")
        freeze(self, "mean_square_amax", "rounding")

    @property
    def mean_square(self) -> float:
        """Mean square of the elements."""
        return self.square_sum / self.elements

    def variance(self, kind: str | None, rounding: Rounding) -> float:
        """Mean squared rounding error per element: the closed form times the measured factor.

        Args:
            kind: One of ``noise_kinds``; None means not rounded at all.
            rounding: Stochastic or nearest.
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
class ProductSizes:
    """``products`` independent products of an (N, K) by a (K, M) matrix.

    ``rows`` is N, ``contraction`` K, ``columns`` M. A convolution counts as the product of im2col: one per group,
    N = batch times output positions, K = input channels per group times kernel size, M = output channels per group. A
    transposed convolution counts as the product whose columns col2im adds up: N = batch times *input* positions,
    K = input channels per group, M = output channels per group times kernel size.
    """

    products: int
    rows: int
    contraction: int
    columns: int

    def __post_init__(self) -> None:
        for name in ("products", "rows", "contraction", "columns"):
            _positive_integer(getattr(self, name), f"size {name!r}")

    @property
    def volume(self) -> int:
        """Scalar multiplications in all products."""
        return self.products * self.rows * self.contraction * self.columns


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredErrors:
    """Squared errors of one operator when it runs in a format, summed over the elements of each result."""

    output: float
    first_gradient: float
    second_gradient: float
    third_gradient: float

    def __post_init__(self) -> None:
        _finite_fields(self, "measured error")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """How strongly noise on one tensor of an operator perturbs the gradient of all parameters.

    Noise of variance v per element adds ``gain * v`` to the variance of the gradient, summed over all parameters.
    ``uniform`` holds for fixed-point noise, whose variance is the same on every element except those near or below one
    step; ``floating`` for noise proportional to the element's square (floating point), with mean v. Sign changes of
    rectifiers and changed maxima of max-pools are added separately (``Signal.flips``).
    """

    uniform: float
    floating: float

    def __post_init__(self) -> None:
        _finite_fields(self, "gain")


@dataclass(frozen=True, slots=True, kw_only=True)
class Curvature:
    """Trace of the loss's Hessian over one tensor of an operator, by Hutchinson's estimator; may be negative.

    To second order, noise of variance v per element raises the expected loss by ``uniform * v / 2`` if it is equal on
    every element, and by ``floating * v / 2`` if it is proportional to the element's square, with mean v.
    """

    uniform: float
    floating: float

    def __post_init__(self) -> None:
        for name in ("uniform", "floating"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ProblemError(f"curvature {name!r} is {value!r}: a finite number is needed")


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientNoise:
    """Scatter of one worker's gradient from batch to batch, without any rounding.

    ``mean_square_norm`` is the mean over batches of the squared norm of the whole gradient; ``variance`` the unbiased
    estimate of its variance, summed over all parameters.
    """

    mean_square_norm: float
    variance: float

    def __post_init__(self) -> None:
        _finite_fields(self, "gradient noise")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorStatistics:
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
    calls: int
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
        _positive_integer(self.calls, f"{where}: calls")
        if not self.products:
            raise ProblemError(f"{where} has no product sizes: at least one product is needed")
        for key, value in self.alignment.items():
            path, _, shape = key.partition("/")
            if path not in PATHS or shape not in SHAPES:
                raise ProblemError(
                    f"{where}: unknown alignment {key!r}: allowed are <path>/<shape> with paths {', '.join(PATHS)} and "
                    f"shapes {', '.join(SHAPES)}"
                )
            _finite(value, f"{where}: alignment {key!r}")
        for key in self.measured:
            _one_of(key, CAST_FORMATS, f"{where}: errors measured in unknown format")
        for key, value in self.nearest.items():
            _one_of(key, CAST_FORMATS, f"{where}: error of the weight gradient in unknown format")
            _finite(value, f"{where}: error of the weight gradient in {key}")
        check_loss_scale(self.loss_scale, f"{where}: loss_scale")
        for what, tensors in (
            ("gain", (*self.gains, *self.adaptive_gains)),
            ("curvature", self.curvatures),
        ):
            for key in tensors:
                _one_of(key, TENSORS, f"{where}: {what} of unknown tensor")
        freeze(self, "alignment", "measured", "gains", "curvatures", "adaptive_gains", "nearest")

    def tensors(self) -> Iterator[tuple[str, TensorStatistics]]:
        """Names and statistics of the measured tensors."""
        for name in TENSORS:
            statistics = getattr(self, name)
            if statistics is not None:
                yield name, statistics


SIGN_CHANGE_RATIOS: tuple[float, ...] = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
"""Noise-to-signal ratios at which sign changes of rectifiers are measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
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

    elements: int
    input_square_sum: float
    output_square_sum: float
    curvature: float = 0.0
    noise_weight: float = 1.0
    flips: tuple[float, ...] = ()
    adaptive_flips: tuple[float, ...] = ()
    noise_ratio: float = 0.0

    def __post_init__(self) -> None:
        _positive_integer(self.elements, "elements")
        for name in ("input_square_sum", "output_square_sum", "curvature", "noise_weight", "noise_ratio"):
            _finite(getattr(self, name), name)
        for name in ("flips", "adaptive_flips"):
            if len(values := getattr(self, name)) not in (0, len(SIGN_CHANGE_RATIOS)):
                raise ProblemError(f"{name} has {len(values)} values: {len(SIGN_CHANGE_RATIOS)} or none are needed")
            for value in values:
                _finite(value, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatistics:
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

    batches: int
    operators: tuple[OperatorStatistics, ...]
    signals: Mapping[str, Signal] = field(default_factory=dict)
    model_fingerprint: str | None = None
    gradient_noise: GradientNoise | None = None
    shift: float = 0.0
    _by_name: Mapping[str, OperatorStatistics] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _positive_integer(self.batches, "batches")
        _finite(self.shift, "shift")
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


def statistics_to_json(statistics: ModelStatistics) -> str:
    """The statistics as JSON text."""
    return json.dumps({"format": FORMAT, **_encode(statistics)}, indent=1, allow_nan=False)


def statistics_from_json(text: str, *, source: str = "statistics") -> ModelStatistics:
    """Read statistics from JSON text.

    Args:
        text: Written by ``statistics_to_json``.
        source: Name of the file for error texts.

    Raises:
        ProblemError: Not JSON, another format, an unknown or missing key, a value that is not finite or negative.
    """
    return _from_data(parse_json(text, (FORMAT,), where=source), source)


def save_statistics(statistics: ModelStatistics, path: str | os.PathLike[str]) -> None:
    """Write statistics to ``path``, complete or not at all.

    Raises:
        ProblemError: The folder cannot be written.
    """
    write_json(path, {"format": FORMAT, **_encode(statistics)}, digest=True)


def load_statistics(path: str | os.PathLike[str]) -> ModelStatistics:
    """Read statistics from ``path``.

    Raises:
        ProblemError: The file is missing or holds anything but valid statistics.
    """
    return _from_data(read_json(path, (FORMAT,)), os.fspath(path))


def _encode(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: _encode(getattr(value, field.name)) for field in dataclasses.fields(value) if field.init}
    if isinstance(value, Mapping):
        return {key: _encode(item) for key, item in value.items()}
    return [_encode(item) for item in value] if isinstance(value, tuple) else value


def _from_data(data: dict[str, Any], where: str) -> ModelStatistics:
    content = {key: item for key, item in data.items() if key != "format"}
    statistics: ModelStatistics = _decode_dataclass(ModelStatistics, content, where)
    return statistics


def _decode(hint: Any, value: Any, where: str) -> Any:
    """Build a value of a type hint from parsed JSON; anything that does not fit is refused."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return None if value is None else _decode(arguments[0], value, where)
    if dataclasses.is_dataclass(hint):
        return _decode_dataclass(hint, value, where)
    if origin is tuple:
        _check_type(value, list, where, "a list")
        return tuple(_decode(arguments[0], item, f"{where}[{position}]") for position, item in enumerate(value))
    if origin is not None:
        _check_type(value, dict, where, "an object")
        return {key: _decode(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(hint, type) and issubclass(hint, enum.StrEnum):
        if value not in list(hint):
            raise ProblemError(f"{where} is {value!r}: allowed are {', '.join(hint)}")
        return hint(value)
    _check_type(value, (int, float) if hint is float else hint, where, hint.__name__)
    return value


def _decode_dataclass(hint: Any, value: Any, where: str) -> Any:
    _check_type(value, dict, where, "an object")
    hints = typing.get_type_hints(hint)
    names = [field.name for field in dataclasses.fields(hint) if field.init]
    for key in value:
        if key not in names:
            raise ProblemError(f"{where} has unknown key {key!r}: allowed are {', '.join(names)}")
    for key in names:
        if key not in value:
            raise ProblemError(f"{where} lacks key {key!r}: the file is incomplete, collect the statistics again")
    try:
        return hint(**{key: _decode(hints[key], item, f"{where}.{key}") for key, item in value.items()})
    except ProblemError as error:
        if str(error).startswith(where):
            raise
        raise ProblemError(f"{where}: {error}") from None


def _check_type(value: Any, allowed: type | tuple[type, ...], where: str, needed: str) -> None:
    if isinstance(value, bool) or not isinstance(value, allowed):
        names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
        raise ProblemError(f"{where} is {names.get(type(value), repr(value))}: {needed} is needed")
