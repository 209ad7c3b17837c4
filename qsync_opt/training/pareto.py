"""Pareto fronts: sensitivity against the iteration time or the memory of a device type, every plan evaluated."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from qsync_opt import __version__
from qsync_opt.errors import ProblemError, SolverError, UnsupportedError
from qsync_opt.io import MeasurementCache, decode, encode, write_json
from qsync_opt.solving import AGREEMENT, relative_gap
from qsync_opt.systems import system
from qsync_opt.training.evaluation import evaluate
from qsync_opt.training.plan import Plan
from qsync_opt.training.problem import Problem
from qsync_opt.views import Displayed, Tabular

FRONT_FORMAT = "qsync-front/1"
GAPS: Mapping[str, float] = MappingProxyType({"greedy": 1e-2, "exact": 0.0})
"""Method of a front to the relative gap of its points."""
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TradeOff:
    """One point of a front, as its plan evaluates to.

    ``use`` is the iteration time in ns, or the memory of the front's device type in KiB. ``bound`` is a lower bound of
    the sensitivity at this use. ``feasible`` refers to the problem's own limits.
    """

    use: int
    iteration_ns: int
    memory_kib: Mapping[str, int]
    objective: float
    bound: float
    feasible: bool
    plan: Plan

    @property
    def gap(self) -> float | None:
        """Relative distance from bound to objective."""
        return relative_gap(self.objective, self.bound)

    @property
    def precisions(self) -> dict[str, dict[str, int]]:
        """How many operators run in each precision, by device type."""
        return {name: dict(Counter(plan.values())) for name, plan in self.plan.devices.items()}

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object, the plan left out."""
        return {
            "use": self.use,
            "iteration_ns": self.iteration_ns,
            "memory_kib": dict(self.memory_kib),
            "objective": self.objective,
            "bound": self.bound,
            "gap": self.gap,
            "feasible": self.feasible,
            "precisions": self.precisions,
        }


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Front(Displayed, Tabular):
    """Trade-offs from the largest use to the least.

    ``device`` is None for a front against time; ``reused`` counts the points that came from the cache.
    """

    problem: Problem
    device: str | None
    method: str
    points: tuple[TradeOff, ...]
    reused: int = 0

    def __len__(self) -> int:
        return len(self.points)

    @property
    def against(self) -> str:
        """What is traded: ``"latency"`` or ``"memory"``."""
        return "latency" if self.device is None else "memory"

    @property
    def limit(self) -> int:
        """The problem's own limit on the use, in ns or KiB."""
        problem = self.problem
        return problem.latency_limit_ns if self.device is None else problem.device(self.device).memory_limit_kib

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "format": FRONT_FORMAT,
            "problem": self.problem.name,
            "against": self.against,
            "device": self.device,
            "method": self.method,
            "reused_points": self.reused,
            "points": [point.to_json() for point in self.points],
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON file, whole or not at all."""
        write_json(path, self.to_json())


def pareto_front(
    problem: Problem,
    against: str = "latency",
    *,
    device: str | None = None,
    method: str = "greedy",
    points: int | None = 30,
    cache: str | os.PathLike[str] | None = None,
    progress: Callable[[int, int, int], None] | None = None,
) -> Front:
    """Find plans that trade sensitivity for time or memory; each reuses the work of the one before.

    The front is empty if no plan keeps the other limits.

    Args:
        problem: The problem; its own limit on the time, or on the memory, is ignored.
        against: ``"latency"`` or ``"memory"``.
        device: Device type of the memory; needed where several are planned.
        method: ``"greedy"``, or ``"exact"`` to prove every point.
        points: Number of limits to try; None for every point of the front (against latency only).
        cache: Folder in which points are kept, so that an interrupted front resumes; None keeps them nowhere.
        progress: Called with the number of limits tried, their total (0: not known) and the number of cached ones.

    Raises:
        UnsupportedError: An option has a value that is not allowed.
        SolverError: A plan is not what the front claims of it.
        KeyboardInterrupt: The text says what the cache kept.

    Source: the epsilon-constraint method, see `qsync_opt.formulations.training.front`.
    """
    if method not in GAPS:
        raise UnsupportedError(f"method of a front is {method!r}, but allowed are {', '.join(GAPS)}")
    device = _device(problem, against, device, points)
    search = system("training").search  # formulations are reached by name only
    store = FrontCache(None if cache is None else Path(cache), problem, GAPS[method], search("front point"))
    options = {
        "points": points,
        "gap": GAPS[method],
        "store": store,
        "progress": None if progress is None else lambda done, total: progress(done, total, store.num_reused),
    }
    try:
        where, arguments = ("latency front", ()) if device is None else ("memory front", (device,))
        claims = search(where)(problem, *arguments, **options)
    except KeyboardInterrupt:
        kept = f"{store.num_new + store.num_reused} points are kept in {cache}; the same call goes on from there"
        raise KeyboardInterrupt("no point is kept, there was no cache" if cache is None else kept) from None
    checked = tuple(_checked(problem, point, device) for point in claims)
    return Front(problem=problem, device=device, method=method, points=checked, reused=store.num_reused)


def _device(problem: Problem, against: str, device: str | None, points: int | None) -> str | None:
    """The device type of a front against memory, or None for time."""
    if against not in ("latency", "memory"):
        raise UnsupportedError(f"a front against {against!r} is not known; allowed are latency and memory")
    if against == "latency":
        if device is not None:
            raise UnsupportedError(
                f"device {device!r} is for a front against memory; time is that of all device types, leave it out"
            )
        return None
    if points is None:
        raise UnsupportedError("every point there is can be had against latency only; give a number of points")
    names = [planned.name for planned in problem.devices]
    if device is not None:
        return problem.device(device).name
    if len(names) > 1:
        raise UnsupportedError(
            f"a front against memory is that of one device type; the problem has {', '.join(names)}; name one of them "
            "(--device NAME)"
        )
    return names[0]


def _checked(problem: Problem, point: Any, device: str | None) -> TradeOff:
    """A point as its plan evaluates to, which must agree with the claim."""
    evaluation = evaluate(problem, point.plan)
    agrees = (
        evaluation.iteration_ns == point.iteration_ns
        and evaluation.memory_kib == dict(point.memory_kib)
        and abs(evaluation.objective - point.objective) <= AGREEMENT * max(abs(evaluation.objective), 1e-300)
    )
    if not agrees:
        raise SolverError(
            f"the front claims {point.iteration_ns} ns and sensitivity {point.objective!r} for a plan that takes "
            f"{evaluation.iteration_ns} ns and has {evaluation.objective!r}; if it came from the cache, empty that "
            "folder"
        )
    return TradeOff(
        use=evaluation.iteration_ns if device is None else evaluation.memory_kib[device],
        iteration_ns=evaluation.iteration_ns,
        memory_kib=MappingProxyType(evaluation.memory_kib),
        objective=evaluation.objective,
        bound=point.bound,
        feasible=evaluation.feasible,
        plan=point.plan,
    )


class FrontCache:
    """Points of one problem and gap, one per file: a `qsync_opt.formulations.training.front.PointStore`.

    ``folder`` None keeps them for this process only; any change of the problem makes other files. ``kind`` is the class
    of the points.

    Raises:
        ProblemError: The folder cannot be created.
    """

    def __init__(self, folder: Path | None, problem: Problem, gap: float, kind: Any) -> None:
        text = json.dumps(problem.to_json(), sort_keys=True)
        environment = {
            "what": "front",
            "problem": hashlib.sha256(text.encode()).hexdigest(),
            "gap": gap,
            "version": __version__,
        }
        self._cache = MeasurementCache(folder, environment)
        self._kind = kind
        self.num_reused = 0
        self.num_new = 0

    def get(self, latency_limit_ns: int, memory_limits_kib: Mapping[str, int]) -> tuple[Any] | None:
        """See `PointStore.get`. An entry that cannot be used counts as unknown."""
        data = self._cache.get(front_key(latency_limit_ns, memory_limits_kib))
        if data is None:
            return None
        try:
            point = None if data.get("point") is None else decode(self._kind, data["point"], "cached point")
        except ProblemError as failure:
            _LOGGER.warning("seeking again a point whose entry in the cache is unusable: %s", failure)
            return None
        self.num_reused += 1
        return (point,)

    def put(self, latency_limit_ns: int, memory_limits_kib: Mapping[str, int], point: Any) -> None:
        """See `PointStore.put`."""
        data = {"point": None if point is None else encode(point)}
        self._cache.put(front_key(latency_limit_ns, memory_limits_kib), data)
        self.num_new += 1


def front_key(latency_limit_ns: int, memory_limits_kib: Mapping[str, int]) -> str:
    """Key, in the cache, of the point under these limits."""
    return json.dumps([latency_limit_ns, sorted(memory_limits_kib.items())])
