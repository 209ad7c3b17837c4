"""Quantities with units, as people write them: ``"16 GiB"``, ``"20 us"``, ``"10 Gbit/s"``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from qsync_opt.errors import ProblemError

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

    Args:
        value: A text such as ``"16 GiB"``; a bare number is refused, because it would not say what it counts.
        units: Allowed units and what one of each is worth.
        what: Names the value in errors.

    Returns:
        The quantity in the base unit of ``units``.

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
