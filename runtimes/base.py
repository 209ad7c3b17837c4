"""What a training framework must offer so that plans can be made for it and carried out on it.

A runtime turns its framework's model into an operator graph, says in which formats a device computes, and puts a plan
on the model. Names of operators are the joint: a graph's names must be those that its ``apply`` understands, on every
run and every worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from qsync_opt.graph import OpGraph
from qsync_opt.precision import PrecisionFormats


@runtime_checkable
class Runtime(Protocol):
    """The contract of a runtime; ``Any`` stands for the framework's own kinds of model and device."""

    @property
    def name(self) -> str:
        """Name of the framework, as in the registry."""
        ...

    def capture(self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> OpGraph:
        """Operators of one training forward pass, without changing the model.

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
