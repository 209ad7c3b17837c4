"""Intervals of problems, quantiles, and the choice of what to profile."""

from dataclasses import replace

import pytest

from qsync_opt.costs import DeviceProfile, MeasuredCost, estimate_lines
from qsync_opt.errors import ProblemError
from qsync_opt.testing import chain, make_cluster, make_profile, make_sensitivities, residual_graph
from qsync_opt.training import (
    Problem,
    build_problem,
    choose_profiles,
    interval_problem,
    iteration_interval,
    load_problem,
    operator_intervals,
    plan_regret,
    profile_groups,
    solve,
)


def _learned(profile: DeviceProfile, operators: dict[str, float]) -> DeviceProfile:
    """The profile with the times of some operators learned: intervals of a factor each, down and up."""
    measurements = {}
    for key, table in profile.measurements.items():
        names = [name for name, own in profile.operators.items() if own == key]
        factor = max((operators.get(name, 1.0) for name in names), default=1.0)

        def widened(cost: MeasuredCost, factor: float = factor) -> MeasuredCost:
            times = (cost.forward_ns, cost.backward_ns)
            ends = tuple(round(x) for t in times for x in (t / factor, t * factor))
            return replace(cost, source="learned", interval_ns=ends) if factor > 1 else cost

        measurements[key] = {precision: widened(cost) for precision, cost in table.items()}
    return replace(profile, measurements=measurements, options={"estimated_by": "learned from made-up times"})


def _problem(operators: dict[str, float], **more: object) -> Problem:
    graph = residual_graph()
    profiles = {"slow": _learned(make_profile(graph), operators)}
    arguments = {"slack": 0.02} | more
    return build_problem(graph, profiles, make_sensitivities(graph), make_cluster(count=2), **arguments)  # type: ignore[arg-type]


WIDE = {"up": 3.0, "down": 1.5, "head": 1.1}


def _check_that_prices_are_inside(problem: Problem) -> None:
    for (device, name), table in operator_intervals(problem).items():
        for precision, (low, high, back_low, back_high) in table.items():
            cost = problem.device(device).operators[name][precision]
            assert low <= cost.forward_ns <= high
            assert back_low <= cost.backward_ns <= back_high


def test_intervals_are_noted_around_the_priced_times_and_survive_the_file(tmp_path) -> None:
    problem = _problem(WIDE)
    intervals = operator_intervals(problem)
    assert ("slow", "up") in intervals
    _check_that_prices_are_inside(problem)
    problem.save(tmp_path / "p.json")
    assert operator_intervals(load_problem(tmp_path / "p.json")) == intervals


def test_what_neighbours_at_their_high_ends_save_in_launches_is_inside_the_interval() -> None:
    """A card that waits for the host charges launches to operators, and fewer where all of them take longer."""
    graph = residual_graph()
    factors = dict.fromkeys((operator.name for operator in graph), 3.0) | {"head": 1.01}
    profiles = {"slow": _learned(make_profile(graph, kind="cuda", host_ns=5000), factors)}
    problem = build_problem(graph, profiles, make_sensitivities(graph), make_cluster(count=2), slack=0.02)
    _check_that_prices_are_inside(problem)


def test_problems_without_learned_costs_have_no_intervals() -> None:
    graph = residual_graph()
    problem = build_problem(graph, {"slow": make_profile(graph)}, make_sensitivities(graph), make_cluster(count=2))
    assert operator_intervals(problem) == {}
    assert not [path for path in problem.extras if "x-intervals" in path]
    with pytest.raises(ProblemError, match="no intervals"):
        choose_profiles(problem, 1)


def test_limits_hold_at_a_quantile_and_the_plan_says_so() -> None:
    plain, careful = _problem(WIDE, latency_limit_ns=10**9), _problem(WIDE, latency_limit_ns=10**9, quantile=0.9)
    for name in ("up", "down"):
        for precision, cost in careful.device("slow").operators[name].items():
            assert cost.forward_ns > plain.device("slow").operators[name][precision].forward_ns
    plan = solve(careful).plan
    assert plan is not None
    assert any("0.9 quantile" in line for line in estimate_lines(plan.extras))
    assert not any("quantile" in line for line in estimate_lines(plain.extras))
    with pytest.raises(ProblemError, match="quantile"):
        _problem(WIDE, quantile=1.0)


