import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import qsync_opt
from qsync_opt.cli import main
from qsync_opt.errors import ProblemError
from qsync_opt.messages import (
    Exchange,
    Pair,
    Plan,
    Problem,
    by_bytes,
    evaluate,
    in_rounds,
    ring_rounds,
    uniform_plan,
    variance_factor,
)

DATA = Path(__file__).resolve().parents[2] / "data" / "messages"
FILES = sorted(DATA.glob("*.json"))
TINY = {
    "format": "qsync-messages/1", "name": "tiny", "time_limit_ns": 5000, "variance_weight": 1.0, "time_weight": None,
    "bits": {"2": 1 / 9, "4": 1 / 225, "8": 1 / 65025},
    "exchanges": [{"name": "forward1", "dim": 64, "rounds": [
        [{"from": 0, "to": 1, "fixed_ns": 100, "ns_per_byte": 2.0, "beta": [0.5, 0.1, 3.0]}]]}],
    "optimum": None,
}  # fmt: skip


def tiny(**changes):
    return json.loads(json.dumps({**TINY, **changes}))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
@pytest.mark.parametrize("method", ["default", "exact", "ilp"])
def test_recorded_optima(path, method):
    problem = qsync_opt.load_problem(path)
    solution = qsync_opt.solve(problem, method)
    assert solution.objective == pytest.approx(problem.optimum.objective, rel=1e-6)
    assert solution.bound == pytest.approx(solution.objective, rel=1e-6)


def test_evaluation_by_hand():
    problem = Problem.from_json(tiny())
    evaluation = evaluate(problem, Plan(bits={"forward1": [[[2, 2, 8]]]}))
    assert evaluation.variance == pytest.approx(0.6 / 9 + 3 / 65025)
    assert evaluation.time_ns == 100 + 2.0 * 64 * 12 / 8
    assert evaluation.feasible and evaluation.message_bytes == 96 and evaluation.mean_bits == 4
    late = evaluate(Problem.from_json(tiny(time_limit_ns=200)), Plan(bits={"forward1": [[[2, 2, 8]]]}))
    assert not late.feasible and "exceeds the limit of 200 ns" in late.violations[0]


def test_rounds_take_their_slowest_pair_and_hidden_time_is_free():
    pairs = [Pair(source=i, target=1 - i, fixed_ns=10 * i, ns_per_byte=1.0, beta=np.ones(2 + i)) for i in range(2)]
    exchanges = (Exchange(name="e", dim=8, rounds=((pairs[0], pairs[1]), (pairs[0],)), hidden_ns=20),)
    problem = Problem(
        name="p", time_limit_ns=None, variance_weight=2.0, time_weight=0.5, bits={"2": 0.25}, exchanges=exchanges
    )
    evaluation = evaluate(problem, uniform_plan(problem, 2))
    assert evaluation.time_ns == (10 + 6) + 4 and evaluation.exposed_ns == 0
    assert evaluation.objective == 2.0 * 0.25 * 7
    assert Problem.from_json(problem.to_json()) == problem


def test_packing_takes_as_long_as_the_slowest_worker_and_nothing_hides_it():
    """Worker 0 packs 2 messages and unpacks 3, worker 1 the other way round; 8 numbers of 2 bits are 2 bytes."""
    first = Pair(source=0, target=1, fixed_ns=5, ns_per_byte=1.0, beta=np.ones(2), pack_ns_per_byte=0.5)
    second = Pair(
        source=1, target=0, fixed_ns=5, ns_per_byte=1.0, beta=np.ones(3), pack_ns_per_byte=3.0, unpack_ns_per_byte=2.0
    )
    exchanges = (Exchange(name="e", dim=8, rounds=((first,), (second,)), hidden_ns=100),)
    problem = Problem(
        name="p", time_limit_ns=17, variance_weight=1.0, time_weight=None, bits={"2": 0.25}, exchanges=exchanges
    )
    evaluation = evaluate(problem, uniform_plan(problem, 2))
    assert evaluation.codec_ns == evaluation.exposed_ns == max(4 * 0.5 + 6 * 2.0, 6 * 3.0) == 18
    assert evaluation.time_ns == (5 + 4) + (5 + 6) and not evaluation.feasible
    data = problem.to_json()
    assert Problem.from_json(data) == problem and Problem.from_json(data).extras == {}
    pair = data["exchanges"][0]["rounds"][0][0]
    assert pair["x-pack-ns-per-byte"] == 0.5 and "x-unpack-ns-per-byte" not in pair
    pair["x-pack-ns-per-byte"] = -1.0
    with pytest.raises(ProblemError, match=r"x-pack-ns-per-byte.*at least 0"):
        Problem.from_json(data)


