"""The incumbent: the best labelling within the limits, and how parts of other labellings improve it.

Axes: N nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qsync_opt.formulations.assignment.compiled import compiled
from qsync_opt.formulations.assignment.dual import Priced
from qsync_opt.formulations.assignment.elimination import Relaxation
from qsync_opt.formulations.assignment.model import AssignmentModel, Bools, Floats, Ints

_LARGE_PART = 300
"""Parts of at least so many nodes are also adopted in part."""
PROOF = 1e-9
"""Smaller relative improvements of the objective are not sought."""


@dataclass(slots=True)
class Incumbent:
    """The best labelling of a model within its limits.

    Attributes:
        relaxation: The relaxation that plans come from.
        offset: Constant that is part of the objective when gaps are measured.
        best: The labelling, if there is one.
    """

    relaxation: Relaxation
    offset: float = 0.0
    best: Priced | None = None

    @property
    def model(self) -> AssignmentModel:
        """The true model."""
        return self.relaxation.true

    def offer(self, labels_N: Ints) -> None:
        """Keep a labelling if it is feasible and better than the incumbent."""
        if self.model.wanted is not None:
            labels_N = labels_N.copy()
            self.model.wanted.fill(labels_N)
        plan = Priced(labels_N, self.model.objective(labels_N), self.model.excess(labels_N))
        if plan.feasible and plan.objective < self.upper:
            self.best = plan

    def offer_relaxed(self, plan: Priced) -> None:
        """Offer a plan of the relaxed model."""
        if self.relaxation.entry_Y is not None or self.model.wanted is not None:
            self.offer(self.relaxation.labelling(plan.labels_N))
        elif plan.feasible and plan.objective < self.upper:
            self.best = plan

    @property
    def upper(self) -> float:
        """Objective of the incumbent, infinite without one."""
        return np.inf if self.best is None else self.best.objective

    def target(self, gap: float) -> float:
        """Value that a labelling must stay below to be worth finding, for a relative gap."""
        return np.inf if self.best is None else self.upper - max(gap, PROOF) * abs(self.upper + self.offset)


def blend(model: AssignmentModel, feasible_N: Ints, other_N: Ints, prices_R: Floats) -> Ints:
    """Improve a feasible labelling by connected parts of another one.

    Args:
        model: The problem.
        feasible_N: A labelling within the limits.
        other_N: Another one, usually better and infeasible.
        prices_R: Prices of the limits, to rank parts.

    Returns:
        A labelling within the limits, at least as good as ``feasible_N``.
    """
    part_N, count = _parts(model, feasible_N != other_N)
    if not count:
        return feasible_N
    first, second = model.edges_E2.T
    owner = np.concatenate([part_N, np.maximum(part_N[first], part_N[second])])
    before, after = model.chosen(feasible_N), model.chosen(other_N)
    changed = np.flatnonzero(owner >= 0)
    loads_PS = model.loads_of(after[changed], owner[changed], count)
    loads_PS -= model.loads_of(before[changed], owner[changed], count)
    gain_P = np.zeros(count)
    np.add.at(gain_P, owner[changed], model.objective_Z[before[changed]] - model.objective_Z[after[changed]])
    useful = np.flatnonzero(gain_P > 0)
    price_P = loads_PS[useful] @ model.load_prices(prices_R)
    ratio = gain_P[useful] / np.maximum(price_P, 1e-300)
    order = useful[np.argsort(-ratio, kind="stable")]
    adopted = _adopt(order, loads_PS, *model.steps, -model.excess(feasible_N))
    blended_N = np.where(adopted[part_N], other_N, feasible_N)  # part -1 reads the last entry, which is False
    if int(np.bincount(part_N[part_N >= 0]).max()) < _LARGE_PART:
        return blended_N
    return min((_cut(model, blended_N, other_N, from_end=from_end) for from_end in (False, True)), key=model.objective)


def _cut(model: AssignmentModel, feasible_N: Ints, other_N: Ints, *, from_end: bool) -> Ints:
    """Adopt the first (or last) nodes of another labelling, as many as the limits allow; by bisection."""
    number_N = np.arange(model.num_nodes)
    best_N, best = feasible_N, model.objective(feasible_N)
    low, high = 0, model.num_nodes
    while low < high:
        middle = (low + high + 1) // 2
        adopted_N = number_N >= model.num_nodes - middle if from_end else number_N < middle
        mixed_N = model.complete(np.where(adopted_N, other_N, feasible_N))
        value = model.objective(mixed_N)
        if value < np.inf and (model.excess(mixed_N) <= 0).all():
            low = middle
            if value < best:
                best_N, best = mixed_N, value
        else:
            high = middle - 1
    return best_N


def _parts(model: AssignmentModel, differs_N: Bools) -> tuple[Ints, int]:
    """Connected parts of the differing nodes: the number of each node's part (-1: none), and how many there are."""
    root_N = _roots(differs_N, model.edges_E2)
    is_root = root_N == np.arange(model.num_nodes)
    number_N = np.cumsum(is_root) - 1
    return np.where(differs_N, number_N[root_N], -1), int(number_N[-1]) + 1 if len(number_N) else 0


@compiled("boolean[::1](int64[::1],int64[:,::1],int64[::1],int64[::1],int64[::1],int64[::1])")
def _adopt(order: Ints, loads_PS: Ints, row: Ints, load: Ints, sign: Ints, slack_R: Ints) -> Bools:
    """Parts to adopt, in order, where the rows (as in `AssignmentModel.steps`) have room; one more False at the end."""
    slack, left = slack_R.copy(), np.empty(len(slack_R), dtype=np.int64)
    adopted = np.zeros(len(loads_PS) + 1, dtype=np.bool_)
    for part in order:
        left[:] = 0
        for step in range(len(row)):
            left[row[step]] += sign[step] * loads_PS[part, load[step]]
        total, fits = 0, True
        for r in range(len(slack)):
            total += left[r]
            left[r] = slack[r] - total
            fits = fits and left[r] >= 0
        if fits:
            slack[:] = left
            adopted[part] = True
    return adopted


@compiled("int64[::1](boolean[::1],int64[:,::1])")
def _roots(differs_N: Bools, edges_E2: Ints) -> Ints:
    """First node of each differing node's part; -1 where a node does not differ."""
    parent = np.arange(len(differs_N))
    for edge in range(len(edges_E2)):
        one, two = edges_E2[edge, 0], edges_E2[edge, 1]
        if differs_N[one] and differs_N[two]:
            while parent[one] != one:
                parent[one] = parent[parent[one]]
                one = parent[one]
            while parent[two] != two:
                parent[two] = parent[parent[two]]
                two = parent[two]
            parent[max(one, two)] = min(one, two)
    for node in range(len(differs_N)):
        # A root is the first node of its part, so it stands before.
        parent[node] = parent[parent[node]] if differs_N[node] else -1
    return parent
