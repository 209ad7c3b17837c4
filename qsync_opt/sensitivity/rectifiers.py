"""Gradient variance from sign changes of rectifiers, per operator or for a whole plan.

A rectifier whose input changes sign adds the variance ``F_l(r)`` to the gradient, a function of the noise-to-signal
ratio r at its input that was measured at some ratios (``Signal.flips``); about the root of r where many elements are
near zero. Noise of operator i reaches rectifier l as the share ``a_li`` of its ratio ``r_i``, and there the noise of
all operators adds up *before* signs change. An operator alone adds ``sum over l of F_l(a_li r_i)``, a plan
``sum over l of F_l(sum over i of a_li r_i)``, which is less than the sum over its operators.

The shares come from a sweep over the graph, which ignores differences between channels. The ratio from all operators
together was measured where the rectifier was probed (``Signal.noise_ratio``), with INT8 operands: the shares of each
rectifier are scaled to agree with it.

Noise of zero mean also *shifts* the gradient: its mean is the gradient of the smoothed loss, which exceeds the loss by
half of noise times curvature, and in a network of rectifiers curvature sits where they bend (noise d that opens one has
``E[d dm] = sigma phi(z / sigma) > 0`` with its mask m). Deviations with a mean add up before they are squared. The
squared shift was measured with all products in INT8 (``ModelStatistics.shift``, without that of independent sign
changes, which is in ``F_l``). To lowest order the shift is proportional to the noise's energy: a plan moves the
gradient by the share w of it, hence adds ``w^2`` of its square, where w is the mean over rectifiers, weighted by
``F_l``, of the energy that arrives under the plan over that under uniform INT8, as if shifts by different operators had
one direction. An operator alone adds next to nothing in this way.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from qsync_opt.errors import UnsupportedError
from qsync_opt.model import OpGraph, Role
from qsync_opt.numerics import PrecisionFormats
from qsync_opt.sensitivity.propagation import FloatArray, Propagation
from qsync_opt.sensitivity.rounding_variance import variances
from qsync_opt.sensitivity.statistics import SIGN_CHANGE_RATIOS, ModelStatistics, OperatorKind
from qsync_opt.sensitivity.table import IndicatorKind, SensitivityTable

_WIDE = PrecisionFormats(output="FP32", gradient_input="FP32", gradient_output="FP32")


class VarianceParts(NamedTuple):
    """Gradient variance that a plan adds: part that is smooth in the noise, sign changes, and the mean's shift."""

    smooth: float
    flips: float
    shift: float


def plan_variance(
    graph: OpGraph, statistics: ModelStatistics, table: SensitivityTable, plan: Mapping[str, str]
) -> float:
    """Increase of the gradient's variance under a plan, with sign changes of rectifiers counted together.

    Sensitivities add up as far as errors are independent and their effects of first order. The variance of sign changes
    grows with the root of all noise that arrives, so that the sum over operators overstates a plan, and the shift of
    the mean gradient with its square, so that no operator alone shows it (``qsync_opt.sensitivity.rectifiers``).

    Args:
        graph: The model.
        statistics: Collected from it with probes; with rectifiers, of ``whole_batches``, as others know no shift.
        table: Sensitivities computed from them, of kind ``probed``.
        plan: Operator to precision; an operator without one runs in FP32.

    Returns:
        Squared gradient units per training step of one worker. Without rectifiers the sum of the sensitivities.

    Raises:
        UnsupportedError: A table of another kind, or an operator or precision that it does not have.

    Source: ours.
    """
    return sum(plan_variance_parts(graph, statistics, table, plan))


def plan_variance_parts(
    graph: OpGraph, statistics: ModelStatistics, table: SensitivityTable, plan: Mapping[str, str]
) -> VarianceParts:
    """The summands of `plan_variance`; arguments and errors are the same."""
    if table.kind is not IndicatorKind.PROBED:
        raise UnsupportedError(f"the sensitivities are of kind {str(table.kind)!r}: probed ones are needed")
    smooth, noise = 0.0, {}
    for name, precision in plan.items():
        if name not in table or precision not in table[name]:
            raise UnsupportedError(f"the sensitivities know no {precision} of operator {name!r}: plan what they have")
        part = table.details[name][precision]
        smooth += part.value - part.flips
        noise[name] = part.variances.output.total
    rectifiers = Rectifiers(graph, statistics)
    return VarianceParts(smooth, rectifiers.variance(noise), rectifiers.shift(noise))


