"""Quantities as text with units: parsed from ``"16 GiB"``, ``"20 us"``, ``"10 Gbit/s"``, and formatted for people."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from qsync_opt.errors import ProblemError

_TIME_STEPS = ((1, "ns"), (10**3, "µs"), (10**6, "ms"), (10**9, "s"))
_MEMORY_STEPS = ((1, "KiB"), (2**10, "MiB"), (2**20, "GiB"), (2**30, "TiB"))
_PLAIN = (1e-4, 1e6)
"""Range of sensitivities that are written without an exponent."""
_ROUNDING = 1e-12
"""Largest relative difference of bound and objective that comes from rounding alone: they sum in different orders."""
_SMALLEST_GAP = 1e-5
"""Smaller gaps are written as smaller than this."""
_DIGITS = 3
"""Significant digits at least; more only to the left of the point."""


def format_time(time_ns: float) -> str:
    """Nanoseconds as text, such as ``"12.3 ms"``.

    Examples:
        >>> format_time(12_345_678), format_time(0), format_time(-900)
        ('12.3 ms', '0 ns', '-900 ns')
    """
    return _scaled(time_ns, _TIME_STEPS)


def format_memory(memory_kib: float) -> str:
    """KiB as text, such as ``"1.5 GiB"``."""
    return _scaled(memory_kib, _MEMORY_STEPS)


def format_sensitivity(value: float) -> str:
    """A sensitivity as text: four significant digits and no unit.

    Examples:
        >>> format_sensitivity(0.00012345), format_sensitivity(1.2e-7), format_sensitivity(10530)
        ('0.0001234', '1.2e-7', '10530')
    """
    if value == 0 or _PLAIN[0] <= abs(value) < _PLAIN[1]:
        return f"{float(f'{value:.3e}'):.10f}".rstrip("0").rstrip(".")
    mantissa, _, exponent = f"{value:.3e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def format_gap(gap: float) -> str:
    """A relative gap as text in percent; "0 %" where bound and objective are equal up to rounding.

    Examples:
        >>> format_gap(0.0123), format_gap(0.0), format_gap(1.5e-16), format_gap(3e-8)
        ('1.23 %', '0 %', '0 %', 'under 0.001 %')
    """
    if gap <= _ROUNDING:
        return "0 %"
    return f"{100 * gap:.3g} %" if gap >= _SMALLEST_GAP else f"under {100 * _SMALLEST_GAP:g} %"


def _scaled(value: float, steps: tuple[tuple[int, str], ...]) -> str:
    size = abs(value)
    limit = 1000 - 0.5  # what rounds to 1000 of a unit is written in the next one
    factor, unit = next(((f, u) for f, u in steps if size / f < limit), steps[-1])
    scaled = size / factor
    whole = len(str(int(scaled)))
    text = f"{scaled:.{max(0, _DIGITS - whole)}f}" if factor > 1 or scaled != int(scaled) else str(int(scaled))
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return f"{'-' if value < 0 and text != '0' else ''}{text} {unit}"


_DECIMAL = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}

SIZE_BYTES: Mapping[str, float] = {f"{prefix}B": factor for prefix, factor in {**_DECIMAL, **_BINARY}.items()}
"""Bytes per unit of memory."""
TIME_S: Mapping[str, float] = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
"""Seconds per unit of time."""
RATE_BYTES_PER_S: Mapping[str, float] = {
    **{f"{unit}/s": factor for unit, factor in SIZE_BYTES.items()},
    **{f"{prefix}bit/s": factor / 8 for prefix, factor in {**_DECIMAL, **_BINARY}.items()},
}
"""Bytes per second per unit of bandwidth."""

_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*([^\s0-9.]\S*)\s*")


def parse_quantity(value: object, units: Mapping[str, float], what: str) -> float:
    """Read a positive quantity with its unit.

    ``value`` is a text such as ``"16 GiB"``; a bare number is refused, because it does not say what it counts.
    ``units`` are the allowed ones, each with its size in the base unit, which the result is in. ``what`` names the
    value in errors.

    Raises:
        ProblemError: Not a text, no number, unknown unit, zero or infinite.
    """
    example = f"write a number and a unit, such as '16 {list(units)[-1]}' (units: {', '.join(units)})"
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ProblemError(f"{what} is {value!r}; {example}")
    number, unit = float(match[1]), match[2]
    if unit not in units:
        raise ProblemError(f"{what} is {value!r}, which has the unknown unit {unit!r}; {example}")
    if not 0 < number * units[unit] < math.inf:
        raise ProblemError(f"{what} is {value!r}, but it must be above zero and finite")
    return number * units[unit]
