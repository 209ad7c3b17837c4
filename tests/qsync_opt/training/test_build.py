from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qsync_opt.cluster import load_cluster
from qsync_opt.costs import DeviceProfile
from qsync_opt.errors import ModelError, ProblemError
from qsync_opt.gradients import BucketStatistics, GradientCosts, Moments, SchemeTimes
from qsync_opt.model import OpGraph, Role
from qsync_opt.sensitivity import SensitivityValues
from qsync_opt.testing import (
    FORWARD_NS,
    make_cluster,
    make_graph,
    make_operator,
    make_profile,
    make_sensitivities,
    residual_graph,
)
from qsync_opt.training import BucketOptions, Problem, build_problem, evaluate, fastest, load_problem, uniform_plan

SMALL_BUCKETS = BucketOptions(first_bytes=1, cap_bytes=1)


@pytest.fixture
def graph() -> OpGraph:
    return residual_graph()


def _profiles(graph: OpGraph, fixed: bool = False, scale: int = 1) -> dict[str, DeviceProfile]:
    profiles = {"slow": make_profile(graph)}
    if fixed:
        profiles["fast"] = make_profile(graph, scale=scale)
    return profiles


def _build(graph: OpGraph, **changes: Any) -> Problem:
    arguments: dict[str, Any] = {
        "profiles": _profiles(graph),
        "sensitivities": make_sensitivities(graph),
        "cluster": make_cluster(count=2),
    } | changes
    return build_problem(
        graph, arguments.pop("profiles"), arguments.pop("sensitivities"), arguments.pop("cluster"), **arguments
    )


def test_times_roles_edges_and_sensitivities_arrive(graph: OpGraph) -> None:
    problem = _build(graph, latency_limit_ns=5)
    assert [(o.name, o.role) for o in problem.operators] == [(o.name, o.role) for o in graph]
    assert problem.operators[5].inputs == ("embed", "down")
    device = problem.device("slow")
    assert device.operators["up"]["INT8"].forward_ns == FORWARD_NS // 4
    # Per worker, times the count of two.
    assert device.operators["up"]["INT8"].sensitivity == 8.0
    assert device.operators["gelu"]["BF16"].sensitivity == 0.0
    assert problem.optimizer_ns == 10_000
    assert problem.latency_limit_ns == 5
    assert problem.formats == {"INT8": 1, "BF16": 2, "FP32": 4}


def _excluding(graph: OpGraph, reasons: dict[str, str]) -> SensitivityValues:
    return SensitivityValues(unit="made up", values_of=make_sensitivities(graph), excluded={"up": reasons})


def test_captured_models_and_paths_are_taken(graph: OpGraph, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "name: c\nnetwork: {latency: 1 us, bandwidth: 1 GB/s, source: test}\n"
        "devices: [{name: slow, count: 2, memory: 1 GiB, precisions: [INT8, BF16, FP32]}]\n"
    )
    captured: Any = SimpleNamespace(graph=graph)
    problem = build_problem(captured, _profiles(graph), make_sensitivities(graph), file)
    assert problem == _build(graph, cluster=load_cluster(file)) == _build(graph, cluster=str(file))
    with pytest.raises(ModelError, match="graph is a str: an operator graph or a captured model is needed"):
        build_problem("net", _profiles(graph), make_sensitivities(graph), file)  # type: ignore[arg-type]
    for changes, text in (
        ({"cluster": 3}, "cluster is a int: a Cluster or the path of a cluster file is needed"),
        ({"profiles": make_profile(graph)}, "profiles is a DeviceProfile: needed is a DeviceProfile by device type"),
        ({"sensitivities": 1.0}, "sensitivities is a float: needed is a table"),
    ):
        with pytest.raises(ProblemError, match=text):
            _build(graph, **changes)


def test_excluded_precisions_leave_the_table(graph: OpGraph) -> None:
    problem = _build(graph, latency_limit_ns=5, sensitivities=_excluding(graph, {"BF16": "overflows"}))
    assert "BF16" not in problem.device("slow").operators["up"]
    assert "BF16" in problem.device("slow").operators["down"]


