"""How is a core closed that a bounded search leaves open? Along paths bounded by levels, or by a linear solver.

Source: ours.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np

from qsync_opt.formulations.assignment.core.condense import Condensed, condense
from qsync_opt.formulations.assignment.core.core import Core
from qsync_opt.formulations.assignment.core.frontier import search
from qsync_opt.formulations.assignment.core.paths import walk
from qsync_opt.formulations.assignment.core.program import close
from qsync_opt.formulations.assignment.core.width import search_width
from qsync_opt.formulations.assignment.model import Ints
from qsync_opt.formulations.linear.solver import LinearSolver

_LEAST_S = 0.01
"""A solver gets this much time even where none is left."""


@dataclass(frozen=True, slots=True)
class Aims:
    """What the search that has a core asks for.

    Attributes:
        target: Value that a labelling must stay below, for a relative gap.
        offer: Takes labellings found.
        enough: Relative gap that is good enough.
        tolerance: How far from the best a search may stop.
        too_dear: Priced cost from which on a part of a core cannot belong to a better labelling.
        solver: Solver of linear programs, if there is one.
        deadline: ``time.monotonic()`` value at which to stop.
    """

    target: Callable[[float], float]
    offer: Callable[[Ints], None]
    enough: float
    tolerance: Callable[[], float]
    too_dear: float
    solver: LinearSolver | None
    deadline: float


def walk_core(aims: Aims, core: Core, walks: tuple[int, ...], *, whole: bool, known: float = -np.inf) -> float:
    """Search a core, of which a lower bound may be known, along paths bounded by levels; returns its bound."""
    parts = condense(core, aims.too_dear, merge=True, count=False, product=False)
    if isinstance(parts, Condensed) and parts.mostly_equal:  # counting says more about them than walking
        if not whole:
            return -np.inf
        small = condense(core, aims.too_dear, merge=True)
        width = search_width(0, core, small, whole=whole)
        if width:
            result = search(small, aims.target(0.0), width, spread=True, deadline=aims.deadline)
            if result.labels_N is not None:
                aims.offer(result.labels_N)
            if result.bound >= aims.target(aims.enough) or aims.solver is not None:
                return result.bound
    walked = walk(parts, aims.target(0.0), walks, tolerance=aims.tolerance(), known=known, deadline=aims.deadline)
    if walked is None:
        return -np.inf
    if walked.labels_N is not None:
        aims.offer(walked.labels_N)
    return walked.bound


def close_core(aims: Aims, core: Core, most_nodes: int | None) -> float:
    """Hand a core to the solver, with a tree of at most so many nodes; returns its bound."""
    left_s = max(aims.deadline - time.monotonic(), _LEAST_S)
    result = close(
        condense(core, aims.too_dear, merge=False),
        aims.target(0.0),
        cast("LinearSolver", aims.solver),
        left_s if left_s < np.inf else None,
        tolerance=aims.tolerance(),
        most_nodes=most_nodes,
    )
    if result.labels_N is not None:
        aims.offer(result.labels_N)
    return result.bound
