"""Fronts hold every trade-off, and the problem turned round agrees with them."""

import itertools
import random
from dataclasses import replace

import pytest

from qsync_opt import solve
from qsync_opt.errors import ProblemError
from qsync_opt.formulations.assignment.core import CoreSearch
from qsync_opt.formulations.training import Sweep, fastest_within, latency_front, memory_front
from qsync_opt.testing import chain, random_problem, stacked_problem
from qsync_opt.training import evaluate


def solvable(count):
    problems = (random_problem(random.Random(seed)) for seed in range(200))
    return [problem for problem in problems if solve(problem, "exhaustive").plan is not None][:count]


@pytest.mark.parametrize("number", range(5))
def test_the_whole_front_is_every_trade_off(number):
    problem = solvable(5)[number]
    front = latency_front(problem, points=None, gap=0.0)
    for slower, faster in itertools.pairwise(front):
        assert slower.iteration_ns > faster.iteration_ns
        assert slower.objective < faster.objective
    for point in front:
        found = evaluate(replace(problem, latency_limit_ns=point.iteration_ns), point.plan)
        assert found.feasible
        assert found.iteration_ns == point.iteration_ns
        assert found.objective == pytest.approx(point.objective)
        best = solve(replace(problem, latency_limit_ns=point.iteration_ns), "exhaustive")
        assert best.objective == pytest.approx(point.objective, rel=1e-8, abs=1e-15)
    below = replace(problem, latency_limit_ns=front[-1].iteration_ns - 1)
    assert solve(below, "exhaustive").plan is None
    middle = front[len(front) // 2]
    turned = fastest_within(problem, middle.objective * (1 + 1e-6))
    assert turned.iteration_ns == middle.iteration_ns == turned.bound_ns


def test_points_of_a_front_carry_bounds():
    problem = chain().problem
    front = latency_front(problem, points=5)
    assert all(point.bound <= point.objective for point in front)
    memory = memory_front(problem, problem.devices[0].name, points=4)
    assert [p.objective for p in memory] == sorted(p.objective for p in memory)


def test_a_thorough_front_keeps_its_gap():
    for problem in solvable(6):
        for point in latency_front(problem, points=6, gap=1e-3, thorough=True):
            assert point.objective - point.bound <= 1e-3 * point.objective + 1e-12


def test_a_point_takes_what_its_plan_takes_where_casts_are_shared():
    for problem in solvable(12):
        shared = replace(problem, cast_sharing="producer")
        point = Sweep(shared, gap=1e-2).slowest()
        if point is not None:
            found = evaluate(replace(shared, latency_limit_ns=point.iteration_ns), point.plan)
            assert found.feasible
            assert (found.iteration_ns, dict(found.memory_kib)) == (point.iteration_ns, dict(point.memory_kib))


def test_what_cannot_be_asked():
    for points in (0, "5", 2.5):
        with pytest.raises(ProblemError, match=f"points is {points!r}, but a front needs a whole number of at least 1"):
            latency_front(chain().problem, points=points)
    with pytest.raises(ProblemError, match="sensitivity budget is -1"):
        fastest_within(chain().problem, -1.0)


@pytest.mark.parametrize("number", range(5))
def test_a_sweep_solves_under_other_limits_as_a_fresh_solve_does(number):
    problem = solvable(5)[number]
    sweep = Sweep(problem, gap=0.0)
    first = sweep.solve()
    limits = [first.iteration_ns, problem.latency_limit_ns * 2, first.iteration_ns + 1]
    for limit in limits:  # up and down: what one limit ruled out may come back under another
        fresh = solve(replace(problem, latency_limit_ns=limit), "exact")
        point = sweep.solve(limit, start=first.plan)
        assert (point is None) == (fresh.plan is None)
        if point is not None:
            assert point.objective == pytest.approx(fresh.objective, rel=1e-6, abs=1e-15)
            assert point.bound <= fresh.objective * (1 + 1e-9) + 1e-15


def test_a_sweep_with_an_aim_says_whether_it_can_be_kept():
    problem = chain().problem
    sweep = Sweep(problem, gap=0.0)
    best = sweep.solve().objective
    assert sweep.solve(aim=best * 2).objective <= best * 2
    assert sweep.solve(aim=best / 2).bound > best / 2


def test_the_fastest_of_a_sweep_is_a_plan_that_keeps_memory():
    problem = solvable(1)[0]
    limit, plan = Sweep(problem).fastest()
    found = evaluate(replace(problem, latency_limit_ns=limit), plan)
    assert found.feasible
    assert found.iteration_ns == limit


@pytest.mark.parametrize("outcome", ["given up", "searched"])
def test_a_guess_near_the_bound_is_made_no_more_once_it_was_given_up(monkeypatch, outcome):
    """At every further point it would be given up again, at the cost of a widest walk; the points are the same."""
    problem = stacked_problem(6)
    limits = [problem.latency_limit_ns - step * problem.latency_limit_ns // 50 for step in range(8)]
    sweep = Sweep(problem, gap=0.0)
    expected = [sweep.solve(limit) for limit in limits]
    guesses, searched = [], CoreSearch.near

    def near(self, allowed_Z, dual, most, known):
        guesses.append(most)
        return (dual.bound, allowed_Z) if outcome == "given up" else searched(self, allowed_Z, dual, most, known)

    monkeypatch.setattr(CoreSearch, "near", near)
    sweep = Sweep(problem, gap=0.0)
    found = [sweep.solve(limit) for limit in limits]
    assert len(guesses) == 1 if outcome == "given up" else len(guesses) > 5
    assert [point.objective for point in found] == pytest.approx([point.objective for point in expected], rel=1e-6)
