"""What an indicator, a cost model and a runtime must be able to do, so that other packages can bring their own.

Solvers and formulations have their contract in ``qsync_opt.formulations``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from qsync_opt.cluster.cluster import DeviceType
from qsync_opt.costs.profile import DeviceProfile
from qsync_opt.model.graph import OpGraph
from qsync_opt.model.weights import WeightStatistics
from qsync_opt.numerics.formats import PrecisionFormats
from qsync_opt.sensitivity.statistics import ModelStatistics


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


@runtime_checkable
class Runtime(Protocol):
    """What a framework must offer so that plans can be made for it and carried out on it.

    A runtime turns its framework's model into an operator graph, says in which formats a device computes, measures what
    that costs, and puts a plan on the model. Names of operators are the joint: a graph's names must be those that
    ``apply`` understands, on every run and every worker. ``Any`` stands for the framework's own models and devices.
    """

    @property
    def name(self) -> str:
        """Name of the framework, as in the registry."""
        ...

    @property
    def trains(self) -> bool:
        """Whether models run backward under a plan; if not, plans are for inference."""
        ...

    def capture(self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> OpGraph:
        """Operators of one forward pass (in training, where the runtime trains), without changing the model.

        Raises:
            ModelError: The model cannot be captured; the text says where and why.
        """
        ...

    def device_formats(self, device: Any) -> Mapping[str, PrecisionFormats]:
        """Precisions in which a device can be planned, coarsest first, with the formats at their borders.

        Raises:
            UnsupportedError: No plan can be made for such a device.
        """
        ...

    def operator_precisions(self, op_type: str, device: Any) -> tuple[str, ...]:
        """Those of the device's precisions in which a kind of operator can run; FP32 alone for kinds not adjustable."""
        ...

    def profile(
        self,
        model: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None = None,
        *,
        device: Any = "cpu",
        precisions: Sequence[str] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        repeats: int = 6,
        name: str | None = None,
    ) -> DeviceProfile:
        """Measure every operator of a model in every precision that it can run in on a device, and the casts between.

        Args:
            model: Without a plan, on ``device``.
            args: Of one forward pass.
            kwargs: The same by name.
            device: Where.
            precisions: Those that plans may use; None: all of the device. FP32 is always among them.
            cache_dir: Folder of measurements that equal runs share; None keeps none.
            repeats: Runs per round of measuring.
            name: Of the device, where that of the hardware does not tell it from others.

        Returns:
            A profile of the graph that `capture` gives. Without training its backward times are zero.

        Raises:
            UnsupportedError: The device lacks a precision.
            ProblemError: The cache folder cannot be used.
        """
        ...

    def apply(self, model: Any, plan: Any, device_type: str | None = None, *, graph: OpGraph | None = None) -> Any:
        """Make the model run under the plan of a device type.

        Raises:
            ModelError: The plan is for another model.
            UnsupportedError: The device or an operator cannot do what the plan wants.
            NotReadyError: A plan is applied already.
        """
        ...

    def undo(self, model: Any) -> Any:
        """Give the model back as it was before ``apply``.

        Raises:
            NotReadyError: No plan is applied.
        """
        ...
