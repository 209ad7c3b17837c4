"""The contract of formulations: a problem in, a claimed answer out."""

from __future__ import annotations

from typing import Protocol

from qsync_opt.training import Answer, Problem, SolveOptions


class Formulation(Protocol):
    """A method that chooses precisions.

    A class attribute ``FEATURES`` (a set of `registry.Feature`) may declare what it can do.
    """

    def solve(self, problem: Problem, options: SolveOptions) -> Answer:
        """Choose a precision for every adjustable operator of every device type.

        Args:
            problem: The problem.
            options: Solver, time limit and gap.

        Returns:
            A claim. The planner evaluates its plan independently and refuses one that does not hold; being infeasible
            or out of time is an answer, not an exception.

        Raises:
            UnsupportedError: This formulation can never solve such a problem.
            SolverError: A solver failed.
        """
        ...
