"""`qsync-opt serving plan`, and what its commands refuse."""

import json

import pytest

import qsync_opt
from qsync_opt.serving import Harm, ServeModel, load_plan, load_problem, roofline_serving_profile

MODEL = ServeModel(
    name="small", layers=4, hidden=512, inner=1536, heads=8, kv_heads=2, head_size=64, vocabulary=4000
)  # fmt: skip


@pytest.fixture
def devices(tmp_path):
    """Options of two devices."""
    result = []
    for name, speed, mib in (("fast", 2.0, 40), ("slow", 1.0, 20)):
        path = tmp_path / f"{name}.json"
        roofline_serving_profile(MODEL, name, flops_per_s=1e12 * speed, bytes_per_s=2e10 * speed).save(path)
        result += ["--device", f"{name}={path}:{mib}"]
    return result


def test_plan_writes_problem_plan_and_page(run, devices, tmp_path):
    outputs = ["--problem", tmp_path / "p.json", "--output", tmp_path / "plan.json", "--report", tmp_path / "page.html"]
    status, out, _ = run("serving", "plan", *devices, "--harm-limit", "0.5", *outputs)
    assert status == 0
    assert "predicted: prefill" in out and "micro-batches:" in out and "harm is assumed" in out
    problem, plan = load_problem(tmp_path / "p.json"), load_plan(tmp_path / "plan.json")
    assert qsync_opt.evaluate(problem, plan).feasible
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    status, out, _ = run("serving", "evaluate", tmp_path / "p.json", tmp_path / "plan.json", "--json")
    assert status == 0 and json.loads(out)["feasible"]


def test_plan_with_measured_harm_as_json(run, devices, tmp_path):
    harm = {group: {"W4": 1.0, "W8": 0.1, "W16": 0.0} for group in MODEL.groups}
    Harm(model="small", measure="output error", tokens=300, groups=harm).save(tmp_path / "harm.json")
    more = ["--harm", tmp_path / "harm.json", "--harm-limit", "1", "--method", "exact", "--json"]
    status, out, _ = run("serving", "plan", *devices, *more)
    data = json.loads(out)
    assert status == 0 and data["termination"] == "optimal"
    assert data["prediction"]["harm"] <= 1 and sum(s["groups"] for s in data["prediction"]["stages"]) == 8


def test_what_does_not_fit_exits_with_3_and_the_reason(run, devices):
    status, out, _ = run("serving", "plan", *[text.replace(":40", ":9").replace(":20", ":9") for text in devices])
    assert status == 3
    assert out.startswith("no plan: memory") and "KiB more" in out


@pytest.mark.parametrize("text", ["fast", "fast=x.json", "=x.json:5", "fast=x.json:many"])
def test_bad_devices_exit_with_2(run, text):
    status, _, err = run("serving", "plan", "--device", text)
    assert status == 2
    assert "NAME=PROFILE:MIB" in err


def test_other_bad_input_exits_with_2(run, devices, tmp_path):
    assert run("serving", "plan", *devices, "--schemes", "W5")[0] == 2
    assert run("serving", "plan", *devices, "--schemes", ",")[0] == 2
    assert run("serving", "plan", "--device", f"a={tmp_path / 'none.json'}:5")[0] == 2
    assert run("serving", "profile", tmp_path, "--output", tmp_path / "o.json")[0] == 2
    assert not (tmp_path / "o.json").exists()
    assert run("serving", "demo", "--threads", "0", "1")[0] == 2
