"""Joint plans of precisions and schemes: every method against all combinations of schemes, each planned exactly."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import qsync_opt
from qsync_opt.errors import ProblemError
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
@settings(max_examples=25, deadline=None)
def test_every_method_against_all_combinations(seed):
    joint = random_joint(seed)
    best = best_of_all(joint)
    for method in ("default", "exact", "ilp"):
        solution = qsync_opt.solve(joint, method)
        if best is None:
            assert solution.termination == "infeasible", method
            assert "even with the fastest scheme" in solution.reason
            continue
        assert solution.bound <= best * (1 + 1e-6) + 1e-12
        if method == "default":
            assert solution.objective >= best * (1 - 1e-9)
        else:
            assert solution.termination == "optimal"
            assert solution.objective == pytest.approx(best, rel=1e-6, abs=1e-9)


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
