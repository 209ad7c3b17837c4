"""What the rows of a problem file and the replay of whole steps have in common, and by what they differ."""

import random
from dataclasses import replace

import pytest

from qsync_opt.cluster import Cluster, DeviceType, Network
from qsync_opt.costs import CostFit
from qsync_opt.model import Role
from qsync_opt.numerics import formats_for
from qsync_opt.steps import (
    NOTHING,
    Case,
    StepPredictor,
    Work,
    bucket_borders,
    bucket_segments,
    network_tails,
    profile_from_steps,
)
from qsync_opt.testing import make_sensitivities, random_step_costs, residual_graph, stacked_graph
from qsync_opt.training import BucketOptions, Plan, build_problem, evaluate, gradient_buckets, problem_role

PRECISIONS = ("INT8", "BF16", "FP32")


@pytest.fixture
def graph():
    return stacked_graph(2)


def built(graph, profile, precisions=PRECISIONS):
    device = DeviceType(name="gpu", count=1, memory_limit_bytes=1 << 40, precisions=precisions)
    network = Network(latency_s=0.0, bandwidth_bytes_per_s=1e12, source="a single worker sends nothing")
    cluster = Cluster(name="one", devices=(device,), network=network)
    return build_problem(graph, {"gpu": profile}, make_sensitivities(graph), cluster, latency_limit_ns=10**12)


def problem_of(graph, costs):
    return built(graph, profile_from_steps(graph, costs, formats_for(PRECISIONS, "BF16"), state_bytes=1024))


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


@pytest.mark.parametrize("factor", [1, 20])
def test_rows_and_replay_agree_on_the_fastest_uniform_plan_whatever_it_waits_for(graph, factor):
    """``factor`` makes the host the limit of every plan; casts have no price here, so that FP32 can be the fastest."""
    costs = random_step_costs(graph, ("FP32",), seed=3)
    phases = {label: work._replace(device=1_000, host=2_000 * factor) for label, work in costs.phases.items()}
    cases = {
        case: replace(
            cost,
            forward=cost.forward._replace(host=cost.forward.host * factor),
            backward=cost.backward._replace(host=cost.backward.host * factor),
        )
        for case, cost in costs.cases.items()
    }
    costs = replace(costs, cases=cases, phases=phases)
    formats = formats_for(("FP32",), "BF16")
    profile = profile_from_steps(graph, costs, formats, state_bytes=1024)
    plan = {operator.name: "FP32" for operator in graph.by_role(Role.ADJUSTABLE)}
    predictor = StepPredictor(graph, costs)
    step = predictor.plan(plan)
    host = step.host_ns + sum(costs.phases[label].host for label in ("backward|end", "optimizer", "zero_grad"))
    assert (predictor.steady_ns(step) == host) is (factor > 1)
    rows = evaluate(built(graph, profile, ("FP32",)), Plan(problem=graph.name, devices={"gpu": plan}))
    assert rows.iteration_ns == predictor.steady_ns(step)
    # Nobody waits behind the all-reduce for a host that runs ahead.
    assert profile.optimizer.step_ns == 5 * 1_000


def test_what_waits_for_the_host_is_charged_the_host_and_all_else_the_device(graph):
    """INT8 waits for the host and is the fastest, FP32 for the device: each row has the time of its own queue."""
    costs = random_step_costs(graph, PRECISIONS, seed=6)

    def timed(case, cost):
        device = 900_000 if case.precision == "FP32" else 1_000
        work = Work(host=50_000, device=device, lag=device)
        return replace(cost, forward=work, backward=work)

    costs = replace(costs, cases={case: timed(case, cost) for case, cost in costs.cases.items()}, casts={})
    profile = profile_from_steps(graph, costs, formats_for(PRECISIONS, "BF16"), state_bytes=0)
    for operator in graph.by_role(Role.ADJUSTABLE):
        times = {precision: cost.forward_ns for precision, cost in profile.cost(operator.name).items()}
        assert times == {"INT8": 50_000, "BF16": 50_000, "FP32": 900_000}
    fixed = next(operator for operator in graph if problem_role(operator) is Role.FIXED)
    assert profile.cost(fixed.name)["FP32"].forward_ns == 50_000


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
            case = Case(predictor.signature(i), "FP32", ("FP32",) * len(operator.inputs))
            peak = predictor.cost(i, case).backward_peak_bytes
            own = sum(sizes[name] for name in operator.parameters)
            assert profile.cost(operator.name)["FP32"].backward_workspace_bytes == max(0, peak - own)


@pytest.mark.parametrize("seed", range(12))
def test_rows_and_replay_agree_through_the_network_for_any_plan(seed):
    """Where a device paces its steps and costs do not go by the format that arrives, the two are equal."""
    source = random.Random(seed)
    graph = stacked_graph(2) if seed % 2 else residual_graph()
    precisions = ("BF16", "FP32")
    costs = random_step_costs(graph, precisions, seed=seed)
    alike = {}
    for case, cost in costs.cases.items():
        alike.setdefault((case.signature, case.precision), cost)
    cases = {}
    for case, cost in costs.cases.items():
        first = alike[case.signature, case.precision]
        forward, backward = (work._replace(host=10) for work in (first.forward, first.backward))
        cases[case] = replace(first, output=cost.output, forward=forward, backward=backward)
    phases = {label: work._replace(host=5) for label, work in costs.phases.items()}
    if seed % 3 == 0:
        phases |= {"copies": Work(5, 33_333, 33_333), "clip": Work(5, 77_777, 77_777)}
    costs = replace(costs, cases=cases, phases=phases, casts={}, cast_host_ns=0)
    profile = profile_from_steps(graph, costs, formats_for(precisions, "BF16"), state_bytes=0)
    count = source.choice([1, 3])
    device = DeviceType(name="gpu", count=count, memory_limit_bytes=1 << 40, precisions=precisions)
    network = Network(latency_s=1e-5, bandwidth_bytes_per_s=1e9, source="made up")
    cluster = Cluster(name="c", devices=(device,), network=network)
    options = BucketOptions(first_bytes=source.choice([1, 10**5]), cap_bytes=source.choice([1, 10**6]))
    problem = build_problem(
        graph, {"gpu": profile}, make_sensitivities(graph), cluster, buckets=options, latency_limit_ns=10**12
    )
    buckets = gradient_buckets(graph, options) if count > 1 else ()
    predictor = StepPredictor(graph, costs, bucket_borders(graph, buckets))
    allreduce = [network.allreduce_ns(bucket.num_bytes, count) for bucket in buckets]
    tails = network_tails(allreduce, bucket_segments(graph, buckets))
    for _ in range(4):
        plan = {operator.name: source.choice(precisions) for operator in graph.by_role(Role.ADJUSTABLE)}
        rows = evaluate(problem, Plan(problem=problem.name, devices={"gpu": plan}))
        assert rows.iteration_ns == predictor.steady_ns(predictor.plan(plan), tails)
