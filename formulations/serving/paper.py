"""LLM-PQ's heuristic, as published: a quality-only start, then "bit-width transfer" under its own decode time.

All devices are used, in every order of them. The start gives each device a share of the groups by its memory, and each
group the least harmful scheme that fits. A transfer then moves a border group away from the slowest stage, with its
scheme, or exchanges the schemes of two groups of one kind; it counts the decode time (m - 1)(n - 1) max D + sum D.

Source: LLM-PQ (PPoPP 2024), Section 4.3 and its published code; the start by shares stands for its first integer
program. It is a baseline and has no bound.
"""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
from numpy.typing import NDArray

from qsync_opt.formulations.serving.tables import Draft, Tables, build_tables, to_plan
from qsync_opt.formulations.serving.transfers import Transfers
from qsync_opt.serving import Problem, evaluate
from qsync_opt.solving import Answer, SolveOptions, TerminationStatus

_MOST_ROUNDS = 200


class PaperFormulation:
    """The published heuristic; see the module."""

    def solve(self, problem: Problem, options: SolveOptions) -> Answer:
        """Plan the stages; see `Formulation.solve`."""
        started = time.monotonic()
        deadline = math.inf if options.time_limit_s is None else started + options.time_limit_s
        tables, types = build_tables(problem)
        best, claimed, late = None, math.inf, False
        members = [t for t, devices in enumerate(types) for _ in devices]
        for option in tables:
            for order in dict.fromkeys(itertools.permutations(members, min(len(members), option.groups))):
                if time.monotonic() > deadline:
                    late = True
                    break
                draft = _start(option, order)
                if draft is None:
                    continue
                draft = _transfer(option, draft)
                value = _published(option, draft)
                if value < claimed:
                    best, claimed = to_plan(problem, types, option.option, draft), value
        feasible = best is not None
        reason = "the published heuristic found no plan within memory and harm limit, which proves nothing"
        nothing = TerminationStatus.TIME_LIMIT if late else TerminationStatus.ERROR
        return Answer(
            plan=best,
            termination=TerminationStatus.FEASIBLE if feasible else nothing,
            objective=None if best is None else evaluate(problem, best).objective,
            solve_seconds=time.monotonic() - started,
            reason=None if feasible else reason,
        )


def _published(tables: Tables, draft: Draft) -> float:
    """The objective as the paper's program states it."""
    times = Transfers(tables, draft.order).sums(draft).time_J2
    prefill = times[:, 0].sum() + (tables.prefill_parts - 1) * times[:, 0].max()
    decode = times[:, 1].sum() + (tables.decode_parts - 1) * (tables.steps - 1) * times[:, 1].max()
    return float(prefill + (decode if tables.steps else 0.0))


def _start(tables: Tables, order: tuple[int, ...]) -> Draft | None:
    stages, groups = len(order), tables.groups
    share = np.cumsum(tables.limit_T[list(order)])
    ends = np.round(share / share[-1] * groups).astype(int)
    for j in range(stages):  # no stage is empty
        ends[j] = min(max(ends[j], (ends[j - 1] if j else 0) + 1), groups - (stages - 1 - j))
    schemes = tables.harm_GS.argmin(1)
    search = Transfers(tables, order)
    for _ in range(groups * tables.harm_GS.shape[1]):
        draft = Draft(order, tuple(map(int, ends)), tuple(map(int, schemes)))
        sums = search.sums(draft)
        over = sums.memory_J - tables.limit_T[list(order)]
        if (over <= 0).all():
            return draft if sums.harm <= tables.harm_limit else None
        g, s = _smaller(tables, draft, int(over.argmax()), schemes)
        if g < 0:
            return None
        schemes[g] = s
    return None


def _smaller(tables: Tables, draft: Draft, stage: int, schemes: NDArray[np.intp]) -> tuple[int, int]:
    """The change on a stage that saves memory for the least harm per KiB, or (-1, -1)."""
    best, result = math.inf, (-1, -1)
    for g in np.flatnonzero(draft.stage_G() == stage):
        memory, harm = tables.memory_KS[tables.kind_G[g]], tables.harm_GS[g]
        for s in range(len(memory)):
            saved = memory[schemes[g]] - memory[s]
            if saved > 0 and (harm[s] - harm[schemes[g]]) / saved < best:
                best, result = (harm[s] - harm[schemes[g]]) / saved, (int(g), s)
    return result


def _transfer(tables: Tables, draft: Draft) -> Draft:
    search = Transfers(tables, draft.order)
    value = _published(tables, draft)
    for _ in range(_MOST_ROUNDS):
        times = search.sums(draft).time_J2
        slowest = int((times[:, 0] + (tables.decode_parts - 1) * times[:, 1]).argmax())
        best = None
        for candidate in _neighbours(tables, draft, slowest):
            if search.value(candidate).excess <= 0 and (new := _published(tables, candidate)) < value:
                best, value = candidate, new
        if best is None:
            break
        draft = best
    return draft


def _neighbours(tables: Tables, draft: Draft, slowest: int) -> list[Draft]:
    result = []
    ends = list(draft.ends)
    begin = ends[slowest - 1] if slowest else 0
    if ends[slowest] - begin > 1:
        if slowest:
            result.append(Draft(draft.order, (*ends[: slowest - 1], begin + 1, *ends[slowest:]), draft.schemes))
        if slowest + 1 < len(ends):
            result.append(Draft(draft.order, (*ends[:slowest], ends[slowest] - 1, *ends[slowest + 1 :]), draft.schemes))
    stage_G = draft.stage_G()
    pairs = set()
    for a in np.flatnonzero(stage_G == slowest):
        for b in np.flatnonzero(stage_G != slowest):
            key = (tables.kind_G[a], stage_G[b], draft.schemes[a], draft.schemes[b])
            if tables.kind_G[a] != tables.kind_G[b] or draft.schemes[a] == draft.schemes[b] or key in pairs:
                continue
            pairs.add(key)
            schemes = list(draft.schemes)
            schemes[a], schemes[b] = schemes[b], schemes[a]
            result.append(Draft(draft.order, draft.ends, tuple(schemes)))
    return result
