"""By how much does a whole plan raise the variance of the gradient? Less than the sum where rectifiers flip."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from qsync_opt.errors import UnsupportedError
from qsync_opt.model.graph import OpGraph
from qsync_opt.sensitivity.rectifiers import Flips
from qsync_opt.sensitivity.statistics import ModelStatistics
from qsync_opt.sensitivity.table import IndicatorKind, SensitivityTable


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
