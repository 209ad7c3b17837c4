"""Why is there no plan? Which limits clash on which device type, what could be met, and which operators force it."""

from __future__ import annotations

import math

import numpy as np

from qsync_opt.formulations.assignment import QUICK_PASSES, BoundAndFix, Effort, Ints
from qsync_opt.formulations.training.collapsed import Collapsed, collapse
from qsync_opt.formulations.training.latency import least_latency, row_as_objective, with_objective
from qsync_opt.training import NO_LIMIT_NS, Problem

_SHOWN = 3
"""Operators named as those that force a limit."""
_PASSES, _NODES = QUICK_PASSES, 6
"""How hard each search for a least value tries: an explanation must not take longer than the answer."""
_EFFORT = Effort(passes=_PASSES, max_nodes=_NODES)


def explain(problem: Problem, collapsed: Collapsed | None, deadline: float) -> str:
    """Say why a device type has no plan.

    Args:
        problem: The problem.
        collapsed: The device type that has none; None if communication alone breaks the latency limit.
        deadline: ``time.monotonic()`` value at which to stop looking for least values.

    Returns:
        One line: the limits that clash, the least value of each that could be met, and the operators that force it.

    Source: ours.
    """
    limit_ns = problem.latency_limit_ns
    if collapsed is None or collapsed.rows.floor_ns > limit_ns:
        floor_ns = _floor(problem, collapsed)
        return (
            f"the latency limit of {limit_ns} ns cannot be met by any plan: the devices of fixed precision, the "
            f"all-reduces and the optimizer alone take {floor_ns} ns, the least value that could be met"
        )
    device = collapsed.device
    memory, least_kib, labels = _least_memory(collapsed, NO_LIMIT_NS, deadline)
    low, high, fastest = math.inf, math.inf, None
    if memory <= device.memory_limit_kib:
        low, high, fastest = least_latency(collapsed, deadline, _EFFORT)
    if low == math.inf:  # memory alone forbids every plan, whether or not its least value was found in time
        memory = max(memory, device.memory_limit_kib + 1)
        return (
            f"the memory limit of device {device.name!r}, {device.memory_limit_kib} KiB, cannot be met by any plan; "
            f"the least value that could be met is {_between(memory, least_kib, 'KiB')}"
            + _forced(collapsed, labels, by_memory=True)
        )
    text = (
        f"the latency limit of {limit_ns} ns cannot be met on device {device.name!r} within its memory limit of "
        f"{device.memory_limit_kib} KiB; the least value that could be met is {_between(low, high, 'ns')}"
    )
    memory, least_kib, _ = _least_memory(collapsed, limit_ns, deadline)
    if memory < math.inf:
        text += f" (or keep it, and allow {_between(memory, least_kib, 'KiB')} of memory)"
    else:
        text += " (no amount of memory helps)"
    return text + _forced(collapsed, fastest, by_memory=False)


def _floor(problem: Problem, collapsed: Collapsed | None) -> int:
    from qsync_opt.formulations.training.tables import graph_tables, latency_rows

    return (collapsed.rows if collapsed else latency_rows(problem, graph_tables(problem), 0)).floor_ns


def _between(low: float, high: float, unit: str) -> str:
    if low >= high:
        return f"{int(high)} {unit}"
    best = f", the best found is {int(high)} {unit}" if high < math.inf else ""
    return f"at least {int(low)} {unit} (not settled further{best})"


def _forced(collapsed: Collapsed, labels_N: Ints | None, *, by_memory: bool) -> str:
    """Name the operators that take most of the limit even in the least plan."""
    if labels_N is None:
        return ""
    precisions = collapsed.precisions(labels_N)
    rows = np.arange(len(precisions))
    tables = collapsed.tables
    spent = tables.memory_OP if by_memory else tables.forward_OP + tables.backward_OP
    own = spent[rows, precisions]
    worst = np.argsort(-own, kind="stable")[:_SHOWN].tolist()
    unit = "KiB" if by_memory else "ns"
    formats = tuple(collapsed.problem.formats)
    names = ", ".join(
        f"{collapsed.graph.names[i]!r} ({own[i]} {unit} at {formats[int(precisions[i])]})" for i in worst if own[i]
    )
    return f"; even there most is taken by {names}" if names else ""


def _least_memory(collapsed: Collapsed, limit_ns: int, deadline: float) -> tuple[float, float, Ints | None]:
    """Bounds of the least memory within a latency limit, and a plan; infinite if no plan keeps the limit."""
    problem, device = collapsed.problem, collapsed.device
    loose = collapse(
        problem, device, graph=collapsed.graph, tables=collapsed.tables, latency_limit_ns=limit_ns, memory_limit_kib=0
    )
    model = loose.model
    # The memory row becomes the objective; its constant part is what was taken off the right-hand side.
    constant = -int(model.limits_R[-1])
    cost = row_as_objective(model, -1)
    outcome = BoundAndFix(with_objective(model, cost, model.rows_RS[:-1], model.limits_R[:-1])).solve(
        Effort(passes=_PASSES, max_nodes=_NODES, offset=float(constant)), deadline=deadline
    )
    if outcome.proved_infeasible:
        return math.inf, math.inf, None
    if outcome.labels_N is None:
        return max(0.0, outcome.bound + constant), math.inf, None
    value = round(outcome.objective) + constant
    if outcome.bound == -math.inf:
        return 0.0, value, outcome.labels_N
    bound = math.ceil(outcome.bound + constant - 1e-2 - 1e-9 * abs(value))  # amounts are whole
    return min(bound, value), value, outcome.labels_N
