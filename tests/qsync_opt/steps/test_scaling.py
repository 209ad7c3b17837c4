"""Costs that are scaled because they could not be recorded: by how much, from what, and marked."""

from dataclasses import replace

import pytest

from qsync_opt.model import Role
from qsync_opt.numerics import formats_for
from qsync_opt.steps import StepFlow, StepPredictor, Work, profile_from_steps, scaled_costs, scaled_operators
from qsync_opt.testing import random_step_costs, stacked_graph

PRECISIONS = ("INT8", "BF16", "FP32")


@pytest.fixture
def graph():
    return stacked_graph(2)


def without(graph, costs, lost):
    """The costs as they are where some (operator, precision) were never recorded."""
    flow = StepFlow(graph, costs.half_format)
    gone = {(flow.signature(graph.index(name)), precision) for name, precision in lost}
    kept = {case: cost for case, cost in costs.cases.items() if (case.signature, case.precision) not in gone}
    return replace(costs, cases=kept)


def available(graph):
    return {operator.name: PRECISIONS for operator in graph.by_role(Role.ADJUSTABLE)}


def test_nothing_is_scaled_where_all_was_recorded(graph):
    costs = random_step_costs(graph, PRECISIONS, seed=1)
    assert scaled_costs(graph, costs, available(graph)) is costs
    assert scaled_operators(graph, costs) == {}


def test_an_operator_costs_as_many_times_more_as_those_of_its_kind(graph):
    costs = random_step_costs(graph, PRECISIONS, seed=2)
    fine = {"FP32": 3, "BF16": 1}

    def timed(case, cost):
        factor = fine.get(case.precision, 1)
        work = Work(host=1_000 * factor, device=10_000 * factor, lag=11_000 * factor)
        return replace(cost, forward=work, backward=work, result_bytes=512 * factor)

    costs = replace(costs, cases={case: timed(case, cost) for case, cost in costs.cases.items()})
    names = [operator.name for operator in graph.by_role(Role.ADJUSTABLE)]
    lost = [(names[0], "FP32")]
    scaled = scaled_costs(graph, without(graph, costs, lost), available(graph))
    flow = StepFlow(graph, costs.half_format)
    (made,) = [(case, cost) for case, cost in scaled.cases.items() if cost.scaled_from]
    case, cost = made
    assert (case.signature, case.precision) == (flow.signature(graph.index(names[0])), "FP32")
    assert cost.scaled_from == "BF16"
    assert cost.samples == 0
    assert cost.forward == cost.backward == Work(host=3_000, device=30_000, lag=33_000)
    assert cost.result_bytes == 512 * 3
    assert cost.output == "FP32"
    alike = tuple(n for n in names if flow.signature(graph.index(n)) == case.signature)
    assert scaled_operators(graph, scaled) == {("FP32", "BF16"): alike}


def test_what_takes_equal_formats_takes_equal_memory(graph):
    precisions = (*PRECISIONS, "TF32")
    costs = random_step_costs(graph, precisions, seed=5)
    names = [operator.name for operator in graph.by_role(Role.ADJUSTABLE)]
    lost = without(graph, costs, [(names[0], "FP32")])
    scaled = scaled_costs(graph, lost, {name: precisions for name in names})
    ((case, cost),) = [(case, cost) for case, cost in scaled.cases.items() if cost.scaled_from]
    assert cost.scaled_from == "TF32"
    same = scaled.cases[case._replace(precision="TF32")]
    assert (cost.result_bytes, cost.forward_net_bytes) == (same.result_bytes, same.forward_net_bytes)
    assert cost.forward != same.forward


def test_every_plan_can_be_predicted_and_profiled_again(graph):
    costs = random_step_costs(graph, PRECISIONS, seed=3)
    names = [operator.name for operator in graph.by_role(Role.ADJUSTABLE)]
    lost = [(name, "FP32") for name in names[:1]] + [(name, "INT8") for name in names[1:2]]
    scaled = scaled_costs(graph, without(graph, costs, lost), available(graph))
    predictor = StepPredictor(graph, scaled)
    for precision in PRECISIONS:
        assert predictor.steady_ns(predictor.plan(dict.fromkeys(names, precision))) > 0
    profile = profile_from_steps(graph, scaled, formats_for(PRECISIONS, "BF16"), state_bytes=0)
    assert set(profile.cost(names[0])) == set(PRECISIONS)


def test_a_precision_that_no_operator_was_recorded_in_stays_away(graph):
    costs = random_step_costs(graph, PRECISIONS, seed=4)
    names = [operator.name for operator in graph.by_role(Role.ADJUSTABLE)]
    scaled = scaled_costs(graph, without(graph, costs, [(name, "FP32") for name in names]), available(graph))
    assert not scaled_operators(graph, scaled)
