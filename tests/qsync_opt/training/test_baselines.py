import pytest

from qsync_opt.errors import ProblemError
from qsync_opt.training import evaluate, load_problem, uniform_plan


@pytest.fixture
def problem(request):
    return load_problem(request.config.rootpath / "tests" / "data" / "instances" / "tiny.json")


def test_lowest_takes_each_operators_lowest(problem):
    plan = uniform_plan(problem)
    ranks = list(problem.formats)
    for device in problem.devices:
        for name, precision in plan.devices[device.name].items():
            assert all(ranks.index(precision) <= ranks.index(other) for other in device.operators[name])


def test_a_named_precision_is_used_where_it_exists(problem):
    plan = uniform_plan(problem, "FP32")
    assert {p for table in plan.devices.values() for p in table.values()} == {"FP32"}
    assert evaluate(problem, plan).objective == 0.0


def test_a_missing_precision_falls_to_the_next_above(problem):
    plan = uniform_plan(problem, "INT8")
    for device in problem.devices:
        for name, precision in plan.devices[device.name].items():
            assert precision == ("INT8" if "INT8" in device.operators[name] else "FP16")


def test_unknown_precision_is_refused(problem):
    with pytest.raises(ProblemError, match="'FP4'"):
        uniform_plan(problem, "FP4")
