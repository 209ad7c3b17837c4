"""What all sections need: a clock that ends them in time, and numbers as they are written."""

from __future__ import annotations

import time
from typing import Any


class Clock:
    """Says when a section has used its time; what it has found by then counts."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def over(self) -> bool:
        """Whether the time is used up."""
        return time.monotonic() > self._end

    def left(self) -> float:
        """Seconds that remain, none below 0."""
        return max(0.0, self._end - time.monotonic())


def significant(value: Any, digits: int = 4) -> Any:
    """Floats to some significant digits, so that a file can be read and compared."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {key: significant(item, digits) for key, item in value.items()}
    return [significant(item, digits) for item in value] if isinstance(value, list | tuple) else value
