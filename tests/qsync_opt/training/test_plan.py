import pytest

from qsync_opt.errors import ProblemError
from qsync_opt.testing import chain, diamond
from qsync_opt.training import Plan, load_plan, load_problem


def _plan(**operators):
    return Plan(problem="p", devices={"T4": operators})


@pytest.mark.parametrize(
    ("arguments", "needle"),
    [
        ({"problem": "p", "devices": {"T4": ["a"]}}, "devices 'T4' is a list, but it must be an object"),
        ({"problem": None, "devices": {"T4": {}}}, "plan: problem is None"),
    ],
)
def test_plans_made_in_code_are_checked_too(arguments, needle):
    with pytest.raises(ProblemError) as caught:
        Plan(**arguments)
    assert needle in str(caught.value)


def test_round_trip_keeps_provenance_and_extension_keys(tmp_path):
    data = {
        "format": "qsync-plan/1",
        "problem": "p",
        "devices": {"T4": {"a": "FP16"}},
        "solution": {"objective": 1.0},
        "x-note": [1],
    }
    plan = Plan.from_json(data)
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan
    assert load_plan(tmp_path / "plan.json").to_json() == data


def test_dependent_and_fixed_operators_are_recomputed():
    problem = diamond().problem
    resolved = _plan(a="FP16", b="FP32", c="FP16").resolve(problem)["T4"]
    assert resolved == {"a": "FP16", "b": "FP32", "c": "FP16", "add": "FP32", "loss": "FP32"}
    stated = _plan(a="FP16", b="FP16", c="FP16", add="FP16", loss="FP32")
    assert stated.resolve(problem)["T4"]["add"] == "FP16"


@pytest.mark.parametrize(
    ("operators", "needle"),
    [
        (
            {"a": "FP16", "b": "FP32", "c": "FP16", "add": "FP16"},
            "dependent operator 'add' is planned at FP16, but its",
        ),
        ({"a": "FP16", "b": "FP16", "c": "FP16", "loss": "FP16"}, "fixed operator 'loss' is planned at FP16, but its"),
        ({"a": "FP16", "b": "FP16"}, "it lacks the adjustable 'c'"),
        ({"a": "FP16", "b": "FP16", "c": "FP16", "d": "FP16"}, "it names 'd', which the problem lacks"),
        ({"a": "INT8", "b": "FP16", "c": "FP16"}, "'a' is planned at 'INT8', but its table allows FP16, FP32"),
    ],
)
def test_contradictions_name_the_operator(operators, needle):
    with pytest.raises(ProblemError) as caught:
        _plan(**operators).resolve(diamond().problem)
    assert needle in str(caught.value)


def test_plan_for_another_model_names_the_first_differing_operators():
    plan = _plan(**{f"layer{i}": "FP16" for i in range(9)})
    with pytest.raises(ProblemError) as caught:
        plan.resolve(chain().problem)
    assert "'layer0', 'layer1', 'layer2' and 6 more, which the problem lacks" in str(caught.value)
    assert "it lacks the adjustable 'a', 'b', 'c'" in str(caught.value)


def test_unknown_and_missing_device_types(instance_path):
    with pytest.raises(ProblemError, match="has no device type 'V100'; it has T4"):
        Plan(problem="p", devices={"V100": {}}).resolve(chain().problem)
    tiny = load_problem(instance_path("tiny"))
    with pytest.raises(ProblemError, match="the plan has no device type 'P4'"):
        Plan(problem="tiny", devices={"T4": tiny.optimum.devices["T4"]}).resolve(tiny)


@pytest.mark.parametrize(
    ("data", "needle"),
    [
        ({"format": "qsync-plan/0"}, "format is 'qsync-plan/0'"),
        ({"format": "qsync-plan/1", "problem": "p", "devices": {}}, "no devices"),
        ({"format": "qsync-plan/1", "problem": "p", "devices": {"T4": {"a": 16}}}, "a is 16"),
        ({"format": "qsync-plan/1", "problem": "p", "devices": {"T4": {}}, "solution": 3}, "solution is a number"),
        ({"format": "qsync-plan/1", "problem": "p", "devices": {"T4": {}}, "plan": 3}, "unknown key 'plan'"),
    ],
)
def test_bad_plan_files(data, needle):
    with pytest.raises(ProblemError) as caught:
        Plan.from_json(data)
    assert needle in str(caught.value)


def test_precisions_in_code_are_texts():
    with pytest.raises(ProblemError, match="devices 'T4': a is 16, but it must be a text"):
        _plan(a=16)
