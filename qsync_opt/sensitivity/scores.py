"""How much gradient variance does each operator add at each precision? The sensitivity that plans minimize.

A sensitivity is the increase of the variance of the gradient, summed over all weights of the model, when one operator
runs at a precision and all others in FP32; in squared gradient units, the same for all operators, so that they add up
over a plan. FP32 is 0. Three parts:

- own: noise in the operator's own weight gradient (rounded saved input, rounded gradient);
- backward: noise in the gradient it delivers perturbs the weight gradients between it and the input;
- forward: noise in its output perturbs the weight gradients between it and the loss.

Nothing is presumed about the order of precisions: an outlier can make INT8 worse than FP8, and a gradient that FP16
flushes to zero makes FP16 worse than BF16.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from qsync_opt.errors import ModelError, ProblemError, UnsupportedError
from qsync_opt.model import Operator, OpGraph, Role
from qsync_opt.numerics import PrecisionFormats
from qsync_opt.sensitivity.baselines import (
    ElementNoise,
    fisher_score,
    hessian_increase,
    random_score,
    weight_variance,
)
from qsync_opt.sensitivity.propagation import Distances, Propagation, distances, operand_edges, ratio
from qsync_opt.sensitivity.rectifiers import Flips
from qsync_opt.sensitivity.rounding_variance import (
    NoiseOptions,
    OperatorVariances,
    noise_parts,
    overflow_reason,
    tensor_rounding,
    variances,
)
from qsync_opt.sensitivity.statistics import GRADIENTS, Gain, ModelStatistics, OperatorKind, OperatorStatistics
from qsync_opt.sensitivity.table import IndicatorKind, OperatorSensitivity, SensitivityTable


def check_horizon(horizon: float) -> float:
    """The horizon, if it is one.

    Raises:
        UnsupportedError: It is negative or not finite.
    """
    if isinstance(horizon, bool) or not isinstance(horizon, int | float) or not 0 <= horizon < math.inf:
        raise UnsupportedError(
            f"horizon is {horizon!r}: a finite number of at least 0 is needed; qsync_opt.noise_horizon(optimizer, "
            "steps=...) gives it"
        )
    return float(horizon)


def horizon_of(*, learning_rate: float, steps: int, momentum: float = 0.0, mean_square_gradient: float = 1.0) -> float:
    """By how much variance of the gradient counts against what rounding costs at once.

    Args:
        learning_rate: Mean over the steps, as root mean square if it changes.
        steps: To come.
        momentum: Of SGD; it multiplies the effective rate by ``1 / (1 - momentum)``. 0 for Adam, which averages.
        mean_square_gradient: Of the elements of one batch's gradient, for SGD; 1 for Adam.

    Returns:
        The factor of the variance, ``steps * (learning_rate / (1 - momentum))^2 * mean_square_gradient``.

    Raises:
        UnsupportedError: An argument is out of its range.

    Source:
        Ours; see the module's text.
    """
    if not 0 <= momentum < 1:
        raise UnsupportedError(f"momentum is {momentum!r}: allowed are numbers from 0 to below 1")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise UnsupportedError(f"steps is {steps!r}: allowed are whole numbers of at least 0")
    return check_horizon(steps * (learning_rate / (1 - momentum)) ** 2 * mean_square_gradient)


def _own(operator: OperatorStatistics, found: OperatorVariances, gains: Mapping[str, Gain] | None = None) -> float:
    """Variance of the operator's own weight gradients, or by ``gains`` what it counts for, element by element."""
    total = 0.0
    for name, noise in (("first", found.first_gradient), ("second", found.second_gradient)):
        if noise is None or getattr(operator, f"{name}_parameter") is None:
            continue
        weight = 1.0
        if gains is not None:
            gain, elements = gains.get(f"{name}_gradient"), getattr(operator, f"{name}_gradient").elements
            weight = 0.0 if gain is None else ratio(gain.uniform, operator.calls * elements)
        total += weight * noise.total
    return total


def _propagated(
    operator: Operator, statistics: OperatorStatistics, found: OperatorVariances, propagation: Propagation
) -> OperatorSensitivity:
    backward = 0.0
    for position, operand in operand_edges(operator, statistics).items():
        noise, gradient = getattr(found, f"{operand}_gradient"), getattr(statistics, f"{operand}_gradient")
        if noise is None or getattr(statistics, f"{operand}_parameter", None) is not None:
            continue
        norm = statistics.calls * gradient.square_sum
        effect = propagation.input_gradient_effect(operator.name, position)
        backward += effect.variance(independent=ratio(noise.independent, norm), shared=ratio(noise.shared, norm))
    norm = statistics.calls * statistics.output.square_sum
    forward = propagation.output_effect(operator.name).variance(
        independent=ratio(found.output.independent, norm), shared=ratio(found.output.shared, norm)
    )
    return OperatorSensitivity(own=_own(statistics, found), backward=backward, forward=forward, variances=found)


