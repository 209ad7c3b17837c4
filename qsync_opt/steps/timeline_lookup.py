"""Memory timelines of compiled operators, from the recorded plan whose operators around them are most alike.

The operator that a compiler's tensor is charged to depends on its neighbours: of two tensors of equal size that a
kernel writes, one is kept and the other not, and the kernel that writes a tensor differs from plan to plan. Two plans
may therefore disagree on the memory of an operator in the same case. The memory of an operator and its neighbours
together is right in each plan, so that neighbours are looked up in the same plan where possible. The readers of its
result count first: the formats in which they need it decide how many copies of it exist.

Source: ours.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from qsync_opt.steps.costs import Case, CaseCost, RecordedTimelines
from qsync_opt.steps.memory_timeline import MemoryTimeline, mean_timeline

_NEAR, _FAR = 3, 12
"""Operators to each side that are compared; those beyond the near ones only where the near ones are equally alike."""
_Place = tuple[RecordedTimelines, int]
"""A recorded plan, and the position of an operator."""


class TimelineLookup:
    """Timelines of operators by their case and those around it.

    ``users`` are the positions of the readers of each operator's result; without them, readers are not compared.
    """

    def __init__(self, recorded: Sequence[RecordedTimelines], users: Sequence[Sequence[int]] = ()) -> None:
        self._recorded = recorded
        self._users = users
        self._places: dict[Case, list[_Place]] = {}
        for plan in recorded:
            for position, case in enumerate(plan.cases):
                self._places.setdefault(case, []).append((plan, position))
        self._cache: dict[tuple[int, tuple[Case, ...], tuple[Case, ...]], list[_Place]] = {}

    def recorded(self, cases: Sequence[Case]) -> bool:
        """Whether a plan with these cases was recorded."""
        return any(plan.cases == tuple(cases) for plan in self._recorded)

    def timelines(self, cases: Sequence[Case], costs: Sequence[CaseCost]) -> list[MemoryTimeline]:
        """Timelines of all operators of a plan, in order; of a case that was never recorded, that of its cost."""
        result = []
        differences: dict[int, int] = {}
        for position, (case, cost) in enumerate(zip(cases, costs, strict=True)):
            if case not in self._places:
                result.append(cost.timeline)
                continue
            alike = self._most_alike(cases, position)
            if len(alike) > 1:  # then the plan counts that is most alike as a whole
                for plan, _ in alike:
                    if id(plan) not in differences:
                        differences[id(plan)] = sum(a != b for a, b in zip(plan.cases, cases, strict=False))
                fewest = min(differences[id(plan)] for plan, _ in alike)
                alike = [(plan, place) for plan, place in alike if differences[id(plan)] == fewest]
            timelines = [plan.timelines[place] for plan, place in alike]
            result.append(mean_timeline([{entry[:2]: entry[2] for entry in timeline} for timeline in timelines]))
        return result

    def _readers(self, cases: Sequence[Case], position: int) -> tuple[Case, ...]:
        """Cases of the readers of the result of the operator at ``position``."""
        return tuple([cases[user] for user in self._users[position]]) if self._users else ()

    def _most_alike(self, cases: Sequence[Case], position: int) -> list[_Place]:
        """The places of an operator's case whose surroundings are most like those of ``position`` in ``cases``."""
        readers = self._readers(cases, position)
        key = (position, tuple(cases[max(0, position - _FAR) : position + _FAR + 1]), readers)
        if key not in self._cache:

            def rank(plan: RecordedTimelines, place: int) -> tuple[int, int, int, bool]:
                pairs = itertools.zip_longest(self._readers(plan.cases, place), readers)
                near, far = _differences(plan.cases, place, cases, position)
                return sum(a != b for a, b in pairs), near, far, place != position

            places = self._places[cases[position]]
            ranks = [rank(plan, place) for plan, place in places]
            best = min(ranks)
            self._cache[key] = [place for place, rank in zip(places, ranks, strict=True) if rank == best]
        return self._cache[key]


def _differences(some: Sequence[Case], i: int, others: Sequence[Case], k: int) -> tuple[int, int]:
    """How many cases differ near two places, and far from them; an end of the model equals only another end."""
    counts = [0, 0]
    for distance in range(1, _FAR + 1):
        for step in (-distance, distance):
            a = some[i + step] if 0 <= i + step < len(some) else None
            b = others[k + step] if 0 <= k + step < len(others) else None
            if a is not b and a != b:
                counts[distance > _NEAR] += 1
    return counts[0], counts[1]
