"""How hard should a search try? Passes over the undecided core, and when to stop."""

from dataclasses import dataclass

from qsync_opt.formulations.linear import LinearSolver


@dataclass(frozen=True, slots=True)
class Pass:
    """One core search: at most this many nodes (None: all that are undecided), states, and how states are kept.

    A width of 0 hands the core to the solver, unless it is so easy that a bounded search closes it;
    ``solver_nodes`` then bounds the solver's tree where the core is only a part of what is undecided, and it gets all
    that is undecided where that is at most ``whole`` times ``nodes``. ``whole_only`` leaves a pass out where it would
    get only a part of what is undecided. A pass with ``walks`` searches paths bounded by levels instead, once for each
    of these numbers of states (see `walk`).
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
        """True if nothing but a solver can do it."""
        return not self.width and not self.walks

    @property
    def is_dear(self) -> bool:
        """True if it takes much longer than bounding a node."""
        return not self.width or self.width > _DEAR_WIDTH


_DEAR_WIDTH = 512
_WALKS = (Pass(300, walks=(300,)), Pass(1200, walks=(300, 1000)), Pass(None, walks=(1000, 4000, 16000)))
"""Searches of paths: of the nodes nearest to a change, for a better incumbent, then of more, up to all that is open."""
QUICK_PASSES = (
    Pass(60, 64, True),
    Pass(150, 64, True),
    *(Pass(None, width, spread) for width in (64, 256) for spread in (True, False)),
)
"""Core searches that take little time on any core."""
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
"""The same with a solver: its small cores improve the incumbent, which rules out most of what is undecided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How hard to search.

    Attributes:
        gap: Relative gap at which to stop.
        enough: Relative gap from which dear passes and further nodes of the tree are not begun.
        passes: Core searches to try at a node, in this order.
        tree_passes: Those to try below the root instead, where a node is not split at a join; None: the same.
        dive_passes: How many of them to try with the joins held.
        join_passes: How many of them to try before a node is split at a join.
        blends: Plans of the dual whose parts are tried in the incumbent.
        dual_share: Share of the gap to which the bound's maximum is sought.
        dives: Plans of the dual whose joins are held to look for a better incumbent.
        max_nodes: Most nodes of the tree.
        joins_only: Split nodes of the tree at joins alone.
        aim: Objective that a labelling is sought below, or proved to be missed; then the search stops.
        tree_gap: Relative gap from which the tree is not opened further.
        offset: Constant that is part of the objective when gaps are measured.
        margins: What a search after a change of limits tries first: all that is less above the dual's bound than so
            many times what the optimum was above it under the limits before.
        solver: Solver of linear programs for passes of width 0; without one they are left out.
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
