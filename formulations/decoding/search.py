"""The methods ``default`` and ``exact``: branch and bound over the set of drafts that pays for its memory.

With a set of drafts every regime is decided by enumeration. The saving s[r,d] of draft d in regime r counts once per
regime. With a price u[r] >= 0 of that rule, a set D of drafts saves at most

    sum_r u[r] + sum_(d in D) sum_r max(0, s[r,d] - u[r])

so a fractional knapsack of the inner sums bounds every set. Prices come from subgradient steps at the root. The node of
least bound is branched on first: the least bound of the open nodes is a bound of the problem at any time.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from dataclasses import dataclass

import numpy as np

from qsync_opt.decoding import Problem
from qsync_opt.formulations.decoding.tables import Floats, Tables, build_tables
from qsync_opt.solving import Answer, SolveOptions, termination_of

_DEFAULT_NODES = 2000
"""Nodes after which the default method returns what it has, with its bound: well below a second."""
_PRICE_STEPS = 300
_STEP_SHRINKS = 0.95
"""Factor of the step where it did not improve the bound."""
_ROUNDING = 1e-12
"""Relative errors of sums: a bound this close to the incumbent proves it."""


@dataclass(frozen=True, slots=True)
class _Node:
    """Drafts that are ``chosen``, those still ``open``, the memory left, and the saving of each regime so far."""

    chosen: tuple[int, ...]
    open: tuple[int, ...]
    left_kib: int
    saved_R: Floats


class _Search:
    """The incumbent and the bound of one branch and bound."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.plain = math.fsum(tables.plain_R)
        self.best: tuple[int, ...] = ()
        self.objective = self.plain
        self.bound = 0.0
        self.saving_RD: Floats = np.maximum(tables.plain_R[:, None] - tables.time_RD, 0.0)
        self.memory_D = np.array(tables.memory_D, dtype=np.float64)
        self.price_R: Floats = np.zeros(len(tables.plain_R))
        self.priced_D: Floats = self.saving_RD.sum(axis=0)

    def run(self, nodes: int | None, gap: float, deadline: float) -> bool:
        """Search until the gap, the deadline or a number of nodes; returns whether the deadline ended it."""
        root = _Node((), tuple(range(len(self.tables.drafts))), self.tables.memory_kib, np.zeros_like(self.price_R))
        self._complete(root)
        self._set_prices(root, deadline)
        numbers, visited = itertools.count(), 0  # equal bounds are told apart by numbers
        heap = [(self._bound(root), next(numbers), root)]
        while heap:
            self.bound = min(heap[0][0], self.objective)
            if self.bound >= self.objective * (1 - max(gap, _ROUNDING)):
                return False
            if time.monotonic() > deadline:
                return True
            if visited == nodes:
                return False
            visited += 1
            _, _, node = heapq.heappop(heap)
            for child in self._children(node):
                self._complete(child)
                bound = self._bound(child)
                if bound < self.objective * (1 - _ROUNDING):
                    heapq.heappush(heap, (bound, next(numbers), child))
        self.bound = self.objective
        return False

    def _set_prices(self, root: _Node, deadline: float) -> None:
        """Prices of the root's bound: subgradient steps towards the incumbent, the best prices kept."""
        price_R, step = self.price_R, 1.0
        highest_R = self.saving_RD.max(axis=1, initial=0.0)
        bound = self._bound(root)
        for _ in range(_PRICE_STEPS):
            if self.objective - bound <= _ROUNDING * self.objective or time.monotonic() > deadline:
                break
            over_RD = self.saving_RD > price_R[:, None]
            priced_D = np.maximum(self.saving_RD - price_R[:, None], 0.0).sum(axis=0)
            share_D = self._knapsack(priced_D, root)
            reached = self.plain - float(price_R.sum() + priced_D @ share_D)
            if reached > bound:
                bound, self.price_R, self.priced_D = reached, price_R, priced_D
            else:
                step *= _STEP_SHRINKS
            slope_R = over_RD @ share_D - 1
            size = float(slope_R @ slope_R)
            if size == 0:
                break
            price_R = np.clip(price_R + step * (self.objective - reached) / size * slope_R, 0.0, highest_R)

    def _knapsack(self, priced_D: Floats, node: _Node) -> Floats:
        """Share of each open draft in the fractional knapsack of the memory left; the last one is taken in part."""
        share_D = np.zeros_like(priced_D)
        columns = np.array(node.open, dtype=np.int64)
        ordered = columns[np.argsort(-priced_D[columns] / np.maximum(self.memory_D[columns], 1e-9), kind="stable")]
        room = node.left_kib - (np.cumsum(self.memory_D[ordered]) - self.memory_D[ordered])
        share_D[ordered] = np.clip(room / np.maximum(self.memory_D[ordered], 1e-9), 0.0, 1.0)
        share_D[columns[self.memory_D[columns] == 0]] = 1.0
        return share_D

    def _bound(self, node: _Node) -> float:
        """A bound of every plan that has the node's chosen drafts and others of its open ones only."""
        chosen = float(self.priced_D[list(node.chosen)].sum())
        saved = float(self.price_R.sum()) + chosen + float(self.priced_D @ self._knapsack(self.priced_D, node))
        best_R = np.maximum(node.saved_R, self.saving_RD[:, node.open].max(axis=1, initial=0.0))
        return self.plain - min(saved, math.fsum(best_R))

    def _complete(self, node: _Node) -> None:
        """Add drafts by saving per memory while they fit, and keep the plan if it is better than the incumbent."""
        saved_R, left = node.saved_R, float(node.left_kib)
        chosen, columns = list(node.chosen), np.array(node.open, dtype=np.int64)
        while columns.size:
            gain_D = np.maximum(self.saving_RD[:, columns] - saved_R[:, None], 0.0).sum(axis=0)
            keep = (gain_D > 0) & (self.memory_D[columns] <= left)
            columns, gain_D = columns[keep], gain_D[keep]
            if columns.size:
                d = int(columns[(gain_D / np.maximum(self.memory_D[columns], 1e-9)).argmax()])
                chosen.append(d)
                saved_R, left = np.maximum(saved_R, self.saving_RD[:, d]), left - self.memory_D[d]
                columns = columns[columns != d]
        if (objective := self.tables.objective(chosen)) < self.objective:
            self.best, self.objective = tuple(chosen), objective

    def _children(self, node: _Node) -> tuple[_Node, ...]:
        """With and without the open draft that saves most beside the chosen ones; none if no draft fits or saves."""
        columns = [d for d in node.open if self.tables.memory_D[d] <= node.left_kib]
        gain_D = np.maximum(self.saving_RD[:, columns] - node.saved_R[:, None], 0.0).sum(axis=0)
        if not columns or gain_D.max() <= 0:
            return ()
        draft = columns[int(gain_D.argmax())]
        others = tuple(d for d in columns if d != draft)
        left_kib = node.left_kib - self.tables.memory_D[draft]
        fitting = tuple(d for d in others if self.tables.memory_D[d] <= left_kib)
        saved_R = np.maximum(node.saved_R, self.saving_RD[:, draft])
        return (
            _Node((*node.chosen, draft), fitting, left_kib, saved_R),
            _Node(node.chosen, others, node.left_kib, node.saved_R),
        )


