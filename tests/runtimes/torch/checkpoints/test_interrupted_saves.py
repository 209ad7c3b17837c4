"""Saves that are killed or refused at any point, and folders that are not as a job left them."""

import contextlib
import ctypes
import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from qsync_opt.checkpoints import file_facts, files_in, read_manifest, write_manifest
from qsync_opt.errors import ProblemError
from qsync_opt.runtimes.torch.checkpoints import Checkpoints

TESTS = Path(__file__).resolve().parents[1]
DATA = TESTS.parents[1] / "data" / "checkpoints"


def _attempts(folder, size):
    done = subprocess.run(
        [sys.executable, "-P", str(TESTS / "workers" / "killed_worker.py"), str(folder), str(size)],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_save_ended_at_any_call_leaves_the_old_checkpoint_or_the_new_one(tmp_path):
    attempts = _attempts(tmp_path, 1)
    for attempt in attempts:
        whole = attempt["call"] is None
        assert attempt["ended"] == [0 if whole else {"kill": -9, "full": 3}[attempt["kind"]]], attempt
        # Once renamed, only the flush of the name is left.
        assert attempt["loaded"][0] == 2 if whole else attempt["loaded"][0] in (1, 2), attempt
        assert attempt["loaded"][1] == 3, attempt
    for kind in ("kill", "full"):
        for way in ("waiting", "background"):
            calls = [a["call"] for a in attempts if (a["kind"], a["way"]) == (kind, way)]
            assert {"mkdir", "open", "pwrite", "fsync"} <= {*calls}
            assert len(calls) >= 15


def test_a_rank_lost_at_any_call_leaves_the_old_checkpoint(tmp_path):
    attempts = _attempts(tmp_path, 2)
    for attempt in attempts:
        whole = attempt["call"] is None
        ended = [0, 0] if whole else [3, {"kill": -9, "full": 3}[attempt["kind"]]]
        assert attempt["ended"] == ended, attempt
        assert attempt["loaded"] == [2 if whole else 1, 3], attempt
    assert {a["call"] for a in attempts} >= {"open", "pwrite", "fsync"}


@pytest.mark.parametrize(("number", "refused"), [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EOPNOTSUPP, False)])
def test_a_disk_that_is_too_full_is_known_before_anything_is_written(tmp_path, monkeypatch, number, refused):
    def fallocate(descriptor, mode, begin, num_bytes):
        assert num_bytes >= 64
        ctypes.set_errno(number)
        return -1

    system = types.SimpleNamespace(fallocate=fallocate)
    monkeypatch.setattr("qsync_opt.runtimes.torch.checkpoints.storage.ctypes.CDLL", lambda *_, **__: system)
    model = nn.Linear(4, 3)
    with (
        pytest.raises(ProblemError, match="free space or give another folder") if refused else contextlib.nullcontext()
    ):
        Checkpoints(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1)).save(1)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.glob("step-*")] == ([] if refused else ["step-00000001"])


READ_ONLY = """
import os, sys, torch
from torch import nn
from qsync_opt.errors import ProblemError
from qsync_opt.runtimes.torch.checkpoints import Checkpoints
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
model = nn.Linear(2, 2)
checkpoints = Checkpoints(sys.argv[1], model)
for save in (checkpoints.save, checkpoints.save_in_background):
    try:
        save(2)
    except ProblemError as failure:
        print(failure)
print(checkpoints.load().step, float(model.weight[0, 0]))
"""


