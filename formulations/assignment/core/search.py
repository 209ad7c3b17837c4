"""How is what a node of the search tree leaves undecided searched? Fixed by min-marginals, cut to a core, closed.

Axes: N nodes, Z table entries, R limit rows.

Source: ours.
"""

from dataclasses import replace

import numpy as np

from qsync_opt.formulations.assignment.core.closing import Aims, close_core, walk_core
from qsync_opt.formulations.assignment.core.condense import Condensed, condense
from qsync_opt.formulations.assignment.core.core import extract, nearest
from qsync_opt.formulations.assignment.core.frontier import search
from qsync_opt.formulations.assignment.core.width import search_width
from qsync_opt.formulations.assignment.dual import DualResult
from qsync_opt.formulations.assignment.effort import Effort, Pass
from qsync_opt.formulations.assignment.incumbent import Incumbent
from qsync_opt.formulations.assignment.model import Bools, Floats, Ints

_NEAR_WALKS = (300, 1000, 4000)
_MOST_NEAR = 1000
"""With more undecided nodes than this the search near the bound is left out."""


class CoreSearch:
    """Searches the cores of one model around its dual's prices.

    Attributes:
        effort: How hard to search.
        deadline: ``time.monotonic()`` value at which to stop.
        equal: Cores of all that was undecided at this node, for their equal parts.
    """

    def __init__(self, incumbent: Incumbent) -> None:
        """Start with the least to do.

        Args:
            incumbent: What is to be beaten; labellings found are offered to it.
        """
        self._incumbent, self._relaxation = incumbent, incumbent.relaxation
        self._model = model = incumbent.model
        self.effort, self.deadline = Effort(), np.inf
        self.equal: list[Condensed] = []
        num_labels = max(2, int(model.sizes_N.max(initial=1)))
        self._exists_NA = np.arange(num_labels)[None, :] < model.sizes_N[:, None]
        self._entry_NA = np.where(self._exists_NA, model.offset_N[:, None] + np.arange(num_labels), 0)
        # What the last bounded search was given, how wide it was, and the bound it found.
        self._searched: tuple[tuple[bytes, bytes, float] | None, bool, int, float] = (None, False, 0, -np.inf)

    def near(self, allowed_Z: Bools, dual: DualResult, most: float, known: float) -> tuple[float, Bools]:
        """Search all that may be below a value; as `search`.

        Args:
            allowed_Z: Entries that are left.
            dual: The dual over these.
            most: The value.
            known: A lower bound of all labellings with these entries.
        """
        value, least_Z, base_N = self._through(allowed_Z, dual)
        if value == np.inf:
            return np.inf, allowed_Z
        if self._incumbent.best is not None:
            allowed_Z = allowed_Z & (least_Z < self._incumbent.upper)
        near_Z = allowed_Z & (least_Z < most)
        near_Z[self._model.chosen(base_N)] = True
        if self.undecided(near_Z) > _MOST_NEAR:
            return -np.inf, allowed_Z
        core = extract(self._model, base_N, near_Z, dual.prices_R)
        aims = self._aims()
        aims = replace(
            aims, target=lambda gap: min(self._incumbent.target(gap), most), too_dear=min(aims.too_dear, most)
        )
        return min(walk_core(aims, core, _NEAR_WALKS, whole=True, known=known), most), allowed_Z

    def _through(self, allowed_Z: Bools, dual: DualResult) -> tuple[float, Floats, Ints]:
        """Least priced cost, lower bounds of labellings with each entry, and the labelling of least priced cost."""
        cost_Y = self._relaxation.model.priced(dual.prices_R, self._relaxation.allowed(allowed_Z))
        value, least_Z = self._relaxation.min_marginals(cost_Y)
        if value == np.inf:
            return value, least_Z, np.zeros(0, dtype=np.int64)
        base_N = self._relaxation.labelling(self._relaxation.elimination.minimise(cost_Y)[1])
        return value, least_Z - float(dual.prices_R @ self._model.limits_R), base_N

    def search(self, allowed_Z: Bools, dual: DualResult, effort_pass: Pass) -> tuple[float, Bools]:
        """Fix by min-marginals, search the rest; returns a bound and the entries left."""
        value, least_Z, base_N = self._through(allowed_Z, dual)
        if value == np.inf:
            return np.inf, allowed_Z
        if self._incumbent.best is not None:
            allowed_Z = allowed_Z & (least_Z < self._incumbent.upper)
        most = effort_pass.nodes
        if most is not None and effort_pass.needs_solver and self.undecided(allowed_Z) <= effort_pass.whole * most:
            most = None
        tried_Z, ceiling = nearest(allowed_Z, least_Z, self._exists_NA, self._entry_NA, most)
        tried_Z[self._model.chosen(base_N)] = True
        key = (tried_Z.tobytes(), dual.prices_R.tobytes(), self._incumbent.upper)
        if (
            effort_pass.width
            and self._searched[:2] == (key, effort_pass.spread)
            and effort_pass.width <= self._searched[2]
        ):
            return min(self._searched[3], ceiling), allowed_Z
        core = extract(self._model, base_N, tried_Z, dual.prices_R)
        if effort_pass.walks:
            return min(walk_core(self._aims(), core, effort_pass.walks, whole=ceiling == np.inf), ceiling), allowed_Z
        small = condense(core, self._too_dear(), merge=True)
        bound = -np.inf
        width = search_width(effort_pass.width, core, small, whole=ceiling == np.inf)
        if width:
            if ceiling == np.inf and isinstance(small, Condensed):
                self.equal.append(small)
            result = search(
                small, self._incumbent.target(0.0), width, spread=effort_pass.spread, deadline=self.deadline
            )
            if result.labels_N is not None:
                self._incumbent.offer(result.labels_N)
            bound = result.bound
            self._searched = key, effort_pass.spread, width, bound
        if not effort_pass.width and bound < self._incumbent.target(self.effort.enough):
            most_nodes = effort_pass.solver_nodes if ceiling < np.inf else None
            bound = max(bound, close_core(self._aims(), core, most_nodes))
        return min(bound, ceiling), allowed_Z

    def _aims(self) -> Aims:
        effort = self.effort
        return Aims(
            self._incumbent.target,
            self._incumbent.offer,
            effort.enough,
            self._tolerance,
            self._too_dear(),
            effort.solver,
            self.deadline,
        )

    def _tolerance(self) -> float:
        """How far from the best a search may stop that is not asked for more."""
        return self.effort.enough / 2 * abs(self._incumbent.upper + self.effort.offset) if self._incumbent.best else 0.0

    def _too_dear(self) -> float:
        """Priced cost from which on a part of a core cannot belong to a better labelling."""
        # Where nodes are split into copies the base is no priced minimum, and then no part is too dear by itself.
        return self._incumbent.target(0.0) if self._relaxation.entry_Y is None else np.inf

    def undecided(self, allowed_Z: Bools) -> int:
        """How many nodes have more than one label left."""
        return int(((self._exists_NA & allowed_Z[self._entry_NA]).sum(axis=1) > 1).sum())
