"""The methods ``ilp`` and ``grouped``: the integer program over single messages, and over groups of them.

Binary x[m, b] says that item m (a message, or a group of a pair) has width b; Z[r] is the time of round r and X[e]
the exposed time of exchange e, of which C[e] is packing:

    sum_b x[m, b] = 1,   Z[r] >= time of each pair or port of r,   C[e] >= packing and unpacking of each worker
    X[e] >= sum of Z[r] of e - hidden + C[e],   X[e] >= C[e]
    minimise variance subject to sum X <= limit, or the weighted sum, or sum X subject to variance <= limit
"""

from __future__ import annotations

import math
import time

import numpy as np

from qsync_opt.errors import SolverError, UnsupportedError
from qsync_opt.formulations.linear import (
    LinearModel,
    LinearOptions,
    LinearResult,
    LinearSolver,
    LinearStatus,
    required_solver,
)
from qsync_opt.formulations.messages.exhaustive import plan_of
from qsync_opt.formulations.messages.frontier import frontiers
from qsync_opt.formulations.messages.threshold import infeasible
from qsync_opt.messages import Plan, Problem, evaluate
from qsync_opt.solving import PROOF_GAP, Answer, SolveOptions, TerminationStatus, relative_gap

MOST_ITEMS = 20_000
"""Messages or groups beyond which the program is refused."""
GROUP = 100
"""Messages of a group of the paper's method."""
_NEGLIGIBLE = 1e-12
"""Weight of one goal, as a share of the other's, below which the program leaves it out."""
GROUPED_S = 60.0
"""Most seconds of ``grouped`` where no time limit is given."""


class IlpFormulation:
    """The integer program over single messages, solved by a linear solver.

    Source: AdaQP (MLSys 2023), equation 12, without groups and with the overlap in the objective.
    """

    size = 1

    def solve(self, problem: Problem, options: SolveOptions) -> Answer:
        """Plan every message."""
        started = time.monotonic()
        reason = infeasible(problem, frontiers(problem))
        if reason is not None:
            return Answer(termination=TerminationStatus.INFEASIBLE, reason=reason)
        solver = required_solver(options.solver, "this method", continuous=True)
        items = _items(problem, self.size)
        if len(items) > MOST_ITEMS:
            raise UnsupportedError(
                f"the program would have {len(items)} messages or groups, but at most {MOST_ITEMS} are allowed; use "
                "method 'threshold', which takes millions"
            )
        model, columns, scale = _program(problem, items)
        built = time.monotonic()
        limit = options.time_limit_s if self.size == 1 else options.time_limit_s or GROUPED_S
        result = solver.solve(model, LinearOptions(time_limit_s=limit, relative_gap=max(options.gap, 1e-9)))
        return self._answer(problem, result, _read(problem, items, columns, result), scale, built - started, solver)

    def _answer(
        self,
        problem: Problem,
        result: LinearResult,
        plan: Plan | None,
        scale: float,
        build_seconds: float,
        solver: LinearSolver,
    ) -> Answer:
        evaluation = None if plan is None else evaluate(problem, plan)
        if evaluation is None or not evaluation.feasible:
            if result.status is LinearStatus.LIMIT:
                return Answer(termination=TerminationStatus.TIME_LIMIT, solver=solver.name)
            if self.size > 1 and result.status is LinearStatus.INFEASIBLE:
                raise SolverError("no plan over groups keeps the limit, though one over messages does")
            return Answer(
                termination=TerminationStatus.ERROR,
                solver=solver.name,
                reason=f"{solver.name} ended {result.status} ({result.native}) without a plan that keeps the limits",
            )
        objective = evaluation.objective
        bound = None if result.bound is None or self.size > 1 else min(result.bound * scale, objective)
        gap = relative_gap(objective, bound)
        ended = TerminationStatus.OPTIMAL if gap is not None and gap <= PROOF_GAP else TerminationStatus.FEASIBLE
        if result.status is LinearStatus.LIMIT:
            ended = TerminationStatus.TIME_LIMIT
        return Answer(
            termination=ended,
            plan=plan,
            objective=objective,
            bound=bound,
            solver=solver.name,
            build_seconds=build_seconds,
        )


class GroupedFormulation(IlpFormulation):
    """The paper's method, mended: messages of a pair sorted by score, one width per group of 100, as a program.

    A group's score is the sum of its own messages' (the released code indexes another array). It proves nothing about
    plans that split a group.

    Source: AdaQP (MLSys 2023), section 4.2.
    """

    size = GROUP


