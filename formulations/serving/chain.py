"""The least priced cost of a chain of stages, over all device orders, subsets, cuts and schemes: a dynamic program.

At prices for time, memory and harm the choice of a group's scheme is free of all others, and what is left is a path:
which device is next, and after which group. A state is (devices used by type, first type, last type), without the first
where the link back to it takes as long whichever it is. Its value by number of groups done is a minimum over where the
stage began, no earlier than memory for the smallest schemes allows: memory has a price, and this limit besides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from qsync_opt.formulations.serving.tables import Array, Draft, Tables

MOST_STATES = 200_000
"""States of one number of stages beyond which the program is refused."""


@dataclass(frozen=True, slots=True)
class Prices:
    """What a unit of each resource costs: by type, time of both phases and memory; harm."""

    time_T2: Array
    memory_T: Array
    harm: float


@dataclass(frozen=True, slots=True)
class _Level:
    """The states of chains of one length, with the states they continue, padded by repeating the first."""

    first: NDArray[np.intp]
    last: NDArray[np.intp]
    sources: NDArray[np.intp]


@lru_cache(maxsize=512)
def _levels(counts: tuple[int, ...], prefix: tuple[int, ...], closed: bool, alike: bool) -> tuple[_Level, ...]:
    """States by number of stages, for chains that begin with ``prefix`` (and end there if ``closed``).

    Where first types are ``alike``, a state has any of them.
    """
    beginnings = prefix[:1] or range(len(counts))
    states: dict[tuple[tuple[int, ...], int, int], list[int]] = {}
    for t in beginnings:
        used = tuple(int(t == i) for i in range(len(counts)))
        states[used, 0 if alike else t, t] = [0]
    levels = []
    while states:
        width = max(len(sources) for sources in states.values())
        levels.append(
            _Level(
                first=np.asarray([first for _, first, _ in states]),
                last=np.asarray([last for _, _, last in states]),
                sources=np.asarray([[*s, *[s[0]] * (width - len(s))] for s in states.values()]),
            )
        )
        depth = len(levels)
        if closed and depth == len(prefix):
            break
        following: dict[tuple[tuple[int, ...], int, int], list[int]] = {}
        for k, (used, first, _) in enumerate(states):
            for t in prefix[depth : depth + 1] or range(len(counts)):
                if used[t] < counts[t]:
                    more = (*used[:t], used[t] + 1, *used[t + 1 :])
                    following.setdefault((more, first, t), []).append(k)
        states = following
    return tuple(levels)


@dataclass(frozen=True, slots=True)
class Region:
    """A part of the choices.

    Chains begin with ``prefix``, and end there where ``closed``; ``low`` and ``high`` are the range of each prefix
    stage's end (the last one's is fixed), ``allowed_GS`` the schemes that each group may take, and
    ``most_ns`` how long a stage may take for the prefill of a micro-batch.
    """

    prefix: tuple[int, ...]
    closed: bool
    low: tuple[int, ...]
    high: tuple[int, ...]
    allowed_GS: NDArray[np.bool_]
    most_ns: float = math.inf


@dataclass(frozen=True, slots=True)
class Windows:
    """By type and end of a stage: the earliest group at which it may begin, for memory and time; for all prices.

    ``first_TG`` and ``second_TG`` are columns of `_least_before`: two parts that overlap cover the range of begins.
    ``back_T`` is the type that a link goes back to from a last one; None where it matters which.
    """

    earliest_TG: NDArray[np.intp]
    parts: int
    first_TG: NDArray[np.intp]
    second_TG: NDArray[np.intp]
    back_T: NDArray[np.intp] | None

    @classmethod
    def of(cls, tables: Tables, region: Region) -> Windows:
        """The windows of a region."""
        groups = tables.groups
        allowed_GS, kind_G = region.allowed_GS, tables.kind_G
        least_G = np.where(allowed_GS, tables.memory_KS[kind_G], np.inf).min(1)
        earliest_TG = _earliest(
            np.tile(least_G, (tables.types, 1)), tables.limit_T, tables.first_memory_T, tables.last_memory_T
        )
        if math.isfinite(region.most_ns):
            least_TG = np.where(allowed_GS[:, None], tables.time_KTS2[kind_G, ..., 0], np.inf).min(2).T
            # A little more, for sums are rounded.
            most_T = np.full(tables.types, region.most_ns * (1 + 1e-12))
            in_time_TG = _earliest(least_TG, most_T, tables.first_T2[:, 0], tables.last_T2[:, 0])
            earliest_TG = np.maximum(earliest_TG, in_time_TG)
        ends_G = np.arange(groups + 1)
        length_TG = ends_G - earliest_TG
        # The exponent of the largest power of two that is no longer than the range.
        part_TG = np.frexp(np.maximum(length_TG, 1))[1].astype(np.intp) - 1
        width = groups + 1
        # No range: the last column of the first part, which is infinite.
        nothing_TG = length_TG < 1
        first_TG = np.where(nothing_TG, width - 1, part_TG * width + earliest_TG)
        second_TG = np.where(nothing_TG, width - 1, part_TG * width + ends_G - (1 << part_TG))
        # A link to a device of the same type needs two of them.
        other_TT = ~np.diag(tables.count_T < 2)
        least_T2 = np.where(other_TT[..., None], tables.link_TT2, np.inf).min(1)
        most_T2 = np.where(other_TT[..., None], tables.link_TT2, -np.inf).max(1)
        back_T = other_TT.argmax(1) if (least_T2 >= most_T2).all() else None
        return cls(earliest_TG, int(part_TG.max()) + 1, first_TG, second_TG, back_T)


def _earliest(amount_TG: Array, limit_T: Array, first_T: Array, last_T: Array) -> NDArray[np.intp]:
    """By type and end, where a stage may begin whose groups' amounts, and what an end holds besides, keep a limit."""
    types, groups = amount_TG.shape
    result = np.zeros((types, groups + 1), dtype=np.intp)
    for t in range(types):
        sums_G = np.concatenate([[0.0], np.cumsum(amount_TG[t])])
        limit_G = np.full(groups + 1, limit_T[t])
        limit_G[-1] -= last_T[t]
        result[t] = np.maximum(np.searchsorted(sums_G, sums_G - limit_G, side="left"), sums_G > limit_G - first_T[t])
    return result


