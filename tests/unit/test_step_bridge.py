"""What the rows of a problem file and the replay of whole steps have in common, and by what they differ."""

from dataclasses import replace

import pytest

from qsync_opt.build import build_problem
from qsync_opt.cluster import Cluster, DeviceType, Network
from qsync_opt.costs import CostFit
from qsync_opt.evaluation import evaluate
from qsync_opt.graph import Role
from qsync_opt.plan import Plan
from qsync_opt.precision import formats_for
from qsync_opt.step_bridge import profile_from_steps
from qsync_opt.step_predictor import StepPredictor
from qsync_opt.synthetic import make_sensitivities, stacked_graph
from qsync_opt.synthetic_steps import random_step_costs
from qsync_opt.two_queues import NOTHING

PRECISIONS = ("INT8", "BF16", "FP32")


@pytest.fixture
def graph():
    return stacked_graph(2)


def problem_of(graph, costs):
    formats = formats_for(PRECISIONS, "BF16")
    profile = profile_from_steps(graph, costs, formats, state_bytes=1024)
    device = DeviceType(name="gpu", count=1, memory_limit_bytes=1 << 40, precisions=PRECISIONS)
    network = Network(latency_s=0.0, bandwidth_bytes_per_s=1e12, source="a single worker sends nothing")
    cluster = Cluster(name="one", devices=(device,), network=network)
    return build_problem(graph, {"gpu": profile}, make_sensitivities(graph), cluster, latency_limit_ns=10**12)


def test_rows_and_replay_agree_where_nothing_is_cast_and_the_device_never_waits(graph):
    costs = random_step_costs(graph, PRECISIONS, seed=2)
    # No host, no work outside of operators but the optimizer's: what is left is the sum of rows.
    cases = {
        case: replace(cost, forward=cost.forward._replace(host=0), backward=cost.backward._replace(host=0))
        for case, cost in costs.cases.items()
    }
    phases = {label: NOTHING for label in costs.phases} | {"optimizer": costs.phases["optimizer"]._replace(host=0)}
    costs = replace(costs, cases=cases, phases=phases)
    plan = {operator.name: "FP32" for operator in graph.by_role(Role.ADJUSTABLE)}
    predictor = StepPredictor(graph, costs)
    rows = evaluate(problem_of(graph, costs), Plan(problem=graph.name, devices={"gpu": plan}))
    assert rows.iteration_ns == predictor.steady_ns(predictor.plan(plan))


def test_rows_are_never_below_the_device_alone_without_casts(graph):
    """By design rows are a standstill's latency, launches that the device waits for included, and not steady state."""
    costs = random_step_costs(graph, PRECISIONS, seed=3)
    predictor = StepPredictor(graph, costs)
    plan = {operator.name: "FP32" for operator in graph.by_role(Role.ADJUSTABLE)}
    outside = sum(costs.phases[label].device for label in ("forward", "forward|end", "backward"))
    rows = evaluate(problem_of(graph, costs), Plan(problem=graph.name, devices={"gpu": plan}))
    assert rows.iteration_ns >= sum(predictor.plan(plan).device_ns) - outside


def test_the_quantization_of_inputs_is_counted_on_the_edge_alone(graph):
    costs = random_step_costs(graph, PRECISIONS, seed=4)
    formats = formats_for(PRECISIONS, "BF16")
    fit = CostFit(base_ns=700, ns_per_mi_elements=50_000)
    priced = replace(costs, casts={**costs.casts, "BF16>INT8": fit})
    free = replace(costs, casts={pair: f for pair, f in costs.casts.items() if pair != "BF16>INT8"})
    with_casts, without = (profile_from_steps(graph, c, formats, state_bytes=0) for c in (priced, free))
    first = {with_casts.operators[o.name]: o for o in reversed(graph.by_role(Role.ADJUSTABLE))}
    for operator in first.values():
        quantized_ns = sum(fit.ns(graph[source].output_elements) for source in operator.inputs)
        whole_ns = without.cost(operator.name)["INT8"].forward_ns
        assert with_casts.cost(operator.name)["INT8"].forward_ns == max(0, whole_ns - quantized_ns)
        assert with_casts.cost(operator.name)["BF16"] == without.cost(operator.name)["BF16"]


def test_gradients_of_parameters_are_no_workspace(graph):
    costs = random_step_costs(graph, PRECISIONS, seed=5)
    sizes = {parameter.name: parameter.spec.num_bytes for parameter in graph.parameters}
    profile = profile_from_steps(graph, costs, formats_for(PRECISIONS, "BF16"), state_bytes=0)
    predictor = StepPredictor(graph, costs)
    for i, operator in enumerate(graph):
        if operator.role is Role.ADJUSTABLE:
            peak = predictor.cost_at(i, "FP32", "FP32").backward_peak_bytes
            own = sum(sizes[name] for name in operator.parameters)
            assert profile.cost(operator.name)["FP32"].backward_workspace_bytes == max(0, peak - own)
