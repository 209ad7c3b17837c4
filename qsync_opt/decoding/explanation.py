"""Why each regime of a plan speculates or not, in one line of text each."""

from __future__ import annotations

from qsync_opt.decoding.acceptance import CONFIDENCES, expected_tokens
from qsync_opt.decoding.plan import Plan
from qsync_opt.decoding.problem import Choice, Problem, Regime


def explain(problem: Problem, plan: Plan) -> dict[str, str]:
    """Regime to the reason of its choice.

    Raises:
        ProblemError: The plan does not belong to the problem.

    Source: ours.
    """
    resolved = plan.resolve(problem)
    used = {choice.draft for choice in resolved.values() if choice is not None}
    return {regime.name: _reason(problem, regime, resolved[regime.name], used) for regime in problem.regimes}


def _label(choice: Choice) -> str:
    return f"{choice.length} tokens of {choice.draft}"


def _speedup(problem: Problem, regime: Regime, choice: Choice) -> float:
    time_ns = problem.time_per_token_ns(choice)
    return regime.plain_ns / time_ns if time_ns else float("inf")


def _range(regime: Regime, choice: Choice) -> str:
    """The speed-up at each known value of the acceptance."""
    parts = []
    for confidence in CONFIDENCES:
        acceptance = choice.acceptance.at(confidence)
        if acceptance is not None and choice.cycle_ns:
            speedup = regime.plain_ns * expected_tokens(acceptance, choice.length) / choice.cycle_ns
            parts.append(f"{confidence} {speedup:.3f}x at acceptance {acceptance:.3f}")
    return ", ".join(parts)


def _reason(problem: Problem, regime: Regime, choice: Choice | None, used: set[str]) -> str:
    fastest = min(regime.choices, key=problem.time_per_token_ns, default=None)
    if choice is not None:
        text = f"speculates with {_label(choice)}: {_range(regime, choice)}"
        if _speedup(problem, regime, choice) <= 1:
            return f"{text}; plain decoding is no slower"
        if fastest is not None and problem.time_per_token_ns(fastest) < problem.time_per_token_ns(choice):
            text += f"; {_label(fastest)} would be faster{_memory(problem, fastest, used)}"
        return text
    if fastest is None:
        return "plain decoding: it has no choice of a draft"
    speedup = _speedup(problem, regime, fastest)
    if speedup <= 1:
        return f"plain decoding: the best choice, {_label(fastest)}, is {_range(regime, fastest)}"
    return f"plain decoding: {_label(fastest)} would be {speedup:.3f}x{_memory(problem, fastest, used)}"


def _memory(problem: Problem, choice: Choice, used: set[str]) -> str:
    if choice.draft in used:
        return ""
    taken = sum(problem.drafts[draft].memory_kib for draft in used)
    needed = problem.drafts[choice.draft].memory_kib
    return f", but its draft needs {needed} KiB and {problem.memory_kib - taken} KiB of {problem.memory_kib} are free"