def test_excluding_everything_is_an_error_with_the_reasons(graph: OpGraph) -> None:
    everything = dict.fromkeys(("INT8", "BF16", "FP32"), "too coarse")
    with pytest.raises(ProblemError, match=r"must get none of its precisions .*BF16: too coarse"):
        _build(graph, latency_limit_ns=5, sensitivities=_excluding(graph, everything))


def test_buckets_are_launched_in_order_of_readiness(graph: OpGraph) -> None:
    problem = _build(graph, buckets=SMALL_BUCKETS, latency_limit_ns=5)
    sizes = [4 * 16384, 4 * (262144 + 256), 4 * 64, 4 * 65536]
    # Two workers: two messages of half the size at 1 GB/s and 10 us each; a merged bucket is two all-reduces.
    messages = [1, 2, 1, 1]
    expected = [m * 20_000 + size for m, size in zip(messages, sizes, strict=True)]
    assert list(problem.communication.allreduce_ns) == expected
    ready = evaluate(problem, uniform_plan(problem, "FP32")).devices["slow"].bucket_ready_ns
    assert list(ready) == sorted(ready)
    assert ready[-1] == evaluate(problem, uniform_plan(problem, "FP32")).devices["slow"].backward_end_ns


def test_a_single_worker_sends_nothing(graph: OpGraph) -> None:
    problem = _build(graph, cluster=make_cluster(), latency_limit_ns=5)
    assert problem.communication.allreduce_ns == ()
    assert all(operator.bucket is None for operator in problem.operators)


def test_devices_of_fixed_precision_become_ready_times(graph: OpGraph) -> None:
    cluster = make_cluster(count=1, fixed=3)
    problem = _build(graph, profiles=_profiles(graph, True), cluster=cluster, buckets=SMALL_BUCKETS, latency_limit_ns=5)
    assert [device.name for device in problem.devices] == ["slow"]
    # The same costs, all in FP32: what the planned device itself would take.
    own = evaluate(problem, uniform_plan(problem, "FP32")).devices["slow"].bucket_ready_ns
    assert problem.communication.peer_ready_ns == own


def test_a_slow_peer_holds_the_iteration_even_after_its_last_bucket() -> None:
    graph = make_graph(
        [make_operator("first"), make_operator("second", inputs=["first"], parameters=["w"])], {"w": 1024}
    )
    cluster = make_cluster(count=1, fixed=1)
    problem = _build(graph, profiles=_profiles(graph, True, scale=100), cluster=cluster, latency_limit_ns=5)
    iteration_ns = evaluate(problem, uniform_plan(problem, "INT8")).iteration_ns
    assert iteration_ns == 100 * 2 * 3 * FORWARD_NS + problem.optimizer_ns


def test_the_limit_is_that_of_the_fastest_plan_that_fits(graph: OpGraph) -> None:
    problem = _build(graph, slack=0.25)
    answer = fastest(problem)
    assert answer is not None
    assert problem.latency_limit_ns == int(answer.iteration_ns * 1.25)


def test_the_planner_finds_the_fastest_plan(graph: OpGraph) -> None:
    problem = _build(graph)
    times = [evaluate(problem, uniform_plan(problem, p)).iteration_ns for p in ("INT8", "BF16", "FP32")]
    assert problem.latency_limit_ns <= min(times)


def test_where_nothing_fits_memory_is_set_aside_for_the_limit(graph: OpGraph) -> None:
    problem = _build(graph, cluster=make_cluster(count=2, memory_limit_bytes=1024))
    assert problem.latency_limit_ns == _build(graph).latency_limit_ns
    assert problem.device("slow").memory_limit_kib == 1


def test_the_problem_survives_its_file(graph: OpGraph, tmp_path: Path) -> None:
    problem = _build(graph, latency_limit_ns=10**9)
    problem.save(tmp_path / "problem.json")
    assert load_problem(tmp_path / "problem.json").to_json() == problem.to_json()


def test_a_profile_file_named_in_the_cluster_is_read(graph: OpGraph, tmp_path: Path) -> None:
    make_profile(graph).save(tmp_path / "slow.json")
    cluster = make_cluster()
    cluster = replace(cluster, devices=(replace(cluster.devices[0], profile=tmp_path / "slow.json"),))
    problem = build_problem(graph, {}, make_sensitivities(graph), cluster, latency_limit_ns=5)
    assert problem.device("slow").operators["up"]["FP32"].forward_ns == FORWARD_NS


