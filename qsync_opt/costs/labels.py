"""How figures that nobody measured are told apart: labels that travel in problem and plan files.

A problem whose costs or sensitivities are estimates says so under the extension key ``x-estimates``; plans made for it
carry the same note, and everything that shows them shows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qsync_opt.costs.profile import DeviceProfile
from qsync_opt.io import Extras

ESTIMATES_KEY = "x-estimates"
"""Top-level extension key of problem and plan files: ``{"costs": {device: text}, "sensitivity": text}``."""
ESTIMATE_OPTION = "estimated_by"
"""Option of a profile that was not measured: what its figures are from."""
FP32_SHARE_OPTION = "fp32_share"
"""Option of a profile: time of a step under a plan of FP32 alone, as a share of what its operators' costs say."""
MEASURED_OPTION = "measured"
"""Option of a profile: how its costs were measured, in words."""


def estimated_by(profile: DeviceProfile) -> str | None:
    """What the figures of a profile were estimated by, or None if they were measured."""
    source = profile.options.get(ESTIMATE_OPTION)
    return None if source is None else str(source)


def estimate_extras(
    profiles: Mapping[str, DeviceProfile], sensitivity: str | None = None
) -> dict[tuple[str, ...], Any]:
    """The extension key of a problem that some estimates went into; empty if all was measured.

    Args:
        profiles: Profile per device type.
        sensitivity: What the sensitivities were estimated by; None: they were computed from collected statistics.
    """
    sources = {name: source for name, profile in profiles.items() if (source := estimated_by(profile)) is not None}
    note: dict[str, Any] = {"costs": sources} if sources else {}
    if sensitivity is not None:
        note["sensitivity"] = sensitivity
    return {(ESTIMATES_KEY,): note} if note else {}


def carried_estimates(extras: Extras) -> dict[tuple[str, ...], Any]:
    """The part of a problem's extension keys that its plans carry too."""
    return {(ESTIMATES_KEY,): extras[ESTIMATES_KEY,]} if (ESTIMATES_KEY,) in extras else {}


def estimate_lines(extras: Extras) -> tuple[str, ...]:
    """What a problem or plan was estimated from, one line each; empty if it names no estimates."""
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
