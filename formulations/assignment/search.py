"""Bound and fix: the best labelling and a proved bound, by the dual, searches of the core, and branching on joins.

At a node of the search tree the dual gives prices and a bound; min-marginals at these prices rule out every entry that
cannot beat the incumbent; the core search closes what is left, or improves the incumbent. Where the plans that share
the dual's optimum disagree about joins, the relaxation mixes distant plans: the node is then split at the middle join.

Axes: N nodes, Z table entries, R limit rows.

Source: ours; each part is standard (cutting planes, reduced-cost fixing, bounded dynamic programming).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from qsync_opt.errors import UnsupportedError
from qsync_opt.formulations.assignment.core import Condensed, CoreSearch
from qsync_opt.formulations.assignment.dual import DualResult, Priced, Pricer, maximise
from qsync_opt.formulations.assignment.effort import Effort
from qsync_opt.formulations.assignment.elimination import Relaxation, relax
from qsync_opt.formulations.assignment.incumbent import Incumbent, blend
from qsync_opt.formulations.assignment.model import AssignmentModel, Bools, Floats, Ints

SHARE = 1e-3
"""Plans with a smaller weight in the dual are ignored."""
_MAX_PLANS = 60
_MAX_CUTS = 30
_MAX_LEAVES = 8
"""Leaves of a tree that a search under other limits starts from."""
_ROUNDING = 1e-13
"""Share of priced limits by which the Lagrangian at other limits is lowered."""
_MUCH_BETTER = 0.5
_FIRST_STEPS, _MOST_STEPS = 3, 400
"""Minimisations that bound a leaf of an earlier search at first, and at most."""
_LEAST_LEAD = 1e-4
"""Least distance of the optimum to its bound that is assumed, as a share of the bound."""
_PRICE_FACTORS = (1.01, 1.03, 1.1, 1.3, 2.0)
"""Factors on the dual's prices, tried up to the first at which the priced minimum keeps the limits."""


@dataclass(slots=True)
class Outcome:
    """Result of a search: the best labelling, a bound, and whether it was cut short."""

    labels_N: Ints | None
    objective: float
    bound: float
    prices_R: Floats
    nodes: int = 0
    out_of_time: bool = False
    interrupted: bool = False
    proved_infeasible: bool = False

    def above(self, bound: float) -> Outcome:
        """The same with the better of two bounds of one problem."""
        return replace(self, bound=max(self.bound, min(bound, self.objective)))


