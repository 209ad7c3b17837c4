"""The interface of runtimes: frameworks that capture models, measure costs and execute plans."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from qsync_opt.costs import DeviceProfile
from qsync_opt.model import OpGraph
from qsync_opt.numerics import PrecisionFormats


@runtime_checkable
class Runtime(Protocol):
    """A framework for which plans can be made and on which they can be executed.

    Operators are identified by name: those of a captured graph must be the ones that ``apply`` understands, in every
    run and on every worker. ``Any`` stands for the framework's own models and devices.
    """

    @property
    def name(self) -> str:
        """Name in the registry."""

    @property
    def trains(self) -> bool:
        """Whether models run backward under a plan; otherwise plans are for inference."""

    def capture(self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> OpGraph:
        """The operators of one forward pass (of training, if the runtime trains); does not change the model.

        Raises:
            ModelError: The model cannot be captured; the text says where and why.
        """

    def device_formats(self, device: Any) -> Mapping[str, PrecisionFormats]:
        """The precisions of a device, coarsest first, with their border formats.

        Raises:
            UnsupportedError: The device cannot be planned.
        """

    def operator_precisions(self, op_type: str, device: Any) -> tuple[str, ...]:
        """The device's precisions in which a kind of operator can run; only FP32 for kinds that are not adjustable."""

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
        """Measure every operator of a model in every precision of a device, and the casts between them.

        The model is on ``device`` and has no plan; ``args`` and ``kwargs`` are of one forward pass. ``precisions`` are
        those that plans may use (None: all of the device; FP32 is always measured), ``cache_dir`` is a folder of
        measurements that equal runs share (None: no cache), ``repeats`` the runs per round of measuring, and ``name``
        that of the device, where the name of the hardware is ambiguous.

        Returns:
            A profile of the graph that `capture` returns; without training its backward times are zero.

        Raises:
            UnsupportedError: The device lacks a precision.
            ProblemError: The cache folder is unusable.
        """

    def apply(self, model: Any, plan: Any, device_type: str | None = None, *, graph: OpGraph | None = None) -> Any:
        """Make a model run under the plan of a device type.

        Raises:
            ModelError: The plan is for another model.
            UnsupportedError: The device or an operator lacks a precision of the plan.
            NotReadyError: A plan is already applied.
        """

    def undo(self, model: Any) -> Any:
        """Restore the model as it was before ``apply``.

        Raises:
            NotReadyError: No plan is applied.
        """
