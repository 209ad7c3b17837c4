"""The serving problem, its files, and the evaluation of its plans."""

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import qsync_opt
from qsync_opt.errors import ProblemError
from qsync_opt.serving import Plan, Problem, Stage, decode_ns, evaluate, load_plan, load_problem, prefill_ns

TINY = {
    "format": "qsync-serving/1",
    "name": "tiny",
    "new_tokens": 3,
    "schemes": ["W4", "W16"],
    "harm_limit": 1.5,
    "microbatches": [{"prefill": 4, "decode": 2}, {"prefill": 2, "decode": 1}],
    "devices": [{"name": "A", "memory_kib": 700}, {"name": "B", "memory_kib": 1300}],
    "groups": [{"name": "0.attn", "kind": "attn"}, {"name": "0.mlp", "kind": "mlp"}],
    "weights_kib": {"attn": {"W4": 100, "W16": 400}, "mlp": {"W4": 200, "W16": 800}},
    "state_kib": {"attn": [60, 120], "mlp": [5, 10]},
    "costs": {
        name: {
            "attn": {"W4": [[10, 3], [18, 5]], "W16": [[9, 4], [17, 7]]},
            "mlp": {"W4": [[20, 6], [38, 9]], "W16": [[18, 9], [35, 16]]},
        }
        for name in "AB"
    },
    "ends": {
        name: {"first_kib": 50, "last_kib": 50, "first": [[1, 1], [2, 1]], "last": [[2, 1], [4, 2]]} for name in "AB"
    },
    "links": {"A>B": [[3, 1], [5, 1]], "B>A": [[4, 2], [6, 2]]},
    "harm": {"0.attn": {"W4": 0.4, "W16": 0.0}, "0.mlp": {"W4": 0.9, "W16": 0.0}},
    "optimum": None,
}  # fmt: skip


def plan(schemes=("W16", "W4"), order="AB", option=0):
    stages = tuple(
        Stage(device=device, groups=(group,)) for device, group in zip(order, ("0.attn", "0.mlp"), strict=True)
    )
    return Plan(microbatch=option, stages=stages, schemes=dict(zip(("0.attn", "0.mlp"), schemes, strict=True)))


def test_evaluation_by_hand():
    evaluation = evaluate(Problem.from_json(TINY), plan())
    # A: attn W16 + first + link; B: mlp W4 + last + link back.
    assert [(s.prefill_ns, s.decode_ns) for s in evaluation.stages] == [(9 + 1 + 3, 4 + 1 + 1), (20 + 2 + 4, 6 + 1 + 2)]
    assert evaluation.prefill_ns == 39 + 3 * 26
    assert evaluation.decode_ns == 1 * max(15, 18) + 15 + 9
    assert dict(evaluation.memory_kib) == {"A": 400 + 60 + 50, "B": 200 + 5 + 50}
    assert evaluation.harm == 0.9
    assert evaluation.feasible
    assert evaluation.to_json()["objective"] == evaluation.total_ns == evaluation.objective


def test_broken_limits_are_named():
    evaluation = evaluate(Problem.from_json({**TINY, "harm_limit": 0.5}), plan(("W16", "W16"), "BA"))
    assert evaluation.violations == ("device 'A' needs 855 KiB, which is 155 KiB more than its 700 KiB",)
    evaluation = evaluate(Problem.from_json({**TINY, "harm_limit": 0.5}), plan(("W4", "W4")))
    assert evaluation.violations == ("the harm is 1.3, but the limit is 0.5",)


def simulate(stages, microbatches, rounds):
    """When the last micro-batch leaves the last stage: each stage serves in order, each round waits for the last."""
    free, ready = [0] * len(stages), [0] * microbatches
    for _ in range(rounds):
        for k in range(microbatches):
            for j, time in enumerate(stages):
                free[j] = ready[k] = max(ready[k], free[j]) + time
    return max(ready)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=5), st.integers(1, 7), st.integers(0, 12))
def test_closed_form_equals_event_simulation(stages, microbatches, rounds):
    assert decode_ns(stages, microbatches, rounds) == (simulate(stages, microbatches, rounds) if rounds else 0)
    assert prefill_ns(stages, microbatches) == simulate(stages, microbatches, 1)


def test_files(tmp_path):
    data = {**TINY, "x-note": "kept"}
    (tmp_path / "problem.json").write_text(json.dumps(data))
    problem = load_problem(tmp_path / "problem.json")
    assert problem.to_json() == data
    assert qsync_opt.load_problem(tmp_path / "problem.json") == problem
    plan().save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan() == qsync_opt.load_plan(tmp_path / "plan.json")


def spoiled(*path, value=None):
    data = copy.deepcopy(TINY)
    *outer, key = path
    for step in outer:
        node = data if step == outer[0] else node  # noqa: F821
        node = node[step]
    target = node if outer else data
    if value is None:
        del target[key]
    else:
        target[key] = value
    return data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (spoiled("new_tokens", value=0), "at least 1"),
        (spoiled("costs", "A", "mlp", "W4"), "lacks the scheme 'W4'"),
        (spoiled("costs", "B", value={}), "costs of device 'B' lacks the kind 'attn'"),
        (spoiled("costs", "A", "mlp", "W4", value=[[1, 2]]), "one for each of 2 microbatches"),
        (spoiled("costs", "A", "mlp", "W4", value=[[1, 2], [1, -2]]), "at least 0"),
        (spoiled("costs", "A", "mlp", "W4", value=[[1, 2], [1]]), "must be a pair"),
        (spoiled("links", "A>B"), "links lacks the link 'A>B'"),
        (spoiled("links", "A>C", value=[[0, 0], [0, 0]]), "did you mean"),
        (spoiled("harm", "0.mlp"), "harm lacks the group '0.mlp'"),
        (spoiled("harm", "0.mlp", "W4", value=float("nan")), "finite number"),
        (spoiled("harm_limit", value=-1.0), "at least 0"),
        (spoiled("schemes", value=["W4", "W4"]), "named twice"),
        (spoiled("devices", value=[]), "devices is empty"),
        (spoiled("state_kib", "attn", value=[1]), "one for each of 2 microbatches"),
        (spoiled("surprise", value=1), "unknown key 'surprise'"),
        (spoiled("costs", "A", "mlp", "W4", value=[[2**62, 2**62], [1, 1]]), "below 2\\*\\*63"),
    ],
)
def test_bad_problems(data, message):
    with pytest.raises(ProblemError, match=message):
        Problem.from_json(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"microbatch": 2}, "options 0 to 1"),
        ({"stages": [{"device": "C", "groups": ["0.attn", "0.mlp"]}]}, "no device 'C'"),
        ({"stages": [{"device": "A", "groups": ["0.mlp", "0.attn"]}]}, "model's order"),
        ({"stages": [{"device": "A", "groups": ["0.attn"]}]}, "ends before it"),
        ({"stages": [{"device": "A", "groups": ["0.attn"]}, {"device": "A", "groups": ["0.mlp"]}]}, "two stages"),
        ({"stages": [{"device": "A", "groups": []}]}, "no groups"),
        ({"schemes": {"0.attn": "W4"}}, "has no scheme"),
        ({"schemes": {"0.attn": "W4", "0.mlp": "W8"}}, "allowed are W4, W16"),
    ],
)
def test_bad_plans(change, message):
    data = {**plan().to_json(), **change}
    with pytest.raises(ProblemError, match=message):
        evaluate(Problem.from_json(TINY), Plan.from_json(data))
