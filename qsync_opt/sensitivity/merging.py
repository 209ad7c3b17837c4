"""One set of statistics from several: over batches, over repeated calls, over the ranks of a data-parallel job.

Moments are averaged. Rounding factors and alignments are ratios, so what they multiply is averaged and the ratio is
taken again: the merged statistics then predict exactly the average of the variances that the parts predict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qsync_opt.errors import ProblemError
from qsync_opt.numerics import Granularity, Rounding, closed_form_variance
from qsync_opt.sensitivity.statistics import (
    Curvature,
    Gain,
    GradientNoise,
    MeasuredErrors,
    ModelStatistics,
    OperatorStatistics,
    RoundingFactor,
    Signal,
    TensorStatistics,
)

# path > target: the operand that is noisy, and the one that multiplies the noise.
_PATH_ENDS: dict[str, tuple[str, str]] = {
    "first>output": ("first", "second"),
    "second>output": ("second", "first"),
    "first>second_gradient": ("first", "output_gradient"),
    "gradient>second_gradient": ("output_gradient", "first"),
    "second>first_gradient": ("second", "output_gradient"),
    "gradient>first_gradient": ("output_gradient", "second"),
}

_SIGNAL = ("input_square_sum", "output_square_sum", "curvature", "noise_weight", "noise_ratio")
_PROBED = ("gains", "adaptive_gains", "curvatures")
_NO_GAIN = Gain(uniform=0.0, floating=0.0)
_FLAT = Curvature(uniform=0.0, floating=0.0)


def _mean(values: Sequence[float], weights: Sequence[int]) -> float:
    return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)


def _mean_each(values: Sequence[tuple[float, ...]], weights: Sequence[int]) -> tuple[float, ...]:
    """Mean of tuples, one place at a time; an empty one stands for zeros, and all empty ones for none."""
    length = max(map(len, values))
    return tuple(_mean([v[i] if v else 0.0 for v in values], weights) for i in range(length))


def _merge_tensors(parts: Sequence[TensorStatistics], weights: Sequence[int], what: str) -> TensorStatistics:
    first = parts[0]
    for part in parts:
        if part.elements != first.elements:
            raise ProblemError(
                f"{what} has {first.elements} elements in one part and {part.elements} in another: "
                "collect all parts with batches of one shape"
            )
        if (
            part.mean_square_amax.keys() != first.mean_square_amax.keys()
            or part.rounding.keys() != first.rounding.keys()
        ):
            raise ProblemError(f"{what} was not measured alike in all parts: collect them with one version and options")
    moments = TensorStatistics(
        elements=first.elements,
        amax=max(part.amax for part in parts),
        square_sum=_mean([part.square_sum for part in parts], weights),
        mean_square_amax={
            key: _mean([part.mean_square_amax[key] for part in parts], weights) for key in first.mean_square_amax
        },
    )
    factors = {}
    for kind in first.rounding:
        values = []
        for rounding in (Rounding.STOCHASTIC, Rounding.NEAREST):
            closed = closed_form_variance(
                kind, rounding, mean_square=moments.mean_square, mean_square_amax=moments.mean_square_amax
            )
            variance = _mean([part.variance(kind, rounding) for part in parts], weights)
            values.append(variance / closed if closed else 0.0)
        factors[kind] = RoundingFactor(stochastic=values[0], nearest=values[1])
    return TensorStatistics(
        elements=moments.elements,
        amax=moments.amax,
        square_sum=moments.square_sum,
        mean_square_amax=moments.mean_square_amax,
        rounding=factors,
    )


def path_scale(operator: OperatorStatistics, path: str, shape: str) -> float:
    """Mean noise times mean signal of one path: what the alignment of that path is relative to."""
    noisy, signal = (getattr(operator, name) for name in _PATH_ENDS[path])
    if shape == "floating":
        return float(noisy.mean_square * signal.mean_square)
    return float(noisy.variance(f"INT8/{Granularity(shape)}", Rounding.STOCHASTIC) * signal.mean_square)


def _merge_gains(parts: Sequence[Mapping[str, Gain]], weights: Sequence[int]) -> dict[str, Gain]:
    return {
        key: Gain(
            **{
                field: _mean([getattr(part.get(key, _NO_GAIN), field) for part in parts], weights)
                for field in ("uniform", "floating")
            }
        )
        for key in dict.fromkeys(key for part in parts for key in part)  # a tensor without effect has no gain
    }


def merge_operators(parts: Sequence[OperatorStatistics], weights: Sequence[int], *, calls: int) -> OperatorStatistics:
    """Average statistics of one operator.

    Args:
        parts: Statistics of the same operator, at least one.
        weights: How much each part counts.
        calls: Executions per training step that the result stands for.

    Returns:
        Statistics that predict the weighted average of the parts' variances.

    Raises:
        ProblemError: The parts are of different operators, shapes or options.

    Source:
        Ours.
    """
    head = parts[0]
    for part in parts:
        if (part.name, part.op_type, part.products, part.first_parameter, part.second_parameter) != (
            (head.name, head.op_type, head.products, head.first_parameter, head.second_parameter)
        ):
            raise ProblemError(
                f"operator {head.name!r} differs between parts ({head.op_type} {head.products} and "
                f"{part.name!r}, {part.op_type} {part.products}): collect them with one model and batches of one shape"
            )
        if {name for name, _ in part.tensors()} != {name for name, _ in head.tensors()}:
            raise ProblemError(f"operator {head.name!r} has gradients in some parts only: collect the parts alike")
        if part.alignment.keys() != head.alignment.keys() or part.measured.keys() != head.measured.keys():
            raise ProblemError(f"operator {head.name!r} was not measured alike in all parts: collect the parts alike")
        if part.nearest.keys() != head.nearest.keys() or part.loss_scale != head.loss_scale:
            raise ProblemError(f"operator {head.name!r} was not measured alike in all parts: collect the parts alike")
        if any(bool(getattr(part, name)) != bool(getattr(head, name)) for name in _PROBED):
            raise ProblemError(f"operator {head.name!r} was probed in some parts only: probe all parts or none")
    tensors: dict[str, Any] = {
        name: _merge_tensors(
            [getattr(part, name) for part in parts], weights, f"operator {head.name!r}: {name.replace('_', ' ')}"
        )
        for name, _ in head.tensors()
    }
    merged = OperatorStatistics(
        name=head.name,
        op_type=head.op_type,
        kind=head.kind,
        calls=calls,
        products=head.products,
        first_parameter=head.first_parameter,
        second_parameter=head.second_parameter,
        measured={
            key: MeasuredErrors(
                **{
                    field: _mean([getattr(part.measured[key], field) for part in parts], weights)
                    for field in ("output", "first_gradient", "second_gradient", "third_gradient")
                }
            )
            for key in head.measured
        },
        gains=_merge_gains([part.gains for part in parts], weights),
        adaptive_gains=_merge_gains([part.adaptive_gains for part in parts], weights),
        nearest={key: _mean([part.nearest[key] for part in parts], weights) for key in head.nearest},
        loss_scale=head.loss_scale,
        curvatures={
            key: Curvature(
                **{
                    field: _mean([getattr(part.curvatures.get(key, _FLAT), field) for part in parts], weights)
                    for field in ("uniform", "floating")
                }
            )
            for key in dict.fromkeys(key for part in parts for key in part.curvatures)
        },
        **tensors,
    )
    alignment = {}
    for key in head.alignment:
        path, _, shape = key.partition("/")
        exact = _mean([part.alignment[key] * path_scale(part, path, shape) for part in parts], weights)
        scale = path_scale(merged, path, shape)
        alignment[key] = exact / scale if scale else 0.0
    return OperatorStatistics(
        **{name: getattr(merged, name) for name in OperatorStatistics.__slots__ if name != "alignment"},
        alignment=alignment,
    )


def _merge_noise(parts: Sequence[ModelStatistics]) -> GradientNoise | None:
    """Scatter within the parts, pooled by degrees of freedom; parts without one add nothing to it."""
    known = [(part.gradient_noise, part.batches) for part in parts if part.gradient_noise is not None]
    if not known:
        return None
    return GradientNoise(
        mean_square_norm=_mean([noise.mean_square_norm for noise, _ in known], [batches for _, batches in known]),
        variance=_mean([noise.variance for noise, _ in known], [batches - 1 for _, batches in known]),
    )


def merge_statistics(parts: Sequence[ModelStatistics]) -> ModelStatistics:
    """Average statistics of one model, each part weighted by its number of batches.

    Gradient noise is pooled from the scatter within each part, so that ranks on different data need no gradient of
    each other.

    The result does not depend on which rank merges, as long as the parts come in the same order.

    Args:
        parts: Statistics of the same model, for example one per rank.

    Returns:
        Statistics over all batches together.

    Raises:
        ProblemError: No parts, or parts of different models, operators or shapes.

    Source:
        Ours.
    """
    if not parts:
        raise ProblemError("no statistics to merge: at least one part is needed")
    head = parts[0]
    names = [operator.name for operator in head.operators]
    for part in parts:
        if part.model_fingerprint != head.model_fingerprint:
            raise ProblemError("statistics of different models cannot be merged: their fingerprints differ")
        if [operator.name for operator in part.operators] != names:
            different = sorted(set(names) ^ {operator.name for operator in part.operators})
            raise ProblemError(f"statistics of different operators cannot be merged: {different[:5] or 'order'} differ")
        if part.signals.keys() != head.signals.keys():
            different = sorted(part.signals.keys() ^ head.signals.keys())
            raise ProblemError(f"statistics with different signals cannot be merged: {different[:5]} differ")
    weights = [part.batches for part in parts]
    return ModelStatistics(
        batches=sum(weights),
        operators=tuple(
            merge_operators([part[name] for part in parts], weights, calls=head[name].calls) for name in names
        ),
        signals={
            key: Signal(
                elements=head.signals[key].elements,
                **{field: _mean([getattr(part.signals[key], field) for part in parts], weights) for field in _SIGNAL},
                flips=_mean_each([part.signals[key].flips for part in parts], weights),
                adaptive_flips=_mean_each([part.signals[key].adaptive_flips for part in parts], weights),
            )
            for key in head.signals
        },
        model_fingerprint=head.model_fingerprint,
        gradient_noise=_merge_noise(parts),
        shift=_mean([part.shift for part in parts], weights),
    )