def _without(table: Mapping[str, Mapping[str, float]], operator: str, precision: str) -> dict[str, dict[str, float]]:
    return {o: {p: s for p, s in row.items() if (o, p) != (operator, precision)} for o, row in table.items()}


def test_missing_and_unusable_inputs_are_named(graph: OpGraph) -> None:
    table = make_sensitivities(graph)
    with pytest.raises(ProblemError, match="device type 'slow' has no profile"):
        _build(graph, profiles={})
    with pytest.raises(ProblemError, match="no device type 'slwo'; did you mean 'slow'"):
        _build(graph, profiles={"slwo": make_profile(graph)})
    with pytest.raises(ProblemError, match="no sensitivity for adjustable operator 'up'"):
        _build(graph, sensitivities={o: row for o, row in table.items() if o != "up"})
    with pytest.raises(ProblemError, match="operator 'up' has no sensitivity for INT8"):
        _build(graph, sensitivities=_without(table, "up", "INT8"))
    with pytest.raises(ProblemError, match="sensitivity of 'up' in INT8 is nan"):
        _build(graph, sensitivities={**table, "up": {**table["up"], "INT8": float("nan")}})
    with pytest.raises(ProblemError, match="slack is -1"):
        _build(graph, slack=-1)
    other = make_graph([make_operator("embed")])
    with pytest.raises(ProblemError, match=r"of another model .* has nothing where the graph has 'norm'"):
        _build(graph, profiles={"slow": make_profile(other)})


def test_fp32_may_be_left_out_of_the_sensitivities(graph: OpGraph) -> None:
    table = _without(make_sensitivities(graph), "up", "FP32")
    assert (
        _build(graph, sensitivities=table, latency_limit_ns=5).device("slow").operators["up"]["FP32"].sensitivity == 0
    )


def test_a_missing_cast_is_named(graph: OpGraph) -> None:
    profile = make_profile(graph)
    casts = {pair: fit for pair, fit in profile.casts.items() if pair != "FP32>INT8"}
    with pytest.raises(ProblemError, match="the cast FP32>INT8 is needed between 'norm' and 'up'"):
        _build(graph, profiles={"slow": replace(profile, casts=casts)})


def test_operators_of_integers_have_no_edges() -> None:
    graph = make_graph(
        [
            make_operator("a"),
            make_operator("mask", Role.DEPENDENT, ["a"], dtype="bool", op_type="gt"),
            make_operator("b", inputs=["a"]),
        ]
    )
    problem = _build(graph, latency_limit_ns=5)
    assert (problem.operators[1].inputs, problem.operators[1].role) == ((), Role.FIXED)
    assert problem.operators[1].output_elements == 0


def test_communication_costs_make_a_joint_problem(graph):
    problem = _build(graph, buckets=SMALL_BUCKETS)
    moments = Moments(square=1.0, block_square=20.0, block_absolute=3.0, bucket_square=90.0, bucket_absolute=8.0)
    bucket = BucketStatistics(elements=1000, local=moments, mean=moments, noise=2.0)
    times = SchemeTimes(workers=2, elements=(10, 1000), times_ns={"FP32": (10, 900), "two8": (10, 300)})
    costs = GradientCosts(statistics=(bucket,) * len(problem.communication.allreduce_ns), times=times, weight=0.5)
    joint = _build(graph, buckets=SMALL_BUCKETS, communication=costs)
    assert joint == costs.joint(problem)
    assert joint.training == problem and joint.buckets[0]["two8"].time_ns == 300
    # What was recorded of a bucket in training goes before what a reduction takes alone.
    count = len(costs.statistics)
    recorded = replace(costs, bucket_times_ns={"two8": tuple(range(500, 500 + count))})
    assert GradientCosts.from_json(recorded.to_json()) == recorded
    buckets = recorded.joint(problem).buckets
    assert [own["two8"].time_ns for own in buckets] == list(range(500, 500 + count))
    assert [own["FP32"] for own in buckets] == [own["FP32"] for own in joint.buckets]
    with pytest.raises(ProblemError, match=f"'two8' has 1 recorded times for {count} buckets"):
        replace(costs, bucket_times_ns={"two8": (5,)})