def _solve(problem: Problem, options: SolveOptions, nodes: int | None) -> Answer:
    started = time.monotonic()
    deadline = math.inf if options.time_limit_s is None else started + options.time_limit_s
    search = _Search(build_tables(problem))
    built = time.monotonic()
    late = search.run(nodes, options.gap, deadline)
    return Answer(
        termination=termination_of(search.objective, search.bound, out_of_time=late),
        plan=search.tables.plan(search.best),
        objective=search.objective,
        bound=min(search.bound, search.objective),
        build_seconds=built - started,
        solve_seconds=time.monotonic() - built,
    )


class DefaultFormulation:
    """Branch and bound over the set of drafts, ended after some nodes; most problems are proved optimal before.

    Source: ours; the prices are those of Cornuejols, Fisher and Nemhauser, "Location of bank accounts to optimize
        float", Management Science 1977.
    """

    def solve(self, problem: Problem, options: SolveOptions) -> Answer:
        """Choose a draft and a length for every regime; without a time or node limit the plan is proved optimal."""
        return _solve(problem, options, _DEFAULT_NODES)


class ExactFormulation:
    """The same search, to a proved optimum, or to a gap or time limit."""

    def solve(self, problem: Problem, options: SolveOptions) -> Answer:
        """Choose a draft and a length for every regime."""
        return _solve(problem, options, None)
