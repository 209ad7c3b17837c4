"""Bounds by prices, and a best-first search: the certified core of the methods ``chain`` and ``exact``.

For weights a, b on the devices (each summing to 1) and theta in [0, 1], with n = new_tokens - 1::

    (m_p - 1) max P  >=  (m_p - 1) sum a P
    (n - 1) max(sum D, m_d max D) + (m_d - 1) max D  >=  (n - 1) theta sum D + E sum b D,
                                                    E = (n - 1)(1 - theta) m_d + m_d - 1

so that, with prices for memory and harm, the best chain (`chain.priced_chain`) bounds the objective from below. Every
chain on the way to the best prices (`prices`) is a draft for `transfers`. The search divides the choices first by the
order of devices, then by where stages end; what is left then is listed (`counts`), or divided by schemes.

Source: ours; the resource prices are classical Lagrangian relaxation (Held and Karp 1971).
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from qsync_opt.formulations.serving.chain import Region, Windows, all_choices, children, priced_chain
from qsync_opt.formulations.serving.counts import GivenStages, few_numbers
from qsync_opt.formulations.serving.fluid import solve_fluid
from qsync_opt.formulations.serving.prices import Planes, chain_prices, even_prices, fluid_prices, stage_prices
from qsync_opt.formulations.serving.starts import Start, best_orders, first_start, settled, without_idle
from qsync_opt.formulations.serving.tables import Array, Draft, Tables
from qsync_opt.formulations.serving.transfers import WORST, Transfers, Value, best_of_all, value_of

_ROUND = 5
"""Price steps on a part of the choices, whose prices begin at those of the whole."""
_MOST_ROUNDS, _QUICKLY = 8, 0.1
"""Most rounds of such steps, and the share of the gap to the best plan that one must close to have another follow."""
_LONG_ROUND = 24
"""Price steps between two drafts that are improved, where nothing is divided yet."""
_NEAR, _FAR = 0.05, 1.0
"""First box of prices that are nearly the best, and of others."""
_ORDERS = 8
"""Orders of an option whose fluid program is solved, ..."""
_SETTLED = 5
"""... of which so many are made whole, ..."""
_CLOSE = 1e-3
"""... and those that are relatively so close to the best are improved by transfers."""
_SHARES = (0.3, 1.0)
"""Shares of the prices of stages that pay for the slowest one, when it is asked how long that may be, ..."""
_SHORTER = 0.01
"""... and by how much, relatively, the answer must be less than before."""
_LITTLE = 0.02
"""How far above the bound, relatively, a first plan of given stages is looked for."""
_SEARCHED_EVERY = 8
"""Nodes of the search between two whose drafts are improved by transfers, which take far longer than bounds."""
_FEW_DRAFTS = 4000
"""Drafts of a part of the choices that are all looked at instead of bounded."""
_SLACK = 1e-9
"""Relative rounding of a bound that was computed in floating point."""


class Node:
    """A region of one option with its best known bound and prices."""

    def __init__(
        self, tables: Tables, region: Region, order: tuple[int, ...] | None, prices: Array, box: float = _NEAR
    ) -> None:
        self.tables, self.region, self.order = tables, region, order
        self.bound = 0.0
        """The best that is known, be it that of a region which this one is part of."""
        self.reached = -math.inf
        """The best at this node's own prices."""
        self.drafts: list[tuple[Draft, Value]] = []
        self.listed = False
        """Whether listing the numbers of given stages has done what it can."""
        self.planes = Planes(tables, prices, box)
        self._windows: Windows | None = None

    def climb(self, steps: int, upper: float) -> None:
        """Raise the bound; at ``upper`` it is high enough, and infinite if nothing in the region keeps the limits."""
        most = self.tables.most_ns() if math.isinf(upper) else math.inf  # else it is cut off by ``upper`` before
        del self.drafts[:-_LONG_ROUND]
        for _ in range(steps):
            prices = self.planes.best if math.isinf(self.reached) else self.planes.next(self.reached)
            if prices is None:
                return
            bound, draft = self._evaluate(prices)
            if draft is None:
                self.bound = math.inf
                return
            self.drafts.append((draft, value_of(self.tables.in_order(draft.order), self.planes.add(draft))))
            if math.isfinite(self.reached):
                self.planes.report(self.reached, bound, prices)
            self.reached = max(self.reached, bound)
            self.bound = max(self.bound, bound)
            if self.bound > most:
                self.bound = math.inf
            if self.bound >= upper:
                return

    def _evaluate(self, prices: Array) -> tuple[float, Draft | None]:
        t = self.tables
        of_chain = chain_prices(t, prices)
        value, draft = priced_chain(t, self.region, of_chain, self._region_windows())
        limit = of_chain.harm * t.harm_limit if math.isfinite(t.harm_limit) else 0.0
        return value - limit - _SLACK * (abs(value) + limit), draft

    def _region_windows(self) -> Windows:
        if self._windows is None:
            self._windows = Windows.of(self.tables, self.region)
        return self._windows

    def divide(self) -> list[Node]:
        """Nodes that cover this one's choices."""
        region = self.region
        if not region.closed:
            parts = []
            for child in children(self.tables, region):
                if not child.closed:
                    parts.append(Node(self.tables, child, None, self.planes.best))
                    continue
                tables, order, groups = self.tables.in_order(child.prefix), child.prefix, self.tables.groups
                stages = len(order)
                low = tuple(range(1, stages))
                high = tuple(groups - stages + j for j in range(1, stages))
                own = replace(child, prefix=tuple(range(stages)), low=low, high=high)
                fluid = None if _few(own) else solve_fluid(self.tables, order, max(self.bound, 1.0))
                if fluid is not None:
                    prices = fluid_prices(tables, tuple(range(stages)), fluid)
                else:
                    prices = stage_prices(self.tables, self.planes.best, order)
                parts.append(Node(tables, own, order, prices))
        else:
            parts = [Node(self.tables, part, self.order, self.planes.best) for part in self._halves()]
        for part in parts:
            part.bound = self.bound
            if part.order == self.order:
                part.planes.inherit(self.planes, part.holds)
        return parts

    def holds(self, draft: Draft) -> bool:
        """Whether a draft with this node's types is in its region."""
        region, depth = self.region, len(self.region.prefix)
        earliest_TG, begins = self._region_windows().earliest_TG, (0, *draft.ends[:-1])
        return (
            draft.order[:depth] == region.prefix
            and (not region.closed or len(draft.order) == depth)
            and all(low <= end <= high for low, end, high in zip(region.low, draft.ends, region.high, strict=False))
            and all(b >= earliest_TG[t, e] for t, b, e in zip(draft.order, begins, draft.ends, strict=True))
            and bool(region.allowed_GS[np.arange(self.tables.groups), list(draft.schemes)].all())
        )

    def settle_prices(self, upper: float) -> None:
        """Raise the bound for as long as that goes on quickly."""
        for _ in range(_MOST_ROUNDS):
            before = self.reached
            self.climb(_ROUND, upper)
            if self.bound >= upper:
                return
            if not self.shorten(upper) and self.reached - before < _QUICKLY * (upper - self.reached):
                return

    def shorten(self, upper: float) -> bool:
        """Forbid stages that are too long for a plan better than ``upper``; True if that is noticeable."""
        t, types = self.tables, self.tables.types
        if t.prefill_parts == 1 or not math.isfinite(upper):
            return False
        most = self.region.most_ns
        for share in _SHARES:
            prices = self.planes.best.copy()
            prices[:types] *= 1 - share
            # What is left of the prices for stages pays for the slowest of them.
            bound, _ = self._evaluate(prices)
            most = min(most, (upper - bound) / (share * (t.prefill_parts - 1)))
        if most >= (1 - _SHORTER) * self.region.most_ns:
            return False
        self.region, self._windows, self.reached = replace(self.region, most_ns=most), None, -math.inf
        self.planes.inherit(self.planes, self.holds)
        return True

    def _halves(self) -> list[Region]:
        region, drafts = self.region, self.drafts
        spread = [high - low for low, high in zip(region.low, region.high, strict=True)]
        if spread and max(spread) > 0:
            j = int(np.argmax(spread))
            at = round(float(np.mean([draft.ends[j] for draft, _ in drafts[-_ROUND:]])) - 0.5) if drafts else 0
            at = min(max(at, region.low[j]), region.high[j] - 1)
            low, high = list(region.low), list(region.high)
            low[j], high[j] = at + 1, at
            return [replace(region, high=tuple(high)), replace(region, low=tuple(low))]
        free = region.allowed_GS.sum(1)
        if free.max() <= 1:
            return []
        recent = np.asarray([draft.schemes for draft, _ in drafts[-_ROUND:]])
        variety = (recent != recent[-1]).sum(0) + 1e-3 * self.tables.harm_GS.max(1) / max(
            self.tables.harm_GS.max(), 1e-300
        )
        g = int(np.where(free > 1, variety, -1.0).argmax())
        only, rest = region.allowed_GS.copy(), region.allowed_GS.copy()
        only[g] = False
        only[g, recent[-1, g]] = True
        rest[g, recent[-1, g]] = False
        return [replace(region, allowed_GS=only), replace(region, allowed_GS=rest)]

    def given_stages(self) -> tuple[int, ...] | None:
        """Where stages end, if that is all that is left, and schemes."""
        region = self.region
        if not region.closed or region.low != region.high or len(region.low) != len(region.prefix) - 1:
            return None
        return (*region.high, self.tables.groups)

    def solve_given(self, ends: tuple[int, ...], upper: float) -> Draft | None:
        """Raise the bound of given stages as far as listing their numbers does, and return a draft below ``upper``."""
        self.listed = True
        if math.isinf(self.reached):
            self.climb(1, upper)
        if self.bound >= upper or not few_numbers(self.tables, ends):
            return None
        # Without a plan to compare with: whether one is a little above the bound.
        goal = upper if math.isfinite(upper) else self.reached + max(_LITTLE * abs(self.reached), 1.0)
        best, theta = self.planes.best, float(self.planes.best[2 * self.tables.types])
        stages = GivenStages(self.tables, ends, self.region.allowed_GS)
        bound, draft = stages.solve(chain_prices(self.tables, best), theta, self.reached, goal)
        self.listed = bound <= self.reached
        self.bound = max(self.bound, bound if goal == upper else min(bound, goal))
        return draft

    def few_left(self) -> bool:
        """Whether so few drafts are left that each can be looked at."""
        return _few(self.region)


