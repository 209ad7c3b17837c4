"""Exhaustive search: every split of a tiny problem, evaluated independently; the oracle of the tests."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator

from qsync_opt.checkpoints import Piece, Plan, Problem, evaluate
from qsync_opt.errors import UnsupportedError
from qsync_opt.formulations.checkpoints.moves import Counts
from qsync_opt.formulations.checkpoints.wrap_around import nobody_writes, plan_of_counts
from qsync_opt.solving import Answer, SolveOptions, TerminationStatus

MOST_PLANS = 50_000
"""Plans beyond which exhausting them is refused."""


class ExhaustiveFormulation:
    """Best of all splits into whole rows.

    Source: ours.
    """

    def solve(self, problem: Problem, options: SolveOptions) -> Answer:
        """Split every piece; see `qsync_opt.formulations.base.Formulation`."""
        started = time.monotonic()
        if (reason := nobody_writes(problem)) is not None:
            return Answer(termination=TerminationStatus.INFEASIBLE, reason=reason)
        num_plans = math.prod(
            math.comb(piece.rows + len(piece.writers) - 1, len(piece.writers) - 1) for piece in problem.pieces
        )
        if num_plans > MOST_PLANS:
            raise UnsupportedError(
                f"method 'exhaustive' would evaluate {num_plans:.3g} plans, but at most {MOST_PLANS} are allowed; use "
                "method 'exact'"
            )
        best: Plan | None = None
        least = math.inf
        for counts in itertools.product(*map(_splits, problem.pieces)):
            chosen: Counts = list(counts)
            plan = plan_of_counts(problem, chosen)
            seconds = evaluate(problem, plan).objective
            if seconds < least:
                best, least = plan, seconds
        return Answer(
            termination=TerminationStatus.OPTIMAL,
            plan=best,
            objective=least,
            bound=least,
            solve_seconds=time.monotonic() - started,
        )


def _splits(piece: Piece) -> Iterator[dict[str, int]]:
    """All numbers of rows of the writers of a piece."""
    places = len(piece.writers) - 1
    for bars in itertools.combinations(range(piece.rows + places), places):
        edges = (-1, *bars, piece.rows + places)
        counts = [b - a - 1 for a, b in itertools.pairwise(edges)]
        yield {name: count for name, count in zip(piece.writers, counts, strict=True) if count}
