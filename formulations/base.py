"""What a formulation must be able to do: turn a problem into a claimed answer."""

from __future__ import annotations

from typing import Protocol

from qsync_opt.training import Answer, Problem, SolveOptions


class Formulation(Protocol):
    """A way to choose precisions.

    A formulation may declare what it can do in a class attribute ``FEATURES`` (a set of `registry.Feature`).
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
