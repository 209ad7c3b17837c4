"""`qsync-opt serving plan`, and what its commands refuse."""

import json
from dataclasses import replace

import pytest

import qsync_opt
from qsync_opt.costs import estimate_lines
from qsync_opt.serving import (
    Harm,
    ServeModel,
    load_plan,
    load_problem,
    load_serving_profile,
    roofline_serving_profile,
)

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


@pytest.fixture
def partly_profiled(tmp_path):
    """A device that was measured in two schemes, and one that was in three."""
    result = []
    for name, schemes in (("part", ("W4", "W16")), ("all", ("W4", "W8", "W16"))):
        path = tmp_path / f"{name}.json"
        profile = roofline_serving_profile(MODEL, "this CPU", flops_per_s=1e11, bytes_per_s=1e10, schemes=schemes)
        replace(profile, source="measured", estimates={}).save(path)
        result += ["--device", f"{name}={path}:100"]
    return result


def test_schemes_that_a_profile_lacks_are_estimated_where_that_is_asked_for(run, partly_profiled, tmp_path):
    plain = ["serving", "plan", *partly_profiled, "--schemes", "W4,W8", "--harm-limit", "0.1"]
    status, _, err = run(*plain)
    assert status == 2 and "--costs learned" in err and err.count("\n") == 1
    status, _, err = run(*plain, "--costs", "learned")
    assert status == 2 and "--hardware part=NAME" in err and "known are V100, T4" in err
    learned = ["--costs", "learned", "--hardware", "part=Intel Xeon, 1 thread"]
    status, out, _ = run(*plain, *learned, "--output", tmp_path / "plan.json", "--problem", tmp_path / "p.json")
    note = "costs of part are estimates: attn W8, mlp W8: learned for Intel Xeon, 1 thread, corrected"
    assert status == 0 and f"note: {note}" in out
    assert estimate_lines(load_plan(tmp_path / "plan.json").extras)[0].startswith(note)
    status, out, _ = run("serving", "solve", tmp_path / "p.json")
    assert status == 0 and f"note: {note}" in out
    status, out, _ = run(*plain, *learned, "--json")
    assert json.loads(out)["estimates"]["costs"].keys() == {"part"}
    # All schemes that any profile has, where none are named; a device that has them all needs no hardware.
    status, out, _ = run("serving", "plan", *partly_profiled, *learned, "--json")
    assert status == 0 and "attn W8" in json.loads(out)["estimates"]["costs"]["part"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--costs", "larned"), "did you mean 'learned'?"),
        (("--hardware", "part=T4"), "give --costs learned with it"),
        (("--costs", "learned", "--hardware", "prat=T4"), "did you mean 'part'?"),
        (("--costs", "learned", "--hardware", "T4"), "NAME=HARDWARE"),
        (("--costs", "learned", "--hardware", "part=T5"), "neither a data sheet nor a learned device 'T5'"),
        (("--costs", "learned", "--hardware", "part=T4", "--schemes", "W5"), "allowed are W4, W8, W16, W32"),
    ],
)
def test_bad_options_of_estimates_exit_with_2(run, partly_profiled, options, words):
    status, out, err = run("serving", "plan", *partly_profiled, *options)
    assert (status, out) == (2, "") and words in err and err.count("\n") == 1


def test_a_device_that_nobody_measured_has_a_profile(run, tmp_path):
    pytest.importorskip("torch")
    from qsync_opt.runtimes.torch.serving import sample_config, write_sample

    sizes = {"layers": 2, "hidden": 64, "inner": 128, "heads": 2, "kv_heads": 1, "vocabulary": 96}
    model = write_sample(tmp_path / "model", sample_config(**sizes))
    options = ["serving", "profile", model, "--output", tmp_path / "profile.json"]
    status, out, _ = run(*options, "--learned", "Intel Xeon, 1 thread")
    assert status == 0 and "note: these costs are estimates: learned for Intel Xeon, 1 thread" in out
    assert load_serving_profile(tmp_path / "profile.json").schemes == ("W4", "W8", "W16", "W32")
    status, out, _ = run(*options, "--learned", "T4", "--schemes", "W8", "--json")
    assert status == 0 and " T4" in json.loads(out)["estimates"]["mlp"]["W8"]
    device = f"gpu={tmp_path / 'profile.json'}:500"
    status, out, _ = run("serving", "plan", "--device", device, "--costs", "learned", "--schemes", "W4,W8")
    assert status == 0 and "note: costs of gpu are estimates" in out
    status, _, err = run(*options, "--learned", "T4", "--threads", "2")
    assert status == 2 and "nothing is measured" in err
    assert run(*options, "--learned", "T5")[0] == 2
