"""What the solvers' benchmark runs: the jobs of every section, with their limits and seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from families import Recipe
from solvers_cases import FAMILIES, SMALL_FAMILIES, Case, captured, compared, generated, recorded

SIZES = (50, 200, 1000, 5000, 20000)
KINDS = (*FAMILIES, *SMALL_FAMILIES, "file")
"""Families of problems; files are the recorded instances and the captured models."""
EXACT_LIMIT_S = {50: 10.0, 200: 10.0, 1000: 15.0, 5000: 15.0, 20000: 35.0}
"""Seconds for ``exact``; how many are proved within what is asked is counted afterwards."""
GENERAL = {"HiGHS": "ortools", "SCIP": "scip", "CBC": "pulp", "CP-SAT": "cp-sat"}
GENERAL_LIMIT_S = {50: 20.0, 200: 20.0, 1000: 60.0, 5000: 60.0}
COMPARED_SEEDS = {50: 3, 200: 3, 1000: 3, 5000: 1}
"""Seeds of each family on which the methods are compared."""
GENERAL_SEEDS = {
    "HiGHS": {50: 1, 200: 3, 1000: 3, 5000: 1},
    "SCIP": {50: 1, 200: 3, 1000: 2},
    "CBC": {50: 1, 200: 3, 1000: 1},
    "CP-SAT": {50: 1, 200: 1, 1000: 1},
}
"""Seeds of each family that a general solver is run on: those that mostly end at their limit take fewer turns."""
BASELINE_LIMIT_S = 30.0
GRACE_S = 150.0
"""A worker is stopped so long after its limits: building and overruns of a solver are not its limits."""
AGREEMENT_BATCH = 50
FRONT_STOP_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the command line chose."""

    sizes: tuple[int, ...]
    seeds: tuple[int, ...]
    families: tuple[str, ...]
    problems: int
    points: int
    most_s: float

    def sizes_in(self, known: Iterable[int]) -> list[int]:
        """Chosen sizes for which a section has limits."""
        return [size for size in self.sizes if size in known]

    def families_in(self, known: Iterable[str]) -> list[str]:
        """Chosen families that a section has."""
        return [family for family in known if family in self.families]

    def limit_s(self, seconds: float) -> float:
        """A section's limit, no more than the command line allows."""
        return min(seconds, self.most_s)


Job = dict[str, Any]
Record = dict[str, Any]


def _files(settings: Settings, *cases: Iterable[Case]) -> list[Case]:
    """Problem files count as 200 operators, and as a family of their own."""
    wanted = 200 in settings.sizes and "file" in settings.families
    return [case for found in cases for case in found] if wanted else []


def _run(label: str, method: str, limit_s: float | None, *, solver: str | None = None, repeats: int = 1) -> Job:
    return {"label": label, "method": method, "solver": solver, "limit_s": limit_s, "repeats": repeats}


def _case_job(case: Case, runs: list[Job]) -> Job:
    longest = sum((run["limit_s"] or 60.0) * run["repeats"] for run in runs)
    return {"kind": "case", "case": case.to_json(), "runs": runs, "title": case.name, "stop_s": longest + GRACE_S}


def _repeats(size: int) -> int:
    return 3 if size <= 1000 else 1


def quality_jobs(settings: Settings) -> Iterator[Job]:
    """The package's own methods on everything; the largest first, so that no core ends up waiting for one."""
    made = generated(settings.sizes_in(EXACT_LIMIT_S), seeds=settings.seeds, families=settings.families)
    for case in sorted([*made, *_files(settings, recorded(), captured())], key=lambda case: -case.size):
        exact = _run("exact", "exact", settings.limit_s(EXACT_LIMIT_S[case.size]))
        yield _case_job(case, [_run("greedy", "greedy", None, repeats=_repeats(case.size)), exact])


def _compared(settings: Settings) -> Iterator[Case]:
    for size in reversed(settings.sizes_in(GENERAL_LIMIT_S)):
        yield from compared(size, seeds=settings.seeds[: COMPARED_SEEDS[size]], families=settings.families)
    yield from _files(settings, captured())


def baseline_jobs(settings: Settings) -> Iterator[Job]:
    """What others would do, beside the package's own methods in the same process."""
    for case in _compared(settings):
        runs = [_run("greedy", "greedy", None, repeats=_repeats(case.size))]
        runs += [_run("exact", "exact", settings.limit_s(GENERAL_LIMIT_S[case.size]))]
        runs += [_run(name, name, settings.limit_s(BASELINE_LIMIT_S)) for name in ("qsync", "ratio", "lp-rounding")]
        yield _case_job(case, runs)


def _runs_on(label: str, case: Case, settings: Settings) -> bool:
    """False where a general solver would only use up its limit once more."""
    seeds = settings.seeds[: GENERAL_SEEDS[label].get(case.size, 0)]
    return case.recipe is None or case.recipe.seed in seeds


def general_jobs(settings: Settings) -> Iterator[Job]:
    """General solvers, a process each, and `exact` under the same limit."""
    for case in _compared(settings):
        limit_s = settings.limit_s(GENERAL_LIMIT_S[case.size])
        yield _case_job(case, [_run("exact", "exact", limit_s)])
        for label, solver in GENERAL.items():
            if _runs_on(label, case, settings):
                yield _case_job(case, [_run(label, "ilp", limit_s, solver=solver)])


def front_jobs(settings: Settings) -> Iterator[Job]:
    """Fronts at 1,000 operators, or the largest size chosen below; proved ones for the first seed only.

    Near fronts are measured as they are (against `greedy`), and searched on where a point misses the gap (thorough).
    """
    size = max((size for size in settings.sizes if size <= 1000), default=1000)
    for method, seeds in (("exact", settings.seeds[:1]), ("thorough", settings.seeds), ("greedy", settings.seeds)):
        for family in settings.families_in(FAMILIES):
            for seed in seeds:
                case = Case(recipe=Recipe(family=family, operators=size, seed=seed))
                title = f"front by {method} {case.name}"
                yield {
                    "kind": "front", "case": case.to_json(), "method": method, "points": settings.points,
                    "title": title, "stop_s": FRONT_STOP_S,
                }  # fmt: skip


def agreement_jobs(settings: Settings) -> Iterator[Job]:
    """Batches of random problems."""
    for first in range(0, settings.problems, AGREEMENT_BATCH):
        count = min(AGREEMENT_BATCH, settings.problems - first)
        yield {"kind": "agreement", "first": first, "count": count, "title": f"problems from {first}", "stop_s": 900.0}


def memory_jobs(settings: Settings) -> Iterator[Job]:
    """A file to write first, and then to load and solve in a fresh process."""
    for family in settings.families_in(FAMILIES):
        case = Case(recipe=Recipe(family=family, operators=max(settings.sizes)))
        title = f"memory {case.name}"
        yield {"kind": "memory", "case": case.to_json(), "title": title, "stop_s": 300.0}


SECTIONS: dict[str, Callable[[Settings], Iterator[Job]]] = {
    "quality": quality_jobs,
    "baselines": baseline_jobs,
    "general": general_jobs,
    "front": front_jobs,
    "memory": memory_jobs,
    "agreement": agreement_jobs,
}
