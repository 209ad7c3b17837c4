"""Local search: repair a draft and make it faster, by changing schemes and moving the ends of stages.

A move changes the scheme of some groups, or shifts the border of two stages by some groups, which keep their schemes or
take one; then pairs of moves. What counts is first by how much limits are broken, then the objective.

Source: ours; LLM-PQ's bit-width transfer exchanges layers of two stages and so can never change the mix of schemes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qsync_opt.formulations.serving.tables import Array, Draft, Tables

_SHIFTS = (1, 2, 3, 4, 6, 8)
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
class _Move:
    """Groups ``members`` take ``scheme``; or a border moves by ``shift`` groups, which take ``scheme`` (-1: keep)."""

    border: int
    shift: int
    scheme: int
    size: int
    members: NDArray[np.intp] | None


_Change = tuple[_Move, tuple[int, int], tuple[Array, float, Array, float, float]]
"""A move, the two stages that it changes, their changes of times and memory, and the change of harm."""
WORST = Value(math.inf, math.inf)


@dataclass(frozen=True, slots=True)
class StageSums:
    """By stage: times of both phases and memory; the harm of all."""

    time_J2: Array
    memory_J: Array
    harm: float


def _fixed(t: Tables, stages: int) -> tuple[Array, Array]:
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
    stages = len(ends)
    stage_G = np.repeat(np.arange(stages), np.diff(ends, prepend=0))
    time_G2, memory_G = t.time_KTS2[t.kind_G, stage_G, schemes], t.memory_KS[t.kind_G, schemes]
    time_J2, memory_J = _fixed(t, stages)
    for phase in range(2):
        time_J2[:, phase] += np.bincount(stage_G, time_G2[:, phase], stages)
    memory_J += np.bincount(stage_G, memory_G, stages)
    return StageSums(time_J2, memory_J, float(t.harm_GS[np.arange(t.groups), schemes].sum()))


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
    time_J2, memory_J = _fixed(t, stages)
    best, found = math.inf, None
    for inner in itertools.product(*(range(a, b + 1) for a, b in zip(low, high, strict=True))):
        starts, ends = (0, *inner), (*inner, groups)
        if any(a >= b for a, b in zip(starts, ends, strict=True)):
            continue
        stage_G = Draft((), ends, ()).stage_G()
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
        sums = stage_sums(self._tables, np.asarray(draft.ends), np.asarray(draft.schemes))
        return self._value(sums)

    def improve(self, draft: Draft, *, pairs: bool = True) -> tuple[Draft, Value]:
        """A draft that no move makes better, and its value; with ``pairs`` no two moves either."""
        ends, schemes = np.asarray(draft.ends), np.asarray(draft.schemes)
        value = self._value(stage_sums(self._tables, ends, schemes))
        for _ in range(_MOST_ROUNDS):
            result = self._step(ends, schemes, value, pairs)
            if result is None:
                break
            ends, schemes, value = result
        return Draft(self.order, tuple(map(int, ends)), tuple(map(int, schemes))), value

    def sums(self, draft: Draft) -> StageSums:
        """Times, memory and harm of a draft of this order."""
        return stage_sums(self._tables, np.asarray(draft.ends), np.asarray(draft.schemes))

    def _value(self, sums: StageSums) -> Value:
        excess = self._excess(sums.memory_J[None], np.asarray([sums.harm]))[0]
        return Value(float(excess), self._tables.total(sums.time_J2[:, 0].tolist(), sums.time_J2[:, 1].tolist()))

    def _excess(self, memory_NJ: Array, harm_N: Array) -> Array:
        t = self._tables
        over = np.maximum(memory_NJ - t.limit_T, 0.0).sum(1) / max(float(t.limit_T.max()), 1.0)
        if math.isfinite(t.harm_limit):
            over = over + np.maximum(harm_N - t.harm_limit, 0.0) / max(t.harm_limit, 1e-12)
        return np.asarray(over)

    def _step(
        self, ends: NDArray[np.intp], schemes: NDArray[np.intp], value: Value, pairs: bool
    ) -> tuple[NDArray[np.intp], NDArray[np.intp], Value] | None:
        sums = stage_sums(self._tables, ends, schemes)
        changes, moves = self._moves(ends, schemes)
        if not moves:
            return None
        for m in self._best(sums, changes, value, 1):
            result = self._apply(ends, schemes, [moves[m]])
            if result is not None and result[2].better(value):
                return result
        if not pairs:
            return None
        small = np.flatnonzero([move.size <= _SMALL for move in moves])
        first, second = (small[index] for index in np.triu_indices(len(small), 1))
        both = tuple(change[first] + change[second] for change in changes)
        for n in self._best(sums, both, value, _TRIES):
            result = self._apply(ends, schemes, [moves[first[n]], moves[second[n]]])
            if result is not None and result[2].better(value):
                return result
        return None

    def _best(self, sums: StageSums, changes: tuple[Array, ...], value: Value, most: int) -> NDArray[np.intp]:
        """The best changes (of times, memory, harm) that promise to be better than ``value``."""
        time_NJ2, memory_NJ, harm_N = changes
        times = sums.time_J2 + time_NJ2
        objective_N = self._tables.totals(times[..., 0], times[..., 1])
        excess_N = self._excess(sums.memory_J + memory_NJ, sums.harm + harm_N)
        good = (excess_N < value.excess * (1 - 1e-12)) | (
            (excess_N <= value.excess) & (objective_N < value.objective - 0.5)
        )
        index = np.flatnonzero(good)
        # Repair at the least cost: what is won per excess removed.
        if value.excess > 0:
            ratio = (objective_N[index] - value.objective) / (value.excess - excess_N[index] + 1e-18)
            return np.asarray(index[np.argsort(ratio, kind="stable")[:most]])
        return np.asarray(index[np.lexsort((objective_N[index], excess_N[index]))[:most]])

    def _moves(
        self, ends: NDArray[np.intp], schemes: NDArray[np.intp]
    ) -> tuple[tuple[Array, Array, Array], list[_Move]]:
        """Every move, and its changes of times and memory by stage and of harm."""
        moves: list[_Move] = []
        # The two stages that change; times and memory of the first and of the second, and harm.
        at: list[tuple[int, int]] = []
        deltas: list[tuple[Array, float, Array, float, float]] = []
        for move, stages, delta in (*self._scheme_moves(ends, schemes), *self._shift_moves(ends, schemes)):
            moves.append(move)
            at.append(stages)
            deltas.append(delta)
        count = len(moves)
        times, memory = np.zeros((count, len(self.order), 2)), np.zeros((count, len(self.order)))
        harm = np.zeros(count)
        if count:
            rows, where = np.arange(count), np.asarray(at)
            columns = [np.asarray(column) for column in zip(*deltas, strict=True)]
            times[rows, where[:, 0]] += columns[0]
            times[rows, where[:, 1]] += columns[2]
            memory[rows, where[:, 0]] += columns[1]
            memory[rows, where[:, 1]] += columns[3]
            harm = columns[4]
        return (times, memory, harm), moves

    def _scheme_moves(self, ends: NDArray[np.intp], schemes: NDArray[np.intp]) -> Iterator[_Change]:
        """Of the groups of one stage, kind and scheme: the 1, 2, 4, ... least harmful to change to another scheme."""
        t = self._tables
        stage_G = np.searchsorted(ends, np.arange(t.groups), side="right")
        kinds, count = t.memory_KS.shape
        key_G = (stage_G * kinds + t.kind_G) * count + schemes
        nothing = np.zeros(2)
        by_key = np.argsort(key_G, kind="stable")
        keys, starts = np.unique(key_G[by_key], return_index=True)
        for key, members in zip(keys.tolist(), np.split(by_key, starts[1:]), strict=True):
            old, kind, stage = key % count, (key // count) % kinds, key // count // kinds
            for new in range(count):
                free = members[self._allowed_GS[members, new]]
                if new == old or not len(free):
                    continue
                harm = t.harm_GS[free, new] - t.harm_GS[free, old]
                order = np.argsort(harm, kind="stable")
                free, sums = free[order], np.cumsum(harm[order])
                time_2 = t.time_KTS2[kind, stage, new] - t.time_KTS2[kind, stage, old]
                memory = float(t.memory_KS[kind, new] - t.memory_KS[kind, old])
                size = 1
                while size <= len(free):
                    delta = (size * time_2, size * memory, nothing, 0.0, float(sums[size - 1]))
                    yield _Move(-1, 0, new, size, free[:size]), (stage, stage), delta
                    size *= 2

    def _shift_moves(self, ends: NDArray[np.intp], schemes: NDArray[np.intp]) -> Iterator[_Change]:
        """Each border moved by some groups, which keep their schemes or all take one."""
        t, stages, count = self._tables, len(self.order), self._tables.memory_KS.shape[1]
        rows = np.arange(t.groups)
        time_sums = _running(t.time_KTS2[t.kind_G[:, None], np.arange(stages)[None, :], schemes[:, None]])
        memory_sums = _running(t.memory_KS[t.kind_G, schemes])
        harm_sums = _running(t.harm_GS[rows, schemes])
        for j in range(stages - 1):
            border, low = int(ends[j]), int(ends[j - 1]) if j else 0
            for size, sign in itertools.product(_SHIFTS, (1, -1)):
                begin, end = (border, border + size) if sign > 0 else (border - size, border)
                source, target = (j + 1, j) if sign > 0 else (j, j + 1)
                if begin <= low or end >= int(ends[j + 1]):
                    continue
                lost = time_sums[begin, source] - time_sums[end, source]
                memory = float(memory_sums[end] - memory_sums[begin])
                gained = time_sums[end, target] - time_sums[begin, target]
                yield _Move(j, sign * size, -1, size, None), (source, target), (lost, -memory, gained, memory, 0.0)
                harm = float(harm_sums[end] - harm_sums[begin])
                for new in range(count):
                    if self._banned[end, new] > self._banned[begin, new]:
                        continue
                    uniform = self._uniform_time[end, target, new] - self._uniform_time[begin, target, new]
                    more = float(self._uniform_memory[end, new] - self._uniform_memory[begin, new])
                    change = float(self._uniform_harm[end, new] - self._uniform_harm[begin, new]) - harm
                    yield (
                        _Move(j, sign * size, new, size, None),
                        (source, target),
                        (lost, -memory, uniform, more, change),
                    )

    def _apply(
        self, ends: NDArray[np.intp], schemes: NDArray[np.intp], moves: list[_Move]
    ) -> tuple[NDArray[np.intp], NDArray[np.intp], Value] | None:
        ends, schemes = ends.copy(), schemes.copy()
        for move in moves:
            if move.members is not None:
                schemes[move.members] = move.scheme
                continue
            begin, end = sorted((int(ends[move.border]), int(ends[move.border]) + move.shift))
            if move.scheme >= 0:
                schemes[begin:end] = move.scheme
            ends[move.border] += move.shift
        if (np.diff(np.concatenate([[0], ends])) <= 0).any():
            return None
        return ends, schemes, self._value(stage_sums(self._tables, ends, schemes))


def _running(values: Any) -> Array:
    """Sums of the first 0, 1, 2, ... entries along the first axis."""
    result = np.zeros((len(values) + 1, *values.shape[1:]))
    np.cumsum(values, axis=0, out=result[1:])
    return result
