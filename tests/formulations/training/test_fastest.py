"""The fastest plan under a budget of sensitivity: by every method, against all plans there are."""

import functools
import itertools
import math
import random

import pytest

from qsync_opt.errors import ProblemError, UnsupportedError
from qsync_opt.testing import chain, random_problem
from qsync_opt.training import Plan, evaluate, fastest, load_problem, solve


@pytest.mark.parametrize("method", ["exact", "greedy", "exhaustive"])
def test_the_fastest_plan_has_the_best_time_of_all_plans(method):
    for seed in range(40):
        problem, points = _enumerated(seed)
        if points is None:
            continue
        # Budgets that a plan meets to the last bit are where rounding of sums shows.
        budgets = {0.0, *sorted({objective for objective, _ in points})[:4]}
        for budget in budgets:
            least = min((time_ns for objective, time_ns in points if objective <= budget), default=None)
            found = fastest(problem, method, sensitivity_budget=budget)
            assert (None if found is None else found.iteration_ns) == least, (seed, budget)
            if found is not None:
                assert found.evaluation.objective <= budget
                assert found.bound_ns <= least
                assert found.proved or method == "greedy"


@functools.cache
def _enumerated(seed):
    """A random problem and `_every_point` of it; None for the points where there are too many."""
    problem = random_problem(random.Random(seed))
    count = math.prod(len(d.operators[o.name]) for d in problem.devices for o in problem.adjustable)
    return problem, _every_point(problem) if count <= 3000 else None


def _every_point(problem):
    """Sensitivity and time of every plan that keeps the memory limits, from the independent evaluation."""
    names = [(device.name, operator.name) for device in problem.devices for operator in problem.adjustable]
    tables = [problem.device(device).operators[name] for device, name in names]
    points = []
    for choices in itertools.product(*tables):
        devices = {device.name: {} for device in problem.devices}
        for (device, name), precision in zip(names, choices, strict=True):
            devices[device][name] = precision
        found = evaluate(problem, Plan(problem=problem.name, devices=devices))
        if all(part.memory_kib <= part.memory_limit_kib for part in found.devices.values()):
            points.append((found.objective, found.iteration_ns))
    return points


def test_a_budget_that_a_known_plan_meets_gives_no_slower_plan(instance_path):
    # Of two device types, whose sums are rounded otherwise than the whole.
    problem = load_problem(instance_path("bertb-fp8"))
    known = solve(problem, "exact")
    for method in ("exact", "greedy"):
        found = fastest(problem, method, sensitivity_budget=known.objective)
        assert found.iteration_ns <= known.iteration_ns
        assert found.evaluation.objective <= known.objective


def test_the_fastest_plan_by_a_method_that_proves_nothing_claims_nothing():
    found = fastest(chain().problem, "qsync", sensitivity_budget=0.25)
    assert (found.iteration_ns, found.proved, found.method) == (15000, False, "qsync, not proved fastest")
    assert fastest(chain().problem, "greedy").iteration_ns == 9000
    with pytest.raises(UnsupportedError, match="only method 'exact' uses a solver"):
        fastest(chain().problem, "greedy", solver="pulp")
    with pytest.raises(UnsupportedError, match="ties operators"):
        fastest(chain().problem, "qsync", tied=[("a", "b")])
    with pytest.raises(UnsupportedError, match="method is 3"):
        fastest(chain().problem, 3)


@pytest.mark.parametrize("budget", [-1.0, float("nan"), float("inf"), True, "5%"])
def test_a_budget_must_be_a_number(budget):
    with pytest.raises(ProblemError, match=r"sensitivity budget is .* finite number of at least 0"):
        fastest(chain().problem, sensitivity_budget=budget)
