import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from qsync_opt.checkpoints import file_facts, files_in, write_manifest
from qsync_opt.errors import ModelError, ProblemError
from qsync_opt.io import decode, encode
from qsync_opt.kernels import KernelOptions
from qsync_opt.runtimes.torch.checkpoints import Checkpoints, RankState, decide, in_present_order, plan_of_ranks
from qsync_opt.runtimes.torch.execution import ApplyOptions, applied_plan, apply

PLAN = {"embed/embedding": "BF16", "a/linear": "INT8", "b/linear": "BF16", "head/linear": "INT8"}
FP32 = dict.fromkeys(PLAN, "FP32")


class Net(nn.Module):
    """A tied head, a normalization with buffers, dropout."""

    def __init__(self, width=64):
        super().__init__()
        self.embed = nn.Embedding(16, 32)
        self.a, self.norm, self.b = nn.Linear(32, width), nn.BatchNorm1d(width), nn.Linear(width, 32)
        self.dropout, self.head = nn.Dropout(0.3), nn.Linear(32, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.b(self.dropout(self.norm(torch.relu(self.a(self.embed(tokens)))))))


class Job:
    def __init__(self, folder, plan=PLAN, width=64, device_type=None, options=None, **keeping):
        torch.manual_seed(0)
        self.model = Net(width)
        if plan is not None:
            devices = (
                plan
                if device_type is None
                else plan_of_ranks([RankState(device_type=device_type, precisions=plan, seed=0, offset=0, step=None)])
            )
            apply(self.model, devices, options=options)
        head = [*self.model.embed.parameters()]
        body = [parameter for parameter in self.model.parameters() if parameter is not head[0]]
        self.optimizers = [torch.optim.AdamW(body, lr=1e-2), torch.optim.SGD(head, lr=0.1, momentum=0.9)]
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizers[0], [3, 7])
        self.checkpoints = Checkpoints(folder, self.model, self.optimizers, scheduler=self.scheduler, **keeping)

    def train(self, begin, end):
        losses = []
        for step in range(begin, end):
            tokens = torch.randint(16, (64,), generator=torch.Generator().manual_seed(step))
            loss = nn.functional.cross_entropy(self.model(tokens).float(), (tokens * 5 + 1) % 16)
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in self.optimizers:
                optimizer.step()
            self.scheduler.step()
            losses.append(loss.item())
        return losses


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


@pytest.fixture(scope="module")
def whole():
    """Ten steps without a break, and the model after them."""
    job = Job("unused")
    return job.train(0, 10), {name: tensor.clone() for name, tensor in job.model.state_dict().items()}


def test_a_resumed_job_goes_on_bit_for_bit(folder, whole):
    losses, weights = whole
    job = Job(folder)
    first = job.train(0, 5)
    assert job.checkpoints.save(5) == folder / "step-00000005"
    torch.manual_seed(12345)  # a new process draws other numbers
    again = Job(folder, options=ApplyOptions(kernels=KernelOptions(seed=77)))
    resumed = again.checkpoints.load()
    assert (resumed.step, resumed.replanned, resumed.changes) == (5, False, {})
    assert first + again.train(5, 10) == losses
    assert all(torch.equal(weights[name], tensor) for name, tensor in again.model.state_dict().items())


def test_the_rounding_alone_decides_the_last_bits(folder, whole):
    job = Job(folder)
    job.train(0, 5)
    job.checkpoints.save(5)
    again = Job(folder)
    again.checkpoints.load()
    applied_plan(again.model).go_on_at(0, 1234)
    assert again.train(5, 10) != whole[0][5:]


def test_a_counter_on_the_device_is_kept(folder):
    counter = torch.zeros((), dtype=torch.int64)
    job = Job(folder, options=ApplyOptions(kernels=KernelOptions(step=counter)))
    counter += 41
    job.checkpoints.save(1)
    fresh = torch.zeros((), dtype=torch.int64)
    Job(folder, options=ApplyOptions(kernels=KernelOptions(step=fresh))).checkpoints.load()
    assert int(fresh) == 41


def test_a_checkpoint_under_a_plan_is_one_of_the_plain_model(folder):
    job = Job(folder)
    job.train(0, 3)
    path = job.checkpoints.save(3)
    plain = {"model": Net().state_dict()}
    with pytest.warns(UserWarning, match="single process"):  # torch alone, nothing of this package
        dcp.load(plain, storage_reader=dcp.HuggingFaceStorageReader(str(path)), no_dist=True)
    assert plain["model"].keys() == job.model.state_dict().keys() == Net().state_dict().keys()
    assert all(torch.equal(tensor, plain["model"][name]) for name, tensor in job.model.state_dict().items())
    unplanned = Job(folder, plan=None)
    resumed = unplanned.checkpoints.load()
    assert applied_plan(unplanned.model) is None
    assert resumed.replanned
    assert "1 x rank 0 before, 1 x without a plan now" in resumed.reason
    unplanned.train(3, 4)
    unplanned.checkpoints.save(4)
    back = Job(folder)
    assert back.checkpoints.load().step == 4
    assert applied_plan(back.model).precisions == PLAN
    assert torch.equal(back.model.a.weight, unplanned.model.a.weight)


