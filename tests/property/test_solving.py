"""What must hold for every problem, on random ones."""

import json
import random
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from qsync_opt.formulations.training import Sweep
from qsync_opt.io import parse_json
from qsync_opt.testing import random_plan, random_problem
from qsync_opt.training import (
    Plan,
    Problem,
    TerminationStatus,
    evaluate,
    fastest,
    solve,
)

EXAMPLES = 200
problems = st.integers(0, 2**32 - 1).map(lambda seed: random_problem(random.Random(seed)))
seeds = st.integers(0, 2**32 - 1)


def _objective(problem, method, **options):
    """Objective of a solution, None if the problem was proved infeasible."""
    solution = solve(problem, method, **options)
    if solution.plan is None:
        assert solution.termination is TerminationStatus.INFEASIBLE, solution
        return None
    assert evaluate(problem, solution.plan).feasible
    return solution.objective


def _same(first, second):
    if first is None or second is None:
        return first is second
    return first == pytest.approx(second, rel=1e-6, abs=1e-300)


@given(problem=problems)
@settings(max_examples=EXAMPLES)
def test_exhaustive_equals_every_exact_method(textbook, problem):
    known = _objective(problem, "exhaustive")
    assert _same(_objective(problem, "exact", solver="ortools"), known)
    assert _same(_objective(problem, "exact", solver="pulp"), known)
    assert _same(_objective(problem, textbook.TextbookFormulation(), solver="ortools"), known)


@given(problem=problems)
@settings(max_examples=EXAMPLES)
def test_greedy_finds_a_plan_wherever_there_is_one_and_is_never_below_the_optimum(problem):
    best = _objective(problem, "exact")
    once, often = _objective(problem, "qsync"), _objective(problem, "greedy")
    assert (once is None) == (often is None) == (best is None)
    if best is not None:
        assert best <= often * (1 + 1e-9) + 1e-300
        assert often <= once * (1 + 1e-9) + 1e-300


@given(problem=problems, seed=seeds)
@settings(max_examples=100)
def test_tightening_a_limit_never_improves_the_optimum(problem, seed):
    source = random.Random(seed)
    before = _objective(problem, "exact")
    if source.random() < 0.5:
        tight = replace(problem, latency_limit_ns=int(problem.latency_limit_ns * source.uniform(0.7, 1)))
    else:
        index = source.randrange(len(problem.devices))
        devices = list(problem.devices)
        limit_kib = int(devices[index].memory_limit_kib * source.uniform(0.7, 1))
        devices[index] = replace(devices[index], memory_limit_kib=limit_kib)
        tight = replace(problem, devices=tuple(devices))
    after = _objective(tight, "exact")
    if before is None:
        assert after is None
    elif after is not None:
        assert after >= before * (1 - 1e-9)


def _renamed(problem, names, order):
    """The problem with operators and devices renamed, and operators in another execution order."""
    operators = [
        replace(problem.operators[i], name=names[problem.operators[i].name], inputs=tuple(
            names[source] for source in problem.operators[i].inputs
        ))
        for i in order
    ]  # fmt: skip
    devices = tuple(
        replace(
            device,
            name=f"renamed {device.name}",
            operators={
                names[name]: dict(reversed(table.items())) for name, table in reversed(device.operators.items())
            },
        )
        for device in reversed(problem.devices)
    )
    return replace(problem, operators=tuple(operators), devices=devices)


def _independent_order(source, problem):
    """Another order that keeps inputs before users, and (since time goes by order) the order among gradients."""
    left = list(range(len(problem.operators)))
    placed: list[int] = []
    names: set[str] = set()
    while left:
        ready = [i for i in left if set(problem.operators[i].inputs) <= names]
        chosen = source.choice(ready)
        left.remove(chosen)
        placed.append(chosen)
        names.add(problem.operators[chosen].name)
    return placed


@given(problem=problems, seed=seeds, way=st.sampled_from([{"gap": 0.0}, {"gap": 1e-2}, {"gap": 0.1, "thorough": True}]))
@settings(max_examples=60)
def test_a_solve_under_changed_limits_is_as_good_as_a_fresh_one(problem, seed, way):
    random_number = random.Random(seed)
    sweep = Sweep(problem, **way)
    sweep.solve()
    for _ in range(4):  # tighter and looser, one limit or several at a time
        limit = max(sweep.floor_ns, int(problem.latency_limit_ns * random_number.uniform(0.7, 1.3)))
        memory = {
            device.name: int(device.memory_limit_kib * random_number.uniform(0.8, 1.2))
            for device in problem.devices
            if random_number.random() < 0.5
        }
        changed = replace(
            problem,
            latency_limit_ns=limit,
            devices=tuple(
                replace(each, memory_limit_kib=memory.get(each.name, each.memory_limit_kib)) for each in problem.devices
            ),
        )
        best = _objective(changed, "exact")
        point = sweep.solve(limit, memory)
        assert (point is None) == (best is None)
        if point is None:
            continue
        found = evaluate(changed, point.plan)
        assert found.feasible
        assert point.objective == pytest.approx(found.objective, rel=1e-9, abs=1e-300)
        assert point.bound <= best * (1 + 1e-9) + 1e-300
        if not way["gap"]:
            assert _same(point.objective, best)


