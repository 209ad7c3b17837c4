"""Small pieces of the runtime benchmark: local batches, what becomes of its records, and the figures made of them."""

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = [str(ROOT / "benchmarks"), str(ROOT / "docs" / "generators")]


@pytest.fixture(scope="module", autouse=True)
def modules():
    """The modules import each other by their bare names."""
    sys.path[:0] = FOLDERS
    yield
    for folder in FOLDERS:
        sys.path.remove(folder)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=8), st.integers(8, 500))
def test_whole_samples_by_speed(speeds, total):
    from runtime_throughput import shares

    found = shares(speeds, total)
    assert sum(found) == total
    assert min(found) >= 1
    ideal = [total * speed / sum(speeds) for speed in speeds]
    assert all(abs(count - wanted) <= len(speeds) for count, wanted in zip(found, ideal, strict=True))


def test_sensitivities_reach_the_records_they_belong_to():
    from runtime import with_plans

    told = {"planning_s": 3.0, "predicted_ms": 9.0, "taken": {}, "measured": {}, "reason": "so"}
    records = [
        {"configuration": "BF16 autocast"},
        {"configuration": "local batches by speed, BF16 autocast"},
        {"configuration": "uniform INT8"},
        {"sensitivities": {"BF16": 1.0, "INT8": 2.0, "plan": 0.5}, **told},
        {"configuration": "plan"},
    ]
    found = with_plans(records)
    assert [record["sensitivity"] for record in found] == [1.0, 1.0, 2.0, 0.5]
    assert found[-1]["planning_s"] == 3.0
    assert "planning_s" not in found[0]
    assert with_plans(records[:2]) == records[:2]  # cut off before the plan


def test_what_was_not_measured_says_so():
    from runtime_figures import NOT_MEASURED, runtime_figures

    found = runtime_figures({"overhead": [{"hardware": "a processor", "precision": "FP32", "slower": 0.5}]})
    assert found.pop("runtime.cpu-fp32") == "+50.0 % time"
    assert set(found.values()) == {NOT_MEASURED}


def record(name, speed, sensitivity=None, workers=2, **more):
    return {
        "hardware": "NVIDIA",
        "model": "m",
        "configuration": name,
        "samples_per_s": speed,
        "sensitivity": sensitivity,
        "local_batches": [8] * workers,
        **more,
    }


def test_the_plan_is_compared_with_the_best_plain_way():
    from runtime_figures import runtime_figures

    plan = {"first_planned_step_s": 60.0, "taken": {"whole": "FP32"}}
    throughput = [
        record("BF16 autocast", 200.0, 4.0, step_ms=15.0, alone_ms=[3.0, 10.0]),
        record("BF16 autocast, captured", 210.0, 4.0),
        record("uniform INT8", None),
        record("FP32", 50.0, 0.0),
        record("FP16 autocast", 190.0, 5.0, step_ms=20.0, alone_ms=[3.0, 12.0]),
        record("plan", 190.0, 1.0, **plan),
        record("FP32", 9.0, 0.0, workers=8),
        record("local batches by speed, FP32", 12.0, workers=8),
        record("local batches by speed, BF16 autocast", 400.0),
        record("local batches by speed, BF16 autocast, captured", 450.0),
        record("local batches by speed, plan", 440.0, 4.0, taken={"whole": "BF16 autocast"}),
        record("plan", 100.0, 1.0, workers=4, **plan),
        record("FP16 autocast", 50.0, 1.0, workers=4),
        record("plan", 1.0, 1.0, workers_in_turn=True),
    ]
    assert (
        "m (as it was)"
        in runtime_figures({"throughput": [{**throughput[0], "variant": "as it was"}]})["runtime.table.throughput"]
    )
    found = runtime_figures({"throughput": throughput})
    assert found["runtime.throughput"] == "m 0.95 x"
    assert found["runtime.sensitivity"] == "0.25 to 0.25"
    assert found["runtime.less-sensitive"] == "1 of 1"
    assert found["runtime.by-speed"] == "m 0.98 x"
    assert found["runtime.scaling"] == "m FP16 autocast 8.0 ms, BF16 autocast 5.0 ms"
    assert found["runtime.many-plain"] == "FP32 9 samples/s"
    assert found["runtime.many-by-speed"] == "FP32 12 samples/s"
    assert found["runtime.first-step"] == "60 to 60 s"
    assert found["runtime.many"] == "m 2.00 x"
    assert found["runtime.table.bars"].splitlines()[2:] == [
        "| m, 2 workers | 0.950 of BF16 autocast | yes | 0.978 of local batches by speed, BF16 autocast, captured | "
        "1.10 of local batches by speed, BF16 autocast | 60 s |",
        "| m, 4 workers | 2.000 of FP16 autocast | yes | – | – | 60 s |",
    ]
    rows = found["runtime.table.throughput"].splitlines()
    assert rows[0] == "|  | m, 2 workers | m, 8 workers | m, 4 workers |"
    assert [row.split("|")[1].strip() for row in rows[2:]] == [
        "FP32",
        "BF16 autocast",
        "FP16 autocast",
        "BF16 autocast, captured",
        "plan",
        "local batches by speed, BF16 autocast",
        "local batches by speed, BF16 autocast, captured",
        "local batches by speed, FP32",
        "local batches by speed, plan",
    ]