def test_a_plan_at_the_95_quantile_keeps_its_limit_with_every_time_at_its_high_end() -> None:
    problem = _problem(WIDE, quantile=0.95)
    plan = solve(problem).plan
    assert plan is not None
    interval = iteration_interval(problem, plan)
    assert interval.low_ns <= interval.iteration_ns <= problem.latency_limit_ns
    assert interval.high_ns <= problem.latency_limit_ns * (1 + 1e-6)


def test_an_iteration_has_an_interval() -> None:
    problem = _problem(WIDE)
    plan = solve(problem).plan
    assert plan is not None
    interval = iteration_interval(problem, plan)
    assert interval.low_ns < interval.iteration_ns < interval.high_ns


def test_a_damaged_note_is_refused() -> None:
    problem = _problem(WIDE)
    path = ("devices", "slow", "x-intervals")
    for note, message in (
        ([1], "list"),
        ({"nobody": {}}, "nobody"),
        ({"up": {"INT8": [1, 2, 3]}}, "four times"),
        ({"up": {"INT8": [9, 2, 3, 4]}}, "four times"),
    ):
        with pytest.raises(ProblemError, match=message):
            operator_intervals(replace(problem, extras={**problem.extras, path: note}))


def test_the_widest_interval_of_an_operator_that_matters_is_chosen_first() -> None:
    problem = _problem({"up": 3.0, "down": 1.001}, slack=0.0)
    choice = choose_profiles(problem, 1)
    assert choice.measurements[0].operators == ("up",)
    assert choice.measurements[0].regret > 0
    # Two of the three operators share their measurement.
    assert choice.groups == 2


def test_operators_that_cannot_change_the_plan_are_left_out() -> None:
    # The norm is fixed: whatever it takes, every plan takes it. With slack enough for FP32 nothing else matters either.
    choice = choose_profiles(_problem({"norm": 1.2}, latency_limit_ns=10**12), 3)
    assert choice.measurements == ()
    assert choice.complete


@pytest.mark.parametrize("method", ["kmeans", "facility", "random"])
def test_baselines_choose_distinct_groups(method: str) -> None:
    problem = _problem(WIDE | {"norm": 2.0, "gelu": 1.3})
    for budget in (1, 3, 99):
        choice = choose_profiles(problem, budget, method=method, seed=3)
        assert len({m.operators for m in choice.measurements}) == min(budget, len(profile_groups(problem)))
        assert choice == choose_profiles(problem, budget, method=method, seed=3)


@pytest.mark.parametrize("operators", [{"up": 3.0, "down": 1.05}, {"up": 1.2, "gelu": 2.0, "down": 1.5}])
def test_the_exact_choice_is_the_best_and_the_bounds_are_better_than_chance(operators: dict[str, float]) -> None:
    problem = _problem(operators)
    groups = profile_groups(problem)
    exact = choose_profiles(problem, 1, method="exact").targets
    bounds = choose_profiles(problem, 1).targets

    def left(chosen) -> float:
        """Mean regret over the ends of the intervals of what was not measured."""
        total = 0.0
        others = [group for group in groups if not set(group) & set(chosen)]
        for end in range(2 ** len(groups)):
            up = {g for g in range(len(groups)) if end >> g & 1}
            high = [t for g in up for t in groups[g]]
            low = [t for g in range(len(groups)) if g not in up for t in groups[g]]
            world = interval_problem(problem, low=low, high=high)
            known = interval_problem(
                problem, low=[t for t in low if t in chosen], high=[t for t in high if t in chosen]
            )
            plan = solve(known).plan or solve(problem).plan
            assert plan is not None
            total += plan_regret(world, plan)
        return total / 2 ** len(groups) if others else 0.0

    each = [left(group) for group in groups]
    assert left(exact) == pytest.approx(min(each))
    assert left(bounds) <= sum(each) / len(each) + 1e-9


def test_bad_arguments_are_named() -> None:
    problem = _problem(WIDE)
    with pytest.raises(ProblemError, match="budget"):
        choose_profiles(problem, 0)
    with pytest.raises(ProblemError, match="allowed are bounds"):
        choose_profiles(problem, 1, method="guess")
    with pytest.raises(ProblemError, match="has no plan"):
        choose_profiles(replace(problem, latency_limit_ns=1), 1)
    with pytest.raises(ProblemError, match="no intervals"):
        choose_profiles(chain().problem, 1)
