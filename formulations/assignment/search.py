"""Which labelling is best, and how good is it known to be? Bound and fix: dual, core search, branching on joins.

At a node of the search tree the dual gives prices and a bound; min-marginals at these prices rule out every entry that
cannot beat the incumbent; the core search closes what is left, or improves the incumbent. Where the plans that share
the dual's optimum disagree about joins, the relaxation mixes far-apart plans: the node is then split at the middle one.

Axes: N nodes, Z table entries, R limit rows.

Longer than 400 lines because all of it works on one search's state: incumbent, prices, plans, leaves and rulings.

Source: ours; each part is standard (cutting planes, reduced-cost fixing, bounded dynamic programming).
"""

import heapq
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from qsync_opt.formulations.assignment.blend import blend
from qsync_opt.formulations.assignment.branching import SHARE, fractional_join, split_count, widest_choice
from qsync_opt.formulations.assignment.closing import Aims, close_core, walk_core
from qsync_opt.formulations.assignment.condense import Condensed, condense
from qsync_opt.formulations.assignment.core import extract, nearest
from qsync_opt.formulations.assignment.dual import DualResult, Priced, Pricer, maximise
from qsync_opt.formulations.assignment.effort import Effort, Pass
from qsync_opt.formulations.assignment.frontier import search
from qsync_opt.formulations.assignment.model import AssignmentModel, Bools, Floats, Ints
from qsync_opt.formulations.assignment.relaxation import Relaxation, relax
from qsync_opt.formulations.assignment.tree import Leaf, Node, Outcome, first_nodes, take
from qsync_opt.formulations.assignment.width import search_width

PROOF = 1e-9
"""Improvements below this share of the objective are not looked for."""
_MAX_PLANS = 60
_MAX_CUTS = 30
_MAX_LEAVES = 8
"""Leaves of a tree that a search under further limits starts from."""
_ROUNDING = 1e-13
"""Share of priced limits by which the Lagrangian at other limits is lowered."""
_MUCH_BETTER = 0.5
_FIRST_STEPS, _MOST_STEPS = 3, 400
"""Minimisations that bound a leaf of an earlier search at first, and at most."""
_LEAST_LEAD = 1e-4
"""Share of the bound that the optimum is taken to be above it at least."""
_NEAR_WALKS = (300, 1000, 4000)
_MOST_NEAR = 1000
"""With more undecided nodes than this the search near the bound is left out."""
_DEARER = (1.01, 1.03, 1.1, 1.3, 2.0)
"""Factors on the dual's prices, up to the first at which the priced minimum keeps the limits."""