def test_files_round_trip(tmp_path):
    data = tiny(**{"x-note": 1})
    data["exchanges"][0]["x-layer"] = "conv1"
    problem = Problem.from_json(data)
    problem.save(tmp_path / "problem.json")
    assert qsync_opt.load_problem(tmp_path / "problem.json") == problem
    assert problem.to_json()["exchanges"][0]["x-layer"] == "conv1"
    plan = qsync_opt.solve(problem).plan
    plan.save(tmp_path / "plan.json")
    assert qsync_opt.load_plan(tmp_path / "plan.json") == plan
    assert json.loads((tmp_path / "plan.json").read_text())["bits"] == {"forward1": [[[8, 8, 8]]]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bits": {}}, "at least one width"),
        ({"bits": {"two": 0.1}}, "whole numbers from 1 to 64"),
        ({"bits": {"02": 0.1}}, "whole numbers"),
        ({"bits": {"2": -0.1}}, "at least 0"),
        ({"time_limit_ns": None}, "sets no goal"),
        ({"time_weight": 1.0}, "time_limit_ns and time_weight"),
        ({"time_limit_ns": -1}, "at least 0"),
        ({"exchanges": []}, "no exchanges"),
        ({"exchanges": TINY["exchanges"] * 2}, "named twice"),
        ({"surplus": 1}, "unknown key 'surplus'"),
    ],
)
def test_bad_problems_are_refused(change, words):
    with pytest.raises(ProblemError, match=words):
        Problem.from_json(tiny(**change))


@pytest.mark.parametrize("beta", [[-1.0], ["1"], [True], [float("nan")], [float("inf")], 3, [[1.0]], [None]])
def test_bad_scores_are_refused(beta):
    data = json.loads(json.dumps(TINY))
    data["exchanges"][0]["rounds"][0][0]["beta"] = beta
    with pytest.raises(ProblemError, match=r"beta|message"):
        Problem.from_json(data)


@pytest.mark.parametrize(
    ("bits", "words"),
    [
        ({}, "lacks the exchange 'forward1'"),
        ({"forward1": [[[2, 2]]]}, "2 widths for 3 messages; it may be the plan of another partition"),
        ({"forward1": [[[2, 2, 2], [2]]]}, "another partition"),
        ({"forward1": [[[2, 2, 3]]]}, "a width is 3, but allowed are 2, 4, 8"),
        ({"forward1": [[[2, 2, 2]]], "other": []}, "'other'"),
    ],
)
def test_plans_of_other_problems_are_refused(bits, words):
    with pytest.raises(ProblemError, match=words):
        evaluate(Problem.from_json(tiny()), Plan(bits=bits))


@pytest.mark.parametrize("bits", [[], {"a": 1}, {"a": [1]}, {"a": [[1]]}, {"a": [[["2"]]]}, {"a": [[[0]]]}])
def test_bad_plan_files_are_refused(bits):
    with pytest.raises(ProblemError):
        Plan.from_json({"format": "qsync-messages-plan/1", "bits": bits})


def test_command_line(tmp_path, capsys):
    problem, plan = tmp_path / "p.json", tmp_path / "plan.json"
    problem.write_text(json.dumps(tiny(time_limit_ns=220)))
    assert main(["messages", "solve", str(problem), "--output", str(plan), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["termination"] == "optimal"
    assert main(["messages", "evaluate", str(problem), str(plan), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["feasible"] is True
    problem.write_text(json.dumps(tiny(time_limit_ns=1)))
    assert main(["messages", "solve", str(problem), "--json"]) == 3
    assert "narrowest" in json.loads(capsys.readouterr().out)["reason"]
    problem.write_text("{")
    assert main(["messages", "solve", str(problem)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_factors_and_rounds():
    assert variance_factor(2) == pytest.approx(1 / 9) and variance_factor(32) == 0
    with pytest.raises(ProblemError, match="12"):
        variance_factor(12)
    assert ring_rounds(3) == (((0, 1), (1, 2), (2, 0)), ((0, 2), (1, 0), (2, 1)))
    assert ring_rounds(1) == ()


def test_where_bytes_are_all_that_counts_a_uniform_width_takes_the_whole_limit():
    def pair(source, target, count):
        return Pair(source=source, target=target, fixed_ns=900, ns_per_byte=3.0, beta=np.geomspace(1.0, 1e6, count),
                    pack_ns_per_byte=2.0, unpack_ns_per_byte=1.0)  # fmt: skip

    rounds = ((pair(0, 1, 3), pair(1, 0, 5)), (pair(0, 2, 2),))
    exchanges = (
        Exchange(name="a", dim=16, rounds=rounds, hidden_ns=10**6),
        Exchange(name="b", dim=8, rounds=rounds, ports=True),
    )
    timed = Problem(
        name="p", time_limit_ns=None, variance_weight=2.0, time_weight=3.0, exchanges=exchanges,
        bits={str(bits): variance_factor(bits) for bits in (2, 4, 8)},
    )  # fmt: skip
    problem = by_bytes(timed, 4)
    assert [[pair.beta.size for pair in exchange.pairs] for exchange in problem.exchanges] == [[3, 5, 2]] * 2
    uniform = evaluate(problem, uniform_plan(problem, 4))
    assert uniform.exposed_ns == problem.time_limit_ns == 10 * (16 + 8) * 4 / 8
    assert not evaluate(problem, uniform_plan(problem, 8)).feasible
    solution = qsync_opt.solve(problem)
    assert solution.objective < uniform.objective == uniform.variance
    regrouped = in_rounds(solution.plan, timed)
    assert evaluate(timed, regrouped).variance == pytest.approx(solution.objective)
    assert [[widths.size for widths in group] for group in regrouped.bits["a"]] == [[3, 5], [2]]
    shorter = replace(exchanges[1], rounds=rounds[:1])
    for others in (exchanges[:1], (exchanges[0], shorter), (*exchanges, replace(shorter, name="c"))):
        with pytest.raises(ProblemError):
            in_rounds(solution.plan, replace(timed, exchanges=others))