def test_a_compiled_submodule_changes_no_name(folder):
    job = Job(folder)
    path = job.checkpoints.save(0)
    compiled = Job(folder, plan=None)
    compiled.model.a = torch.compile(compiled.model.a, backend="eager")
    assert "a._orig_mod.weight" in compiled.model.state_dict()
    compiled.checkpoints.load()
    compiled.checkpoints.save(1)
    first, second = (json.loads((p / "state.json").read_text()) for p in (path, folder / "step-00000001"))
    assert first["values"] == second["values"]


def test_the_same_cluster_goes_on_under_the_plan_of_the_checkpoint(folder):
    job = Job(folder, device_type="T4")
    job.train(0, 2)
    job.checkpoints.save(2)
    expected = job.train(2, 4)
    again = Job(folder, plan={**PLAN, "b/linear": "INT8"}, device_type="T4")
    resumed = again.checkpoints.load()
    assert not resumed.replanned
    assert applied_plan(again.model).precisions == PLAN
    assert applied_plan(again.model).device_type == "T4"
    assert again.train(2, 4) == expected
    asked = Job(folder, plan={**PLAN, "b/linear": "INT8"}, device_type="T4")
    resumed = asked.checkpoints.load(plan="present")
    assert resumed.replanned
    assert resumed.changes == {"T4": {"b/linear": ("BF16", "INT8")}}
    assert applied_plan(asked.model).precisions["b/linear"] == "INT8"


def test_another_cluster_is_planned_anew_and_told_what_changed(folder, caplog):
    job = Job(folder, device_type="T4")
    job.train(0, 2)
    job.checkpoints.save(2)
    other = Job(folder, plan=FP32, device_type="A10")
    with caplog.at_level(logging.WARNING):
        resumed = other.checkpoints.load()
    assert resumed.replanned
    assert resumed.changes["A10"] == {name: (None, "FP32") for name in PLAN}
    assert "1 x T4 before, 1 x A10 now" in caplog.text
    assert "a/linear unplanned > FP32" in caplog.text
    assert applied_plan(other.model).options.kernels.offset == 2  # no noise of before comes again
    assert torch.equal(other.model.a.weight, job.model.a.weight)


def _rank(device_type, precisions):
    return RankState(device_type=device_type, precisions=precisions, seed=0, offset=0, step=None)


def test_which_plan_goes_on():
    saved, planned = [_rank("A", None), _rank("B", PLAN)], {**PLAN, "a/linear": "FP32"}
    assert not decide(1, saved, saved, ["B"], "checkpoint").replanned  # it is the same plan
    present = [_rank("A", None), _rank("B", planned)]
    kept = decide(1, saved, present, [], "checkpoint")
    assert (kept.replanned, kept.plan.devices["B"]) == (False, PLAN)
    tight = decide(1, saved, present, ["B"], "checkpoint")
    assert tight.replanned
    assert "memory of B" in tight.reason
    assert tight.changes == {"B": {"a/linear": ("INT8", "FP32")}}
    fewer = decide(1, saved, present[1:], [], "checkpoint")
    assert fewer.replanned
    assert "1 x A, 1 x B before, 1 x B now" in fewer.describe()


def test_workers_that_are_numbered_anew_go_on_as_others_of_their_type_did():
    first, second, other = (
        RankState(device_type=name, precisions=PLAN, seed=seed, offset=seed, step=None)
        for name, seed in (("A", 1), ("A", 2), ("B", 3))
    )
    assert in_present_order([first, second, other], [_rank("B", PLAN), _rank("A", PLAN), _rank("A", PLAN)]) == [
        other,
        first,
        second,
    ]
    saved = [_rank("A", PLAN), _rank("B", FP32)]
    present = [_rank("B", PLAN), _rank("A", PLAN)]
    kept = decide(1, in_present_order(saved, present), present, [], "checkpoint")
    assert not kept.replanned
    assert kept.plan.devices == {"A": PLAN, "B": FP32}
    for fewer in ([_rank("A", PLAN)], [_rank("A", PLAN), _rank("A", PLAN)], [_rank("A", PLAN), *present]):
        assert in_present_order(saved, fewer) == saved


