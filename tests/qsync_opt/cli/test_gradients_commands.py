"""The commands of the system gradients."""

import json
from pathlib import Path

from qsync_opt import load_plan, load_problem
from qsync_opt.gradients import RecordedReductions, predicted_reductions

DATA = Path(__file__).parents[2] / "data" / "gradients"


def changed(folder, name, **changes):
    path = folder / f"{name}.json"
    path.write_text(json.dumps(json.loads((DATA / "gradients-public-0.json").read_text()) | changes))
    return str(path)


def test_solve_evaluate_and_refuse(run, tmp_path):
    path, plan = changed(tmp_path, "p"), str(tmp_path / "plan.json")
    status, out, _ = run("gradients", "solve", path, "--output", plan, "--json")
    answer = json.loads(out)
    assert (status, answer["termination"]) == (0, "optimal")
    status, out, _ = run("gradients", "evaluate", path, plan, "--json")
    evaluation = json.loads(out)
    assert (status, evaluation["objective"]) == (0, answer["objective"])
    assert evaluation["iteration_ns"] <= 3142
    status, out, _ = run("gradients", "solve", changed(tmp_path, "q", latency_limit_ns=900), "--json")
    assert (status, json.loads(out)["termination"]) == (3, "infeasible")
    assert "the least value that could be met" in json.loads(out)["reason"]
    status, out, err = run("gradients", "solve", changed(tmp_path, "r", tail_ns="x"))
    assert (status, out, err.count("\n")) == (2, "", 1)


def test_recorded_reductions_beside_predicted_ones(run, tmp_path):
    path, plan = changed(tmp_path, "p"), tmp_path / "plan.json"
    assert run("gradients", "solve", path, "--output", plan)[0] == 0
    problem, chosen = load_problem(path), load_plan(plan)
    predicted = predicted_reductions(problem, chosen)
    later = problem.tail_ns + 7
    steps = [
        {"scheme": r.scheme, "ready_ns": r.ready_ns + later, "start_ns": r.start_ns + later, "end_ns": r.end_ns + later}
        for r in predicted
    ]
    data = {"workers": 2, "elements": [8] * len(steps), "steps": [steps]}
    record = RecordedReductions.from_json({"format": "qsync-gradients-recorded/1", **data})
    record.save(tmp_path / "recorded.json")
    trace = tmp_path / "trace.json"
    status, out, _ = run("gradients", "audit", tmp_path / "recorded.json", path, plan, "--trace", trace)
    assert status == 0
    assert "the last bucket ends at" in out
    assert len(json.loads(trace.read_text())["traceEvents"]) >= 4 * len(steps)
    _, out, _ = run("gradients", "audit", tmp_path / "recorded.json", path, plan, "--json")
    shown = json.loads(out)
    assert [each["end_ns"] for each in shown["measured"]] == [each["end_ns"] + 7 for each in shown["predicted"]]
    data["steps"] = [[{**each, "scheme": "none"} for each in steps]]
    RecordedReductions.from_json({"format": "qsync-gradients-recorded/1", **data}).save(tmp_path / "other.json")
    status, out, err = run("gradients", "audit", tmp_path / "other.json", path, plan)
    assert (status, out) == (2, "")
    assert "was recorded under none, but the plan says" in err


def test_list_the_schemes(run):
    status, out, _ = run("gradients", "schemes", "--workers", "8", "--json")
    sizes = {row["name"]: row["wire_bytes"] for row in json.loads(out)}
    assert (status, sizes["sum4"]) == (0, None)
    assert sizes["sum8"] < sizes["BF16"] < sizes["FP32"]
    assert "too many workers: 8" in run("gradients", "schemes", "--workers", "8")[1]
