"""Explanation of infeasibility: the limits that clash, the least values that could be met, the operators at fault."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from qsync_opt.formulations.assignment import QUICK_PASSES, BoundAndFix, Effort, Ints
from qsync_opt.formulations.training.collapsed import Collapsed, collapse
from qsync_opt.formulations.training.latency import least_latency, row_as_objective
from qsync_opt.formulations.training.tables import peers_ns
from qsync_opt.training import NO_LIMIT_NS, Problem, ProblemDevice

_SHOWN = 3
"""Operators named as those that force a limit."""
_EFFORT = Effort(passes=QUICK_PASSES, max_nodes=6)
"""How hard each search for a least value tries: an explanation must not take longer than the answer."""


def prove_infeasible(problem: Problem, device: ProblemDevice, deadline: float) -> str | None:
    """Prove that a device type has no plan within its limits, and explain it as `explain` does.

    None if there is a plan, or nothing was settled before ``deadline`` (a ``time.monotonic()`` value).

    Source: ours.
    """
    if peers_ns(problem) > problem.latency_limit_ns:
        return explain(problem, None, deadline)
    collapsed = collapse(problem, device)
    model = collapsed.model
    no_objective = replace(model, objective_Z=np.zeros(len(model.objective_Z)))
    outcome = BoundAndFix(no_objective).solve(Effort(), deadline=deadline)
    return explain(problem, collapsed, deadline) if outcome.proved_infeasible else None


def explain(problem: Problem, collapsed: Collapsed | None, deadline: float) -> str:
    """Explain why a device type has no plan.

    Args:
        problem: The problem.
        collapsed: The device type that has none; None if communication alone breaks the latency limit.
        deadline: ``time.monotonic()`` value at which to stop looking for least values.

    Returns:
        One line: the limits that clash, the least value of each that could be met, and the operators that force it.

    Source: ours.
    """
    limit_ns, floor_ns = problem.latency_limit_ns, peers_ns(problem)
    if collapsed is None or floor_ns > limit_ns:
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
            + _largest(collapsed, labels, by_memory=True)
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
    return text + _largest(collapsed, fastest, by_memory=False)


def _between(low: float, high: float, unit: str) -> str:
    if low >= high:
        return f"{int(high)} {unit}"
    best = f", the best found is {int(high)} {unit}" if high < math.inf else ""
    return f"at least {int(low)} {unit} (not settled further{best})"


def _largest(collapsed: Collapsed, labels_N: Ints | None, *, by_memory: bool) -> str:
    if labels_N is None:
        return ""
    precisions = collapsed.precisions(labels_N)
    tables, unit = collapsed.tables, "KiB" if by_memory else "ns"
    amounts_OP = tables.memory_OP if by_memory else tables.forward_OP + tables.backward_OP
    own = amounts_OP[np.arange(len(precisions)), precisions]
    formats = tuple(collapsed.problem.formats)
    names = ", ".join(
        f"{collapsed.graph.names[i]!r} ({own[i]} {unit} at {formats[int(precisions[i])]})"
        for i in np.argsort(-own, kind="stable")[:_SHOWN].tolist()
        if own[i]
    )
    return f"; even there most is taken by {names}" if names else ""


def _least_memory(collapsed: Collapsed, limit_ns: int, deadline: float) -> tuple[float, float, Ints | None]:
    """Bounds of the least memory within a latency limit, and a plan; infinite if no plan keeps the limit."""
    model = collapsed.under(limit_ns, 0).model
    # The memory row becomes the objective; its constant part was subtracted from the right-hand side.
    constant = -int(model.limits_R[-1])
    memory_model = replace(
        model, objective_Z=row_as_objective(model, -1), rows_RS=model.rows_RS[:-1], limits_R=model.limits_R[:-1]
    )
    outcome = BoundAndFix(memory_model).solve(replace(_EFFORT, offset=float(constant)), deadline=deadline)
    if outcome.proved_infeasible:
        return math.inf, math.inf, None
    if outcome.labels_N is None:
        return max(0.0, outcome.bound + constant), math.inf, None
    value = round(outcome.objective) + constant
    if outcome.bound == -math.inf:
        return 0.0, value, outcome.labels_N
    bound = math.ceil(outcome.bound + constant - 1e-2 - 1e-9 * abs(value))  # amounts are whole
    return min(bound, value), value, outcome.labels_N
