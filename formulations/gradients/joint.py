"""Joint plans: the assignment models of all device types side by side, and one more node for every bucket.

A device type alone is `training.collapse`'s model. Its latency rows say that the work up to the readiness of a bucket,
and the all-reduces from that bucket on, end in time: a bucket's node adds its scheme's time, beyond that of the fastest
scheme, to the rows of all buckets up to it. The result is an assignment model like any other: bound and fix
solves it with a certificate, and its linear program checks that.

Source: ours.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from qsync_opt.formulations.assignment import (
    PROOF,
    AssignmentModel,
    BoundAndFix,
    Effort,
    Ints,
    Outcome,
    Wanted,
    labels_at,
    linear_program,
)
from qsync_opt.formulations.linear import LinearOptions, LinearSolver, answer_of, required_solver, solve_in_units
from qsync_opt.formulations.training import Collapsed, collapse, exact_effort, graph_tables, greedy_effort
from qsync_opt.gradients import JointPlan, JointProblem, Plan, evaluate_joint, under_schemes
from qsync_opt.registry import Kind, create, default_solver
from qsync_opt.solving import Answer, SolveOptions, TerminationStatus, relative_gap, termination_of
from qsync_opt.training import Plan as PrecisionPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class _Joint:
    """The model, and what its labels stand for: each device type's nodes in turn, then the buckets."""

    problem: JointProblem
    devices: tuple[Collapsed, ...]
    names_KC: tuple[tuple[str, ...], ...]
    model: AssignmentModel
    constant: float

    def plan(self, labels_N: Ints) -> JointPlan:
        """The plan of a labelling."""
        choices, first = {}, 0
        for collapsed in self.devices:
            size = collapsed.model.num_nodes
            choices[collapsed.device.name] = collapsed.choices(labels_N[first : first + size])
            first += size
        schemes = {f"b{k}": self.names_KC[k][label] for k, label in enumerate(labels_N[first:].tolist())}
        return JointPlan(
            precisions=PrecisionPlan(problem=self.problem.training.name, devices=choices), schemes=Plan(schemes=schemes)
        )


def build_joint(problem: JointProblem) -> _Joint:
    """Write the joint problem as one assignment model."""
    fastest = [min(choice.time_ns for choice in own.values()) for own in problem.buckets]
    base = under_schemes(problem.training, fastest)
    graph = graph_tables(base)
    devices = tuple(collapse(base, device, graph=graph, all_rows=True) for device in base.devices)
    names_KC = tuple(tuple(own) for own in problem.buckets)
    models = [collapsed.model for collapsed in devices]
    num_buckets = len(problem.buckets)
    waits = [_buckets_of_rows(graph.bucket_O, num_buckets) for _ in devices]
    return _Joint(
        problem=problem,
        devices=devices,
        names_KC=names_KC,
        model=_side_by_side(problem, models, waits, fastest),
        constant=sum(collapsed.constant_objective for collapsed in devices),
    )


def _buckets_of_rows(bucket_O: Ints, num_buckets: int) -> Ints:
    """The first bucket whose all-reduce follows each latency row, in the order of `training.tables.latency_rows`."""
    waiting = {0: num_buckets}  # the end of backward waits for none
    for bucket in range(num_buckets):
        members = np.flatnonzero(bucket_O == bucket)
        if len(members):
            waiting[int(members[0])] = min(waiting.get(int(members[0]), num_buckets), bucket)
    return np.array([waiting[point] for point in sorted(waiting, reverse=True)], dtype=np.int64)


