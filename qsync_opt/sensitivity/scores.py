"""Sensitivities: the gradient variance that each operator adds at each precision, which plans minimize.

A sensitivity is the increase of the variance of the gradient, summed over all weights of the model, when one operator
runs at a precision and all others in FP32; in squared gradient units, the same for all operators, so that sensitivities
add up over a plan. FP32 is 0. It has three parts:

- own: noise in the operator's own weight gradient (rounded saved input, rounded gradient);
- backward: noise in the gradient that it delivers perturbs the weight gradients between it and the input;
- forward: noise in its output perturbs the weight gradients between it and the loss.

No order of precisions is assumed: an outlier can make INT8 worse than FP8, and a gradient that FP16 flushes to zero
makes FP16 worse than BF16.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from qsync_opt.errors import ModelError, ProblemError, UnsupportedError
from qsync_opt.model import Operator, OpGraph, Role
from qsync_opt.numerics import PrecisionFormats
from qsync_opt.sensitivity.baselines import fisher_score, hessian_increase, random_score, weight_variance
from qsync_opt.sensitivity.propagation import Propagation, operand_edges, ratio
from qsync_opt.sensitivity.rectifiers import Rectifiers
from qsync_opt.sensitivity.rounding_variance import (
    NoiseOptions,
    OperatorVariances,
    element_noise,
    overflow_reason,
    variances,
)
from qsync_opt.sensitivity.statistics import Gain, ModelStatistics, OperatorKind, OperatorStatistics
from qsync_opt.sensitivity.table import Distances, IndicatorKind, OperatorSensitivity, SensitivityTable


def sensitivities(
    graph: OpGraph,
    statistics: ModelStatistics,
    device_formats: Mapping[str, PrecisionFormats],
    *,
    options: NoiseOptions | None = None,
    kind: IndicatorKind | None = None,
    gamma: float = 4.0,
    seed: int = 0,
    horizon: float = 0.0,
) -> SensitivityTable:
    """Sensitivity of every adjustable operator at every precision of a device.

    Args:
        graph: The model.
        statistics: Collected from it.
        device_formats: The device's precisions with their border formats.
        options: How the runtime rounds.
        kind: How noise is weighed; None is ``probed`` if the statistics hold gains, else ``progress`` if they hold
            adaptive ones, else ``propagated``. The table names the kind.
        gamma: Weight of forward against backward noise, for ``kind="depth"`` only.
        seed: For ``kind="random"`` only.
        horizon: Weight of the gradient's variance against the immediate increase of the loss, for ``kind="loss"`` only;
            see ``noise_horizon``. At 0 only the immediate increase counts.

    Returns:
        Squared gradient units per training step of one worker (the baselines: ``kind.unit``). With gradients averaged
        over N workers, the share of one worker in the variance of the averaged gradient is 1/N^2 of it.

    Raises:
        ModelError: The statistics belong to another graph.
        ProblemError: Statistics are missing for an operator.
        UnsupportedError: An option has a value that is not allowed.

    Source:
        Purpose and bi-directional form from QSync (IPDPS 2024); variances and propagation ours.
    """
    if not 0 <= gamma < math.inf:
        raise UnsupportedError(f"gamma is {gamma!r}: a finite number of at least 0 is needed")
    _check_model(graph, statistics)
    horizon = _check_horizon(horizon)
    kind = _checked_kind(kind, graph, statistics)
    score = _Scorer(graph, statistics, options or NoiseOptions(), kind, gamma=gamma, seed=seed, horizon=horizon)
    details: dict[str, dict[str, OperatorSensitivity]] = {}
    excluded: dict[str, dict[str, str]] = {}
    for operator in graph.by_role(Role.ADJUSTABLE):
        row = details[operator.name] = {}
        for precision, formats in device_formats.items():
            reason = _exclusion(operator, statistics[operator.name], precision, formats)
            if reason is None:
                row[precision] = score(operator, precision, formats)
            else:
                excluded.setdefault(operator.name, {})[precision] = reason
    return SensitivityTable(kind=kind, details=details, excluded=excluded, distances=score.distances)


def variance_weight(
    *, learning_rate: float, steps: int, momentum: float = 0.0, mean_square_gradient: float = 1.0
) -> float:
    """Weight of the gradient's variance against the immediate increase of the loss, for `sensitivities`.

    Args:
        learning_rate: Mean over the steps, as root mean square if it changes.
        steps: Number of steps to come.
        momentum: Of SGD; it multiplies the effective rate by ``1 / (1 - momentum)``. 0 for Adam, which averages.
        mean_square_gradient: Of the elements of one batch's gradient, for SGD; 1 for Adam.

    Returns:
        ``steps * (learning_rate / (1 - momentum))^2 * mean_square_gradient``.

    Raises:
        UnsupportedError: An argument is out of its range.

    Source:
        Ours.
    """
    if not 0 <= momentum < 1:
        raise UnsupportedError(f"momentum is {momentum!r}: allowed are numbers from 0 to below 1")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise UnsupportedError(f"steps is {steps!r}: allowed are whole numbers of at least 0")
    return _check_horizon(steps * (learning_rate / (1 - momentum)) ** 2 * mean_square_gradient)


def _check_horizon(horizon: float) -> float:
    if isinstance(horizon, bool) or not isinstance(horizon, int | float) or not 0 <= horizon < math.inf:
        raise UnsupportedError(
            f"horizon is {horizon!r}: a finite number of at least 0 is needed; qsync_opt.noise_horizon(optimizer, "
            "steps=...) gives it"
        )
    return float(horizon)


def _check_model(graph: OpGraph, statistics: ModelStatistics) -> None:
    fingerprint = statistics.model_fingerprint
    if fingerprint is not None and fingerprint != graph.fingerprint():
        raise ModelError(
            f"the statistics are of another model or batch shape than graph {graph.name!r}: collect them again with "
            "this graph"
        )
    missing = [operator.name for operator in graph.by_role(Role.ADJUSTABLE) if operator.name not in statistics]
    if missing:
        raise ProblemError(
            f"no statistics for {len(missing)} adjustable operators, the first is {missing[0]!r}: collect them again "
            "with this graph"
        )


def _checked_kind(kind: IndicatorKind | None, graph: OpGraph, statistics: ModelStatistics) -> IndicatorKind:
    """The kind, or its default; refused if the statistics lack what it needs."""
    operators = statistics.operators
    has_gains = any(operator.gains for operator in operators)
    has_adaptive_gains = any(operator.adaptive_gains for operator in operators)
    if kind is None:
        if has_gains:
            return IndicatorKind.PROBED
        return IndicatorKind.PROGRESS if has_adaptive_gains else IndicatorKind.PROPAGATED
    if kind not in list(IndicatorKind):
        raise UnsupportedError(f"kind is {kind!r}: allowed are {', '.join(IndicatorKind)}")
    lack = ""
    if kind in (IndicatorKind.PROBED, IndicatorKind.LOSS) and not has_gains:
        lack = "gains: collect them with probes=2 or more, or use kind='propagated'"
    elif kind == IndicatorKind.PROGRESS and not has_adaptive_gains:
        lack = "adaptive gains: collect them with adaptive_probes=2 or more"
    elif kind == IndicatorKind.HESSIAN and not any(operator.curvatures for operator in operators):
        lack = "curvatures: collect them with curvature_probes=8 or more"
    if lack:
        raise ProblemError(f"the statistics of graph {graph.name!r} hold no {lack}")
    return IndicatorKind(kind)


def _exclusion(
    operator: Operator, statistics: OperatorStatistics, precision: str, formats: PrecisionFormats
) -> str | None:
    """Why an operator cannot run at a precision, or None."""
    reason = overflow_reason(statistics, precision, formats)
    attention = statistics.kind is OperatorKind.ATTENTION
    if reason is None and attention and precision not in ("FP32", *statistics.measured):
        return f"no noise formula for {operator.op_type} in {precision}"
    return reason


class _Scorer:
    """Sensitivity of one operator at one precision, by kind."""

    def __init__(
        self,
        graph: OpGraph,
        statistics: ModelStatistics,
        options: NoiseOptions,
        kind: IndicatorKind,
        *,
        gamma: float,
        seed: int,
        horizon: float,
    ) -> None:
        self._statistics, self._options, self._kind = statistics, options, kind
        self._gamma, self._seed, self._horizon = gamma, seed, horizon
        self.distances = Distances(to_input=graph.distances_to_input(), to_loss=graph.distances_to_loss())
        if kind is IndicatorKind.PROPAGATED:
            self._propagation = Propagation(graph, statistics)
        elif kind in (IndicatorKind.PROBED, IndicatorKind.LOSS, IndicatorKind.PROGRESS):
            self._rectifiers = Rectifiers(graph, statistics, adaptive=kind is IndicatorKind.PROGRESS)

    def __call__(self, operator: Operator, precision: str, formats: PrecisionFormats) -> OperatorSensitivity:
        statistics, kind = self._statistics[operator.name], self._kind
        results = variances(statistics, precision, formats, self._options)
        if kind is IndicatorKind.PROPAGATED:
            return self._propagated(operator, statistics, results)
        if kind is IndicatorKind.DEPTH:
            return self._by_depth(operator, statistics, results)
        if kind in (IndicatorKind.PROBED, IndicatorKind.PROGRESS):
            return self._probed(statistics, precision, formats, results)
        if kind is IndicatorKind.LOSS:
            return self._expected_loss(statistics, precision, formats, results)
        # A baseline's value counts where its noise arises: in the weights (own) or in the forward pass.
        own = forward = 0.0
        noise = element_noise(statistics, precision, formats, self._options)
        if kind is IndicatorKind.HESSIAN:
            forward = hessian_increase(statistics, noise)
        elif kind is IndicatorKind.FISHER:
            forward = fisher_score(statistics, results)
        elif kind is IndicatorKind.WEIGHT:
            own = weight_variance(statistics, noise)
        else:
            own = random_score(operator.name, precision, self._seed)
        return OperatorSensitivity(own=own, backward=0.0, forward=forward, variances=results)

    def _propagated(
        self, operator: Operator, statistics: OperatorStatistics, results: OperatorVariances
    ) -> OperatorSensitivity:
        backward = 0.0
        for position, operand in operand_edges(operator, statistics).items():
            noise, gradient = getattr(results, f"{operand}_gradient"), getattr(statistics, f"{operand}_gradient")
            if noise is None or getattr(statistics, f"{operand}_parameter", None) is not None:
                continue
            effect = self._propagation.input_gradient_effect(operator.name, position)
            backward += effect.variance(noise, statistics.calls * gradient.square_sum)
        effect = self._propagation.output_effect(operator.name)
        forward = effect.variance(results.output, statistics.calls * statistics.output.square_sum)
        return OperatorSensitivity(own=_own(statistics, results), backward=backward, forward=forward, variances=results)

    def _by_depth(
        self, operator: Operator, statistics: OperatorStatistics, results: OperatorVariances
    ) -> OperatorSensitivity:
        # The operator itself is the first of the d that its backward noise reaches.
        depth = self.distances.to_input[operator.name] + 1
        own = _own(statistics, results)
        noises = (results.first_gradient, results.second_gradient, results.third_gradient)
        gradients = sum(noise.total for noise in noises if noise is not None)
        return OperatorSensitivity(
            own=depth * own,
            backward=depth * (gradients - own),
            forward=self._gamma * self.distances.to_loss[operator.name] * results.output.total,
            variances=results,
        )

    def _probed(
        self, statistics: OperatorStatistics, precision: str, formats: PrecisionFormats, results: OperatorVariances
    ) -> OperatorSensitivity:
        """The probed total, which is exact to first order for independent errors, split by direction.

        Sign changes of rectifiers are added. The part of the operator's own weight gradients follows from the formulas;
        by as much as their measured error exceeds that of independent errors, the total grows. The 16-bit rounding of
        8-bit operands when the backward pass reads them is left out: it is below a thousandth.
        """
        gains = statistics.adaptive_gains if self._kind is IndicatorKind.PROGRESS else statistics.gains
        flips = self._rectifiers.variance({statistics.name: results.output.total})
        effects = {}
        for name, parts in element_noise(statistics, precision, formats, self._options).items():
            gain = gains.get(name, _NO_GAIN)
            effects[name] = sum(v * (gain.floating if shape == "floating" else gain.uniform) for v, shape in parts)
        total = flips + sum(effects.values())
        forward = flips + sum(effect for name, effect in effects.items() if not name.endswith("gradient"))
        own, excess = _own(statistics, results, gains), 0.0
        if statistics.nearest:
            independent = variances(statistics, precision, formats, self._options, nearest=False)
            excess = max(0.0, own - _own(statistics, independent, gains))
        inside = min(total, own - excess)
        share = ratio(forward, total)
        return OperatorSensitivity(
            own=inside + excess,
            backward=(total - inside) * (1.0 - share),
            forward=(total - inside) * share,
            flips=flips,
            variances=results,
        )

    def _expected_loss(
        self, statistics: OperatorStatistics, precision: str, formats: PrecisionFormats, results: OperatorVariances
    ) -> OperatorSensitivity:
        """The immediate increase of the loss, which arises in the forward pass, and the cost of gradient noise."""
        probed, horizon = self._probed(statistics, precision, formats, results), self._horizon
        return OperatorSensitivity(
            own=horizon * probed.own,
            backward=horizon * probed.backward,
            forward=fisher_score(statistics, results) + horizon * probed.forward,
            flips=horizon * probed.flips,
            variances=results,
        )


_NO_GAIN = Gain(uniform=0.0, floating=0.0)


def _own(operator: OperatorStatistics, results: OperatorVariances, gains: Mapping[str, Gain] | None = None) -> float:
    """Variance of the operator's own weight gradients; with ``gains``, weighed by those of their elements."""
    total = 0.0
    for name, noise in (("first", results.first_gradient), ("second", results.second_gradient)):
        if noise is None or getattr(operator, f"{name}_parameter") is None:
            continue
        weight = 1.0
        if gains is not None:
            gain, elements = gains.get(f"{name}_gradient"), getattr(operator, f"{name}_gradient").elements
            weight = 0.0 if gain is None else ratio(gain.uniform, operator.calls * elements)
        total += weight * noise.total
    return total
