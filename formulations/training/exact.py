"""Proved optima by bound and fix: price the limits, rule out what prices settle, search the rest to the end.

    minimise    sum of sensitivities
    subject to  R_k(x) <= latency limit - optimizer - sum of all-reduces from k on, for every bucket k and the end,
                memory(x) <= memory limit, dependent operators follow their inputs

R_k is a sum over operators and casts, so for prices of these rows the least priced cost is found exactly by dynamic
programming over the graph of operators, and is a lower bound. Choices whose least priced cost reaches the best known
plan are ruled out for good. What is left is searched by dynamic programming over partial plans, bounded by tables that
keep one row exactly and price the others; where plans that share the bound disagree about a join, the problem is split
there. Proof is to a relative gap of 1e-6 or better.
"""

from __future__ import annotations

from dataclasses import replace

from qsync_opt.formulations.assignment import PASSES, SOLVER_PASSES, Effort
from qsync_opt.formulations.linear import LinearSolver
from qsync_opt.formulations.training.certified import plan_certified
from qsync_opt.formulations.training.greedy import greedy_effort
from qsync_opt.registry import Kind, create, default_solver
from qsync_opt.training import Answer, Problem, SolveOptions

_ENOUGH = 5e-7
"""Relative gap, half of what counts as proved, at which no further expensive search is begun."""
_FIRST_PASSES = 2


def exact_effort(gap: float, solver: LinearSolver | None) -> Effort:
    """Effort of a proof; ``solver`` closes what bounded searches leave open."""
    passes = PASSES if solver is None else SOLVER_PASSES
    return Effort(gap=gap, enough=_ENOUGH, passes=passes, join_passes=2, solver=solver)


class ExactFormulation:
    """Optimal plans with proof; see the module.

    What these searches leave open goes to a linear solver: the named one, or the first that is installed. Without any,
    wider and wider searches replace it.

    Source: ours; cutting planes, reduced-cost fixing and bounded dynamic programming are standard.
    """

    def solve(self, problem: Problem, options: SolveOptions) -> Answer:
        """Plan every device type; see `Formulation.solve`."""
        choice = options.solver or default_solver()
        solver: LinearSolver | None = None if choice is None else create(Kind.SOLVER, choice)
        # The first stage goes without the widest searches and splits of `greedy`, which the proof replaces.
        first = greedy_effort(options.gap)
        first = replace(first, passes=first.passes[:_FIRST_PASSES], joins_only=True, tree_passes=None)
        return plan_certified(problem, [first, exact_effort(options.gap, solver)], options)
