"""Searches of the core, which bound and fix leaves undecided: condensed, by frontier, by paths, or by a linear solver.

`CoreSearch` chooses among them for `BoundAndFix`.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.formulations.assignment.core.condensed import Condensed, condense
    from qsync_opt.formulations.assignment.core.core import Core, CoreEdge, CoreNode, extract
    from qsync_opt.formulations.assignment.core.core_search import CoreSearch
    from qsync_opt.formulations.assignment.core.frontier import search
    from qsync_opt.formulations.assignment.core.layers import lay_out
    from qsync_opt.formulations.assignment.core.paths import walk
    from qsync_opt.formulations.assignment.core.program import close
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "Condensed", "Core", "CoreEdge", "CoreNode", "CoreSearch", "close", "condense", "extract", "lay_out", "search",
    "walk",
]  # fmt: skip
