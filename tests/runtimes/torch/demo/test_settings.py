import json
from pathlib import Path

import pytest

from qsync_opt.errors import ProblemError
from qsync_opt.io import write_json
from qsync_opt.runtimes.torch.demo import DemoOptions, GptConfig, WorkerSpec, load_spec


@pytest.mark.parametrize("plan", [None, Path("plan.json")])
def test_round_trip(tmp_path, plan):
    options = DemoOptions(steps=33, batch=2, learning_rate=0.5, seed=7, memory_share=0.25, model=GptConfig(layers=1))
    spec = WorkerSpec(phase="train", folder=tmp_path, label="plan", options=options, plan=plan)
    spec.save(tmp_path / "spec.json")
    assert load_spec(tmp_path / "spec.json") == spec


def test_unknown_key_is_refused(tmp_path):
    path = tmp_path / "spec.json"
    WorkerSpec(phase="train", folder=tmp_path, label="x", options=DemoOptions()).save(path)
    data = json.loads(path.read_text())
    write_json(path, {**data, "surprise": 1})
    with pytest.raises(ProblemError, match="surprise"):
        load_spec(path)


def test_unknown_phase_is_refused(tmp_path):
    path = tmp_path / "spec.json"
    WorkerSpec(phase="rest", folder=tmp_path, label="x", options=DemoOptions()).save(path)
    with pytest.raises(ProblemError, match="phase is 'rest', but allowed are capture, measure, train"):
        load_spec(path)
