"""The method ``ilp``: one mixed-integer program per micro-batch option, for any registered linear solver.

Sets: groups g, devices d, schemes b. Columns: z[g,d,b] group g on d in b; u[g,d,e] group g on d and g+1 on e; first[d],
last[d]; wrap[l,f] the link from the last stage l back to the first f; TP, TD the largest stage times, C a decode round.

    min  sum P + (m_p - 1) TP + (n - 1) C + sum D + (m_d - 1) TD
    sum_db z[g] = 1;  sum_b z[0,d] = first[d];  sum_b z[G-1,d] = last[d]
    sum_e u[g,d,e] = sum_b z[g,d,b];  sum_d u[g,d,e] = sum_b z[g+1,e,b]
    first[d] + sum_{g, e != d} u[g,e,d] <= 1                       a device is entered at most once
    wrap[l,f] >= last[l] + first[f] - 1                            (l != f)
    sum_gb memory z + first_kib first[d] + last_kib last[d] <= memory[d]
    TP >= P[d], TD >= D[d], C >= sum D, C >= m_d TD;  sum harm z <= harm limit

The device order is a flow and needs no enumeration.

Source: ours; LLM-PQ (PPoPP 2024) has one program per device order, with another decode time.
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass

from qsync_opt.errors import SolverError
from qsync_opt.formulations.linear import LinearModel, LinearOptions, LinearStatus, required_solver
from qsync_opt.formulations.serving.infeasible import harm_draft, simple_reason
from qsync_opt.formulations.serving.tables import build_tables
from qsync_opt.serving import Plan, Problem, Stage, Times, evaluate
from qsync_opt.solving import Answer, SolveOptions, TerminationStatus

_SIZE = 1e3
"""Size of rows and of the objective, so that solvers' tolerances of 1e-9 stay below one nanosecond or KiB."""


@dataclass(frozen=True, slots=True)
class Program:
    """The program of one option; ``unit_ns`` is one unit of its objective, ``choice`` the columns z."""

    model: LinearModel
    unit_ns: float
    choice: dict[tuple[int, int, int], int]


def build_program(problem: Problem, option: int) -> Program:
    """The program of one micro-batch option; see the module."""
    devices, schemes, groups = problem.devices, problem.schemes, problem.groups
    parts = problem.microbatches[option]
    steps = problem.new_tokens - 1
    unit = max(_rough_ns(problem, option) / _SIZE, 1e-9)
    model = LinearModel(name=f"{problem.name} option {option}")
    D, G = range(len(devices)), range(len(groups))
    z, u = {}, {}
    costs = [problem.costs[device.name] for device in devices]
    decode_weight = 1.0 if steps else 0.0
    sums: list[tuple[dict[int, float], dict[int, float]]] = [({}, {}) for _ in D]

    def column(name: str, d: int, times: Times, *, integer: bool = True) -> int:
        """A column that adds time to device d's stage."""
        prefill, decode = times.prefill / unit, decode_weight * times.decode / unit
        index = model.add_column(name, integer=integer, cost=prefill + decode)
        sums[d][0][index], sums[d][1][index] = prefill, decode
        return index

    for g, d, b in itertools.product(G, D, range(len(schemes))):
        times = costs[d][groups[g].kind][schemes[b]][option]
        z[g, d, b] = column(f"z[{groups[g].name},{devices[d].name},{schemes[b]}]", d, times)
    nothing = Times(0, 0)
    for g, d, e in itertools.product(G[:-1], D, D):
        link = nothing if d == e else problem.links[devices[d].name, devices[e].name][option]
        u[g, d, e] = column(f"u[{g},{devices[d].name},{devices[e].name}]", d, link, integer=False)
    first = [column(f"first[{x.name}]", d, problem.ends[x.name].first[option]) for d, x in enumerate(devices)]
    last = [column(f"last[{x.name}]", d, problem.ends[x.name].last[option]) for d, x in enumerate(devices)]
    for a, c in itertools.permutations(D, 2):
        link = problem.links[devices[a].name, devices[c].name][option]
        wrap = column(f"wrap[{devices[a].name},{devices[c].name}]", a, link, integer=False)
        model.add_row(f"wrap[{a},{c}]", {wrap: 1, last[a]: -1, first[c]: -1}, lower=-1)
    most_prefill = model.add_column("TP", upper=math.inf, cost=parts.prefill - 1)
    for g in G:
        model.add_row(f"one[{g}]", {z[g, d, b]: 1 for d in D for b in range(len(schemes))}, lower=1, upper=1)
    for d in D:
        for g, end in ((0, first), (len(groups) - 1, last)):
            terms = {z[g, d, b]: 1.0 for b in range(len(schemes))}
            model.add_row(f"end[{g},{d},{end[d]}]", {**terms, end[d]: -1}, lower=0, upper=0)
        for g in G[:-1]:
            here = {z[g, d, b]: -1.0 for b in range(len(schemes))}
            there = {z[g + 1, d, b]: -1.0 for b in range(len(schemes))}
            model.add_row(f"out[{g},{d}]", {**here, **{u[g, d, e]: 1 for e in D}}, lower=0, upper=0)
            model.add_row(f"in[{g},{d}]", {**there, **{u[g, e, d]: 1 for e in D}}, lower=0, upper=0)
        entries = {u[g, e, d]: 1.0 for g in G[:-1] for e in D if e != d}
        model.add_row(f"once[{d}]", {**entries, first[d]: 1}, upper=1)
        limit = max(devices[d].memory_kib, 1)
        ends = problem.ends[devices[d].name]
        memory = {
            z[g, d, b]: (problem.weights_kib[groups[g].kind][s] + problem.state_kib[groups[g].kind][option])
            * (_SIZE / limit)
            for g in G
            for b, s in enumerate(schemes)
        }
        memory |= {first[d]: ends.first_kib * _SIZE / limit, last[d]: ends.last_kib * _SIZE / limit}
        model.add_row(f"memory[{d}]", memory, upper=devices[d].memory_kib * _SIZE / limit)
        model.add_row(f"TP[{d}]", {**sums[d][0], most_prefill: -1}, upper=0)
    if steps:
        most = model.add_column("TD", upper=math.inf, cost=parts.decode - 1)
        round_ = model.add_column("C", upper=math.inf, cost=steps - 1)
        for d in D:
            model.add_row(f"TD[{d}]", {**sums[d][1], most: -1}, upper=0)
        total = {index: value for by_phase in sums for index, value in by_phase[1].items()}
        model.add_row("round", {**total, round_: -1}, upper=0)
        model.add_row("busy", {most: parts.decode, round_: -1}, upper=0)
    if problem.harm_limit is not None:
        scale = _SIZE / problem.harm_limit if problem.harm_limit > 0 else 1.0
        harm = {
            z[g, d, b]: problem.harm[groups[g].name][s] * scale for g in G for d in D for b, s in enumerate(schemes)
        }
        model.add_row("harm", harm, upper=problem.harm_limit * scale * (1 + 1e-10))
    return Program(model, unit, z)


