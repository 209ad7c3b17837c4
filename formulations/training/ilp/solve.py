"""The method ``ilp``: the integer program of each device type, scaled around a greedy plan.

A solver's answer is evaluated in exact integers before it counts.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from qsync_opt.errors import SolverError
from qsync_opt.formulations.linear import LinearOptions, LinearResult, LinearSolver, LinearStatus, required_solver
from qsync_opt.formulations.training.ilp.assignment import MEMORY, Assignment, Choice, build_assignment, read_back
from qsync_opt.formulations.training.ilp.program import AssignmentProgram, Units, linearize
from qsync_opt.formulations.training.infeasible import prove_infeasible
from qsync_opt.formulations.training.paper_greedy import fast_start, keeps_limits, recover
from qsync_opt.formulations.training.tables import peers_ns
from qsync_opt.training import PROOF_GAP, Answer, Problem, ProblemDevice, SolveOptions, TerminationStatus, relative_gap

_OBJECTIVE_SCALE = 1e3
"""The incumbent's cost in units of the objective: solvers' absolute gaps of about 1e-6 are then 1e-9 of it."""
_FALL = 1e3
"""When the incumbent falls by a larger factor, the scale was wrong and the solve is repeated."""
_START_SHARE = 0.1
"""Largest share of the time limit for the search of a plan to scale by."""
_ROW_SCALE = 1e3
"""Size of the rows, so that solvers' tolerances of 1e-9 stay below one nanosecond or KiB."""
_WHOLE_COST_SCALE = 1e13
"""Sum of the largest costs where only whole coefficients are allowed: 1e6 gave wrong optima, and 2**53 must not be
reached."""
_TIGHTENINGS = 3
"""Most repetitions with tightened limits when a solver's tolerance lets a plan exceed them."""
_UNEXPLAINED = "the solver proved that no plan keeps the limits; there was no time to find out which limit is at fault"


@dataclass(slots=True)
class _DeviceAnswer:
    """State of one device; ``labels`` and ``cost`` are None without a plan, ``bound`` is always valid.

    ``cost`` and ``bound`` are measured from ``lowest``, which every plan pays: it may be so large that they would
    vanish in its rounding.
    """

    status: LinearStatus
    lowest: float
    labels: Mapping[str, str] | None = None
    cost: float | None = None
    bound: float = 0.0
    build_seconds: float = 0.0
    solve_seconds: float = 0.0


class IlpFormulation:
    """The integer linear program, solved to a proved optimum, or to a gap or time limit.

    Source: `program`; the reductions around an incumbent are ours.
    """

    def solve(self, problem: Problem, options: SolveOptions) -> Answer:
        """Plan every device type; see `Formulation.solve`."""
        started = time.monotonic()
        deadline = math.inf if options.time_limit_s is None else started + options.time_limit_s
        solver = required_solver(options.solver, "method 'ilp'")
        answers: list[_DeviceAnswer] = []
        # A device type that has no plan.
        without = problem.devices[0] if peers_ns(problem) > problem.latency_limit_ns else None
        for left, device in zip(range(len(problem.devices), 0, -1), problem.devices, strict=True):
            if without is None:
                share = math.inf if math.isinf(deadline) else max(0.0, deadline - time.monotonic()) / left
                answers.append(_solve_device(problem, device, solver, options.gap, time.monotonic() + share))
                without = device if answers[-1].status is LinearStatus.INFEASIBLE else None
        if without is None:
            answer = _merge(problem, answers, options.gap)
        else:
            reason = prove_infeasible(problem, without, deadline) or _UNEXPLAINED
            answer = Answer(termination=TerminationStatus.INFEASIBLE, reason=reason)
        return replace(
            answer,
            solver=f"{solver.name} {solver.version}",
            build_seconds=sum(each.build_seconds for each in answers),
            solve_seconds=sum(each.solve_seconds for each in answers),
        )