def test_a_folder_that_may_only_be_read_is_loaded_and_refuses_saves():
    place = Path(tempfile.mkdtemp(prefix="read-only-"))  # that of a test is closed to other users
    try:
        place.chmod(0o755)
        model = nn.Linear(2, 2)
        nn.init.ones_(model.weight)
        Checkpoints(place / "run", model).save(1)
        (place / "run").chmod(0o555)
        done = subprocess.run(
            [sys.executable, "-P", "-c", READ_ONLY, str(place / "run")], capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stderr
        *refused, loaded = done.stdout.splitlines()
        assert len(refused) == 2
        for text in refused:
            assert f"cannot write checkpoints into '{place}/run': Permission denied" in text
        assert loaded == "1 1.0"
    finally:
        (place / "run").chmod(0o755)
        shutil.rmtree(place)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_foreign_folders_are_refused_by_name(tmp_path):
    model = nn.Linear(2, 2)
    foreign = tmp_path / "step-00000003"
    dcp.save({"model": model.state_dict()}, checkpoint_id=foreign, no_dist=True)
    with pytest.raises(ProblemError, match=r"step-00000003/manifest\.json.*nothing was loaded"):
        Checkpoints(tmp_path, model).load()
    (foreign / "manifest.json").write_text('{"weights": 1}')
    with pytest.raises(ProblemError, match="format"):
        Checkpoints(tmp_path, model).load()
    (tmp_path / "file").write_text("x")
    assert Checkpoints(tmp_path / "file", model).load() is None
    with pytest.raises(ProblemError, match="cannot write checkpoints into"):
        Checkpoints(tmp_path / "file", model).save(1)


def _two_files(folder):
    """A checkpoint whose weight lies in the files of two ranks, as two ranks would write it."""
    model = nn.Linear(4, 6, bias=False)
    path = Checkpoints(folder, model).save(1)
    manifest = read_manifest(path)
    (whole,) = manifest.tensors["model.weight"].pieces
    shutil.copy(path / whole.file, path / "rank-00001.safetensors")
    text = json.loads((path / "manifest.json").read_text())
    halves = [
        {**text["tensors"]["model.weight"]["pieces"][0], "lengths": [3, 4]},
        {
            "file": "rank-00001.safetensors",
            "begin": whole.begin + 3 * 4 * 4,
            "offsets": [3, 0],
            "lengths": [3, 4],
        },
    ]
    text["tensors"]["model.weight"]["pieces"] = halves
    (path / "manifest.json").write_text(json.dumps(text))
    write_manifest(path, file_facts(path, files_in(path)))
    return model, path


def test_a_missing_file_of_a_rank_is_named(tmp_path):
    model, path = _two_files(tmp_path)
    again = nn.Linear(4, 6, bias=False)
    assert Checkpoints(tmp_path, again).load().step == 1
    assert torch.equal(again.weight, model.weight)
    os.remove(path / "rank-00001.safetensors")
    with pytest.raises(ProblemError, match=r"lacks 'rank-00001\.safetensors'; nothing was loaded"):
        Checkpoints(tmp_path, again).load()


def test_a_missing_shard_of_the_first_format_is_named(tmp_path):
    shutil.copytree(DATA / "format-1-sharded", tmp_path / "run")
    name = "shard-00002-model-00001-of-00001.safetensors"
    os.remove(tmp_path / "run" / "step-00000003" / name)
    with pytest.raises(ProblemError, match=f"lacks '{name}'"):
        Checkpoints(tmp_path / "run", nn.Linear(2, 2)).load()


@pytest.mark.parametrize("refused", ["replace", "rmtree"])
def test_an_older_checkpoint_that_cannot_be_removed_is_no_failure_of_the_new_one(
    tmp_path, monkeypatch, caplog, refused
):
    model = nn.Linear(2, 2)
    checkpoints = Checkpoints(tmp_path, model, keep=1)
    checkpoints.save(1)
    original = {"replace": os.replace, "rmtree": shutil.rmtree}[refused]

    def refuse(path, *rest):
        if Path(path).name in ("step-00000001", ".step-00000001.tmp"):
            if refused == "rmtree":
                os.unlink(Path(path) / "state.json")  # it had begun
            raise PermissionError(13, "Permission denied", str(path))
        return original(path, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(f"qsync_opt.checkpoints.folders.{'os' if refused == 'replace' else 'shutil'}.{refused}", refuse)
        checkpoints.save(2)
    assert "an older checkpoint" in caplog.text and "Permission denied" in caplog.text
    # What was removed in part is listed no more; what was not is still whole.
    assert checkpoints.steps == ([1, 2] if refused == "replace" else [2])
    for step in checkpoints.steps:
        assert Checkpoints(tmp_path, model).load(step).step == step
    checkpoints.save(3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003"]
