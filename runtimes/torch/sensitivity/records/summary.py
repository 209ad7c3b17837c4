"""Statistics of an operator from the numbers recorded of its calls."""

from __future__ import annotations

import functools
import math

from qsync_opt.errors import ModelError
from qsync_opt.numerics import GRADIENT_KINDS, Granularity, Rounding, closed_form_variance, noise_kinds
from qsync_opt.sensitivity import GRADIENTS, SHAPES, MeasuredErrors, ProductSizes, RoundingFactor, TensorStatistics

SCALED_KINDS = noise_kinds(scaled=True)
CAST_KINDS = noise_kinds(scaled=False)
OUTPUT_GRADIENT_KINDS = tuple(GRADIENT_KINDS.values())
INTEGER_KINDS = tuple(kind for kind in SCALED_KINDS if kind.startswith("INT8/"))
"""Fixed-point rounding of an operand, by granularity."""
RESULT_KINDS = (*CAST_KINDS, *OUTPUT_GRADIENT_KINDS)
"""Rounding of the gradient of a result."""


def check_finite(operator: str, values: dict[str, float], batch: int) -> dict[str, float]:
    """The values, if all are finite.

    Raises:
        ModelError: A value is not finite; the message names operator, tensor and batch.
    """
    if all(map(math.isfinite, values.values())):
        return values
    for key, value in sorted(values.items(), key=lambda item: "/" in item[0]):  # tensors before sums over two
        if value == float("inf") and key.startswith("measured."):
            continue  # the format cannot hold the operands
        if not -float("inf") < value < float("inf"):
            tensor = key.partition(".")[0].replace("_", " ")
            raise ModelError(
                f"operator {operator!r}: {tensor} is not finite in batch {batch}; "
                "statistics need finite values in full precision; check the batch, the loss and the weights"
            )
    return values


def alignments(
    sizes: ProductSizes, factor: float, tensors: dict[str, TensorStatistics], values: dict[str, float]
) -> dict[str, float]:
    """Exact sums of noise times signal over those of the mean-field formulas, per path and shape.

    Args:
        sizes: Sizes of the product.
        factor: Constant factor of the result.
        tensors: Statistics of the tensors by name.
        values: Recorded numbers by name.
    """
    squares = {name: tensors[name].mean_square for name in ("first", "second", "output_gradient")}
    square_factor = factor**2

    def ratio(key: str, *means: float) -> float:
        scale = float(sizes.volume)
        for mean in means:
            scale *= mean
        return square_factor * values.get(key, 0.0) / scale if scale else 0.0

    ratios = {}
    for shape in SHAPES:
        noise = squares
        first = second = "xw/floating"
        if shape != "floating":
            kind, first, second = f"INT8/{shape}", f"xw/first/{shape}", f"xw/second/{shape}"
            noise = {
                name: _scaled(
                    values.get(f"{name}.{kind}.{Rounding.STOCHASTIC}", 0.0), name, kind, values, squares[name]
                )
                for name in ("first", "second")
            }
        ratios[f"first>output/{shape}"] = ratio(first, noise["first"], squares["second"])
        ratios[f"second>output/{shape}"] = ratio(second, noise["second"], squares["first"])
        ratios[f"first>second_gradient/{shape}"] = ratio(f"xg/{shape}", noise["first"], squares["output_gradient"])
        ratios[f"second>first_gradient/{shape}"] = ratio(f"gw/{shape}", noise["second"], squares["output_gradient"])
    # Both ends of these paths are squares: the same sum, whichever of the two is noisy.
    ratios["gradient>second_gradient/floating"] = ratios["first>second_gradient/floating"]
    ratios["gradient>first_gradient/floating"] = ratios["second>first_gradient/floating"]
    if "xg/gradient" in values:
        error = values[f"output_gradient.{GRADIENT_KINDS['INT8']}.{Rounding.STOCHASTIC}"]
        ratios["gradient>second_gradient/tensor"] = ratio("xg/gradient", squares["first"], error)
        ratios["gradient>first_gradient/tensor"] = ratio("gw/gradient", squares["second"], error)
    return ratios


@functools.cache
def _keys(tensor: str, *, scaled: bool) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Kinds of rounding of a tensor, with the names of their errors."""
    kinds = dict.fromkeys((*(SCALED_KINDS if scaled else CAST_KINDS), *OUTPUT_GRADIENT_KINDS))
    return tuple((kind, tuple(f"{tensor}.{kind}.{rounding}" for rounding in Rounding)) for kind in kinds)


def _scaled(error: float, tensor: str, kind: str, values: dict[str, float], mean_square: float) -> float:
    """Mean squared error of a whole tensor from that of a part.

    Errors of floating formats grow with the square of the element, those of INT8 with a scale per row with the square
    of the row's largest magnitude.
    """
    whole = part = 1.0
    if not kind.startswith("INT8"):
        whole, part = mean_square, values.get(f"{tensor}.sample.square", mean_square)
    elif kind == f"INT8/{Granularity.ROW}":
        whole = values[f"{tensor}.amax.{Granularity.ROW}"]
        part = values.get(f"{tensor}.sample.row", whole)
    return error * whole / part if part else error


def tensor_statistics(name: str, elements: int, values: dict[str, float]) -> TensorStatistics:
    """Statistics of one tensor from recorded numbers by name."""
    square_sum = values.get(f"{name}.square_sum", 0.0)
    mean_square = square_sum / elements
    amaxes = {str(g): values[f"{name}.amax.{g}"] for g in Granularity if f"{name}.amax.{g}" in values}
    factors = {}
    for kind, keys in _keys(name, scaled=bool(amaxes)):
        if keys[-1] not in values:
            continue
        ratios = {}
        for rounding, key in zip(Rounding, keys, strict=True):
            closed = closed_form_variance(kind, rounding, mean_square=mean_square, mean_square_amax=amaxes)
            error = _scaled(values[key], name, kind, values, mean_square)
            ratios[str(rounding)] = error / closed if closed else 0.0
        factors[kind] = RoundingFactor(**ratios)
    return TensorStatistics(
        elements=elements,
        amax=values.get(f"{name}.greatest", 0.0),
        square_sum=square_sum,
        mean_square_amax=amaxes,
        rounding=factors,
    )


def measured_errors(values: dict[str, float]) -> dict[str, MeasuredErrors]:
    """Measured errors by format, without formats that cannot hold the operands."""
    formats = dict.fromkeys(
        key.split(".")[1] for key, value in values.items() if key.startswith("measured.") and value < float("inf")
    )
    return {
        name: MeasuredErrors(**{target: values[f"measured.{name}.{target}"] for target in ("output", *GRADIENTS)})
        for name in formats
    }
