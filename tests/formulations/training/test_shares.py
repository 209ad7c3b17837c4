"""Joint plans of local batches and precisions: every method against all plans, evaluated one by one."""

import itertools
import math
import random
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import qsync_opt
from qsync_opt.errors import ProblemError
from qsync_opt.model import Role
from qsync_opt.testing import random_problem
from qsync_opt.training import (
    Plan,
    SharesPlan,
    SharesProblem,
    at_batch,
    build_shares_problem,
    evaluate,
    evaluate_shares,
    fastest_shares,
    uniform_plan,
)


def with_other_costs(draw, problem, factor):
    """The problem with every cost times about ``factor``, below what it was for some operators."""

    def changed(value):
        return round(value * factor * draw.choice([1.0, 1.0, 0.8, 1.3]))

    devices = tuple(
        replace(
            device,
            operators={
                name: {
                    precision: replace(
                        cost,
                        forward_ns=changed(cost.forward_ns),
                        backward_ns=changed(cost.backward_ns),
                        memory_kib=changed(cost.memory_kib),
                        sensitivity=cost.sensitivity / draw.choice([1.0, factor]),
                    )
                    for precision, cost in table.items()
                }
                for name, table in device.operators.items()
            },
        )
        for device in problem.devices
    )
    operators = tuple(replace(o, output_elements=changed(o.output_elements)) for o in problem.operators)
    return replace(problem, devices=devices, operators=operators)


def random_shares(seed):
    """A small problem of one to two device types, with limits near those of a random plan."""
    draw = random.Random(seed)
    problem = random_problem(draw, max_operators=4)
    devices = tuple(replace(device, count=draw.choice([1, 1, 2])) for device in problem.devices)
    problem = replace(problem, devices=devices)
    anchors = {4: problem, 8: with_other_costs(draw, problem, 2)}
    if draw.random() < 0.3:
        anchors[6] = with_other_costs(draw, problem, 1.5)
    candidates = {d.name: draw.sample(range(1, 12), draw.randint(1, 4)) for d in devices}
    picked = {name: draw.choice(own) for name, own in candidates.items()}
    return SharesProblem(
        name="random",
        global_batch=sum(d.count * picked[d.name] for d in devices),
        latency_limit_ns=draw.choice([problem.latency_limit_ns, 2 * problem.latency_limit_ns, 2**40]),
        anchors=anchors,
        candidates=candidates,
    )


def all_plans(problem):
    """Every plan whose batches add up, with its evaluation."""
    names = [*problem.counts]
    adjustable = [o.name for o in problem.first.operators if o.role is Role.ADJUSTABLE]
    of_device = {
        device.name: [
            dict(zip(adjustable, choice, strict=True))
            for choice in itertools.product(*(device.operators[name] for name in adjustable))
        ]
        for device in problem.first.devices
    }
    for batches in itertools.product(*(problem.candidates[name] for name in names)):
        if sum(problem.counts[n] * b for n, b in zip(names, batches, strict=True)) != problem.global_batch:
            continue
        for choices in itertools.product(*(of_device[name] for name in names)):
            plan = SharesPlan(
                batches=dict(zip(names, batches, strict=True)),
                precisions=Plan(problem=problem.name, devices=dict(zip(names, choices, strict=True))),
            )
            yield plan, evaluate_shares(problem, plan)


def small(problem):
    return (
        math.prod(
            math.prod(len(device.operators[o.name]) for o in problem.first.operators if o.role is Role.ADJUSTABLE)
            * len(problem.candidates[device.name])
            for device in problem.first.devices
        )
        <= 3000
    )


@given(st.integers(0, 2**32 - 1).map(random_shares).filter(small))
@example(random_shares(21059))  # plans that cost 4e-9 and 5e-9 beside others that cost 0.5
@settings(max_examples=40, deadline=None)
def test_every_method_against_all_plans(problem):
    evaluations = [evaluation for _, evaluation in all_plans(problem)]
    best = min((each.objective for each in evaluations if each.feasible), default=None)
    for method in ("default", "exact", "ilp", "exhaustive"):
        solution = qsync_opt.solve(problem, method)
        if best is None:
            assert solution.termination == "infeasible", method
            assert "limit" in solution.reason or "global batch" in solution.reason
            continue
        assert solution.bound <= best * (1 + 1e-6) + 1e-12, method
        if method == "default":
            assert solution.objective >= best * (1 - 1e-9) - 1e-12
        else:
            assert solution.termination == "optimal", method
            assert solution.objective == pytest.approx(best, rel=1e-6, abs=1e-12)


@given(st.integers(0, 2**32 - 1).map(random_shares).filter(small))
@settings(max_examples=25, deadline=None)
def test_no_joint_plan_is_faster_than_the_fastest(problem):
    fits = [each for _, each in all_plans(problem) if not any(text.startswith("memory") for text in each.violations)]
    quickest = fastest_shares(problem)
    if not fits:
        assert quickest is None
        return
    assert quickest.iteration_ns == quickest.bound_ns == min(each.iteration_ns for each in fits)


def two_types(seed=3):
    """A feasible problem of two types, one of which is faster."""
    draw = random.Random(seed)
    while True:
        problem = random_problem(draw, max_operators=5)
        if len(problem.devices) == 2 and all(
            len(device.operators[o.name]) > 1 for device in problem.devices for o in problem.adjustable
        ):
            break
    problem = replace(problem, devices=tuple(replace(d, count=2, memory_limit_kib=2**40) for d in problem.devices))
    anchors = {4: problem, 8: at_batch(problem, 4, 8)}
    return problem, anchors


