"""How good is the plan, and what would other limits buy? A bound and the fronts, from methods by their names."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from qsync_opt.errors import UnsupportedError
from qsync_opt.training.pareto import GAPS, Front, pareto_front
from qsync_opt.training.planner import solve
from qsync_opt.training.problem import Problem
from qsync_opt.training.solution import Solution

NO_FRONT = "none"
POINTS = 30
"""Limits that each front is computed for: as many as `pareto_front` tries, so that both share a cache."""
Progress = Callable[[int, int, str], None]
"""Called with what is done, how much there is in all, and what comes next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fronts:
    """Sensitivity against iteration time within the memory limits, and against memory within the latency limit.

    ``best`` is what the method of the same name finds within the problem's own limits, with its bound.
    """

    method: str
    best: Solution
    latency: Front
    memory: Mapping[str, Front]


def check_front(name: str) -> None:
    """Refuse a name that is no front."""
    if name != NO_FRONT and name not in GAPS:
        raise UnsupportedError(f"front is {name!r}, but allowed are {', '.join((*GAPS, NO_FRONT))}")


def compute_fronts(
    problem: Problem, name: str, *, cache: str | os.PathLike[str] | None = None, progress: Progress | None = None
) -> Fronts | None:
    """Compute the fronts by a method, or nothing for ``"none"``.

    Args:
        problem: The problem.
        name: ``"greedy"``, ``"exact"`` (every point proved; it may take long) or ``"none"``.
        cache: Folder in which points are kept, so that an interrupted report goes on; None keeps them nowhere.
        progress: Called as the points are found.

    Raises:
        UnsupportedError: No such front.
        SolverError: A plan does not hold what was claimed of it.

    Source: ours; the fronts are those of `qsync_opt.training.pareto`.
    """
    check_front(name)
    if name == NO_FRONT:
        return None
    total = (1 + len(problem.devices)) * POINTS

    def front(number: int, device: str | None) -> Front:
        def step(done: int, _points: int, _reused: int) -> None:
            if progress is not None:
                progress(
                    number * POINTS + done, total, "front against " + (f"memory of {device}" if device else "time")
                )

        against = "latency" if device is None else "memory"
        return pareto_front(problem, against, device=device, method=name, points=POINTS, cache=cache, progress=step)

    return Fronts(
        method=name,
        best=solve(problem, name),
        latency=front(0, None),
        memory={device.name: front(i, device.name) for i, device in enumerate(problem.devices, start=1)},
    )
