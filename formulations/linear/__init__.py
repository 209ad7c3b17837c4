"""Linear programs and their solvers.

`LinearModel` is the program, independent of any solver package, and `LinearSolver` the contract of solvers.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.formulations.linear.answers import answer_of
    from qsync_opt.formulations.linear.model import LinearModel
    from qsync_opt.formulations.linear.scaled import solve_in_units
    from qsync_opt.formulations.linear.solver import (
        LinearOptions,
        LinearResult,
        LinearSolver,
        LinearStatus,
        required_solver,
    )
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "LinearModel",
    "LinearOptions",
    "LinearResult",
    "LinearSolver",
    "LinearStatus",
    "answer_of",
    "required_solver",
    "solve_in_units",
]
