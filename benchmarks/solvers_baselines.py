"""What others would do: a ratio greedy without prices, and rounding of the linear relaxation.

Both return plans of the same problem as the package's own methods, and are evaluated by the same code.
"""

from __future__ import annotations

import heapq
import math
import time
from dataclasses import dataclass
from typing import Any

from qsync_opt.errors import SolverError
from qsync_opt.formulations.linear import LinearModel
from qsync_opt.formulations.training import DeviceState, Move, adjustable_positions, fast_start, keeps_limits, recover
from qsync_opt.formulations.training.ilp import Units, build_assignment, linearize, read_back
from qsync_opt.training import Problem, ProblemDevice

_OBJECTIVE_SCALE = 1e4
_ROW_SCALE = 1e3
_REPAIRS = 20


@dataclass(slots=True)
class Found:
    """Choices per device type, None where no plan was found; a lower bound if the method has one."""

    devices: dict[str, dict[str, str]] | None
    bound: float | None = None


def ratio_greedy(problem: Problem, deadline: float) -> Found:
    """Raise where sensitivity falls most per use of the limits' slack, until nothing more fits.

    The use of a change is its added compute time over the slack of the latency limit plus its added memory over the
    slack of the memory limit, both at the start: the usual rule for multiple-choice knapsacks, no prices. Ratios are
    recomputed when an entry comes up, because casts change with the neighbours.
    """
    devices = {}
    for device in problem.devices:
        state = fast_start(problem, device, deadline)
        if not keeps_limits(state):
            return Found(None)
        _raise_by_ratio(problem, state, deadline)
        devices[device.name] = state.choices()
    return Found(devices)


def _raise_by_ratio(problem: Problem, state: DeviceState, deadline: float) -> None:
    slack_ns = max(1, problem.latency_limit_ns - state.iteration_ns)
    slack_kib = max(1, state.device.memory_limit_kib - state.memory_kib)

    def trial(position: int, precision: str) -> tuple[float, list[Move]]:
        """Negative ratio of a change, which is made; infinite if it does not help or breaks a limit."""
        time_ns, memory_kib = state.compute_ns, state.memory_kib
        moves = state.change(position, precision)
        gain = -state.sensitivity_change(moves)
        if gain <= 0 or not keeps_limits(state):
            return math.inf, moves
        use = max(0, state.compute_ns - time_ns) / slack_ns + max(0, state.memory_kib - memory_kib) / slack_kib
        return -gain / max(use, 1e-12), moves

    heap: list[tuple[float, int, str]] = []

    def offer(position: int) -> None:
        for precision in state.device.operators[problem.operators[position].name]:
            if precision != state.precisions[position]:
                ratio, moves = trial(position, precision)
                state.undo(moves)
                if ratio < math.inf:
                    heapq.heappush(heap, (ratio, position, precision))

    for position in adjustable_positions(problem, state.device):
        offer(position)
    while heap and time.monotonic() < deadline:
        _, position, precision = heapq.heappop(heap)
        if state.precisions[position] == precision:
            continue
        ratio, moves = trial(position, precision)
        if ratio == math.inf:
            state.undo(moves)
        elif heap and ratio > heap[0][0]:
            state.undo(moves)
            heapq.heappush(heap, (ratio, position, precision))
        else:
            offer(position)


def lp_rounding(problem: Problem, deadline: float) -> Found:
    """Solve the linear relaxation of the compact program by GLOP, take each operator's largest share, repair and fill.

    Repair takes the change that costs least sensitivity per excess removed; fill is the paper's recovery, repeated.
    """
    devices, bounds = {}, []
    for device in problem.devices:
        choices, bound = _relaxed(problem, device, deadline)
        bounds.append(bound)
        state = DeviceState(problem, device, choices)
        _repair(problem, state, deadline)
        if not keeps_limits(state):
            return Found(None, math.fsum(bounds))
        recover(state, passes=None, deadline=deadline)
        devices[device.name] = state.choices()
    return Found(devices, math.fsum(bounds))


def _relaxed(problem: Problem, device: ProblemDevice, deadline: float) -> tuple[dict[str, str], float]:
    assignment = build_assignment(problem, device)
    highest = assignment.constant_cost + sum(float(node.cost_S.max()) for node in assignment.nodes)
    units = Units(
        cost=max(highest, 1e-300) / _OBJECTIVE_SCALE,
        time_ns=max(1.0, problem.latency_limit_ns / _ROW_SCALE),
        memory_kib=max(1.0, device.memory_limit_kib / _ROW_SCALE),
    )
    program = linearize(assignment, units=units)
    values, objective = _solve_lp(program.model, max(0.1, deadline - time.monotonic()))
    return read_back(problem, device, program.labels(values)), objective * units.cost


def _solve_lp(model: LinearModel, time_limit_s: float) -> tuple[list[float], float]:
    """Values and objective of the relaxation."""
    import datetime

    from ortools.math_opt.python import mathopt

    native = mathopt.Model(name=model.name)
    variables = [native.add_variable(lb=c.lower, ub=c.upper) for c in model.columns]
    for row in model.rows:
        constraint = native.add_linear_constraint(lb=row.lower, ub=row.upper)
        for index, value in row.terms.items():
            constraint.set_coefficient(variables[index], value)
    for variable, column in zip(variables, model.columns, strict=True):
        native.objective.set_linear_coefficient(variable, column.cost)
    native.objective.offset = model.constant
    parameters = mathopt.SolveParameters(threads=1, time_limit=datetime.timedelta(seconds=time_limit_s))
    result = mathopt.solve(native, mathopt.SolverType.GLOP, params=parameters)
    if result.termination.reason is not mathopt.TerminationReason.OPTIMAL:
        raise SolverError(f"GLOP ended {result.termination.reason.name} on the relaxation of {model.name!r}")
    return result.variable_values(variables), result.objective_value()


def _repair(problem: Problem, state: DeviceState, deadline: float) -> None:
    """Take the changes that cost least sensitivity per excess removed, in sorted sweeps, until the limits hold."""
    positions = adjustable_positions(problem, state.device)
    limit_ns, limit_kib = max(1, problem.latency_limit_ns), max(1, state.device.memory_limit_kib)

    def excess() -> float:
        over_ns = max(0, state.iteration_ns - problem.latency_limit_ns) / limit_ns
        return over_ns + max(0, state.memory_kib - state.device.memory_limit_kib) / limit_kib

    for _ in range(_REPAIRS):
        before = excess()
        if not before or time.monotonic() > deadline:
            return
        ranked = []
        for position in positions:
            for precision in state.device.operators[problem.operators[position].name]:
                if precision == state.precisions[position]:
                    continue
                moves = state.change(position, precision)
                removed, loss = before - excess(), state.sensitivity_change(moves)
                state.undo(moves)
                if removed > 0:
                    ranked.append((max(loss, 0.0) / removed, position, precision))
        for _, position, precision in sorted(ranked):
            now = excess()
            if not now:
                return
            moves = state.change(position, precision)
            if excess() >= now:
                state.undo(moves)


BASELINES: dict[str, Any] = {"ratio": ratio_greedy, "lp-rounding": lp_rounding}
"""By the names in the results."""
