"""Workers that are killed or hang in the middle of a step: the job ends, checkpoints are whole, it goes on equally."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from qsync_opt.runtimes.torch.checkpoints import Checkpoints

SCRIPT = Path(__file__).resolve().parents[1] / "workers" / "faults_worker.py"
KINDS = ("forward", "all-reduce", "optimizer", "checkpoint", "hang")


class Jobs:
    """Starts jobs of two workers in folders of their own."""

    def __init__(self, folder):
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(SCRIPT), str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, name, fault=""):
        self.process.stdin.write(json.dumps([name, fault]) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def losses(self, name):
        """Loss of every step by rank; where a step was done twice, the last one counts."""
        texts = [(self.folder / name / f"told-{rank}.txt").read_text() for rank in range(2)]
        return [dict(json.loads(line) for line in text.splitlines()) for text in texts]

    def close(self):
        self.process.stdin.close()
        self.process.wait(timeout=100)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    started = Jobs(tmp_path_factory.mktemp("jobs"))
    yield started
    started.close()


@pytest.fixture(scope="module")
def undisturbed(jobs):
    result = jobs.run("undisturbed")
    assert result["codes"] == [0, 0], result["said"]
    return jobs.losses("undisturbed")


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_that_lost_a_worker_goes_on_as_if_it_had_not(jobs, undisturbed, kind):
    result = jobs.run(kind, kind)
    assert result["codes"][1] == -signal.SIGKILL
    assert result["codes"][0] == 1
    assert "Error" in result["said"]
    if kind == "checkpoint":  # the one place of these where the ranks wait for each other in this package
        assert "start the job again, it goes on from its last checkpoint" in result["said"]
    assert not result["late"]
    assert result["hung"] is (kind == "hang")
    folder = jobs.folder / kind / "checkpoints"
    model = nn.Module()
    model.a, model.b = nn.Linear(16, 64), nn.Linear(64, 4)
    checkpoints = Checkpoints(folder, model)
    assert checkpoints.steps == [3, 6]
    for step in checkpoints.steps:
        assert checkpoints.load(step, model_only=True).step == step
        assert torch.isfinite(model.a.weight).all()
    result = jobs.run(kind)
    assert result["codes"] == [0, 0], result["said"]
    assert jobs.losses(kind) == undisturbed
    assert not list(folder.glob(".step-*"))
