from dataclasses import replace

import pytest

from qsync_opt.costs import IterationOverhead
from qsync_opt.errors import ProblemError
from qsync_opt.model import OpGraph, Role
from qsync_opt.testing import FORWARD_NS, make_cluster, make_graph, make_operator, make_profile, residual_graph
from qsync_opt.training import problem_inputs, problem_role, uniform_precisions
from qsync_opt.training.pricing import device_tables, price_operators

SUM_NS = 100 + 200_000 * 4096 // 2**20


def _chain(length: int) -> OpGraph:
    return make_graph([make_operator(f"o{i}", inputs=[f"o{i - 1}"] if i else []) for i in range(length)])


def test_tables_hold_what_the_cluster_allows() -> None:
    graph = residual_graph()
    tables = device_tables(graph, make_profile(graph), make_cluster(precisions=("INT8", "BF16")).devices[0])
    assert list(tables["up"]) == ["INT8", "BF16"]
    assert list(tables["gelu"]) == ["BF16", "FP32"]
    assert list(tables["norm"]) == ["FP32"]


def test_a_type_of_fixed_precision_has_one_choice() -> None:
    graph = residual_graph()
    tables = device_tables(graph, make_profile(graph), make_cluster(fixed=1).device("fast"))
    assert list(tables["up"]) == ["FP32"]


def test_a_precision_that_was_not_profiled_is_refused() -> None:
    graph = residual_graph()
    with pytest.raises(ProblemError, match=r"precision 'FP16' is asked for, but the profile .* has INT8, BF16, FP32"):
        device_tables(graph, make_profile(graph), make_cluster(precisions=("FP16",)).devices[0])


def test_an_operator_that_has_none_of_the_allowed_precisions_is_named() -> None:
    graph = residual_graph()
    profile = make_profile(graph)
    key = profile.operators["up"]
    only_fp32 = {**profile.measurements, key: {"FP32": profile.measurements[key]["FP32"]}}
    poorer = replace(profile, measurements=only_fp32)
    with pytest.raises(ProblemError, match="operator 'up' was profiled in FP32, but the cluster allows INT8"):
        device_tables(graph, poorer, make_cluster(precisions=("INT8",)).devices[0])


def test_uniform_precisions_follow_the_rules() -> None:
    graph = residual_graph()
    profile = make_profile(graph)
    tables = device_tables(graph, profile, make_cluster().devices[0])
    chosen = uniform_precisions(graph, profile, tables, "INT8")
    assert chosen == {
        "embed": "INT8",
        "norm": "FP32",
        "up": "INT8",
        "gelu": "BF16",
        "down": "INT8",
        "residual": "BF16",
        "head": "INT8",
        "loss": "FP32",
    }


def test_operators_without_dataflow_are_fixed_and_integers_carry_no_format() -> None:
    assert problem_role(make_operator("mask", Role.DEPENDENT)) is Role.FIXED
    comparison = make_operator("greater", Role.DEPENDENT, ["x"], dtype="bool")
    assert problem_role(comparison) is Role.FIXED
    assert problem_inputs(comparison) == ()


def test_gradients_of_a_result_with_two_users_are_summed_once() -> None:
    graph = residual_graph()
    profile = make_profile(graph)
    times = price_operators(graph, profile, device_tables(graph, profile, make_cluster().devices[0]))
    assert times["embed"]["FP32"] == (FORWARD_NS, 2 * FORWARD_NS + SUM_NS)
    assert times["up"]["FP32"] == (FORWARD_NS, 2 * FORWARD_NS)


def test_parts_of_a_split_are_not_summed() -> None:
    graph = make_graph(
        [
            make_operator("split", op_type="chunk", role=Role.DEPENDENT),
            make_operator("first", Role.DEPENDENT, ["split"], op_type="getitem"),
            make_operator("second", Role.DEPENDENT, ["split"], op_type="getitem"),
        ]
    )
    profile = make_profile(graph)
    times = price_operators(graph, profile, device_tables(graph, profile, make_cluster().devices[0]))
    assert times["split"]["FP32"] == (FORWARD_NS, 2 * FORWARD_NS)


def test_a_missing_sum_is_named() -> None:
    graph = residual_graph()
    profile = replace(make_profile(graph), gradient_sums={})
    with pytest.raises(ProblemError, match=r"no gradient_sums for .*, but the gradients of 'embed'"):
        price_operators(graph, profile, device_tables(graph, profile, make_cluster().devices[0]))


def test_overhead_of_a_cpu_is_added_to_every_operator() -> None:
    graph = _chain(3)
    overhead = IterationOverhead(forward_ns_per_operator=7, backward_ns_per_operator=11)
    profile = make_profile(graph, overhead=overhead)
    times = price_operators(graph, profile, device_tables(graph, profile, make_cluster().devices[0]))
    assert times["o1"]["FP32"] == (FORWARD_NS + 7, 2 * FORWARD_NS + 11)


@pytest.mark.parametrize(("host_ns", "bound"), [(0, "device"), (500, "device"), (9000, "host")])
def test_launches_count_only_where_the_device_waits_for_them(host_ns: int, bound: str) -> None:
    graph = _chain(6)
    profile = make_profile(graph, precisions=("FP32",), kind="cuda", host_ns=host_ns)
    times = price_operators(
        graph, profile, device_tables(graph, profile, make_cluster(precisions=("FP32",)).devices[0])
    )
    total = sum(sum(times[operator.name]["FP32"]) for operator in graph)
    device_ns = 6 * 3 * FORWARD_NS
    if bound == "device":
        # Only the first launch is waited for.
        assert total == device_ns + host_ns
    else:
        # The device starves behind the host; its last operator remains after the last launch.
        assert total == 12 * host_ns + 2 * FORWARD_NS


def test_a_launch_queue_makes_low_precision_no_faster_than_its_launches() -> None:
    graph = _chain(6)
    profile = make_profile(graph, precisions=("BF16", "FP32"), kind="cuda", host_ns=3000)
    cluster = make_cluster(precisions=("BF16", "FP32"))
    times = price_operators(graph, profile, device_tables(graph, profile, cluster.devices[0]))
    assert times["o3"]["FP32"][0] == FORWARD_NS
    assert times["o3"]["BF16"][0] == 3000 > FORWARD_NS // 2
