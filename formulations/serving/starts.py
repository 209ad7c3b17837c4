"""Where the search of large problems begins: orders of devices ranked at the fluid program's prices, and stage ends.

The program of one order prices every device. At these prices another order costs more or less by its links and ends and
by which groups a device then gets: the sensitive ones are rarely spread evenly over the model.

Source: ours.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from qsync_opt.formulations.serving.fluid import Fluid, solve_fluid, stage_ends
from qsync_opt.formulations.serving.tables import Array, Tables

_MOST_LISTED = 6
"""Stages up to which every order is ranked; beyond, only what exchanges of two and moves of one reach."""
_IDLE = 0.02
"""Share of the groups below which a device may not be worth its links, and of the objective that this may cost."""


@dataclass(slots=True)
class Start:
    """An order of an option with its fluid program."""

    tables: Tables
    order: tuple[int, ...]
    fluid: Fluid


def first_start(tables: Tables, unit: float) -> Start | None:
    """The fluid program of all devices, in the best order at the prices of a first one; None if nothing fits."""
    members = [t for t, count in enumerate(tables.count_T) for _ in range(int(count))]
    members = sorted(members, key=lambda t: -tables.limit_T[t])[: tables.groups]
    # The ends need memory of their own: the two largest devices first.
    order = (*members[:1], *members[2:], *members[1:2])
    fluid = solve_fluid(tables, order, unit)
    if fluid is None:
        return None
    start = Start(tables, order, fluid)
    value = _order_value(start, places=False)
    better = min(_orders(order, value), key=value)
    if better != order:
        fluid = solve_fluid(tables, better, fluid.objective)
        if fluid is not None and fluid.objective < start.fluid.objective:
            start = Start(tables, better, fluid)
    return start


def without_idle(start: Start) -> Start:
    """The same without devices that the program gives next to nothing, as long as that does not hurt."""
    while len(start.order) > 1:
        idle = int(start.fluid.groups_J.argmin())
        if start.fluid.groups_J[idle] > _IDLE * start.tables.groups:
            break
        rest = (*start.order[:idle], *start.order[idle + 1 :])
        value = _order_value(start, places=False)
        order = min(_orders(rest, value), key=value)
        fluid = solve_fluid(start.tables, order, start.fluid.objective)
        if fluid is None or fluid.objective > (1 + _IDLE) * start.fluid.objective:
            break
        start = Start(start.tables, order, fluid)
    return start


def best_orders(start: Start, most: int) -> list[Start]:
    """Other orders of the same devices, and of all but the least used one, with their programs.

    The most promising come first, at the start's prices and at their own in turn.
    """
    order, fluid = start.order, start.fluid
    value = _order_value(start, places=True)
    orders = sorted(_orders(order, value), key=value)
    # Another last device has other prices, which are not known here: half of the orders keep it.
    same = [other for other in orders if other[-1] == order[-1]]
    candidates = [*orders[: most // 2], *same[: most // 2]]
    if len(order) > 1:
        idle = int(fluid.groups_J.argmin())
        rest = (*order[:idle], *order[idle + 1 :])
        candidates.append(min(_orders(rest, value), key=value))
    result = []
    for other in dict.fromkeys(candidates):
        # What a program says hardly depends on the order but for the device that holds the head.
        if sorted(other) == sorted(order) and other[-1] == order[-1]:
            result.append(Start(start.tables, other, _reordered(fluid, order, other)))
        elif (own := solve_fluid(start.tables, other, fluid.objective)) is not None:
            result.append(Start(start.tables, other, own))
    by_own = sorted(result, key=lambda s: _order_value(s, places=True)(s.order) - _paid(s))
    by_first = sorted(result, key=lambda s: value(s.order))
    either = itertools.chain.from_iterable(zip(by_first, by_own, strict=True))
    return list({s.order: s for s in either}.values())


def _reordered(fluid: Fluid, order: tuple[int, ...], other: tuple[int, ...]) -> Fluid:
    """About the program of another order of the same devices: each keeps its groups and prices."""
    free = {t: [j for j, used in enumerate(order) if used == t] for t in set(order)}
    pick = [free[t].pop(0) for t in other]
    groups_J = fluid.groups_J[pick]
    return replace(
        fluid,
        prefill_J=fluid.prefill_J[pick],
        decode_J=fluid.decode_J[pick],
        memory_J=fluid.memory_J[pick],
        groups_J=groups_J,
        ends=stage_ends(groups_J, fluid.ends[-1]),
    )


def _paid(start: Start) -> float:
    """What limits are worth at a start's prices."""
    t, fluid = start.tables, start.fluid
    memory = float((fluid.memory_J * t.limit_T[list(start.order)]).sum())
    return memory + (fluid.harm * t.harm_limit if fluid.harm > 0 else 0.0)


