"""What was measured about every operator in a few full-precision training steps, and its file.

Tensors of one operator are named by what they are in the product ``output = first x second``: ``first`` (activation),
``second`` (weight, or the second activation), ``third`` (only attention's values), ``output``, ``output_gradient``
(gradient of the loss with respect to the output) and ``first_gradient``, ``second_gradient``, ``third_gradient``
(what *this* operator contributes to the gradients of its operands, before anything is accumulated).
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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from qsync_opt.errors import ProblemError
from qsync_opt.io import parse_json, read_json, write_json
from qsync_opt.numerics import CAST_FORMATS, GRADIENT_KINDS, Granularity, Rounding, closed_form_variance, noise_kinds


def _finite(value: float, what: str) -> None:
    # No comparison converts: an integer may be too large for a float.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max:
        raise ProblemError(
            f"{what} is {value!r}: a finite number of at least 0 is needed; collect the statistics again"
        )


def _whole(value: int, what: str, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ProblemError(f"{what} is {value!r}: a whole number of at least {least} is needed")


def check_loss_scale(value: float, what: str) -> None:
    """Refuse what is no power of two of at least 1: only those leave a number's digits as they are.

    Raises:
        ProblemError: It is another number.
    """
    _finite(value, what)
    if value < 1 or math.frexp(value)[0] != 0.5:
        raise ProblemError(f"{what} is {value!r}: a power of two of at least 1 is needed, such as 65536")


class OperatorKind(enum.StrEnum):
    """Which formula an operator's noise follows."""

    PRODUCT = "product"
    """Bilinear in two operands: linear, convolution, matrix products, einsum."""
    LOOKUP = "lookup"
    """Embedding: a product whose first operand is one-hot, hence exact."""
    ATTENTION = "attention"
    """Scaled dot-product attention: two products around a softmax; its errors are measured, not derived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundingFactor:
    """Measured mean squared rounding error, as a multiple of the closed form of ``qsync_opt.numerics.rounding``.

    1 for elements spread evenly over many steps; below 1 for zeros and elements far smaller than one step; far above 1
    for elements that a float format can only hold as subnormals, or flushes to zero.
    """

    stochastic: float
    nearest: float

    def __post_init__(self) -> None:
        _finite(self.stochastic, "rounding factor 'stochastic'")
        _finite(self.nearest, "rounding factor 'nearest'")


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
        _whole(self.elements, "elements", 1)
        _finite(self.amax, "amax")
        _finite(self.square_sum, "square_sum")
        for key, value in self.mean_square_amax.items():
            if key not in list(Granularity):
                raise ProblemError(f"unknown granularity {key!r}: allowed are {', '.join(Granularity)}")
            _finite(value, f"mean_square_amax[{key!r}]")
        kinds = noise_kinds(scaled=bool(self.mean_square_amax))
        if self.mean_square_amax:
            kinds = tuple(dict.fromkeys((*kinds, *GRADIENT_KINDS.values())))
        for key in self.rounding:
            if key not in kinds:
                allowed = ", ".join(kinds)
                raise ProblemError(f"unknown rounding {key!r}: allowed for this tensor are {allowed}")
        object.__setattr__(self, "mean_square_amax", MappingProxyType(dict(self.mean_square_amax)))
        object.__setattr__(self, "rounding", MappingProxyType(dict(self.rounding)))

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

    ``rows`` is N, ``contraction`` K, ``columns`` M. A convolution is the product that im2col would make: one per
    group, N = batch times output positions, K = input channels per group times kernel size, M = output channels per
    group. A transposed convolution is the one whose columns col2im would add up: N = batch times *input* positions,
    K = input channels per group, M = output channels per group times kernel size.
    """

    products: int
    rows: int
    contraction: int
    columns: int

    def __post_init__(self) -> None:
        for name in ("products", "rows", "contraction", "columns"):
            _whole(getattr(self, name), f"size {name!r}", 1)

    @property
    def volume(self) -> int:
        """Scalar multiplications of all products together."""
        return self.products * self.rows * self.contraction * self.columns


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredErrors:
    """Squared errors of one operator that was run in a format, summed over the elements of each result."""

    output: float
    first_gradient: float
    second_gradient: float
    third_gradient: float

    def __post_init__(self) -> None:
        for name in ("output", "first_gradient", "second_gradient", "third_gradient"):
            _finite(getattr(self, name), f"measured error {name!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """How strongly noise on one tensor of an operator moves the gradient of all parameters.

    Noise of variance v per element adds ``gain * v`` to the variance of the gradient, summed over all parameters.
    ``uniform`` holds for fixed-point noise, which is of equal variance on every element but for those near or below one
    step, ``floating`` for noise in proportion to the element's square (floating point), with v the mean. Flips of
    rectifiers and max-pools come on top (``Signal.flips``).
    """

    uniform: float
    floating: float

    def __post_init__(self) -> None:
        for name in ("uniform", "floating"):
            _finite(getattr(self, name), f"gain {name!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Curvature:
    """Trace of the loss's Hessian over one tensor of an operator, as Hutchinson's estimator found it.

    Noise of variance v per element raises the expected loss by ``uniform * v / 2`` to second order if it is equal on
    every element, and by ``floating * v / 2`` if it grows with the element's square, v being the mean. Estimates may
    be negative.
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
    """How much the gradient of one worker's batch scatters anyway, without any rounding.

    ``mean_square_norm`` is the mean over batches of the gradient's squared norm, all parameters together; ``variance``
    the unbiased estimate of its variance from batch to batch, summed over all parameters.
    """

    mean_square_norm: float
    variance: float

    def __post_init__(self) -> None:
        _finite(self.mean_square_norm, "gradient noise 'mean_square_norm'")
        _finite(self.variance, "gradient noise 'variance'")


# Alignment: path > target, over the shape of the noise. "floating" noise grows with the element's square; the other
# shapes are those of INT8 with one scale per tensor, channel or row.
PATHS: tuple[str, ...] = (
    "first>output",
    "second>output",
    "first>second_gradient",
    "gradient>second_gradient",
    "second>first_gradient",
    "gradient>first_gradient",
)
SHAPES: tuple[str, ...] = ("floating", *Granularity)
OPERANDS: tuple[str, ...] = ("first", "second", "third")
GRADIENTS: tuple[str, ...] = ("first_gradient", "second_gradient", "third_gradient")
TENSORS: tuple[str, ...] = (*OPERANDS, "output", "output_gradient", *GRADIENTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorStatistics:
    """Everything measured about one adjustable operator, per call.

    ``calls`` counts its executions in one training step (more than 1 when the step runs the model several times).
    ``first_parameter`` and ``second_parameter`` name the parameter that the operand is (or is a view of), else None.
    A missing ``*_gradient`` means that operand needs none (input data, frozen parameter, integer indices).
    ``alignment`` maps ``path/shape`` to the exact sum of noise times signal over what the mean-field formula gives;
    a missing entry is 1. ``measured`` maps a precision to errors (attention only). ``gains`` and ``curvatures`` are
    empty unless probed; ``adaptive_gains`` likewise, with the variance of every parameter's gradient divided by
    the root mean square of that gradient. ``nearest`` maps a 16-bit format to the squared error of the second operand's
    gradient when operands and gradient are rounded to it, bias included (of weights only). ``loss_scale`` multiplied
    the gradients while they were rounded.
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
        _whole(self.calls, f"operator {self.name!r}: calls", 1)
        if not self.products:
            raise ProblemError(f"operator {self.name!r} has no product sizes: at least one product is needed")
        for key, value in self.alignment.items():
            path, _, shape = key.partition("/")
            if path not in PATHS or shape not in SHAPES:
                raise ProblemError(
                    f"operator {self.name!r}: unknown alignment {key!r}: allowed are <path>/<shape> with paths "
                    f"{', '.join(PATHS)} and shapes {', '.join(SHAPES)}"
                )
            _finite(value, f"operator {self.name!r}: alignment {key!r}")
        for key in self.measured:
            if key not in CAST_FORMATS:
                raise ProblemError(
                    f"operator {self.name!r}: errors measured in unknown format {key!r}: "
                    f"allowed are {', '.join(CAST_FORMATS)}"
                )
        for key, value in self.nearest.items():
            what, allowed = f"operator {self.name!r}: error of the weight gradient in", ", ".join(CAST_FORMATS)
            if key not in CAST_FORMATS:
                raise ProblemError(f"{what} unknown format {key!r}: allowed are {allowed}")
            _finite(value, f"{what} {key}")
        check_loss_scale(self.loss_scale, f"operator {self.name!r}: loss_scale")
        found: Mapping[str, object]
        for what, found in (("gain", self.gains), ("gain", self.adaptive_gains), ("curvature", self.curvatures)):
            for key in found:
                if key not in TENSORS:
                    raise ProblemError(
                        f"operator {self.name!r}: {what} of unknown tensor {key!r}: allowed are {', '.join(TENSORS)}"
                    )
        for name in ("alignment", "measured", "gains", "curvatures", "adaptive_gains", "nearest"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def tensors(self) -> Iterator[tuple[str, TensorStatistics]]:
        """The tensors that were measured, with their names."""
        for name in TENSORS:
            statistics = getattr(self, name)
            if statistics is not None:
                yield name, statistics


FLIP_RATIOS: tuple[float, ...] = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
"""Noise-to-signal ratios at which flips of rectifiers are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """What was seen around an operator that is not adjustable; per call, mean over batches.

    ``elements`` of its result; squared norms of its first floating input and of its result. ``curvature`` (of losses,
    else 0): relative energy by which noise on its input changes the gradient that it hands back, per unit of
    noise-to-signal ratio. ``noise_weight`` (of batch normalizations, else 1): by what the noise-to-signal ratio grows
    from input to output if noise is spread evenly over channels whose variances differ. ``flips`` (of rectifiers and
    max-pools that were probed, else empty): variance of the gradient by elements that noise pushes over zero, or that
    it makes the largest of their window, at the noise-to-signal ratios of ``FLIP_RATIOS`` at its input;
    ``adaptive_flips`` in the unit of the adaptive gains. ``noise_ratio`` (else 0): the ratio there when all products
    round their operands to INT8.
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
        _whole(self.elements, "elements", 1)
        for name in ("input_square_sum", "output_square_sum", "curvature", "noise_weight", "noise_ratio"):
            _finite(getattr(self, name), name)
        for name in ("flips", "adaptive_flips"):
            if len(values := getattr(self, name)) not in (0, len(FLIP_RATIOS)):
                raise ProblemError(f"{name} has {len(values)} values: {len(FLIP_RATIOS)} or none are needed")
            for value in values:
                _finite(value, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatistics:
    """Statistics of a whole model over ``batches`` batches.

    ``model_fingerprint`` is the graph's, or None if none was given. ``signals`` holds what was seen around other
    operators; it shows how strong residual streams are. ``gradient_noise`` is None if fewer than two batches were seen.
    ``shift`` (of probed models with rectifiers, else 0): squared norm by which the mean gradient moves when products
    round operands to INT8, beyond what independent flips of rectifiers move it.
    """

    batches: int
    operators: tuple[OperatorStatistics, ...]
    signals: Mapping[str, Signal] = field(default_factory=dict)
    model_fingerprint: str | None = None
    gradient_noise: GradientNoise | None = None
    shift: float = 0.0
    _index: Mapping[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _whole(self.batches, "batches", 1)
        _finite(self.shift, "shift")
        index = {operator.name: position for position, operator in enumerate(self.operators)}
        if len(index) != len(self.operators):
            names = [operator.name for operator in self.operators]
            twice = next(name for name in names if names.count(name) > 1)
            raise ProblemError(f"operator {twice!r} has statistics twice: names must be unique")
        object.__setattr__(self, "signals", MappingProxyType(dict(self.signals)))
        object.__setattr__(self, "_index", MappingProxyType(index))

    def __contains__(self, name: object) -> bool:
        return name in self._index

    def __getitem__(self, name: str) -> OperatorStatistics:
        try:
            return self.operators[self._index[name]]
        except KeyError:
            raise ProblemError(
                f"no statistics for operator {name!r}: collect them again with the model that was captured"
            ) from None

    def find(self, name: str) -> OperatorStatistics | None:
        """Statistics of an operator, None if there are none."""
        position = self._index.get(name)
        return None if position is None else self.operators[position]


FORMAT = "qsync-statistics/3"


def _encode(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: _encode(getattr(value, field.name)) for field in dataclasses.fields(value) if field.init}
    if isinstance(value, Mapping):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    return value


def _decode(hint: Any, value: Any, where: str) -> Any:
    """Build what the type hint says from parsed JSON, refusing everything that does not fit."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return None if value is None else _decode(arguments[0], value, where)
    if dataclasses.is_dataclass(hint):
        return _decode_dataclass(hint, value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise ProblemError(f"{where} is {_kind(value)}: a list is needed")
        return tuple(_decode(arguments[0], item, f"{where}[{position}]") for position, item in enumerate(value))
    if origin is not None:
        if not isinstance(value, dict):
            raise ProblemError(f"{where} is {_kind(value)}: an object is needed")
        return {key: _decode(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(hint, type) and issubclass(hint, enum.StrEnum):
        if value not in list(hint):
            raise ProblemError(f"{where} is {value!r}: allowed are {', '.join(hint)}")
        return hint(value)
    wanted = (int, float) if hint is float else hint
    if isinstance(value, bool) or not isinstance(value, wanted):
        raise ProblemError(f"{where} is {_kind(value)}: {hint.__name__} is needed")
    return value


def _decode_dataclass(hint: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ProblemError(f"{where} is {_kind(value)}: an object is needed")
    hints = typing.get_type_hints(hint)
    fields = {field.name: field for field in dataclasses.fields(hint) if field.init}
    for key in value:
        if key not in fields:
            raise ProblemError(f"{where} has unknown key {key!r}: allowed are {', '.join(fields)}")
    for key in fields:
        if key not in value:
            raise ProblemError(f"{where} lacks key {key!r}: the file is incomplete, collect the statistics again")
    try:
        return hint(**{key: _decode(hints[key], item, f"{where}.{key}") for key, item in value.items()})
    except ProblemError as error:
        if str(error).startswith(where):
            raise
        raise ProblemError(f"{where}: {error}") from None


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), f"{value!r}")


def statistics_to_json(statistics: ModelStatistics) -> str:
    """The statistics as JSON text."""
    return json.dumps({"format": FORMAT, **_encode(statistics)}, indent=1, allow_nan=False)


def _from_data(data: dict[str, Any], where: str) -> ModelStatistics:
    statistics: ModelStatistics = _decode_dataclass(
        ModelStatistics, {key: item for key, item in data.items() if key != "format"}, where
    )
    return statistics


def statistics_from_json(text: str, *, source: str = "statistics") -> ModelStatistics:
    """Read statistics from JSON text.

    Args:
        text: What ``statistics_to_json`` wrote.
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