def _side_by_side(
    problem: JointProblem, models: list[AssignmentModel], waits: list[Ints], fastest: list[int]
) -> AssignmentModel:
    """One model of the device types' models and the buckets' nodes; loads of the buckets come last."""
    choices_KC = [list(own.values()) for own in problem.buckets]
    nodes = np.cumsum([0, *(model.num_nodes for model in models)])
    loads = np.cumsum([0, *(model.rows_RS.shape[1] for model in models)])
    num_loads = int(loads[-1])
    sizes = np.concatenate([*(model.sizes_N for model in models), [len(own) for own in choices_KC]]).astype(np.int64)
    # Entries of nodes, device type by device type, then of the buckets' nodes, then of edges.
    extra_times = [choice.time_ns - least for own, least in zip(choices_KC, fastest, strict=True) for choice in own]
    extra_loads = [num_loads + k for k, own in enumerate(choices_KC) for _ in own]
    objective: list[np.ndarray] = [model.objective_Z[: int(model.sizes_N.sum())] for model in models]
    objective.append(np.array([choice.variance for own in choices_KC for choice in own]))
    objective += [model.objective_Z[int(model.sizes_N.sum()) :] for model in models]
    allowed: list[np.ndarray] = [model.allowed_Z[: int(model.sizes_N.sum())] for model in models]
    allowed.append(np.ones(len(extra_times), dtype=np.bool_))
    allowed += [model.allowed_Z[int(model.sizes_N.sum()) :] for model in models]
    counts: list[np.ndarray] = []
    load_T: list[np.ndarray] = []
    value_T: list[np.ndarray] = []

    def add_terms(model: AssignmentModel, shift: int, begin: int, end: int) -> None:
        pointer = model.pointer_Z1
        counts.append(np.diff(pointer[begin : end + 1]))
        load_T.append(model.load_T[pointer[begin] : pointer[end]] + shift)
        value_T.append(model.value_T[pointer[begin] : pointer[end]])

    for model, shift in zip(models, loads, strict=False):
        add_terms(model, int(shift), 0, int(model.sizes_N.sum()))
    counts.append(np.ones(len(extra_times), dtype=np.int64))
    load_T.append(np.array(extra_loads, dtype=np.int64))
    value_T.append(np.array(extra_times, dtype=np.int64))
    for model, shift in zip(models, loads, strict=False):
        add_terms(model, int(shift), int(model.sizes_N.sum()), len(model.objective_Z))
    rows, limits = _rows(problem, models, waits, fastest, loads)
    return AssignmentModel(
        sizes_N=sizes,
        edges_E2=np.concatenate([model.edges_E2 + shift for model, shift in zip(models, nodes, strict=False)]),
        objective_Z=np.concatenate(objective),
        allowed_Z=np.concatenate(allowed),
        pointer_Z1=np.concatenate([[0], np.cumsum(np.concatenate(counts))]).astype(np.int64),
        load_T=np.concatenate(load_T).astype(np.int64),
        value_T=np.concatenate(value_T).astype(np.int64),
        rows_RS=rows,
        limits_R=limits,
        derived=tuple(
            replace(each, node=each.node + int(n), first=each.first + int(n), second=each.second + int(n))
            for model, n in zip(models, nodes, strict=False)
            for each in model.derived
        ),
        wanted=_wanted(models, nodes),
    )


def _rows(
    problem: JointProblem, models: list[AssignmentModel], waits: list[Ints], fastest: list[int], loads: Ints
) -> tuple[Ints, Ints]:
    """Limits: each device type's own, with the buckets that follow; then when the peers have buckets ready."""
    num_buckets = len(fastest)
    rows, limits = [], []
    for model, waiting, first in zip(models, waits, loads, strict=False):
        own = np.zeros((len(model.limits_R), int(loads[-1]) + num_buckets), dtype=np.int8)
        own[:, first : first + model.rows_RS.shape[1]] = model.rows_RS
        for row, bucket in enumerate(waiting.tolist()):
            own[row, int(loads[-1]) + bucket :] = 1
        rows.append(own)
        limits.append(model.limits_R)
    training = problem.training
    peers = np.zeros((num_buckets, int(loads[-1]) + num_buckets), dtype=np.int8)
    for k in range(num_buckets):
        peers[k, int(loads[-1]) + k :] = 1
    rest = np.cumsum(fastest[::-1])[::-1] if fastest else np.zeros(0, dtype=np.int64)
    slack = training.latency_limit_ns - training.optimizer_ns
    rows.append(peers)
    limits.append(slack - np.array(training.communication.peer_ready_ns, dtype=np.int64) - rest)
    return np.concatenate(rows), np.concatenate(limits).astype(np.int64)


def _wanted(models: list[AssignmentModel], nodes: Ints) -> Wanted | None:
    own = [(model.wanted, int(n)) for model, n in zip(models, nodes, strict=False) if model.wanted is not None]
    if not own:
        return None
    width = max(wanted.flag_PA.shape[1] for wanted, _ in own)
    pairs = np.cumsum([0, *(len(wanted.source_P) for wanted, _ in own)])
    return Wanted(
        node_H=np.concatenate([wanted.node_H + n for wanted, n in own]),
        start_H=np.concatenate([wanted.start_H + p for (wanted, _), p in zip(own, pairs, strict=False)]),
        source_P=np.concatenate([wanted.source_P + n for wanted, n in own]),
        flag_PA=np.concatenate(
            [np.pad(wanted.flag_PA, ((0, 0), (0, width - wanted.flag_PA.shape[1]))) for wanted, _ in own]
        ),
    )


