"""Merging of statistics: over batches, over repeated calls, over the ranks of a data-parallel job.

Moments are averaged. Rounding factors and alignments are ratios: the averages of what they multiply are taken, and then
the ratio again, so that the merged statistics predict exactly the average of the variances that the parts predict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from qsync_opt.errors import ProblemError
from qsync_opt.numerics import Granularity, Rounding, closed_form_variance
from qsync_opt.sensitivity.statistics import (
    PATHS,
    Curvature,
    Gain,
    GradientNoise,
    MeasuredErrors,
    ModelStatistics,
    OperatorStatistics,
    RoundingFactor,
    TensorStatistics,
)

_SIGNAL = ("input_square_sum", "output_square_sum", "curvature", "noise_weight", "noise_ratio")
_FLIPS = ("flips", "adaptive_flips")
_PROBED = ("gains", "adaptive_gains", "curvatures")

_Fields = TypeVar("_Fields", Gain, Curvature, MeasuredErrors)


def merge_statistics(parts: Sequence[ModelStatistics]) -> ModelStatistics:
    """Average statistics of one model, each part weighted by its number of batches.

    Gradient noise is pooled from the scatter within each part, so that ranks on different data need no gradient of
    each other. The result does not depend on which rank merges, as long as the parts come in the same order.

    Raises:
        ProblemError: No parts, or parts of different models, operators or shapes.

    Source: ours.
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
    signals = {}
    for key, signal in head.signals.items():
        same = [part.signals[key] for part in parts]
        means: dict[str, Any] = {name: _mean([getattr(one, name) for one in same], weights) for name in _SIGNAL}
        means |= {name: _mean_each([getattr(one, name) for one in same], weights) for name in _FLIPS}
        signals[key] = replace(signal, **means)
    return ModelStatistics(
        batches=sum(weights),
        operators=tuple(
            merge_operators([part[name] for part in parts], weights, calls=head[name].calls) for name in names
        ),
        signals=signals,
        model_fingerprint=head.model_fingerprint,
        gradient_noise=_merge_noise(parts),
        shift=_mean([part.shift for part in parts], weights),
    )


def merge_operators(parts: Sequence[OperatorStatistics], weights: Sequence[int], *, calls: int) -> OperatorStatistics:
    """Statistics of one operator that predict the weighted average of the variances that its ``parts`` predict.

    At least one part is needed. ``calls`` are the executions per training step that the result stands for.

    Raises:
        ProblemError: The parts are of different operators, shapes or options.

    Source: ours.
    """
    head = parts[0]
    for part in parts:
        _check_alike(head, part)
    merged_fields: dict[str, Any] = {
        name: _merge_tensors(
            [getattr(part, name) for part in parts], weights, f"operator {head.name!r}: {name.replace('_', ' ')}"
        )
        for name, _ in head.tensors()
    }
    for name in ("measured", *_PROBED):
        merged_fields[name] = _merge_by_key([getattr(part, name) for part in parts], weights)
    nearest = {key: _mean([part.nearest[key] for part in parts], weights) for key in head.nearest}
    merged = replace(head, calls=calls, alignment={}, nearest=nearest, **merged_fields)
    alignment = {}
    for key in head.alignment:
        path, _, shape = key.partition("/")
        exact = _mean([part.alignment[key] * _path_scale(part, path, shape) for part in parts], weights)
        scale = _path_scale(merged, path, shape)
        alignment[key] = exact / scale if scale else 0.0
    return replace(merged, alignment=alignment)


