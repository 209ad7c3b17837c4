"""Least iteration time of one device type within its memory: bound and fix with time as the objective.

The iteration time is a maximum over latency rows, so one row at a time is minimised while all rows keep a common limit.
Where the row minimised is the largest in the resulting plan, that plan is the fastest; where not, the limit is halved
towards the bound. Every plan moves the upper end, every bound and every proof of infeasibility the lower.

Axes: N nodes, Z table entries, R limit rows.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np

from qsync_opt.formulations.assignment import AssignmentModel, BoundAndFix, Effort, Floats, Ints, Relaxation, relax
from qsync_opt.formulations.training.collapsed import Collapsed
from qsync_opt.formulations.training.tables import peers_ns

_STEPS = 80
"""More than the bits of any time."""


def row_as_objective(model: AssignmentModel, row: int) -> Floats:
    """What every table entry adds to a limit row, shape (Z,)."""
    cost_Z = np.zeros(len(model.objective_Z))
    np.add.at(cost_Z, model.entry_T, (model.value_T * model.rows_RS[row, model.load_T]).astype(np.float64))
    return cost_Z


def least_latency(
    collapsed: Collapsed, deadline: float, effort: Effort, *, relaxation: Relaxation | None = None
) -> tuple[float, float, Ints | None]:
    """Bounds of the least iteration time of one device type within its memory limit, and a plan.

    Args:
        collapsed: The device type; its latency limit is set aside.
        deadline: ``time.monotonic()`` value at which to stop.
        effort: How hard to search at every step; its ``gap`` is the precision of the result.
        relaxation: What to bound ``collapsed.model`` with, if it is at hand.

    Returns:
        A time in nanoseconds that no plan is below, the time of the best plan, and that plan's labelling. Both times
        are infinite where no plan keeps the memory limit.

    Source: ours.
    """
    if collapsed.latency_limit_ns:
        # At a limit of zero no row is left out for being slack, so these rows measure every plan.
        collapsed, relaxation = collapsed.under(0, collapsed.memory_limit_kib), None
    model, floor_ns = collapsed.model, float(peers_ns(collapsed.problem))
    relaxation = relaxation or relax(model)
    low, high, best = floor_ns, math.inf, None
    row, limit = max(len(model.limits_R) - 2, 0), math.inf
    for _ in range(_STEPS):
        rows_RS, limits_R = model.rows_RS, model.limits_R.copy()
        if limit == math.inf:
            rows_RS, limits_R = rows_RS[-1:], limits_R[-1:]  # memory alone
        else:
            limits_R[:-1] += int(limit)
        cost_Z = row_as_objective(model, row) if len(model.limits_R) > 1 else np.zeros(len(model.objective_Z))
        timed = replace(model, objective_Z=cost_Z, rows_RS=rows_RS, limits_R=limits_R)
        outcome = BoundAndFix(timed, relaxation.with_model(timed)).solve(effort, start=best, deadline=deadline)
        if outcome.proved_infeasible:
            if limit == math.inf:
                return math.inf, math.inf, None
            low = max(low, limit + 1)
        else:
            bound = outcome.bound - float(model.limits_R[row]) if len(model.limits_R) > 1 else -math.inf
            low = max(low, min(_rounded_up(bound), limit + 1))
            if outcome.labels_N is None:
                break
            times_R = model.excess(outcome.labels_N)[:-1]
            reached = max(floor_ns, float(times_R.max(initial=0)))
            if reached < high:
                best, high, row = outcome.labels_N, reached, int(times_R.argmax()) if len(times_R) else 0
        if high - low <= effort.gap * high or time.monotonic() > deadline:
            break
        limit = min((low + high) // 2, high - 1)
    return min(low, high), high, best


def _rounded_up(bound: float) -> float:
    """The next whole time, if it is certain despite rounding."""
    return float(math.ceil(bound - 1e-2 - 1e-9 * abs(bound))) if math.isfinite(bound) else bound
