"""Every method, on small random problems and on recorded optima."""

import math
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import qsync_opt
from qsync_opt.errors import UnsupportedError
from qsync_opt.serving import Problem, load_problem

pytest.importorskip("ortools")
KINDS = ("attn", "mlp")


@st.composite
def problems(draw, groups=4, devices=3, schemes=2):
    """A small problem whose limits matter; not every one has a plan."""
    number = lambda low, high: draw(st.integers(low, high))  # noqa: E731
    names = [f"d{i}" for i in range(number(1, devices))]
    kinds = [KINDS[i % 2] for i in range(number(1, groups))]
    schemes = [f"W{4 * 2**i}" for i in range(schemes)]
    options = number(1, 2)
    pair = lambda high: [number(0, high), number(0, high)]  # noqa: E731
    weights = {k: {s: number(20, 60) * (i + 1) for i, s in enumerate(schemes)} for k in KINDS}
    harm = {f"{i}.{k}": {s: number(0, 9) / 4 for s in schemes} for i, k in enumerate(kinds)}
    return Problem.from_json(
        {
            "format": "qsync-serving/1",
            "name": "random",
            "new_tokens": number(1, 6),
            "schemes": schemes,
            "harm_limit": draw(st.sampled_from([None, 1.0, 3.0, 5.0])),
            "microbatches": [{"prefill": number(1, 4), "decode": number(1, 4)} for _ in range(options)],
            "devices": [{"name": name, "memory_kib": number(40, 400)} for name in names],
            "groups": [{"name": f"{i}.{k}", "kind": k} for i, k in enumerate(kinds)],
            "weights_kib": weights,
            "state_kib": {k: [number(0, 30) for _ in range(options)] for k in KINDS},
            "costs": {
                name: {k: {s: [pair(99) for _ in range(options)] for s in schemes} for k in KINDS} for name in names
            },
            "ends": {
                name: {
                    "first_kib": number(0, 20),
                    "last_kib": number(0, 20),
                    "first": [pair(9) for _ in range(options)],
                    "last": [pair(9) for _ in range(options)],
                }
                for name in names
            },
            "links": {f"{a}>{b}": [pair(30) for _ in range(options)] for a in names for b in names if a != b},
            "harm": harm,
            "optimum": None,
        }
    )


@settings(max_examples=60)
@given(problems(), st.sampled_from([1, 40, 4000]))
def test_exact_equals_the_oracle_and_the_default_lies_between_bound_and_its_plan(problem, few):
    """Whatever number of plans that are left is tried out instead of bounded."""
    oracle = qsync_opt.solve(problem, "exhaustive")
    with mock.patch("qsync_opt.formulations.serving.search._FEW_DRAFTS", few):
        exact = qsync_opt.solve(problem, "exact")
        default = qsync_opt.solve(problem)
    assert exact.termination == oracle.termination
    assert exact.objective == oracle.objective
    if oracle.objective is None:
        assert default.termination == "infeasible"
        assert exact.reason.startswith(("memory:", "harm:"))
    else:
        assert default.bound <= oracle.objective <= default.objective


@settings(max_examples=25)
@given(problems(groups=3))
def test_program_equals_the_oracle(problem):
    oracle, program = qsync_opt.solve(problem, "exhaustive"), qsync_opt.solve(problem, "ilp")
    assert program.objective == oracle.objective
    assert program.termination == oracle.termination


@settings(max_examples=20)
@given(problems(), st.integers(1, 200))
def test_more_memory_or_a_higher_harm_limit_never_hurts(problem, more):
    data = problem.to_json()
    before = qsync_opt.solve(problem, "exact").objective
    for device in data["devices"]:
        device["memory_kib"] += more
    if data["harm_limit"] is not None:
        data["harm_limit"] += more / 50
    after = qsync_opt.solve(Problem.from_json(data), "exact").objective
    assert (math.inf if after is None else after) <= (math.inf if before is None else before)


@settings(max_examples=20)
@given(problems(), st.randoms(use_true_random=False))
def test_the_order_of_devices_in_the_file_changes_nothing(problem, random):
    data = problem.to_json()
    random.shuffle(data["devices"])
    assert qsync_opt.solve(Problem.from_json(data), "exact").objective == qsync_opt.solve(problem, "exact").objective


