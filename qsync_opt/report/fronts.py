"""How good is the plan, and what would other limits buy? A bound and two fronts, from formulations by their names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType

from qsync_opt.errors import UnsupportedError
from qsync_opt.evaluation import Evaluation, evaluate
from qsync_opt.planner import solve
from qsync_opt.problem import Problem
from qsync_opt.solution import Solution

FRONTS: Mapping[str, float] = MappingProxyType({"greedy": 5e-3, "exact": 0.0})
"""Name of a front to the relative gap at which the search for each of its points stops."""
NO_FRONT = "none"
POINTS = 24
"""Limits that each front is computed for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One plan of a front, as `evaluate` sees it; no plan within its limit is below ``bound``."""

    objective: float
    bound: float
    iteration_ns: int
    memory_kib: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fronts:
    """Sensitivity against iteration time within the memory limits, and against memory within the latency limit.

    ``best`` is what the method of the same name finds within the problem's own limits, with its bound.
    """

    method: str
    best: Solution
    latency: tuple[Point, ...]
    memory: Mapping[str, tuple[Point, ...]]


def check_front(name: str) -> None:
    """Refuse a name that is no front."""
    if name != NO_FRONT and name not in FRONTS:
        raise UnsupportedError(f"front is {name!r}, but allowed are {', '.join((*FRONTS, NO_FRONT))}")


def compute_fronts(problem: Problem, name: str, *, points: int = POINTS) -> Fronts | None:
    """Compute the fronts by a method, or nothing for ``"none"``.

    Args:
        problem: The problem.
        name: ``"greedy"``, ``"exact"`` (every point proved; it may take long) or ``"none"``.
        points: Limits to try for each front.

    Raises:
        UnsupportedError: No such front.
        SolverError: A plan does not hold what was claimed of it.

    Source: ours; the epsilon-constraint method of `qsync_opt.formulations.front`.
    """
    check_front(name)
    if name == NO_FRONT:
        return None
    # Formulations are reached by name only, as everywhere in the core.
    front = import_module("qsync_opt.formulations.front")
    gap = FRONTS[name]
    return Fronts(
        method=name,
        best=solve(problem, name),
        latency=_checked(problem, front.latency_front(problem, points=points, gap=gap)),
        memory={
            device.name: _checked(problem, front.memory_front(problem, device.name, points=points, gap=gap))
            for device in problem.devices
        },
    )


def _checked(problem: Problem, points: Iterable[object]) -> tuple[Point, ...]:
    """Points with the figures that the independent evaluation gives, whatever the search claims."""
    result = []
    for point in points:
        evaluation: Evaluation = evaluate(problem, point.plan)  # type: ignore[attr-defined]
        result.append(
            Point(
                objective=evaluation.objective,
                bound=min(point.bound, evaluation.objective),  # type: ignore[attr-defined]
                iteration_ns=evaluation.iteration_ns,
                memory_kib=evaluation.memory_kib,
            )
        )
    return tuple(result)
