"""Checkpoints of the first format, as the code that wrote it left them, are loaded and go on in the present one.

``format-1-planned`` was saved by one process under a plan, ``format-1-sharded`` by two ranks of FSDP2; each was trained
for three steps, and ``expected.json`` beside it holds every value then and the losses of the next two steps.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from qsync_opt.errors import ProblemError
from qsync_opt.runtimes.torch.checkpoints import Checkpoints
from qsync_opt.runtimes.torch.execution import applied_plan, apply

DATA = Path(__file__).resolve().parents[3] / "data" / "checkpoints"
PLAN = {"up/linear": "INT8", "down/linear": "BF16"}
pytestmark = pytest.mark.filterwarnings("ignore:2 adjustable operators are not in the plan")


class Net(nn.Module):
    """The model of the fixtures."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.up, self.norm, self.drop = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.2)
        self.down, self.head = nn.Linear(5, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("counts", torch.arange(3).to(torch.bfloat16))

    def forward(self, tokens):
        return self.head(self.down(self.drop(self.norm(torch.relu(self.up(self.embed(tokens)))))))


class Job:
    def __init__(self, folder):
        torch.manual_seed(9)
        self.model = Net()
        head = [self.model.embed.weight]
        body = [parameter for parameter in self.model.parameters() if parameter is not head[0]]
        self.optimizers = [torch.optim.AdamW(body, 1e-2), torch.optim.SGD(head, 0.1, momentum=0.9)]
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizers[0], [2, 4])
        self.checkpoints = Checkpoints(folder, self.model, self.optimizers, scheduler=self.scheduler)

    def train(self, begin, end):
        losses = []
        for step in range(begin, end):
            tokens = torch.randint(7, (8,), generator=torch.Generator().manual_seed(step))
            loss = nn.functional.cross_entropy(self.model(tokens).float(), (tokens * 5 + 1) % 7)
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in self.optimizers:
                optimizer.step()
            self.scheduler.step()
            losses.append(loss.item())
        return losses

    def values(self):
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        values = dict(self.model.state_dict())
        for number, optimizer in enumerate(self.optimizers):
            for parameter, state in optimizer.state.items():
                values |= {f"{number} {names[id(parameter)]} {key}": value for key, value in state.items()}
        return {name: value.detach().float().flatten().tolist() for name, value in sorted(values.items())}


@pytest.fixture(params=["planned", "sharded"])
def saved(request, tmp_path):
    """A copy of a fixture, and what it holds."""
    folder = tmp_path / request.param
    shutil.copytree(DATA / f"format-1-{request.param}", folder)
    return folder, json.loads((folder / "expected.json").read_text())


def test_an_old_checkpoint_gives_every_value_and_the_same_losses(saved):
    folder, expected = saved
    job = Job(folder)
    if "planned" in folder.name:
        apply(job.model, PLAN)
    resumed = job.checkpoints.load()
    assert resumed.step == 3
    assert job.values() == expected["values"]
    assert job.scheduler.last_epoch == 3
    # Other processors add in another order; without the saved random states, dropout would give other losses.
    assert job.train(3, 5) == pytest.approx(expected["losses"], rel=1e-5)


def test_the_plan_of_an_old_checkpoint_goes_on(tmp_path):
    shutil.copytree(DATA / "format-1-planned", tmp_path / "run")
    job = Job(tmp_path / "run")
    apply(job.model, dict.fromkeys(PLAN, "FP32"))
    job.checkpoints.load()
    assert applied_plan(job.model).precisions == PLAN


def test_an_old_checkpoint_and_a_new_one_stand_in_one_folder(saved):
    folder, expected = saved
    job = Job(folder)
    job.checkpoints.load()
    job.train(3, 4)
    path = job.checkpoints.save(4)
    assert json.loads((path / "manifest.json").read_text())["format"] == "qsync-manifest/2"
    assert job.checkpoints.steps == [3, 4]
    again = Job(folder)
    assert again.checkpoints.load().step == 4
    assert again.values() == job.values()
    assert again.checkpoints.load(3).step == 3
    assert again.values() == expected["values"]


def test_a_changed_byte_of_an_old_checkpoint_is_seen(saved):
    folder, _ = saved
    for path in sorted((folder / "step-00000003").glob("*.safetensors")):
        data = path.read_bytes()
        path.write_bytes(data[:-5] + bytes([data[-5] ^ 1]) + data[-4:])
        with pytest.raises(ProblemError, match=f"damaged: {path.name} was changed after it was written"):
            Job(folder).checkpoints.load()
        path.write_bytes(data)
