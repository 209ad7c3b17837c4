"""What a few measured times on a device tell about all of its kernels."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qsync_opt.costs.learned.intervals import conformal_ends
from qsync_opt.costs.learned.laws import class_name, kernel_of
from qsync_opt.costs.learned.programs import Program

MIN_TIMES = 19
"""Times from which on an interval can miss a twentieth on each side."""
_FEW = 3.0
"""Times that the assumption of no difference counts as."""
_STEEPEST = 0.5
_LARGE_ERROR = 0.7
"""Logarithm of an error beyond which it counts no more for the slope."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """A factor on times: ``exp(level) * (t / middle_ns) ** slope`` for t from ``low_ns`` to ``high_ns``.

    Beyond these it is that at the nearer end. The slope is above -1, so that no time falls when another rises.
    """

    level: float
    slope: float = 0.0
    middle_ns: float = 1.0
    low_ns: float = 1.0
    high_ns: float = 1.0

    def log(self, ns: float) -> float:
        """Logarithm of the factor on a predicted time."""
        return self.level + self.slope * math.log(min(max(ns, self.low_ns), self.high_ns) / self.middle_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Shifts by what they apply to, and logarithms of the ends of the interval (none: too few times)."""

    shifts: Mapping[str, Shift]
    ends: tuple[float, float] | None = None

    def log(self, program: Program, ns: float) -> float:
        """Logarithm of the factor on a program's predicted time."""
        return math.fsum(self.shifts[key].log(ns) for key in _keys(program) if key in self.shifts)


def fit_correction(programs: Sequence[Program], predicted_ns: Sequence[float], ns: Sequence[float]) -> Correction:
    """The correction for programs with these predicted and measured times."""
    rows = [(_keys(program), p, math.log(t / p)) for program, p, t in zip(programs, predicted_ns, ns, strict=True)]
    ends = None
    if len(rows) >= MIN_TIMES:
        left = []
        for i, (program, (_, predicted, log)) in enumerate(zip(programs, rows, strict=True)):
            without = Correction(shifts=_shifts([*rows[:i], *rows[i + 1 :]]))
            left.append(log - without.log(program, predicted))
        ends = conformal_ends(left)
    return Correction(shifts=_shifts(rows), ends=ends)


def _keys(program: Program) -> tuple[str, str, str]:
    return "", f"class {class_name(program)}", f"kernel {kernel_of(program)}"


def _shifts(rows: Sequence[tuple[tuple[str, str, str], float, float]]) -> dict[str, Shift]:
    """Shrunk medians of what is left over: of everything, of classes with a slope over the time, and of kernels."""
    shifts: dict[str, Shift] = {}
    left = [log for _, _, log in rows]
    for level in range(3):
        groups: dict[str, list[int]] = {}
        for i, (keys, _, _) in enumerate(rows):
            groups.setdefault(keys[level], []).append(i)
        for key, members in groups.items():
            middle = statistics.median(left[i] for i in members) * len(members) / (len(members) + _FEW)
            shift = Shift(level=middle)
            if level == 1:
                shift = _sloped(middle, [rows[i][1] for i in members], [left[i] - middle for i in members])
            shifts[key] = shift
            for i in members:
                left[i] -= shift.log(rows[i][1])
    return shifts


def _sloped(level: float, ns: Sequence[float], logs: Sequence[float]) -> Shift:
    """A shift whose slope is a ridge regression; one unit of the logarithm counts as no slope once more."""
    middle = statistics.median(ns)
    x = [math.log(value / middle) for value in ns]
    y = [min(max(log, -_LARGE_ERROR), _LARGE_ERROR) for log in logs]
    slope = math.fsum(a * b for a, b in zip(x, y, strict=True)) / (math.fsum(a * a for a in x) + 1.0)
    slope = min(max(slope, -_STEEPEST), _STEEPEST)
    return Shift(level=level, slope=slope, middle_ns=middle, low_ns=min(ns), high_ns=max(ns))
