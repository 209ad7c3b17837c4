"""Acceptance intervals, measurements, the problem that they make, and the command that plans from them."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import qsync_opt
from qsync_opt.cli import main
from qsync_opt.decoding import (
    AcceptanceCounts,
    Measurements,
    build_problem,
    clustered_interval,
    expected_tokens,
    explain,
    load_measurements,
    load_speculation,
    tokens_deviation,
    wilson_interval,
)
from qsync_opt.errors import ProblemError
from qsync_opt.report import decoding_report_html


def measurements():
    return {
        "format": "qsync-decoding-measurements/1",
        "name": "card",
        "memory_kib": 50,
        "lengths": [1, 2, 4],
        "drafts": {
            "A8": {"memory_kib": 40, "accepted": [950, 900, 870, 840], "judged": [1000, 950, 900, 870]},
            "KV4": {"memory_kib": 60, "accepted": [990, 985, 980, 975], "judged": [1000, 990, 985, 980]},
        },
        "regimes": [
            {"name": "b1", "weight": 1.0, "verify_ns": {"1": 100, "2": 99, "5": 111}, "draft_ns": {"A8": 40}},
            {"name": "b64", "weight": 1.0, "verify_ns": {"1": 100, "5": 400}, "draft_ns": {"A8": 90, "KV4": 20}},
        ],
    }


@given(st.integers(0, 200), st.integers(0, 200), st.floats(0.5, 0.999))
def test_wilson_intervals_hold_the_share_and_narrow(successes, failures, level):
    interval = wilson_interval(successes, successes + failures, level)
    assert 0 <= interval.low <= interval.mid <= interval.high <= 1
    more = wilson_interval(4 * successes, 4 * (successes + failures), level)
    assert more.high - more.low <= interval.high - interval.low


def test_wilson_interval_of_a_textbook():
    # 8 of 10 at 95 %: 0.4902 to 0.9433.
    interval = wilson_interval(8, 10)
    assert (interval.low, interval.high) == pytest.approx((0.4902, 0.9433), abs=1e-4)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40), st.integers(1, 4))
def test_an_acceptance_yields_as_many_tokens_as_were_accepted_and_one_more(accepted, length):
    counts = AcceptanceCounts.of_cycles(accepted, 4)
    interval = counts.interval(length)
    assert 0 <= interval.low <= interval.mid <= interval.high <= 1
    if counts.measured_tokens(length) is None:
        assert interval == wilson_interval(sum(counts.accepted[:length]), sum(counts.judged[:length]))
    else:
        yielded = sum(min(n, length) for n in accepted) / len(accepted) + 1
        assert expected_tokens(interval.mid, length) == pytest.approx(yielded)


def test_wilson_intervals_cover():
    hits = np.random.default_rng(0).binomial(200, 0.9, 4000)
    covered = [interval.low <= 0.9 <= interval.high for interval in (wilson_interval(int(n), 200) for n in hits)]
    assert np.mean(covered) == pytest.approx(0.95, abs=0.02)


def test_counts_of_cycles_give_back_a_geometric_acceptance():
    random = np.random.default_rng(1)
    accepted = [int(np.argmin(np.append(random.random(5) < 0.85, False))) for _ in range(20_000)]
    counts = AcceptanceCounts.of_cycles(accepted, 5)
    interval = counts.interval(5)
    assert interval.low <= 0.85 <= interval.high
    assert counts.measured_tokens(5) == pytest.approx(1 + np.mean(accepted))
    assert counts.measured_tokens(6) is None


def some_texts(random, spread, texts, longest=8, tokens=96):
    """Counts of texts whose acceptance differs, by a Beta distribution about 0.6, from one to the next."""
    counts = []
    for rate in random.beta(0.6 * spread, 0.4 * spread, texts):
        accepted = []
        while sum(accepted) + len(accepted) < tokens:
            accepted.append(min(longest, int(random.geometric(max(1e-9, 1 - rate))) - 1))
        counts.append(AcceptanceCounts.of_cycles(accepted, longest))
    return counts


@pytest.mark.parametrize("spread", [4, 1000])
@pytest.mark.parametrize("length", [1, 8])
def test_intervals_over_texts_cover_whether_texts_differ_or_not(spread, length):
    random = np.random.default_rng(0)
    truth = AcceptanceCounts.summed(some_texts(random, spread, 20_000)).interval(length).mid
    covered = {"texts": 0, "tokens": 0}
    for _ in range(500):
        texts = some_texts(random, spread, 24)
        for which, interval in (
            ("texts", clustered_interval(texts, length)),
            ("tokens", AcceptanceCounts.summed(texts).interval(length)),
        ):
            covered[which] += interval.low <= truth <= interval.high
    assert 0.92 <= covered["texts"] / 500 <= 0.985
    assert (covered["tokens"] / 500 < 0.6) == (spread == 4)  # what texts differ by is more than tokens do


def test_deviation_of_tokens_is_that_of_the_jackknife():
    texts = some_texts(np.random.default_rng(3), 6, 400)
    left_out = [
        AcceptanceCounts.summed(texts[:i] + texts[i + 1 :]).measured_tokens(4) for i in range(len(texts))
    ]  # fmt: skip
    jackknife = np.std(left_out) * np.sqrt(len(texts) - 1)
    assert tokens_deviation(texts, 4) == pytest.approx(jackknife, rel=0.02)
    assert tokens_deviation(texts[:1], 4) is None


@given(st.lists(st.lists(st.integers(0, 3), max_size=9), min_size=1, max_size=6), st.integers(1, 3))
def test_intervals_over_texts_are_never_narrower_than_over_tokens(texts, length):
    counts = [AcceptanceCounts.of_cycles(text, 3) for text in texts]
    tokens, clusters = AcceptanceCounts.summed(counts).interval(length), clustered_interval(counts, length)
    assert clusters.mid == tokens.mid
    assert 0 <= clusters.low <= tokens.low <= tokens.high <= clusters.high <= 1
    if len(texts) == 1:
        assert clusters == tokens


def test_a_plan_goes_by_what_texts_differ_by(tmp_path):
    data = measurements()
    # As many tokens in all, from two texts that accept nearly everything and nearly nothing.
    data["drafts"]["A8"] |= {
        "accepted": [550, 510, 480, 450],
        "judged": [1000, 550, 510, 480],
        "sequences": [
            {"accepted": [500, 480, 460, 440], "judged": [520, 500, 480, 460]},
            {"accepted": [50, 30, 20, 10], "judged": [480, 50, 30, 20]},
        ],
    }
    measured = Measurements.from_json(data)
    measured.save(tmp_path / "measured.json")
    assert load_measurements(tmp_path / "measured.json") == measured
    del data["drafts"]["A8"]["sequences"]
    texts, tokens = (
        build_problem(m).regimes[0].choices[0].acceptance for m in (measured, Measurements.from_json(data))
    )
    assert texts.mid == tokens.mid
    assert texts.low < tokens.low - 0.1
    data["drafts"]["A8"]["sequences"] = [{"accepted": [1, 1, 1, 1], "judged": [1, 1, 1, 1]}]
    with pytest.raises(ProblemError, match="do not add up"):
        Measurements.from_json(data)
    data["drafts"]["A8"]["sequences"] = [{"accepted": [1], "judged": [1]}]
    with pytest.raises(ProblemError, match="as many positions"):
        Measurements.from_json(data)


def test_problem_of_measurements():
    problem = build_problem(Measurements.from_json(measurements()))
    first, second = problem.regimes
    assert first.plain_ns == 100
    # A pass over two tokens is not taken to be faster than one over one; between two and five lie equal steps.
    assert [(choice.length, choice.verify_ns) for choice in first.choices] == [(1, 100), (2, 104), (4, 111)]
    assert {choice.draft for choice in second.choices} == {"A8", "KV4"}
    assert first.choices[0].acceptance.mid == 0.95


def test_no_length_is_extrapolated():
    data = measurements() | {"lengths": [4, 5, 6]}
    data["regimes"][0]["verify_ns"]["9"] = 120
    problem = build_problem(Measurements.from_json(data))
    assert [choice.length for regime in problem.regimes for choice in regime.choices] == [4, 4, 4]


def test_reasons_name_gain_loss_and_memory():
    problem = build_problem(Measurements.from_json(measurements()))
    solution = qsync_opt.solve(problem)
    reasons = explain(problem, solution.plan)
    assert reasons["b1"].startswith("speculates with 4 tokens of A8")
    assert reasons["b64"].startswith("plain decoding")
    roomy = replace(problem, regimes=(replace(problem.regimes[1], plain_ns=400),))
    reason = explain(roomy, qsync_opt.solve(roomy).plan)["b64"]
    assert "its draft needs 60 KiB" in reason


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"lengths": []}, "lengths is empty"),
        ({"lengths": [1, 1]}, "must stand once"),
        ({"lengths": [0]}, "at least 1"),
        ({"confidence_level": 1.5}, "below 1"),
        ({"drafts": {}}, "drafts lacks"),
        ({"regimes": [{"name": "b", "weight": 1, "verify_ns": {"2": 1}, "draft_ns": {}}]}, "lacks the key '1'"),
        ({"regimes": [{"name": "b", "weight": 1, "verify_ns": {"one": 1}, "draft_ns": {}}]}, "keys are numbers"),
    ],
)
def test_bad_measurements_are_refused(change, text):
    with pytest.raises(ProblemError, match=text):
        Measurements.from_json(measurements() | change)


def test_plan_command(tmp_path, capsys):
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(measurements()))
    problem, plan = tmp_path / "problem.json", tmp_path / "plan.json"
    arguments = ["decoding", "plan", str(path), "--problem", str(problem), "--output", str(plan), "--json"]
    assert main(arguments) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["termination"] == "optimal"
    assert set(printed["reasons"]) == {"b1", "b64"}
    assert qsync_opt.evaluate(qsync_opt.load_problem(problem), qsync_opt.load_plan(plan)).feasible
    assert main(["decoding", "plan", str(path)]) == 0
    assert "b1: speculates" in capsys.readouterr().out
    Measurements.from_json(measurements()).save(path)
    assert load_measurements(path) == Measurements.from_json(measurements())


def test_plan_command_names_a_bad_file(tmp_path, capsys):
    path = tmp_path / "measured.json"
    path.write_text("{")
    assert main(["decoding", "plan", str(path)]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_extension_keys_of_regimes_reach_the_problem(tmp_path):
    data = measurements()
    data["regimes"][0] |= {"x-batch": 1, "x-context": 64}
    (tmp_path / "m.json").write_text(json.dumps({**data, "x-model": "sha256:1"}))
    problem = load_speculation(tmp_path / "m.json")
    problem.save(tmp_path / "p.json")
    for found in (problem, load_speculation(tmp_path / "p.json")):
        assert found.extras == {
            ("x-model",): "sha256:1",
            ("regimes", "b1", "x-batch"): 1,
            ("regimes", "b1", "x-context"): 64,
        }
    with pytest.raises(ProblemError, match="qsync-decoding"):
        (tmp_path / "q.json").write_text('{"format": "qsync-plan/1"}')
        load_speculation(tmp_path / "q.json")


def test_the_page_of_a_plan(tmp_path):
    (tmp_path / "m.json").write_text(json.dumps({**measurements(), "name": "<b>&"}))
    arguments = ["decoding", "plan", str(tmp_path / "m.json"), "--report", str(tmp_path / "page.html")]
    assert main(arguments) == 0
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    problem = build_problem(load_measurements(tmp_path / "m.json"))
    plan = qsync_opt.solve(problem).plan
    assert text == decoding_report_html(problem, plan)
    assert "&lt;b&gt;&amp;" in text and "<b>" not in text and "<script" not in text
    assert "1 of 2 regimes speculate" in text
    for reason in explain(problem, plan).values():
        assert reason in text.replace("\N{NO-BREAK SPACE}", " ")
    assert text.count('<th scope="row">') == sum(len(regime.choices) for regime in problem.regimes)
