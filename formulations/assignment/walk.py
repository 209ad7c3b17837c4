"""Which path through the layers is best within the limits? Label setting with tables of levels as completion bounds.

A state is a point of the layers with the objective and the rows so far. Its bound is the best of several: one table of
levels for each of some vectors of prices. A state goes if its bound reaches the incumbent, if no completion meets the
limits, or if another state of the same point is at least as good in everything.

Axes: X states, K arcs, S points, M levels, R limit rows, Q vectors of prices.

Source: resource-constrained shortest paths by label setting (Irnich and Desaulniers 2005); the bounds are ours.
"""

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qsync_opt.formulations.assignment.core import Core
from qsync_opt.formulations.assignment.frontier import FrontierResult
from qsync_opt.formulations.assignment.layers import Layers, lay_out
from qsync_opt.formulations.assignment.levels import Levels, bound, choose_levels, constant, fixed, rounding
from qsync_opt.formulations.assignment.model import Floats, Ints
from qsync_opt.formulations.assignment.walk_loops import extend, undominated

_SCALES, _GROWTH = 4, 4.0
"""Prices further and further from the best: how many on either side, and each so many times further than the last."""
_NEAREST, _FURTHEST = 1e-4, 0.5
_TELLING = 0.5
"""Share of what is between bound and incumbent that the nearest of these prices lose at the start."""
_MOST_ROWS = 60
"""Cores of more rows are left to others."""
_MOST_STATES = 4_000_000
"""Of one search in all."""
_MOST_TABLES = 30_000_000
"""Entries of all tables together."""


@dataclass(slots=True)
class _States:
    point: Ints
    objective: Floats
    rows_XR: Ints
    rank: Floats
    parent: Ints
    arc: Ints


def _room_left(layers: Layers) -> Ints:
    """Most that a state at each point may have used up of each row, shape (S, R)."""
    num_rows = len(layers.excess_R)
    far = np.int64(2**62)
    least_SR = np.full((layers.num_points, num_rows), far)
    least_SR[-1] = 0
    for step in range(layers.num_steps - 1, -1, -1):
        arcs = slice(layers.first_T1[step], layers.first_T1[step + 1])
        after = least_SR[layers.target_K[arcs]]
        rest = np.where(after < far, after + layers.rows_KR[arcs], far)
        np.minimum.at(least_SR, layers.source_K[arcs], rest)
    room_SR: Ints = np.where(least_SR < far, -layers.excess_R - least_SR, -far)
    return np.ascontiguousarray(room_SR)


