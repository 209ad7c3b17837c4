import json
from dataclasses import replace
from pathlib import Path

import pytest

from qsync_opt.errors import ProblemError
from qsync_opt.testing import buckets, make_cluster, make_profile, make_sensitivities, residual_graph
from qsync_opt.training import (
    COMMUNICATION,
    COMPUTE,
    BucketOptions,
    Communication,
    Problem,
    Timeline,
    TimelineEvent,
    build_problem,
    evaluate,
    replay,
    trace_json,
    uniform_plan,
    write_trace,
)


@pytest.fixture
def problem() -> Problem:
    graph = residual_graph()
    return build_problem(
        graph,
        {"slow": make_profile(graph), "fast": make_profile(graph)},
        make_sensitivities(graph),
        make_cluster(count=2, fixed=2),
        buckets=BucketOptions(first_bytes=1, cap_bytes=1),
        latency_limit_ns=10**9,
    )


@pytest.mark.parametrize("precision", ["INT8", "BF16", "FP32"])
def test_the_timeline_says_what_the_evaluation_says(problem: Problem, precision: str) -> None:
    plan = uniform_plan(problem, precision)
    evaluation = evaluate(problem, plan)
    timeline = replay(problem, plan)
    assert timeline.iteration_ns == evaluation.iteration_ns == max(event.end_ns for event in timeline.events)
    device = evaluation.devices["slow"]
    compute = [event for event in timeline.events if event.stream == COMPUTE]
    backward = [event for event in compute if event.kind.startswith("backward")]
    assert backward[0].start_ns == device.forward_end_ns
    assert backward[-1].end_ns == device.backward_end_ns
    assert compute[-1].name == "optimizer"
    reduced = [event for event in timeline.events if event.stream == COMMUNICATION]
    assert [event.start_ns for event in reduced] == list(evaluation.bucket_start_ns)
    casts = [event for event in compute if event.kind.endswith("cast")]
    assert bool(casts) == (precision != "FP32")
    for event in casts:
        assert set(event.details) == {"producer", "consumer"}


@pytest.mark.parametrize(
    ("allreduce_ns", "peer_ready_ns", "waited_for"),
    [
        # In FP16, the gradient of b is done at 4000 ns and that of a at 6000 ns.
        ((1000, 1000), (0, 0), ["T4", "T4"]),
        ((5000, 1000), (0, 0), ["T4", "the bucket before"]),
        ((1000, 1000), (0, 10000), ["T4", "devices of fixed precision"]),
        ((1000, 1000), (5000, 5500), ["devices of fixed precision", "T4"]),
        ((9000, 1000), (5000, 7000), ["devices of fixed precision", "the bucket before"]),
        ((9000, 1000), (0, 20000), ["T4", "devices of fixed precision"]),
    ],
)
def test_what_a_bucket_waited_for_is_what_came_last(
    allreduce_ns: tuple[int, int], peer_ready_ns: tuple[int, int], waited_for: list[str], tmp_path: Path
) -> None:
    communication = Communication(allreduce_ns=allreduce_ns, peer_ready_ns=peer_ready_ns)
    problem = replace(buckets().problem, communication=communication, latency_limit_ns=10**6)
    timeline = replay(problem, uniform_plan(problem, "FP16"))
    reduced = [event for event in timeline.events if event.stream == COMMUNICATION]
    assert [event.details for event in reduced] == [
        {"bucket": k, "waited_for": last} for k, last in enumerate(waited_for)
    ]
    write_trace(tmp_path / "trace.json", timeline)
    rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [row["args"]["waited_for"] for row in rows if row.get("cat") == "all-reduce"] == waited_for


def test_the_trace_has_a_lane_per_worker_and_stream(problem: Problem, tmp_path: Path) -> None:
    timeline = replay(problem, uniform_plan(problem))
    write_trace(tmp_path / "trace.json", timeline)
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace == trace_json(timeline)
    names = {(row["pid"], row["args"]["name"]) for row in trace["traceEvents"] if row["ph"] == "M"}
    assert names == {(0, "slow (one of 2)"), (0, "compute"), (0, "communication")}
    complete = [row for row in trace["traceEvents"] if row["ph"] == "X"]
    assert len(complete) == len(timeline.events)
    for row in complete:
        assert row["ts"] >= 0
        assert row["dur"] >= 0
    forward = next(row for row in complete if row["name"] == "up" and row["cat"] == "forward")
    assert forward["args"] == {"precision": "INT8", "casts": 1}


def _event(start_ns: int, duration_ns: int, stream: str = COMPUTE) -> TimelineEvent:
    return TimelineEvent(
        worker="w", stream=stream, name="e", kind="forward", start_ns=start_ns, duration_ns=duration_ns
    )


def test_overlap_within_a_lane_is_refused_and_between_lanes_is_not() -> None:
    with pytest.raises(ProblemError, match=r"starts at 5 ns .*, before 'e' ends at 10 ns"):
        Timeline(name="t", iteration_ns=15, events=(_event(0, 10), _event(5, 10)))
    Timeline(name="t", iteration_ns=15, events=(_event(0, 10), _event(5, 10, COMMUNICATION)))


def test_another_end_than_the_iteration_is_refused() -> None:
    with pytest.raises(ProblemError, match="ends at 10 ns, but the iteration takes 11 ns"):
        Timeline(name="t", iteration_ns=11, events=(_event(0, 10),))
    with pytest.raises(ProblemError, match="duration_ns is -1"):
        _event(0, -1)
