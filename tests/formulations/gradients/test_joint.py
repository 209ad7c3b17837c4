"""Joint plans of precisions and schemes: every method against all combinations of schemes, each planned exactly."""

import itertools
import random
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import qsync_opt
from qsync_opt.errors import ProblemError
from qsync_opt.formulations.gradients.joint import build_joint
from qsync_opt.gradients import (
    BucketStatistics,
    Choice,
    JointPlan,
    JointProblem,
    Moments,
    Plan,
    SchemeTimes,
    build_joint_problem,
    communication_problem,
    evaluate,
    evaluate_joint,
    under_schemes,
)
from qsync_opt.testing import random_problem

BENCHMARKS = str(Path(__file__).parents[3] / "benchmarks")
sys.path.insert(0, BENCHMARKS)
try:
    from families import Recipe, generate
finally:
    sys.path.remove(BENCHMARKS)


def random_joint(seed):
    draw = random.Random(seed)
    problem = random_problem(draw)
    while not problem.communication.allreduce_ns:
        problem = random_problem(draw)
    buckets = []
    for full_ns in problem.communication.allreduce_ns:
        own = {"FP32": Choice(time_ns=full_ns, variance=0.0)}
        for share, name in ((2, "BF16"), (4, "sum8")):
            if draw.random() < 0.8:
                own[name] = Choice(time_ns=full_ns // share, variance=draw.choice([0.0, 0.01, 0.3, 2.0]) * share)
        buckets.append(own)
    return JointProblem(training=problem, buckets=tuple(buckets))


def best_of_all(joint):
    """The optimum, by solving the training problem exhaustively under every combination of schemes."""
    best = None
    for choices in itertools.product(*(own.values() for own in joint.buckets)):
        training = under_schemes(joint.training, [choice.time_ns for choice in choices])
        solution = qsync_opt.solve(training, "exhaustive")
        if solution.plan is not None:
            value = solution.objective + sum(choice.variance for choice in choices)
            best = value if best is None else min(best, value)
    return best


@given(st.integers(0, 2**32 - 1))
@example(112380835)  # the best is 0, and another plan costs 3e-10 of the largest cost
@settings(max_examples=25, deadline=None)
def test_every_method_against_all_combinations(seed):
    joint = random_joint(seed)
    best = best_of_all(joint)
    largest = float(build_joint(joint).model.objective_Z.max(initial=0.0))
    for method in ("default", "exact", "ilp"):
        solution = qsync_opt.solve(joint, method)
        if best is None:
            assert solution.termination == "infeasible", method
            assert "even with the fastest scheme" in solution.reason
            continue
        # Solvers of linear programs know costs up to a billionth of the largest.
        near = 1e-9 * largest if method == "ilp" else 1e-12
        assert solution.bound <= best * (1 + 1e-6) + near
        if method == "default":
            assert solution.objective >= best * (1 - 1e-9)
        else:
            assert solution.termination == "optimal"
            assert solution.objective == pytest.approx(best, rel=1e-6, abs=max(1e-9, near))


@pytest.mark.parametrize("seed", range(12))
def test_the_joint_model_says_of_every_labelling_what_evaluating_its_plan_says(seed):
    problem = random_joint(seed)
    joint, rng = build_joint(problem), np.random.default_rng(seed)
    for _ in range(10):
        labels = joint.model.complete(rng.integers(0, joint.model.sizes_N))
        evaluation = evaluate_joint(problem, joint.plan(labels))
        assert joint.model.objective(labels) + joint.constant == pytest.approx(
            evaluation.objective, rel=1e-9, abs=1e-12
        )
        assert bool((joint.model.excess(labels) <= 0).all()) == evaluation.feasible


def test_joint_plans_of_dense_blocks_on_two_device_types_are_those_of_exhaustive_search():
    problem = generate(Recipe(family="dense", operators=7, formats=2, seed=3))
    device = problem.devices[0]
    problem = replace(problem, devices=(device, replace(device, name="other", memory_limit_kib=10**9)))
    (full_ns,) = problem.communication.allreduce_ns
    worth = qsync_opt.solve(problem, "exhaustive").objective
    own = {"FP32": Choice(time_ns=full_ns, variance=0.0), "INT8": Choice(time_ns=full_ns // 4, variance=worth / 50)}
    known = min(
        qsync_opt.solve(under_schemes(problem, [choice.time_ns]), "exhaustive").objective + choice.variance
        for choice in own.values()
    )
    joint = JointProblem(training=problem, buckets=(own,))
    assert len(build_joint(joint).model.derived) > 2
    built, rng = build_joint(joint), np.random.default_rng(0)
    for _ in range(10):
        labels = built.model.complete(rng.integers(0, built.model.sizes_N))
        evaluation = evaluate_joint(joint, built.plan(labels))
        assert built.model.objective(labels) + built.constant == pytest.approx(evaluation.objective)
        assert bool((built.model.excess(labels) <= 0).all()) == evaluation.feasible
    for method in ("exact", "ilp"):
        found = qsync_opt.solve(joint, method)
        assert found.objective == pytest.approx(known, rel=1e-6)
        assert found.bound <= known * (1 + 1e-6)
    assert qsync_opt.solve(joint).objective >= known * (1 - 1e-9)


def feasible():
    return next(
        (joint, solution)
        for joint in map(random_joint, range(100))
        if len(joint.buckets) >= 2 and (solution := qsync_opt.solve(joint, "exact")).plan is not None
    )


def test_what_remains_for_the_schemes_is_no_better_than_the_joint_plan():
    joint, solution = feasible()
    remaining = communication_problem(joint, solution.plan.precisions)
    own = evaluate(remaining, solution.plan.schemes)
    assert own.iteration_ns == solution.evaluation.iteration_ns
    assert own.feasible
    assert qsync_opt.solve(remaining).objective == pytest.approx(solution.evaluation.variance, abs=1e-9)


@pytest.mark.parametrize("method", ["default", "ilp"])
def test_the_seconds_of_a_solution_are_part_of_those_that_passed(method):
    problem, began = random_joint(3), time.monotonic()
    solution = qsync_opt.solve(problem, method)
    passed = time.monotonic() - began
    assert solution.build_seconds >= 0 and solution.solve_seconds >= 0
    assert solution.build_seconds + solution.solve_seconds <= passed


def test_files_round_trip(tmp_path):
    joint, solution = feasible()
    joint.save(tmp_path / "p.json")
    solution.plan.save(tmp_path / "plan.json")
    again, plan = qsync_opt.load_problem(tmp_path / "p.json"), qsync_opt.load_plan(tmp_path / "plan.json")
    assert again.to_json() == joint.to_json()
    assert plan.to_json() == solution.plan.to_json()
    assert qsync_opt.evaluate(again, plan) == solution.evaluation
    data = joint.to_json()
    with pytest.raises(ProblemError, match="unknown key 'more'"):
        JointProblem.from_json(data | {"more": 1})
    with pytest.raises(ProblemError, match="buckets have choices, but problem"):
        JointProblem.from_json(data | {"buckets": []})
    with pytest.raises(ProblemError, match="variance is -1"):
        JointProblem.from_json(data | {"buckets": [{"FP32": {"time_ns": 1, "variance": -1}}] * len(joint.buckets)})


def test_a_plan_for_other_buckets_is_refused():
    joint, solution = feasible()
    with pytest.raises(ProblemError, match="it lacks 'b0'"):
        evaluate_joint(joint, JointPlan(precisions=solution.plan.precisions, schemes=Plan(schemes={"x": "FP32"})))


def test_a_joint_problem_from_measurements():
    joint, _ = feasible()
    moments = Moments(square=4.0, block_square=90.0, block_absolute=12.0, bucket_square=900.0, bucket_absolute=40.0)
    statistics = [BucketStatistics(elements=1000, local=moments, mean=moments.scaled(0.5))] * len(joint.buckets)
    times = SchemeTimes(workers=9, elements=(10, 1000), times_ns={"FP32": (9, 90), "sum8": (5, 30), "sum4": (2, 20)})
    built = build_joint_problem(joint.training, statistics, times, weight=2.0)
    assert [set(own) for own in built.buckets] == [{"FP32", "sum8"}] * len(joint.buckets)  # sum4 would overflow
    assert built.buckets[0]["sum8"].time_ns == 30
    assert built.buckets[0]["FP32"].variance == 0.0


def test_the_joint_program_is_solved_by_the_solver_that_is_named():
    joint = random_joint(0)
    by_name, by_default = (qsync_opt.solve(joint, "ilp", solver=solver) for solver in ("pulp", None))
    assert by_name.solver.startswith("pulp")
    assert by_name.termination is by_default.termination
    assert by_name.objective == pytest.approx(by_default.objective)
    named, free = (qsync_opt.solve(joint, solver=solver) for solver in ("pulp", None))
    assert named.solver.startswith("pulp") and free.solver is None
    assert qsync_opt.solve(joint, "exact", solver="pulp").solver.startswith("pulp")
