"""Do all exact ways find the same optimum? Exhaustive search against every other way, on random small problems."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from textbook import TextbookFormulation

from qsync_opt import solve
from qsync_opt.errors import QSyncError
from qsync_opt.testing import random_problem
from qsync_opt.training import Communication, Problem, ProblemDevice, Solution, TerminationStatus

WAYS: dict[str, dict[str, Any]] = {
    "exact": {"method": "exact"},
    "exact, HiGHS named": {"method": "exact", "solver": "ortools"},
    "exact, CBC named": {"method": "exact", "solver": "pulp"},
    "ilp, HiGHS": {"method": "ilp", "solver": "ortools"},
    "ilp, SCIP": {"method": "ilp", "solver": "scip"},
    "ilp, CBC": {"method": "ilp", "solver": "pulp"},
    "textbook, HiGHS": {"method": TextbookFormulation(), "solver": "ortools"},
}
"""What is compared with exhaustive search."""
AGREEMENT = 1e-6
"""Largest relative difference between objectives that are the same."""
_EVERY = 4
"""One problem in so many is stretched to extreme numbers."""


def small_problem(seed: int) -> Problem:
    """A random problem of at most seven operators; every fourth one has extreme times and sensitivities."""
    source = random.Random(seed)
    problem = random_problem(source)
    return _stretched(problem, source) if seed % _EVERY == 3 else problem


def _stretched(problem: Problem, source: random.Random) -> Problem:
    """The same problem in other units: times up to hours, sensitivities by up to twelve decades."""
    times, scale = 10 ** source.randint(0, 9), 10 ** source.uniform(-12, 6)

    def stretch(device: ProblemDevice) -> ProblemDevice:
        tables = {
            name: {
                precision: replace(
                    cost,
                    forward_ns=cost.forward_ns * times,
                    backward_ns=cost.backward_ns * times,
                    sensitivity=cost.sensitivity * scale,
                )
                for precision, cost in table.items()
            }
            for name, table in device.operators.items()
        }
        casts = {
            pair: replace(cast, base_ns=cast.base_ns * times, ns_per_mi_elements=cast.ns_per_mi_elements * times)
            for pair, cast in device.casts.items()
        }
        return replace(device, operators=tables, casts=casts)

    communication = Communication(
        allreduce_ns=tuple(t * times for t in problem.communication.allreduce_ns),
        peer_ready_ns=tuple(t * times for t in problem.communication.peer_ready_ns),
    )
    return replace(
        problem,
        devices=tuple(map(stretch, problem.devices)),
        communication=communication,
        optimizer_ns=problem.optimizer_ns * times,
        latency_limit_ns=problem.latency_limit_ns * times,
    )


def check(seed: int, ways: Sequence[str] = tuple(WAYS)) -> tuple[str, list[dict[str, Any]]]:
    """Solve one problem every way.

    Returns:
        ``"feasible"`` or ``"infeasible"`` by exhaustive search, and what disagrees with it, with the problem.
    """
    problem = small_problem(seed)
    known = solve(problem, "exhaustive")
    wrong = []
    for way in ways:
        try:
            complaint = _compare(known, solve(problem, **WAYS[way]))
        except QSyncError as failure:
            complaint = f"{type(failure).__name__}: {failure}"
        if complaint:
            wrong.append(_disagreement(seed, way, complaint, problem))
    try:
        complaint = _check_greedy(known, solve(problem, "greedy"))
    except QSyncError as failure:
        complaint = f"{type(failure).__name__}: {failure}"
    if complaint:
        wrong.append(_disagreement(seed, "greedy", complaint, problem))
    return ("infeasible" if known.plan is None else "feasible"), wrong


def _disagreement(seed: int, way: str, complaint: str, problem: Problem) -> dict[str, Any]:
    return {"seed": seed, "way": way, "complaint": complaint, "problem": problem.to_json()}


def _compare(known: Solution, found: Solution) -> str | None:
    if known.objective is None:
        if found.termination is TerminationStatus.INFEASIBLE:
            return None
        return f"ended {found.termination.value}, but no plan keeps the limits"
    if found.termination is not TerminationStatus.OPTIMAL or found.objective is None:
        return f"ended {found.termination.value} with {found.objective!r}, but the optimum is {known.objective!r}"
    if abs(found.objective - known.objective) > AGREEMENT * abs(known.objective):
        return f"claims the optimum {found.objective!r}, but it is {known.objective!r}"
    return None


def _check_greedy(known: Solution, found: Solution) -> str | None:
    """It proves nothing by promise, but must find a plan where there is one, and its bound must hold."""
    if known.objective is None:
        infeasible = found.termination is TerminationStatus.INFEASIBLE
        return None if infeasible else f"ended {found.termination.value}, but no plan keeps the limits"
    if found.objective is None:
        return f"found no plan (ended {found.termination.value}), but there is one of {known.objective!r}"
    if found.objective < known.objective * (1 - AGREEMENT):
        return f"claims {found.objective!r}, which is below the optimum {known.objective!r}"
    if found.bound is not None and found.bound > known.objective * (1 + AGREEMENT):
        return f"claims the bound {found.bound!r}, which is above the optimum {known.objective!r}"
    return None


def run(first: int, count: int) -> dict[str, Any]:
    """Check the problems of some seeds: how many were feasible and infeasible, and every disagreement."""
    outcome: dict[str, Any] = {"first": first, "count": count, "feasible": 0, "infeasible": 0, "disagreements": []}
    for seed in itertools.islice(itertools.count(first), count):
        verdict, wrong = check(seed)
        outcome[verdict] += 1
        outcome["disagreements"] += wrong
    return outcome
