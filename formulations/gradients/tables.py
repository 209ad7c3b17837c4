"""Compression problems as arrays, without choices that another of the same bucket beats in both time and variance.

Axis letters: K buckets, C choices of one bucket, sorted by rising time (and so by falling variance).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qsync_opt.gradients import VARIANCE_SLACK, Objective, Plan, Problem, evaluate
from qsync_opt.solving import Answer, TerminationStatus

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """A problem as arrays, one pair of ``times_KC`` and ``variances_KC`` for each bucket.

    ``floor_ns`` and ``tail_ns`` are the end of the backward pass and what follows the last reduction.
    """

    problem: Problem
    names_KC: tuple[tuple[str, ...], ...]
    times_KC: tuple[Ints, ...]
    variances_KC: tuple[Floats, ...]
    ready_K: Ints
    floor_ns: int
    tail_ns: int

    @classmethod
    def of(cls, problem: Problem) -> Tables:
        """The arrays of a problem."""
        names, times, variances = [], [], []
        for bucket in problem.buckets:
            kept: list[str] = []
            least = np.inf
            for name, choice in sorted(bucket.choices.items(), key=lambda item: (item[1].time_ns, item[1].variance)):
                if choice.variance < least:
                    kept.append(name)
                    least = choice.variance
            names.append(tuple(kept))
            times.append(np.array([bucket.choices[name].time_ns for name in kept], dtype=np.int64))
            variances.append(np.array([bucket.choices[name].variance for name in kept]))
        return cls(
            problem=problem,
            names_KC=tuple(names),
            times_KC=tuple(times),
            variances_KC=tuple(variances),
            ready_K=np.array([bucket.ready_ns for bucket in problem.buckets], dtype=np.int64),
            floor_ns=problem.compute_end_ns,
            tail_ns=problem.tail_ns,
        )

    def end_ns(self, picks_K: Iterable[int]) -> int:
        """When the last reduction ends; the backward pass may end later."""
        clock = 0
        for ready, times_C, pick in zip(self.ready_K.tolist(), self.times_KC, picks_K, strict=True):
            clock = max(ready, clock) + int(times_C[pick])
        return clock

    @property
    def fastest_K(self) -> list[int]:
        """The fastest choice of each bucket."""
        return [0] * len(self.times_KC)

    @property
    def finest_K(self) -> list[int]:
        """The choice of least variance of each bucket."""
        return [len(times_C) - 1 for times_C in self.times_KC]

    def deadline_ns(self) -> int | None:
        """When the last reduction must end, by the latency limit; None without one that counts."""
        problem = self.problem
        if problem.objective is Objective.LATENCY or problem.latency_limit_ns is None:
            return None
        return problem.latency_limit_ns - problem.tail_ns

    def ceiling(self) -> float:
        """Largest sum of variances by the variance limit; infinite without one that counts."""
        problem = self.problem
        if problem.objective is Objective.VARIANCE or problem.variance_limit is None:
            return np.inf
        return problem.variance_limit * (1 + VARIANCE_SLACK)

    def plan(self, picks_K: Iterable[int]) -> Plan:
        """The plan of one choice for each bucket."""
        pairs = zip(self.problem.buckets, self.names_KC, picks_K, strict=True)
        return Plan(schemes={bucket.name: names_C[pick] for bucket, names_C, pick in pairs}).made_for(self.problem)

    def infeasible(self) -> str | None:
        """Why no plan keeps the limit, with the least value that could be met; None if one does."""
        problem, deadline, ceiling = self.problem, self.deadline_ns(), self.ceiling()
        if deadline is not None:
            fastest = evaluate(problem, self.plan(self.fastest_K))
            if not fastest.feasible:
                cause = "its reductions" if fastest.exposed_ns else "the backward pass"
                return (
                    f"the latency limit of {problem.latency_limit_ns} ns cannot be met by any plan: with the fastest "
                    f"scheme in every bucket {cause} and the tail take {fastest.iteration_ns} ns, the least value that "
                    "could be met"
                )
        elif ceiling < np.inf:
            finest = evaluate(problem, self.plan(self.finest_K))
            if not finest.feasible:
                return (
                    f"the variance limit of {problem.variance_limit:.9g} cannot be met by any plan: the schemes of "
                    f"least variance add up to {finest.variance:.9g}, the least value that could be met"
                )
        return None

    def answer(
        self,
        picks_K: Iterable[int],
        termination: TerminationStatus,
        bound: float | None,
        *,
        solver: str | None = None,
        build_seconds: float = 0.0,
        solve_seconds: float = 0.0,
    ) -> Answer:
        """The claim of a method; the bound never lies above the objective, by which rounding may miss it."""
        plan = self.plan(picks_K)
        objective = evaluate(self.problem, plan).objective
        return Answer(
            plan=plan,
            termination=termination,
            objective=objective,
            bound=None if bound is None else min(bound, objective),
            solver=solver,
            build_seconds=build_seconds,
            solve_seconds=solve_seconds,
        )
