"""Bounds by prices, and a best-first search: the certified core of the methods ``chain`` and ``exact``.

For weights a, b on the devices (each summing to 1) and theta in [0, 1], with n = new_tokens - 1::

    (m_p - 1) max P  >=  (m_p - 1) sum a P
    (n - 1) max(sum D, m_d max D) + (m_d - 1) max D  >=  (n - 1) theta sum D + E sum b D,
                                                    E = (n - 1)(1 - theta) m_d + m_d - 1

so that, with prices for memory and harm, the best chain (`chain.priced_chain`) bounds the objective from below. Prices
rise by Polyak steps; every chain on the way is a draft for `transfers`. The search divides the choices first by the
order of devices, then by where stages end, then by schemes.

Source: ours; the resource prices are classical Lagrangian relaxation (Held and Karp 1971; Polyak 1969 for the step).
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from qsync_opt.formulations.serving.chain import Prices, Region, Windows, all_choices, children, priced_chain
from qsync_opt.formulations.serving.fluid import Fluid, solve_fluid
from qsync_opt.formulations.serving.starts import Start, best_orders, first_start, moved, settled, without_idle
from qsync_opt.formulations.serving.tables import Array, Draft, Tables
from qsync_opt.formulations.serving.transfers import WORST, Transfers, Value, best_of_all, stage_sums

_ROUND = 8
"""Price steps on a part of the choices, whose prices begin at those of the whole."""
_MOST_ROUNDS, _QUICKLY = 8, 0.1
"""Most rounds of such steps, and the share of the gap to the best plan that one must close to have another follow."""
_LONG_ROUND = 24
"""Price steps between two drafts that are improved, where nothing is divided yet."""
_KEPT = 0.6
"""Share of the earlier slopes in their running mean."""
_NEAR_RATE = 0.25
"""First step, as a share of Polyak's, from prices that are nearly the best."""
_STALL = 10
"""Steps without a better bound after which the step is halved."""
_ORDERS = 8
"""Orders of an option whose fluid program is solved, ..."""
_SETTLED = 5
"""... of which so many are made whole, ..."""
_CLOSE = 1e-3
"""... and those that are relatively so close to the best are improved, ..."""
_PROGRAMS = 2
"""... by at most so many programs with stages moved, and by transfers."""
_SEARCHED_EVERY = 8
"""Nodes of the search between two whose drafts are improved by transfers, which take far longer than bounds."""
_FEW_DRAFTS = 4000
"""Drafts of a part of the choices that are all looked at instead of bounded."""
_SLACK = 1e-9
"""Relative rounding of a bound that was computed in floating point."""


@dataclass(slots=True)
class _Dual:
    """Prices in natural units: shares of the two maxima by type, theta, memory and harm per limit."""

    prefill_T: Array
    decode_T: Array
    theta: float
    memory_T: Array
    harm: float

    def copy(self) -> _Dual:
        return _Dual(self.prefill_T.copy(), self.decode_T.copy(), self.theta, self.memory_T.copy(), self.harm)


def _simplex(x_T: Array, count_T: Array) -> Array:
    """The nearest point with x >= 0 and sum of count * x = 1."""
    falling = np.argsort(-x_T, kind="stable")
    # What is taken from the largest 1, 2, ... entries, if only they stay above 0.
    taken = (np.cumsum((count_T * x_T)[falling]) - 1) / np.cumsum(count_T[falling])
    kept = int(np.flatnonzero(x_T[falling] > taken)[-1])
    result = np.maximum(x_T - taken[kept], 0)
    total = float((count_T * result).sum())
    return result / total if total > 0 else np.full_like(x_T, 1 / float(count_T.sum()))


def _dual_of(tables: Tables, order: tuple[int, ...], fluid: Fluid) -> _Dual:
    """A fluid program's prices by device type."""
    pick, count = np.asarray(order), tables.count_T.astype(float)

    def mean(values_J: Array) -> Array:
        return np.asarray(np.bincount(pick, values_J, tables.types) / count)

    return _Dual(
        _simplex(mean(fluid.prefill_J), count),
        _simplex(mean(fluid.decode_J), count),
        fluid.theta,
        mean(fluid.memory_J),
        fluid.harm,
    )