@settings(max_examples=20)
@given(problems(devices=1))
def test_equal_devices_are_interchangeable(problem):
    """Three devices of one type, planned as a type, and told apart by a link that is never used."""
    data = problem.to_json()
    names = ["d0", "d1", "d2"]
    data["devices"] = [{"name": name, "memory_kib": data["devices"][0]["memory_kib"]} for name in names]
    for table in ("costs", "ends"):
        data[table] = dict.fromkeys(names, data[table]["d0"])
    options = len(data["microbatches"])
    data["links"] = {f"{a}>{b}": [[3, 2]] * options for a in names for b in names if a != b}
    as_type = Problem.from_json(data)
    oracle = qsync_opt.solve(as_type, "exhaustive")
    assert qsync_opt.solve(as_type, "exact").objective == oracle.objective


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("method", ["default", "exact", "ilp", "llm-pq"])
def test_recorded_optima(number, method, pytestconfig):
    folder = pytestconfig.rootpath / "tests/data/instances/serving"
    problem = load_problem(folder / f"serving-public-{number}.json")
    solution = qsync_opt.solve(problem, method)
    if method in ("exact", "ilp"):
        assert solution.termination == "optimal"
        assert solution.objective == problem.optimum.objective
    else:
        assert (solution.bound or 0) <= problem.optimum.objective <= solution.objective


def test_infeasible_problems_say_what_is_missing(pytestconfig):
    data = load_problem(pytestconfig.rootpath / "tests/data/instances/serving/serving-public-0.json").to_json()
    data["devices"] = [{**device, "memory_kib": 300} for device in data["devices"]]
    solution = qsync_opt.solve(Problem.from_json(data))
    assert solution.termination == "infeasible"
    assert "memory" in solution.reason and "KiB more" in solution.reason
    data["devices"] = [{**device, "memory_kib": 600} for device in data["devices"]]
    data["harm_limit"] = 0.01
    solution = qsync_opt.solve(Problem.from_json(data))
    assert solution.termination == "infeasible"
    assert "harm" in solution.reason


def test_too_large_for_the_oracle(pytestconfig):
    data = load_problem(pytestconfig.rootpath / "tests/data/instances/serving/serving-public-0.json").to_json()
    data["groups"] = [{"name": f"g{i}", "kind": "attn"} for i in range(20)]
    data["harm"] = {f"g{i}": dict.fromkeys(data["schemes"], 0.0) for i in range(20)}
    with pytest.raises(UnsupportedError, match="use 'exact' or 'ilp'"):
        qsync_opt.solve(Problem.from_json(data), "exhaustive")


