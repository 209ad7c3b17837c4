"""Search of what a node of the tree leaves undecided: fix by min-marginals, cut to a core, close it.

Axes: N nodes, Z table entries, R limit rows.

Source: ours.
"""

from __future__ import annotations

import time
from typing import cast

import numpy as np

from qsync_opt.formulations.assignment.core.condensed import Condensed, condense
from qsync_opt.formulations.assignment.core.core import Core, CoreResult, extract, nearest
from qsync_opt.formulations.assignment.core.frontier import search
from qsync_opt.formulations.assignment.core.paths import walk
from qsync_opt.formulations.assignment.core.program import close
from qsync_opt.formulations.assignment.dual import DualResult
from qsync_opt.formulations.assignment.effort import Effort, Pass
from qsync_opt.formulations.assignment.incumbent import Incumbent
from qsync_opt.formulations.assignment.model import Bools, Floats, Ints
from qsync_opt.formulations.linear import LinearSolver

_STATES, _NARROW = 6000, 64
"""States of a whole search at this width, and in proportion: short cores are searched more widely."""
_MOST_EXTENDED = 1_000_000
"""Most states that a step of a widened search forms in memory."""
_EASY_NODES, _EASY_MERGED, _EASY_WIDTH = 40, 16, 8192
"""Cores of one row, or so few nodes before or after merging, are closed by a search of this width before a solver."""
_LEAST_S = 0.01
"""Least time of a solver, even past the deadline."""
_NEAR_WALKS = (300, 1000, 4000)
_MOST_NEAR = 1000
"""With more undecided nodes the search near the bound is skipped."""


