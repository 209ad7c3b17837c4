"""An operator's precision in words: what decides it, and what the next higher and lower one would cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from qsync_opt.io.quantities import format_memory, format_sensitivity, format_time
from qsync_opt.model.graph import Role

if TYPE_CHECKING:  # explanation.py asks for the words
    from qsync_opt.training.explanation import Alternative, Explanation

_NAMED = 2
"""How many inputs are named before the rest is counted."""


def reason(explanation: Explanation) -> str:
    """Why the operator has its precision, in one to three sentences."""
    precision, device = explanation.precision, explanation.device
    if explanation.role is Role.FIXED:
        return f"Fixed: it always runs in {precision} on {device}."
    if explanation.role is Role.DEPENDENT:
        if not explanation.decided_by:
            return f"Dependent without inputs: it runs in {precision}, the lowest that its table has."
        inputs = "input" if len(explanation.decided_by) == 1 else "inputs"
        return f"Follows its {inputs} {_some(explanation.decided_by)} into {precision}."
    if not explanation.alternatives:
        return f"{precision} is the only precision that it has on {device}."
    better = [a for a in explanation.alternatives if a.feasible and a.sensitivity_change < 0]
    if better:
        best = min(better, key=lambda a: a.sensitivity_change)
        return f"{best.precision} would be better within all limits: {_changes(best)}."
    higher, lower = explanation.next_higher, explanation.next_lower
    sentences = [
        f"{precision} is the highest that it has." if higher is None else _sentence("Raising", higher),
        f"{precision} is the lowest that it has." if lower is None else _sentence("Lowering", lower),
    ]
    return " ".join(sentences)


def _sentence(verb: str, alternative: Alternative) -> str:
    text = f"{verb} to {alternative.precision}: {_changes(alternative)}"
    if alternative.broken:
        text += f"; breaks {' and '.join(limit.text for limit in alternative.broken)}"
    return f"{text}."


def _changes(alternative: Alternative) -> str:
    time_ns, memory_kib = alternative.iteration_change_ns, alternative.memory_change_kib
    changes = [
        _signed(alternative.sensitivity_change, format_sensitivity, "sensitivity"),
        _signed(time_ns, format_time, "iteration time"),
        _signed(memory_kib, format_memory, "memory"),
    ]
    if time_ns == 0 and alternative.compute_change_ns:
        changes[1] += f" (its device {_signed(alternative.compute_change_ns, format_time, 'computing')})"
    return ", ".join(changes)


def _signed(value: float, form: Callable[[float], str], what: str) -> str:
    if value == 0:
        return f"{what} unchanged"
    return f"{what} {'+' if value > 0 else '−'}{form(abs(value))}"


def _some(names: tuple[str, ...]) -> str:
    shown = " and ".join(repr(name) for name in names[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"