def test_a_tight_budget_is_seen(folder, monkeypatch):
    job = Job(folder, device_type="T4")
    job.checkpoints.save(1)
    again = Job(folder, plan={**PLAN, "b/linear": "INT8"}, device_type="T4")
    monkeypatch.setattr(again.checkpoints, "_tight", lambda needed: ["T4"])
    assert again.checkpoints.load().replanned
    assert applied_plan(again.model).precisions["b/linear"] == "INT8"


@pytest.mark.parametrize("width", [32, 65])
def test_another_model_is_refused_by_its_parameters(folder, width):
    Job(folder).checkpoints.save(1)
    other = Job(folder, width=width)
    with pytest.raises(
        ModelError, match=rf"'a.weight' is \(64, 32\) in the checkpoint and \({width}, 32\) in the model"
    ):
        other.checkpoints.load()


def test_another_plan_is_refused_by_its_operators(folder):
    Job(folder).checkpoints.save(1)
    other = Job(folder, plan={"embed/embedding": "BF16", "a/linear": "INT8"})
    with pytest.raises(ModelError, match="'b/linear', 'head/linear' in the checkpoint only"):
        other.checkpoints.load()


def test_another_version_is_named(folder):
    path = Job(folder).checkpoints.save(1)
    _rewrite(path, lambda state: {**state, "versions": {**state["versions"], "qsync_opt": "0.0.7"}})
    with pytest.raises(ModelError, match=r"written by qsync_opt 0\.0\.7"):
        Job(folder, plan={"a/linear": "INT8"}).checkpoints.load()
    _rewrite(path, lambda state: {**state, "format": "qsync-checkpoint/9"})
    with pytest.raises(ProblemError, match="qsync-checkpoint/9"):
        Job(folder).checkpoints.load()


def test_a_plan_that_does_not_fit_its_digest_is_refused(folder):
    path = Job(folder).checkpoints.save(1)
    _rewrite(path, lambda state: {**state, "digest": "0" * 16})
    with pytest.raises(ProblemError, match="digest differs"):
        Job(folder).checkpoints.load()


def _rewrite(path, change):
    """Change the JSON part as whoever forges a checkpoint would: the manifest with it."""
    state = path / "state.json"
    state.write_text(json.dumps(change(json.loads(state.read_text()))))
    write_manifest(path, file_facts(path, files_in(path)))