def _rough_ns(problem: Problem, option: int) -> float:
    """A time of the size of the objective, to scale by."""
    parts, steps = problem.microbatches[option], problem.new_tokens
    total = 0.0
    for group in problem.groups:
        tables = [t[group.kind] for t in problem.costs.values()]
        total += min(times[option].prefill for table in tables for times in table.values()) * parts.prefill
        total += min(times[option].decode for table in tables for times in table.values()) * parts.decode * steps
    return max(total, 1.0)


class IlpFormulation:
    """The integer program, by a registered linear solver, to a proved optimum, or to a gap or time limit."""

    def solve(self, problem: Problem, options: SolveOptions) -> Answer:
        """Solve each micro-batch option; see `Formulation.solve`."""
        started = time.monotonic()
        deadline = math.inf if options.time_limit_s is None else started + options.time_limit_s
        solver = required_solver(options.solver, "method 'ilp'", continuous=True)
        best, objective, bound = None, math.inf, math.inf
        late, build_s = False, 0.0
        for k in range(len(problem.microbatches)):
            begin = time.monotonic()
            program = build_program(problem, k)
            build_s += time.monotonic() - begin
            left = None if math.isinf(deadline) else (deadline - time.monotonic()) / (len(problem.microbatches) - k)
            if left is not None and left <= 0:
                late, bound = True, 0.0
                break
            result = solver.solve(program.model, LinearOptions(time_limit_s=left, relative_gap=options.gap))
            if result.status is LinearStatus.INFEASIBLE:
                continue
            if result.status not in (LinearStatus.OPTIMAL, LinearStatus.LIMIT):
                raise SolverError(f"{solver.name} ended option {k} with {result.status} ({result.native})")
            late = late or result.status is LinearStatus.LIMIT
            lower = 0.0 if result.bound is None else max(result.bound, 0.0) * program.unit_ns
            bound = min(bound, lower)
            if result.values is not None:
                plan = _read(problem, k, program, result.values)
                evaluation = evaluate(problem, plan)
                if not evaluation.feasible:
                    raise SolverError(f"{solver.name} returned a plan with {'; '.join(evaluation.violations)}")
                if evaluation.objective < objective:
                    best, objective = plan, evaluation.objective
        # Objectives are whole, and solvers compute to about nine digits.
        if best is not None and objective - bound <= max(1e-6 * objective, options.gap * objective if late else 0.0):
            bound = objective if objective - bound <= 1e-6 * objective else bound
        if late:
            termination, reason = TerminationStatus.TIME_LIMIT, None
        elif best is None:
            termination, reason = TerminationStatus.INFEASIBLE, _reason(problem, deadline)
        else:
            proved = objective - bound <= 1e-6 * objective
            termination, reason = TerminationStatus.OPTIMAL if proved else TerminationStatus.FEASIBLE, None
        if best is None and late:
            reason = f"no plan was found within the time limit of {options.time_limit_s} s; allow more time"
        return Answer(
            plan=best,
            termination=termination,
            objective=None if best is None else objective,
            bound=None if termination is TerminationStatus.INFEASIBLE or math.isinf(bound) else min(bound, objective),
            solver=f"{solver.name} {solver.version}",
            build_seconds=build_s,
            solve_seconds=time.monotonic() - started - build_s,
            reason=reason,
        )


def _reason(problem: Problem, deadline: float) -> str:
    tables, _ = build_tables(problem)
    reason = simple_reason(problem, tables)
    if reason is None:
        reason = harm_draft(problem, tables, deadline)[1]
    return reason or "the solver proved that no plan keeps the limits"


def _read(problem: Problem, option: int, program: Program, values: tuple[float, ...]) -> Plan:
    stages: list[tuple[str, list[str]]] = []
    schemes: dict[str, str] = {}
    best: dict[int, tuple[float, int, int]] = {}
    for (g, d, b), index in program.choice.items():
        best[g] = max(best.get(g, (-math.inf, 0, 0)), (values[index], d, b))
    for g, group in enumerate(problem.groups):
        _, d, b = best[g]
        device = problem.devices[d].name
        if not stages or stages[-1][0] != device:
            stages.append((device, []))
        stages[-1][1].append(group.name)
        schemes[group.name] = problem.schemes[b]
    parts = tuple(Stage(device=device, groups=tuple(names)) for device, names in stages)
    return Plan(microbatch=option, stages=parts, schemes=schemes)
