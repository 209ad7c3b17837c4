"""A loop of one's own with Hugging Face Accelerate, under a plan: prepared, clipped, interrupted, resumed.

The plan goes on the model before ``accelerator.prepare``, and its state into Accelerate's own checkpoints. Runs alone
or on several workers: ``torchrun --nproc_per_node 2 huggingface_accelerate.py``.
"""

import tempfile
import time

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import qsync_opt

STEPS = 24


def make_model() -> nn.Module:
    set_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 10))


class Job:
    """Everything that one start of the script makes."""

    def __init__(self, plan: qsync_opt.JobPlan) -> None:
        self.accelerator = Accelerator(cpu=True)
        data = torch.randn(512, 64, generator=torch.Generator().manual_seed(1))
        loader = DataLoader(TensorDataset(data, data[:, :10].argmax(1)), batch_size=32)
        self.bare = qsync_opt.apply(make_model(), plan)
        optimizer = torch.optim.AdamW(self.bare.parameters(), 3e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            self.bare, optimizer, loader, scheduler
        )
        self.accelerator.register_for_checkpointing(qsync_opt.PlanState(self.bare, all_ranks=True))

    def train(self, begin: int, end: int) -> list[float]:
        losses = []
        batches = [batch for _ in range(1 + end // len(self.loader)) for batch in self.loader]
        for x, labels in batches[begin:end]:
            loss = nn.functional.cross_entropy(self.model(x).float(), labels)
            self.accelerator.backward(loss)
            self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


def main() -> None:
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)  # joins the process group that torchrun prepared
    name = [tempfile.mkdtemp(prefix="accelerate-")]
    broadcast_object_list(name)
    labels = torch.randint(10, (32,), generator=torch.Generator().manual_seed(2))
    # Many processors compute nothing faster than FP32; least_gain=0 applies the plan all the same.
    options = qsync_opt.PlanningOptions(least_gain=0.0, progress=False)
    plan = qsync_opt.auto_plan(
        make_model(),
        torch.randn(32, 64),
        loss=lambda output: nn.functional.cross_entropy(output.float(), labels),
        options=options,
    )
    accelerator.print(plan.describe())

    job = Job(plan)
    losses = job.train(0, STEPS // 2)
    job.accelerator.save_state(name[0])
    losses += job.train(STEPS // 2, STEPS)
    accelerator.print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} after {STEPS} steps")

    again = Job(plan)
    again.accelerator.load_state(name[0])
    rest = again.train(STEPS // 2, STEPS)
    accelerator.print("resumed to the same losses:", rest == losses[STEPS // 2 :])
    # Threads of gloo free the tensors of the last collective with the interpreter's lock: a process that ends meanwhile
    # is aborted or waits for ever.
    time.sleep(0.2)
    accelerator.end_training()


if __name__ == "__main__":
    main()
