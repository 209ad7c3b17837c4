"""Points of a front on disk, so that an interrupted front goes on where it stopped and a repeated one costs nothing."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qsync_opt import __version__
from qsync_opt.errors import ProblemError
from qsync_opt.io.cache import MeasurementCache
from qsync_opt.io.codec import Fields
from qsync_opt.training.plan import plan_from_json
from qsync_opt.training.problem import Problem

_LOGGER = logging.getLogger(__name__)


class FrontCache:
    """Points of one problem and gap, each in a file of its own; see `qsync_opt.formulations.training.front.PointStore`.

    Args:
        folder: Where to keep them; None keeps them for this process only.
        problem: The problem; any change of it makes other files.
        gap: Relative gap of the points.
        make_point: Builds a point from its fields.

    Raises:
        ProblemError: The folder cannot be made.
    """

    def __init__(self, folder: Path | None, problem: Problem, gap: float, make_point: Any) -> None:
        text = json.dumps(problem.to_json(), sort_keys=True)
        environment = {
            "what": "front",
            "problem": hashlib.sha256(text.encode()).hexdigest(),
            "gap": gap,
            "version": __version__,
        }
        self._cache = MeasurementCache(folder, environment)
        self._make_point = make_point
        self.num_reused = 0
        self.num_new = 0

    def get(self, latency_limit_ns: int, memory_limits_kib: Mapping[str, int]) -> tuple[Any] | None:
        """The known answer; see `PointStore.get`. An entry that cannot be used counts as unknown."""
        data = self._cache.get(_key(latency_limit_ns, memory_limits_kib))
        if data is None:
            return None
        try:
            point = None if data.get("point") is None else self._read(Fields(data["point"], "cached point"))
        except ProblemError as failure:
            _LOGGER.warning("seeking again a point whose entry in the cache is unusable: %s", failure)
            return None
        self.num_reused += 1
        return (point,)

    def put(self, latency_limit_ns: int, memory_limits_kib: Mapping[str, int], point: Any) -> None:
        """Keep an answer; see `PointStore.put`."""
        self._cache.put(
            _key(latency_limit_ns, memory_limits_kib),
            {
                "point": None
                if point is None
                else {
                    "limit": point.limit,
                    "objective": point.objective,
                    "bound": point.bound,
                    "iteration_ns": point.iteration_ns,
                    "memory_kib": dict(point.memory_kib),
                    "plan": point.plan.to_json(),
                }
            },
        )
        self.num_new += 1

    def _read(self, fields: Fields) -> Any:
        memory = Fields(fields.take("memory_kib"), "cached point: memory_kib")
        return self._make_point(
            limit=fields.integer("limit"),
            objective=fields.number("objective"),
            bound=fields.number("bound"),
            iteration_ns=fields.integer("iteration_ns"),
            memory_kib={name: memory.integer(name) for name in memory},
            plan=plan_from_json(fields.take("plan")),
        )


def _key(latency_limit_ns: int, memory_limits_kib: Mapping[str, int]) -> str:
    return json.dumps([latency_limit_ns, sorted(memory_limits_kib.items())])
