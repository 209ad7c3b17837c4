"""What an indicator and a cost model must be able to do, so that other packages can bring their own.

Solvers and formulations have their contract in ``qsync_opt.formulations``, runtimes in ``qsync_opt.runtimes.base``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from qsync_opt.cluster import DeviceType
from qsync_opt.device_profile import DeviceProfile
from qsync_opt.graph import OpGraph
from qsync_opt.precision import PrecisionFormats
from qsync_opt.statistics import ModelStatistics
from qsync_opt.weights import WeightStatistics


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKnowledge:
    """What is known of a model beside its graph: collected ``statistics``, values of its ``weights``, or neither."""

    statistics: ModelStatistics | None = None
    weights: Mapping[str, WeightStatistics] | None = None


class Indicator(Protocol):
    """Says how sensitive training is to each operator's precision."""

    def sensitivities(
        self, graph: OpGraph, knowledge: ModelKnowledge, device_formats: Mapping[str, PrecisionFormats]
    ) -> Mapping[str, Mapping[str, float]]:
        """Sensitivity of every adjustable operator at the precisions of a device.

        Args:
            graph: The model.
            knowledge: What is known of it.
            device_formats: The device's precisions with their border formats.

        Returns:
            Operator to precision to a finite number of at least 0; FP32 is 0 or left out. A precision that is left out
            otherwise is one that the operator must not get.

        Raises:
            ProblemError: ``knowledge`` lacks what this indicator needs; the text says what to collect.
        """
        ...

    @property
    def estimate(self) -> str | None:
        """What the values were estimated by, for labels; None if they come from collected statistics."""
        ...


class CostModel(Protocol):
    """Says what every operator costs on a device type."""

    def profile(self, graph: OpGraph, device: DeviceType) -> DeviceProfile:
        """Costs of a model on a device type.

        Args:
            graph: The model.
            device: The type, as in the cluster file.

        Returns:
            A profile of this graph with the precisions of ``device``. One that was not measured says so in its option
            ``estimated_by``.

        Raises:
            ProblemError: There is no profile of this device.
            UnsupportedError: This model knows nothing of such a device.
        """
        ...
