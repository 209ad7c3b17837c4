import random

from hypothesis import given
from hypothesis import strategies as st

from qsync_opt.costs import CostFit, fit_cost
from qsync_opt.testing import make_cluster, make_profile, make_sensitivities, random_graph, random_plan
from qsync_opt.training import (
    BucketOptions,
    Problem,
    build_problem,
    evaluate,
    gradient_buckets,
    memory_breakdown,
    merge_by_operator,
    operator_buckets,
    replay,
    uniform_plan,
)

seeds = st.integers(0, 2**32)


def _problem(seed: int, workers: int = 2) -> Problem:
    source = random.Random(seed)
    graph = random_graph(source)
    profiles = {"slow": make_profile(graph), "fast": make_profile(graph, scale=source.choice([1, 3]))}
    return build_problem(
        graph,
        profiles,
        make_sensitivities(graph),
        make_cluster(count=workers, fixed=1),
        cast_sharing=source.choice(["edge", "producer"]),
        buckets=BucketOptions(first_bytes=source.randint(1, 2**20), cap_bytes=source.randint(1, 2**22)),
        latency_limit_ns=10**12,
    )


@given(
    base=st.integers(0, 10**6),
    slope=st.integers(0, 10**9),
    sizes=st.lists(st.integers(1, 2**26), min_size=2, max_size=6, unique=True),
)
def test_a_fit_returns_any_line_it_is_given(base: int, slope: int, sizes: list[int]) -> None:
    line = CostFit(base_ns=base, ns_per_mi_elements=slope)
    samples = [(n, base + slope * n / 2**20) for n in sizes]
    if min(t for _, t in samples) < 100:
        return  # rounding to whole nanoseconds would dominate
    fit = fit_cost(samples)
    for n, time_ns in samples:
        assert abs(fit.ns(n) - line.ns(n)) <= 1 + 0.02 * time_ns
    assert fit.worst_error <= 0.02


@given(samples=st.lists(st.tuples(st.integers(1, 2**26), st.floats(1.0, 1e9, allow_nan=False)), min_size=1, max_size=6))
def test_a_fit_of_anything_is_usable_and_knows_its_error(samples: list[tuple[int, float]]) -> None:
    fit = fit_cost(samples)
    assert fit.base_ns >= 0
    assert fit.ns_per_mi_elements >= 0
    for n, time_ns in samples:
        assert abs(fit.ns(n) - time_ns) <= fit.worst_error * time_ns * (1 + 1e-9)


@given(seed=seeds)
def test_any_graph_becomes_a_problem_that_can_be_replayed(seed: int) -> None:
    problem = _problem(seed)
    plan = random_plan(random.Random(seed), problem)
    evaluation = evaluate(problem, plan)
    assert replay(problem, plan).iteration_ns == evaluation.iteration_ns
    device = evaluation.devices["slow"]
    assert memory_breakdown(problem, device).total_bytes == device.memory_kib * 1024


@given(seed=seeds)
def test_buckets_hold_every_parameter_once_and_are_ready_in_order(seed: int) -> None:
    source = random.Random(seed)
    graph = random_graph(source)
    options = BucketOptions(first_bytes=source.randint(1, 2**20), cap_bytes=source.randint(1, 2**22))
    buckets = gradient_buckets(graph, options)
    names = [name for bucket in buckets for name in bucket.parameters]
    assert sorted(names) == sorted(parameter.name for parameter in graph.parameters)
    positions = [graph.index(bucket.operator) for bucket in buckets]
    assert positions == sorted(positions, reverse=True)
    groups = merge_by_operator(buckets)
    mapped = operator_buckets(graph, groups)
    for k, group in enumerate(groups):
        # Backward is complete for a group when that of its first operator in forward order is.
        members = [name for name, index in mapped.items() if index == k]
        assert group[0].operator == min(members, key=graph.index)


@given(seed=seeds)
def test_memory_never_misses_what_a_plan_must_hold(seed: int) -> None:
    graph = random_graph(random.Random(seed))
    problem = _problem(seed)
    parameters = sum(p.spec.num_bytes for p in graph.parameters)
    for precision in ("INT8", "BF16", "FP32"):
        evaluation = evaluate(problem, uniform_plan(problem, precision))
        # Weights and buckets always; gradients at least at the end of backward; optimizer state.
        assert evaluation.memory_bytes["slow"] >= 3 * parameters + 800


@given(seed=seeds)
def test_sensitivity_grows_with_the_count_and_time_does_not_shrink(seed: int) -> None:
    one, two = _problem(seed, workers=1), _problem(seed, workers=2)
    plan = uniform_plan(one, "INT8")
    assert evaluate(two, plan).objective == 2 * evaluate(one, plan).objective
    assert evaluate(two, plan).iteration_ns >= evaluate(one, plan).iteration_ns