class BoundAndFix:
    """Solves one assignment problem, and keeps what it learnt for a quick solve under other limits."""

    def __init__(self, model: AssignmentModel, relaxation: Relaxation | None = None) -> None:
        """Plan the elimination; ``relaxation`` is one of the model, if it is at hand.

        Raises:
            UnsupportedError: The model has maxima in its objective.
        """
        if model.maxima:
            raise UnsupportedError(
                f"bound and fix cannot minimise a maximum, but the model has {len(model.maxima)}; "
                "solve its `linear_program` instead, or limit the maximum"
            )
        self.model = model
        self.relaxation = relaxation or relax(model)
        self._known: list[Priced] = []
        self._prices_R: Floats | None = None
        self.pricer = Pricer(self.relaxation.model, self.relaxation.elimination)
        self._incumbent = Incumbent(self.relaxation)
        self._cores = CoreSearch(self._incumbent)
        self._deadline = np.inf
        self._towards_limits_R = np.zeros(len(model.limits_R))
        self._affordable_Z, self._affordable_at = model.allowed_Z, np.inf
        self._proved = -np.inf  # a bound that holds under these limits
        # Values and prices of the Lagrangian, and the objective up to which no entry was ruled out.
        self._cuts: list[tuple[float, Floats, float]] = []
        self._dived: set[bytes] = set()
        self._on_join = False  # whether the last node was split at a join
        # The leaves below splits at joins; together they exclude no labelling.
        self._leaves = [Leaf()]
        self._before: Ints | None = None  # best labelling under the previous limits, which breaks these
        self._lead = np.inf  # distance of the last optimum to the dual of its leaf
        # Whether to search first near the bound; not once such a search was given up, which is expensive.
        self._near_first = True

    def under(self, limits_R: Ints) -> BoundAndFix:
        """A search of the same problem under other limits that starts from what this one learnt."""
        relaxation = self.relaxation.with_limits(limits_R)
        other = BoundAndFix(relaxation.true, relaxation)
        change_R = self.model.limits_R - limits_R
        other._known = [plan.shifted(change_R) for plan in self._known]
        other._prices_R = self._prices_R
        other._affordable_Z, other._affordable_at = self._affordable_Z, self._affordable_at
        other._leaves = [leaf.shifted(change_R) for leaf in self._leaves]
        other._lead, other._near_first = self._lead, self._near_first
        other._cuts = self._cuts[-_MAX_CUTS:]
        # The Lagrangian is linear in the limits, and tighter limits leave no better plan.
        bounds = [min(value - float(prices_R @ limits_R), most) for value, prices_R, most in other._cuts]
        other._proved = max([*bounds, self._proved if (change_R >= 0).all() else -np.inf])
        if self.best is not None:
            other._incumbent.offer(self.best.labels_N)
            other._before = self.best.labels_N if other.best is None else None
        for plan in other._known:
            other._incumbent.offer_relaxed(plan)
        return other

    @property
    def best(self) -> Priced | None:
        """The best labelling within the limits so far."""
        return self._incumbent.best

    @property
    def upper(self) -> float:
        """Objective of `best`, infinite without one."""
        return self._incumbent.upper

    @property
    def is_split(self) -> bool:
        """True if an earlier search split the problem at joins; a tree starts from there."""
        return len(self._leaves) > 1

    def solve(self, effort: Effort, *, start: Ints | None = None, deadline: float = np.inf) -> Outcome:
        """Search until the gap, the effort or the deadline is reached, or Ctrl-C is pressed.

        Args:
            effort: How hard to search.
            start: A labelling to start from.
            deadline: ``time.monotonic()`` value at which to stop.

        Returns:
            The best labelling and bound.
        """
        self._deadline = self._cores.deadline = deadline
        self._incumbent.offset, self._cores.effort = effort.offset, effort
        if start is not None:
            self._incumbent.offer(start)
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
            # The leaves that an earlier search split the root into, if the tree may be opened at all.
            leaves = self._leaves if effort.max_nodes > 1 else [Leaf()]
            root_Z = self._root_entries()
            for number, leaf in enumerate(leaves):
                node = Node(least, number + bool(leaf.path), root_Z, prices, plans, leaf)
                if leaf.path:
                    node.allowed_Z = root_Z.copy()
                    for side in leaf.path:
                        node.allowed_Z[side] = False
                    node.prices_R = prices if leaf.prices_R is None else leaf.prices_R
                    node.plans, node.steps = leaf.plans or plans, _FIRST_STEPS if len(leaves) > 1 else 0
                open_nodes.append(node)
            most_leaves, count = len(open_nodes), len(open_nodes) + 1
            plunge = 0  # number of the child to continue with, at first; 0: the node of least bound
            while open_nodes and outcome.nodes < effort.max_nodes + most_leaves - 1:
                plunging = plunge or not outcome.nodes
                node = next((each for each in open_nodes if plunge and each.number == plunge), None) or min(open_nodes)
                plunge = 0
                gap = max(effort.enough, effort.tree_gap) if outcome.nodes else 0.0
                if self._closed(node.bound, effort) or node.bound >= self._incumbent.target(gap):
                    closed = min(closed, node.bound)
                    open_nodes.remove(node)
                    continue
                if time.monotonic() > self._deadline:
                    outcome.out_of_time = True
                    break
                if node.steps:
                    self._bound(node, effort)
                    continue
                outcome.nodes += 1
                bound, prices, children = self._process(node, effort)  # stays open until then, in case of Ctrl-C
                open_nodes.remove(node)
                if outcome.nodes == 1:
                    outcome.prices_R = self._prices_R = prices
                if not children:
                    closed = min(closed, bound)
                if children and plunging and self._on_join and most_leaves == 1:
                    plunge = count
                grown = self._grow(node.leaf, children, prices)
                for child, (_, allowed, kept) in zip(grown, children, strict=True):
                    open_nodes.append(Node(bound, count, allowed, prices, kept, child))
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
        """Bound a leaf of an earlier search, so that the most promising leaf is searched first."""
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
        """Keep a split at a join for other limits, while there are few; returns the children's leaves."""
        if leaf is None or not children or not self._on_join or len(self._leaves) >= _MAX_LEAVES:
            return [None] * len(children)
        grown = [Leaf((*leaf.path, side), prices_R, kept[-_MAX_PLANS // 2 :]) for side, _, kept in children]
        self._leaves = [each for each in self._leaves if each is not leaf] + grown
        return grown

    def _closed(self, bound: float, effort: Effort) -> bool:
        if effort.aim is not None and (self.upper <= effort.aim or bound > effort.aim):
            return True
        return bound >= self._incumbent.target(effort.gap)

    def _feasible_start(self) -> tuple[list[Priced], bool]:
        """Plans near the limits, and whether it is proved that none keeps them."""
        if self.best is not None:
            return list(self._known), False
        limits = np.maximum(np.abs(self.model.limits_R), 1).astype(np.float64)
        plans = list(self._known)
        result = maximise(
            self.pricer, self.relaxation.model.allowed_Z, prices_R=1 / limits, plans=plans, upper=np.inf,
            tolerance=1e-6, max_steps=100, weight=0.0, stop_at_feasible=True,
        )  # fmt: skip
        for plan in plans:
            self._incumbent.offer_relaxed(plan)
        self._towards_limits_R = result.prices_R
        # The slack covers the rounding of prices times loads; excesses are whole numbers.
        certain = result.bound > 1e-9 * float(result.prices_R @ limits)
        return plans, bool(result.proved_infeasible or (certain and self.best is None))

    def _process(self, node: Node, effort: Effort) -> tuple[float, Floats, list[tuple[Ints, Bools, list[Priced]]]]:
        """Bound a node and close or split it: entries that each child forbids and allows, its plans; none if closed."""
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
            lead = max(self._lead, _LEAST_LEAD * abs(dual.bound))
            for margin in effort.margins if self._near_first else ():
                most = dual.bound + margin * lead
                core_bound, allowed = self._cores.near(allowed, dual, most, bound)
                bound = max(bound, core_bound)
                if self._closed(bound, effort) or bound >= self._incumbent.target(effort.enough):
                    return bound, dual.prices_R, []
                if -np.inf < core_bound < most:
                    self._near_first = False
                    break
        if self._before is not None:
            self._repair(self.relaxation.allowed(allowed), dual, effort)
        self._blend(dual, effort)
        if self._closed(bound, effort):
            return bound, dual.prices_R, []
        split = fractional_join(self.model, dual)
        self._on_join = split is not None
        if split is not None:
            self._dive(allowed, dual, effort)
        self._cores.equal.clear()
        own = effort.passes if effort.tree_passes is None or not node.number else effort.tree_passes
        passes = own if split is None else effort.passes[: effort.join_passes]
        if effort.solver is None:
            passes = tuple(each for each in passes if not each.needs_solver)
        for each in passes:
            if self._closed(bound, effort) or time.monotonic() > self._deadline:
                break
            if each.is_expensive and bound >= self._incumbent.target(effort.enough):
                break
            if each.whole_only and each.nodes is not None and self._cores.undecided(allowed) > each.nodes:
                continue
            core_bound, allowed = self._cores.search(allowed, dual, each)
            bound = max(bound, core_bound)
        if effort.max_nodes == 1 or bound >= self._incumbent.target(max(effort.gap, effort.enough)):
            return bound, dual.prices_R, []
        if split is None and not effort.joins_only and self._cores.equal and self.relaxation.entry_Y is None:
            split = split_count(self.model, self._cores.equal[-1], dual)
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
        """Improve feasible plans by parts of the best one under the previous limits, which breaks these.

        The plans are the incumbent and the first priced minimum within the limits at prices above the dual's.
        """
        assert self._before is not None
        if self.best is not None:
            self._incumbent.offer(blend(self.model, self.best.labels_N, self._before, dual.prices_R))
        for factor in _PRICE_FACTORS:
            if self._closed(dual.bound, effort) or time.monotonic() > self._deadline:
                return
            value, plan = self.pricer.lagrangian(dual.prices_R * factor, allowed_Y)
            if value == np.inf:
                return
            labels_N = self.relaxation.labelling(plan.labels_N)
            if self.model.objective(labels_N) < np.inf and (self.model.excess(labels_N) <= 0).all():
                self._incumbent.offer(blend(self.model, labels_N, self._before, dual.prices_R))
                return

    def _blend(self, dual: DualResult, effort: Effort) -> None:
        value_I = np.array([p.objective + float(dual.prices_R @ p.excess_R) for p in dual.plans])
        for index in np.argsort(value_I, kind="stable")[: effort.blends].tolist():
            if self.best is None or self._closed(dual.bound, effort) or time.monotonic() > self._deadline:
                break
            other_N = self.relaxation.labelling(dual.plans[index].labels_N)
            self._incumbent.offer(blend(self.model, self.best.labels_N, other_N, dual.prices_R))

    def _fits(self, plan: Priced, allowed_Y: Bools) -> bool:
        return bool(allowed_Y[self.relaxation.model.chosen(plan.labels_N)].all())

    def _dive(self, allowed_Z: Bools, dual: DualResult, effort: Effort) -> None:
        """Improve the incumbent: fix the joins as in a plan of the dual, and search the rest."""
        by_weight = np.argsort(-dual.weights_I, kind="stable")[: effort.dives].tolist()
        for index in by_weight:
            plan = dual.plans[index]
            groups = bytes(item.group_L[plan.labels_N[item.node]] for item in self.model.derived)
            if dual.weights_I[index] < SHARE or groups in self._dived:
                continue
            self._dived.add(groups)
            fixed_Z = allowed_Z.copy()
            for item, group in zip(self.model.derived, groups, strict=True):
                offset = self.model.offset_N[item.node]
                fixed_Z[offset : offset + len(item.group_L)] &= np.array(item.group_L) == group
            inner = self._dual(fixed_Z, dual.prices_R, dual.plans, effort)
            bound = inner.bound
            for each in effort.passes[: effort.dive_passes]:
                if inner.proved_infeasible or self._closed(bound, effort) or time.monotonic() > self._deadline:
                    break
                core_bound, fixed_Z = self._cores.search(fixed_Z, inner, each)
                bound = max(bound, core_bound)

    def _root_entries(self) -> Bools:
        """Entries of the root; computed anew only when the incumbent has become much better, or worse."""
        if self.upper > self._affordable_at:
            self._affordable_Z, self._affordable_at = self.model.allowed_Z, np.inf
        known = self._prices_R is not None  # else the incumbent is the first feasible plan, which rules out little
        if known and self.upper < _MUCH_BETTER * self._affordable_at:
            self._affordable_Z, self._affordable_at = self._affordable(self._affordable_Z), self.upper
        return self._affordable_Z

    def _affordable(self, allowed_Z: Bools) -> Bools:
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
        if not self.model.objective_Z.any():  # a question of feasibility alone
            bound, plan = self.pricer.lagrangian(self._towards_limits_R, allowed_Y)
            self._incumbent.offer_relaxed(plan)
            return DualResult(bound, self._towards_limits_R, [*known, plan], np.zeros(len(known) + 1), bound == np.inf)
        result = maximise(
            self.pricer, allowed_Y, prices_R=prices_R, plans=known, upper=self._incumbent.target(effort.gap),
            tolerance=max(effort.gap * effort.dual_share, 1e-5), max_steps=most_steps, deadline=self._deadline,
        )  # fmt: skip
        for plan in result.plans:
            self._incumbent.offer_relaxed(plan)
        if self.pricer.count <= _MAX_PLANS:
            self._known = result.plans[-_MAX_PLANS // 2 :]
        return result


@dataclass(slots=True)
class Leaf:
    """A node below splits at joins, kept for other limits: the entries they forbid, its last prices and plans.

    ``bound`` is its dual's under the current limits; infinite while it was not searched under them.
    """

    path: tuple[Ints, ...] = ()
    prices_R: Floats | None = None
    plans: list[Priced] = field(default_factory=list)
    bound: float = math.inf

    def shifted(self, change_R: Ints) -> Leaf:
        """The same leaf under limits that are lower by ``change_R``."""
        return Leaf(self.path, self.prices_R, [plan.shifted(change_R) for plan in self.plans])


@dataclass(order=True, slots=True)
class Node:
    """An open node: a bound, its number, the entries left, prices and plans to begin with.

    ``leaf`` is kept for other limits; None below a split that holds under these limits only. ``steps`` is the number of
    minimisations that bound it next, 0 once it is bounded: leaves of an earlier search are not at first. ``dual`` is
    the result.
    """

    bound: float
    number: int
    allowed_Z: Bools = field(compare=False)
    prices_R: Floats = field(compare=False)
    plans: list[Priced] = field(compare=False)
    leaf: Leaf | None = field(compare=False, default=None)
    steps: int = field(compare=False, default=0)
    dual: DualResult | None = field(compare=False, default=None)


def fractional_join(model: AssignmentModel, dual: DualResult) -> tuple[Ints, Ints] | None:
    """Entries to forbid on either side of a split, at the middle join that the dual's plans disagree about.

    The first side keeps the value that has the larger share of the dual's plans.
    """
    used = [(w, p) for w, p in zip(dual.weights_I, dual.plans, strict=True) if w > SHARE]
    split = []
    for item in model.derived:
        share: dict[int, float] = {}
        for weight, plan in used:
            group = item.group_L[plan.labels_N[item.node]]
            share[group] = share.get(group, 0.0) + float(weight)
        if len(share) > 1:
            split.append((item, max(share, key=lambda group: (share[group], group))))
    if not split:
        return None
    item, group = split[len(split) // 2]
    inside = np.array(item.group_L) == group
    offset = model.offset_N[item.node]
    return offset + np.flatnonzero(~inside), offset + np.flatnonzero(inside)


def widest_choice(model: AssignmentModel, allowed_Z: Bools) -> tuple[Ints, Ints] | None:
    """Entries to forbid on either side of a split at the undecided node with the largest swing in objective."""
    best: tuple[float, Ints] | None = None
    for node in range(model.num_nodes):
        entry = np.arange(model.sizes_N[node]) + model.offset_N[node]
        left = entry[allowed_Z[entry]]
        if len(left) > 1:
            swing = float(np.ptp(model.objective_Z[left]))
            if best is None or swing > best[0]:
                best = swing, left
    if best is None:
        return None
    cheap = best[1][model.objective_Z[best[1]].argmin()]
    return np.array([cheap]), best[1][best[1] != cheap]


def split_count(model: AssignmentModel, core: Condensed, dual: DualResult) -> tuple[Ints, Ints] | None:
    """Entries to forbid on either side of a split by the number of copies of a part that take a label at one node.

    Equal parts can be exchanged. So either at least k copies take the label, and then those may be the first k, or
    all but k - 1 do not, and then those may be the copies from number k - 1 on. The label and k are chosen where the
    dual's plans take a fraction of a copy on average, and its weight in the objective is large.

    Args:
        model: The problem.
        core: A core of all that is undecided, condensed.
        dual: The dual, with its plans and their weights.

    Returns:
        The two sides, or None if no class is split by the dual's plans.

    Source: orbital branching (Ostrowski et al. 2011), for copies of equal parts.
    """
    used = [(w, p) for w, p in zip(dual.weights_I, dual.plans, strict=True) if w > SHARE]
    if not used or not core.classes:
        return None
    weight_I = np.array([w for w, _ in used])
    weight_I /= weight_I.sum()
    labels_IN = np.stack([p.labels_N for _, p in used])
    nodes = core.original.nodes
    best: tuple[float, Ints, int, int] | None = None
    for copies in core.classes:
        for place in range(copies.shape[1]):
            labels_A = nodes[copies[0, place]].labels_A
            if any(not np.array_equal(nodes[c].labels_A, labels_A) for c in copies[:, place].tolist()):
                continue
            numbers = np.array([nodes[c].node for c in copies[:, place].tolist()])
            offset = model.offset_N[numbers[0]]
            for label in labels_A.tolist():
                mean = float(weight_I @ (labels_IN[:, numbers] == label).sum(axis=1))
                swing = abs(float(model.objective_Z[offset + label] - model.objective_Z[offset + labels_A[0]]))
                score = min(mean % 1.0, 1.0 - mean % 1.0) * (
                    swing or float(np.ptp(model.objective_Z[offset + labels_A]))
                )
                if score > 1e-6 * swing and (best is None or score > best[0]):
                    best = score, numbers, label, int(mean) + 1
    if best is None:
        return None
    _, numbers, label, least = best
    others = [a for a in range(int(model.sizes_N[numbers[0]])) if a != label]
    forced = (model.offset_N[numbers[:least], None] + np.array(others, dtype=np.int64)).ravel()
    return forced, model.offset_N[numbers[least - 1 :]] + label
