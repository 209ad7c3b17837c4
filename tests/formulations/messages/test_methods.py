from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import qsync_opt
from qsync_opt.errors import UnsupportedError
from qsync_opt.formulations.messages.frontier import frontiers
from qsync_opt.formulations.messages.ports import plan_by_ports, shares_rows
from qsync_opt.formulations.messages.threshold import plan_by_thresholds
from qsync_opt.messages import Exchange, Pair, Problem, evaluate, uniform_plan, variance_factor
from qsync_opt.solving import PROOF_GAP, TerminationStatus

MENUS = ((2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8, 16, 32), (2, 32), (3, 4, 5), (4,))
GOALS = ("limit", "weights", "variance")


def make_problem(seed, sizes, menu, goal, share, hidden, ports=False, packing=False):
    """A problem whose goal lies at ``share`` between the extreme plans."""
    rng = np.random.default_rng(seed)
    exchanges = []
    for e, rounds in enumerate(sizes):
        groups = [
            tuple(
                Pair(
                    source=i // 2 if ports else i,
                    target=3 + i % 2 if ports else i + 1,
                    fixed_ns=int(rng.integers(0, 60)),
                    ns_per_byte=float(rng.choice([0.0, *rng.uniform(0.1, 3, 8)])),
                    beta=np.round(rng.lognormal(0, 2, count), 1),
                    pack_ns_per_byte=float(rng.choice([0.0, *rng.uniform(0.01, 2, 3)])) if packing else 0.0,
                    unpack_ns_per_byte=float(rng.choice([0.0, *rng.uniform(0.01, 2, 3)])) if packing else 0.0,
                )
                for i, count in enumerate(counts)
            )
            for counts in rounds
        ]
        hidden_ns = int(rng.integers(0, 400)) if hidden else 0
        exchanges.append(
            Exchange(name=f"e{e}", dim=int(rng.integers(1, 65)), rounds=tuple(groups), hidden_ns=hidden_ns, ports=ports)
        )
    bits = {str(width): variance_factor(width) for width in menu}
    common = {"name": "p", "bits": bits, "exchanges": tuple(exchanges)}
    free = Problem(time_limit_ns=None, variance_weight=1.0, time_weight=0.0, **common)
    low, high = (evaluate(free, uniform_plan(free, width)) for width in (min(menu), max(menu)))
    limit = int(low.exposed_ns + share * (high.exposed_ns - low.exposed_ns)) + 1
    worth = (low.variance + 0.1) / (high.exposed_ns + 1) * share
    return Problem(
        time_limit_ns=limit if goal == "limit" else None,
        variance_weight=1.5,
        time_weight=worth if goal == "weights" else None,
        variance_limit=high.variance + share * (low.variance - high.variance) + 1e-9 if goal == "variance" else None,
        **common,
    )


def problems(most_messages):
    counts = st.lists(st.integers(0, most_messages), min_size=0, max_size=2)
    sizes = st.lists(st.lists(counts, min_size=0, max_size=2), min_size=1, max_size=2)
    return st.builds(
        make_problem, st.integers(0, 10**6), sizes, st.sampled_from(MENUS), st.sampled_from(GOALS),
        st.floats(0.0, 1.0), st.booleans(), packing=st.booleans(),
    )  # fmt: skip


