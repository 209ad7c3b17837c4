"""Labels of estimated figures: the extension key ``x-estimates`` of problem and plan files.

Problems with estimated costs or sensitivities have it, their plans have the same, and every display shows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qsync_opt.costs.profile import DeviceProfile
from qsync_opt.io import Extras

ESTIMATES_KEY = "x-estimates"
"""Top-level extension key of problem and plan files: ``{"costs": {device: text}, "sensitivity": text}``."""
ESTIMATE_OPTION = "estimated_by"
"""Option of a profile that was not (all) measured: where its figures are from."""
FP32_SHARE_OPTION = "fp32_share"
"""Option of a profile: time of a step in FP32 alone, as a share of the sum over its operators."""
MEASURED_OPTION = "measured"
"""Option of a profile: how its costs were measured, in words."""


def estimated_by(profile: DeviceProfile) -> str | None:
    """Where the figures of a profile are from if they were not measured, else None."""
    source = profile.options.get(ESTIMATE_OPTION)
    return None if source is None else str(source)


def estimate_extras(
    profiles: Mapping[str, DeviceProfile], sensitivity: str | None = None
) -> dict[tuple[str, ...], Any]:
    """The extension key of a problem with estimates; empty if all was measured.

    ``sensitivity`` says where the sensitivities are from; None: they were computed from collected statistics.
    """
    sources = {name: source for name, profile in profiles.items() if (source := estimated_by(profile)) is not None}
    note: dict[str, Any] = {"costs": sources} if sources else {}
    if sensitivity is not None:
        note["sensitivity"] = sensitivity
    return {(ESTIMATES_KEY,): note} if note else {}


def carried_estimates(extras: Extras) -> dict[tuple[str, ...], Any]:
    """The extension keys of a problem that its plans have too."""
    return {(ESTIMATES_KEY,): extras[ESTIMATES_KEY,]} if (ESTIMATES_KEY,) in extras else {}


def estimate_lines(extras: Extras) -> tuple[str, ...]:
    """The estimates of a problem or plan, one line of text each."""
    note = extras.get((ESTIMATES_KEY,))
    if not isinstance(note, Mapping):
        return ()
    costs = note.get("costs")
    lines = []
    if isinstance(costs, Mapping):
        lines = [f"costs of {device} are estimates: {source}" for device, source in costs.items()]
    if note.get("sensitivity") is not None:
        lines.append(f"sensitivities are estimates: {note['sensitivity']}")
    return tuple(lines)