def _few(region: Region) -> bool:
    if not region.closed or len(region.low) != len(region.prefix) - 1:
        return False
    count = 1
    for choices in (*(b - a + 1 for a, b in zip(region.low, region.high, strict=True)), *region.allowed_GS.sum(1)):
        count *= max(int(choices), 1)
        if count > _FEW_DRAFTS:
            return False
    return True


class Search:
    """Best-first search over nodes of all micro-batch options."""

    def __init__(self, options: Sequence[Tables], deadline: float = math.inf) -> None:
        self.best: tuple[int, Draft] | None = None
        self.value = WORST
        self._options = options
        self._deadline = deadline
        self._heap: list[tuple[float, int, Node]] = []
        self._counter = itertools.count()
        self._refined: tuple[int, Draft] | None = None
        self._polished: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()

    @property
    def bound(self) -> float:
        """No feasible plan's objective is below this; infinite if there is no feasible plan."""
        open_bound = self._heap[0][0] if self._heap else math.inf
        bound = min(open_bound, self.upper)
        # Objectives are whole nanoseconds.
        return math.ceil(bound - 1e-6) if math.isfinite(bound) else bound

    @property
    def upper(self) -> float:
        """Objective of the best feasible draft, or infinity."""
        return self.value.objective if self.best is not None else math.inf

    def offer(self, tables: Tables, draft: Draft, *, pairs: bool, again: bool = False) -> None:
        """Improve a draft and keep it if it is the best."""
        key = (tables.option, draft.order, draft.ends)
        if key in self._polished and not again:
            return
        self._polished.add(key)
        result, value = Transfers(tables, draft.order).improve(draft, pairs=pairs)
        if value.excess <= 0 and value.objective < self.upper:
            self.best, self.value = (tables.option, result), value

    def begin(self, unit: float) -> None:
        """Look for a good draft in the options that the fluid program finds promising, and bound every option.

        ``unit`` is about the objective's size.
        """
        starts = [first_start(tables, unit) for tables in self._options]
        for promising in sorted((s for s in starts if s is not None), key=lambda s: s.fluid.objective):
            if promising.fluid.objective < self.upper:
                self._settle_orders(promising)
        for tables, start in zip(self._options, starts, strict=True):
            if start is None:
                node = Node(tables, all_choices(tables), None, even_prices(tables), _FAR)
            else:
                node = Node(tables, all_choices(tables), None, fluid_prices(tables, start.order, start.fluid))
            node.climb(1, self.upper)
            self._push(node)

    def _settle_orders(self, start: Start) -> None:
        """Improve the drafts of the best orders of a start."""
        fewer = without_idle(start)
        starts = best_orders(start, _ORDERS)
        if fewer.order != start.order:
            starts = [*best_orders(fewer, _ORDERS // 2)[: _SETTLED // 2], *starts]
        whole = [(fluid, other) for other in starts[:_SETTLED] if (fluid := settled(other)) is not None]
        whole.sort(key=lambda pair: pair[0].objective)
        for fluid, other in whole:
            if fluid.objective <= (1 + _CLOSE) * min(whole[0][0].objective, self.upper):
                assert fluid.schemes is not None, "stages are given"
                self.offer(start.tables, Draft(other.order, fluid.ends, fluid.schemes), pairs=True)

    def root(self, steps: int) -> None:
        """Raise the bound of every option, and look for a feasible draft in each."""
        nodes = [entry[2] for entry in self._heap]
        self._heap = []
        for node in nodes:
            node.climb(steps, self.upper)
            self._polish(node)
            self._push(node)
        self.refine()

    def raise_bound(self, steps: int) -> None:
        """Raise the lowest bound, and leave the drafts of the way alone."""
        if self._heap:
            _, _, node = heapq.heappop(self._heap)
            node.climb(steps, self.upper)
            self._push(node)

    def climb(self, rounds: int, gap: float) -> None:
        """Raise the lowest bound, round by round, without dividing anything."""
        for _ in range(rounds):
            if self._finished(gap) or not self._heap:
                return
            _, _, node = heapq.heappop(self._heap)
            node.climb(_LONG_ROUND, self.upper)
            self._polish(node)
            self._push(node)
            if node.planes.done:
                break
        self.refine()

    def refine(self) -> None:
        """Improve the best draft by pairs of moves too."""
        if self.best is not None and self.best is not self._refined:
            option, draft = self.best
            self.offer(self._options[option], draft, pairs=True, again=True)
            self._refined = self.best

    def run(self, gap: float, enough: Callable[[], bool] = lambda: False, most_nodes: float = math.inf) -> None:
        """Divide and bound until the gap is reached, the time or the nodes are used up, or ``enough`` says so."""
        nodes = 0
        while self._heap and nodes < most_nodes and not self._finished(gap) and not enough():
            nodes += 1
            _, _, node = heapq.heappop(self._heap)
            if node.few_left():
                self._settle(node)
                continue
            ends = node.given_stages()
            if ends is not None and not node.listed:
                self._solve_given(node, ends)
                self._push(node)
                continue
            for part in node.divide():
                if part.few_left():
                    self._settle(part)
                    continue
                part.settle_prices(self.upper)
                if math.isfinite(part.bound):
                    self._polish(part, always=nodes % _SEARCHED_EVERY == 1)
                    self.refine()
                self._push(part)

    def _solve_given(self, node: Node, ends: tuple[int, ...]) -> None:
        """Raise the bound of given stages by listing numbers of groups, and keep the best plan."""
        draft = node.solve_given(ends, self.upper)
        if draft is not None:
            draft, tables = self._named(node, draft), self._options[node.tables.option]
            value = Transfers(tables, draft.order).value(draft)
            if value.excess <= 0 and value.objective < self.upper:
                self.best, self.value = (tables.option, draft), value
            elif value.excess > 0:
                # It was within a limit by rounding only.
                node.bound, node.listed = node.reached, True

    def _settle(self, node: Node) -> None:
        """Look at all drafts of a node."""
        found = best_of_all(node.tables, node.region.low, node.region.high, node.region.allowed_GS)
        if found is not None and found[1] < self.upper:
            self.best, self.value = (node.tables.option, self._named(node, found[0])), Value(0.0, found[1])

    def _polish(self, node: Node, *, always: bool = True) -> None:
        """Improve the best of a node's latest drafts; unless ``always``, only if it is the best so far as it is."""
        if not node.drafts:
            return
        tables = self._options[node.tables.option] if node.order is not None else node.tables
        draft, value = min(node.drafts[-_LONG_ROUND:], key=lambda pair: (pair[1].excess, pair[1].objective))
        if always or value.better(self.value):
            self.offer(tables, self._named(node, draft), pairs=False)

    def _named(self, node: Node, draft: Draft) -> Draft:
        """The draft with device types instead of stage numbers."""
        return draft if node.order is None else replace(draft, order=tuple(node.order[j] for j in draft.order))

    def _push(self, node: Node) -> None:
        # Objectives are whole nanoseconds: only a plan that is at least one faster counts.
        if math.isfinite(node.bound) and node.bound <= self.upper - 1 + 1e-6:
            heapq.heappush(self._heap, (node.bound, next(self._counter), node))

    def _finished(self, gap: float) -> bool:
        while self._heap and self._heap[0][0] > self.upper - 1 + 1e-6:
            heapq.heappop(self._heap)
        if time.monotonic() > self._deadline:
            return True
        return self.best is not None and self.upper - self.bound <= gap * abs(self.upper)

    @property
    def exhausted(self) -> bool:
        """Whether nothing is left to search."""
        return not self._heap