def _order_value(start: Start, *, places: bool) -> Callable[[tuple[int, ...]], float]:
    """What links and ends of an order cost at a start's prices, and, with ``places``, its groups."""
    t, fluid = start.tables, start.fluid
    weights_J2 = _stage_weights(t, fluid)
    used_T = np.maximum(np.bincount(start.order, minlength=t.types), 1)
    sums_2T = [np.bincount(start.order, weights_J2[:, p], t.types) for p in range(2)]
    weights_T2 = np.stack(sums_2T, axis=1).astype(np.float64) / used_T[:, None]
    memory_T = np.bincount(start.order, fluid.memory_J, t.types).astype(np.float64) / used_T
    first_T = (t.first_T2 * weights_T2).sum(1) + memory_T * t.first_memory_T
    last_T = (t.last_T2 * weights_T2).sum(1) + memory_T * t.last_memory_T
    first_T[t.first_memory_T >= t.limit_T] = np.inf
    last_T[t.last_memory_T >= t.limit_T] = np.inf
    link_TT = (t.link_TT2 * weights_T2[:, None, :]).sum(-1)
    sums_TG = _price_sums(t, weights_T2, memory_T, fluid.harm)
    groups_T = np.bincount(start.order, fluid.groups_J, t.types) / used_T

    def value(order: tuple[int, ...]) -> float:
        links = sum(link_TT[a, b] for a, b in itertools.pairwise((*order, order[0]))) if len(order) > 1 else 0.0
        links += first_T[order[0]] + last_T[order[-1]]
        if not places:
            return float(links)
        ends = np.minimum(np.round(np.cumsum(groups_T[list(order)])), t.groups).astype(np.intp)
        ends[-1] = t.groups
        inner = sums_TG[order, ends].sum() - sums_TG[order[1:], ends[:-1]].sum()
        return float(inner + links)

    return value


def _price_sums(t: Tables, weights_T2: Array, memory_T: Array, harm: float) -> Array:
    """By stage or type: what the first 0, 1, 2, ... groups cost there at prices, each in its cheapest scheme."""
    cost_KTS = (t.time_KTS2 * weights_T2[None, :, None, :]).sum(-1)
    cost_KTS += memory_T[None, :, None] * t.memory_KS[:, None, :]
    harm_GS = np.where(t.harm_GS <= t.harm_limit, harm * t.harm_GS, np.inf)
    sums_TG = np.zeros((len(memory_T), t.groups + 1))
    np.cumsum((cost_KTS[t.kind_G] + harm_GS[:, None]).min(2).T, axis=1, out=sums_TG[:, 1:])
    return sums_TG


def _stage_weights(tables: Tables, fluid: Fluid) -> Array:
    """What a nanosecond of each stage costs in both phases, at a program's prices."""
    extra = max(tables.steps - 1, 0)
    emphasis = extra * (1 - fluid.theta) * tables.decode_parts + tables.decode_parts - 1
    decode_J = (1 + extra * fluid.theta + emphasis * fluid.decode_J) if tables.steps else np.zeros_like(fluid.decode_J)
    return np.stack([1 + (tables.prefill_parts - 1) * fluid.prefill_J, decode_J], axis=1)


def _orders(order: tuple[int, ...], value: Callable[[tuple[int, ...]], float]) -> list[tuple[int, ...]]:
    if len(order) <= _MOST_LISTED:
        return list(dict.fromkeys(itertools.permutations(sorted(order))))
    best, seen = order, {order: value(order)}
    while True:
        for other in _near(best):
            if other not in seen:
                seen[other] = value(other)
        least = min(seen, key=seen.__getitem__)
        if least == best:
            return list(seen)
        best = least


def _near(order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for a, b in itertools.combinations(range(len(order)), 2):
        swapped = list(order)
        swapped[a], swapped[b] = swapped[b], swapped[a]
        yield tuple(swapped)
        rest = order[:a] + order[a + 1 :]
        yield (*rest[:b], order[a], *rest[b:])


def settled(start: Start) -> Fluid | None:
    """The program of a start's order with its stages given, as whole groups; None where they do not fit."""
    return solve_fluid(start.tables, start.order, start.fluid.objective, start.fluid.ends)
