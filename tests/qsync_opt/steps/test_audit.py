"""A recorded step beside the predicted one, from files written by hand."""

import copy
import gzip
import json

import pytest

from qsync_opt.cli import main
from qsync_opt.errors import ProblemError
from qsync_opt.model import Role, save_graph
from qsync_opt.steps import (
    NODE,
    StepPredictor,
    audit_worker,
    operator_label,
    overlay_json,
    phase_label,
    predicted_timeline,
    read_chrome_trace,
)
from qsync_opt.testing import random_step_costs, residual_graph
from qsync_opt.training import Plan

GRAPH = residual_graph()
PLAN = {operator.name: "BF16" for operator in GRAPH.by_role(Role.ADJUSTABLE)}


def _range(name, start, duration, **arguments):
    return {"ph": "X", "cat": "user_annotation", "name": name, "ts": start, "dur": duration, "args": arguments}


def _kernel(number, launched, start, duration, stream=7):
    call = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": launched, "dur": 1}
    run = {"ph": "X", "cat": "kernel", "name": f"kernel {number}", "ts": start, "dur": duration}
    return [
        call | {"args": {"correlation": number}},
        run | {"args": {"correlation": number, "stream": stream}},
    ]


def trace(precisions=PLAN):
    """One step in microseconds: operator k takes 10 (k + 1) forward, its kernel runs far later; then a node each."""
    events = [_range(phase_label("forward"), 0, 1000)]
    for k, operator in enumerate(GRAPH):
        label = operator_label(operator.name, 10 * k, precisions.get(operator.name, ""))
        events.append(_range(label, 100 * k, 50))
        events += _kernel(k, 100 * k + 10, 5000 + 5 * k * (k + 1), 10 * (k + 1))
    events.append(_range(phase_label("backward"), 1000, 1000))
    for place, k in enumerate(reversed(range(len(GRAPH)))):
        node = _range(f"{NODE}: x", 1000 + 100 * place, 50, **{"Sequence number": 10 * k})
        events.append(node | {"cat": "cpu_op"})
        events += _kernel(100 + k, 1010 + 100 * place, 7000 + 20 * place, 20)
    events.append(_range(phase_label("optimizer"), 2000, 500))
    return {"traceEvents": events}


@pytest.fixture
def files(tmp_path):
    save_graph(GRAPH, tmp_path / "graph.json")
    random_step_costs(GRAPH, ("BF16", "FP32")).save(tmp_path / "costs.json")
    for name, plan in {
        "plan": PLAN,
        "other": PLAN | {"up": "FP32"},
        "strange": PLAN | {"upp": "FP32"},
    }.items():
        Plan(problem="any", devices={"gpu": plan}).save(tmp_path / f"{name}.json")
    (tmp_path / "trace.json").write_text(json.dumps(trace()))
    return tmp_path


def _audit(files, capsys, *more, trace="trace", plan="plan"):
    names = ["audit", f"{trace}.json", "--graph", "graph.json", "--plan", f"{plan}.json", "--costs", "costs.json"]
    status = main([str(files / name) if name.endswith(".json") else name for name in names] + list(more))
    told = capsys.readouterr()
    assert "Traceback" not in told.err
    return status, told.out, told.err


def test_predicted_and_measured_stand_side_by_side(files, capsys):
    status, out, _ = _audit(files, capsys, "--json")
    (worker,) = json.loads(out)["workers"]
    assert status == 0
    costs = StepPredictor(GRAPH, random_step_costs(GRAPH, ("BF16", "FP32"))).plan(PLAN).costs
    rows = {(row["operator"], row["phase"]): row for row in worker["operators"]}
    for k, operator in enumerate(GRAPH):
        assert rows[operator.name, "forward"]["measured_ns"] == 10_000 * (k + 1)
        assert rows[operator.name, "forward"]["predicted_ns"] == costs[k].forward.device
        assert rows[operator.name, "backward"]["measured_ns"] == 20_000
    differences = [abs(row["difference_ns"]) for row in worker["operators"]]
    assert differences == sorted(differences, reverse=True)
    for side in ("predicted_ns", "measured_ns"):
        assert worker[side] == sum(phase[side] for phase in worker["phases"].values())
    status, out, _ = _audit(files, capsys, "--top", "1")
    assert "all of them" in out
    assert out.rstrip().splitlines()[-1].split()[0] == worker["operators"][0]["operator"]


def test_what_the_recorded_steps_did_not_do_is_shown(files, capsys):
    clipped = trace()
    clipped["traceEvents"] += [_range(phase_label("clip"), 2500, 30), *_kernel(300, 2510, 9000, 17)]
    (files / "clipped.json").write_text(json.dumps(clipped))
    (worker,) = json.loads(_audit(files, capsys, "--json", trace="clipped")[1])["workers"]
    assert worker["phases"]["clip"] == {"predicted_ns": 0, "measured_ns": 17_000}


def test_kernels_belong_to_the_step_that_launched_them(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace()))
    rows = overlay_json([], {"w": read_chrome_trace(path)})["traceEvents"]
    shown = [row for row in rows if row.get("tid") == 1 and row["ph"] == "X"]
    assert len(shown) == 2 * len(GRAPH)  # though the host had finished the step before the first of them ran
    assert shown[0]["ts"] == 5000