class CoreSearch:
    """Searches the cores of one model around its dual's prices.

    Attributes:
        effort: How hard to search.
        deadline: ``time.monotonic()`` value at which to stop.
        equal: Cores of all that was undecided at this node, for their equal parts.
    """

    def __init__(self, incumbent: Incumbent) -> None:
        self._incumbent, self._relaxation = incumbent, incumbent.relaxation
        self._model = model = incumbent.model
        self.effort, self.deadline = Effort(), np.inf
        self.equal: list[Condensed] = []
        num_labels = max(2, int(model.sizes_N.max(initial=1)))
        self._exists_NA = np.arange(num_labels)[None, :] < model.sizes_N[:, None]
        self._entry_NA = np.where(self._exists_NA, model.offset_N[:, None] + np.arange(num_labels), 0)
        # The input of the last bounded search, whether it spread its states, its width, and its bound.
        self._searched: tuple[tuple[bytes, bytes, float] | None, bool, int, float] = (None, False, 0, -np.inf)

    def near(self, allowed_Z: Bools, dual: DualResult, most: float, known: float) -> tuple[float, Bools]:
        """Search all labellings that may be below ``most``; returns as `search`. ``known`` bounds them already."""
        value, least_Z, base_N, allowed_Z = self._through(allowed_Z, dual)
        if value == np.inf:
            return np.inf, allowed_Z
        near_Z = allowed_Z & (least_Z < most)
        near_Z[self._model.chosen(base_N)] = True
        if self.undecided(near_Z) > _MOST_NEAR:
            return -np.inf, allowed_Z
        core = extract(self._model, base_N, near_Z, dual.prices_R)
        return min(self._walk(core, _NEAR_WALKS, whole=True, most=most, known=known), most), allowed_Z

    def _through(self, allowed_Z: Bools, dual: DualResult) -> tuple[float, Floats, Ints, Bools]:
        """Least priced cost, bounds of labellings with each entry, a labelling of least cost, entries that can pay."""
        cost_Y = self._relaxation.model.priced(dual.prices_R, self._relaxation.allowed(allowed_Z))
        value, least_Z = self._relaxation.min_marginals(cost_Y)
        if value == np.inf:
            return value, least_Z, np.zeros(0, dtype=np.int64), allowed_Z
        base_N = self._relaxation.labelling(self._relaxation.elimination.minimise(cost_Y)[1])
        least_Z = least_Z - float(dual.prices_R @ self._model.limits_R)
        if self._incumbent.best is not None:
            allowed_Z = allowed_Z & (least_Z < self._incumbent.upper)
        return value, least_Z, base_N, allowed_Z

    def search(self, allowed_Z: Bools, dual: DualResult, effort_pass: Pass) -> tuple[float, Bools]:
        """Fix by min-marginals and search the rest; returns a bound and the entries left."""
        value, least_Z, base_N, allowed_Z = self._through(allowed_Z, dual)
        if value == np.inf:
            return np.inf, allowed_Z
        most = effort_pass.nodes
        if most is not None and effort_pass.needs_solver and self.undecided(allowed_Z) <= effort_pass.whole * most:
            most = None
        kept_Z, ceiling = nearest(allowed_Z, least_Z, self._exists_NA, self._entry_NA, most)
        kept_Z[self._model.chosen(base_N)] = True
        key = (kept_Z.tobytes(), dual.prices_R.tobytes(), self._incumbent.upper)
        if (
            effort_pass.width
            and self._searched[:2] == (key, effort_pass.spread)
            and effort_pass.width <= self._searched[2]
        ):
            return min(self._searched[3], ceiling), allowed_Z
        core = extract(self._model, base_N, kept_Z, dual.prices_R)
        whole = ceiling == np.inf
        if effort_pass.walks:
            return min(self._walk(core, effort_pass.walks, whole=whole), ceiling), allowed_Z
        small = condense(core, self._most(), merge=True)
        bound = -np.inf
        width = search_width(effort_pass.width, core, small, whole=whole)
        if width:
            if whole and isinstance(small, Condensed):
                self.equal.append(small)
            bound = self._offered(
                search(small, self._incumbent.target(0.0), width, spread=effort_pass.spread, deadline=self.deadline)
            )
            self._searched = key, effort_pass.spread, width, bound
        if not effort_pass.width and bound < self._incumbent.target(self.effort.enough):
            bound = max(bound, self._close(core, None if whole else effort_pass.solver_nodes))
        return min(bound, ceiling), allowed_Z

    def _walk(
        self, core: Core, walks: tuple[int, ...], *, whole: bool, most: float = np.inf, known: float = -np.inf
    ) -> float:
        """Search a core along paths bounded by levels for labellings below ``most``; ``known`` bounds them already."""
        expensive = min(self._most(), most)
        parts = condense(core, expensive, merge=True, count=False, product=False)
        if isinstance(parts, Condensed) and parts.mostly_equal:  # counting bounds them better than paths do
            if not whole:
                return -np.inf
            small = condense(core, expensive, merge=True)
            width = search_width(0, core, small, whole=whole)
            if width:
                upper = min(self._incumbent.target(0.0), most)
                bound = self._offered(search(small, upper, width, spread=True, deadline=self.deadline))
                if bound >= min(self._incumbent.target(self.effort.enough), most) or self.effort.solver is not None:
                    return bound
        upper = min(self._incumbent.target(0.0), most)
        walked = walk(parts, upper, walks, tolerance=self._tolerance(), known=known, deadline=self.deadline)
        return -np.inf if walked is None else self._offered(walked)

    def _close(self, core: Core, most_nodes: int | None) -> float:
        """Solve a core by the linear solver, with at most ``most_nodes`` nodes in its tree; returns its bound."""
        left_s = max(self.deadline - time.monotonic(), _LEAST_S)
        return self._offered(
            close(
                condense(core, self._most(), merge=False),
                self._incumbent.target(0.0),
                cast("LinearSolver", self.effort.solver),
                left_s if left_s < np.inf else None,
                tolerance=self._tolerance(),
                most_nodes=most_nodes,
            )
        )

    def _offered(self, result: CoreResult) -> float:
        if result.labels_N is not None:
            self._incumbent.offer(result.labels_N)
        return result.bound

    def _tolerance(self) -> float:
        return self.effort.enough / 2 * abs(self._incumbent.upper + self.effort.offset) if self._incumbent.best else 0.0

    def _most(self) -> float:
        # Where nodes are split into copies the base is no priced minimum, and then no part is too expensive by itself.
        return self._incumbent.target(0.0) if self._relaxation.entry_Y is None else np.inf

    def undecided(self, allowed_Z: Bools) -> int:
        """Number of nodes with more than one label left."""
        return int(((self._exists_NA & allowed_Z[self._entry_NA]).sum(axis=1) > 1).sum())


def search_width(width: int, core: Core, merged: Core, *, whole: bool) -> int:
    """Most states that a search keeps at a step, for the width of a pass; 0: the core is left to a solver.

    ``merged`` is the core as it is searched; ``whole``: it holds all that is undecided.
    """
    if not width:
        few = len(core.nodes) <= _EASY_NODES or (whole and len(merged.nodes) <= _EASY_MERGED)
        return _EASY_WIDTH if len(core.excess_R) <= 1 or few else 0
    labels = max((len(node.labels_A) for node in merged.nodes), default=1)
    return max(width, min(_STATES * width // _NARROW // max(len(merged.nodes), 1), _MOST_EXTENDED // labels))