def _merge(problem: Problem, answers: list[_DeviceAnswer], gap: float) -> Answer:
    """Device types share only the latency limit, so objectives and bounds add up."""
    bound = math.fsum(part for answer in answers for part in (answer.lowest, answer.bound))
    solved = all(answer.labels is not None for answer in answers)
    objective = (
        math.fsum(part for answer in answers for part in (answer.lowest, answer.cost or 0.0)) if solved else None
    )
    reached = relative_gap(objective, bound)
    if reached is not None and reached <= PROOF_GAP:
        termination = TerminationStatus.OPTIMAL
    elif all(answer.status is LinearStatus.OPTIMAL for answer in answers) or (reached is not None and reached <= gap):
        termination = TerminationStatus.FEASIBLE
    elif any(answer.status is LinearStatus.ERROR for answer in answers) and not solved:
        termination = TerminationStatus.ERROR
    else:
        termination = TerminationStatus.TIME_LIMIT
    return Answer(
        termination=termination,
        devices={
            device.name: read_back(problem, device, dict(answer.labels or {}))
            for device, answer in zip(problem.devices, answers, strict=True)
        }
        if solved
        else None,
        objective=objective,
        bound=bound,
        reason=None if solved else "no plan within the limits was found in the time allowed, which proves nothing",
    )


def _solve_device(
    problem: Problem, device: ProblemDevice, solver: LinearSolver, gap: float, deadline: float
) -> _DeviceAnswer:
    started = time.monotonic()
    assignment = build_assignment(problem, device)
    shifted, lowest = _shift(assignment)
    answer = _DeviceAnswer(LinearStatus.LIMIT, lowest, build_seconds=time.monotonic() - started)
    started = time.monotonic()
    # On large problems the start could take all the time that the solver should have.
    start_by = started + _START_SHARE * max(0.0, deadline - started)
    state = fast_start(problem, device, start_by)
    if keeps_limits(state):
        recover(state, passes=None, deadline=start_by)
        chosen = state.choices()
        answer.labels = {node.name: chosen[node.name] for _, node in shifted.choices}
        answer.cost = shifted.cost(shifted.states(answer.labels))
    answer.solve_seconds = time.monotonic() - started
    while time.monotonic() < deadline:
        if answer.cost == 0.0:
            answer.status = LinearStatus.OPTIMAL  # nothing can be below every minimum
            return answer
        scale = _highest(shifted) if answer.cost is None else answer.cost
        left_s = deadline - time.monotonic()
        result = run(
            shifted,
            solver,
            cost_unit=max(scale / _OBJECTIVE_SCALE, sys.float_info.min),  # a share of the least float is 0
            allowed=_allowed(shifted, answer.cost),
            options=LinearOptions(time_limit_s=None if math.isinf(left_s) else left_s, relative_gap=gap),
        )
        if _add_result(answer, result, solver) or answer.cost is None or answer.cost * _FALL >= scale:
            return answer
    return answer


def _add_result(answer: _DeviceAnswer, result: Run, solver: LinearSolver) -> bool:
    """Add a solver's result; returns True if a repeated solve would not improve it."""
    answer.build_seconds += result.build_seconds
    answer.solve_seconds += result.solve_seconds
    answer.status = result.status
    if result.status in (LinearStatus.INFEASIBLE, LinearStatus.INFEASIBLE_OR_UNBOUNDED):
        if answer.labels is not None:
            raise SolverError(f"{solver.name} calls a problem infeasible ({result.native}) that has a plan at hand")
        answer.status = LinearStatus.INFEASIBLE  # costs are never negative, so it is not unbounded
        return True
    if result.status in (LinearStatus.UNBOUNDED, LinearStatus.ERROR):
        raise SolverError(f"{solver.name} failed: {result.native}; use another solver")
    if result.bound is not None:
        # Labels left out for costing more than the incumbent do not weaken the bound below the incumbent itself.
        ceiling = answer.cost if answer.cost is not None else math.inf
        answer.bound = max(answer.bound, min(result.bound, ceiling))
    if result.value is not None and (answer.cost is None or result.value < answer.cost):
        answer.labels, answer.cost = result.labels, result.value
    if answer.cost is not None:
        answer.bound = min(answer.bound, answer.cost)
    return result.status is not LinearStatus.OPTIMAL


def _shift(assignment: Assignment) -> tuple[Assignment, float]:
    """The assignment with every choice's least cost subtracted, and the sum of these costs.

    The scale of the objective then depends on the decisions alone, not on what every plan pays.
    """
    nodes = tuple(
        replace(node, cost_S=node.cost_S - node.cost_S.min()) if isinstance(node, Choice) else node
        for node in assignment.nodes
    )
    least = math.fsum([assignment.constant_cost, *(float(node.cost_S.min()) for _, node in assignment.choices)])
    return replace(assignment, nodes=nodes, constant_cost=0.0), least