class BoundAndFix:
    """Solves one assignment problem; keeps what it learnt, so that a second solve after new limits is quick."""

    def __init__(self, model: AssignmentModel, relaxation: Relaxation | None = None) -> None:
        """Plan the elimination.

        Args:
            model: The problem.
            relaxation: What to bound it with; found if not given.
        """
        self.model = model
        self.relaxation = relaxation or relax(model)
        self._known: list[Priced] = []
        self._prices_R: Floats | None = None
        self.pricer = Pricer(self.relaxation.model, self.relaxation.elimination)
        self.best: Priced | None = None
        self._deadline = np.inf
        num_labels = max(2, int(model.sizes_N.max(initial=1)))
        self._exists_NA = np.arange(num_labels)[None, :] < model.sizes_N[:, None]
        self._entry_NA = np.where(self._exists_NA, model.offset_N[:, None] + np.arange(num_labels), 0)
        self._effort = Effort()
        self._towards_limits_R = np.zeros(len(model.limits_R))
        self._affordable_Z, self._affordable_at = model.allowed_Z, np.inf
        self._proved = -np.inf  # a bound that holds under these limits
        # Values and prices of the Lagrangian, and up to which objective its entries were all there.
        self._cuts: list[tuple[float, Floats, float]] = []
        self._dived: set[bytes] = set()
        self._on_join = False  # whether the last node was split at a join
        # What splits at joins lead to; together the leaves leave out no labelling.
        self._leaves = [Leaf()]
        self._before: Ints | None = None  # the best labelling under the limits before, which breaks these
        self._lead = np.inf  # how far the last optimum was above the dual of its leaf
        self._equal: list[Condensed] = []  # cores of all that was undecided at this node, for their equal parts
        # What the last bounded search was given, how wide it was, and the bound it found.
        self._searched: tuple[tuple[bytes, bytes, float] | None, bool, int, float] = (None, False, 0, -np.inf)

    def offer(self, labels_N: Ints) -> None:
        """Keep a labelling if it is feasible and better than the incumbent."""
        if self.model.wanted is not None:
            labels_N = labels_N.copy()
            self.model.wanted.fill(labels_N)
        plan = Priced(labels_N, self.model.objective(labels_N), self.model.excess(labels_N))
        if plan.feasible and plan.objective < self.upper:
            self.best = plan

    def _offer_relaxed(self, plan: Priced) -> None:
        """Offer a plan of the relaxed model."""
        if self.relaxation.entry_Y is not None or self.model.wanted is not None:
            self.offer(self.relaxation.labelling(plan.labels_N))
        elif plan.feasible and plan.objective < self.upper:
            self.best = plan

    def under(self, limits_R: Ints) -> "BoundAndFix":
        """A search of the same problem under other limits, which starts from what this one learnt."""
        relaxation = self.relaxation.with_limits(limits_R)
        other = BoundAndFix(relaxation.true, relaxation)
        change_R = self.model.limits_R - limits_R
        other._known = [plan.shifted(change_R) for plan in self._known]
        other._prices_R = self._prices_R
        other._affordable_Z, other._affordable_at = self._affordable_Z, self._affordable_at
        other._leaves = [leaf.shifted(change_R) for leaf in self._leaves]
        other._lead = self._lead
        other._cuts = self._cuts[-_MAX_CUTS:]
        # The Lagrangian is linear in the limits, and tighter limits leave no better plan.
        bounds = [min(value - float(prices_R @ limits_R), most) for value, prices_R, most in other._cuts]
        other._proved = max([*bounds, self._proved if (change_R >= 0).all() else -np.inf])
        if self.best is not None:
            other.offer(self.best.labels_N)
            other._before = self.best.labels_N if other.best is None else None
        for plan in other._known:
            other._offer_relaxed(plan)
        return other

    @property
    def is_split(self) -> bool:
        """True if an earlier search has split the problem at joins, and a tree would start from there."""
        return len(self._leaves) > 1

    @property
    def upper(self) -> float:
        """Objective of the incumbent, infinite without one."""
        return np.inf if self.best is None else self.best.objective

    def solve(self, effort: Effort, *, start: Ints | None = None, deadline: float = np.inf) -> Outcome:
        """Search until the gap, the effort or the deadline is reached, or Ctrl-C is pressed.

        Args:
            effort: How hard to search.
            start: A labelling to start from.
            deadline: ``time.monotonic()`` value at which to stop.

        Returns:
            The best labelling and bound.
        """
        self._deadline, self._effort = deadline, effort
        if start is not None:
            self.offer(start)
        zero = np.zeros(len(self.model.limits_R))
        outcome = Outcome(None, np.inf, -np.inf, zero)
        open_nodes: list[Node] = []
        closed = np.inf
        least = max(self.model.least_objective(), self._proved)
        if self.best is not None and self._closed(least, effort):
            return Outcome(self.best.labels_N, self.best.objective, min(least, self.upper), zero)
        try:
            plans, infeasible = self._feasible_start()
            if infeasible:
                return Outcome(None, np.inf, np.inf, zero, proved_infeasible=True)
            prices = zero if self._prices_R is None else self._prices_R
            # Of what an earlier search under other limits split the root into, if the tree may be opened at all.
            leaves = self._leaves if effort.max_nodes > 1 else [Leaf()]
            open_nodes = first_nodes(leaves, self._root_entries(), least, prices, plans, _FIRST_STEPS)
            most_leaves, count = len(open_nodes), len(open_nodes) + 1
            plunge = 0  # number of the child to go on with, at first; 0: the node of least bound
            while open_nodes and outcome.nodes < effort.max_nodes + most_leaves - 1:
                plunging = plunge or not outcome.nodes
                node, plunge = take(open_nodes, plunge), 0
                gap = max(effort.enough, effort.tree_gap) if outcome.nodes else 0.0
                if self._closed(node.bound, effort) or node.bound >= self._target(gap):
                    closed = min(closed, node.bound)
                    continue
                if time.monotonic() > self._deadline:
                    open_nodes.append(node)
                    outcome.out_of_time = True
                    break
                if node.steps:
                    open_nodes.append(node)
                    self._bound(node, effort)
                    heapq.heapify(open_nodes)
                    continue
                outcome.nodes += 1
                open_nodes.append(node)  # stays known while it is worked on, in case of Ctrl-C
                bound, prices, children = self._process(node, effort)
                open_nodes.remove(node)
                heapq.heapify(open_nodes)
                if outcome.nodes == 1:
                    outcome.prices_R = self._prices_R = prices
                if not children:
                    closed = min(closed, bound)
                if children and plunging and self._on_join and most_leaves == 1:
                    plunge = count
                grown = self._grow(node.leaf, children, prices)
                for leaf, (_, allowed, kept) in zip(grown, children, strict=True):
                    heapq.heappush(open_nodes, Node(bound, count, allowed, prices, kept, leaf))
                    count += 1
        except KeyboardInterrupt:
            outcome.out_of_time = outcome.interrupted = True
        outcome.bound = min([closed, self.upper, *(node.bound for node in open_nodes)])
        self._proved = max(self._proved, outcome.bound)
        if self.best is not None:
            outcome.labels_N, outcome.objective = self.best.labels_N, self.best.objective
            least = min(leaf.bound for leaf in self._leaves)
            self._lead = max(0.0, self.upper - least) if least < np.inf else self._lead
        elif outcome.bound == np.inf and not outcome.out_of_time:
            outcome.proved_infeasible = True
        return outcome

    def _bound(self, node: Node, effort: Effort) -> None:
        """Bound a leaf of an earlier search, so that the most promising one is searched first."""
        if node.steps == _MOST_STEPS:
            node.allowed_Z = self._affordable(node.allowed_Z)
        dual = self._dual(node.allowed_Z, node.prices_R, node.plans, effort, node.steps)
        if node.steps == _MOST_STEPS:
            node.dual = dual
        node.steps = _MOST_STEPS if node.steps < _MOST_STEPS else 0
        node.bound = max(node.bound, dual.bound)
        if np.isfinite(dual.bound):
            node.prices_R, node.plans = dual.prices_R, dual.plans

    def _grow(
        self, leaf: Leaf | None, children: list[tuple[Ints, Bools, list[Priced]]], prices_R: Floats
    ) -> Sequence[Leaf | None]:
        """Keep a split at a join for further limits, while there are few; returns the children's leaves."""
        if leaf is None or not children or not self._on_join or len(self._leaves) >= _MAX_LEAVES:
            return [None] * len(children)
        grown = [Leaf((*leaf.path, side), prices_R, kept[-_MAX_PLANS // 2 :]) for side, _, kept in children]
        self._leaves = [each for each in self._leaves if each is not leaf] + grown
        return grown

    def _closed(self, bound: float, effort: Effort) -> bool:
        if effort.aim is not None and (self.upper <= effort.aim or bound > effort.aim):
            return True
        return bound >= self._target(effort.gap)

    def _target(self, gap: float) -> float:
        """Value that a labelling must stay below to be worth finding."""
        return np.inf if self.best is None else self.upper - max(gap, PROOF) * abs(self.upper + self._effort.offset)

    def _feasible_start(self) -> tuple[list[Priced], bool]:
        """Plans that come near the limits, and whether it is proved that none meets them."""
        if self.best is not None:
            return list(self._known), False
        limits = np.maximum(np.abs(self.model.limits_R), 1).astype(np.float64)
        plans = list(self._known)
        result = maximise(
            self.pricer, self.relaxation.model.allowed_Z, prices_R=1 / limits, plans=plans, upper=np.inf,
            tolerance=1e-6, max_steps=100, weight=0.0, stop_at_feasible=True,
        )  # fmt: skip
        for plan in plans:
            self._offer_relaxed(plan)
        self._towards_limits_R = result.prices_R
        # The slack covers the rounding of prices times loads; excesses are whole numbers.
        certain = result.bound > 1e-9 * float(result.prices_R @ limits)
        return plans, bool(result.proved_infeasible or (certain and self.best is None))

    def _process(self, node: Node, effort: Effort) -> tuple[float, Floats, list[tuple[Ints, Bools, list[Priced]]]]:
        """Bound a node and close or split it: what each child forbids, allows, and its plans; none if it is closed."""
        allowed, dual = node.allowed_Z, node.dual
        if dual is None:
            allowed = self._affordable(allowed) if node.number else allowed
            dual = self._dual(allowed, node.prices_R, node.plans, effort)
        bound = max(node.bound, dual.bound)
        if node.leaf is not None and np.isfinite(dual.bound):
            node.leaf.prices_R, node.leaf.plans = dual.prices_R, dual.plans[-_MAX_PLANS // 2 :]
            node.leaf.bound = dual.bound
        if not node.number and np.isfinite(dual.bound):
            value = dual.bound + float(dual.prices_R @ self.model.limits_R)
            slack = _ROUNDING * float(dual.prices_R @ np.abs(self.model.limits_R))
            self._cuts.append((value - slack, dual.prices_R, self._affordable_at))
        if dual.proved_infeasible or self._closed(bound, effort):
            return bound, dual.prices_R, []
        if node.leaf is not None and self._lead < np.inf and fractional_join(self.model, dual) is None:
            for margin in effort.margins:
                found, allowed = self._search_near(allowed, dual, margin, bound)
                bound = max(bound, found)
                if self._closed(bound, effort) or bound >= self._target(effort.enough):
                    return bound, dual.prices_R, []
        if self._before is not None:
            self._repair(self.relaxation.allowed(allowed), dual, effort)
        self._blend(dual, effort)
        if self._closed(bound, effort):
            return bound, dual.prices_R, []
        split = fractional_join(self.model, dual)
        self._on_join = split is not None
        if split is not None:
            self._dive(allowed, dual, effort)
        self._equal.clear()
        own = effort.passes if effort.tree_passes is None or not node.number else effort.tree_passes
        passes = own if split is None else effort.passes[: effort.join_passes]
        if effort.solver is None:
            passes = tuple(each for each in passes if not each.needs_solver)
        for each in passes:
            if self._closed(bound, effort) or time.monotonic() > self._deadline:
                break
            if each.is_dear and bound >= self._target(effort.enough):
                break
            if each.whole_only and each.nodes is not None and self._undecided(allowed) > each.nodes:
                continue
            found, allowed = self._search_core(allowed, dual, each)
            bound = max(bound, found)
        if effort.max_nodes == 1 or bound >= self._target(max(effort.gap, effort.enough)):
            return bound, dual.prices_R, []
        if split is None and not effort.joins_only and self._equal and self.relaxation.entry_Y is None:
            split = split_count(self.model, self._equal[-1], dual)
        if split is None and not effort.joins_only:
            split = widest_choice(self.model, allowed)
        if split is None:
            return bound, dual.prices_R, []
        children = []
        for side in split:
            child = allowed.copy()
            child[side] = False
            child_Y = self.relaxation.allowed(child)
            kept = [plan for plan in dual.plans if self._fits(plan, child_Y)]
            children.append((side, child, kept[-_MAX_PLANS:]))
        return bound, dual.prices_R, children

    def _repair(self, allowed_Y: Bools, dual: DualResult, effort: Effort) -> None:
        """Fill feasible plans with parts of the best one under the limits before, which breaks these.

        The plans are the incumbent and the first priced minimum within the limits at prices above the dual's.
        """
        assert self._before is not None
        if self.best is not None:
            self.offer(blend(self.model, self.best.labels_N, self._before, dual.prices_R))
        for factor in _DEARER:
            if self._closed(dual.bound, effort) or time.monotonic() > self._deadline:
                return
            value, plan = self.pricer.lagrangian(dual.prices_R * factor, allowed_Y)
            if value == np.inf:
                return
            labels_N = self.relaxation.labelling(plan.labels_N)
            if self.model.objective(labels_N) < np.inf and (self.model.excess(labels_N) <= 0).all():
                self.offer(blend(self.model, labels_N, self._before, dual.prices_R))
                return

    def _blend(self, dual: DualResult, effort: Effort) -> None:
        """Improve the incumbent by parts of the plans that come nearest to the bound at the dual's prices."""
        value_I = np.array([p.objective + float(dual.prices_R @ p.excess_R) for p in dual.plans])
        for index in np.argsort(value_I, kind="stable")[: effort.blends].tolist():
            if self.best is None or self._closed(dual.bound, effort) or time.monotonic() > self._deadline:
                break
            other_N = self.relaxation.labelling(dual.plans[index].labels_N)
            self.offer(blend(self.model, self.best.labels_N, other_N, dual.prices_R))

    def _fits(self, plan: Priced, allowed_Y: Bools) -> bool:
        return bool(allowed_Y[self.relaxation.model.chosen(plan.labels_N)].all())

    def _dive(self, allowed_Z: Bools, dual: DualResult, effort: Effort) -> None:
        """Improve the incumbent: hold the joins as a plan of the dual has them, and search what is left."""
        by_weight = np.argsort(-dual.weights_I, kind="stable")[: effort.dives].tolist()
        for index in by_weight:
            plan = dual.plans[index]
            groups = bytes(item.group_L[plan.labels_N[item.node]] for item in self.model.derived)
            if dual.weights_I[index] < SHARE or groups in self._dived:
                continue
            self._dived.add(groups)
            held = allowed_Z.copy()
            for item, group in zip(self.model.derived, groups, strict=True):
                offset = self.model.offset_N[item.node]
                held[offset : offset + len(item.group_L)] &= np.array(item.group_L) == group
            inner = self._dual(held, dual.prices_R, dual.plans, effort)
            bound = inner.bound
            for each in effort.passes[: effort.dive_passes]:
                if inner.proved_infeasible or self._closed(bound, effort) or time.monotonic() > self._deadline:
                    break
                found, held = self._search_core(held, inner, each)
                bound = max(bound, found)

    def _root_entries(self) -> Bools:
        """Entries of the root; found again only when the incumbent has become much better, or worse."""
        if self.upper > self._affordable_at:
            self._affordable_Z, self._affordable_at = self.model.allowed_Z, np.inf
        known = self._prices_R is not None  # else the incumbent is the first feasible plan, which rules out little
        if known and self.upper < _MUCH_BETTER * self._affordable_at:
            self._affordable_Z, self._affordable_at = self._affordable(self._affordable_Z), self.upper
        return self._affordable_Z

    def _affordable(self, allowed_Z: Bools) -> Bools:
        """Without entries that no labelling better than the incumbent has, limits set aside."""
        if self.best is None:
            return allowed_Z
        no_price = np.zeros(len(self.model.limits_R))
        relaxed = self.relaxation.model
        _, least_Z = self.relaxation.min_marginals(relaxed.priced(no_price, self.relaxation.allowed(allowed_Z)))
        return allowed_Z & (least_Z <= self.upper)

    def _dual(
        self, allowed_Z: Bools, prices_R: Floats, plans: list[Priced], effort: Effort, most_steps: int = _MOST_STEPS
    ) -> DualResult:
        allowed_Y = self.relaxation.allowed(allowed_Z)
        known = [plan for plan in plans if self._fits(plan, allowed_Y)]
        if not self.model.objective_Z.any():  # feasibility alone is asked for
            bound, plan = self.pricer.lagrangian(self._towards_limits_R, allowed_Y)
            self._offer_relaxed(plan)
            return DualResult(bound, self._towards_limits_R, [*known, plan], np.zeros(len(known) + 1), bound == np.inf)
        result = maximise(
            self.pricer, allowed_Y, prices_R=prices_R, plans=known, upper=self._target(effort.gap),
            tolerance=max(effort.gap * effort.dual_share, 1e-5), max_steps=most_steps, deadline=self._deadline,
        )  # fmt: skip
        for plan in result.plans:
            self._offer_relaxed(plan)
        if self.pricer.count <= _MAX_PLANS:
            self._known = result.plans[-_MAX_PLANS // 2 :]
        return result

    def _search_near(self, allowed_Z: Bools, dual: DualResult, margin: float, known: float) -> tuple[float, Bools]:
        """Search all that is less above the dual's bound than so many times the last lead; as `_search_core`."""
        value, least_Z, base_N = self._through(allowed_Z, dual)
        if value == np.inf:
            return np.inf, allowed_Z
        most = dual.bound + margin * max(self._lead, _LEAST_LEAD * abs(dual.bound))
        if self.best is not None:
            allowed_Z = allowed_Z & (least_Z < self.upper)
        near_Z = allowed_Z & (least_Z < most)
        near_Z[self.model.chosen(base_N)] = True
        if self._undecided(near_Z) > _MOST_NEAR:
            return -np.inf, allowed_Z
        core = extract(self.model, base_N, near_Z, dual.prices_R)
        aims = self._aims()
        aims = replace(aims, target=lambda gap: min(self._target(gap), most), too_dear=min(aims.too_dear, most))
        return min(walk_core(aims, core, _NEAR_WALKS, whole=True, known=known), most), allowed_Z

    def _through(self, allowed_Z: Bools, dual: DualResult) -> tuple[float, Floats, Ints]:
        """Least priced cost, lower bounds of labellings with each entry, and the labelling of least priced cost."""
        cost_Y = self.relaxation.model.priced(dual.prices_R, self.relaxation.allowed(allowed_Z))
        value, least_Z = self.relaxation.min_marginals(cost_Y)
        if value == np.inf:
            return value, least_Z, np.zeros(0, dtype=np.int64)
        base_N = self.relaxation.labelling(self.relaxation.elimination.minimise(cost_Y)[1])
        return value, least_Z - float(dual.prices_R @ self.model.limits_R), base_N

    def _search_core(self, allowed_Z: Bools, dual: DualResult, effort_pass: Pass) -> tuple[float, Bools]:
        """Fix by min-marginals, search the rest; returns a bound and the entries left."""
        value, least_Z, base_N = self._through(allowed_Z, dual)
        if value == np.inf:
            return np.inf, allowed_Z
        if self.best is not None:
            allowed_Z = allowed_Z & (least_Z < self.upper)
        most = effort_pass.nodes
        if most is not None and effort_pass.needs_solver and self._undecided(allowed_Z) <= effort_pass.whole * most:
            most = None
        tried_Z, ceiling = nearest(allowed_Z, least_Z, self._exists_NA, self._entry_NA, most)
        tried_Z[self.model.chosen(base_N)] = True
        key = (tried_Z.tobytes(), dual.prices_R.tobytes(), self.upper)
        if (
            effort_pass.width
            and self._searched[:2] == (key, effort_pass.spread)
            and effort_pass.width <= self._searched[2]
        ):
            return min(self._searched[3], ceiling), allowed_Z
        core = extract(self.model, base_N, tried_Z, dual.prices_R)
        if effort_pass.walks:
            return min(walk_core(self._aims(), core, effort_pass.walks, whole=ceiling == np.inf), ceiling), allowed_Z
        small = condense(core, self._too_dear(), merge=True)
        bound = -np.inf
        width = search_width(effort_pass.width, core, small, whole=ceiling == np.inf)
        if width:
            if ceiling == np.inf and isinstance(small, Condensed):
                self._equal.append(small)
            result = search(small, self._target(0.0), width, spread=effort_pass.spread, deadline=self._deadline)
            if result.labels_N is not None:
                self.offer(result.labels_N)
            bound = result.bound
            self._searched = key, effort_pass.spread, width, bound
        if not effort_pass.width and bound < self._target(self._effort.enough):
            most_nodes = effort_pass.solver_nodes if ceiling < np.inf else None
            bound = max(bound, close_core(self._aims(), core, most_nodes))
        return min(bound, ceiling), allowed_Z

    def _aims(self) -> Aims:
        effort = self._effort
        return Aims(
            self._target, self.offer, effort.enough, self._tolerance, self._too_dear(), effort.solver, self._deadline
        )

    def _tolerance(self) -> float:
        """How far from the best a search may stop that is not asked for more."""
        return self._effort.enough / 2 * abs(self.upper + self._effort.offset) if self.best else 0.0

    def _too_dear(self) -> float:
        """Priced cost from which on a part of a core cannot belong to a better labelling."""
        # Where nodes are split into copies the base is no priced minimum, and then no part is too dear by itself.
        return self._target(0.0) if self.relaxation.entry_Y is None else np.inf

    def _undecided(self, allowed_Z: Bools) -> int:
        """How many nodes have more than one label left."""
        return int(((self._exists_NA & allowed_Z[self._entry_NA]).sum(axis=1) > 1).sum())