def close(first, second):
    return first == pytest.approx(second, rel=1e-6, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(problems(1))
# A price equal to a step's gain hid that step from the table, and a bound below 0 was taken for 0 when pruning.
@example(make_problem(3844, [[[1, 0], [1]]], (1, 2, 4, 8, 16, 32), "limit", 0.5, hidden=False))
def test_every_method_agrees_with_exhaustive_search(problem):
    oracle = qsync_opt.solve(problem, "exhaustive")
    for method in ("threshold", "exact", "ilp"):
        solution = qsync_opt.solve(problem, method)
        # A solver's tolerance is absolute: next to a variance of 0 it proves no relative gap.
        assert method == "ilp" or solution.termination is TerminationStatus.OPTIMAL, method
        assert close(solution.objective, oracle.objective), method


@pytest.mark.parametrize("method", ["threshold", "exact", "ilp", "exhaustive"])
def test_messages_that_matter_to_nobody_keep_the_limit_too(method):
    """Their scores are 0: no price of time makes them wide."""
    pair = Pair(source=1, target=2, fixed_ns=37, ns_per_byte=2.5, beta=np.zeros(2))
    bits = {str(width): variance_factor(width) for width in (2, 4, 8)}
    for spare_ns, most_bits in ((0, 4), (41, 6), (500, 16)):
        problem = Problem(
            name="zeros", time_limit_ns=37 + 80 + spare_ns, variance_weight=1.0, time_weight=None, bits=bits,
            exchanges=(Exchange(name="e", dim=64, rounds=((pair,),)),),
        )  # fmt: skip
        solution = qsync_opt.solve(problem, method)
        assert solution.objective == 0.0 and solution.termination is TerminationStatus.OPTIMAL
        assert sum(solution.plan.bits["e"][0][0].tolist()) <= most_bits


@settings(max_examples=40, deadline=None)
@given(problems(7))
# A weight next to nothing: solvers' own scaling went by it.
@example(make_problem(22, [[[3]]], (2, 4, 8), "weights", 2.2250738585e-313, hidden=True))
def test_exact_search_agrees_with_the_program_and_thresholds_have_a_bound(problem):
    exact, program = qsync_opt.solve(problem, "exact"), qsync_opt.solve(problem, "ilp")
    assert exact.termination is TerminationStatus.OPTIMAL
    assert close(exact.objective, program.objective)
    assert qsync_opt.solve(problem).objective <= exact.objective * (1 + 1e-6) + 1e-9


@settings(max_examples=30, deadline=None)
@given(problems(7))
def test_what_whole_messages_prove_is_below_the_optimum_and_not_below_what_prices_prove(problem):
    exact = qsync_opt.solve(problem, "exact")
    plan = plan_by_ports if shares_rows(problem) else plan_by_thresholds
    planned = plan(problem, frontiers(problem))  # solving would hide a bound above its plan
    assert planned.value <= planned.bound <= exact.objective * (1 + 1e-9) + 1e-9


@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("menu", MENUS[:4])
@pytest.mark.parametrize("packing", [False, True])
def test_many_messages_have_a_proved_gap_below_one_message_a_pair(goal, hidden, menu, packing):
    sizes = [[[900, 1200], [800, 700]], [[1000, 900], [600, 1300]]]
    problem = make_problem(5, sizes, menu, goal, 0.4, hidden, packing=packing)
    solution = qsync_opt.solve(problem)
    pairs = [pair for exchange in problem.exchanges for pair in exchange.pairs]
    if goal == "variance":
        assert solution.gap < 0.02
        return
    step = max(problem.menu.values()) * max(float(pair.beta.max()) for pair in pairs) * problem.variance_weight
    assert solution.objective - solution.bound <= len(pairs) * step
    assert solution.gap < (5e-3 if packing else 2e-3)


def test_the_bound_of_thresholds_is_that_of_the_linear_relaxation():
    """With two widths, ten equal messages and room for half of them, the bound is exact and half are raised."""
    pair = Pair(source=0, target=1, fixed_ns=10, ns_per_byte=1.0, beta=np.ones(10))
    problem = Problem(
        name="half", time_limit_ns=10 + 10 * 2 + 30, variance_weight=1.0, time_weight=None, bits={"2": 0.5, "8": 0.0},
        exchanges=(Exchange(name="e", dim=8, rounds=((pair,),)),),
    )  # fmt: skip
    solution = qsync_opt.solve(problem)
    assert solution.objective == pytest.approx(2.5) and solution.bound == pytest.approx(2.5)
    assert np.sort(solution.plan.bits["e"][0][0]).tolist() == [2] * 5 + [8] * 5


def test_a_limit_that_no_plan_keeps_is_infeasible_with_the_least_time():
    problem = make_problem(1, [[[3, 4]]], (2, 4, 8), "limit", 0.5, False)
    late = qsync_opt.solve(make_late(problem))
    assert late.termination is TerminationStatus.INFEASIBLE
    assert "no plan keeps the time limit of 0 ns" in late.reason and "narrowest" in late.reason
    for method in ("exact", "ilp", "exhaustive"):
        assert qsync_opt.solve(make_late(problem), method).termination is TerminationStatus.INFEASIBLE


def make_late(problem):
    return replace(problem, time_limit_ns=0)


def test_groups_never_beat_single_messages():
    problem = make_problem(3, [[[350, 420]], [[300, 310]]], (2, 4, 8), "limit", 0.4, False)
    grouped = qsync_opt.solve(problem, "grouped", time_limit_s=20)
    single = qsync_opt.solve(problem)
    assert grouped.bound is None and grouped.termination is not TerminationStatus.OPTIMAL
    assert single.bound <= grouped.objective and single.objective <= grouped.objective


def test_groups_are_scored_by_their_own_messages():
    """The released code indexes the unsorted scores with sorted positions, so that a group's score is another's."""
    beta = np.zeros(300)
    beta[::3] = 5.0  # the expensive messages lie apart
    pair = Pair(source=0, target=1, fixed_ns=0, ns_per_byte=1.0, beta=beta)
    problem = Problem(
        name="groups", time_limit_ns=200 * 2 + 100 * 8, variance_weight=1.0, time_weight=None,
        bits={str(width): variance_factor(width) for width in (2, 8)},
        exchanges=(Exchange(name="e", dim=8, rounds=((pair,),)),),
    )  # fmt: skip
    widths = qsync_opt.solve(problem, "grouped").plan.bits["e"][0][0]
    assert set(widths[beta > 0]) == {8} and set(widths[beta == 0]) == {2}


def test_too_large_for_checking_methods_says_what_to_use():
    problem = make_problem(3, [[[30_000]]], (2, 4, 8), "limit", 0.4, False)
    for method in ("ilp", "exhaustive"):
        with pytest.raises(UnsupportedError, match="use"):
            qsync_opt.solve(problem, method)


def test_scaling_scores_scales_the_variance():
    problem = make_problem(8, [[[50, 60]]], (1, 2, 4, 8), "limit", 0.3, False)
    exchange = problem.exchanges[0]
    scaled = tuple(tuple(replace(pair, beta=pair.beta * 1e-9) for pair in group) for group in exchange.rounds)
    small = replace(problem, exchanges=(replace(exchange, rounds=scaled),))
    first, second = qsync_opt.solve(problem), qsync_opt.solve(small)
    assert second.objective == pytest.approx(first.objective * 1e-9, rel=1e-5)
    assert first.gap <= PROOF_GAP


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10**6), st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=2),
    st.sampled_from(((2, 4, 8), (2, 32))), st.sampled_from(GOALS), st.floats(0.0, 1.0), st.booleans(),
)  # fmt: skip
def test_shared_ports_are_searched_exactly_and_their_prices_have_a_valid_bound(seed, counts, menu, goal, share, hidden):
    problem = make_problem(seed, [[group[:2]] if k else [group] for k, group in enumerate(counts)], menu, goal, share,
                           hidden, ports=True, packing=seed % 2 == 0)  # fmt: skip
    oracle = qsync_opt.solve(problem, "ilp")
    if problem.num_messages <= 7:
        assert close(qsync_opt.solve(problem, "exhaustive").objective, oracle.objective)
    for method in ("threshold", "exact"):
        solution = qsync_opt.solve(problem, method)  # checked: feasible, and its bound is not above it
        assert solution.termination is TerminationStatus.OPTIMAL and close(solution.objective, oracle.objective)
    planned = plan_by_ports(problem, frontiers(problem))  # solving would hide a bound above its plan
    assert planned.bound <= oracle.objective * (1 + 1e-6) + 1e-9


