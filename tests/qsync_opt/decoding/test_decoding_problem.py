"""Problems, plans and the evaluation of speculation."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import qsync_opt
from qsync_opt.decoding import Acceptance, Choice, Draft, Plan, Problem, Regime, Selection, evaluate, expected_tokens
from qsync_opt.errors import ProblemError

DATA = Path(__file__).resolve().parents[2] / "data" / "decoding"


def problem(memory_kib=100):
    acceptance = Acceptance(low=0.8, mid=0.9)
    choices = (
        Choice(draft="A8", length=3, draft_ns=30, verify_ns=105, acceptance=acceptance),
        Choice(draft="lookup", length=4, draft_ns=0, verify_ns=110, acceptance=Acceptance(low=0.2, mid=0.3)),
    )
    return Problem(
        name="tiny",
        memory_kib=memory_kib,
        confidence="low",
        drafts={"A8": Draft(memory_kib=40), "lookup": Draft(memory_kib=0)},
        regimes=(Regime(name="b1", weight=0.7, plain_ns=100, choices=choices),),
    )


@given(st.floats(0, 1), st.integers(0, 40))
def test_expected_tokens_are_the_sum_of_powers(acceptance, length):
    powers = math.fsum(acceptance**i for i in range(length + 1))
    assert expected_tokens(acceptance, length) == pytest.approx(powers, rel=1e-9)


def test_sure_and_hopeless_drafts():
    assert expected_tokens(1.0, 5) == 6
    assert expected_tokens(0.0, 5) == 1


def test_evaluation_by_hand():
    evaluation = evaluate(problem(), Plan(choices={"b1": Selection(draft="A8", length=3)}))
    tokens = 1 + 0.8 + 0.64 + 0.512
    assert evaluation.objective == pytest.approx(0.7 * (3 * 30 + 105) / tokens)
    assert evaluation.memory_kib == 40
    assert evaluation.feasible
    assert evaluation.regimes["b1"].speedup == pytest.approx(100 * tokens / 195)
    plain = evaluate(problem(), Plan(choices={"b1": None}))
    assert (plain.objective, plain.memory_kib) == (70, 0)


def test_memory_is_paid_once_and_limited():
    second = replace(problem().regimes[0], name="b2")
    both = replace(problem(memory_kib=40), regimes=(*problem().regimes, second))
    selection = Selection(draft="A8", length=3)
    plan = Plan(choices={"b1": selection, "b2": selection})
    assert evaluate(both, plan).feasible
    tight = evaluate(replace(both, memory_kib=39), plan)
    assert not tight.feasible
    assert "memory" in tight.violations[0]


def test_files_come_back(tmp_path):
    path = tmp_path / "problem.json"
    problem().save(path)
    assert qsync_opt.load_problem(path) == problem()
    plan = Plan(choices={"b1": Selection(draft="A8", length=3)}, problem="tiny")
    plan.save(tmp_path / "plan.json")
    assert qsync_opt.load_plan(tmp_path / "plan.json") == plan


def test_public_files_are_read_and_written_alike():
    paths = sorted(DATA.glob("decoding-public-*.json"))
    assert paths
    for path in paths:
        data = json.loads(path.read_text())
        assert qsync_opt.load_problem(path).to_json() == data


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"confidence": "lwo"}, "did you mean 'low'"),
        ({"confidence": "high"}, "no acceptance 'high'"),
        ({"regimes": []}, "regimes is empty"),
        ({"drafts": {}}, "names a draft that drafts lacks"),
        ({"memory_kib": -1}, "memory_kib is -1"),
        ({"weird": 1}, "unknown key 'weird'"),
    ],
)
def test_bad_problems_are_refused(change, text):
    with pytest.raises(ProblemError, match=text):
        Problem.from_json({**problem().to_json(), **change})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"acceptance": {"low": 1.2}}, "at most 1"),
        ({"acceptance": {"low": 0.9, "mid": 0.8}}, "must not exceed"),
        ({"length": -1}, "length is -1"),
        ({"draft_ns": 2**62}, "check units"),
        ({"draft": "lookup", "length": 4}, "stands twice"),
    ],
)
def test_bad_choices_are_refused(change, text):
    data = problem().to_json()
    data["regimes"][0]["choices"][0] |= change
    with pytest.raises(ProblemError, match=text):
        Problem.from_json(data)


@pytest.mark.parametrize(
    ("choices", "text"),
    [
        ({}, "the plan has no regime 'b1'"),
        ({"b1": None, "b2": None}, "no regime 'b2'"),
        ({"b1": Selection(draft="A8", length=2)}, "allowed are null"),
    ],
)
def test_plans_of_other_problems_are_refused(choices, text):
    with pytest.raises(ProblemError, match=text):
        evaluate(problem(), Plan(choices=choices))
