"""Checkpoints from hands that are not trusted, and of jobs that were killed at the worst moment."""

import json
import os
import struct

import pytest
import torch
from torch import nn

from qsync_opt.checkpoints import begin, file_facts, files_in, finish, write_manifest
from qsync_opt.errors import ModelError, ProblemError
from qsync_opt.runtimes.torch.checkpoints import Checkpoints
from qsync_opt.runtimes.torch.execution import apply


class Job:
    def __init__(self, folder, **keeping):
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        apply(self.model, {"0/linear": "INT8", "1/linear": "BF16"})
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.checkpoints = Checkpoints(folder, self.model, self.optimizer, **keeping)

    def train(self):
        self.model(torch.randn(2, 4)).sum().backward()
        self.optimizer.step()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


def _rewrite(path, change=lambda state: state):
    """Change the JSON part as whoever forges a checkpoint would: the manifest with it."""
    state = path / "state.json"
    state.write_text(json.dumps(change(json.loads(state.read_text()))))
    write_manifest(path, file_facts(path, files_in(path)))


def _forged(header):
    """What safetensors would hold, with another header."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    "data",
    [
        b"",
        struct.pack("<Q", 2**62) + b"{}",
        _forged([1]),
        _forged({"model.0.weight": {"dtype": "EVIL", "shape": [1], "data_offsets": [0, 4]}}),
        _forged({"__metadata__": {"DCP_SHARDING_INFO": "no JSON"}}),
        _forged(
            {
                "__metadata__": {"DCP_SHARDING_INFO": json.dumps({"random.0.cpu": {"saved_offsets": [2**50]}})},
                "random.0.cpu": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]},
            }
        ),
    ],
)
def test_forged_tensors_are_refused(folder, data):
    path = Job(folder).checkpoints.save(1)
    next(path.glob("*.safetensors")).write_bytes(data)
    _rewrite(path)
    with pytest.raises(ProblemError, match="nothing was loaded: give a checkpoint that this package wrote"):
        Job(folder).checkpoints.load()


def _with_optimizer(state, /, **changes):
    optimizers = state["values"]["optimizers"]
    return {**state, "values": {**state["values"], "optimizers": [{**optimizers[0], **changes}, *optimizers[1:]]}}


@pytest.mark.parametrize(
    ("change", "kind", "needle"),
    [
        (lambda state: {**state, "step": 9}, ProblemError, "it is of step 9, but the folder is named 'step-00000001'"),
        (lambda state: _with_optimizer(state, rest=json.loads("[" * 180 + "]" * 180)), ProblemError, "nested in more"),
        (
            lambda state: _with_optimizer(state, param_groups=[{"params": [[]]}]),
            ProblemError,
            "give a whole checkpoint",
        ),
        (
            lambda state: {**state, "values": {**state["values"], "model": {"$tensor": "model.0.bias"}}},
            ModelError,
            "the model does not take",
        ),
        (lambda state: _with_optimizer(state, state={"0.weight": [1]}), ModelError, "optimizer 0 does not take"),
    ],
)
def test_forged_states_are_refused(folder, change, kind, needle):
    job = Job(folder)
    job.train()
    path = job.checkpoints.save(1)
    _rewrite(path, change)
    with pytest.raises(kind, match=needle):
        Job(folder).checkpoints.load()


@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_files_without_an_end_are_refused(folder, name, kind):
    path = Job(folder).checkpoints.save(1)
    (path / name).unlink()
    if kind == "pipe":
        os.mkfifo(path / name)
    else:
        (path / name).symlink_to("/dev/zero")
    with pytest.raises(ProblemError, match=rf"{name}' is no ordinary file.*nothing was loaded"):
        Job(folder).checkpoints.load()


def test_killed_between_taking_the_old_one_away_and_putting_the_new_one_in_its_place(folder, monkeypatch):
    job = Job(folder, keep=1)
    path = job.checkpoints.save(1)
    replace = os.replace

    def killed(source, target):
        if str(source).endswith(".step-00000001.tmp"):
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr("qsync_opt.checkpoints.folders.os.replace", killed)
        with pytest.raises(KeyboardInterrupt):
            finish(begin(folder, 1), 1, {}, {})
    assert not path.exists()
    assert Job(folder).checkpoints.load().step == 1
    os.rename(path, folder / ".step-00000001.old")
    begin(folder, 2)
    assert path.exists()


@pytest.mark.parametrize("name", ["a" * 300, "a\0b", "not \udcff text"])
def test_folders_that_cannot_be_are_refused_by_name(tmp_path, name):
    checkpoints = Job(tmp_path / name).checkpoints
    assert checkpoints.load() is None
    with pytest.raises(ProblemError, match="cannot write checkpoints into"):
        checkpoints.save(1)
