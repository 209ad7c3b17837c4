"""What a wrong input is: how it is given, and what the message about it must hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One wrong input.

    ``run`` is a command line, or a function for what only Python can do wrong (``call`` then shows it). The message
    must hold ``value`` (what is wrong, by name), ``allowed`` and ``advice`` (what to do); the last two may be one.
    """

    what: str
    run: tuple[str, ...] | Callable[[], object]
    value: str
    allowed: str
    advice: str
    call: str = ""

    @property
    def shown(self) -> str:
        """How a reader would write it."""
        return self.call or " ".join(["qsync-opt", *(f'"{a}"' if " " in a or not a else a for a in self.run)])  # type: ignore[union-attr]
