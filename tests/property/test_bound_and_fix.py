"""Against exhaustive search: the exact method is exact, the default feasible and near, and no bound is ever wrong."""

import random
from dataclasses import replace

import pytest

from qsync_opt import solve
from qsync_opt.testing import random_problem
from qsync_opt.training import TerminationStatus

PER_SEED = 10


def rescaled(problem, factor):
    """The same problem with all sensitivities times a factor."""
    devices = tuple(
        replace(
            device,
            operators={
                name: {p: replace(cost, sensitivity=cost.sensitivity * factor) for p, cost in table.items()}
                for name, table in device.operators.items()
            },
        )
        for device in problem.devices
    )
    return replace(problem, devices=devices)


@pytest.mark.parametrize("seed", range(20))
def test_exact_is_exhaustive_and_greedy_is_bounded(seed):
    for number in range(PER_SEED):
        problem = random_problem(random.Random(1000 * seed + number))
        truth = solve(problem, "exhaustive")
        exact, greedy = solve(problem, "exact"), solve(problem, "greedy")
        if truth.objective is None:
            assert exact.termination is TerminationStatus.INFEASIBLE
            assert greedy.termination is TerminationStatus.INFEASIBLE
            assert "least value that could be met" in exact.reason
            continue
        slack = 1e-9 * truth.objective + 1e-15
        assert exact.termination is TerminationStatus.OPTIMAL
        assert exact.objective == pytest.approx(truth.objective, rel=1e-8, abs=1e-15)
        assert exact.bound <= truth.objective + slack
        assert greedy.plan is not None
        assert greedy.bound <= truth.objective + slack
        assert greedy.objective <= truth.objective * 1.03 + slack


def with_equal_operators(problem):
    """The same problem where adjustable operators of the same precisions cost the same on a device."""
    devices = []
    for device in problem.devices:
        first = {}
        for operator in problem.adjustable:
            first.setdefault(tuple(device.operators[operator.name]), device.operators[operator.name])
        names = {operator.name for operator in problem.adjustable}
        tables = {n: first[tuple(table)] if n in names else table for n, table in device.operators.items()}
        devices.append(replace(device, operators=tables))
    return replace(problem, devices=tuple(devices))


@pytest.mark.parametrize("sharing", ["edge", "producer"])
def test_equal_operators_are_solved_exactly(sharing):
    for seed in range(25):
        problem = replace(with_equal_operators(random_problem(random.Random(seed))), cast_sharing=sharing)
        truth, exact, greedy = (solve(problem, method) for method in ("exhaustive", "exact", "greedy"))
        assert (truth.objective is None) == (exact.objective is None) == (greedy.objective is None)
        if truth.objective is not None:
            assert exact.objective == pytest.approx(truth.objective, rel=1e-8, abs=1e-15)
            assert greedy.bound <= truth.objective * (1 + 1e-9) + 1e-15


@pytest.mark.parametrize("factor", [0.0, 1e-12, 1e6])
def test_scale_of_sensitivities_does_not_matter(factor):
    for seed in range(5):
        problem = random_problem(random.Random(seed))
        plain, scaled = solve(problem, "exact"), solve(rescaled(problem, factor), "exact")
        assert (plain.objective is None) == (scaled.objective is None)
        if plain.objective is not None:
            assert scaled.objective == pytest.approx(plain.objective * factor, rel=1e-6, abs=1e-24)
            assert scaled.termination is TerminationStatus.OPTIMAL


def test_limits_met_exactly_are_met():
    for seed in range(30):
        problem = random_problem(random.Random(seed))
        first = solve(problem, "exact")
        if first.plan is None:
            continue
        tight = replace(
            problem,
            latency_limit_ns=first.iteration_ns,
            devices=tuple(
                replace(device, memory_limit_kib=first.evaluation.memory_kib[device.name]) for device in problem.devices
            ),
        )
        assert solve(tight, "exact").objective == pytest.approx(first.objective, rel=1e-8, abs=1e-15)
        assert solve(tight, "greedy").plan is not None


def test_start_and_repeat_give_the_same_optimum():
    for seed in range(20):
        problem = random_problem(random.Random(seed))
        first = solve(problem, "exact")
        if first.plan is None:
            continue
        again, warm = solve(problem, "exact"), solve(problem, "exact", start=first.plan)
        assert again.plan.devices == first.plan.devices
        assert warm.objective == pytest.approx(first.objective, rel=1e-8, abs=1e-15)
