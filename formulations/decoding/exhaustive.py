"""Exhaustive search: every plan of a small problem, evaluated by the independent evaluator; the oracle of the tests."""

from __future__ import annotations

import itertools
import math
import time

from qsync_opt.decoding import Plan, Problem, Selection, evaluate
from qsync_opt.errors import UnsupportedError
from qsync_opt.solving import Answer, SolveOptions, TerminationStatus

MOST_PLANS = 200_000
"""Plans beyond which exhausting them is refused."""


class ExhaustiveFormulation:
    """Best of all plans. Source: ours."""

    def solve(self, problem: Problem, options: SolveOptions) -> Answer:
        """Evaluate every combination of the regimes' choices.

        Raises:
            UnsupportedError: There are more than `MOST_PLANS`.
        """
        started = time.monotonic()
        deadline = math.inf if options.time_limit_s is None else started + options.time_limit_s
        num_plans = math.prod(len(regime.choices) + 1 for regime in problem.regimes)
        if num_plans > MOST_PLANS:
            raise UnsupportedError(
                f"method 'exhaustive' would evaluate {num_plans} plans, but at most {MOST_PLANS} are allowed; use "
                "method 'exact'"
            )
        tables = [
            (None, *(Selection(draft=choice.draft, length=choice.length) for choice in regime.choices))
            for regime in problem.regimes
        ]
        names = [regime.name for regime in problem.regimes]
        best, least, late = None, math.inf, False
        for selections in itertools.product(*tables):
            plan = Plan(choices=dict(zip(names, selections, strict=True)), problem=problem.name)
            evaluation = evaluate(problem, plan)
            if evaluation.feasible and evaluation.objective < least:
                best, least = plan, evaluation.objective
            if late := time.monotonic() > deadline:
                break
        return Answer(
            termination=TerminationStatus.TIME_LIMIT if late else TerminationStatus.OPTIMAL,
            plan=best,
            objective=least,
            bound=None if late else least,
            solve_seconds=time.monotonic() - started,
        )