def _damages(path):
    for name in sorted(os.listdir(path)):
        data = (path / name).read_bytes()
        yield name, data[: len(data) // 2]
        yield name, b""
        for place in (0, len(data) // 3, len(data) // 2, len(data) - 3):
            yield name, data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :]


def test_a_damaged_checkpoint_is_refused_and_nothing_loaded(folder):
    job = Job(folder)
    job.checkpoints.save(1)
    job.train(0, 1)
    path = job.checkpoints.save(2)
    reader = Job(folder)
    before = [tensor.clone() for tensor in reader.model.state_dict().values()]
    for name, data in _damages(path):
        kept = (path / name).read_bytes()
        (path / name).write_bytes(data)
        with pytest.raises(ProblemError, match=r"nothing was loaded: load\(step=1\) takes an older one"):
            reader.checkpoints.load()
        (path / name).write_bytes(kept)
    for name in sorted(os.listdir(path)):
        os.rename(path / name, folder / "away")
        with pytest.raises(ProblemError, match="nothing was loaded"):
            reader.checkpoints.load()
        os.rename(folder / "away", path / name)
    (path / "more.safetensors").write_bytes(b"x")
    with pytest.raises(ProblemError, match=r"'more\.safetensors', which its manifest does not name"):
        reader.checkpoints.load()
    assert all(torch.equal(a, b) for a, b in zip(before, reader.model.state_dict().values(), strict=True))
    assert reader.checkpoints.load(1).step == 1


def test_which_checkpoints_there_are(folder):
    job = Job(folder, keep=3)
    assert job.checkpoints.load() is None
    with pytest.raises(ProblemError, match=r"no checkpoint of step 4 .*there are none"):
        job.checkpoints.load(4)
    for step in (1, 2, 3, 4, 4):
        job.checkpoints.save(step)
    assert job.checkpoints.steps == [2, 3, 4]
    assert sorted(os.listdir(folder)) == ["step-00000002", "step-00000003", "step-00000004"]
    (folder / ".step-00000005.tmp").mkdir()  # of a job that was killed
    (folder / "notes.txt").write_text("mine")
    assert job.checkpoints.load().step == 4
    job.checkpoints.save(6)
    assert sorted(os.listdir(folder)) == ["notes.txt", "step-00000003", "step-00000004", "step-00000006"]


def test_a_job_that_went_back_is_told_of_later_checkpoints(folder, caplog):
    job = Job(folder)
    for step in (5, 9):
        job.checkpoints.save(step)
    assert not any("later steps" in text for text in caplog.messages)
    job.checkpoints.load(5)
    job.checkpoints.save(7)
    assert any("later steps than 7, up to 9: load() takes these; remove them" in text for text in caplog.messages)


def test_what_cannot_be_kept_is_named(folder):
    class Odd:
        def state_dict(self):
            return {"value": {"function": print}}

        def load_state_dict(self, state):
            raise AssertionError

    with pytest.raises(ModelError, match="other is a int"):
        Checkpoints(folder, Net(), other=3)
    with pytest.raises(ModelError, match=r"'other\.odd\.value\.function' is a builtin_function_or_method"):
        Checkpoints(folder, Net(), odd=Odd()).save(1)
    with pytest.raises(ProblemError, match="keep"):
        Checkpoints(folder, Net(), keep=0)
    with pytest.raises(ProblemError, match="'mine': allowed are"):
        Checkpoints(folder, Net()).load(plan="mine")
    assert Checkpoints(folder, Net()).steps == []


def test_others_and_optimizers_must_be_as_before(folder):
    job = Job(folder)
    job.train(0, 1)
    job.checkpoints.save(1)
    with pytest.raises(ModelError, match="differ in scheduler"):
        Checkpoints(folder, job.model, job.optimizers).load()
    with pytest.raises(ModelError, match="2 optimizers and this job 1"):
        Checkpoints(folder, job.model, job.optimizers[0], scheduler=job.scheduler).load()
    with pytest.raises(ModelError, match=r"optimizer 0 of the checkpoint .* is for other parameters"):
        Checkpoints(folder, job.model, job.optimizers[::-1], scheduler=job.scheduler).load()


WRITER = """
import resource, sys, torch
from torch import nn
from qsync_opt.errors import ProblemError
from qsync_opt.runtimes.torch.checkpoints.checkpoints import Checkpoints
folder, limit = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
model = nn.Linear(512, 512)
checkpoints = Checkpoints(folder, model, keep=1000)
model.weight.data.fill_(1.0)
checkpoints.save(1)
print("ready", flush=True)
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        checkpoints.save(2)
    except ProblemError as error:
        print(error)
        print(checkpoints.steps)
    sys.exit()
for step in range(2, 1000):
    model.weight.data.fill_(float(step))
    checkpoints.save(step)
"""


def test_a_full_disk_leaves_the_older_checkpoint(folder):
    # The system refuses to let a file grow, as it does when the disk is full.
    done = subprocess.run(
        [sys.executable, "-P", "-c", WRITER, str(folder), str(1 << 19)], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    _, said, steps = done.stdout.splitlines()
    assert said.startswith("the checkpoint of step 2 was not written: ")
    assert "File too large; free space or give another folder; the older checkpoints are as they were" in said
    assert steps == "[1]"


def is_being_written(folder):
    """True if a checkpoint has files and not yet its name, which it may get between two looks."""
    for path in folder.glob(".step-*.tmp"):
        with contextlib.suppress(FileNotFoundError):
            if any(path.iterdir()):
                return True
    return False


def test_killed_while_writing_every_checkpoint_is_whole_or_not_there(folder):
    worker = subprocess.Popen([sys.executable, "-P", "-c", WRITER, str(folder), "0"], stdout=subprocess.PIPE, text=True)
    try:
        assert worker.stdout.readline() == "ready\n"
        deadline = time.monotonic() + 200
        while not is_being_written(folder):
            assert time.monotonic() < deadline
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        worker.stdout.close()
    model = nn.Linear(512, 512)
    checkpoints = Checkpoints(folder, model, keep=1000)
    for step in checkpoints.steps:
        assert checkpoints.load(step).step == step
        assert torch.equal(model.weight, torch.full((512, 512), float(step)))
    assert len(list(folder.iterdir())) - len(checkpoints.steps) <= 1
    checkpoints.save(5000)
    assert not list(folder.glob(".step-*"))


def test_rank_states_are_checked():
    state = replace(_rank("A", PLAN), step=3)
    assert decode(RankState, encode(state), "rank") == state
    for name, value in (
        ("device_type", 3),
        ("precisions", [1]),
        ("precisions", {"a": 1}),
        ("step", "x"),
        ("seed", None),
    ):
        with pytest.raises(ProblemError, match=name):
            decode(RankState, {**encode(state), name: value}, "rank")
