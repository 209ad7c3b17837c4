"""What an indicator, a cost model and a runtime must be able to do, so that other packages can bring their own.

Solvers and formulations have their contract in ``qsync_opt.formulations``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from qsync_opt.costs import DeviceProfile
from qsync_opt.model import OpGraph
from qsync_opt.numerics import PrecisionFormats


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
