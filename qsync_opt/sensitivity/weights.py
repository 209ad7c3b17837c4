"""Sensitivities without running the model: the noise that each operator's own rounding adds.

A model's file holds weights and shapes, but neither activations nor gradients. This estimate therefore replaces
`qsync_opt.sensitivity.scores` for the same purpose in another unit: per operator and precision the variance that
rounding adds, *relative* to the mean square of the rounded tensor, summed over the rounded tensors. Weights are rounded
as they are; activations and gradients are assumed to be normally distributed. The position of an operator in the model
does not count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from qsync_opt.errors import ProblemError
from qsync_opt.model import LOOKUPS, Operator, OpGraph, Role, WeightStatistics
from qsync_opt.numerics import (
    LARGEST,
    WIDE_FP8_MANTISSA_BITS,
    PrecisionFormats,
    Rounding,
    fixed_point_variance,
    floating_point_variance,
    is_eight_bit,
    number_format,
)

FROM_WEIGHTS = "relative rounding noise of the weights; activations and gradients taken as normally distributed"
"""Label of sensitivities that were computed with weights."""
FROM_FORMATS = "relative rounding noise of the number formats alone; no tensor was looked at"
"""Label of sensitivities that were computed without weights."""


def weight_sensitivities(
    graph: OpGraph,
    device_formats: Mapping[str, PrecisionFormats],
    weights: Mapping[str, WeightStatistics] | None = None,
    *,
    rounding: Rounding = Rounding.STOCHASTIC,
) -> dict[str, dict[str, float]]:
    """Relative rounding noise of every adjustable operator at every precision of a device.

    Args:
        graph: The model.
        device_formats: The device's precisions with their border formats.
        weights: Statistics by parameter; None assumes normally distributed weights, too.
        rounding: How 8-bit formats are rounded; the others round to nearest.

    Returns:
        Operator to precision to relative variance (no unit), 0 for FP32. Comparable within one model only.

    Raises:
        ProblemError: A weight that the graph names is not in ``weights``.

    Source: ours; the error of a step is that of `qsync_opt.numerics`.
    """
    table: dict[str, dict[str, float]] = {}
    for operator in graph.by_role(Role.ADJUSTABLE):
        row = table.setdefault(operator.name, {})
        for precision, borders in device_formats.items():
            rounded = [
                *_operand_noise(graph, operator, precision, weights, rounding),
                _relative_float(borders.output),
                _gradient_noise(operator, precision, borders),
            ]
            row[precision] = math.fsum(rounded)
    return table


def _gradient_noise(operator: Operator, precision: str, borders: PrecisionFormats) -> float:
    """Noise of rounding the gradient of the result: to 16 bits, or stochastically with one scale to INT8 or E5M2."""
    form = number_format(precision)
    if not form.eight_bit_backward:
        return _relative_float(borders.gradient_input)
    if form.is_integer:
        return _relative_normal(precision, operator.output_elements, Rounding.STOCHASTIC)
    return floating_point_variance(WIDE_FP8_MANTISSA_BITS, 1.0, Rounding.STOCHASTIC)


def _operand_noise(
    graph: OpGraph,
    operator: Operator,
    precision: str,
    weights: Mapping[str, WeightStatistics] | None,
    rounding: Rounding,
) -> list[float]:
    lookup = operator.op_type.lower() in LOOKUPS
    sizes = [graph[source].output_elements for source in operator.inputs]
    noise = [] if lookup else [_relative_normal(precision, size, rounding) for size in sizes]
    shapes = {parameter.name: parameter.spec.shape for parameter in graph.parameters}
    for name in operator.parameters:
        shape = shapes[name]
        if len(shape) < 2:
            continue  # biases are added in the format of the result
        if weights is None:
            sharing = shape if number_format(precision).eight_bit_backward else shape[1:]
            noise.append(_relative_normal(precision, math.prod(sharing), rounding))
        elif name not in weights:
            raise ProblemError(
                f"operator {operator.name!r}: the file has no values for weight {name!r}; estimate without weights"
            )
        else:
            noise.append(_relative_weight(precision, weights[name], _channel_axis(operator, weights[name]), rounding))
    return noise


def _channel_axis(operator: Operator, weight: WeightStatistics) -> str:
    """The axis of output channels: the first in torch's layout, the last where only that one fits the result."""
    width = operator.output_specs[0].shape[-1] if operator.output_specs[0].shape else 0
    return "last" if weight.first_size != width and weight.last_size == width else "first"


def _relative_weight(precision: str, weight: WeightStatistics, axis: str, rounding: Rounding) -> float:
    """Noise of a weight with one scale per output channel, relative to its mean square; 0 for an empty weight.

    One scale for the tensor is as large as the largest of any axis; the larger of the two means stands for it.
    """
    if not number_format(precision).is_integer or weight.mean_square == 0.0:
        return _relative_float(precision, rounding) if weight.mean_square else 0.0
    form = number_format(precision)
    amax = max(weight.mean_square_amax.values()) if form.eight_bit_backward else weight.mean_square_amax[axis]
    step = amax / LARGEST[form.operands] ** 2
    return fixed_point_variance(step, rounding) / weight.mean_square


def _relative_normal(precision: str, elements: int, rounding: Rounding) -> float:
    """The same of normal numbers; the largest of n is about ``sqrt(2 ln n)`` standard deviations."""
    if not number_format(precision).is_integer:
        return _relative_float(precision, rounding)
    square_amax = 2.0 * math.log(max(elements, 2))
    return fixed_point_variance(square_amax / LARGEST[number_format(precision).operands] ** 2, rounding)


def _relative_float(precision: str, rounding: Rounding = Rounding.NEAREST) -> float:
    """Noise of a floating format relative to the mean square; 0 for FP32, the reference."""
    if precision == "FP32":
        return 0.0
    used = rounding if is_eight_bit(precision) else Rounding.NEAREST
    return floating_point_variance(number_format(precision).mantissa_bits, 1.0, used)
