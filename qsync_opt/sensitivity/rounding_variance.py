"""Variance of one operator's own results when it rounds its tensors at a precision.

For an operator ``z = sum_k x w`` with element variances v of its rounded tensors (``qsync_opt.numerics``), V
the number of scalar multiplications and mean(.) over elements,

    Var[z]  = V * (v_x * mean(w^2) + v_w * mean(x^2) + v_x * v_w) + elements(z)  * v_z
    Var[dw] = V * (v_x * mean(g^2) + v_g * mean(x^2) + v_x * v_g) + elements(dw) * v_dw
    Var[dx] = V * (v_w * mean(g^2) + v_g * mean(w^2) + v_w * v_g) + elements(dx) * v_dx

where g is the gradient of z. For a linear layer V = N K M, and the first line is the textbook
``v_w M |x|^2 + v_x N |w|^2 + N K M v_x v_w``; convolutions, batched products, einsum and lookups differ in V alone.
Means over elements assume that noise and signal are spread evenly; each first-order term is therefore multiplied by its
measured *alignment*, which makes it exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

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
    is_eight_bit,
    noise_kind,
    number_format,
)
from qsync_opt.sensitivity.statistics import GRADIENTS, OperatorKind, OperatorStatistics

NoiseParts = tuple[tuple[float, str], ...]
"""Noise of one tensor: variance per element and alignment shape, one pair for each independent rounding."""
ElementNoise = Mapping[str, NoiseParts]
"""Noise by tensor of an operator."""
_Kinds = dict[str, str | None]
"""Noise kind by tensor of an operator; None or missing where it is not rounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseOptions:
    """How the runtime rounds.

    Attributes:
        rounding: Of the quantizers with scales (INT8, FP8); casts between floating formats round to nearest.
        activation_granularity: Also of the second operand of a batch of products, there per column.
        weight_granularity: Of weights; one scale for the tensor in precisions with an 8-bit backward pass.
        backward: Width of the backward pass of INT8 and FP8: ``"half"`` for the 16-bit format, ``"eight"`` for 8 bits,
            as in ``INT8-BWD8`` and ``FP8-BWD8``, where the gradient of the result is rounded stochastically with one
            scale for the whole tensor (INT8, or E5M2 for FP8); batches of products stay in 16 bits.
    """

    rounding: Rounding = Rounding.STOCHASTIC
    activation_granularity: Granularity = Granularity.TENSOR
    weight_granularity: Granularity = Granularity.CHANNEL
    backward: str = "half"

    def __post_init__(self) -> None:
        for name, kind, allowed in (
            ("rounding", Rounding, tuple(Rounding)),
            ("activation_granularity", Granularity, ("tensor", "row")),
            ("weight_granularity", Granularity, ("tensor", "channel")),
            ("backward", str, ("half", "eight")),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise UnsupportedError(f"{name} is {str(value)!r}: allowed are {', '.join(allowed)}")
            object.__setattr__(self, name, kind(str(value)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Variance of one tensor by origin: errors that differ from row to row, and weight errors shared by all rows."""

    independent: float = 0.0
    shared: float = 0.0

    @property
    def total(self) -> float:
        """Sum of both."""
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
        precision: Format that it computes in; FP32 gives zeros.
        formats: Border formats of that precision on the device.
        options: Rounding and granularity; by default stochastic, per tensor for activations, per channel for weights.
        nearest: Whether measured errors of rounding to nearest count; otherwise errors are assumed independent.

    Returns:
        Squared units of output and gradients, summed over elements, per training step.

    Raises:
        UnsupportedError: No formula for this operator at this precision (attention in 8 bits).

    Source: ours. QSync's indicator has the same purpose; it uses norms that are not squared, bounds the sum over the
        contraction by a product of norms, and has no term for the input's gradient.
    """
    options = options or NoiseOptions()
    if operator.kind is not OperatorKind.ATTENTION:
        operands, options = _as_run(precision, options)
        return _product_variances(operator, *_tensor_rounding(operator, operands, formats, options), options, nearest)
    if precision != "FP32" and precision not in operator.measured:
        raise UnsupportedError(
            f"operator {operator.name!r}: no noise formula for {operator.op_type} in {precision}: "
            f"measured were {', '.join(operator.measured) or 'none'}"
        )
    errors = operator.measured.get(precision) if precision != "FP32" else None

    def noise(name: str) -> Noise:
        return Noise() if errors is None else Noise(independent=operator.calls * getattr(errors, name))

    gradients = {name: None if getattr(operator, name) is None else noise(name) for name in GRADIENTS}
    return OperatorVariances(output=noise("output"), **gradients)


def overflow_reason(operator: OperatorStatistics, precision: str, formats: PrecisionFormats) -> str | None:
    """Why an operator cannot run at a precision, or None if its numbers fit.

    Of the formats without a scale, FP16 alone has a smaller range than FP32.
    """
    in_fp16 = {
        "first": precision == "FP16" or (is_eight_bit(precision) and formats.gradient_input == "FP16"),
        "third": precision == "FP16",
        "output": formats.output == "FP16",
        "output_gradient": formats.gradient_input == "FP16",
        **dict.fromkeys(GRADIENTS, formats.gradient_output == "FP16"),
    }
    in_fp16["second"] = in_fp16["first"]
    for name, tensor in operator.tensors():
        amax = tensor.amax * (operator.loss_scale if name.endswith("gradient") else 1.0)
        if in_fp16[name] and amax > LARGEST["FP16"]:
            return (
                f"FP16 overflows: {name.replace('_', ' ')} reaches {amax:.4g}, "
                f"the largest number of FP16 is {LARGEST['FP16']:.0f}"
            )
    return None


def _as_run(precision: str, options: NoiseOptions) -> tuple[str, NoiseOptions]:
    """Format of the operands at a precision, and the options that it implies."""
    form = number_format(precision)
    if form.eight_bit_backward:
        return form.operands, replace(options, backward="eight", weight_granularity=Granularity.TENSOR)
    return precision, options


def _tensor_rounding(
    operator: OperatorStatistics, precision: str, formats: PrecisionFormats, options: NoiseOptions
) -> tuple[_Kinds, str | None]:
    """Noise kind of each tensor of an operator at a precision, and that of rounding operands again to run backward.

    INT8 and FP8 quantize both operands, save them so, and run backward in a 16-bit format into which gradient and
    dequantized operands are rounded; weight gradients of matrix products keep their FP32 sums, those of convolutions
    are rounded to 16 bits. With ``backward="eight"`` the gradient is quantized instead and the operands' codes are used
    again (with scales per row or channel they are quantized again along the other side, which counts as the same
    error). BF16 and FP16 cast everything. TF32 rounds the factors of products and nothing else. A lookup rounds the
    rows that it delivers, once, and sums gradients in FP32.
    """
    scaled = precision in SCALED_FORMATS

    def operand(granularity: Granularity) -> str | None:
        return noise_kind(precision, granularity) if scaled else _cast(precision)

    if operator.kind is OperatorKind.LOOKUP:
        kinds: _Kinds = {
            "second": None if precision == "TF32" else operand(options.weight_granularity),
            "output": _cast(formats.output) if scaled else None,
            "output_gradient": _cast(formats.gradient_input),
        }
        return kinds, None
    backward = "TF32" if precision == "TF32" else _cast(formats.gradient_input)
    convolution = operator.op_type.startswith("conv")
    batch = not convolution and operator.products[0].products > 1
    # Of a product that no gradient reaches (before the first trained parameter) nothing is rounded backward.
    reached = bool(operator.output_gradient.mean_square_amax)
    eight = scaled and options.backward == "eight" and not batch and reached
    columns = Granularity.CHANNEL if options.activation_granularity is Granularity.ROW else Granularity.TENSOR
    kinds = {
        "first": operand(options.activation_granularity),
        "second": operand(columns if batch else options.weight_granularity),
        "output": _cast(formats.output),
        "output_gradient": GRADIENT_KINDS[precision] if eight else backward,
    }
    weight_gradient = None if scaled and not (batch or convolution) else _cast(formats.gradient_input)
    for name in ("first", "second"):
        is_parameter = getattr(operator, f"{name}_parameter") is not None
        kinds[f"{name}_gradient"] = weight_gradient if is_parameter else _cast(formats.gradient_output)
    return kinds, backward if scaled and not eight else None


def _cast(name: str) -> str | None:
    return name if name in CAST_FORMATS else None


def element_noise(
    operator: OperatorStatistics, precision: str, formats: PrecisionFormats, options: NoiseOptions
) -> ElementNoise:
    """Noise of every tensor that an operator rounds at a precision; empty for attention that was not measured in it."""
    if operator.kind is OperatorKind.ATTENTION:
        errors = operator.measured.get(precision)
        if errors is None:
            return {}
        return {
            name: ((getattr(errors, name) / tensor.elements, "uniform"),)
            for name, tensor in operator.tensors()
            if name in ("output", *GRADIENTS)
        }
    operands, options = _as_run(precision, options)
    kinds, _ = _tensor_rounding(operator, operands, formats, options)
    return {
        name: _noise_parts(operator, name, (kinds[name],), options) for name, _ in operator.tensors() if name in kinds
    }


def _noise_parts(
    operator: OperatorStatistics, tensor: str, kinds: Iterable[str | None], options: NoiseOptions
) -> NoiseParts:
    """Noise of one tensor of an operator, one part for each kind of rounding that is not None."""
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


def _product_variances(
    operator: OperatorStatistics, kinds: _Kinds, backward: str | None, options: NoiseOptions, nearest: bool
) -> OperatorVariances:
    """Variances of a bilinear operator or lookup by the formulas in the module's text."""
    first, second, gradient = (kinds.get(name) for name in ("first", "second", "output_gradient"))
    x = _noise_parts(operator, "first", (first,), options)
    w = _noise_parts(operator, "second", (second,), options)
    g = _noise_parts(operator, "output_gradient", (gradient,), options)
    volume = operator.products[0].volume

    from_x = _path(operator, "first>output", x, "second")
    from_w = _path(operator, "second>output", w, "first")
    both = volume * _sum(x) * _sum(w) + _rounded(operator, "output", kinds)
    output = _by_origin(operator, first=from_x, second=from_w, rest=both)

    x = _noise_parts(operator, "first", (first, backward), options)
    w = _noise_parts(operator, "second", (second, backward), options)
    gradients: dict[str, Noise | None] = {"first_gradient": None, "second_gradient": None}
    for name, other, noise in (("second", "first", x), ("first", "second", w)):
        target = f"{name}_gradient"
        if getattr(operator, target) is None:
            continue
        rest = _rounded(operator, target, kinds)
        repeated = None
        if nearest and name == "second" and operator.second_parameter is not None:
            repeated = operator.nearest.get(gradient or "")
        if repeated is not None:
            # Errors of rounding to nearest can add up over rows: they are measured together, and the formula gives the
            # variance of the scaled kinds alone.
            scaled = first if first is not None and first.partition("/")[0] in SCALED_FORMATS else None
            noise = _noise_parts(operator, other, (scaled,), options)
            rest += repeated + volume * _sum(noise) * _sum(g)
        else:
            rest += _path(operator, f"gradient>{target}", g, other) + volume * _sum(noise) * _sum(g)
        own = _path(operator, f"{other}>{target}", noise, "output_gradient")
        gradients[target] = _by_origin(operator, **{other: own}, rest=rest)
    return OperatorVariances(output=output, third_gradient=None, **gradients)


def _sum(noise: NoiseParts) -> float:
    return sum(variance for variance, _ in noise)


def _path(operator: OperatorStatistics, path: str, noise: NoiseParts, signal: str) -> float:
    """First-order variance along one path: V * v * mean(signal^2) * alignment."""
    mean_square = float(getattr(operator, signal).mean_square)
    return sum(
        operator.products[0].volume * variance * mean_square * operator.alignment.get(f"{path}/{shape}", 1.0)
        for variance, shape in noise
    )


def _rounded(operator: OperatorStatistics, tensor: str, kinds: _Kinds) -> float:
    statistics = getattr(operator, tensor)
    return float(statistics.elements * statistics.variance(kinds.get(tensor), Rounding.NEAREST))


def _by_origin(operator: OperatorStatistics, *, first: float = 0.0, second: float = 0.0, rest: float = 0.0) -> Noise:
    shared = sum(
        value
        for value, parameter in ((first, operator.first_parameter), (second, operator.second_parameter))
        if parameter is not None
    )
    return Noise(independent=operator.calls * (first + second + rest - shared), shared=operator.calls * shared)
