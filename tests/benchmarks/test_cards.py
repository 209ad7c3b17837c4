"""The benchmark of several cards, on two processes of this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.slow
def test_a_worker_that_is_killed_ends_the_others_and_a_plan_is_measured(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    output = tmp_path / "cards.json"
    command = [sys.executable, "cards.py", "--device", "cpu", "--parts", "gradients,lost", "--output", str(output)]
    done = subprocess.run(command, cwd=BENCHMARKS, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    records = json.loads(output.read_text())["records"]
    planned = [r for r in records if r.get("subject") == "planned"]
    assert len(planned) == 1
    assert planned[0]["predicted_ms"] > 0
    lost = {r["what"]: r for r in records if r["part"] == "lost"}
    assert set(lost) == {"gradients", "messages", "checkpoints"}
    for record in lost.values():
        assert record["statuses"][0] not in (0, None)
        assert record["statuses"][1] == -9
        assert "Error" in record["message"]


@pytest.mark.slow
def test_serving_is_planned_run_and_survives_the_death_of_a_stage(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    output = tmp_path / "serving.json"
    command = [sys.executable, "serving_cards.py", "--device", "cpu", "--output", str(output)]
    done = subprocess.run(command, cwd=BENCHMARKS, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(output.read_text())
    skewed = [r for r in results["records"] if r["setting"].endswith(" 3 : 1")]
    planned = [r for r in skewed if r["plan"] == "planned"]
    assert len(planned) == 2
    for record in planned:
        assert len(record["measured"]["memory_kib"]) == len(record["stages"])
        assert min(record["measured"]["memory_kib"]) > 20_000
    for record in skewed:
        if record["plan"].endswith(", W4"):
            assert "the harm is 1, but the limit is 0.5" in record["not_served"]
    assert sum(row["asked"] == ">= 1.3" for row in results["asked"]) == 2
    (lost,) = [r for r in results["records"] if r["plan"] == "planned, a stage killed"]
    assert "exit code -9" in lost["message"]
