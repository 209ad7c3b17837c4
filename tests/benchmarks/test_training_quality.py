"""Pieces of the benchmark of training under plans of one time and memory: plans, runs that go on, intervals."""

import dataclasses
import json
import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("sklearn")
pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("quality_modules")


@pytest.fixture
def budgets():
    import budgets

    return budgets


@pytest.fixture
def quality():
    import training_quality

    return training_quality


MENU = ("INT8-BWD8", "INT8", "BF16", "FP32")


def _sizes(budgets, source):
    return {f"op {i}": budgets.Size(source.randrange(1, 10**6), source.randrange(1000, 10**5)) for i in range(6)}


def _cost(budgets, sizes, plan):
    costs = [budgets.operator_cost(sizes[name], precision, 0.0) for name, precision in plan.items()]
    return sum(c.forward_ns + c.backward_ns for c in costs), sum(c.memory_kib for c in costs)


def test_plans_of_all_indicators_keep_the_same_limits_and_none_has_less_of_its_own_sensitivity(budgets):
    import itertools

    source = random.Random(1)
    sizes = _sizes(budgets, source)
    menu = dict.fromkeys(sizes, MENU)
    ends = [_cost(budgets, sizes, dict.fromkeys(sizes, p)) for p in ("INT8-BWD8", "BF16")]
    limits = [sum(pair) // 2 for pair in zip(*ends, strict=True)]
    for _ in range(3):
        table = {name: {p: source.random() / 4**i for i, p in enumerate(MENU)} for name in sizes}
        plan = budgets.plan(budgets.problem(sizes, table, menu))
        assert all(found <= limit for found, limit in zip(_cost(budgets, sizes, plan), limits, strict=True))
        least = min(
            sum(table[n][p] for n, p in zip(sizes, choice, strict=True))
            for choice in itertools.product(MENU, repeat=len(sizes))
            if all(
                found <= limit
                for found, limit in zip(
                    _cost(budgets, sizes, dict(zip(sizes, choice, strict=True))), limits, strict=True
                )
            )
        )
        assert sum(table[n][p] for n, p in plan.items()) == pytest.approx(least)


def test_only_missing_runs_are_made_and_equal_plans_once(quality):
    case = quality.Case(make=None, steps=1, ours="probed")
    plans = {policy: [{"plan": {"a": policy}}] for policy in case.policies}
    plans["fisher"] = plans["probed"]
    every = list(quality.missing(case, plans, 2, []))
    assert len(every) == 2 * len(case.policies)
    assert {(policy, same) for policy, _, _, same in every if same} == {("fisher", "probed")}
    known = [{"policy": policy, "seed": seed} for policy, seed, _, _ in every[:5]]
    assert list(quality.missing(case, plans, 2, known)) == every[5:]


def test_random_plans_of_a_seed_count_as_one(quality):
    records = [
        {"policy": policy, "seed": seed, "score": value}
        for policy, seed, value in [
            ("probed", 0, 1.0),
            ("probed", 1, 2.0),
            ("random", 0, 2.0),
            ("random 2", 0, 4.0),
            ("random", 1, 2.5),
            ("random", 2, 9.0),
        ]
    ]
    assert quality.differences(records, "probed", "random", "score") == [-2.0, -0.5]


def test_the_harm_of_noise_is_the_slope_within_seeds(quality):
    noise = {"full precision": [0.0], "probed": [0.1], "random": [0.2, 0.6], "uniform lowest": [1.0]}
    plans = {policy: [{"over_batch_noise": value} for value in values] for policy, values in noise.items()}
    records = [
        {
            "policy": policy,
            "seed": seed,
            **dict.fromkeys(quality.MEASURES),
            "held_out_loss": 10.0 * seed + (3 + seed) * values[seed % len(values)],
        }
        for policy, values in noise.items()
        for seed in (0, 1)
    ]
    twin = {**records[-1], "policy": "probed", "same_plan_as": "uniform lowest"}
    harm = quality.harm_of_noise([*records, twin], plans)
    assert list(harm) == ["held_out_loss"]
    assert harm["held_out_loss"]["seeds"] == 2
    assert harm["held_out_loss"]["slope"] == pytest.approx(3.5)
    assert harm["held_out_loss"]["half_width"] == pytest.approx(12.706 * 0.5, rel=1e-3)


@pytest.mark.parametrize("decay", [1.0, 2.0])
def test_the_learning_rate_warms_up_and_ends_at_nothing(quality, decay):
    case = quality.Case(make=None, steps=200, ours="probed", decay=decay)
    rates = [case.rate_at(step) for step in range(200)]
    top = rates.index(max(rates))
    assert max(rates) == 1.0
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top + 1 :] == sorted(rates[top + 1 :], reverse=True)
    assert 0 < rates[-1] < 1e-3
    assert rates[105] == pytest.approx(0.5**decay, abs=0.01)