def test_ports_of_many_messages_are_planned_close_to_the_bound_and_the_time_of_a_port_is_the_sum_of_its_pairs():
    sizes = [[[900, 1200, 800, 1500]], [[1000, 900, 600, 1300]]]
    problem = make_problem(3, sizes, (2, 4, 8), "limit", 0.4, False, ports=True)
    solution = qsync_opt.solve(problem)
    assert solution.gap < 5e-3
    exchange = problem.exchanges[0]
    bits = [int(pair.sum(dtype=np.int64)) for pair in solution.plan.bits[exchange.name][0]]
    first, second, third, fourth = exchange.rounds[0]  # 0>3, 0>4, 1>3, 1>4

    def port(*members):
        return max(p.fixed_ns for p, _ in members) + sum(p.ns_per_byte * exchange.dim * b / 8 for p, b in members)

    pairs = list(zip((first, second, third, fourth), bits, strict=True))
    expected = max(port(*pairs[:2]), port(*pairs[2:]), port(pairs[0], pairs[2]), port(pairs[1], pairs[3]))
    assert solution.evaluation.exchange_ns[exchange.name] == pytest.approx(expected)


@pytest.mark.parametrize("per_byte", [5e-23, 1e-17, 1e-7, 0.03, 0.5, 5.0])
def test_exchanges_that_are_partly_hidden_are_planned_with_packing_of_any_speed(per_byte):
    """The price of an exchange that is just hidden depends on that of its packing."""
    rng, exchanges = np.random.default_rng(0), []
    for k, (dim, hidden_ns) in enumerate(((128, 900_000), (128, 500_000), (128, 1_200_000), (40, 500_000))):
        pairs = [
            Pair(
                source=i, target=1 - i, fixed_ns=400_000 - 50_000 * i, ns_per_byte=7.4 + 0.3 * i,
                beta=rng.lognormal(-5 * k, 1, 1500 + 40 * i), pack_ns_per_byte=per_byte, unpack_ns_per_byte=per_byte,
            )
            for i in range(2)
        ]  # fmt: skip
        exchanges.append(Exchange(name=f"e{k}", dim=dim, rounds=(tuple(pairs),), hidden_ns=hidden_ns))
    bits = {str(width): variance_factor(width) for width in (1, 2, 4, 8, 16, 32)}
    free = Problem(
        name="p", time_limit_ns=None, variance_weight=1.0, time_weight=1.0, bits=bits, exchanges=tuple(exchanges)
    )
    four = evaluate(free, uniform_plan(free, 4))
    solution = qsync_opt.solve(replace(free, time_limit_ns=int(four.exposed_ns) + 1, time_weight=None))
    assert solution.gap < 5e-3 and solution.objective < four.variance / 4


