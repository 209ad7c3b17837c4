"""Memory of a compiled operator, taken from the recorded step in which most of what is around it was the same.

Whom a compiler's tensor is charged to depends on what is beside it: of two tensors of equal size that a kernel writes,
one is kept and the other not, and which kernel writes a tensor at all differs from plan to plan. So two plans may
disagree on what an operator has in use although they have the same case of it. What an operator and its neighbours
have in use together is right in each of them, however, and so the neighbours are taken from the same plan where that
is possible. First of them count those that read what the operator delivers: in which formats they want it decides how
many copies of it there are.

Source: ours.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from qsync_opt.steps.costs import Case, CaseCost, RecordedCourses
from qsync_opt.steps.courses import Course, mean_course

_NEAR, _FAR = 3, 12
"""Operators to each side that are looked at; those farther away only where the near ones say nothing."""


_Place = tuple[RecordedCourses, int]


class CourseLookup:
    """Courses of operators by their case and those around it.

    Args:
        recorded: What every operator had in use under each recorded plan.
        users: Per operator, positions of those that read what it delivers; empty: they are not looked at by themselves.
    """

    def __init__(self, recorded: Sequence[RecordedCourses], users: Sequence[Sequence[int]] = ()) -> None:
        self._recorded = recorded
        self._users = users
        self._places: dict[Case, list[_Place]] = {}
        for plan in recorded:
            for position, case in enumerate(plan.cases):
                self._places.setdefault(case, []).append((plan, position))
        self._known: dict[tuple[int, tuple[Case, ...], tuple[Case, ...]], list[_Place]] = {}

    def recorded(self, cases: Sequence[Case]) -> bool:
        """Whether a plan with these cases was recorded."""
        return any(plan.cases == tuple(cases) for plan in self._recorded)

    def courses(self, cases: Sequence[Case], costs: Sequence[CaseCost]) -> list[Course]:
        """Courses of all operators of a plan.

        Args:
            cases: Per operator, in order.
            costs: Of these cases; the course of one that was never recorded is taken from here.
        """
        found = []
        differing: dict[int, int] = {}
        for position, (case, cost) in enumerate(zip(cases, costs, strict=True)):
            places = self._places.get(case)
            if places is None:
                found.append(cost.course)
                continue
            around = tuple(cases[max(0, position - _FAR) : position + _FAR + 1])
            key = (position, around, self._reading(cases, position))
            alike = self._known.get(key)
            if alike is None:
                alike = self._known[key] = self._most_alike(places, cases, position)
            if len(alike) > 1:  # then the plan decides that is most alike as a whole
                for plan, _ in alike:
                    if id(plan) not in differing:
                        differing[id(plan)] = sum(a != b for a, b in zip(plan.cases, cases, strict=False))
                least = min(differing[id(plan)] for plan, _ in alike)
                alike = [(plan, place) for plan, place in alike if differing[id(plan)] == least]
            courses = [plan.courses[place] for plan, place in alike]
            found.append(mean_course([{entry[:2]: entry[2] for entry in course} for course in courses]))
        return found

    def _reading(self, cases: Sequence[Case], position: int) -> tuple[Case, ...]:
        """Cases of those that read what the operator at ``position`` delivers."""
        return tuple([cases[user] for user in self._users[position]]) if self._users else ()

    def _most_alike(self, places: Sequence[_Place], cases: Sequence[Case], position: int) -> list[_Place]:
        """The places around which most is as it is around ``position`` of ``cases``."""
        reading = self._reading(cases, position)

        def rank(plan: RecordedCourses, place: int) -> tuple[int, int, int, bool]:
            there = self._reading(plan.cases, place)
            readers = sum(a != b for a, b in itertools.zip_longest(there, reading))
            return (readers, *_unlike(plan.cases, place, cases, position), place != position)

        ranks = [rank(plan, place) for plan, place in places]
        best = min(ranks)
        return [place for place, found in zip(places, ranks, strict=True) if found == best]


def _unlike(some: Sequence[Case], i: int, others: Sequence[Case], k: int) -> tuple[int, int]:
    """How many cases differ near two places, and far from them; an end of the model is like another end only."""
    counts = [0, 0]
    for distance in range(1, _FAR + 1):
        for step in (-distance, distance):
            a = some[i + step] if 0 <= i + step < len(some) else None
            b = others[k + step] if 0 <= k + step < len(others) else None
            if a is not b and a != b:
                counts[distance > _NEAR] += 1
    return counts[0], counts[1]
