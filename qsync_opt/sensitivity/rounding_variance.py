"""What does one operator's rounding do to its own results? Variances of output and gradients at a precision.

For an operator ``z = sum_k x w`` with element variances v of its rounded tensors (``qsync_opt.numerics.rounding``), V
the number of scalar multiplications and mean(.) over elements,

    Var[z]  = V * (v_x * mean(w^2) + v_w * mean(x^2) + v_x * v_w) + elements(z)  * v_z
    Var[dw] = V * (v_x * mean(g^2) + v_g * mean(x^2) + v_x * v_g) + elements(dw) * v_dw
    Var[dx] = V * (v_w * mean(g^2) + v_g * mean(w^2) + v_w * v_g) + elements(dx) * v_dx

where g is the gradient of z. For a linear layer V = N K M, and the first line is the textbook
``v_w M |x|^2 + v_x N |w|^2 + N K M v_x v_w``; convolutions, batched products, einsum and lookups differ in V alone.
Means over elements presume that noise and signal are spread evenly; each first-order term is therefore multiplied by
its measured *alignment*, which makes it exact.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from qsync_opt.errors import UnsupportedError
from qsync_opt.numerics import (
    CAST_FORMATS,
    GRADIENT_KINDS,
    LARGEST,
    SCALED_FORMATS,
    WIDE_FP8,
    Granularity,
    PrecisionFormats,
    Rounding,
    noise_kind,
    number_format,
)
from qsync_opt.sensitivity.statistics import OperatorKind, OperatorStatistics

# Variance per element and its alignment shape, one pair for each independent rounding of a tensor.
NoiseParts = tuple[tuple[float, str], ...]

_Member = TypeVar("_Member", Rounding, Granularity)


def _member(kind: type[_Member], value: object, name: str, allowed: Iterable[str]) -> _Member:
    if value not in (texts := tuple(allowed)):
        raise UnsupportedError(f"{name} is {str(value)!r}: allowed are {', '.join(texts)}")
    return kind(str(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseOptions:
    """How the runtime rounds.

    ``rounding`` is that of the quantizers with scales (INT8, FP8); casts between floating formats round to nearest.
    ``activation_granularity`` also holds for the second operand of a batch of products, there per column.
    ``backward`` says in how many bits an 8-bit operator runs backward: in ``"half"`` the 16-bit format, or in
    ``"eight"`` bits, where the gradient of the result is rounded stochastically with one scale for the whole tensor
    (INT8, or E5M2 for FP8); batches of products stay in 16 bits.
    """

    rounding: Rounding = Rounding.STOCHASTIC
    activation_granularity: Granularity = Granularity.TENSOR
    weight_granularity: Granularity = Granularity.CHANNEL
    backward: str = "half"

    def __post_init__(self) -> None:
        checks = (
            ("rounding", Rounding, tuple(Rounding)),
            ("activation_granularity", Granularity, ("tensor", "row")),
            ("weight_granularity", Granularity, ("tensor", "channel")),
        )
        for name, kind, allowed in checks:
            object.__setattr__(self, name, _member(kind, getattr(self, name), name, allowed))  # type: ignore[type-var]
        if self.backward not in ("half", "eight"):
            raise UnsupportedError(f"backward is {self.backward!r}: allowed are half, eight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Variance of one tensor by origin: differing from row to row, or the same weight error in every row."""

    independent: float = 0.0
    shared: float = 0.0

    @property
    def total(self) -> float:
        """Both together."""
        return self.independent + self.shared


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorVariances:
    """Variances of the results of one operator, summed over their elements, per training step.

    A gradient is None where the operand needs none. ``second_gradient`` of a linear layer is the weight gradient.
    """

    output: Noise
    first_gradient: Noise | None
    second_gradient: Noise | None
    third_gradient: Noise | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRounding:
    """How each tensor of an operator is rounded at a precision; None where it is not.

    ``first`` and ``second`` in the forward pass; ``backward`` additionally, both, when they are used again in the
    backward pass; ``gradient`` the output's gradient; ``output``, ``input_gradient``, ``weight_gradient`` the results.
    """

    first: str | None
    second: str | None
    backward: str | None
    gradient: str | None
    output: str | None
    input_gradient: str | None
    weight_gradient: str | None


