"""The commands of the system gradients."""

import json
from pathlib import Path

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


def test_list_the_schemes(run):
    status, out, _ = run("gradients", "schemes", "--workers", "8", "--json")
    sizes = {row["name"]: row["wire_bytes"] for row in json.loads(out)}
    assert (status, sizes["sum4"]) == (0, None)
    assert sizes["sum8"] < sizes["BF16"] < sizes["FP32"]
    assert "too many workers: 8" in run("gradients", "schemes", "--workers", "8")[1]
