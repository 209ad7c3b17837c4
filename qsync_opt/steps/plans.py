"""Plans to record so that most other plans consist of observed cases: uniform ones, and a few mixed ones."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from qsync_opt.errors import ProblemError
from qsync_opt.io import check_integer
from qsync_opt.model import OpGraph, Role
from qsync_opt.numerics import number_format
from qsync_opt.steps.cases import StepFlow
from qsync_opt.steps.costs import Case

MIXED = "mixed"
"""Prefix of the names of plans that are not uniform."""
CANDIDATES = 24
"""Random plans among which each mixed one is chosen."""


def nearest_available(available: Sequence[str], precision: str) -> str:
    """``precision`` if it is available, else the next finer one, else the finest."""
    ladder = sorted(available, key=lambda name: number_format(name).rank)
    rank = number_format(precision).rank
    return precision if precision in ladder else next((p for p in ladder if number_format(p).rank > rank), ladder[-1])


def covering_plans(
    graph: OpGraph, available: Mapping[str, Sequence[str]], *, mixed: int, half_format: str
) -> dict[str, dict[str, str]]:
    """Plans to record.

    Args:
        graph: The model.
        available: Precisions of every adjustable operator.
        mixed: Number of plans besides the uniform ones; each is, of some random plans, the one with the most cases that
            no plan before it has.
        half_format: 16-bit format of the results of 8-bit operators.

    Returns:
        Plans by name.

    Raises:
        ProblemError: An adjustable operator without precisions.
    """
    check_integer(mixed, "mixed plans")
    names = [operator.name for operator in graph.by_role(Role.ADJUSTABLE)]
    for name in names:
        if not available.get(name):
            raise ProblemError(f"no precision is available for adjustable operator {name!r}; at least one is needed")
    precisions = dict.fromkeys(p for name in names for p in available[name])
    plans = {
        f"uniform {precision}": {name: nearest_available(available[name], precision) for name in names}
        for precision in sorted(precisions, key=lambda p: number_format(p).rank)
    }
    flow = StepFlow(graph, half_format)

    def cases(plan: Mapping[str, str]) -> set[Case]:
        return set(flow.cases(plan, lambda _: None)[0])

    covered = {case for plan in plans.values() for case in cases(plan)}
    generator = random.Random(0)
    for k in range(mixed):
        candidates = [{name: generator.choice(available[name]) for name in names} for _ in range(CANDIDATES)]
        best = max(candidates, key=lambda plan: len(cases(plan) - covered))
        plans[f"{MIXED} {k}"] = best
        covered |= cases(best)
    return plans
