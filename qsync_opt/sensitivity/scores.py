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

import functools
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from qsync_opt.errors import ModelError, ProblemError, UnsupportedError
from qsync_opt.io import check_integer, check_number
from qsync_opt.model import HasGraph, Operator, OpGraph, Role, graph_of
from qsync_opt.numerics import FORMATS, PrecisionFormats, number_format
from qsync_opt.sensitivity.propagation import Propagation, operand_edges, ratio
from qsync_opt.sensitivity.published import layers, published_score
from qsync_opt.sensitivity.rectifiers import Rectifiers
from qsync_opt.sensitivity.rounding_variance import (
    ElementNoise,
    NoiseOptions,
    NoiseParts,
    OperatorVariances,
    element_noise,
    overflow_reason,
    variances,
)
from qsync_opt.sensitivity.statistics import (
    OPERANDS,
    Curvature,
    Gain,
    ModelStatistics,
    OperatorKind,
    OperatorStatistics,
)
from qsync_opt.sensitivity.table import IndicatorKind, OperatorSensitivity, SensitivityTable


class HasFormats(Protocol):
    """Anything that holds the precisions of a device with their border formats, such as its profile."""

    @property
    def formats(self) -> Mapping[str, PrecisionFormats]:
        """Border formats by precision."""


def sensitivities(
    graph: OpGraph | HasGraph,
    statistics: ModelStatistics,
    device_formats: Mapping[str, PrecisionFormats] | HasFormats,
    *,
    options: NoiseOptions | None = None,
    kind: IndicatorKind | None = None,
    gamma: float = 4.0,
    seed: int = 0,
    horizon: float = 0.0,
) -> SensitivityTable:
    """Sensitivity of every adjustable operator at every precision of a device.

    Args:
        graph: The model: its graph, or as captured.
        statistics: Collected from it.
        device_formats: The device's precisions with their border formats, or its profile, which has them.
        options: How the runtime rounds.
        kind: How noise is weighed; None is ``probed`` if the statistics hold gains, else ``progress`` if they hold
            adaptive ones, else ``propagated``. The table names the kind.
        gamma: Weight of forward against backward noise, for ``kind="depth"`` and ``"published"`` only.
        seed: For ``kind="random"`` only.
        horizon: Weight of the gradient's variance against the immediate increase of the loss, for ``kind="loss"`` only;
            see ``noise_horizon``. At 0 only the immediate increase counts.

    An operator that runs under ``torch.no_grad`` cannot be probed; for it alone, the propagated score stands in.

    Returns:
        Squared gradient units per training step of one worker (the baselines: ``kind.unit``). With gradients averaged
        over N workers, the share of one worker in the variance of the averaged gradient is 1/N^2 of it.

    Raises:
        ModelError: The statistics belong to another graph.
        ProblemError: Statistics are missing for an operator.
        UnsupportedError: An option has a value that is not allowed.

    Source: purpose and bi-directional form from QSync (IPDPS 2024); variances and propagation ours.
    """
    check_number(gamma, "gamma", error=UnsupportedError)
    graph = graph_of(graph)
    device_formats = getattr(device_formats, "formats", device_formats)
    if not isinstance(device_formats, Mapping):
        raise UnsupportedError(
            f"device_formats is a {type(device_formats).__name__}: needed are a profile, or its formats (precision to "
            "border formats)"
        )
    _check_model(graph, statistics)
    horizon = _check_horizon(horizon)
    kind = _checked_kind(kind, graph, statistics)
    score = _Scorer(graph, statistics, options or NoiseOptions(), kind, gamma, seed, horizon)
    details: dict[str, dict[str, OperatorSensitivity]] = {}
    excluded: dict[str, dict[str, str]] = {}
    for operator in graph.by_role(Role.ADJUSTABLE):
        row = details[operator.name] = {}
        for precision, formats in device_formats.items():
            measured = statistics[operator.name]
            reason = overflow_reason(measured, precision, formats)
            formulas = measured.kind is not OperatorKind.ATTENTION or precision in ("FP32", *measured.measured)
            if reason is None and not formulas:
                reason = f"no noise formula for {operator.op_type} in {precision}"
            if reason is None:
                row[precision] = score(operator, precision, formats)
            else:
                excluded.setdefault(operator.name, {})[precision] = reason
    return SensitivityTable(kind=kind, details=details, excluded=excluded)


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

    Source: ours.
    """
    if not 0 <= momentum < 1:
        raise UnsupportedError(f"momentum is {momentum!r}: allowed are numbers from 0 to below 1")
    check_integer(steps, "steps", error=UnsupportedError)
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
    probed = {
        name: any(getattr(operator, name) for operator in statistics.operators)
        for name in ("gains", "adaptive_gains", "curvatures")
    }
    if kind is None:
        if probed["gains"]:
            return IndicatorKind.PROBED
        return IndicatorKind.PROGRESS if probed["adaptive_gains"] else IndicatorKind.PROPAGATED
    if kind not in list(IndicatorKind):
        raise UnsupportedError(f"kind is {kind!r}: allowed are {', '.join(IndicatorKind)}")
    gains = ("gains", "collect them with probes=2 or more, or use kind='propagated'")
    name, advice = {
        IndicatorKind.PROBED: gains,
        IndicatorKind.LOSS: gains,
        IndicatorKind.PROGRESS: ("adaptive_gains", "collect them with adaptive_probes=2 or more"),
        IndicatorKind.HESSIAN: ("curvatures", "collect them with curvature_probes=8 or more"),
    }.get(IndicatorKind(kind), ("", ""))
    if name and not probed[name]:
        raise ProblemError(f"the statistics of graph {graph.name!r} hold no {name.replace('_', ' ')}: {advice}")
    return IndicatorKind(kind)


class _Parts(NamedTuple):
    own: float = 0.0
    backward: float = 0.0
    forward: float = 0.0
    flips: float = 0.0


@dataclass
class _Scorer:
    """Sensitivity of one operator at one precision, by kind."""

    graph: OpGraph
    statistics: ModelStatistics
    options: NoiseOptions
    kind: IndicatorKind
    gamma: float
    seed: int
    horizon: float

    def __post_init__(self) -> None:
        self._ratios: dict[str, float] = {}
        if self.kind is IndicatorKind.DEPTH:
            # True distances, not QSync's layers, so that a residual shortcut does not make an operator shallow.
            self._to_input, self._to_loss = self.graph.distances_to_input(), self.graph.distances_to_loss()
        elif self.kind is IndicatorKind.PUBLISHED:
            self._layers = layers(self.graph)
            self._last_layer = max(self._layers.values())
        elif self.kind in (IndicatorKind.PROBED, IndicatorKind.LOSS, IndicatorKind.PROGRESS):
            is_adaptive = self.kind is IndicatorKind.PROGRESS
            self._rectifiers = Rectifiers(self.graph, self.statistics, adaptive=is_adaptive)

    @functools.cached_property
    def _propagation(self) -> Propagation:
        return Propagation(self.graph, self.statistics)

    def __call__(self, operator: Operator, precision: str, formats: PrecisionFormats) -> OperatorSensitivity:
        statistics = self.statistics[operator.name]
        results = variances(statistics, precision, formats, self.options)
        match self.kind:
            case IndicatorKind.PROPAGATED:
                parts = self._propagated(operator, statistics, results)
            case IndicatorKind.DEPTH:
                parts = self._by_depth(operator, statistics, results)
            case IndicatorKind.PUBLISHED:
                layer = self._layers[operator.name]
                score = published_score(statistics, precision, layer, self._last_layer, self.gamma)
                parts = _Parts(backward=score.backward, forward=score.forward)
            case IndicatorKind.PROBED | IndicatorKind.PROGRESS:
                parts = self._probed(operator, precision, formats, results)
            case IndicatorKind.LOSS:
                # The immediate increase of the loss arises in the forward pass; the rest is the cost of gradient noise.
                probed = self._probed(operator, precision, formats, results)
                parts = _Parts(*(self.horizon * part for part in probed))
                parts = parts._replace(forward=_fisher_score(statistics, results) + parts.forward)
            # A baseline's value counts where its noise arises: in the weights (own) or in the forward pass.
            case IndicatorKind.HESSIAN:
                noise = element_noise(statistics, precision, formats, self.options)
                parts = _Parts(forward=_hessian_increase(statistics, noise))
            case IndicatorKind.FISHER:
                parts = _Parts(forward=_fisher_score(statistics, results))
            case IndicatorKind.WEIGHT:
                noise = element_noise(statistics, precision, formats, self.options)
                parts = _Parts(own=_weight_variance(statistics, noise))
            case _:
                parts = _Parts(own=_random_score(operator.name, precision, self.seed))
        return OperatorSensitivity(**parts._asdict(), variances=results)

    def _propagated(self, operator: Operator, statistics: OperatorStatistics, results: OperatorVariances) -> _Parts:
        backward = 0.0
        for position, operand in operand_edges(operator, statistics).items():
            noise, gradient = getattr(results, f"{operand}_gradient"), getattr(statistics, f"{operand}_gradient")
            if noise is None or getattr(statistics, f"{operand}_parameter", None) is not None:
                continue
            effect = self._propagation.input_gradient_effect(operator.name, position)
            backward += effect.variance(noise, statistics.calls * gradient.square_sum)
        effect = self._propagation.output_effect(operator.name)
        forward = effect.variance(results.output, statistics.calls * statistics.output.square_sum)
        return _Parts(_own(statistics, results), backward, forward)

    def _by_depth(self, operator: Operator, statistics: OperatorStatistics, results: OperatorVariances) -> _Parts:
        # The operator itself is the first of the d that its backward noise reaches.
        depth = self._to_input[operator.name] + 1
        own = _own(statistics, results)
        noises = (results.first_gradient, results.second_gradient, results.third_gradient)
        gradients = sum(noise.total for noise in noises if noise is not None)
        forward = self.gamma * self._to_loss[operator.name] * results.output.total
        return _Parts(depth * own, depth * (gradients - own), forward)

    def _gains(self, statistics: OperatorStatistics) -> Mapping[str, Gain]:
        return statistics.adaptive_gains if self.kind is IndicatorKind.PROGRESS else statistics.gains

    def _by_formula(
        self, operator: Operator, precision: str, formats: PrecisionFormats, results: OperatorVariances
    ) -> _Parts:
        """The propagated score of an operator that could not be probed, as it runs without gradients.

        In the unit of the indicator ``progress`` it is scaled by the ratio of both scores, summed over the others.
        """
        parts = self._propagated(operator, self.statistics[operator.name], results)
        if self.kind is not IndicatorKind.PROGRESS or not any(parts):
            return parts
        if precision not in self._ratios:
            probed = formula = 0.0
            for other in self.graph.by_role(Role.ADJUSTABLE):
                statistics = self.statistics[other.name]
                if statistics.adaptive_gains and overflow_reason(statistics, precision, formats) is None:
                    own = variances(statistics, precision, formats, self.options)
                    probed += sum(self._probed(other, precision, formats, own)[:3])
                    formula += sum(self._propagated(other, statistics, own)[:3])
            self._ratios[precision] = ratio(probed, formula)
        return _Parts(*(self._ratios[precision] * part for part in parts))

    def _probed(
        self, operator: Operator, precision: str, formats: PrecisionFormats, results: OperatorVariances
    ) -> _Parts:
        """The probed total, which is exact to first order for independent errors, split by direction.

        Sign changes of rectifiers are added. The part of the operator's own weight gradients follows from the formulas;
        by as much as their measured error exceeds that of independent errors, the total grows. The 16-bit rounding of
        8-bit operands when the backward pass reads them is left out: it is below a thousandth.
        """
        statistics = self.statistics[operator.name]
        gains = self._gains(statistics)
        if not gains:
            return self._by_formula(operator, precision, formats, results)
        flips = self._rectifiers.variance({statistics.name: results.output.total})
        noise = element_noise(statistics, precision, formats, self.options)
        effects = {name: _weighed(parts, gains[name]) if name in gains else 0.0 for name, parts in noise.items()}
        total = flips + sum(effects.values())
        forward = flips + sum(effect for name, effect in effects.items() if not name.endswith("gradient"))
        own, excess = _own(statistics, results, gains), 0.0
        if statistics.nearest:
            independent = variances(statistics, precision, formats, self.options, nearest=False)
            excess = max(0.0, own - _own(statistics, independent, gains))
        inside = min(total, own - excess)
        share = ratio(forward, total)
        return _Parts(inside + excess, (total - inside) * (1.0 - share), (total - inside) * share, flips)


def _weighed(noise: NoiseParts, weights: Gain | Curvature) -> float:
    """Noise of a tensor times the weight of its shape."""
    return sum(v * (weights.floating if shape == "floating" else weights.uniform) for v, shape in noise)


def _hessian_increase(statistics: OperatorStatistics, noise: ElementNoise) -> float:
    """Expected increase of the loss from rounding an operator's forward pass, to second order; at least 0.

    ``trace(H_t) * v_t / 2``, summed over the tensors t that are rounded.

    Source: HAWQ-V2 (Dong et al., NeurIPS 2020), eq. of the average Hessian trace; activations and noise shapes ours.
    """
    total = 0.0
    for tensor in (*OPERANDS, "output"):
        if tensor in statistics.curvatures:
            total += 0.5 * _weighed(noise.get(tensor, ()), statistics.curvatures[tensor])
    return max(0.0, total)


def _fisher_score(statistics: OperatorStatistics, results: OperatorVariances) -> float:
    """Squared output gradient times squared output error, taken as independent and summed over the output's elements.

    In squared units of the loss. 0 for a frozen operator before the first trained parameter, whose output has no
    gradient.

    Source:
        The score of NVIDIA Model Optimizer's ``auto_quantize``; there from one run of the quantized operator, here from
        its error's variance.
    """
    return statistics.output_gradient.mean_square * results.output.total


def _weight_variance(statistics: OperatorStatistics, noise: ElementNoise) -> float:
    """Variance of the rounded weights of an operator, summed over their elements; 0 without weights."""
    total = 0.0
    for name in ("first", "second"):
        if getattr(statistics, f"{name}_parameter") is not None:
            total += getattr(statistics, name).elements * sum(variance for variance, _ in noise.get(name, ()))
    return total


def _random_score(operator: str, precision: str, seed: int) -> float:
    """A number in [0, 1) by operator and seed, divided by 4 for every finer format; 0 for FP32.

    The same on every machine.
    """
    if precision == "FP32":
        return 0.0
    digest = hashlib.sha256(f"{seed}:{operator}".encode()).digest()
    coarser = list(dict.fromkeys(form.operands for form in FORMATS.values()))
    return int.from_bytes(digest[:8], "big") / 2**64 * 4.0 ** -coarser.index(number_format(precision).operands)


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
