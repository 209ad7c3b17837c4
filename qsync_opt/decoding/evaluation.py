"""Time per token and memory of a plan, by the rules of the problem format alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qsync_opt.decoding.plan import Plan
from qsync_opt.decoding.problem import Choice, Problem, Regime
from qsync_opt.io import format_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class RegimeEvaluation:
    """One regime under a plan: ``tokens_per_cycle`` in ``cycle_ns``, beside plain decoding."""

    name: str
    draft: str | None
    length: int
    cycle_ns: int
    tokens_per_cycle: float
    plain_ns: int

    @property
    def time_per_token_ns(self) -> float:
        """Expected nanoseconds per token of a sequence."""
        return self.cycle_ns / self.tokens_per_cycle

    @property
    def speedup(self) -> float | None:
        """Plain decoding's time over this one's; None where this one takes none."""
        return self.plain_ns / self.time_per_token_ns if self.time_per_token_ns else None

    def to_json(self) -> dict[str, Any]:
        """The object of one regime in `Evaluation.to_json`."""
        keys = ("draft", "length", "cycle_ns", "tokens_per_cycle", "time_per_token_ns", "speedup")
        return {key: getattr(self, key) for key in keys}


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A whole plan: the weighted time per token in ns, the memory of its drafts, and broken limits in words."""

    objective: float
    memory_kib: int
    memory_limit_kib: int
    regimes: Mapping[str, RegimeEvaluation]
    violations: tuple[str, ...]

    @property
    def feasible(self) -> bool:
        """True if the drafts fit into the memory."""
        return not self.violations

    def to_json(self) -> dict[str, Any]:
        """The keys that ``qsync-opt decoding evaluate --json`` prints."""
        return {
            "objective": self.objective,
            "memory_kib": self.memory_kib,
            "memory_limit_kib": self.memory_limit_kib,
            "regimes": {name: regime.to_json() for name, regime in self.regimes.items()},
            "feasible": self.feasible,
            "violations": list(self.violations),
        }


def evaluate(problem: Problem, plan: Plan) -> Evaluation:
    """Expected time per token of each regime and of all by weight, and the memory of the drafts used anywhere.

    Raises:
        ProblemError: The plan does not belong to the problem.

    Source: QSPEC (EMNLP 2025) for the cycle; Leviathan et al. (ICML 2023), Eq. 1, for its tokens.
    """
    resolved = plan.resolve(problem)
    regimes = {regime.name: _evaluate_regime(problem, regime, resolved[regime.name]) for regime in problem.regimes}
    used = {choice.draft for choice in resolved.values() if choice is not None}
    memory_kib = sum(problem.drafts[draft].memory_kib for draft in used)
    violations: tuple[str, ...] = ()
    if memory_kib > problem.memory_kib:
        excess = format_memory(memory_kib - problem.memory_kib)
        violations = (f"the memory limit of all drafts, {format_memory(problem.memory_kib)}, by {excess}",)
    return Evaluation(
        objective=math.fsum(regime.weight * regimes[regime.name].time_per_token_ns for regime in problem.regimes),
        memory_kib=memory_kib,
        memory_limit_kib=problem.memory_kib,
        regimes=regimes,
        violations=violations,
    )


def _evaluate_regime(problem: Problem, regime: Regime, choice: Choice | None) -> RegimeEvaluation:
    return RegimeEvaluation(
        name=regime.name,
        draft=None if choice is None else choice.draft,
        length=0 if choice is None else choice.length,
        cycle_ns=regime.plain_ns if choice is None else choice.cycle_ns,
        tokens_per_cycle=1.0 if choice is None else problem.tokens(choice),
        plain_ns=regime.plain_ns,
    )
