"""Every plan of a tiny problem, evaluated by the independent evaluator; the oracle of the tests."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator

from qsync_opt.errors import UnsupportedError
from qsync_opt.serving import Plan, Problem, Stage, evaluate
from qsync_opt.solving import Answer, SolveOptions, TerminationStatus

MOST_PLANS = 2_000_000
"""Plans beyond which exhausting them is refused."""


class ExhaustiveFormulation:
    """Best of all plans.

    Source: ours.
    """

    def solve(self, problem: Problem, options: SolveOptions) -> Answer:
        """Try every plan; see `Formulation.solve`."""
        started = time.monotonic()
        deadline = math.inf if options.time_limit_s is None else started + options.time_limit_s
        groups, devices = len(problem.groups), len(problem.devices)
        pipelines = sum(
            math.perm(devices, stages) * math.comb(groups - 1, stages - 1) for stages in range(1, devices + 1)
        )
        count = pipelines * len(problem.microbatches) * len(problem.schemes) ** groups
        if count > MOST_PLANS:
            raise UnsupportedError(
                f"problem {problem.name!r} has {count:.3g} plans, but method 'exhaustive' tries at most "
                f"{MOST_PLANS}; use 'exact' or 'ilp'"
            )
        best, objective, late = None, math.inf, False
        least_excess, nearest = math.inf, ""
        for plan in _plans(problem):
            if time.monotonic() > deadline:
                late = True
                break
            evaluation = evaluate(problem, plan)
            if evaluation.feasible and evaluation.objective < objective:
                best, objective = plan, evaluation.objective
            elif best is None and len(evaluation.violations) < least_excess:
                least_excess, nearest = len(evaluation.violations), "; ".join(evaluation.violations)
        if late:
            termination = TerminationStatus.TIME_LIMIT
        else:
            termination = TerminationStatus.INFEASIBLE if best is None else TerminationStatus.OPTIMAL
        return Answer(
            plan=best,
            termination=termination,
            objective=None if best is None else objective,
            bound=None if best is None or late else objective,
            solve_seconds=time.monotonic() - started,
            reason=None if best is not None else f"of all plans the nearest breaks a limit: {nearest}",
        )


def _plans(problem: Problem) -> Iterator[Plan]:
    names = [group.name for group in problem.groups]
    devices = [device.name for device in problem.devices]
    for stages in range(1, min(len(devices), len(names)) + 1):
        for order in itertools.permutations(devices, stages):
            for cuts in itertools.combinations(range(1, len(names)), stages - 1):
                ends = [0, *cuts, len(names)]
                parts = tuple(
                    Stage(device=device, groups=tuple(names[ends[j] : ends[j + 1]])) for j, device in enumerate(order)
                )
                for schemes in itertools.product(problem.schemes, repeat=len(names)):
                    for option in range(len(problem.microbatches)):
                        yield Plan(microbatch=option, stages=parts, schemes=dict(zip(names, schemes, strict=True)))