@given(problem=problems, seed=seeds)
@settings(max_examples=100)
def test_renaming_and_listing_differently_changes_nothing(problem, seed):
    source = random.Random(seed)
    fresh = source.sample(range(1000), len(problem.operators))
    names = {operator.name: f"module.{k}/op" for operator, k in zip(problem.operators, fresh, strict=True)}
    order = list(range(len(problem.operators)))
    assert _same(_objective(_renamed(problem, names, order), "exact"), _objective(problem, "exact"))
    # The order of execution only matters for buckets: without them any topological order is the same problem.
    quiet = replace(problem, operators=tuple(replace(operator, bucket=None) for operator in problem.operators))
    shuffled = _renamed(quiet, names, _independent_order(source, quiet))
    assert _same(_objective(shuffled, "exact"), _objective(quiet, "exact"))
    plan = random_plan(source, quiet)
    moved = Plan(
        problem="p",
        devices={
            f"renamed {device}": {names[name]: precision for name, precision in choices.items()}
            for device, choices in plan.devices.items()
        },
    )
    one, other = evaluate(quiet, plan), evaluate(shuffled, moved)
    assert (one.iteration_ns, one.objective) == (other.iteration_ns, pytest.approx(other.objective, rel=1e-12))
    assert sorted(one.memory_kib.values()) == sorted(other.memory_kib.values())


def _scaled(problem, time_factor, sensitivity_factor):
    """Every time and every sensitivity multiplied."""

    def cost(old):
        return replace(
            old,
            forward_ns=old.forward_ns * time_factor,
            backward_ns=old.backward_ns * time_factor,
            sensitivity=old.sensitivity * sensitivity_factor,
        )

    devices = tuple(
        replace(
            device,
            # A slope that 2**20 divides keeps the integer division exact at every size in use.
            casts={
                pair: replace(c, base_ns=c.base_ns * time_factor, ns_per_mi_elements=c.ns_per_mi_elements * time_factor)
                for pair, c in device.casts.items()
            },
            operators={n: {p: cost(c) for p, c in table.items()} for n, table in device.operators.items()},
        )
        for device in problem.devices
    )
    communication = replace(
        problem.communication,
        allreduce_ns=tuple(value * time_factor for value in problem.communication.allreduce_ns),
        peer_ready_ns=tuple(value * time_factor for value in problem.communication.peer_ready_ns),
    )
    return replace(
        problem,
        devices=devices,
        communication=communication,
        optimizer_ns=problem.optimizer_ns * time_factor,
        latency_limit_ns=problem.latency_limit_ns * time_factor,
    )


@given(problem=problems, time_factor=st.sampled_from([1, 7, 1000]), power=st.integers(-20, 20))
@settings(max_examples=100)
def test_other_units_change_nothing_but_the_scale(problem, time_factor, power):
    # Sizes of which the slope's division has no remainder, so that times scale exactly.
    sizes = {0: 0, 1: 0, 1000: 2**20, 2**20: 2**20}
    operators = tuple(replace(o, output_elements=sizes[o.output_elements]) for o in problem.operators)
    problem = replace(problem, operators=operators)
    before = _objective(problem, "exact")
    after = _objective(_scaled(problem, time_factor, 2.0**power), "exact")
    assert _same(None if before is None else before * 2.0**power, after)


@given(problem=problems, seed=seeds)
@settings(max_examples=100)
def test_json_round_trips(problem, seed):
    extras = {("x-note",): [1, {"a": None}], ("operators", "op0", "x-id"): seed}
    problem = replace(problem, extras=extras)
    text = json.dumps(problem.to_json())
    again = Problem.from_json(parse_json(text, ["qsync-problem/1"], where="text"))
    assert isinstance(again, Problem)
    assert again == problem
    assert json.dumps(again.to_json()) == text
    plan = random_plan(random.Random(seed), problem)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


@given(problem=problems)
@settings(max_examples=100)
def test_the_fastest_plan_is_the_least_limit_that_can_be_met(problem):
    found = fastest(problem)
    if found is None:
        solution = solve(replace(problem, latency_limit_ns=2**50), "exhaustive")
        assert solution.termination is TerminationStatus.INFEASIBLE
        return
    assert found.proved
    assert found.bound_ns == found.iteration_ns
    assert _objective(replace(problem, latency_limit_ns=found.iteration_ns), "exhaustive") is not None
    assume(found.iteration_ns > 0)
    assert _objective(replace(problem, latency_limit_ns=found.iteration_ns - 1), "exhaustive") is None