def _gained(gain: Gain | None, parts: Iterable[tuple[float, str]]) -> float:
    """What element noise on one tensor comes to."""
    if gain is None:
        return 0.0
    return sum(variance * (gain.floating if shape == "floating" else gain.uniform) for variance, shape in parts)


def _element_noise(
    statistics: OperatorStatistics, precision: str, formats: PrecisionFormats, options: NoiseOptions
) -> ElementNoise:
    """Variance per element, with its shape, of every tensor that an operator rounds at a precision."""
    if statistics.kind is OperatorKind.ATTENTION:
        errors = statistics.measured.get(precision)
        if errors is None:
            return {}
        return {
            name: ((getattr(errors, name) / tensor.elements, "uniform"),)
            for name, tensor in statistics.tensors()
            if name in ("output", *GRADIENTS)
        }
    rounding = tensor_rounding(statistics, precision, formats, options)
    kinds = {
        "first": rounding.first,
        "second": rounding.second,
        "output": rounding.output,
        "output_gradient": rounding.gradient,
    }
    for operand in ("first", "second"):
        parameter = getattr(statistics, f"{operand}_parameter") is not None
        kinds[f"{operand}_gradient"] = rounding.weight_gradient if parameter else rounding.input_gradient
    return {
        name: noise_parts(statistics, name, (kinds[name],), options)
        for name, _ in statistics.tensors()
        if name in kinds
    }


def _probed(
    statistics: OperatorStatistics,
    precision: str,
    formats: PrecisionFormats,
    options: NoiseOptions,
    found: OperatorVariances,
    gains: Mapping[str, Gain],
    *,
    flips: float,
) -> OperatorSensitivity:
    """The probed total is exact to first order for errors that are independent; it is split by direction.

    ``flips`` is what rectifiers add. Own weight gradients are split off by formula. Added is by how much their measured
    error exceeds what independent errors would make of it. The 16-bit rounding of 8-bit operands when the backward pass
    reads them is left out: it is below a thousandth.
    """
    noise = _element_noise(statistics, precision, formats, options)
    gained = {name: _gained(gains.get(name), parts) for name, parts in noise.items()}
    total = flips + sum(gained.values())
    forward = flips + sum(value for name, value in gained.items() if not name.endswith("gradient"))
    own, repeated = _own(statistics, found, gains), 0.0
    if statistics.nearest:
        independent = variances(statistics, precision, formats, options, nearest=False)
        repeated = max(0.0, own - _own(statistics, independent, gains))
    inside = min(total, own - repeated)
    share = ratio(forward, total)
    return OperatorSensitivity(
        own=inside + repeated,
        backward=(total - inside) * (1.0 - share),
        forward=(total - inside) * share,
        flips=flips,
        variances=found,
    )


def _by_depth(
    operator: Operator, statistics: OperatorStatistics, found: OperatorVariances, far: Distances, gamma: float
) -> OperatorSensitivity:
    # The operator itself is the first of the d that its backward noise reaches.
    depth = far.to_input[operator.name] + 1
    own = _own(statistics, found)
    noises = (found.first_gradient, found.second_gradient, found.third_gradient)
    gradients = sum(noise.total for noise in noises if noise is not None)
    return OperatorSensitivity(
        own=depth * own,
        backward=depth * (gradients - own),
        forward=gamma * far.to_loss[operator.name] * found.output.total,
        variances=found,
    )


def _expected_loss(probed: OperatorSensitivity, at_once: float, horizon: float) -> OperatorSensitivity:
    """What rounding costs at once, which arises in the forward pass, and what its noise in the gradient costs."""
    return OperatorSensitivity(
        own=horizon * probed.own,
        backward=horizon * probed.backward,
        forward=at_once + horizon * probed.forward,
        flips=horizon * probed.flips,
        variances=probed.variances,
    )


def _baseline(
    kind: IndicatorKind,
    statistics: OperatorStatistics,
    precision: str,
    found: OperatorVariances,
    noise: ElementNoise,
    seed: int,
) -> OperatorSensitivity:
    """A baseline's value, counted where its noise arises: in the weights (own) or in the forward pass."""
    own = forward = 0.0
    if kind is IndicatorKind.HESSIAN:
        forward = hessian_increase(statistics, noise)
    elif kind is IndicatorKind.FISHER:
        forward = fisher_score(statistics, found)
    elif kind is IndicatorKind.WEIGHT:
        own = weight_variance(statistics, noise)
    else:
        own = random_score(statistics.name, precision, seed)
    return OperatorSensitivity(own=own, backward=0.0, forward=forward, variances=found)