def priced_chain(
    tables: Tables, region: Region, prices: Prices, windows: Windows | None = None
) -> tuple[float, Draft | None]:
    """The least priced cost within a region, without constants, and a draft that has it; infinite if there is none.

    ``windows`` are the region's, where they are known.
    """
    groups = tables.groups
    weights = prices.time_T2
    cost_KTS = (tables.time_KTS2 * weights[None, :, None, :]).sum(-1) + (
        prices.memory_T[None, :, None] * tables.memory_KS[:, None, :]
    )
    extra_GS = np.where(region.allowed_GS, prices.harm * tables.harm_GS, np.inf)
    cost_GTS = cost_KTS[tables.kind_G] + extra_GS[:, None, :]
    sums_TG = np.zeros((tables.types, groups + 1))
    np.cumsum(cost_GTS.min(2).T, axis=1, out=sums_TG[:, 1:])
    begin_T = (tables.first_T2 * weights).sum(1) + prices.memory_T * tables.first_memory_T
    finish_T = (tables.last_T2 * weights).sum(1) + prices.memory_T * tables.last_memory_T
    use_T = -prices.memory_T * tables.limit_T
    link_TT = (tables.link_TT2 * weights[:, None, :]).sum(-1)
    windows = windows or Windows.of(tables, region)
    back_T = windows.back_T
    levels = _levels(tuple(map(int, tables.count_T)), region.prefix, region.closed, back_T is not None)
    entries: list[Array] = []
    values: list[Array] = []
    best, best_at = np.inf, (0, 0)
    for depth, level in enumerate(levels):
        if depth == groups:
            break
        if depth == 0:
            entry = np.full((len(level.last), groups + 1), np.inf)
            entry[:, 0] = (begin_T + use_T)[level.last]
        else:
            sources = level.sources
            link = link_TT[levels[depth - 1].last[sources], level.last[:, None]]
            entry = (values[-1][sources] + link[:, :, None]).min(1) + use_T[level.last][:, None]
        sums = sums_TG[level.last]
        value = _least_before(entry - sums, level.last, windows) + sums
        if depth + 1 >= len(region.prefix) and (not region.closed or depth + 1 == len(region.prefix)):
            ends = value[:, -1] + finish_T[level.last]
            if depth > 0:
                ends = ends + link_TT[level.last, level.first if back_T is None else back_T[level.last]]
            k = int(ends.argmin())
            if ends[k] < best:
                best, best_at = float(ends[k]), (depth, k)
        if depth < len(region.low):
            value[:, : region.low[depth]] = np.inf
            value[:, region.high[depth] + 1 :] = np.inf
        entries.append(entry)
        values.append(value)
    if not np.isfinite(best):
        return np.inf, None
    depth, k = best_at
    order, ends_of, position = [], [], groups
    for d in range(depth, -1, -1):
        last = int(levels[d].last[k])
        order.append(last)
        ends_of.append(position)
        begin = int(windows.earliest_TG[last, position])
        position = begin + int((entries[d][k] - sums_TG[last])[begin:position].argmin())
        if d:
            sources = levels[d].sources[k]
            link = link_TT[levels[d - 1].last[sources], last]
            k = int(sources[(values[d - 1][sources, position] + link).argmin()])
    order.reverse()
    ends_of.reverse()
    draft = Draft(tuple(order), tuple(ends_of), ())
    kind_of_G = np.asarray(order)[draft.stage_G()]
    schemes = cost_GTS[np.arange(groups), kind_of_G].argmin(1)
    return best, Draft(draft.order, draft.ends, tuple(map(int, schemes)))


