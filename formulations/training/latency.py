"""Least iteration time of one device type within its memory: bound and fix with time as the objective.

The iteration time is a maximum over latency rows, so one row at a time is minimised while all rows keep a common limit.
Where the row minimised is the largest in the resulting plan, that plan is the fastest; where not, the limit is halved
towards the bound. Every plan moves the upper end, every bound and every proof of infeasibility the lower.

Axes: N nodes, Z table entries, R limit rows.
"""

from __future__ import annotations

import math
import time

import numpy as np

from qsync_opt.formulations.assignment import (
    AssignmentModel,
    BoundAndFix,
    Effort,
    Floats,
    Ints,
    Outcome,
    Relaxation,
    Whole,
    relax,
)
from qsync_opt.formulations.training.collapsed import Collapsed, collapse

_STEPS = 80
"""More than the bits of any time."""


def with_objective(model: AssignmentModel, cost_Z: Floats, rows_RS: Whole, limits_R: Ints) -> AssignmentModel:
    """The same graph and loads under another objective and other limits."""
    return AssignmentModel(
        sizes_N=model.sizes_N, edges_E2=model.edges_E2, objective_Z=cost_Z, allowed_Z=model.allowed_Z,
        pointer_Z1=model.pointer_Z1, load_T=model.load_T, value_T=model.value_T, rows_RS=rows_RS, limits_R=limits_R,
        derived=model.derived, wanted=model.wanted,
    )  # fmt: skip


def row_as_objective(model: AssignmentModel, row: int) -> Floats:
    """What every table entry adds to a limit row, shape (Z,)."""
    entry_T = np.repeat(np.arange(len(model.objective_Z)), np.diff(model.pointer_Z1))
    cost_Z = np.zeros(len(model.objective_Z))
    np.add.at(cost_Z, entry_T, (model.value_T * model.rows_RS[row, model.load_T]).astype(np.float64))
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
    tight = collapsed
    if collapsed.latency_limit_ns:
        # At a limit of zero no row is left out for being slack, so these rows measure every plan.
        tight = collapse(
            collapsed.problem, collapsed.device, graph=collapsed.graph, tables=collapsed.tables, latency_limit_ns=0
        )
        relaxation = None
    model = tight.model
    relaxation = relaxation or relax(model)
    low, high, best = float(tight.rows.floor_ns), math.inf, None
    row, limit = max(len(model.limits_R) - 2, 0), math.inf
    for _ in range(_STEPS):
        outcome = _least_row(model, relaxation, row, limit, best, effort, deadline)
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
            reached = max(float(tight.rows.floor_ns), float(times_R.max(initial=0)))
            if reached < high:
                best, high, row = outcome.labels_N, reached, int(times_R.argmax()) if len(times_R) else 0
        if high - low <= effort.gap * high or time.monotonic() > deadline:
            break
        limit = min((low + high) // 2, high - 1)
    return min(low, high), high, best


def _rounded_up(bound: float) -> float:
    """The next whole time, if it is certain despite rounding."""
    return float(math.ceil(bound - 1e-2 - 1e-9 * abs(bound))) if math.isfinite(bound) else bound


def _least_row(
    model: AssignmentModel,
    relaxation: Relaxation,
    row: int,
    limit: float,
    start: Ints | None,
    effort: Effort,
    deadline: float,
) -> Outcome:
    """Minimise one latency row while all keep ``limit``; an infinite limit leaves memory alone."""
    only_memory = limit == math.inf
    limits = model.limits_R[-1:] if only_memory else model.limits_R.copy()
    if not only_memory:
        limits[:-1] += int(limit)
    rows_RS = model.rows_RS[-1:] if only_memory else model.rows_RS
    cost_Z = row_as_objective(model, row) if len(model.limits_R) > 1 else np.zeros(len(model.objective_Z))
    timed = with_objective(model, cost_Z, rows_RS, limits)
    engine = BoundAndFix(timed, relaxation.with_model(timed))
    return engine.solve(effort, start=start, deadline=deadline)