def _check_alike(head: OperatorStatistics, part: OperatorStatistics) -> None:
    identity = ("name", "op_type", "products", "first_parameter", "second_parameter")
    if any(getattr(part, name) != getattr(head, name) for name in identity):
        raise ProblemError(
            f"operator {head.name!r} differs between parts ({head.op_type} {head.products} and "
            f"{part.name!r}, {part.op_type} {part.products}): collect them with one model and batches of one shape"
        )
    if {name for name, _ in part.tensors()} != {name for name, _ in head.tensors()}:
        raise ProblemError(f"operator {head.name!r} has gradients in some parts only: collect the parts alike")
    keyed = ("alignment", "measured", "nearest")
    if any(getattr(part, n).keys() != getattr(head, n).keys() for n in keyed) or part.loss_scale != head.loss_scale:
        raise ProblemError(f"operator {head.name!r} was not measured alike in all parts: collect the parts alike")
    if any(bool(getattr(part, name)) != bool(getattr(head, name)) for name in _PROBED):
        raise ProblemError(f"operator {head.name!r} was probed in some parts only: probe all parts or none")


def _merge_tensors(parts: Sequence[TensorStatistics], weights: Sequence[int], what: str) -> TensorStatistics:
    head = parts[0]
    for part in parts:
        if part.elements != head.elements:
            raise ProblemError(
                f"{what} has {head.elements} elements in one part and {part.elements} in another: "
                "collect all parts with batches of one shape"
            )
        if part.mean_square_amax.keys() != head.mean_square_amax.keys() or part.rounding.keys() != head.rounding.keys():
            raise ProblemError(f"{what} was not measured alike in all parts: collect them with one version and options")
    moments = TensorStatistics(
        elements=head.elements,
        amax=max(part.amax for part in parts),
        square_sum=_mean([part.square_sum for part in parts], weights),
        mean_square_amax={
            key: _mean([part.mean_square_amax[key] for part in parts], weights) for key in head.mean_square_amax
        },
    )

    def factor(kind: str, rounding: Rounding) -> float:
        closed = closed_form_variance(
            kind, rounding, mean_square=moments.mean_square, mean_square_amax=moments.mean_square_amax
        )
        variance = _mean([part.variance(kind, rounding) for part in parts], weights)
        return variance / closed if closed else 0.0

    factors = {
        kind: RoundingFactor(stochastic=factor(kind, Rounding.STOCHASTIC), nearest=factor(kind, Rounding.NEAREST))
        for kind in head.rounding
    }
    return replace(moments, rounding=factors)


def _path_scale(operator: OperatorStatistics, path: str, shape: str) -> float:
    """Mean noise times mean signal of one path: the denominator of its alignment."""
    noisy, signal = (getattr(operator, name) for name in PATHS[path])
    if shape == "floating":
        return float(noisy.mean_square * signal.mean_square)
    return float(noisy.variance(f"INT8/{Granularity(shape)}", Rounding.STOCHASTIC) * signal.mean_square)


def _merge_noise(parts: Sequence[ModelStatistics]) -> GradientNoise | None:
    measured = [(part.gradient_noise, part.batches) for part in parts if part.gradient_noise is not None]
    if not measured:
        return None
    return GradientNoise(
        mean_square_norm=_mean([noise.mean_square_norm for noise, _ in measured], [batches for _, batches in measured]),
        variance=_mean([noise.variance for noise, _ in measured], [batches - 1 for _, batches in measured]),
    )


def _merge_by_key(parts: Sequence[Mapping[str, _Fields]], weights: Sequence[int]) -> dict[str, _Fields]:
    """Means of every field, by key; a missing entry counts as zeros, because a tensor without effect has none."""
    kinds = {key: type(value) for part in parts for key, value in part.items()}
    return {
        key: kind(
            **{name: _mean([getattr(part.get(key), name, 0.0) for part in parts], weights) for name in kind.__slots__}
        )
        for key, kind in kinds.items()
    }


def _mean(values: Sequence[float], weights: Sequence[int]) -> float:
    return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)


def _mean_each(values: Sequence[tuple[float, ...]], weights: Sequence[int]) -> tuple[float, ...]:
    """Mean of tuples, element by element; an empty tuple counts as zeros."""
    length = max(map(len, values))
    return tuple(_mean([v[i] if v else 0.0 for v in values], weights) for i in range(length))
