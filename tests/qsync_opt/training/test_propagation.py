from dataclasses import replace

import pytest

from qsync_opt.errors import ProblemError
from qsync_opt.model import Role
from qsync_opt.testing import cost, diamond
from qsync_opt.training import follow_inputs, precisions_by_rank, propagate


def test_ladder_is_sorted_by_rank_not_by_the_file():
    problem = diamond().problem
    device = problem.devices[0]
    tables = {**device.operators, "a": {"FP32": cost(1, 1, 1), "INT8": cost(1, 1, 1)}}
    assert precisions_by_rank(problem, replace(device, operators=tables), "a") == ("INT8", "FP32")


@pytest.mark.parametrize(
    ("steps", "delivered", "found"),
    [
        (("INT8", "FP16", "FP32"), 1, "FP16"),
        (("INT8", "FP32"), 1, "FP32"),
        (("INT8", "FP16"), 2, "FP16"),
        (("FP16", "FP32"), -1, "FP16"),
    ],
)
def test_follow_takes_the_lowest_step_that_is_high_enough(steps, delivered, found):
    assert follow_inputs(diamond().problem, steps, delivered) == found


def test_a_dependent_operator_without_inputs_runs_in_its_lowest():
    problem = diamond().problem
    source = replace(problem.operators[0], role=Role.DEPENDENT)
    problem = replace(problem, operators=(source, *problem.operators[1:]))
    assert propagate(problem, problem.devices[0], {"b": "FP32", "c": "FP16"})["a"] == "FP16"


def test_a_missing_choice_is_an_error():
    problem = diamond().problem
    with pytest.raises(ProblemError, match="'c' is planned at None, but its table allows FP16, FP32"):
        propagate(problem, problem.devices[0], {"a": "FP16", "b": "FP16"})


@pytest.mark.parametrize(("source", "target"), [("FP16", "FP32"), ("FP32", "FP16")])
def test_a_missing_cast_of_either_direction_is_named(source, target):
    problem = diamond().problem
    (device,) = problem.devices
    casts = {pair: cast for pair, cast in device.casts.items() if pair != (source, target)}
    with pytest.raises(ProblemError, match=f"the cast {source}>{target} is needed between"):
        replace(problem, devices=(replace(device, casts=casts),))