def test_equal_batches_are_the_training_problem_itself():
    problem, anchors = two_types()
    workers = sum(device.count for device in problem.devices)
    equal = {device.name: 4 for device in problem.devices}
    shares = SharesProblem(
        name=problem.name,
        global_batch=4 * workers,
        latency_limit_ns=problem.latency_limit_ns,
        anchors=anchors,
        candidates={name: [4] for name in equal},
    )
    plan = uniform_plan(problem, None)
    expected, actual = evaluate(problem, plan), evaluate_shares(shares, SharesPlan(batches=equal, precisions=plan))
    assert actual.objective == pytest.approx(expected.objective)
    assert actual.iteration_ns == expected.iteration_ns
    assert dict(actual.memory_kib) == expected.memory_kib
    assert actual.feasible == expected.feasible


def test_a_worker_counts_by_the_square_of_its_share():
    problem, anchors = two_types()
    constant = {batch: replace(problem, devices=problem.devices) for batch in (4, 8)}  # as noise of weights alone
    workers = sum(device.count for device in problem.devices)
    for given_anchors, power in ((constant, 2), (anchors, 1)):  # at_batch: noise of samples alone
        shares = SharesProblem(
            name="x", global_batch=4 * workers, latency_limit_ns=2**40, anchors=given_anchors,
            candidates={device.name: [2, 4, 8] for device in problem.devices},
        )  # fmt: skip
        name = problem.devices[0].name
        at_four, at_eight = (shares.at(name, batch).devices[0].operators for batch in (4, 8))
        for operator, table in at_four.items():
            for precision, cost in table.items():
                assert at_eight[operator][precision].sensitivity == pytest.approx(2**power * cost.sensitivity)


def test_a_built_problem_has_the_fastest_joint_plan_as_its_limit():
    problem, anchors = two_types()
    total = 8 * sum(device.count for device in problem.devices)
    shares = build_shares_problem(anchors, total, slack=0.1)
    roomy = replace(shares, latency_limit_ns=2**40)
    quickest = fastest_shares(roomy)
    assert shares.latency_limit_ns == math.floor(1.1 * quickest.iteration_ns)
    solution = qsync_opt.solve(shares, "exact")
    assert solution.termination == "optimal"
    assert solution.evaluation.iteration_ns <= shares.latency_limit_ns
    counts = shares.counts
    assert sum(counts[n] * b for n, b in solution.plan.batches.items()) == total
    assert sum(counts[n] * share for n, share in solution.evaluation.shares.items()) == pytest.approx(1.0)
    with pytest.raises(ProblemError, match="no choice of the candidates adds up"):
        build_shares_problem(anchors, total, candidates={name: [10 * total] for name in counts})


def test_files_round_trip(tmp_path):
    _, anchors = two_types()
    shares = build_shares_problem(anchors, 60, slack=0.5)
    solution = qsync_opt.solve(shares)
    shares.save(tmp_path / "p.json")
    solution.plan.save(tmp_path / "plan.json")
    again, plan = qsync_opt.load_problem(tmp_path / "p.json"), qsync_opt.load_plan(tmp_path / "plan.json")
    assert again.to_json() == shares.to_json()
    assert plan.to_json() == solution.plan.to_json()
    assert qsync_opt.evaluate(again, plan) == solution.evaluation
    data = shares.to_json()
    for changes, text in (
        ({"more": 1}, "unknown key 'more'"),
        ({"anchors": data["anchors"][:1]}, "two local batches or more"),
        ({"anchors": [data["anchors"][0]] * 2}, "occurs twice"),
        ({"candidates": {}}, "every device type needs one"),
        ({"global_batch": 0}, "global_batch is 0"),
    ):
        with pytest.raises(ProblemError, match=text):
            SharesProblem.from_json(data | changes)


def test_plans_that_do_not_fit_are_refused_or_named():
    problem, anchors = two_types()
    shares = build_shares_problem(anchors, 60, slack=0.5)
    plan = qsync_opt.solve(shares).plan
    name = problem.devices[0].name
    with pytest.raises(ProblemError, match="allowed are"):
        evaluate_shares(shares, replace(plan, batches={**plan.batches, name: 10**6}))
    with pytest.raises(ProblemError, match="is of"):
        evaluate_shares(shares, replace(plan, batches={name: 4}))
    other = next(b for b in shares.candidates[name] if b != plan.batches[name])
    assert "add up to" in evaluate_shares(shares, replace(plan, batches={**plan.batches, name: other})).violations[0]
    with pytest.raises(ProblemError, match="differs from the first in its optimizer_ns"):
        replace(shares, anchors={**shares.anchors, 16: replace(problem, optimizer_ns=10**6)})


def test_why_there_is_no_plan():
    _, anchors = two_types()
    shares = build_shares_problem(anchors, 60)
    tight = qsync_opt.solve(replace(shares, latency_limit_ns=shares.latency_limit_ns - 1))
    assert tight.termination == "infeasible"
    assert f"the least value that could be met is {shares.latency_limit_ns} ns" in tight.reason
    uneven = replace(shares, candidates=dict.fromkeys(shares.counts, (7,)), global_batch=6)
    assert "add up to the global batch of 6" in qsync_opt.solve(uneven).reason
