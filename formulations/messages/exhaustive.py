"""Exhaustive search: every plan of a tiny problem, evaluated by the independent evaluator; the oracle of the tests."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np

from qsync_opt.errors import UnsupportedError
from qsync_opt.formulations.messages.frontier import frontiers
from qsync_opt.formulations.messages.threshold import infeasible
from qsync_opt.messages import Plan, Problem, evaluate
from qsync_opt.solving import Answer, SolveOptions, TerminationStatus

MOST_PLANS = 100_000
"""Plans beyond which exhausting them is refused."""


class ExhaustiveFormulation:
    """Best of all plans.

    Source: ours.
    """

    def solve(self, problem: Problem, options: SolveOptions) -> Answer:
        """Plan every message."""
        started = time.monotonic()
        menu, messages = list(problem.menu), problem.num_messages
        if len(menu) ** messages > MOST_PLANS:
            raise UnsupportedError(
                f"method 'exhaustive' would evaluate {len(menu)}^{messages} plans, but at most {MOST_PLANS} are "
                "allowed; use method 'exact'"
            )
        best, least = None, math.inf
        for widths in itertools.product(menu, repeat=messages):
            plan = plan_of(problem, np.array(widths, np.uint8))
            evaluation = evaluate(problem, plan)
            if evaluation.feasible and evaluation.objective < least:
                best, least = plan, evaluation.objective
        seconds = time.monotonic() - started
        if best is None:
            reason = infeasible(problem, frontiers(problem)) or "no plan keeps the limit"
            return Answer(termination=TerminationStatus.INFEASIBLE, reason=reason, solve_seconds=seconds)
        return Answer(
            termination=TerminationStatus.OPTIMAL, plan=best, objective=least, bound=least, solve_seconds=seconds
        )


def plan_of(problem: Problem, widths: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> Plan:
    """The plan whose widths stand one after another, in the order of exchanges, rounds and pairs."""
    bits, position = {}, 0
    for exchange in problem.exchanges:
        rounds = []
        for group in exchange.rounds:
            pairs = []
            for pair in group:
                pairs.append(widths[position : position + pair.beta.size])
                position += pair.beta.size
            rounds.append(tuple(pairs))
        bits[exchange.name] = tuple(rounds)
    return Plan(bits=bits)
