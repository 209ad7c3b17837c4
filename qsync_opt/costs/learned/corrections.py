"""What a few measured times on a device tell about all of its kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from qsync_opt.costs.learned.intervals import conformal_ends
from qsync_opt.costs.learned.laws import class_name, kernel_of
from qsync_opt.costs.learned.programs import Program

MIN_TIMES = 19
"""Times from which on an interval can miss a twentieth on each side."""
_FEW = 1.0
"""Times that the assumption of no difference counts as."""
_LEVELS: tuple[Callable[[Program], str], ...] = (
    lambda program: "",
    lambda program: f"{program.precision} {program.phase}",
    lambda program: f"class {class_name(program)}",
    lambda program: f"kernel {kernel_of(program)}",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Logarithms of factors by what they apply to, and of the ends of the interval (none: too few times)."""

    shifts: Mapping[str, float]
    ends: tuple[float, float] | None = None

    def shift(self, program: Program) -> float:
        """Logarithm of the factor on a program's time."""
        return math.fsum(self.shifts.get(level(program), 0.0) for level in _LEVELS)


def fit_correction(programs: Sequence[Program], logs: Sequence[float], earlier: Correction | None = None) -> Correction:
    """The correction for programs whose measured over predicted times have the logarithms ``logs``, after another."""
    shifts = _shifts(programs, logs)
    ends = None
    if len(logs) >= MIN_TIMES:
        left = []
        for i, (program, log) in enumerate(zip(programs, logs, strict=True)):
            without = _shifts([*programs[:i], *programs[i + 1 :]], [*logs[:i], *logs[i + 1 :]])
            left.append(log - Correction(shifts=without).shift(program))
        ends = conformal_ends(left)
    if earlier is not None:
        shifts = {key: shifts.get(key, 0.0) + earlier.shifts.get(key, 0.0) for key in {*shifts, *earlier.shifts}}
    return Correction(shifts=shifts, ends=ends)


def _shifts(programs: Sequence[Program], logs: Sequence[float]) -> dict[str, float]:
    shifts: dict[str, float] = {}
    left = list(logs)
    for level in _LEVELS:
        groups: dict[str, list[int]] = {}
        for i, program in enumerate(programs):
            groups.setdefault(level(program), []).append(i)
        for key, members in groups.items():
            shifts[key] = math.fsum(left[i] for i in members) / (len(members) + _FEW)
            for i in members:
                left[i] -= shifts[key]
    return shifts
