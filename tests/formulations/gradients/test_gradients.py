"""Every method gives the optimum of compression problems, with a valid bound."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import qsync_opt
from qsync_opt.errors import UnsupportedError
from qsync_opt.gradients import Bucket, Choice, Plan, Problem, evaluate

DATA = Path(__file__).parents[2] / "data" / "gradients"
SHIPPED = sorted(DATA.glob("gradients-public-*.json"))
METHODS = ("dynamic", "exact", "ilp", "exhaustive")


def problem_of(buckets, *, objective="variance", limit=None, compute_end=0, tail=0):
    return Problem(
        name="case",
        compute_end_ns=compute_end,
        tail_ns=tail,
        latency_limit_ns=limit if objective == "variance" else None,
        variance_limit=limit if objective == "latency" else None,
        objective=objective,
        buckets=tuple(
            Bucket(
                name=f"b{k}",
                ready_ns=ready,
                choices={f"c{c}": Choice(time_ns=t, variance=v) for c, (t, v) in enumerate(choices)},
            )
            for k, (ready, choices) in enumerate(buckets)
        ),
    )


@st.composite
def problems(draw):
    choice = st.tuples(st.integers(0, 60), st.sampled_from([0.0, 1e-6, 3e-6, 0.1, 0.25, 1 / 3, 2.0, 7.5, 40.0]))
    buckets = draw(
        st.lists(st.tuples(st.integers(0, 150), st.lists(choice, min_size=1, max_size=4)), min_size=1, max_size=6)
    )
    objective = draw(st.sampled_from(["variance", "latency"]))
    free = problem_of(buckets, objective=objective, compute_end=draw(st.integers(0, 200)), tail=draw(st.integers(0, 9)))
    every = [
        evaluate(free, Plan(schemes=dict(zip([b.name for b in free.buckets], names, strict=True))))
        for names in itertools.product(*(bucket.choices for bucket in free.buckets))
    ]
    values = sorted({e.iteration_ns if objective == "variance" else e.variance for e in every})
    limit = draw(st.one_of(st.none(), st.sampled_from(values), st.just(values[0] * 0.999)))
    if limit is not None and objective == "variance":
        limit = int(limit)
    kept = [
        e.objective
        for e in every
        if limit is None or (e.iteration_ns if objective == "variance" else e.variance) <= limit
    ]
    problem = problem_of(buckets, objective=objective, limit=limit, compute_end=free.compute_end_ns, tail=free.tail_ns)
    return problem, min(kept, default=None)


@given(problems())
@settings(max_examples=150, deadline=None)
def test_every_method_finds_the_least_objective(case):
    problem, least = case
    for method in METHODS:
        solution = qsync_opt.solve(problem, method)
        if least is None:
            assert (solution.termination, solution.plan) == ("infeasible", None)
            assert "least value that could be met" in solution.reason
        else:
            assert solution.termination == "optimal"
            assert solution.objective == pytest.approx(least, rel=1e-9, abs=1e-300)
            assert solution.bound <= solution.objective


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
@pytest.mark.parametrize("method", [None, "default", "exact", "ilp"])
def test_the_recorded_optima(path, method):
    problem = qsync_opt.load_problem(path)
    solution = qsync_opt.solve(problem, method)
    assert solution.objective == pytest.approx(problem.optimum.objective, rel=1e-9)
    assert solution.termination == "optimal"


def large(seed, num_buckets, objective, tightness=0.5):
    import random

    draw = random.Random(seed)
    buckets, ready = [], 0
    for _ in range(num_buckets):
        ready += draw.randrange(100_000, 900_000)
        full = draw.randrange(500_000, 4_000_000)
        rows = [(full, 0.0), (full // 2, 1e-6), (full // 3, 3e-4), (full // 4, 2e-2), (full // 6, 0.8)]
        weight = 10 ** draw.uniform(-3, 3)
        buckets.append((ready, [(int(t * draw.uniform(0.8, 1.2)), v * weight * draw.uniform(0.5, 2)) for t, v in rows]))
    free = problem_of(buckets, objective=objective, compute_end=ready, tail=1000)
    ends = [evaluate(free, Plan(schemes={b.name: f"c{c}" for b in free.buckets})) for c in (0, len(rows) - 1)]
    slow, fast = ends
    if objective == "variance":
        limit = int(fast.iteration_ns + tightness * (slow.iteration_ns - fast.iteration_ns))
    else:
        limit = slow.variance + tightness**8 * (fast.variance - slow.variance)
    return problem_of(buckets, objective=objective, limit=limit, compute_end=ready, tail=1000)


@pytest.mark.parametrize("objective", ["variance", "latency"])
@pytest.mark.parametrize("seed", range(3))
def test_sixty_buckets_are_proved_and_agree_with_the_integer_program(objective, seed):
    problem = large(seed, 60, objective)
    solution = qsync_opt.solve(problem)
    assert solution.termination == "optimal"
    assert solution.objective == pytest.approx(qsync_opt.solve(problem, "ilp").objective, rel=1e-6)


@pytest.mark.parametrize("objective", ["variance", "latency"])
def test_a_gap_stops_the_search_with_a_valid_bound(objective):
    problem = large(7, 40, objective)
    best = qsync_opt.solve(problem, "exact").objective
    solution = qsync_opt.solve(problem, gap=0.3)
    assert solution.gap <= 0.3
    assert solution.bound <= best * (1 + 1e-9)


def test_without_a_limit_nothing_is_compressed_or_everything():
    buckets = [(10, [(50, 0.0), (5, 1.0)]), (20, [(70, 0.0), (90, 2.0)])]
    plain = qsync_opt.solve(problem_of(buckets))
    assert dict(plain.plan.schemes) == {"b0": "c0", "b1": "c0"}
    fast = qsync_opt.solve(problem_of(buckets, objective="latency"))
    assert fast.objective == 90.0


def test_exhausting_a_large_problem_is_refused():
    with pytest.raises(UnsupportedError, match="at most 200000"):
        qsync_opt.solve(large(0, 20, "variance"), "exhaustive")


def test_an_earlier_deadline_never_lowers_the_variance():
    problem = large(3, 12, "variance")
    data = problem.to_json()
    limits = range(problem.latency_limit_ns, problem.latency_limit_ns + 5_000_000, 500_000)
    values = [qsync_opt.solve(Problem.from_json(data | {"latency_limit_ns": limit})).objective for limit in limits]
    assert values == sorted(values, reverse=True)


@pytest.mark.parametrize("method", METHODS)
def test_a_variance_limit_that_only_the_finest_plan_keeps(method):
    problem = problem_of([(0, [(0, 1e-6), (1, 0.0)])], objective="latency", limit=0.0)
    solution = qsync_opt.solve(problem, method)
    assert (solution.objective, dict(solution.plan.schemes)) == (1.0, {"b0": "c1"})


@pytest.mark.slow
@given(problems())
@settings(max_examples=1000, deadline=None)
def test_every_method_on_a_thousand_problems(case):
    problem, least = case
    for method in METHODS:
        solution = qsync_opt.solve(problem, method)
        assert solution.objective == (None if least is None else pytest.approx(least, rel=1e-9, abs=1e-300))


@pytest.mark.parametrize("solver", ["ortools", "pulp"])
def test_the_program_is_solved_by_the_solver_that_is_named(solver):
    problem = problem_of([(0, [(4, 0.0), (1, 2.0)]), (1, [(4, 0.0), (1, 3.0)])], limit=6)
    solution = qsync_opt.solve(problem, "ilp", solver=solver)
    assert (solution.objective, solution.solver.partition(":")[0]) == (2.0, solver)
    with pytest.raises(UnsupportedError, match=r"'ortools:cp-sat' takes whole columns .*; use ortools, pulp, highs or"):
        qsync_opt.solve(problem, "ilp", solver="cp-sat")
