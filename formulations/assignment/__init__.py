"""Assignment problems and bound and fix, their exact solver: one label per node under linear limits.

Nothing here knows of precisions; a use translates its problem into an `AssignmentModel`.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.formulations.assignment.compiled import compiled_by, prepare
    from qsync_opt.formulations.assignment.dual import DualResult, Master, Priced, Pricer, maximise
    from qsync_opt.formulations.assignment.effort import PASSES, QUICK_PASSES, SOLVER_PASSES, Effort, Pass
    from qsync_opt.formulations.assignment.elimination import Elimination, Relaxation, relax
    from qsync_opt.formulations.assignment.incumbent import PROOF, blend
    from qsync_opt.formulations.assignment.model import (
        AssignmentModel,
        Bools,
        Derived,
        Floats,
        Ints,
        Maximum,
        Wanted,
        Whole,
        assemble,
    )
    from qsync_opt.formulations.assignment.program import labels_at, linear_program
    from qsync_opt.formulations.assignment.schedule import TooWideError
    from qsync_opt.formulations.assignment.search import BoundAndFix, Outcome, split_count
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "PASSES", "PROOF", "QUICK_PASSES", "SOLVER_PASSES", "AssignmentModel", "Bools", "BoundAndFix", "Derived",
    "DualResult", "Effort", "Elimination", "Floats", "Ints", "Master", "Maximum", "Outcome", "Pass", "Priced",
    "Pricer", "Relaxation", "TooWideError", "Wanted", "Whole", "assemble", "blend", "compiled_by", "labels_at",
    "linear_program", "maximise", "prepare", "relax", "split_count",
]  # fmt: skip
