"""The precision plan as one integer linear program, for any registered linear solver.

`IlpFormulation`, which the registry reaches by name, writes and solves it.
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
    from qsync_opt.formulations.training.ilp.program import Units, linearize
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "Assignment", "Choice", "Limit", "Product", "Units", "build_assignment", "linearize", "read_back",
]  # fmt: skip
