"""Plans as runtimes take them: with device types, or for the one at hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from qsync_opt.errors import ModelError


@runtime_checkable
class DevicePlans(Protocol):
    """Anything that holds, per device type, the precision of each operator (a ``Plan`` does)."""

    @property
    def devices(self) -> Mapping[str, Mapping[str, str]]:
        """Device type to operator to precision."""


def precisions_of(plan: Mapping[str, str] | DevicePlans, device_type: str | None = None) -> dict[str, str]:
    """Operator to precision on one device type, which need not be named if it is the only one.

    Raises:
        ModelError: The plan lacks the device type, has several to choose from, or is no plan.
    """
    if not isinstance(plan, DevicePlans):
        if not isinstance(plan, Mapping) or not all(isinstance(text, str) for entry in plan.items() for text in entry):
            raise ModelError(
                f"the plan is a {type(plan).__name__}: a Plan is needed, or a mapping of texts, operator to precision"
            )
        return dict(plan)
    known = ", ".join(plan.devices)
    if device_type is None:
        if len(plan.devices) != 1:
            raise ModelError(f"the plan has several device types ({known}): say which one with device_type")
        (device_type,) = plan.devices
    if device_type not in plan.devices:
        raise ModelError(f"the plan has no device type {device_type!r}: it has {known}")
    return dict(plan.devices[device_type])