def _highest(shifted: Assignment) -> float:
    return max((float(node.cost_S.max()) for node in shifted.nodes), default=0.0) or 1.0


def _allowed(shifted: Assignment, budget: float | None) -> dict[str, frozenset[str]] | None:
    """Labels that a plan better than the incumbent can take: any other label alone costs more than ``budget``."""
    if budget is None:
        return None
    most = budget * (1 + 1e-9)
    return {
        node.name: frozenset(label for label, own in zip(node.labels, node.cost_S, strict=True) if own <= most)
        for _, node in shifted.choices
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A solver's answer in the assignment's own units.

    ``labels`` keep every limit in exact integers. ``value`` is exact for them; ``bound`` is the solver's lower bound.
    ``labels`` and ``value`` are None together.
    """

    status: LinearStatus
    labels: Mapping[str, str] | None
    value: float | None
    bound: float | None
    native: str
    build_seconds: float
    solve_seconds: float


def run(
    assignment: Assignment,
    solver: LinearSolver,
    *,
    options: LinearOptions,
    cost_unit: float = 1.0,
    allowed: Mapping[str, frozenset[str]] | None = None,
) -> Run:
    """Solve an assignment.

    Args:
        assignment: The assignment.
        solver: The solver.
        options: The solver's limits.
        cost_unit: What cost one unit of the objective stands for.
        allowed: Labels that a choice may take.

    Returns:
        The answer. A plan that exceeds a limit within the solver's tolerance is never returned: the limit is tightened
        by the excess and the solve repeated; the bound remains that of the real limits.

    Raises:
        SolverError: The solver failed, or keeps returning plans that exceed the limits.
    """
    build_seconds = solve_seconds = 0.0
    bound: float | None = None
    tightened = assignment
    for attempt in range(_TIGHTENINGS + 1):
        started = time.monotonic()
        program = _program(tightened, solver, cost_unit, allowed)
        built = time.monotonic()
        result = solver.solve(program.model, options)
        build_seconds += built - started
        solve_seconds += time.monotonic() - built
        if attempt == 0 and result.bound is not None:
            bound = result.bound * program.units.cost
        labels, value, excess = _read(assignment, program, result)
        if not excess:
            return Run(
                status=result.status,
                labels=labels,
                value=value,
                bound=bound,
                native=result.native,
                build_seconds=build_seconds,
                solve_seconds=solve_seconds,
            )
        limits = tuple(replace(limit, bound=limit.bound - 2 * excess.get(limit.name, 0)) for limit in tightened.limits)
        tightened = replace(tightened, limits=limits)
    over = ", ".join(f"{name} by {amount}" for name, amount in excess.items())
    raise SolverError(
        f"{solver.name} keeps returning plans for {assignment.name!r} that exceed limits ({over}); use another solver"
    )


def _program(
    assignment: Assignment,
    solver: LinearSolver,
    cost_unit: float,
    allowed: Mapping[str, frozenset[str]] | None,
) -> AssignmentProgram:
    if not solver.continuous:
        total = assignment.constant_cost + sum(float(node.cost_S.max()) for node in assignment.nodes)
        units = Units(cost=max(total / _WHOLE_COST_SCALE, cost_unit * 1e-12))
        program = linearize(assignment, units=units, whole=True, allowed=allowed)
        # Rounding down keeps the bound valid: every column is at least 0.
        program.model.columns[:] = [replace(c, cost=float(math.floor(c.cost))) for c in program.model.columns]
        return program
    largest_R = np.abs(assignment.constant_R)
    for node in assignment.nodes:
        largest_R = largest_R + np.abs(node.load_SR).max(axis=0)
    units = Units(
        cost=cost_unit,
        time_ns=max(1.0, float(largest_R[MEMORY + 1 :].sum())) / _ROW_SCALE,
        memory_kib=max(1.0, float(largest_R[MEMORY])) / _ROW_SCALE,
    )
    return linearize(assignment, units=units, allowed=allowed)


def _read(
    assignment: Assignment, program: AssignmentProgram, result: LinearResult
) -> tuple[dict[str, str] | None, float | None, dict[str, int]]:
    """Labels, exact value, and by how much they exceed limits."""
    if result.values is None:
        return None, None, {}
    labels = program.labels(result.values)
    states = assignment.states(labels)
    excess = {limit.name: value for limit, value in assignment.excess(states).items() if value > 0}
    return labels, assignment.cost(states), excess