@settings(max_examples=20)
@given(values=st.lists(st.floats(-10, 10), min_size=2, max_size=12))
def test_an_interval_is_that_of_students_distribution(quality_modules, values):
    import training_quality
    from scipy import stats

    mean, half = training_quality.interval(values)
    assert mean == pytest.approx(statistics.fmean(values))
    error = statistics.stdev(values) / math.sqrt(len(values))
    assert half == pytest.approx(error * stats.t.isf(0.025, len(values) - 1))


def test_a_single_seed_has_no_interval(quality):
    assert quality.interval([1.0]) == (1.0, math.inf)


def test_a_case_is_planned_and_trained_and_goes_on_where_its_files_end(quality, tmp_path, monkeypatch):
    import digits

    make = lambda: digits.digits("cnn", lambda: digits.Cnn(4), rows=8, adam=False, rate=0.05, words="small")  # noqa: E731
    case = dataclasses.replace(quality.CASES["cnn"], make=make, steps=6)
    monkeypatch.setattr(type(case), "policies", (quality.FULL, quality.LOWEST, "probed", "random"))
    monkeypatch.setattr(quality, "CASES", {"cnn": case})
    for name, value in (("DRAWS", 1), ("PROBES", 2), ("CURVATURE_PROBES", 2)):
        monkeypatch.setattr(quality, name, value)
    quality.train(["cnn"], tmp_path, 1)
    records = quality.runs_of(tmp_path / "cnn-runs.jsonl")
    assert [run["policy"] for run in records] == list(case.policies)
    losses = {run["policy"]: run["last_training_loss"] for run in records}
    assert losses[quality.LOWEST] != losses[quality.FULL]
    quality.train(["cnn"], tmp_path, 1)
    assert quality.runs_of(tmp_path / "cnn-runs.jsonl") == records
    quality.merge(tmp_path, tmp_path / "result.json")
    (record,) = json.loads((tmp_path / "result.json").read_text())["records"]
    noise = {p: row["gradient_variance_over_batch_noise"] for p, row in record["summary"].items()}
    assert noise[quality.FULL] == 0 < noise["probed"] < noise[quality.LOWEST]


def test_recalibrated_statistics_are_those_of_the_network_without_a_plan(quality):
    """Under noise batch normalization collects larger variances; collected anew, evaluation is as if there was none."""
    import digits
    import torch

    subject = digits.digits("cnn", lambda: digits.Cnn(4), rows=8, adam=False, rate=0.05, words="small")
    model = subject.model(0, torch.device("cpu"))
    held_out = subject.held_out(1)
    quality._recalibrate(subject, model)
    expected = quality._score(model, held_out)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_var.mul_(3)
    assert quality._score(model, held_out) != expected
    quality._recalibrate(subject, model)
    assert quality._score(model, held_out) == expected


def test_predictions_count_only_as_they_stand_in_a_commit(quality_modules, tmp_path, monkeypatch):
    import subprocess

    import predictor_unseen

    def git(*words):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

    monkeypatch.setattr(predictor_unseen, "HERE", tmp_path)
    path = tmp_path / "predictions.json"
    path.write_text("1")
    git("init", "-q")
    with pytest.raises(SystemExit, match="not committed as it is"):
        predictor_unseen.committed(path)
    git("add", ".")
    git("commit", "-qm", "predictions")
    assert len(predictor_unseen.committed(path)) >= 7
    path.write_text("2")
    with pytest.raises(SystemExit, match="not committed as it is"):
        predictor_unseen.committed(path)
