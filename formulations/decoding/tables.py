"""The problem as drafts and regimes: of a draft's lengths only the best counts in each regime.

Once the set of drafts is chosen, every regime takes its best choice among them by itself. So a plan is a set of drafts.

Axis letters: R regimes, D drafts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qsync_opt.decoding import Plan, Problem, Selection

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """Weighted times per token, of plain decoding (``plain_R``) and with each draft (``time_RD``, infinite without).

    ``drafts`` are those that fit into the memory alone and gain in some regime, ``memory_D`` their KiB, and
    ``length_RD`` the length to take.
    """

    problem: Problem
    drafts: tuple[str, ...]
    memory_D: tuple[int, ...]
    plain_R: Floats
    time_RD: Floats
    length_RD: NDArray[np.int64]

    @property
    def memory_kib(self) -> int:
        """The limit of the drafts' memory."""
        return self.problem.memory_kib

    def objective(self, chosen: Iterable[int]) -> float:
        """Weighted time per token with a set of drafts, given by their indices."""
        return math.fsum(np.minimum(self.plain_R, self._least_R(chosen)))

    def _least_R(self, chosen: Iterable[int]) -> Floats:
        least_R: Floats = self.time_RD[:, sorted(chosen)].min(axis=1, initial=np.inf)
        return least_R

    def plan(self, chosen: Iterable[int]) -> Plan:
        """The plan with a set of drafts: each regime's best choice, plain decoding where none is faster."""
        columns = sorted(chosen)
        choices: dict[str, Selection | None] = {}
        for r, regime in enumerate(self.problem.regimes):
            d = min(columns, key=lambda column: self.time_RD[r, column], default=None)
            gains = d is not None and self.time_RD[r, d] < self.plain_R[r]
            choices[regime.name] = (
                Selection(draft=self.drafts[d], length=int(self.length_RD[r, d])) if d is not None and gains else None
            )
        return Plan(choices=choices, problem=self.problem.name)


def build_tables(problem: Problem) -> Tables:
    """The tables of a problem."""
    names = tuple(problem.drafts)
    time_RD = np.full((len(problem.regimes), len(names)), np.inf)
    length_RD = np.zeros(time_RD.shape, dtype=np.int64)
    plain_R = np.array([regime.weight * regime.plain_ns for regime in problem.regimes], dtype=np.float64)
    column = {name: d for d, name in enumerate(names)}
    for r, regime in enumerate(problem.regimes):
        for choice in regime.choices:
            d, time = column[choice.draft], regime.weight * problem.time_per_token_ns(choice)
            if time < time_RD[r, d]:
                time_RD[r, d], length_RD[r, d] = time, choice.length
    useful = [
        d
        for d, name in enumerate(names)
        if problem.drafts[name].memory_kib <= problem.memory_kib and bool((time_RD[:, d] < plain_R).any())
    ]
    return Tables(
        problem=problem,
        drafts=tuple(names[d] for d in useful),
        memory_D=tuple(problem.drafts[names[d]].memory_kib for d in useful),
        plain_R=plain_R,
        time_RD=time_RD[:, useful],
        length_RD=length_RD[:, useful],
    )