def test_a_plan_that_is_no_less_sensitive_is_told():
    from runtime_figures import less_sensitive

    ways = {"plan": record("plan", 10.0, 2.0), "BF16 autocast": record("BF16 autocast", 11.0, 1.0)}
    assert not less_sensitive(ways)
    ways["BF16 autocast"]["samples_per_s"] = 9.9  # within noise
    assert not less_sensitive(ways)
    ways["BF16 autocast"]["samples_per_s"] = 9.0  # slower: no rival
    assert less_sensitive(ways)
    ways["plan"] |= {"in_turn_with": ["BF16 autocast"], "rounds_ms": [100.0, 101.0]}
    ways["BF16 autocast"]["rounds_ms"] = [102.1, 104.0]
    assert less_sensitive(ways)
    ways["BF16 autocast"]["rounds_ms"] = [102.0, 110.0]  # as fast in one of the rounds: a rival, whatever the median
    assert not less_sensitive(ways)
    assert less_sensitive(ways, rounds=False)


def test_what_was_measured_again_in_turn_counts():
    from runtime import latest

    told = {"sensitivities": {}}
    records = [{"configuration": "a", "n": 1}, told, {"configuration": "b", "n": 2}, {"configuration": "a", "n": 3}]
    assert latest(records) == [told, {"configuration": "b", "n": 2}, {"configuration": "a", "n": 3}]


@pytest.fixture
def worker(tmp_path):
    """The only worker of a group."""
    from runtime_training import Task, Worker

    from qsync_opt.runtimes.torch.ddp import free_port, process_group

    task = Task(
        part="throughput",
        model="gpt-small",
        device="cpu",
        multiprocessors=(0,),
        memory="1 GiB",
        steps=1,
        port=free_port(),
        started=0.0,
        output=str(tmp_path / "records.jsonl"),
        cache=str(tmp_path),
        by_service=False,
    )
    with process_group(0, 1, task.port):
        yield Worker(task, 0)


def test_one_model_goes_all_ways_and_stays_what_it_is(worker):
    import torch
    from runtime_throughput import maker, rows
    from runtime_training import Run, everywhere, fused_adamw, kinds

    from qsync_opt.runtimes.torch.capture import capture
    from qsync_opt.runtimes.torch.execution import applied_plan

    make, kwargs = maker("gpt-small", small=True)
    batch = rows(kwargs, 2, worker.device)
    plan = everywhere(kinds(capture(make(), (), batch)), "BF16", worker.device)
    run = Run(worker, make, batch, optimizer=fused_adamw)
    first = [p.detach().clone() for p in run.model.parameters()]
    losses = []
    for way, count in (({"autocast": torch.bfloat16}, 2), ({"plan": plan}, 5), ({}, 1)):
        run.go(rows(kwargs, count, worker.device), weight=0.5, **way)
        run.begin()
        assert run.cycle_s(1) > 0
        run.step()
        losses.append(float(run.loss(run.parallel).detach()))
        assert (applied_plan(run.model) is not None) is ("plan" in way)
        assert run.autocast == way.get("autocast")
        assert len(run.batch["tokens_BS"]) == count
        assert all(torch.equal(a, b) for a, b in zip(first, run.model.parameters(), strict=True))
    assert losses == pytest.approx([0.5 * 5.545] * 3, rel=0.02)  # 256 bytes, all as likely
    with torch.no_grad():
        next(run.model.parameters()).fill_(float("nan"))
    run.go(batch)
    run.begin()
    assert all(torch.equal(a, b) for a, b in zip(first, run.model.parameters(), strict=True))
    run.close()


def test_ways_that_take_turns_are_compared_round_by_round(worker, monkeypatch):
    import json

    from runtime_throughput import Measuring, Run, Subject

    measuring = Measuring(worker, "gpt-small")
    for label, speed in (("slow", 0.9), ("fast", 1.0), ("lost", 0.0), ("far", 0.8)):
        measuring.records[label] = {"configuration": label, "samples_per_s": 1.0}
        measuring.speeds[label] = speed
    paces = {4: 2.0, 2: 1.0}
    rounds = iter([1.0, 1.0, 5.0, 5.0, 1.0, 1.0, 1.0, 1.0])
    calls = []

    def timed(self, steps):
        calls.append(steps)
        pace = paces[len(self.batch["tokens_BS"])]
        return pace * (next(rounds) if steps == 20 else 0.001)

    monkeypatch.setattr(Run, "timed", timed)
    measuring.in_turn("turns", [Subject(n, {}, [2] if n == "fast" else None) for n in measuring.records])
    records = [json.loads(line) for line in worker.output.read_text().splitlines()]
    speeds = {record["configuration"]: record["samples_per_s"] for record in records}
    assert speeds["fast"] / speeds["slow"] == pytest.approx(2.0)
    assert speeds.keys() == {"slow", "fast"}
    assert records[0]["in_turn_with"] == ["fast"]
    assert len(records[0]["rounds_ms"]) == 4
    assert calls.count(20) == 8
    measuring.run.close()


