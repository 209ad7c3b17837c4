"""Registered indicators, by the knowledge that they need: statistics, weights, or none.

The indicator ``statistics`` weighs noise by the best kind that the statistics allow; every `IndicatorKind` is
registered by its own name too, with the defaults of `sensitivities` for its parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from qsync_opt.errors import ProblemError
from qsync_opt.model import OpGraph, WeightStatistics
from qsync_opt.numerics import PrecisionFormats
from qsync_opt.sensitivity.scores import sensitivities
from qsync_opt.sensitivity.statistics import ModelStatistics
from qsync_opt.sensitivity.table import IndicatorKind, SensitivityTable
from qsync_opt.sensitivity.weights import FROM_FORMATS, FROM_WEIGHTS, weight_sensitivities

Table = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKnowledge:
    """Knowledge of a model besides its graph: collected ``statistics``, statistics of its ``weights``, or neither."""

    statistics: ModelStatistics | None = None
    weights: Mapping[str, WeightStatistics] | None = None


class Indicator(Protocol):
    """Estimates how sensitive training is to each operator's precision."""

    def sensitivities(
        self, graph: OpGraph, knowledge: ModelKnowledge, device_formats: Mapping[str, PrecisionFormats]
    ) -> Mapping[str, Mapping[str, float]]:
        """Sensitivity of every adjustable operator at the precisions of a device.

        Args:
            graph: The model.
            knowledge: Statistics or weights of it.
            device_formats: The device's precisions with their border formats.

        Returns:
            Operator to precision to a finite number of at least 0; FP32 is 0 or missing. The operator must not get any
            other missing precision.

        Raises:
            ProblemError: ``knowledge`` lacks what this indicator needs; the text says what to collect.
        """
        ...

    @property
    def estimate(self) -> str | None:
        """Source of the estimate, for labels; None if the values come from collected statistics."""
        ...


class StatisticsIndicator:
    """The variance that each operator adds to the gradient, from statistics collected on real batches."""

    estimate = None

    def __init__(self, kind: IndicatorKind | None = None) -> None:
        self._kind = kind

    def sensitivities(
        self, graph: OpGraph, knowledge: ModelKnowledge, device_formats: Mapping[str, PrecisionFormats]
    ) -> SensitivityTable:
        """Compute them; see `Indicator.sensitivities`."""
        if knowledge.statistics is None:
            name = "statistics" if self._kind is None else str(self._kind)
            raise ProblemError(
                f"the indicator {name!r} needs statistics of {graph.name!r}; collect them with "
                "qsync_opt.collect_statistics (on the command line: --statistics FILE), or use the indicator 'weights'"
            )
        return sensitivities(graph, knowledge.statistics, device_formats, kind=self._kind)


class WeightIndicator:
    """An estimate from the values of the weights alone."""

    estimate = FROM_WEIGHTS

    def sensitivities(
        self, graph: OpGraph, knowledge: ModelKnowledge, device_formats: Mapping[str, PrecisionFormats]
    ) -> Table:
        """Estimate them; see `Indicator.sensitivities`."""
        if knowledge.weights is None:
            raise ProblemError(
                f"the indicator 'weights' needs the values of the weights of {graph.name!r}; read them with "
                "qsync_opt.read_weights, or use the indicator 'formats'"
            )
        return weight_sensitivities(graph, device_formats, knowledge.weights)


class FormatIndicator:
    """An estimate from the number formats and the model's shapes alone."""

    estimate = FROM_FORMATS

    def sensitivities(
        self, graph: OpGraph, knowledge: ModelKnowledge, device_formats: Mapping[str, PrecisionFormats]
    ) -> Table:
        """Estimate them; see `Indicator.sensitivities`."""
        return weight_sensitivities(graph, device_formats, None)


# In the order of the kinds.
propagated, probed, loss, progress, depth, published, hessian, fisher, weight, random = (
    functools.partial(StatisticsIndicator, kind) for kind in IndicatorKind
)
