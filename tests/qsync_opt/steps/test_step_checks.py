"""Step costs and plans that no step could have are refused by name, and a step stays as it was."""

from dataclasses import replace

import pytest

from qsync_opt.errors import ProblemError
from qsync_opt.model import Role
from qsync_opt.steps import StepPredictor, Work
from qsync_opt.testing import make_graph, make_operator, random_step_costs, residual_graph

GRAPH = residual_graph()
COSTS = random_step_costs(GRAPH, ("BF16", "FP32"))
PLAN = {operator.name: "FP32" for operator in GRAPH.by_role(Role.ADJUSTABLE)}


def _without(values, key):
    return {name: value for name, value in values.items() if name != key}


def _cases(**changes):
    return {case: replace(cost, **changes) for case, cost in COSTS.cases.items()}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"phases": _without(COSTS.phases, "optimizer")}, "phases lacks 'optimizer'"),
        ({"phase_peaks": {}}, "phase_peaks lacks 'forward'"),
        ({"phases": {**COSTS.phases, "clip": Work(-1, 0, 0)}}, "phase 'clip' is"),
        ({"resting_share": 1.5}, "resting_share is 1.5"),
        ({"resting_share": float("nan")}, "resting_share is nan"),
        ({"half_format": "BF17"}, "half_format is 'BF17'"),
        ({"cases": _cases(forward=Work(-5, 0, 0))}, "forward is"),
        ({"cases": _cases(backward=Work(float("nan"), 1, 1))}, "backward is"),
        ({"cases": _cases(forward=Work(1, float("inf"), 1))}, "forward is"),
        ({"cases": _cases(output="FP33")}, "output is 'FP33'"),
        ({"cases": _cases(saves_inputs=(9,))}, "saves_inputs is"),
        (
            {"cases": {case._replace(inputs=(*case.inputs, "FP32")): cost for case, cost in COSTS.cases.items()}},
            "has formats of",
        ),
        ({"outside": ((10**6, 5),), "graphs": 2}, "at moment 1000000"),
    ],
)
def test_costs_of_which_no_step_is_made(changes, told):
    with pytest.raises(ProblemError, match=told):
        StepPredictor(GRAPH, replace(COSTS, **changes))


def test_a_plan_that_names_what_the_model_lacks():
    predictor = StepPredictor(GRAPH, COSTS)
    with pytest.raises(ProblemError, match=r"'dwon' is not in model 'synthetic'.*did you mean 'down'"):
        predictor.plan(PLAN | {"dwon": "FP32"})
    predictor.plan(PLAN | {"loss": "FP32"})  # plan files may name fixed operators
    step = predictor.plan(PLAN)
    for name, told in (("dwon", "is not in model"), ("loss", "is not adjustable")):
        with pytest.raises(ProblemError, match=told):
            predictor.change(step, name, "FP32")
    assert step == predictor.plan(PLAN)
    with pytest.raises(ProblemError, match="segments slowed down"):
        StepPredictor(GRAPH, COSTS, (), (float("nan"),))


def test_a_change_that_fails_on_the_way_leaves_the_step_as_it_was():
    graph = make_graph(
        [
            make_operator("a", shape=(8, 8)),
            make_operator("b", Role.DEPENDENT, ["a"], shape=(8, 8)),
            make_operator("c", Role.DEPENDENT, ["b"], shape=(8, 8), op_type="gelu"),
        ]
    )
    costs = random_step_costs(graph, ("BF16", "FP32"))
    predictor = StepPredictor(graph, costs)
    plan = {"a": "FP32"}
    step = predictor.plan(plan)
    before = predictor.steady_ns(step)
    gelu = predictor.signature(2)

    class Lost(dict):
        def get(self, key, default=None):
            if key.signature == gelu and key.inputs == ("BF16",):
                raise ProblemError("never recorded")
            return super().get(key, default)

    predictor._cases = Lost(predictor._cases)
    with pytest.raises(ProblemError, match="never recorded"):
        predictor.change(step, "a", "BF16")
    with pytest.raises(ProblemError, match="INT8"):
        predictor.change(step, "a", "INT8")
    assert step == predictor.plan(plan)
    assert predictor.steady_ns(step) == before