def test_local_batches_are_those_that_whole_steps_were_tried_with(worker):
    from types import SimpleNamespace

    from runtime_throughput import Measuring, Subject, best_sized

    from qsync_opt.runtimes.torch.job import StepTime

    measuring = Measuring(worker, "gpt-small")
    steps = [
        StepTime(taken={"first": "INT8"}, step_ns=5),
        StepTime(taken={"first": "INT8"}, step_ns=5, batches={"first": 3}),
    ]
    plan = SimpleNamespace(model=SimpleNamespace(steps=steps))
    found = measuring.sized(Subject("uniform INT8", {"plan": {}}), plan)
    assert found.label == "local batches by speed, uniform INT8"
    assert found.counts == [4]  # all of it: there is no other worker
    assert measuring.sized(Subject("FP32", {}), plan).counts == [4]
    steps += [
        StepTime(taken={"first": "BF16 autocast"}, step_ns=4, batches={"first": 3}),
        StepTime(taken={"first": "plan"}, step_ns=3, batches={"first": 3}),
        StepTime(taken={"first": "BF16 autocast", "second": "INT8"}, step_ns=2, batches={"first": 3, "second": 1}),
    ]
    ways = {name: Subject(name, {}) for name in ("BF16 autocast", "uniform INT8", "FP32")}
    assert best_sized(plan, ways) == "BF16 autocast"
    assert best_sized(plan, {"uniform INT8": ways["uniform INT8"]}) == "uniform INT8"
    assert best_sized(plan, {"FP32": ways["FP32"]}) is None
    assert best_sized(None, ways) is None
    measuring.run.close()


def test_workers_that_fail_are_started_again_behind_what_they_failed_in(tmp_path, monkeypatch):
    import argparse
    import json

    import runtime

    known = []

    def once(part, model, arguments, output, deadline):
        """Measures what is not known yet; ends in the second of three."""
        text = output.read_text() if output.exists() else ""
        before = {json.loads(line)["configuration"] for line in text.splitlines()}
        known.append(before)
        for name in ("first", "second", "third"):
            if name in before:
                continue
            output.with_suffix(".begun").write_text(name)
            if name == "second":
                return "worker 1 ended with status 1: RuntimeError: an error"
            with open(output, "a") as stream:
                stream.write(json.dumps({"model": model, "configuration": name, "samples_per_s": 1.0}) + "\n")
        return None

    monkeypatch.setattr(runtime, "_run_once", once)
    records = runtime.run_workers("throughput", "m", argparse.Namespace(timeout=60.0))
    assert known == [set(), {"first", "second"}]
    assert [record["configuration"] for record in records] == ["first", "second", "third"]
    assert "an error" in records[1]["failure"]


def test_workers_that_take_too_long_are_ended(tmp_path):
    import argparse
    import time

    import runtime

    arguments = argparse.Namespace(
        device="cpu",
        multiprocessors=[0, 16],
        memory="none",
        steps=1,
        cache=tmp_path,
        workers=2,
        partition="context",
        precisions=None,
        logs=None,
    )
    found = runtime._run_once("overhead", "no such model", arguments, tmp_path / "records.jsonl", time.monotonic())
    assert found == "took too long"


def test_results_of_several_hosts_are_joined(tmp_path):
    import json

    import runtime

    def record(model, speed, hardware="a card"):
        return {
            "model": model,
            "samples_per_s": speed,
            "hardware": hardware,
            "date": f"2026-01-0{speed}",
            "torch": f"2.{speed}",
            "python": "3.12",
        }

    for name, records in (
        ("before", [record("m", 1), record("n", 1)]),
        ("new", [record("m", 2), record("m", 3)]),
        ("elsewhere", [record("m", 4, "another card")]),
    ):
        (tmp_path / name).write_text(json.dumps({"throughput": records}))
    runtime.join([tmp_path / "new", tmp_path / "elsewhere"], tmp_path / "before")
    found = json.loads((tmp_path / "before").read_text())
    assert [(r["model"], r["samples_per_s"]) for r in found["throughput"]] == [("n", 1), ("m", 2), ("m", 3), ("m", 4)]
    assert found["hardware"] == "a card; another card"
    assert found["versions"]["torch"] == "2.1, 2.2, 2.3, 2.4"
    assert found["date"] == "2026-01-04"
