"""Effort of a search: passes over the undecided core, and when to stop."""

from dataclasses import dataclass

from qsync_opt.formulations.linear import LinearSolver


@dataclass(frozen=True, slots=True)
class Pass:
    """One search of a core.

    Attributes:
        nodes: Most nodes of the core; None for all undecided ones.
        width: Most states kept; 0 hands the core to the solver, unless it is so easy that a bounded search closes it.
        spread: Keep states that differ in their rows rather than only those of least priced cost.
        solver_nodes: Most nodes of the solver's tree where the core is only a part of what is undecided.
        whole: The solver gets all undecided nodes where they are at most ``whole`` times ``nodes``.
        whole_only: Skip the pass where it would get only a part of what is undecided.
        walks: Search paths bounded by levels instead, once for each of these numbers of states (see `walk`).
    """

    nodes: int | None
    width: int = 0
    spread: bool = True
    solver_nodes: int | None = None
    whole: float = 1.0
    whole_only: bool = False
    walks: tuple[int, ...] = ()

    @property
    def needs_solver(self) -> bool:
        """True if only a solver can do it."""
        return not self.width and not self.walks

    @property
    def is_expensive(self) -> bool:
        """True if it takes much longer than bounding a node."""
        return not self.width or self.width > _EXPENSIVE_WIDTH


_EXPENSIVE_WIDTH = 512
_WALKS = (Pass(300, walks=(300,)), Pass(1200, walks=(300, 1000)), Pass(None, walks=(1000, 4000, 16000)))
"""Searches of paths: over the nodes nearest to a change, for a better incumbent, then over more, up to all."""
QUICK_PASSES = (
    Pass(60, 64, True),
    Pass(150, 64, True),
    *(Pass(None, width, spread) for width in (64, 256) for spread in (True, False)),
)
"""Core searches that are quick on any core."""
PASSES = (
    *QUICK_PASSES[:2],
    *_WALKS,
    *QUICK_PASSES[2:],
    *(Pass(None, width, spread) for width in (2048, 16384) for spread in (True, False)),
)
"""Core searches from the quickest to the most thorough."""
SOLVER_PASSES = (
    Pass(60, 64),
    Pass(150, 64),
    *_WALKS,
    Pass(150, 512, whole_only=True),
    Pass(150, 0, solver_nodes=100, whole=1.6),
    Pass(600, 0, solver_nodes=1000, whole=4),
    Pass(None, 0),
)
"""The same with a solver: small cores improve the incumbent, which rules out most of what is undecided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How hard to search.

    Attributes:
        gap: Relative gap at which to stop.
        enough: Relative gap at which no expensive pass and no further node of the tree is begun.
        passes: Core searches of a node, in this order.
        tree_passes: Core searches below the root, where a node is not split at a join; None: the same.
        dive_passes: Number of passes with the joins fixed.
        join_passes: Number of passes before a node is split at a join.
        blends: Plans of the dual whose parts may improve the incumbent.
        dual_share: Precision of the dual's maximum, as a share of the gap.
        dives: Plans of the dual whose joins are fixed to look for a better incumbent.
        max_nodes: Most nodes of the tree.
        joins_only: Split nodes of the tree only at joins.
        aim: Stop as soon as a labelling reaches this objective, or none is proved to.
        tree_gap: Relative gap at which the tree is not opened further.
        offset: Constant that is part of the objective when gaps are measured.
        margins: After a change of limits, search first whatever is above the dual's bound by less than these multiples
            of the last optimum's distance to its bound.
        solver: Linear solver for passes of width 0; without one they are skipped.
    """

    gap: float = 0.0
    enough: float = 0.0
    passes: tuple[Pass, ...] = PASSES
    tree_passes: tuple[Pass, ...] | None = None
    dive_passes: int = 2
    join_passes: int = 3
    blends: int = 8
    dual_share: float = 0.1
    dives: int = 2
    max_nodes: int = 100_000
    joins_only: bool = False
    aim: float | None = None
    tree_gap: float = 0.0
    offset: float = 0.0
    margins: tuple[float, ...] = ()
    solver: LinearSolver | None = None