class Rectifiers:
    """The probed rectifiers and max-pools of a model; with ``adaptive`` in the unit of the adaptive gains.

    Variances of outputs are those that rounding gives an operator's output, summed over its elements.
    """

    def __init__(self, graph: OpGraph, statistics: ModelStatistics, *, adaptive: bool = False) -> None:
        self._statistics = statistics
        self._names = [operator.name for operator in graph.by_role(Role.ADJUSTABLE)]
        curves = {
            name: signal.adaptive_flips if adaptive else signal.flips for name, signal in statistics.signals.items()
        }
        probed = [operator for operator in graph if any(curves.get(operator.name, ())) and operator.inputs]
        self._curves = [curves[operator.name] for operator in probed]
        self._int8_ratios = [statistics.signals[operator.name].noise_ratio for operator in probed]
        self._shares: FloatArray = np.zeros((0, len(self._names)))
        if probed:
            transfers = Propagation(graph, statistics).transfers(self._names)
            self._shares = np.stack([transfers[operator.inputs[0]] for operator in probed])
            self._scale_shares()

    def variance(self, output_variances: Mapping[str, float]) -> float:
        """Variance that all rectifiers add when these operators are noisy together."""
        ratios = self._ratios(output_variances)
        return sum(sign_change_variance(curve, ratio) for curve, ratio in zip(self._curves, ratios, strict=True))

    def shift(self, output_variances: Mapping[str, float]) -> float:
        """Squared norm of the shift of the mean gradient when these operators are noisy together."""
        weights = [
            sign_change_variance(curve, int8) for curve, int8 in zip(self._curves, self._int8_ratios, strict=True)
        ]
        if self._statistics.shift <= 0 or sum(weights) <= 0:
            return 0.0
        ratios = zip(self._ratios(output_variances), self._int8_ratios, strict=True)
        shares = [ratio / int8 if int8 > 0 else 0.0 for ratio, int8 in ratios]
        share = sum(weight * share for weight, share in zip(weights, shares, strict=True)) / sum(weights)
        return self._statistics.shift * share**2

    def _ratios(self, output_variances: Mapping[str, float]) -> list[float]:
        own = np.zeros(len(self._names))
        for place, name in enumerate(self._names):
            variance, measured = output_variances.get(name, 0.0), self._statistics.find(name)
            if measured is not None and variance > 0 and measured.output.square_sum > 0:
                own[place] = variance / (measured.calls * measured.output.square_sum)
        return [float(ratio) for ratio in self._shares @ own]

    def _scale_shares(self) -> None:
        """Scale the shares to the ratios that were measured with all products in INT8, where those are not 0."""
        if not any(self._int8_ratios):
            return
        noise = {}
        for name in self._names:
            measured = self._statistics.find(name)
            if measured is not None and measured.kind is OperatorKind.PRODUCT:
                noise[name] = variances(measured, "INT8", _WIDE).output.total
        for row, (ratio, expected) in enumerate(zip(self._int8_ratios, self._ratios(noise), strict=True)):
            if ratio > 0 and expected > 0:
                self._shares[row] *= ratio / expected


def sign_change_variance(measured: Sequence[float], ratio: float) -> float:
    """``F(ratio)``, interpolated on logarithmic scales; beyond the measured ratios it is proportional to the root.

    ``measured`` are its values at ``SIGN_CHANGE_RATIOS``, ``ratio`` is noise to signal at the rectifier's input.
    """
    if ratio <= 0:
        return 0.0
    if ratio <= SIGN_CHANGE_RATIOS[0]:
        return measured[0] * math.sqrt(ratio / SIGN_CHANGE_RATIOS[0])
    if ratio >= SIGN_CHANGE_RATIOS[-1]:
        return measured[-1] * math.sqrt(ratio / SIGN_CHANGE_RATIOS[-1])
    above = bisect.bisect_left(SIGN_CHANGE_RATIOS, ratio)
    low, high = measured[above - 1], measured[above]
    before, behind = SIGN_CHANGE_RATIOS[above - 1], SIGN_CHANGE_RATIOS[above]
    share = math.log(ratio / before) / math.log(behind / before)
    if low <= 0 or high <= 0:
        return low + share * (high - low)
    return low * math.exp(share * math.log(high / low))
