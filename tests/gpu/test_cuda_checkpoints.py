"""Checkpoints of models on a card: the copy runs beside the next passes, and holds the state as it was."""

import pytest
import torch
from torch import nn

from qsync_opt.runtimes.torch.checkpoints import Checkpoints

pytestmark = pytest.mark.gpu


class Net(nn.Module):
    """Large enough that its copy is still running when the next pass begins."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(2048, 4096), nn.BatchNorm1d(4096), nn.Linear(4096, 2048)
        self.small = nn.Parameter(torch.randn(513, 3).to(torch.bfloat16))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.count += 1
        return self.second(torch.relu(self.norm(self.first(x)))) + self.small.float().sum()


class Job:
    def __init__(self, folder, device="cuda", seed=0):
        torch.manual_seed(seed)
        self.device = device
        self.model = Net().to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
        self.checkpoints = Checkpoints(folder, self.model, self.optimizer, keep=100)

    def train(self, begin, end):
        losses = []
        for step in range(begin, end):
            x = torch.randn(64, 2048, generator=torch.Generator().manual_seed(step)).to(self.device)
            loss = (self.model(x) - x).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses

    def state(self):
        values = dict(self.model.state_dict())
        for number, state in self.optimizer.state_dict()["state"].items():
            values |= {f"{number} {name}": value for name, value in state.items()}
        return {name: value.detach().cpu().clone() for name, value in values.items()}


def _equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


def test_a_save_in_the_background_holds_the_state_of_its_call(tmp_path):
    job = Job(tmp_path)
    job.train(0, 2)
    for step in range(2, 6):
        before = job.state()
        job.checkpoints.save_in_background(step)
        job.train(step, step + 1)  # buffers change in the forward pass, parameters in the step
        job.checkpoints.wait()
        assert not _equal(before, job.state())
        again = Job(tmp_path, seed=1)
        assert again.checkpoints.load(step).step == step
        assert _equal(again.state(), before)


def test_the_copy_waits_for_work_that_was_queued_before(tmp_path):
    job = Job(tmp_path)
    job.train(0, 1)
    with torch.no_grad():
        for _ in range(200):  # still running when the save is called
            job.model.first.weight.add_(job.model.second.weight.t(), alpha=1e-3)
    job.checkpoints.save_in_background(1)
    job.checkpoints.wait()
    again = Job(tmp_path, seed=1)
    again.checkpoints.load()
    assert _equal(again.state(), job.state())


def test_what_changes_parameters_otherwise_waits_for_the_copy(tmp_path):
    job = Job(tmp_path)
    job.train(0, 1)
    before = job.state()
    job.checkpoints.save_in_background(1)
    job.checkpoints.wait_for_copy()
    with torch.no_grad():
        for parameter in job.model.parameters():
            parameter.zero_()
    job.checkpoints.wait()
    again = Job(tmp_path, seed=1)
    again.checkpoints.load()
    assert _equal(again.state(), before)


@pytest.mark.parametrize("devices", [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
def test_a_card_and_a_processor_load_each_others_checkpoints(tmp_path, devices):
    job = Job(tmp_path, devices[0])
    job.train(0, 2)
    job.checkpoints.save(2)
    again = Job(tmp_path, devices[1], seed=1)
    again.checkpoints.load()
    assert _equal(again.state(), job.state())
    assert all(value.device.type == devices[1] for value in again.model.state_dict().values())


def test_a_resumed_job_draws_the_same_random_numbers(tmp_path):
    job = Job(tmp_path)
    job.train(0, 1)
    job.checkpoints.save(1)
    wanted = torch.randn(5, device="cuda")
    torch.cuda.manual_seed(99)
    Job(tmp_path, seed=1).checkpoints.load()
    assert torch.equal(torch.randn(5, device="cuda"), wanted)


def test_host_memory_is_one_copy(tmp_path):
    job = Job(tmp_path)
    job.train(0, 1)
    path = None
    for step in (1, 2, 3):
        job.checkpoints.save_in_background(step)
        job.checkpoints.wait()
        path = tmp_path / f"step-{step:08d}"
    written = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    assert written <= job.checkpoints.staged_bytes <= written + 64 * 2**20