def walk(
    core: Core, upper: float, most_states: tuple[int, ...], *, tolerance: float = 0.0, deadline: float = np.inf
) -> FrontierResult | None:
    """Best labelling of a core within the limits, by wider and wider searches.

    Args:
        core: The undecided part, not counted in copies.
        upper: Only labellings below this count.
        most_states: Most states kept after a step, for each search.
        tolerance: How far from the best the search may stop, in units of the objective; the bound tells the truth.
        deadline: ``time.monotonic()`` value at which to give up.

    Returns:
        The best labelling found below ``upper``, and a lower bound; None if the core has no rows or too many, or
        cannot be laid out.
    """
    if not 0 < len(core.excess_R) <= _MOST_ROWS:
        return None
    layers = lay_out(core)
    if layers is None:
        return None
    taken, choice_C = core.objective, np.zeros(len(core.nodes), dtype=np.int64)
    best_labels: Ints | None = None
    least, before, prices_R = -np.inf, 0, core.prices_R
    goal = upper
    for asked in most_states:
        width = min(asked, _MOST_STATES // max(1, layers.num_steps))
        if width <= before or least >= goal or time.monotonic() > deadline:
            break
        before = width
        levels = choose_levels(layers, prices_R, goal - max(core.priced, least))
        found = bound(layers, levels, prices_R, goal - taken, deadline)
        prices_R = found.prices_R
        least = max(least, found.bound + taken)
        if least >= goal:
            break
        layers = layers.keep(fixed(layers, levels, found, goal - taken))
        if (np.diff(layers.first_T1) == 0).any():
            least = goal
            break
        step_K, node_T, label_K = layers.step_K, layers.node_T, layers.label_K
        layers, added, forced = layers.without_forced()
        choice_C[node_T[step_K[forced]]] = label_K[forced]
        taken += added
        if layers.num_steps:
            levels = choose_levels(layers, prices_R, goal - least)
            objective, arcs, lost = _search(layers, levels, prices_R, goal - taken, width, deadline)
        else:
            arcs, lost = np.zeros(0, dtype=np.int64), np.inf
            objective = 0.0 if (layers.excess_R <= 0).all() else np.inf
        if taken + objective < goal:
            upper = taken + objective
            chosen_C = choice_C.copy()
            chosen_C[layers.node_T] = layers.label_K[arcs]
            best_labels = core.labels(chosen_C)
        least = max(least, lost + taken)
        goal = upper - tolerance  # from here on near enough is good enough
    return FrontierResult(best_labels, upper, min(least, upper), 0)


def _tables(layers: Layers, levels: Levels, prices_R: Floats, upper: float) -> tuple[Floats, NDArray[np.float64]]:
    """Vectors of prices of the other rows around the best ones, and their tables with all that is constant added.

    The nearest ones are so far off that they lose a share of the room at the start: what is left of a row of thousands
    of amounts can be told finer than that of few.
    """
    most = max(1, _MOST_TABLES // max(1, layers.num_points * levels.number))
    spare_SM = np.empty((layers.num_points, levels.number))

    def at(factor: float) -> Floats:
        prices = prices_R * factor
        prices[levels.row] = prices_R[levels.row]
        return prices

    def start(prices: Floats) -> float:
        levels.table(layers, prices, spare_SM)
        return float(spare_SM[0, levels.first]) + constant(layers, prices)

    factors = [1.0]
    if len(prices_R) > 1:
        best = start(prices_R)
        distance = _FURTHEST
        while distance > _NEAREST and best - start(at(1 + distance)) > _TELLING * (upper - best):
            distance /= 2
        scale = 1
        while len(factors) + 2 <= most and scale <= _SCALES and distance <= _FURTHEST:
            factors += [1 + distance, 1 - distance]
            distance, scale = distance * _GROWTH, scale + 1
    prices_QR = np.stack([at(factor) for factor in factors])
    table_QSM = np.empty((len(factors), layers.num_points, levels.number))
    for prices, table_SM in zip(prices_QR, table_QSM, strict=True):
        levels.table(layers, prices, table_SM)
        table_SM += constant(layers, prices)
    return prices_QR, table_QSM


def _search(
    layers: Layers, levels: Levels, prices_R: Floats, upper: float, width: int, deadline: float
) -> tuple[float, Ints, float]:
    """One search: objective and arcs of the best path below ``upper`` (infinite: none), and a bound of what it lost."""
    prices_QR, table_QSM = _tables(layers, levels, prices_R, upper)
    slack = max(rounding(layers, prices) for prices in prices_QR)
    most_SR = _room_left(layers)
    num_rows = len(prices_R)
    left = -int(layers.excess_R[levels.row])
    others = [r for r in range(num_rows) if r != levels.row]
    column = others[0] if others else levels.row
    states = _States(
        np.zeros(1, dtype=np.int64), np.zeros(1), np.zeros((1, num_rows), dtype=np.int64), np.zeros(1),
        np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64),
    )  # fmt: skip
    trail = []
    lost = np.inf
    for step in range(layers.num_steps):
        if step % 16 == 0 and time.monotonic() > deadline:
            return np.inf, np.zeros(0, dtype=np.int64), -np.inf
        first, end = int(layers.first_T1[step]), int(layers.first_T1[step + 1])
        room = len(states.point) * int(np.bincount(layers.source_K[first:end] - layers.point_T1[step]).max())
        parent, arc, rank = np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room)
        count = extend(
            states.point, states.objective, states.rows_XR, first, end, layers.source_K, layers.target_K,
            layers.objective_K, layers.rows_KR, most_SR, prices_QR, table_QSM, levels.row, levels.unit, left,
            levels.lowest, upper + slack, parent, arc, rank,
        )  # fmt: skip
        parent, arc, rank = parent[:count], arc[:count], rank[:count]
        if not len(parent):
            return np.inf, np.zeros(0, dtype=np.int64), lost
        point = layers.target_K[arc]
        objective = states.objective[parent] + layers.objective_K[arc]
        rows_XR = states.rows_XR[parent] + layers.rows_KR[arc]
        if len(parent) > 1:
            order = np.lexsort((objective, rows_XR[:, column], rows_XR[:, levels.row], point))
            kept = np.flatnonzero(undominated(order, point, objective, rows_XR, column))
            if len(kept) > width:
                by_rank = kept[np.argsort(rank[kept], kind="stable")]
                lost = min(lost, float(rank[by_rank[width]]))
                kept = np.sort(by_rank[:width])
            parent, arc, point, objective = parent[kept], arc[kept], point[kept], objective[kept]
            rows_XR, rank = np.ascontiguousarray(rows_XR[kept]), rank[kept]
        states = _States(point, objective, rows_XR, rank, parent, arc)
        trail.append((parent, arc))
    state = int(states.objective.argmin())
    value = float(states.objective[state])
    if value >= upper:
        return np.inf, np.zeros(0, dtype=np.int64), lost
    arcs_T = np.zeros(layers.num_steps, dtype=np.int64)
    for step in range(layers.num_steps - 1, -1, -1):
        parent, arc = trail[step]
        arcs_T[step] = arc[state]
        state = int(parent[state])
    return value, arcs_T, lost