def _least_before(x_NG: Array, type_N: NDArray[np.intp], windows: Windows) -> Array:
    """The minimum of each row from the earliest begin that its type has for an end up to before that end."""
    rows, width = x_NG.shape
    parts = np.empty((rows, windows.parts, width))
    parts[:, 0] = x_NG
    parts[:, 0, -1] = np.inf
    # Minima of 1, 2, 4, ... neighbours.
    for k in range(1, windows.parts):
        half = 1 << (k - 1)
        np.minimum(parts[:, k - 1, :-half], parts[:, k - 1, half:], out=parts[:, k, :-half])
    flat, base_N = parts.ravel(), np.arange(rows)[:, None] * (windows.parts * width)
    return np.asarray(
        np.minimum(flat.take(base_N + windows.first_TG[type_N]), flat.take(base_N + windows.second_TG[type_N]))
    )


def count_states(tables: Tables) -> int:
    """An upper estimate of the states of the largest level, before they are listed."""
    most = 1
    for count in tables.count_T:
        most *= int(count) + 1
        if most > MOST_STATES:
            break
    return most * tables.types**2


def all_choices(tables: Tables) -> Region:
    """The region of everything that keeps the harm limit group by group."""
    allowed = tables.harm_GS <= tables.harm_limit
    return Region((), False, (), (), allowed)


def children(tables: Tables, region: Region) -> list[Region]:
    """An open region divided: it ends after its prefix, or goes on with each type in turn."""
    used = [region.prefix.count(t) for t in range(tables.types)]
    result = []
    if region.prefix:
        result.append(replace(region, closed=True))
    free = [t for t in range(tables.types) if used[t] < tables.count_T[t]]
    if len(region.prefix) < tables.groups:
        result += [replace(region, prefix=(*region.prefix, t)) for t in free]
    return result
