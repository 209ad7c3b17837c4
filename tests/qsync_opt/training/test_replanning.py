import dataclasses
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qsync_opt.errors import ProblemError
from qsync_opt.testing import chain, random_problem
from qsync_opt.training import Plan, evaluate, replan, solve


def scaled(problem, factors):
    """The problem with the sensitivities of some operators multiplied."""
    devices = []
    for device in problem.devices:
        table = {
            name: {
                precision: dataclasses.replace(cost, sensitivity=cost.sensitivity * factors.get(name, 1.0))
                for precision, cost in costs.items()
            }
            for name, costs in device.operators.items()
        }
        devices.append(dataclasses.replace(device, operators=table))
    return dataclasses.replace(problem, devices=tuple(devices))


@pytest.fixture
def case():
    problem = chain().problem
    return problem, solve(problem, "exhaustive").plan


def test_an_unchanged_problem_keeps_its_plan(case):
    problem, plan = case
    decision = replan(problem, plan, method="exhaustive")
    assert not decision.replaced
    assert decision.plan is plan


def test_a_small_gain_is_not_worth_a_change_and_a_large_one_is(case):
    problem, plan = case
    lowered = [
        operator.name
        for operator in problem.adjustable
        if problem.devices[0].operators[operator.name][plan.devices[problem.devices[0].name][operator.name]].sensitivity
    ]
    changed = scaled(problem, dict.fromkeys(lowered, 8.0))
    gain = 1 - solve(changed, "exhaustive").objective / evaluate(changed, plan).objective
    assert 0 < gain < 1
    kept = replan(changed, plan, improvement=min(0.99, gain * 1.01), method="exhaustive")
    assert not kept.replaced
    assert "not better by" in kept.reason
    moved = replan(changed, plan, improvement=gain * 0.99, method="exhaustive")
    assert moved.replaced
    assert moved.plan.devices == moved.solution.plan.devices
    assert moved.after.objective < moved.before.objective


def test_a_plan_that_breaks_a_limit_is_given_up_whatever_it_costs(case):
    problem, _ = case
    device = problem.devices[0]
    low = Plan(problem=problem.name, devices={device.name: {o.name: "FP32" for o in problem.adjustable}})
    tight = dataclasses.replace(problem, latency_limit_ns=evaluate(problem, low).iteration_ns - 1)
    decision = replan(tight, low, improvement=0.9, method="exhaustive")
    assert decision.replaced
    assert "breaks limits now" in decision.reason


def test_a_plan_for_other_operators_is_given_up(case):
    problem, plan = case
    device = problem.devices[0].name
    other = Plan(problem="other", devices={device: {**plan.devices[device], "nowhere/linear": "FP16"}})
    decision = replan(problem, other, method="exhaustive")
    assert decision.before is None
    assert "nowhere/linear" in decision.reason
    # The operators that both name agree: only the stranger is gone.
    assert decision.plan.devices == plan.devices


def test_no_plan_at_all_is_an_error_that_says_why(case):
    problem, plan = case
    with pytest.raises(ProblemError, match="no plan for problem"):
        replan(dataclasses.replace(problem, latency_limit_ns=1), plan, method="exhaustive")


@pytest.mark.parametrize("improvement", [1.0, -0.1, float("nan")])
def test_improvement_is_a_share(case, improvement):
    with pytest.raises(ProblemError, match="improvement"):
        replan(*case, improvement=improvement)


@example(seed=69, improvement=0.1)  # one that is replaced
@given(st.integers(0, 2**32), st.floats(0, 0.9))
def test_the_plan_to_use_always_keeps_the_limits(seed, improvement):
    source = random.Random(seed)
    problem = random_problem(source)
    first = solve(problem, "greedy")
    if first.plan is None:
        return
    names = [operator.name for operator in problem.adjustable]
    changed = scaled(problem, {name: 10 ** source.uniform(-3, 3) for name in names})
    decision = replan(changed, first.plan, improvement=improvement)
    assert evaluate(changed, decision.plan).feasible
    moved = {
        device: {name: (before[name], after) for name, after in decision.plan.devices[device].items()}
        for device, before in first.plan.devices.items()
    }
    moved = {device: {n: pair for n, pair in all_.items() if pair[0] != pair[1]} for device, all_ in moved.items()}
    assert decision.changes == {device: changes for device, changes in moved.items() if changes}
    if decision.replaced:
        assert decision.after.objective <= (1 - improvement) * decision.before.objective
    # Settled: asking again changes nothing.
    again = replan(changed, decision.plan, improvement=improvement)
    assert again.plan.devices == decision.plan.devices