def test_exact_ends_by_itself_where_too_many_plans_are_near(monkeypatch):
    problem = make_problem(3, [[[40, 50, 30, 60]]], (2, 4, 8), "limit", 0.4, False, ports=True)
    monkeypatch.setattr("qsync_opt.formulations.messages.exact._MOST_JOINED", 3)
    solution = qsync_opt.solve(problem, "exact")
    assert solution.termination is TerminationStatus.FEASIBLE and solution.gap > 0
    assert "'ilp' may prove more" in solution.reason
    assert close(solution.objective, qsync_opt.solve(problem).objective)


def test_packing_of_a_worker_is_one_sum_that_nothing_hides():
    """Two workers send to each other; their links hide behind computation, and exact rows would be packed too long."""
    beta = np.random.default_rng(0).lognormal(0, 1.5, 2000)
    first = Pair(source=0, target=1, fixed_ns=100, ns_per_byte=0.01, beta=beta, pack_ns_per_byte=0.5)
    second = Pair(
        source=1, target=0, fixed_ns=100, ns_per_byte=0.01, beta=beta[:1500], pack_ns_per_byte=0.25,
        unpack_ns_per_byte=0.25,
    )  # fmt: skip
    exchange = Exchange(name="e", dim=64, rounds=((first, second),), hidden_ns=10**6)
    bits = {str(width): variance_factor(width) for width in (1, 2, 4, 8, 32)}
    free = Problem(name="p", time_limit_ns=None, variance_weight=1.0, time_weight=1.0, bits=bits, exchanges=(exchange,))
    four = evaluate(free, uniform_plan(free, 4))
    assert four.exposed_ns == four.codec_ns == pytest.approx(max(0.5 * 2000 + 0.25 * 1500, 0.25 * 1500) * 32)
    problem = replace(free, time_limit_ns=int(four.exposed_ns), time_weight=None)
    solution = qsync_opt.solve(problem)
    assert solution.gap < 1e-3 and solution.evaluation.codec_ns <= four.codec_ns
    assert 1.5 * solution.objective < four.variance
    unpacked = replace(first, pack_ns_per_byte=0.0), replace(second, pack_ns_per_byte=0.0, unpack_ns_per_byte=0.0)
    plain = replace(problem, exchanges=(replace(exchange, rounds=(unpacked,)),))
    assert qsync_opt.solve(plain).objective == 0.0  # all exact


def test_times_of_rounds_are_shifted_to_where_whole_messages_fit(monkeypatch):
    """Whole messages of eight pairs seldom fill the time of one round all at once."""
    rounds = [[2000] * 8] * 7
    problem = make_problem(7, [rounds, rounds], (2, 4, 8), "limit", 0.4, False)
    shifted = qsync_opt.solve(problem)
    module = "qsync_opt.formulations.messages.threshold"
    monkeypatch.setattr(f"{module}.aligned", lambda problem, found, round_ns, prices: round_ns)
    plain = qsync_opt.solve(problem)
    assert plain.bound == shifted.bound and shifted.gap < 0.8 * plain.gap
