"""What a compression plan costs: the buckets one after another on the communication stream. It knows no solver."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from qsync_opt.gradients.plan import Plan
from qsync_opt.gradients.problem import Choice, Objective, Problem

VARIANCE_SLACK = 1e-9
"""Relative excess over the variance limit that counts as keeping it: sums of floats are rounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Objective, limits and times of a plan; ``start_ns`` and ``end_ns`` are of each bucket's reduction."""

    objective: float
    feasible: bool
    violations: tuple[str, ...]
    iteration_ns: int
    variance: float
    exposed_ns: int
    """How long the step waits for communication after the backward pass."""
    start_ns: tuple[int, ...]
    end_ns: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """As plain JSON data."""
        return {
            "objective": self.objective,
            "feasible": self.feasible,
            "violations": list(self.violations),
            "iteration_ns": self.iteration_ns,
            "variance": self.variance,
            "exposed_ns": self.exposed_ns,
            "start_ns": list(self.start_ns),
            "end_ns": list(self.end_ns),
        }


def evaluate(problem: Problem, plan: Plan) -> Evaluation:
    """Compute what a plan costs.

    ``start_k = max(ready_k, end_(k-1))``, ``end_k = start_k + time_k``, and an iteration takes
    ``max(compute_end, end of the last) + tail``.

    Raises:
        ProblemError: The plan does not fit the problem.

    Source: the file format of this package, "qsync-gradients/1".
    """
    return evaluate_choices(problem, plan.resolve(problem))


def evaluate_choices(problem: Problem, choices: tuple[Choice, ...]) -> Evaluation:
    """Compute what one choice for each bucket costs; see `evaluate`."""
    starts, ends, clock = [], [], 0
    for bucket, choice in zip(problem.buckets, choices, strict=True):
        start = max(bucket.ready_ns, clock)
        clock = start + choice.time_ns
        starts.append(start)
        ends.append(clock)
    variance = math.fsum(choice.variance for choice in choices)
    iteration_ns = max(problem.compute_end_ns, clock) + problem.tail_ns
    violations = []
    if problem.objective is Objective.VARIANCE:
        limit_ns = problem.latency_limit_ns
        if limit_ns is not None and iteration_ns > limit_ns:
            violations.append(f"an iteration takes {iteration_ns} ns, above the limit of {limit_ns} ns")
    elif problem.variance_limit is not None and variance > problem.variance_limit * (1 + VARIANCE_SLACK):
        violations.append(f"the variance is {variance:.9g}, above the limit of {problem.variance_limit:.9g}")
    return Evaluation(
        objective=variance if problem.objective is Objective.VARIANCE else float(iteration_ns),
        feasible=not violations,
        violations=tuple(violations),
        iteration_ns=iteration_ns,
        variance=variance,
        exposed_ns=max(0, clock - problem.compute_end_ns),
        start_ns=tuple(starts),
        end_ns=tuple(ends),
    )
