"""Cases of step costs as text."""

import itertools
import json
from dataclasses import replace

import pytest

from qsync_opt.errors import ProblemError
from qsync_opt.steps import Case, StepCosts, Work
from qsync_opt.testing import random_step_costs, stacked_graph


def test_a_case_is_read_back_from_its_text():
    formats = ("", "FP32", "BF16")
    inputs = [found for count in range(4) for found in itertools.product(formats, repeat=count)]
    cases = [Case(signature, "INT8", found) for signature in ("linear(a|b)", "relu") for found in inputs]
    assert [Case.parse(case.key()) for case in cases] == cases
    assert len({case.key() for case in cases}) == len(cases)


def test_a_text_that_is_no_case_is_refused():
    with pytest.raises(ProblemError, match=r"here: 'relu\|FP32' is no case"):
        Case.parse("relu|FP32", "here")


NOTHING = Work(3, 0, -(2**62))


@pytest.mark.parametrize("work", [Work(3, 5, 7), Work(3, 0, 0), NOTHING, Work(0, 2, 1)])
def test_work_is_read_back_whether_it_launches_or_not(work):
    """A kernel of no length has the lag 0; where nothing is launched there is none, and the device does not wait."""
    costs = random_step_costs(stacked_graph(1), ("FP32",))
    costs = replace(costs, phases={**costs.phases, "optimizer": work})
    data = json.loads(json.dumps(costs.to_json()))
    assert StepCosts.from_json(data, "costs") == costs
    assert (data["phases"]["optimizer"][2] is None) == (work is NOTHING)