def _infeasible(problem: JointProblem) -> str:
    return (
        f"no plan keeps the latency limit of {problem.training.latency_limit_ns} ns and the memory limits of problem "
        f"{problem.name!r}, even with the fastest scheme in every bucket; raise a limit, or solve its training problem "
        "alone to see which one stands in the way"
    )


class JointFormulation:
    """Bound and fix on the joint model, up to the gap of the default for precisions."""

    def _stages(self, options: SolveOptions, solver: LinearSolver | None) -> list[Effort]:
        return [greedy_effort(options.gap, solver)]

    def _solver(self, options: SolveOptions) -> LinearSolver | None:
        return None if options.solver is None else create(Kind.SOLVER, options.solver)

    def solve(self, problem: JointProblem, options: SolveOptions) -> Answer:
        """Choose precisions and schemes; see `Formulation.solve`."""
        started = time.monotonic()
        deadline = math.inf if options.time_limit_s is None else started + options.time_limit_s
        joint, solver = build_joint(problem), self._solver(options)
        built = time.monotonic()
        engine = BoundAndFix(joint.model)
        outcome = Outcome(None, math.inf, -math.inf, np.zeros(0))
        for effort in self._stages(options, solver):
            bound = outcome.bound
            outcome = engine.solve(effort, deadline=deadline)
            outcome.bound = max(outcome.bound, bound)
            gap = relative_gap(outcome.objective, outcome.bound) if outcome.labels_N is not None else None
            if outcome.proved_infeasible or (gap is not None and gap <= max(options.gap, 2 * PROOF)):
                break
        times: dict[str, Any] = {"build_seconds": built - started, "solve_seconds": time.monotonic() - built}
        if outcome.proved_infeasible:
            return Answer(termination=TerminationStatus.INFEASIBLE, reason=_infeasible(problem), **times)
        bound = max(outcome.bound, 0.0) + joint.constant
        if outcome.labels_N is None:
            stopped = TerminationStatus.TIME_LIMIT if outcome.out_of_time else TerminationStatus.ERROR
            reason = "no plan within the limits was found, which proves nothing; allow more time"
            return Answer(termination=stopped, bound=bound, reason=reason, **times)
        plan = joint.plan(outcome.labels_N)
        objective = evaluate_joint(problem, plan).objective
        if bound >= objective * (1 - 2 * PROOF):
            bound = objective  # the search ends within this share of the optimum: that is its proof
        return Answer(
            plan=plan,
            termination=termination_of(objective, bound, out_of_time=outcome.out_of_time),
            objective=objective,
            bound=min(bound, objective),
            solver=None if solver is None or options.solver is None else f"{solver.name} {solver.version}",
            **times,
        )


class ExactJointFormulation(JointFormulation):
    """The proved optimum of the joint problem."""

    def _solver(self, options: SolveOptions) -> LinearSolver | None:
        choice = options.solver or default_solver()
        return None if choice is None else create(Kind.SOLVER, choice)

    def _stages(self, options: SolveOptions, solver: LinearSolver | None) -> list[Effort]:
        return [greedy_effort(options.gap), exact_effort(options.gap, solver)]


class IlpJointFormulation:
    """The joint model as one integer program, for checking the others on small problems."""

    def solve(self, problem: JointProblem, options: SolveOptions) -> Answer:
        """Choose precisions and schemes; see `Formulation.solve`."""
        started = time.monotonic()
        solver = required_solver(options.solver, "method 'ilp'", continuous=True)
        joint = build_joint(problem)
        # Rows near 1000 keep solvers' absolute tolerances small beside them, as `solve_in_units` does for objectives.
        program = linear_program(joint.model)
        largest = max(1.0, float(np.abs(joint.model.value_T).max(initial=0)))
        program.rows[:] = [
            replace(row, terms={c: v * 1e3 / largest for c, v in row.terms.items()}, upper=row.upper * 1e3 / largest)
            if row.name.startswith("limit")
            else row
            for row in program.rows
        ]
        built = time.monotonic()
        limits = LinearOptions(time_limit_s=options.time_limit_s, relative_gap=options.gap)
        result = solve_in_units(solver, program, limits)
        return answer_of(
            result,
            solver,
            bound_of=lambda bound: max(bound, 0.0) + joint.constant,  # costs are never negative
            plan_of=lambda values: joint.plan(labels_at(joint.model, values)),
            objective_of=lambda plan: evaluate_joint(problem, plan).objective,
            why_infeasible=lambda: _infeasible(problem),
            build_seconds=built - started,
            solve_seconds=time.monotonic() - built,
        )