def _check(graph: OpGraph, statistics: ModelStatistics, gamma: float) -> None:
    if not 0 <= gamma < float("inf"):
        raise UnsupportedError(f"gamma is {gamma!r}: a finite number of at least 0 is needed")
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


def _kind(kind: IndicatorKind | None, graph: OpGraph, statistics: ModelStatistics) -> IndicatorKind:
    probed = any(operator.gains for operator in statistics.operators)
    adaptive = any(operator.adaptive_gains for operator in statistics.operators)
    if kind is None:
        if probed:
            return IndicatorKind.PROBED
        return IndicatorKind.PROGRESS if adaptive else IndicatorKind.PROPAGATED
    if kind not in list(IndicatorKind):
        raise UnsupportedError(f"kind is {kind!r}: allowed are {', '.join(IndicatorKind)}")
    if kind in (IndicatorKind.PROBED, IndicatorKind.LOSS) and not probed:
        raise ProblemError(
            f"the statistics of graph {graph.name!r} hold no gains: collect them with probes=2 or more, or use "
            "kind='propagated'"
        )
    if kind == IndicatorKind.PROGRESS and not adaptive:
        raise ProblemError(
            f"the statistics of graph {graph.name!r} hold no adaptive gains: collect them with adaptive_probes=2 or "
            "more"
        )
    if kind == IndicatorKind.HESSIAN and not any(operator.curvatures for operator in statistics.operators):
        raise ProblemError(
            f"the statistics of graph {graph.name!r} hold no curvatures: collect them with curvature_probes=8 or more"
        )
    return IndicatorKind(kind)


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
        kind: How noise is weighed; None takes ``probed`` if the statistics hold gains, else ``progress`` if they hold
            adaptive ones, else ``propagated``. The table says which.
        gamma: Weight of forward against backward noise, for ``kind="depth"`` only.
        seed: For ``kind="random"`` only.
        horizon: Weight of the gradient's variance against the loss that is lost at once, for ``kind="loss"`` only; see
            ``noise_horizon``. At 0 the loss at once is all that counts.

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
    _check(graph, statistics, gamma)
    horizon = check_horizon(horizon)
    options = options or NoiseOptions()
    kind = _kind(kind, graph, statistics)
    far = distances(graph)
    propagation = Propagation(graph, statistics) if kind is IndicatorKind.PROPAGATED else None
    flips = None
    if kind in (IndicatorKind.PROBED, IndicatorKind.LOSS, IndicatorKind.PROGRESS):
        flips = Flips(graph, statistics, adaptive=kind is IndicatorKind.PROGRESS)
    table: dict[str, dict[str, OperatorSensitivity]] = {}
    excluded: dict[str, dict[str, str]] = {}
    for operator in graph.by_role(Role.ADJUSTABLE):
        measured = statistics[operator.name]
        row, refused = table.setdefault(operator.name, {}), excluded.setdefault(operator.name, {})
        for precision, formats in device_formats.items():
            reason = overflow_reason(measured, precision, formats)
            if measured.kind is OperatorKind.ATTENTION and precision not in ("FP32", *measured.measured):
                reason = reason or f"no noise formula for {operator.op_type} in {precision}"
            if reason is not None:
                refused[precision] = reason
                continue
            found = variances(measured, precision, formats, options)
            flipped = 0.0 if flips is None else flips.variance({operator.name: found.output.total})
            if propagation is not None:
                row[precision] = _propagated(operator, measured, found, propagation)
            elif kind is IndicatorKind.DEPTH:
                row[precision] = _by_depth(operator, measured, found, far, gamma)
            elif kind in (IndicatorKind.PROBED, IndicatorKind.LOSS):
                value = _probed(measured, precision, formats, options, found, measured.gains, flips=flipped)
                if kind is IndicatorKind.LOSS:
                    value = _expected_loss(value, fisher_score(measured, found), horizon)
                row[precision] = value
            elif kind is IndicatorKind.PROGRESS:
                gains = measured.adaptive_gains
                row[precision] = _probed(measured, precision, formats, options, found, gains, flips=flipped)
            else:
                noise = _element_noise(measured, precision, formats, options)
                row[precision] = _baseline(kind, measured, precision, found, noise, seed)
    return SensitivityTable(
        kind=kind,
        details=table,
        excluded={name: reasons for name, reasons in excluded.items() if reasons},
        distances=far,
    )
