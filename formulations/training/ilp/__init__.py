"""The precision plan as one integer linear program, for any registered linear solver.

`IlpFormulation` writes it, solves it, and names the limits in the way where there is no plan.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.formulations.training.ilp.assignment import (
        Assignment,
        Choice,
        Limit,
        Product,
        build_assignment,
        read_back,
    )
    from qsync_opt.formulations.training.ilp.least import (
        Least,
        Verdict,
        describe_infeasible,
        explain_infeasible,
        least_time,
    )
    from qsync_opt.formulations.training.ilp.program import Goal, Units, linearize
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "Assignment",
    "Choice",
    "Goal",
    "Least",
    "Limit",
    "Product",
    "Units",
    "Verdict",
    "build_assignment",
    "describe_infeasible",
    "explain_infeasible",
    "least_time",
    "linearize",
    "read_back",
]