def _items(problem: Problem, size: int) -> list[tuple[int, np.ndarray[tuple[int], np.dtype[np.int64]], float]]:
    """Of each item its pair's position, the positions of its messages, and the sum of their scores."""
    items, pair_index, start = [], 0, 0
    for exchange in problem.exchanges:
        for pair in exchange.pairs:
            order = np.argsort(pair.beta, kind="stable")
            for first in range(0, pair.beta.size, size):
                members = order[first : first + size]
                items.append((pair_index, start + members, float(pair.beta[members].sum())))
            start += pair.beta.size
            pair_index += 1
    return items


def _program(problem: Problem, items: list) -> tuple[LinearModel, list[dict[int, int]], float]:  # type: ignore[type-arg]
    menu = problem.menu
    # Objectives and rows near 1e3: solvers' tolerances are absolute.
    variance_unit = max(sum(beta for *_, beta in items) * max(menu.values()), 1e-300) / 1e3
    widest = max(menu)
    slowest = sum(p.time_ns(e.dim, widest * p.beta.size) for e in problem.exchanges for p in e.pairs)
    slowest += sum(e.codec_ns([widest * p.beta.size for p in e.pairs]) for e in problem.exchanges)
    time_unit = max(slowest, 1e-300) / 1e3
    if problem.time_weight is not None:
        scale = max(problem.variance_weight * variance_unit, problem.time_weight * time_unit, 1e-300)
        weigh, time_cost = problem.variance_weight / scale, problem.time_weight * time_unit / scale
        # Solvers scale by the least cost, and fail where it is next to nothing.
        weigh = weigh if weigh * variance_unit > _NEGLIGIBLE else 0.0
        time_cost = time_cost if time_cost > _NEGLIGIBLE else 0.0
    else:
        scale = variance_unit if problem.variance_limit is None else time_unit
        weigh, time_cost = (1 / variance_unit, 0.0) if problem.variance_limit is None else (0.0, 1.0)
    model = LinearModel(name=problem.name)
    columns: list[dict[int, int]] = []
    bits: dict[int, dict[int, float]] = {}
    variance: dict[int, float] = {}
    for k, (pair_index, members, beta) in enumerate(items):
        chosen = {}
        for width, factor in menu.items():
            column = model.add_column(f"x[{k},{width}]", integer=True, cost=beta * factor * weigh)
            chosen[width] = column
            variance[column] = beta * factor / variance_unit
            bits.setdefault(pair_index, {})[column] = float(width * members.size)
        model.add_row(f"one[{k}]", dict.fromkeys(chosen.values(), 1.0), lower=1.0, upper=1.0)
        columns.append(chosen)

    def costs(pair_index: int, ns_per_byte: float, dim: int) -> dict[int, float]:
        per_bit = ns_per_byte * dim / 8 / time_unit
        return {key: -n * per_bit for key, n in bits.get(pair_index, {}).items()}

    exposed, pair_index = {}, 0
    for e, exchange in enumerate(problem.exchanges):
        first = pair_index
        column = model.add_column(f"X[{e}]", upper=math.inf, cost=time_cost)
        exposed[column] = 1.0
        total = {column: 1.0}
        for r, group in enumerate(exchange.rounds):
            slow = model.add_column(f"Z[{e},{r}]", upper=math.inf)
            total[slow] = -1.0
            for k, positions in enumerate(exchange.members(group)):
                terms = {slow: 1.0}
                for position in positions:
                    terms |= costs(pair_index + position, group[position].ns_per_byte, exchange.dim)
                fixed = max(group[position].fixed_ns for position in positions)
                model.add_row(f"slowest[{e},{r},{k}]", terms, lower=fixed / time_unit)
            pair_index += len(group)
        workers = exchange.codec()
        if workers:
            packing = model.add_column(f"C[{e}]", upper=math.inf)
            total[packing] = -1.0
            model.add_row(f"packed[{e}]", {column: 1.0, packing: -1.0}, lower=0.0)
            for k, own in enumerate(workers):
                terms = {packing: 1.0}
                for position, per_byte in own:
                    terms |= costs(first + position, per_byte, exchange.dim)
                model.add_row(f"packing[{e},{k}]", terms, lower=0.0)
        model.add_row(f"exposed[{e}]", total, lower=-exchange.hidden_ns / time_unit)
    if problem.time_limit_ns is not None:
        model.add_row("time limit", exposed, upper=problem.time_limit_ns / time_unit)
    if problem.variance_limit is not None:
        model.add_row("variance limit", variance, upper=problem.variance_limit / variance_unit)
    return model, columns, scale


def _read(problem: Problem, items: list, columns: list[dict[int, int]], result: LinearResult) -> Plan | None:  # type: ignore[type-arg]
    if result.values is None:
        return None
    values = result.values
    widths = np.zeros(problem.num_messages, np.uint8)
    for (_, members, _), chosen in zip(items, columns, strict=True):
        widths[members] = max(chosen, key=lambda width: values[chosen[width]])
    return plan_of(problem, widths)
