"""What do rectifiers add that noise pushes over zero? Probed one by one, added up per operator or for a whole plan.

A rectifier that flips adds the variance ``F_l(r)`` to the gradient, a function of the noise-to-signal ratio r at its
input that was measured at some ratios (``Signal.flips``); about the root of r where many elements are near zero. Noise
of operator i arrives at rectifier l as the share ``a_li`` of its ratio ``r_i``, and there noise of all operators adds
up *before* elements flip. An operator alone adds ``sum over l of F_l(a_li r_i)``, a plan ``sum over l of F_l(sum over i
of a_li r_i)``, which is less than the sum over its operators.

The shares come from a sweep over the graph, which knows nothing of how channels differ. What arrives from all operators
together was measured where the rectifier was probed (``Signal.noise_ratio``), with INT8 operands: the shares of
each rectifier are scaled so that they come to that.

Noise of zero mean also *shifts* the gradient: its mean is the gradient of the smoothed loss, which exceeds the loss by
half of noise times curvature, and in a network of rectifiers curvature sits where they bend (noise d that opens one has
``E[d dm] = sigma phi(z / sigma) > 0`` with its mask m). Deviations with a mean add up before they are squared. The
squared shift was measured with all products in INT8 (``ModelStatistics.shift``, without that of independent flips: that
is in ``F_l``). To lowest order the shift itself goes with the noise's energy: a plan moves the gradient by the share w
of that, hence adds ``w^2`` of its square, where w is the mean over rectifiers, weighted by ``F_l``, of the energy that
arrives under the plan over that under uniform INT8, as if shifts by different operators had one direction. An operator
alone adds next to nothing in this way.
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
from qsync_opt.sensitivity.statistics import FLIP_RATIOS, ModelStatistics, OperatorKind
from qsync_opt.sensitivity.table import IndicatorKind, SensitivityTable

_WIDE = PrecisionFormats(output="FP32", gradient_input="FP32", gradient_output="FP32")


def flipped_variance(measured: Sequence[float], ratio: float) -> float:
    """``F(ratio)`` between and beyond the measured ratios, on logarithmic scales; beyond them it goes with the root.

    Args:
        measured: At the ratios of ``FLIP_RATIOS``.
        ratio: Noise-to-signal ratio at the rectifier's input.
    """
    if ratio <= 0:
        return 0.0
    if ratio <= FLIP_RATIOS[0]:
        return measured[0] * math.sqrt(ratio / FLIP_RATIOS[0])
    if ratio >= FLIP_RATIOS[-1]:
        return measured[-1] * math.sqrt(ratio / FLIP_RATIOS[-1])
    above = bisect.bisect_left(FLIP_RATIOS, ratio)
    low, high = measured[above - 1], measured[above]
    share = math.log(ratio / FLIP_RATIOS[above - 1]) / math.log(FLIP_RATIOS[above] / FLIP_RATIOS[above - 1])
    if low <= 0 or high <= 0:
        return low + share * (high - low)
    return low * math.exp(share * math.log(high / low))


class Flips:
    """Rectifiers and max-pools of a model that were probed."""

    def __init__(self, graph: OpGraph, statistics: ModelStatistics, *, adaptive: bool = False) -> None:
        """Find how noise arrives at them.

        Args:
            graph: The model.
            statistics: Collected from it.
            adaptive: In the unit of the adaptive gains.
        """
        self._statistics = statistics
        self._names = [operator.name for operator in graph.by_role(Role.ADJUSTABLE)]
        self._places = {name: i for i, name in enumerate(self._names)}
        found = {
            name: signal.adaptive_flips if adaptive else signal.flips for name, signal in statistics.signals.items()
        }
        known = [operator for operator in graph if any(found.get(operator.name, ())) and operator.inputs]
        self._measured = [found[operator.name] for operator in known]
        self._uniform = [statistics.signals[operator.name].noise_ratio for operator in known]
        self._arriving: FloatArray = np.zeros((0, len(self._names)))
        if known:
            transfers = Propagation(graph, statistics).transfers(self._names)
            self._arriving = np.stack([transfers[operator.inputs[0]] for operator in known])
            self._scale()

    def _scale(self) -> None:
        """Make what arrives from all products in INT8 what was measured, where it was (and is not 0)."""
        if not any(self._uniform):
            return
        own = {}
        for name in self._names:
            found = self._statistics.find(name)
            if found is not None and found.kind is OperatorKind.PRODUCT:
                own[name] = variances(found, "INT8", _WIDE).output.total
        for row, (ratio, expected) in enumerate(zip(self._uniform, self._ratios(own), strict=True)):
            if ratio > 0 and expected > 0:
                self._arriving[row] *= ratio / expected

    def variance(self, output_variances: Mapping[str, float]) -> float:
        """What all rectifiers add when these operators are noisy together.

        Args:
            output_variances: Operator to the variance that rounding gives its output, summed over its elements.
        """
        ratios = self._ratios(output_variances)
        return sum(flipped_variance(known, ratio) for known, ratio in zip(self._measured, ratios, strict=True))

    def shift(self, output_variances: Mapping[str, float]) -> float:
        """Squared norm by which the gradient's mean moves when these operators are noisy together.

        Args:
            output_variances: As for ``variance``.
        """
        found = list(zip(self._measured, self._uniform, self._ratios(output_variances), strict=True))
        added = [flipped_variance(known, uniform) for known, uniform, _ in found]
        if self._statistics.shift <= 0 or sum(added) <= 0:
            return 0.0
        shares = [ratio / uniform if uniform > 0 else 0.0 for _, uniform, ratio in found]
        share = sum(f * s for f, s in zip(added, shares, strict=True)) / sum(added)
        return self._statistics.shift * share**2

    def _ratios(self, output_variances: Mapping[str, float]) -> list[float]:
        """Noise-to-signal ratio that arrives at each rectifier."""
        own = np.zeros(len(self._names))
        for name, variance in output_variances.items():
            place, measured = self._places.get(name), self._statistics.find(name)
            if place is not None and measured is not None and variance > 0 and measured.output.square_sum > 0:
                own[place] = variance / (measured.calls * measured.output.square_sum)
        found: list[float] = (self._arriving @ own).tolist()
        return found


class VarianceParts(NamedTuple):
    """Of what a plan adds to the gradient's variance: what is smooth in the noise, flips, and the mean's shift."""

    smooth: float
    flips: float
    shift: float


def plan_variance(
    graph: OpGraph, statistics: ModelStatistics, table: SensitivityTable, plan: Mapping[str, str]
) -> float:
    """Increase of the gradient's variance under a plan, with flips of rectifiers counted together.

    Sensitivities add up as far as errors are independent and their effects of first order. Flips of rectifiers grow
    with the root of all noise that arrives, so that their sum over operators overstates a plan, and the shift of the
    mean gradient with its square, so that no operator alone shows it (``qsync_opt.sensitivity.rectifiers``).

    Args:
        graph: The model.
        statistics: Collected from it with probes; with rectifiers, of ``whole_batches``, as others know no shift.
        table: Sensitivities made of them, of kind ``probed``.
        plan: Operator to precision; an operator that is not named runs in FP32.

    Returns:
        Squared gradient units per training step of one worker. Without rectifiers the sum of the sensitivities.

    Raises:
        UnsupportedError: A table of another kind, or an operator or precision that it does not have.

    Source:
        Ours.
    """
    return sum(plan_variance_parts(graph, statistics, table, plan))


def plan_variance_parts(
    graph: OpGraph, statistics: ModelStatistics, table: SensitivityTable, plan: Mapping[str, str]
) -> VarianceParts:
    """What `plan_variance` is the sum of; arguments and errors as there."""
    if table.kind is not IndicatorKind.PROBED:
        raise UnsupportedError(f"the sensitivities are of kind {str(table.kind)!r}: probed ones are needed")
    smooth, noisy = 0.0, {}
    for name, precision in plan.items():
        if name not in table or precision not in table[name]:
            raise UnsupportedError(f"the sensitivities know no {precision} of operator {name!r}: plan what they have")
        part = table.details[name][precision]
        smooth += part.value - part.flips
        noisy[name] = part.variances.output.total
    flips = Flips(graph, statistics)
    return VarianceParts(smooth, flips.variance(noisy), flips.shift(noisy))
