"""Whether any plan keeps the limits, and if none does: which limit, where, and by how much."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from qsync_opt.formulations.serving.search import Search
from qsync_opt.formulations.serving.tables import Array, Draft, Tables
from qsync_opt.serving import Problem

_WHOLE_HARM = 1e12
"""Sum of the largest harms in whole units: small enough for exact floating-point sums."""


def simple_reason(problem: Problem, tables: Sequence[Tables]) -> str | None:
    """Why no plan keeps one of the two limits, whatever the other says; None if each can be kept by itself."""
    least = float(tables[0].harm_GS.min(1).sum())
    if least > tables[0].harm_limit:
        return (
            f"harm: even the least harmful scheme of every group adds up to {least:.6g}, "
            f"but the limit is {problem.harm_limit:.6g}"
        )
    return _memory_reason(problem, tables)


def _memory_reason(problem: Problem, tables: Sequence[Tables]) -> str | None:
    """None if the groups fit into the devices' memory under some option, harm aside; else how much is missing.

    Source: ours. In the lowest schemes what fits is decided by how far a chain of devices gets, at most.
    """
    if any(_reach(t, 0.0, None) for t in tables):
        return None
    # What would help: the least more memory on all devices in use, or on one.
    best = min(tables, key=lambda t: float(_least_memory(t).sum()))
    needed = float(_least_memory(best).sum())
    largest = needed + float(best.first_memory_T.max() + best.last_memory_T.max())
    cures = []
    for t in range(best.types):
        if _reach(best, largest, t):
            low, high = 0.0, largest
            while high - low > 0.5:
                middle = math.floor((low + high) / 2)
                if middle <= low:
                    break
                low, high = (low, middle) if _reach(best, middle, t) else (middle, high)
            cures.append((high, t))
    more, t = min(cures)
    device = next(d for d in problem.devices if d.memory_kib == best.limit_T[t])
    total = sum(d.memory_kib for d in problem.devices)
    which = "smallest schemes" if problem.harm_limit is None else "smallest schemes that the harm limit allows"
    return (
        f"memory: in the {which}, with micro-batch option {best.option}, the groups need {needed:.0f} KiB "
        f"beside what the first and the last stage hold, the devices have {total} KiB in all, and no order of them "
        f"takes the groups; device {device.name!r} would need {more:.0f} KiB more"
    )


def _least_memory(tables: Tables) -> Array:
    allowed = tables.harm_GS <= tables.harm_limit
    return np.asarray(np.where(allowed, tables.memory_KS[tables.kind_G], np.inf).min(1))


def _reach(tables: Tables, more: float, favoured: int | None) -> bool:
    """Whether all groups fit in their smallest schemes, with ``more`` KiB on one device of type ``favoured``."""
    sums = np.concatenate([[0.0], np.cumsum(_least_memory(tables))])
    groups = tables.groups
    counts = [int(c) for c in tables.count_T]
    limits = [float(limit) for limit in tables.limit_T]
    if favoured is not None:  # a device of its own kind
        counts[favoured] -= 1
        counts.append(1)
        limits.append(limits[favoured] + more)
    kind = [*range(tables.types), *([favoured] if favoured is not None else [])]
    first, last = tables.first_memory_T, tables.last_memory_T
    frontier: dict[tuple[int, ...], int] = {tuple([0] * len(counts)): 0}
    while frontier:
        following: dict[tuple[int, ...], int] = {}
        for used, done in frontier.items():
            for t in range(len(counts)):
                if used[t] >= counts[t]:
                    continue
                room = limits[t] - (first[kind[t]] if done == 0 else 0.0)
                if sums[groups] - sums[done] + last[kind[t]] <= room:
                    return True
                reached = min(int(np.searchsorted(sums, sums[done] + room, side="right")) - 1, groups - 1)
                if reached > done:
                    state = (*used[:t], used[t] + 1, *used[t + 1 :])
                    following[state] = max(following.get(state, 0), reached)
        frontier = following
    return False


def harm_draft(
    problem: Problem, tables: Sequence[Tables], deadline: float
) -> tuple[tuple[int, Draft] | None, str | None]:
    """A draft that fits and keeps the harm limit, or why there is none; neither if the time is up.

    Source: ours: the same search with harm for time.
    """
    harms = tables[0].harm_GS
    limit = tables[0].harm_limit
    scale = _WHOLE_HARM / max(float(harms.max(1).sum()), 1e-300)
    groups = np.arange(tables[0].groups)
    whole = np.floor(harms * scale)
    searched = []
    for option, t in enumerate(tables):
        times = np.zeros((t.groups, t.types, whole.shape[1], 2))
        times[..., 0] = whole[:, None, :]
        nothing = np.zeros((t.types, 2))
        searched.append(
            replace(
                t,
                option=option,
                prefill_parts=1,
                steps=0,
                kind_G=groups,
                time_KTS2=times,
                memory_KS=t.memory_KS[t.kind_G],
                harm_limit=math.inf,
                first_T2=nothing,
                last_T2=nothing,
                link_TT2=np.zeros((t.types, t.types, 2)),
            )
        )
    search = Search(searched, deadline)
    search.begin(max(limit * scale, 1.0))
    search.root(16)
    search.run(0.0, enough=lambda: search.upper <= limit * scale)
    if search.best is not None and search.upper <= limit * scale:
        return search.best, None
    if time.monotonic() > deadline and search.bound <= limit * scale:
        return None, None
    return None, (
        f"harm: where the groups fit into memory the harm is at least {search.bound / scale:.6g}, "
        f"but the limit is {problem.harm_limit:.6g}"
    )
