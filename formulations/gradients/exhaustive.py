"""Exhaustive search: every plan of a tiny problem, evaluated by the independent evaluator; the oracle of the tests."""

from __future__ import annotations

import itertools
import math
import time

from qsync_opt.errors import UnsupportedError
from qsync_opt.formulations.gradients.tables import Tables
from qsync_opt.gradients import Plan, Problem, evaluate_choices
from qsync_opt.solving import Answer, SolveOptions, TerminationStatus

MOST_PLANS = 200_000


class ExhaustiveFormulation:
    """Best of all plans, dominated choices included.

    Source: ours.
    """

    def solve(self, problem: Problem, options: SolveOptions) -> Answer:
        """Choose a scheme for every bucket; see `Formulation.solve`."""
        started = time.monotonic()
        deadline = math.inf if options.time_limit_s is None else started + options.time_limit_s
        num_plans = math.prod(len(bucket.choices) for bucket in problem.buckets)
        if num_plans > MOST_PLANS:
            raise UnsupportedError(
                f"method 'exhaustive' would evaluate {num_plans} plans, but at most {MOST_PLANS} are allowed; "
                "use method 'exact'"
            )
        best: Plan | None = None
        least, late = math.inf, False
        for names in itertools.product(*(bucket.choices for bucket in problem.buckets)):
            if late := time.monotonic() > deadline:
                break
            pairs = tuple(zip(problem.buckets, names, strict=True))
            evaluation = evaluate_choices(problem, tuple(bucket.choices[name] for bucket, name in pairs))
            if evaluation.feasible and evaluation.objective < least:
                least = evaluation.objective
                best = Plan(schemes={bucket.name: name for bucket, name in pairs}).made_for(problem)
        solved = TerminationStatus.OPTIMAL if best is not None else TerminationStatus.INFEASIBLE
        return Answer(
            plan=best,
            termination=TerminationStatus.TIME_LIMIT if late else solved,
            objective=None if best is None else least,
            bound=None if best is None or late else least,
            solve_seconds=time.monotonic() - started,
            reason=None if best is not None or late else Tables.of(problem).infeasible(),
        )