def tensor_rounding(
    operator: OperatorStatistics, precision: str, formats: PrecisionFormats, options: NoiseOptions
) -> TensorRounding:
    """How an operator's tensors are rounded when it runs at a precision.

    INT8 and FP8 quantize both operands, save them so, and run backward in a 16-bit format into which gradient and
    dequantized operands are rounded; weight gradients of matrix products keep their FP32 sums, those of convolutions
    are rounded to 16 bits. With ``backward="eight"`` the gradient is quantized instead and the operands' codes are used
    again (with scales per row or channel they are made anew along the other side, which is counted as the same error).
    BF16 and FP16 cast everything. TF32 rounds what is multiplied and nothing else.
    A lookup rounds the rows it delivers, once, and sums gradients in FP32.

    Args:
        operator: Which operator.
        precision: Format it computes in.
        formats: Its border formats on the device.
        options: Rounding and granularity.
    """
    number_format(precision)

    def cast(name: str) -> str | None:
        return name if name in CAST_FORMATS else None

    if operator.kind is OperatorKind.LOOKUP:
        rows = noise_kind(precision, options.weight_granularity) if precision in SCALED_FORMATS else cast(precision)
        output = cast(formats.output) if precision in SCALED_FORMATS else None
        if precision == "TF32":
            rows = None  # nothing is multiplied
        return TensorRounding(
            first=None,
            second=rows,
            backward=None,
            gradient=cast(formats.gradient_input),
            output=output,
            input_gradient=None,
            weight_gradient=None,
        )
    backward = "TF32" if precision == "TF32" else cast(formats.gradient_input)
    scaled = precision in SCALED_FORMATS
    convolution = operator.op_type.startswith("conv")
    batch = not convolution and operator.products[0].products > 1
    eight = scaled and options.backward == "eight" and not batch
    columns = Granularity.CHANNEL if options.activation_granularity is Granularity.ROW else Granularity.TENSOR
    return TensorRounding(
        first=noise_kind(precision, options.activation_granularity) if scaled else cast(precision),
        second=noise_kind(precision, columns if batch else options.weight_granularity) if scaled else cast(precision),
        backward=backward if scaled and not eight else None,
        gradient=GRADIENT_KINDS[precision] if eight else backward,
        output=cast(formats.output),
        input_gradient=cast(formats.gradient_output),
        weight_gradient=None if scaled and not (batch or convolution) else cast(formats.gradient_input),
    )


def overflow_reason(operator: OperatorStatistics, precision: str, formats: PrecisionFormats) -> str | None:
    """Why an operator cannot run at a precision, or None if its numbers fit.

    Only FP16 among the formats here is narrower than FP32's range without a scale of its own.
    """
    forward = precision == "FP16"
    used = {
        "first": forward or (precision in SCALED_FORMATS and formats.gradient_input == "FP16"),
        "second": forward or (precision in SCALED_FORMATS and formats.gradient_input == "FP16"),
        "third": forward,
        "output": formats.output == "FP16",
        "output_gradient": formats.gradient_input == "FP16",
        "first_gradient": formats.gradient_output == "FP16",
        "second_gradient": formats.gradient_output == "FP16",
        "third_gradient": formats.gradient_output == "FP16",
    }
    for name, tensor in operator.tensors():
        reached = tensor.amax * (operator.loss_scale if name.endswith("gradient") else 1.0)
        if used[name] and reached > LARGEST["FP16"]:
            return (
                f"FP16 overflows: {name.replace('_', ' ')} reaches {reached:.4g}, "
                f"the largest number of FP16 is {LARGEST['FP16']:.0f}"
            )
    return None


def noise_parts(
    operator: OperatorStatistics, tensor: str, kinds: Iterable[str | None], options: NoiseOptions
) -> NoiseParts:
    """Variance per element of one tensor of an operator, one part for each way it is rounded.

    Args:
        operator: Its statistics.
        tensor: Name of the tensor, such as ``first``.
        kinds: Noise kinds; None is no rounding.
        options: Stochastic or nearest, for the kinds with scales; a gradient is always rounded stochastically.
    """
    parts: list[tuple[float, str]] = []
    for kind in kinds:
        if kind is None:
            continue
        name, _, granularity = kind.partition("/")
        rounding = options.rounding if name in SCALED_FORMATS else Rounding.NEAREST
        if kind in GRADIENT_KINDS.values() and tensor == "output_gradient":
            rounding = Rounding.STOCHASTIC
        shape = granularity if name != WIDE_FP8 and number_format(name).is_integer else "floating"
        parts.append((getattr(operator, tensor).variance(kind, rounding), shape))
    return tuple(parts)


def _sum(noise: NoiseParts) -> float:
    return sum(variance for variance, _ in noise)


def _path(operator: OperatorStatistics, path: str, noise: NoiseParts, signal: str) -> float:
    """First-order variance along one path: V * v * mean(signal^2) * alignment."""
    mean_square = float(getattr(operator, signal).mean_square)
    return sum(
        operator.products[0].volume * variance * mean_square * operator.alignment.get(f"{path}/{shape}", 1.0)
        for variance, shape in noise
    )


def _rounded(operator: OperatorStatistics, tensor: str, kind: str | None) -> float:
    """Variance of rounding a whole result."""
    statistics = getattr(operator, tensor)
    return float(statistics.elements * statistics.variance(kind, Rounding.NEAREST))


