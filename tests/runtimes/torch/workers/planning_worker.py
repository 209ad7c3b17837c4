"""One worker of the planning tests: plans a job with another worker, trains under the plan, prints what it saw."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import qsync_opt
from qsync_opt.errors import QSyncError
from qsync_opt.io import encode
from qsync_opt.runtimes.torch.ddp import process_group
from qsync_opt.runtimes.torch.execution import apply
from qsync_opt.runtimes.torch.job import PlanningOptions, auto_plan


class Net(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.a, self.b = nn.Linear(32, width), nn.Linear(width, 4)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


class Sequence(nn.Module):
    """Its batch has no first dimension that all tensors share."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(32, 4)

    def forward(self, x, mask):
        return self.a(x * mask)


def loss_of(output):
    return nn.functional.cross_entropy(output.float(), torch.zeros(len(output), dtype=torch.int64))


def options_of(rank, folder, case):
    return PlanningOptions(
        cache_dir=folder,
        progress=False,
        memory="3 parsecs" if case == "failure" and rank == 1 else "1 GiB",
        precisions=("BF16",) if case in ("steps timed", "sized") else ("FP32",) if rank == 0 else ("INT8", "BF16"),
        device_type=("big", "small")[rank],
        least_gain=0.0,
        # Nothing is too slow to be trained with; what rank 0 says counts.
        race_seconds=1e6,
        profile_seconds=1e6,  # nothing is cut short, and so all of it is kept
        slack=9.0 - rank if case in ("steps timed", "sized") else 0.0,
        costs="steps" if case == "steps" else "auto",
        job_file=Path(folder) / "job.json" if case == "sized" else None,
    )


def plan_and_train(rank, case, folder):
    torch.manual_seed(0)
    model = Net(width=128 + (64 * rank if case == "models" else 0))
    options = options_of(rank, folder, case)
    x = torch.randn(16, 32)
    kept, shares = [], []
    if case == "sized":  # equal batches at first; then what was measured for those is used, and steps are tried
        for name in ("equal", "by speed", "by speed"):
            plan = auto_plan(model, x, loss=loss_of, options=replace(options, local_batches=name))
            shares.append([dict(plan.shares), sorted(plan.stages_s)])
            kept.append(len([] if plan.model is None else plan.model.steps))
        options = replace(options, local_batches="by speed", job_file=None)
        odd = auto_plan(Sequence(), (x, torch.ones(32)), loss=loss_of, options=options)
        shares.append([dict(odd.shares), [] if odd.model is None else [*odd.model.steps]])
    for _ in range(2 if case == "train" else 1):
        plan = auto_plan(model, x, loss=loss_of, options=options)
        kept.append(len(list(Path(folder).rglob("*.json"))))
    apply(model, plan)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(parallel(torch.randn(16, 32))).backward()
        optimizer.step()
    return {
        "digest": plan.digest,
        "types": sorted(plan.plan.devices),
        "mine": plan.device_type,
        "measured": dict(plan.measured),
        "has_model": plan.model is not None,
        "weights": torch.cat([p.detach().flatten() for p in model.parameters()]).double().sum().item(),
        "kept": kept,
        "shares": shares,
        "steps": [] if plan.model is None else [encode(step) for step in plan.model.steps],
    }


def other_version(rank):
    """Pretend that rank 1 has another version of this package."""
    if rank == 1:
        qsync_opt.__version__ = "9.9.9"


def main(rank, world_size, port, case, folder):
    torch.set_num_threads(1)
    with process_group(rank, world_size, port, timeout_s=200):
        if case == "versions":
            other_version(rank)
        try:
            seen = plan_and_train(rank, case, folder)
        except QSyncError as error:
            seen = {"error": type(error).__name__, "said": str(error)}
    sys.stdout.write(json.dumps(seen) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5])