class Node:
    """A region of one option with its best known bound and prices."""

    def __init__(
        self, tables: Tables, region: Region, order: tuple[int, ...] | None, dual: _Dual | None = None
    ) -> None:
        self.tables, self.region, self.order = tables, region, order
        self.bound = 0.0
        """The best that is known, be it that of a region which this one is part of."""
        self.reached = 0.0
        """The best at this node's own prices."""
        self.rate = 1.0
        self.drafts: list[Draft] = []
        self._stall = 0
        count = tables.count_T.astype(float)
        even = np.full(tables.types, 1 / float(count.sum()))
        self.dual = dual or _Dual(even, even.copy(), 0.0, np.zeros(tables.types), 0.0)
        self._best = self.dual.copy()
        self._slope: Array | None = None
        self._windows: Windows | None = None

    def climb(self, steps: int, upper: float) -> None:
        """Raise the bound; ``upper`` is the objective to aim at (an estimate where it is infinite)."""
        self.drafts = []
        for _ in range(steps):
            bound, draft = self._evaluate()
            if draft is None:
                self.bound = math.inf
                return
            self.drafts.append(draft)
            if bound > self.reached + 1e-7 * abs(self.reached):
                self.reached, self._stall, self._best = bound, 0, self.dual.copy()
                self.bound = max(self.bound, bound)
            else:
                self._stall += 1
                if self._stall >= _STALL:
                    self.rate, self._stall, self.dual = self.rate / 2, 0, self._best.copy()
                    self._slope = None
            if self.bound >= upper:
                return
            self._step(bound, draft, upper if math.isfinite(upper) else max(1.2 * bound, 1.0))

    def _evaluate(self) -> tuple[float, Draft | None]:
        t, dual = self.tables, self.dual
        extra = max(t.steps - 1, 0)
        emphasis = extra * (1 - dual.theta) * t.decode_parts + t.decode_parts - 1
        time_T2 = np.stack(
            [
                1 + (t.prefill_parts - 1) * dual.prefill_T,
                (1 + extra * dual.theta + emphasis * dual.decode_T) if t.steps else np.zeros(t.types),
            ],
            axis=1,
        )
        limited = math.isfinite(t.harm_limit)
        harm = dual.harm if limited else 0.0
        if self._windows is None:
            self._windows = Windows.of(t, self.region)
        value, draft = priced_chain(t, self.region, Prices(time_T2, dual.memory_T, harm), self._windows)
        bound = value - (harm * t.harm_limit if limited else 0.0)
        return bound - _SLACK * (abs(value) + abs(value - bound)), draft

    def _step(self, bound: float, draft: Draft, upper: float) -> None:
        t, dual = self.tables, self.dual
        sums = stage_sums(t.in_order(draft.order), np.asarray(draft.ends), np.asarray(draft.schemes))
        unit = max(upper, 1.0)
        order = np.asarray(draft.order)

        def by_type(values_J: Array) -> Array:
            return np.bincount(order, values_J, t.types).astype(np.float64)

        count = t.count_T.astype(float)
        extra = max(t.steps - 1, 0)
        emphasis = (extra * (1 - dual.theta) * t.decode_parts + t.decode_parts - 1) if t.steps else 0.0
        # Types stand for several devices: their share's derivative is the mean over them times the count.
        g_prefill = (t.prefill_parts - 1) * by_type(sums.time_J2[:, 0]) / unit
        g_decode = emphasis * by_type(sums.time_J2[:, 1]) / unit
        decode_J = sums.time_J2[:, 1]
        g_theta = extra * float(decode_J.sum() - t.decode_parts * (dual.decode_T[order] * decode_J).sum()) / unit
        limit = np.maximum(t.limit_T, 1.0)
        g_memory = by_type(sums.memory_J - t.limit_T[order]) / limit
        scale = max(t.harm_limit, 1e-9) if math.isfinite(t.harm_limit) else 1.0
        g_harm = (sums.harm - t.harm_limit) / scale if math.isfinite(t.harm_limit) else 0.0
        slope = np.concatenate([g_prefill / count, g_decode / count, g_memory, [g_theta, g_harm]])
        # The mean of recent slopes: one chain alone puts all groups on one side of a balance.
        mean = slope if self._slope is None else _KEPT * self._slope + (1 - _KEPT) * slope
        self._slope = mean
        types = t.types
        point = np.concatenate(
            [dual.prefill_T, dual.decode_T, dual.memory_T * limit / unit, [dual.theta], [dual.harm * scale / unit]]
        )
        free = mean.copy()
        for part in (slice(0, types), slice(types, 2 * types)):
            free[part] -= (count * free[part]).sum() / count.sum()
        free[2 * types :][(point[2 * types :] <= 0) & (free[2 * types :] < 0)] = 0.0
        norm = float(free @ free)
        if norm < 1e-20:
            return
        point = point + self.rate * max(upper - bound, 1e-4 * unit) / unit / norm * free
        dual.prefill_T = _simplex(point[:types], count)
        dual.decode_T = _simplex(point[types : 2 * types], count)
        dual.memory_T = np.maximum(point[2 * types : 3 * types], 0.0) * unit / limit
        dual.theta = min(max(float(point[-2]), 0.0), 1.0)
        dual.harm = max(float(point[-1]), 0.0) * unit / scale

    def divide(self) -> list[Node]:
        """Nodes that cover this one's choices."""
        region = self.region
        if not region.closed:
            parts = []
            for child in children(self.tables, region):
                if not child.closed:
                    parts.append(Node(self.tables, child, None, self.dual.copy()))
                    continue
                tables, order, groups = self.tables.in_order(child.prefix), child.prefix, self.tables.groups
                stages = len(order)
                low = tuple(range(1, stages))
                high = tuple(groups - stages + j for j in range(1, stages))
                pick = np.asarray(order)
                own = Region(tuple(range(stages)), True, low, high, child.allowed_GS)
                fluid = None if _few(own) else solve_fluid(self.tables, order, max(self.bound, 1.0))
                if fluid is not None:
                    dual = _dual_of(tables, tuple(range(stages)), fluid)
                else:
                    shares = [self.dual.prefill_T[pick], self.dual.decode_T[pick]]
                    prefill, decode = (s / s.sum() if s.sum() > 0 else np.full(stages, 1 / stages) for s in shares)
                    dual = _Dual(prefill, decode, self.dual.theta, self.dual.memory_T[pick], self.dual.harm)
                parts.append(Node(tables, own, order, dual))
        else:
            parts = [Node(self.tables, part, self.order, self.dual.copy()) for part in self._halves()]
        for part in parts:
            part.bound, part.rate = self.bound, _NEAR_RATE
        return parts

    def settle_prices(self, upper: float) -> None:
        """Raise the bound for as long as that goes on quickly."""
        for _ in range(_MOST_ROUNDS):
            before = self.reached
            self.climb(_ROUND, upper)
            if self.bound >= upper or self.reached - before < _QUICKLY * (upper - self.reached):
                return

    def _halves(self) -> list[Region]:
        region, drafts = self.region, self.drafts
        spread = [high - low for low, high in zip(region.low, region.high, strict=True)]
        if spread and max(spread) > 0:
            j = int(np.argmax(spread))
            at = round(float(np.mean([draft.ends[j] for draft in drafts[-_ROUND:]])) - 0.5) if drafts else 0
            at = min(max(at, region.low[j]), region.high[j] - 1)
            low, high = list(region.low), list(region.high)
            low[j], high[j] = at + 1, at
            return [replace(region, high=tuple(high)), replace(region, low=tuple(low))]
        free = region.allowed_GS.sum(1)
        if free.max() <= 1:
            return []
        recent = np.asarray([draft.schemes for draft in drafts[-_ROUND:]])
        variety = (recent != recent[-1]).sum(0) + 1e-3 * self.tables.harm_GS.max(1) / max(
            self.tables.harm_GS.max(), 1e-300
        )
        g = int(np.where(free > 1, variety, -1.0).argmax())
        only, rest = region.allowed_GS.copy(), region.allowed_GS.copy()
        only[g] = False
        only[g, recent[-1, g]] = True
        rest[g, recent[-1, g]] = False
        return [replace(region, allowed_GS=only), replace(region, allowed_GS=rest)]

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
            dual = None if start is None else _dual_of(tables, start.order, start.fluid)
            node = Node(tables, all_choices(tables), None, dual)
            node.rate = 1.0 if start is None else _NEAR_RATE
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
                fluid = moved(other, fluid, _PROGRAMS)
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
            before = node.bound
            node.climb(_LONG_ROUND, self.upper)
            self._polish(node)
            self._push(node)
            if node.bound <= before and node.rate < 0.1:
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
            for part in node.divide():
                if part.few_left():
                    self._settle(part)
                    continue
                part.settle_prices(self.upper)
                if math.isfinite(part.bound):
                    self._polish(part, always=nodes % _SEARCHED_EVERY == 1)
                    self.refine()
                self._push(part)

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
        drafts = [self._named(node, draft) for draft in node.drafts[-_LONG_ROUND:]]
        searches = {draft.order: Transfers(tables, draft.order) for draft in drafts}
        values = [searches[draft.order].value(draft) for draft in drafts]
        best = min(range(len(drafts)), key=lambda i: (values[i].excess, values[i].objective))
        if always or values[best].better(self.value):
            self.offer(tables, drafts[best], pairs=False)

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
