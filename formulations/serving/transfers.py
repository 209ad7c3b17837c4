"""Local search: repair a draft and make it faster, by changing schemes and moving the ends of stages.

A move changes the scheme of some groups, or shifts the border of two stages by some groups, which keep their schemes or
take one; then pairs of moves. What counts is first by how much limits are broken, then the objective.

Source: ours; LLM-PQ's bit-width transfer exchanges layers of two stages and so can never change the mix of schemes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qsync_opt.formulations.serving.tables import Array, Draft, Tables, stages_of

_SHIFTS = (1, -1, 2, -2, 3, -3, 4, -4, 6, -6, 8, -8)
"""Numbers of groups that a border moves by."""
_MOST_ROUNDS = 200
_TRIES = 8
"""Pairs of moves that are tried for real per round: two moves may touch the same group."""
_SMALL = 2
"""Most groups of a move that takes part in pairs."""


@dataclass(frozen=True, slots=True)
class Value:
    """How much limits are broken (0: not at all), and the objective; less is better, in this order."""

    excess: float
    objective: float

    def better(self, other: Value) -> bool:
        """Whether this is better than ``other``."""
        return (self.excess, self.objective) < (other.excess, other.objective)


@dataclass(frozen=True, slots=True)
class _Moves:
    """Moves N of one draft, with their changes of times and memory by stage, and of harm.

    Where ``border_N`` is -1, the groups ``by_harm_SG[scheme, start : start + size]`` take the scheme. Elsewhere that
    border moves by ``shift`` groups, which take the scheme (-1: keep theirs).
    """

    border_N: NDArray[np.intp]
    shift_N: NDArray[np.intp]
    scheme_N: NDArray[np.intp]
    start_N: NDArray[np.intp]
    size_N: NDArray[np.intp]
    by_harm_SG: NDArray[np.intp]
    time_NJ2: Array
    memory_NJ: Array
    harm_N: Array


WORST = Value(math.inf, math.inf)


@dataclass(frozen=True, slots=True)
class StageSums:
    """By stage: times of both phases and memory; the harm of all."""

    time_J2: Array
    memory_J: Array
    harm: float


def fixed_sums(t: Tables, stages: int) -> tuple[Array, Array]:
    """Times and memory of stages beside their groups: both ends and links."""
    time_J2, memory_J = np.zeros((stages, 2)), np.zeros(stages)
    time_J2[0] += t.first_T2[0]
    time_J2[-1] += t.last_T2[-1]
    memory_J[0] += t.first_memory_T[0]
    memory_J[-1] += t.last_memory_T[-1]
    if stages > 1:
        for j in range(stages):
            time_J2[j] += t.link_TT2[j, (j + 1) % stages]
    return time_J2, memory_J


def stage_sums(t: Tables, ends: NDArray[np.intp], schemes: NDArray[np.intp]) -> StageSums:
    """Times, memory and harm of stages that are the types of ``t``, in order."""
    stages, stage_G = len(ends), stages_of(ends)
    time_G2, memory_G = t.time_KTS2[t.kind_G, stage_G, schemes], t.memory_KS[t.kind_G, schemes]
    time_J2, memory_J = fixed_sums(t, stages)
    for phase in range(2):
        time_J2[:, phase] += np.bincount(stage_G, time_G2[:, phase], stages)
    memory_J += np.bincount(stage_G, memory_G, stages)
    return StageSums(time_J2, memory_J, float(t.harm_GS[np.arange(t.groups), schemes].sum()))


def value_of(t: Tables, sums: StageSums) -> Value:
    """What a draft with these sums is worth."""
    excess = _excess(t, sums.memory_J[None], np.asarray([sums.harm]))[0]
    return Value(float(excess), t.total(sums.time_J2[:, 0].tolist(), sums.time_J2[:, 1].tolist()))


def _excess(t: Tables, memory_NJ: Array, harm_N: Array) -> Array:
    over = np.maximum(memory_NJ - t.limit_T, 0.0).sum(1) / max(float(t.limit_T.max()), 1.0)
    if math.isfinite(t.harm_limit):
        over = over + np.maximum(harm_N - t.harm_limit, 0.0) / max(t.harm_limit, 1e-12)
    return np.asarray(over)


def best_of_all(
    t: Tables, low: Sequence[int], high: Sequence[int], allowed_GS: NDArray[np.bool_]
) -> tuple[Draft, float] | None:
    """The best draft that keeps all limits, and its objective, of every one of stages that are the types of ``t``.

    Each is looked at: ``low`` and ``high`` hold the least and the largest end of every stage but the last.
    """
    groups, stages = t.groups, len(low) + 1
    choices = [np.flatnonzero(allowed_S) for allowed_S in allowed_GS]
    free = [g for g, choice in enumerate(choices) if len(choice) > 1]
    if not all(map(len, choices)):
        return None
    combinations = np.asarray(list(itertools.product(*(choices[g] for g in free))), dtype=np.intp)
    schemes_NG = np.tile(np.asarray([choice[0] for choice in choices]), (len(combinations), 1))
    schemes_NG[:, free] = combinations
    # Summed as for one draft, so that both find the same plans within the limit.
    harm_N = np.asarray([float(t.harm_GS[np.arange(groups), schemes_G].sum()) for schemes_G in schemes_NG])
    schemes_NG = schemes_NG[harm_N <= t.harm_limit]
    if not len(schemes_NG):
        return None
    memory_NG = t.memory_KS[t.kind_G, schemes_NG]
    time_J2, memory_J = fixed_sums(t, stages)
    best, found = math.inf, None
    for inner in itertools.product(*(range(a, b + 1) for a, b in zip(low, high, strict=True))):
        starts, ends = (0, *inner), (*inner, groups)
        if any(a >= b for a, b in zip(starts, ends, strict=True)):
            continue
        stage_G = stages_of(ends)
        times_NJ2 = np.add.reduceat(t.time_KTS2[t.kind_G, stage_G, schemes_NG], starts, axis=1) + time_J2
        fits_N = (np.add.reduceat(memory_NG, starts, axis=1) + memory_J <= t.limit_T).all(1)
        objective_N = np.where(fits_N, t.totals(times_NJ2[..., 0], times_NJ2[..., 1]), np.inf)
        k = int(objective_N.argmin())
        if objective_N[k] < best:
            best, found = float(objective_N[k]), Draft(tuple(range(stages)), ends, tuple(map(int, schemes_NG[k])))
    return None if found is None else (found, best)


class Transfers:
    """The local search of one order of device types."""

    def __init__(self, tables: Tables, order: tuple[int, ...]) -> None:
        self.order = order
        self._tables = tables.in_order(order)
        self._allowed_GS = tables.harm_GS <= tables.harm_limit
        self._banned = _running(~self._allowed_GS)
        self._uniform_time = _running(self._tables.time_KTS2[self._tables.kind_G])
        self._uniform_memory = _running(self._tables.memory_KS[self._tables.kind_G])
        self._uniform_harm = _running(self._tables.harm_GS)

    def value(self, draft: Draft) -> Value:
        """What a draft of this order is worth."""
        return value_of(self._tables, self.sums(draft))

    def improve(self, draft: Draft, *, pairs: bool = True) -> tuple[Draft, Value]:
        """A draft that no move makes better, and its value; with ``pairs`` no two moves either."""
        ends, schemes = np.asarray(draft.ends), np.asarray(draft.schemes)
        value = self.value(draft)
        for _ in range(_MOST_ROUNDS):
            result = self._step(ends, schemes, value, pairs)
            if result is None:
                break
            ends, schemes, value = result
        return Draft(self.order, tuple(map(int, ends)), tuple(map(int, schemes))), value

    def sums(self, draft: Draft) -> StageSums:
        """Times, memory and harm of a draft of this order."""
        return stage_sums(self._tables, np.asarray(draft.ends), np.asarray(draft.schemes))

    def _step(
        self, ends: NDArray[np.intp], schemes: NDArray[np.intp], value: Value, pairs: bool
    ) -> tuple[NDArray[np.intp], NDArray[np.intp], Value] | None:
        sums = stage_sums(self._tables, ends, schemes)
        moves = self._moves(ends, schemes)
        changes = (moves.time_NJ2, moves.memory_NJ, moves.harm_N)
        for m in self._best(sums, changes, value, 1):
            result = self._apply(ends, schemes, moves, [m])
            if result is not None and result[2].better(value):
                return result
        if not pairs:
            return None
        small = np.flatnonzero(moves.size_N <= _SMALL)
        first, second = (small[index] for index in np.triu_indices(len(small), 1))
        both = (
            changes[0][first] + changes[0][second],
            changes[1][first] + changes[1][second],
            changes[2][first] + changes[2][second],
        )
        for n in self._best(sums, both, value, _TRIES):
            result = self._apply(ends, schemes, moves, [first[n], second[n]])
            if result is not None and result[2].better(value):
                return result
        return None

    def _best(self, sums: StageSums, changes: tuple[Array, ...], value: Value, most: int) -> NDArray[np.intp]:
        """The best changes (of times, memory, harm) that promise to be better than ``value``."""
        time_NJ2, memory_NJ, harm_N = changes
        times = sums.time_J2 + time_NJ2
        objective_N = self._tables.totals(times[..., 0], times[..., 1])
        excess_N = _excess(self._tables, sums.memory_J + memory_NJ, sums.harm + harm_N)
        good = (excess_N < value.excess * (1 - 1e-12)) | (
            (excess_N <= value.excess) & (objective_N < value.objective - 0.5)
        )
        index = np.flatnonzero(good)
        # Repair at the least cost: what is won per excess removed.
        if value.excess > 0:
            ratio = (objective_N[index] - value.objective) / (value.excess - excess_N[index] + 1e-18)
            return np.asarray(index[np.argsort(ratio, kind="stable")[:most]])
        return np.asarray(index[np.lexsort((objective_N[index], excess_N[index]))[:most]])

    def _moves(self, ends: NDArray[np.intp], schemes: NDArray[np.intp]) -> _Moves:
        """Every move: groups of one stage, kind and scheme take another scheme, or a border moves."""
        t, stages = self._tables, len(self.order)
        new_N, start_N, size_N, by_harm_SG, harm_N = self._scheme_moves(ends, schemes)
        members = by_harm_SG[new_N, start_N]
        stage_N, kind_N, old_N = stages_of(ends)[members], t.kind_G[members], schemes[members]
        border_M, shift_M, scheme_M, changes = self._shift_moves(ends, schemes)
        taken_M2, memory_M, given_M2, more_M, harm_M = changes
        source_M, target_M = border_M + (shift_M > 0), border_M + (shift_M < 0)
        count, shifts = len(new_N), np.arange(len(border_M)) + len(new_N)
        nowhere = np.full(count, -1)
        time_NJ2, memory_NJ = np.zeros((count + len(shifts), stages, 2)), np.zeros((count + len(shifts), stages))
        change_N2 = t.time_KTS2[kind_N, stage_N, new_N] - t.time_KTS2[kind_N, stage_N, old_N]
        time_NJ2[np.arange(count), stage_N] = size_N[:, None] * change_N2
        memory_NJ[np.arange(count), stage_N] = size_N * (t.memory_KS[kind_N, new_N] - t.memory_KS[kind_N, old_N])
        time_NJ2[shifts, source_M], time_NJ2[shifts, target_M] = -taken_M2, given_M2
        memory_NJ[shifts, source_M], memory_NJ[shifts, target_M] = -memory_M, more_M
        return _Moves(
            border_N=np.concatenate([nowhere, border_M]),
            shift_N=np.concatenate([nowhere, shift_M]),
            scheme_N=np.concatenate([new_N, scheme_M]),
            start_N=np.concatenate([start_N, np.full(len(shifts), -1)]),
            size_N=np.concatenate([size_N, np.abs(shift_M)]),
            by_harm_SG=by_harm_SG,
            time_NJ2=time_NJ2,
            memory_NJ=memory_NJ,
            harm_N=np.concatenate([harm_N, harm_M]),
        )

    def _scheme_moves(
        self, ends: NDArray[np.intp], schemes: NDArray[np.intp]
    ) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp], NDArray[np.intp], Array]:
        """Of the groups of one stage, kind and scheme: the 1, 2, 4, ... least harmful to change to another scheme.

        Returns new scheme, first and number of members in the order of groups that is returned next, and harm.
        """
        t = self._tables
        kinds, count = t.memory_KS.shape
        key_G = (stages_of(ends) * kinds + t.kind_G) * count + schemes
        more_SG = np.where(self._allowed_GS, t.harm_GS - t.harm_GS[np.arange(t.groups), schemes][:, None], np.inf).T
        more_SG[schemes, np.arange(t.groups)] = np.inf
        # Groups by key and then by harm; those that may not change are the last of their key.
        by_harm_SG = np.lexsort((more_SG, np.broadcast_to(key_G, more_SG.shape)), axis=-1)
        sorted_G = np.sort(key_G)
        first_G = np.searchsorted(sorted_G, sorted_G)
        size_G = np.arange(1, t.groups + 1) - first_G
        more_SG = np.take_along_axis(more_SG, by_harm_SG, axis=1)
        new_N, last_N = np.nonzero(np.isfinite(more_SG) & (size_G & (size_G - 1) == 0))
        sums_SG = np.zeros((count, t.groups + 1))
        np.cumsum(np.where(np.isfinite(more_SG), more_SG, 0.0), axis=1, out=sums_SG[:, 1:])
        start_N = first_G[last_N]
        return new_N, start_N, size_G[last_N], by_harm_SG, sums_SG[new_N, last_N + 1] - sums_SG[new_N, start_N]

    def _shift_moves(
        self, ends: NDArray[np.intp], schemes: NDArray[np.intp]
    ) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp], tuple[Array, Array, Array, Array, Array]]:
        """Each border moved by some groups, which keep their schemes or all take one.

        Returns border, shift and scheme; then times and memory that one stage loses and the other gets, and harm.
        """
        t, stages, rows = self._tables, len(self.order), np.arange(self._tables.groups)
        border_M, shift_M = np.repeat(np.arange(stages - 1), len(_SHIFTS)), np.tile(_SHIFTS, stages - 1)
        begin_M, end_M = (
            np.asarray(bound(ends[border_M], ends[border_M] + shift_M)) for bound in (np.minimum, np.maximum)
        )
        low_M, high_M = np.concatenate([[0], ends])[border_M], ends[border_M + 1]
        kept = (begin_M > low_M) & (end_M < high_M)
        border_M, shift_M, begin_M, end_M = border_M[kept], shift_M[kept], begin_M[kept], end_M[kept]
        # Sums over the first groups as they are, and in each scheme.
        now = (t.time_KTS2[t.kind_G[:, None], np.arange(stages), schemes[:, None]], t.memory_KS[t.kind_G, schemes])
        time_GJC2 = np.concatenate([_running(now[0])[:, :, None], self._uniform_time], axis=2)
        memory_GC = np.concatenate([_running(now[1])[:, None], self._uniform_memory], axis=1)
        harm_GC = np.concatenate([_running(t.harm_GS[rows, schemes])[:, None], self._uniform_harm], axis=1)
        banned_MS = self._banned[end_M] > self._banned[begin_M]
        m, c = np.nonzero(np.concatenate([np.ones((len(banned_MS), 1), dtype=bool), ~banned_MS], axis=1))
        begin, end, border, shift = begin_M[m], end_M[m], border_M[m], shift_M[m]
        source, target = border + (shift > 0), border + (shift < 0)
        changes = (
            time_GJC2[end, source, 0] - time_GJC2[begin, source, 0],
            memory_GC[end, 0] - memory_GC[begin, 0],
            time_GJC2[end, target, c] - time_GJC2[begin, target, c],
            memory_GC[end, c] - memory_GC[begin, c],
            (harm_GC[end, c] - harm_GC[begin, c]) - (harm_GC[end, 0] - harm_GC[begin, 0]),
        )
        return border, shift, c - 1, changes

    def _apply(
        self, ends: NDArray[np.intp], schemes: NDArray[np.intp], moves: _Moves, chosen: Sequence[int]
    ) -> tuple[NDArray[np.intp], NDArray[np.intp], Value] | None:
        ends, schemes = ends.copy(), schemes.copy()
        for n in chosen:
            border, shift, scheme, start = (
                int(x[n]) for x in (moves.border_N, moves.shift_N, moves.scheme_N, moves.start_N)
            )
            if border < 0:
                schemes[moves.by_harm_SG[scheme, start : start + int(moves.size_N[n])]] = scheme
                continue
            begin, end = sorted((int(ends[border]), int(ends[border]) + shift))
            if scheme >= 0:
                schemes[begin:end] = scheme
            ends[border] += shift
        if (np.diff(ends, prepend=0) <= 0).any():
            return None
        return ends, schemes, value_of(self._tables, stage_sums(self._tables, ends, schemes))


def _running(values: Any) -> Array:
    """Sums of the first 0, 1, 2, ... entries along the first axis."""
    result = np.zeros((len(values) + 1, *values.shape[1:]))
    np.cumsum(values, axis=0, out=result[1:])
    return result