@pytest.mark.parametrize("packed", [False, True])
def test_a_trace_that_is_too_large_says_so(tmp_path, monkeypatch, packed):
    data = json.dumps(trace()).encode()
    path = tmp_path / "trace.json"
    path.write_bytes(gzip.compress(data) if packed else data)
    monkeypatch.setattr("qsync_opt.steps.trace._LARGEST_BYTES", len(data))
    assert read_chrome_trace(path).ranges
    monkeypatch.setattr("qsync_opt.steps.trace._LARGEST_BYTES", len(data) - 1)
    with pytest.raises(ProblemError, match=f"it has more than {len(data) - 1} bytes; trace fewer steps"):
        read_chrome_trace(path)


def test_every_worker_of_an_overlay_has_its_own_lanes(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace()))
    predictor = StepPredictor(GRAPH, random_step_costs(GRAPH, ("BF16", "FP32")))
    step = predictor.plan(PLAN)
    predicted = [predicted_timeline(name, predictor, step) for name in ("v", "w", "x")]
    measured = {name: read_chrome_trace(path) for name in ("v", "w")}
    rows = overlay_json(predicted, measured)["traceEvents"]
    names = {row["pid"]: row["args"]["name"] for row in rows if row["name"] == "process_name"}
    assert names == {0: "v", 1: "w", 2: "x", 3: "v (measured)", 4: "w (measured)"}
    assert {row["pid"] for row in rows} == set(names)
    for pid in (0, 1, 2):
        assert len([row for row in rows if row["pid"] == pid and row["ph"] == "X"]) == len(predicted[0].events)


def test_a_trace_of_another_plan_is_refused(files, capsys):
    status, _, told = _audit(files, capsys, plan="other")
    assert status == 2
    assert "'up' ran in BF16, but the plan says FP32 (1 operators differ)" in told
    status, _, told = _audit(files, capsys, plan="strange")
    assert status == 2
    assert "'upp', which model 'synthetic' lacks; did you mean 'up'?" in told
    # A trace without precisions (of an older version, or without a plan) says nothing about them.
    (files / "bare.json").write_text(json.dumps(trace({})))
    assert _audit(files, capsys, trace="bare", plan="other")[0] == 0


def test_a_step_without_operators_is_refused(tmp_path):
    bare = {"traceEvents": [e for e in trace()["traceEvents"] if "|" not in e["name"][len("qsync-opt|") :]]}
    path = tmp_path / "bare.json"
    path.write_text(json.dumps(bare))
    predictor = StepPredictor(GRAPH, random_step_costs(GRAPH, ("BF16", "FP32")))
    with pytest.raises(ProblemError, match="no operators in its last step"):
        audit_worker("w", predictor, predictor.plan(PLAN), read_chrome_trace(path))


def _first(category):
    def found(events):
        return next(event for event in events if event["cat"] == category)

    return found


@pytest.mark.parametrize(
    ("category", "key", "value", "told"),
    [
        ("kernel", "ts", "soon", "could not convert"),
        ("kernel", "ts", float("nan"), "nan is no time"),
        ("user_annotation", "ts", float("inf"), "inf is no time"),
        ("user_annotation", "ts", None, "TypeError"),
        ("user_annotation", "dur", -50, "dur is -50"),
        ("kernel", "args", [1, 2], "AttributeError"),
        ("kernel", "args", {"stream": "s"}, "'s'"),
        ("cpu_op", "args", {"Sequence number": "z"}, "'z'"),
        ("user_annotation", "name", "[memory]", None),
    ],
)
def test_a_damaged_event_is_named(files, capsys, category, key, value, told):
    damaged = copy.deepcopy(trace())
    _first(category)(damaged["traceEvents"])[key] = value
    (files / "damaged.json").write_text(json.dumps(damaged))
    status, _, text = _audit(files, capsys, trace="damaged")
    assert status == 2
    if told is not None:
        assert "is damaged: event" in text
        assert told in text


@pytest.mark.parametrize(
    "label", ["qsync-opt|xx|yy", "qsync-opt|oops", "qsync-opt|\u00b2|up", f"qsync-opt|{'9' * 5000}|up"]
)
def test_a_label_that_is_none_is_named(files, capsys, label):
    damaged = copy.deepcopy(trace())
    damaged["traceEvents"].append(_range(label, 5, 1))
    (files / "damaged.json").write_text(json.dumps(damaged))
    status, _, text = _audit(files, capsys, trace="damaged")
    assert status == 2
    assert "labels of operators are" in text


def test_packed_traces_are_read_and_broken_files_refused(files, capsys):
    whole = json.dumps(trace()).encode()
    packed = gzip.compress(whole)
    (files / "packed.json").write_bytes(packed)
    assert _audit(files, capsys, trace="packed")[:2] == _audit(files, capsys)[:2]
    for content in (whole[:300], packed[:100], packed[:30] + b"x" + packed[31:], b"\xff\xfe" * 9, b"", b"[" * 99_999):
        (files / "broken.json").write_bytes(content)
        status, _, text = _audit(files, capsys, trace="broken")
        assert status == 2
        assert "cannot read trace" in text


def test_options_that_cannot_be_meant(files, capsys):
    assert "at least 0" in _audit(files, capsys, "--top", "-1")[2]
    before = (files / "trace.json").read_text()
    status, _, text = _audit(files, capsys, "--overlay", str(files / "." / "trace.json"))
    assert (status, "which is read; give another file" in text) == (2, True)
    assert (files / "trace.json").read_text() == before