def large_problem(layers=24):
    """A model in which sensitive layers come first, over four unequal devices whose memory is too little for 8 bits."""
    speeds = {"fast": 1, "near": 2, "slow": 5, "wide": 3}
    names = [f"{layer}.{kind}" for layer in range(layers) for kind in KINDS]
    times = {"W4": (100, 20), "W8": (110, 35), "W16": (100, 60)}
    return Problem.from_json(
        {
            "format": "qsync-serving/1",
            "name": "large",
            "new_tokens": 50,
            "schemes": list(times),
            "harm_limit": 2.0 * layers,
            "microbatches": [{"prefill": m, "decode": m} for m in (1, 4, 8)],
            "devices": [{"name": name, "memory_kib": 40 * layers // speed + 200} for name, speed in speeds.items()],
            "groups": [{"name": name, "kind": name.partition(".")[2]} for name in names],
            "weights_kib": {"attn": {"W4": 10, "W8": 20, "W16": 40}, "mlp": {"W4": 30, "W8": 60, "W16": 120}},
            "state_kib": {"attn": [4, 4, 4], "mlp": [0, 0, 0]},
            "costs": {
                device: {
                    kind: {
                        s: [[p * size * speed * 8 // m, d * size * speed + 5] for m in (1, 4, 8)]
                        for s, (p, d) in times.items()
                    }
                    for kind, size in (("attn", 1), ("mlp", 3))
                }
                for device, speed in speeds.items()
            },
            "ends": {
                device: {
                    "first_kib": 30,
                    "last_kib": 30,
                    "first": [[5, 5]] * 3,
                    "last": [[50 * speed, 50 * speed]] * 3,
                }
                for device, speed in speeds.items()
            },
            "links": {f"{a}>{b}": [[40, 20]] * 3 for a in speeds for b in speeds if a != b},
            "harm": {
                name: {"W4": 6.0 - 5.0 * i / len(names), "W8": 0.5 - 0.4 * i / len(names), "W16": 0.0}
                for i, name in enumerate(names)
            },
        }
    )


def test_the_default_is_near_its_bound_where_nothing_can_be_enumerated():
    solution = qsync_opt.solve(large_problem())
    assert solution.bound <= solution.objective <= 1.1 * solution.bound
    assert solution.objective < qsync_opt.solve(large_problem(), "llm-pq").objective


def test_the_default_ends_by_itself_where_there_is_nothing_to_find():
    with mock.patch("qsync_opt.formulations.serving.certified._PATIENCE_S", 0.0):
        solution = qsync_opt.solve(large_problem())
        assert solution.plan is not None and solution.bound <= solution.objective  # the first that was looked at
        data = large_problem().to_json()
        data["harm_limit"] = 1e-9
        nothing = qsync_opt.solve(Problem.from_json(data))
    assert nothing.plan is None
    assert nothing.termination in ("infeasible", "time_limit") and nothing.reason


def test_more_memory_never_hurts_the_default_by_more_than_its_gap():
    problem = large_problem()
    data = problem.to_json()
    for device in data["devices"]:
        device["memory_kib"] *= 2
    before, after = qsync_opt.solve(problem), qsync_opt.solve(Problem.from_json(data))
    assert after.bound <= before.objective
    assert after.objective <= before.objective * (1 + after.gap)


@settings(max_examples=25)
@given(problems(groups=7, devices=2, schemes=3), st.booleans())
def test_listing_the_numbers_of_given_stages_equals_the_program(problem, equal):
    """With too many plans to try out; ``equal`` harms make many plans as good as each other."""
    data = problem.to_json()
    if equal:
        data["harm"] = {name: {s: 1.0 / (i + 1) for i, s in enumerate(data["schemes"])} for name in data["harm"]}
    problem = Problem.from_json(data)
    with mock.patch("qsync_opt.formulations.serving.search._FEW_DRAFTS", 1):
        exact = qsync_opt.solve(problem, "exact")
    program = qsync_opt.solve(problem, "ilp")
    assert (exact.termination, exact.objective) == (program.termination, program.objective)


def test_prices_stop_rising_where_no_plan_keeps_both_limits():
    """Each limit can be kept alone, so that only prices show it: the bound rises without end."""
    groups = [f"{i}.{KINDS[i % 2]}" for i in range(7)]
    nothing = [[0, 0]]
    data = {
        "format": "qsync-serving/1",
        "name": "one limit or the other",
        "new_tokens": 1,
        "schemes": ["W4", "W8", "W16"],
        "harm_limit": 3.0,
        "microbatches": [{"prefill": 1, "decode": 1}],
        "devices": [{"name": "a", "memory_kib": 40}, {"name": "b", "memory_kib": 100}],
        "groups": [{"name": name, "kind": name.partition(".")[2]} for name in groups],
        "weights_kib": {kind: {"W4": 20, "W8": 40, "W16": 60} for kind in KINDS},
        "state_kib": {kind: [0] for kind in KINDS},
        "costs": {
            "a": {
                "attn": {"W4": [[2, 18]], "W8": nothing, "W16": [[3, 0]]},
                "mlp": {"W4": [[1, 0]], "W8": [[2, 1]], "W16": [[0, 8]]},
            },
            "b": {
                "attn": {"W4": [[6, 0]], "W8": nothing, "W16": [[0, 25]]},
                "mlp": {"W4": [[2, 0]], "W8": [[2, 0]], "W16": nothing},
            },
        },
        "ends": {name: {"first_kib": 0, "last_kib": 0, "first": nothing, "last": nothing} for name in "ab"},
        "links": {"a>b": nothing, "b>a": [[9, 0]]},
        "harm": {name: {"W4": 1.0, "W8": 0.5, "W16": 1 / 3} for name in groups},
    }
    with mock.patch("qsync_opt.formulations.serving.search._FEW_DRAFTS", 1):
        assert qsync_opt.solve(Problem.from_json(data), "exact").termination == "infeasible"


def test_a_large_problem_is_proved_and_the_default_lies_between_its_bound_and_the_optimum():
    problem = large_problem()
    exact, default = qsync_opt.solve(problem, "exact"), qsync_opt.solve(problem)
    assert exact.termination == "optimal"
    assert default.bound <= exact.objective <= default.objective
