"""Checkpoints of torch.distributed.checkpoint, made and loaded."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from qsync_opt.errors import ModelError, ProblemError
from qsync_opt.runtimes.torch.checkpoints import Checkpoints, export_checkpoint, import_checkpoint
from qsync_opt.runtimes.torch.execution import apply

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
PLAN = {"a/linear": "INT8", "b/linear": "BF16"}


class Net(nn.Module):
    def __init__(self, width=5):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 3)

    def forward(self, x):
        return self.b(self.norm(self.a(x)))


class Job:
    def __init__(self, seed, plan=PLAN, width=5):
        torch.manual_seed(seed)
        self.model = Net(width) if plan is None else apply(Net(width), plan)
        self.optimizers = [torch.optim.AdamW(self.model.a.parameters(), 1e-2)]
        rest = [*self.model.norm.parameters(), *self.model.b.parameters()]
        self.optimizers.append(torch.optim.SGD(rest, 0.1, momentum=0.9))
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizers[0], 1, 0.5)

    def train(self, steps):
        losses = []
        for step in steps:
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
            loss = self.model(x).float().square().mean()
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in self.optimizers:
                optimizer.step()
            self.scheduler.step()
            losses.append(loss.item())
        return losses


def test_torch_loads_what_was_exported(tmp_path):
    job = Job(0, plan=None)
    job.train(range(3))
    path = Checkpoints(tmp_path / "run", job.model, job.optimizers, scheduler=job.scheduler).save(3)
    export_checkpoint(path, tmp_path / "torch")
    losses = job.train(range(3, 6))
    again = Job(1, plan=None)
    model, optimizer = get_state_dict(again.model, again.optimizers)  # torch alone from here
    state = {"model": model, "optimizer": optimizer, "scheduler": again.scheduler.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "torch", no_dist=True)
    set_state_dict(again.model, again.optimizers, model_state_dict=model, optim_state_dict=state["optimizer"])
    again.scheduler.load_state_dict(state["scheduler"])
    assert again.train(range(3, 6)) == losses


@pytest.mark.parametrize("plan", [None, PLAN])
def test_a_checkpoint_of_torch_is_imported(tmp_path, plan):
    job = Job(0, plan=None)
    job.train(range(3))
    model, optimizer = get_state_dict(job.model, job.optimizers)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / "torch", no_dist=True)
    again = Job(1, plan)
    import_checkpoint(tmp_path / "torch", again.model, again.optimizers)
    for name, value in job.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name]), name
    Checkpoints(tmp_path / "run", again.model, again.optimizers).save(3)
    last = Job(2, plan)
    Checkpoints(tmp_path / "run", last.model, last.optimizers).load()
    assert last.optimizers[0].state[last.model.a.weight]["step"] == 3
    exported = job.optimizers[1].state[job.model.b.weight]["momentum_buffer"]
    assert torch.equal(exported, last.optimizers[1].state[last.model.b.weight]["momentum_buffer"])


def test_what_does_not_fit_is_refused(tmp_path):
    job = Job(0)
    with pytest.raises(ProblemError, match=r"has no \.metadata"):
        import_checkpoint(tmp_path / "none", job.model)
    model, _ = get_state_dict(job.model, ())
    dcp.save({"model": model}, checkpoint_id=tmp_path / "torch", no_dist=True)
    with pytest.raises(ModelError, match="does not fit"):
        import_checkpoint(tmp_path / "torch", Net(width=7))
    with pytest.raises(ModelError, match="does not fit"):
        import_checkpoint(tmp_path / "torch", job.model, job.optimizers)
    with pytest.raises(ProblemError, match="manifest"):
        export_checkpoint(tmp_path / "torch", tmp_path / "other")
