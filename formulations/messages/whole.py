"""What whole messages cost: times of rounds that suit them, and a bound that knows of them.

The prices of `threshold` let a pair use every part of a bit of its round's time, but a pair's bits are whole, and what
its round leaves beyond them is lost. So the variance of a round at its time T, plus the price pi of that time, is

    sum over pairs of v(floor(bits that fit T)) + pi x T,

where v, a pair's least variance, is at least its convex frontier, of which the vertices near the relaxed time are
known. All times in a window around the relaxed one are tried. Beyond the window the same sum without the floor, convex,
is no less than at the window's ends. So the least of these, a round's *least cost*, bounds what any plan pays for the
round, and times near it make good plans: those of all rounds that share a limit are chosen together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from qsync_opt.formulations.messages.frontier import Floats, Frontier, Prices
from qsync_opt.messages import Problem

_WINDOW = 128
"""Bits of the slowest pair by which the time of a round is shifted at most, either way."""
_MOST = 4096
"""Bits of the fastest pair likewise: so many times are tried."""
_BISECTIONS = 60
_HAIR = 1e-13
"""Relative room for rounding: a message that fits but for it is taken to fit."""


@dataclass(slots=True)
class Round:
    """Shifts of a round's time from the relaxed one, and what it costs there, in units of variance.

    ``cost`` holds variance and price of the time; ``gain`` is how much the least of any time exceeds what the prices
    of the pairs alone prove.
    """

    exchange: int
    number: int
    shift: Floats
    cost: Floats
    gain: float


def rounds(
    problem: Problem, tables: list[list[list[Frontier]]], round_ns: list[list[float]], prices: Prices
) -> list[Round]:
    """The rounds in which the price of time is shared by pairs that more bits would help."""
    found, position = [], 0
    for e, groups in enumerate(tables):
        for r, group in enumerate(groups):
            own = prices.pair[position : position + len(group)]
            position += len(group)
            each = _round(group, own, prices.exchange[e], round_ns[e][r])
            if each is not None:
                found.append(Round(e, r, *each))
    return found


def _round(group: list[Frontier], prices: list[float], pi: float, at: float) -> tuple[Floats, Floats, float] | None:
    priced = [
        (frontier, price)
        for frontier, price in zip(group, prices, strict=True)
        if 0 < price < math.inf and frontier.bit_ns > 0 and frontier.most_bits > frontier.least_bits
    ]
    if not priced or not all(map(math.isfinite, (pi, *prices))):
        return None
    bit_ns = [frontier.bit_ns for frontier, _ in priced]
    window = min(_WINDOW * max(bit_ns), _MOST * min(bit_ns))
    narrowest = [f.pair.time_ns(f.dim, f.least_bits) for f in group]
    least = max(narrowest)
    low, high = max(at - window, least), at + window
    unit = int(np.gcd.reduce(np.diff(priced[0][0].hull.width)))
    times, curves = [np.array([low, at])], []
    # What the prices prove: of pairs that no bits would help, their price.
    bought = {id(frontier) for frontier, _ in priced}
    proved = sum(y * ns for f, y, ns in zip(group, prices, narrowest, strict=True) if id(f) not in bought)
    for frontier, price in priced:
        bits, variance, value = _vertices(frontier, price, low, high)
        curves.append((bits, variance))
        proved += value
        first, last = (_bits(frontier, t, unit) for t in (low, high))
        whole = np.arange(float(first) + unit, float(last) + unit / 2, unit)
        times.append(frontier.pair.fixed_ns + frontier.bit_ns * whole)
    time_ns = np.concatenate(times)

    def cost(time_ns: Floats, step: int) -> Floats:
        total = pi * time_ns
        for (frontier, _), curve in zip(priced, curves, strict=True):
            total += np.interp(_bits(frontier, time_ns, step), *curve)
        return total

    paid = cost(time_ns, unit)
    middle, *ends = cost(np.array([at, high, low]), 0).tolist()
    if low <= least:
        ends.pop()  # no round is shorter
    bounded = min([float(paid.min()), *ends])
    rounding = 1e-13 * (abs(bounded) + pi * at)
    gain = bounded - proved - rounding if all(end >= middle - rounding for end in ends) else 0.0
    return time_ns - at, paid, max(gain, 0.0)


def _bits(frontier: Frontier, time_ns: Floats | float, unit: int) -> Floats:
    """Bits that fit a time, whole units of them beyond the narrowest widths; all of it for the unit 0."""
    bits = (np.asarray(time_ns) - frontier.pair.fixed_ns) / frontier.bit_ns * (1 + _HAIR) + 1e-9 - frontier.least_bits
    if unit:
        bits = np.floor(bits / unit) * unit
    return np.clip(bits, 0, frontier.most_bits - frontier.least_bits) + frontier.least_bits


def _vertices(frontier: Frontier, price: float, low: float, high: float) -> tuple[Floats, Floats, float]:
    """The vertices of a pair's frontier in a range of time, and the least of variance plus price x time.

    From the vertex that is best at the price, the next steps are those of the largest gain that are not taken, and back
    those of the least that are; of each kind of step, as many as fill the range alone.
    """
    per_bit = price * frontier.bit_ns
    first = frontier.first(np.array([per_bit]))[0]
    start, variance = int(frontier.bits(first)), float(frontier.variance(first))
    widths, beta = np.diff(frontier.hull.width), frontier.sorted_beta
    sides = []
    for reach, forward in (
        (float(_bits(frontier, high, 0)) - start, True),
        (start - float(_bits(frontier, low, 0)), False),
    ):
        gains, steps = [np.zeros(0)], [np.zeros(0, np.int64)]
        for rank, width, gain in zip(first.tolist(), widths.tolist(), frontier.hull.gain.tolist(), strict=True):
            count = max(0, math.ceil(reach / width) + 1)
            chosen = beta[max(rank - count, 0) : rank] if forward else beta[rank : rank + count]
            gains.append(chosen * gain)
            steps.append(np.full(chosen.size, width))
        gain, width = np.concatenate(gains), np.concatenate(steps)
        order = np.argsort(-gain if forward else gain, kind="stable")
        sides.append((np.cumsum(width[order]), np.cumsum((gain * width)[order])))
    (up, falls), (down, rises) = sides
    bits = np.concatenate([start - down[::-1], [start], start + up]).astype(np.float64)
    values = np.concatenate([variance + rises[::-1], [variance], variance - falls])
    return bits, values, variance + price * frontier.pair.time_ns(frontier.dim, start)


def aligned(problem: Problem, found: list[Round], round_ns: list[list[float]], prices: Prices) -> list[list[float]]:
    """Times of rounds near the relaxed ones that cost least and keep the sums of those that share a limit."""
    result = [list(times) for times in round_ns]
    shared: dict[int, list[Round]] = {}
    for each in found:
        hidden_ns, total = problem.exchanges[each.exchange].hidden_ns, sum(round_ns[each.exchange])
        is_hidden = hidden_ns > 0 and total <= hidden_ns * (1 + 1e-9)
        shared.setdefault(each.exchange if is_hidden else -1, []).append(each)
    for key, members in shared.items():
        chosen = [int(np.argmin(each.cost)) for each in members]
        if key != -1 or problem.time_limit_ns is not None:
            chosen = _chosen(members, [prices.exchange[each.exchange] for each in members], chosen)
        for each, index in zip(members, chosen, strict=True):
            result[each.exchange][each.number] += float(each.shift[index])
    return result


def _chosen(members: list[Round], prices: list[float], free: list[int]) -> list[int]:
    """A shift of each round, none in sum: at a price beside that of time, and then with what is left over."""

    def total(chosen: list[int]) -> float:
        return sum(float(each.shift[index]) for each, index in zip(members, chosen, strict=True))

    def at(extra: float) -> list[int]:
        return [int(np.argmin(each.cost + extra * each.shift)) for each in members]

    chosen, low, high = free, -max(prices), max(prices)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        trial = at(middle)
        if total(trial) <= 0:
            chosen, high = trial, middle
        else:
            low = middle
    if total(chosen) > 0:
        return [1] * len(members)  # the relaxed times themselves
    room = -total(chosen)
    while True:
        best, better = 0.0, None
        for k, (each, price) in enumerate(zip(members, prices, strict=True)):
            variance = each.cost - price * each.shift
            fits = each.shift <= each.shift[chosen[k]] + room
            index = int(np.argmin(np.where(fits, variance, math.inf)))
            fall = float(variance[chosen[k]] - variance[index])
            if fall > best:
                best, better = fall, (k, index)
        if better is None:
            return chosen
        k, index = better
        room -= float(members[k].shift[index] - members[k].shift[chosen[k]])
        chosen[k] = index