def _scaled(kind: str | None) -> str | None:
    """A kind of rounding, if it needs a scale."""
    return kind if kind is not None and kind.partition("/")[0] in SCALED_FORMATS else None


def product_variances(
    operator: OperatorStatistics, rounding: TensorRounding, options: NoiseOptions, *, nearest: bool = True
) -> OperatorVariances:
    """Variances of a bilinear operator or lookup; the formulas are in the module's text.

    Args:
        operator: Its statistics.
        rounding: How its tensors are rounded.
        options: Stochastic or nearest, for the kinds with scales.
        nearest: Whether measured errors of rounding to nearest count; else errors are taken to be independent.

    Returns:
        Squared units of output and gradients, summed over elements and calls.

    Source:
        Ours. QSync's indicator has the same purpose; it uses norms that are not squared, bounds the sum over the
        contraction by a product of norms, and has no term for the input's gradient.
    """
    x = noise_parts(operator, "first", (rounding.first,), options)
    w = noise_parts(operator, "second", (rounding.second,), options)
    g = noise_parts(operator, "output_gradient", (rounding.gradient,), options)
    volume, calls = operator.products[0].volume, operator.calls

    from_x = _path(operator, "first>output", x, "second")
    from_w = _path(operator, "second>output", w, "first")
    both = volume * _sum(x) * _sum(w) + _rounded(operator, "output", rounding.output)
    output = _by_origin(operator, calls, first=from_x, second=from_w, rest=both)

    x = noise_parts(operator, "first", (rounding.first, rounding.backward), options)
    w = noise_parts(operator, "second", (rounding.second, rounding.backward), options)
    gradients: dict[str, Noise | None] = {"first_gradient": None, "second_gradient": None}
    for name, other, noise, signal in (("second", "first", x, "first"), ("first", "second", w, "second")):
        target = f"{name}_gradient"
        if getattr(operator, target) is None:
            continue
        parameter = getattr(operator, f"{name}_parameter") is not None
        result = rounding.weight_gradient if parameter else rounding.input_gradient
        measured = nearest and parameter and name == "second"
        repeated = operator.nearest.get(rounding.gradient or "") if measured else None
        rest = _rounded(operator, target, result)
        if repeated is not None:
            # Errors of rounding to nearest may add up over rows: measured together, and only the others by formula.
            noise = noise_parts(operator, other, (_scaled(rounding.first),), options)
            rest += repeated + volume * _sum(noise) * _sum(g)
        else:
            rest += _path(operator, f"gradient>{target}", g, signal) + volume * _sum(noise) * _sum(g)
        own = _path(operator, f"{other}>{target}", noise, "output_gradient")
        gradients[target] = _by_origin(operator, calls, **{other: own}, rest=rest)
    return OperatorVariances(output=output, third_gradient=None, **gradients)


def _by_origin(
    operator: OperatorStatistics, calls: int, *, first: float = 0.0, second: float = 0.0, rest: float = 0.0
) -> Noise:
    shared = sum(
        value
        for value, parameter in ((first, operator.first_parameter), (second, operator.second_parameter))
        if parameter is not None
    )
    return Noise(independent=calls * (first + second + rest - shared), shared=calls * shared)


def variances(
    operator: OperatorStatistics,
    precision: str,
    formats: PrecisionFormats,
    options: NoiseOptions | None = None,
    *,
    nearest: bool = True,
) -> OperatorVariances:
    """Variances of an operator's results when it runs at a precision.

    Args:
        operator: Its statistics.
        precision: Format it computes in; FP32 gives zeros.
        formats: Border formats of that precision on the device.
        options: Rounding and granularity; by default stochastic, per tensor for activations, per channel for weights.
        nearest: As for ``product_variances``.

    Returns:
        Squared units of output and gradients, summed over elements, per training step.

    Raises:
        UnsupportedError: No formula for this operator at this precision (attention in 8 bits).

    Source:
        Ours; see ``product_variances``.
    """
    options = options or NoiseOptions()
    if operator.kind is not OperatorKind.ATTENTION:
        rounding = tensor_rounding(operator, precision, formats, options)
        return product_variances(operator, rounding, options, nearest=nearest)
    if precision == "FP32":
        errors = None
    elif precision in operator.measured:
        errors = operator.measured[precision]
    else:
        raise UnsupportedError(
            f"operator {operator.name!r}: no noise formula for {operator.op_type} in {precision}: "
            f"measured were {', '.join(operator.measured) or 'none'}"
        )

    def noise(name: str) -> Noise:
        return Noise() if errors is None else Noise(independent=operator.calls * getattr(errors, name))

    return OperatorVariances(
        output=noise("output"),
        first_gradient=None if operator.first_gradient is None else noise("first_gradient"),
        second_gradient=None if operator.second_gradient is None else noise("second_gradient"),
        third_gradient=None if operator.third_gradient is None else noise("third_gradient"),
    )
