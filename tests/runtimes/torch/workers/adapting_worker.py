"""One worker of the tests of a cluster that changes: prints at which steps it moved, and to what."""

import json
import logging
import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from qsync_opt.errors import QSyncError
from qsync_opt.runtimes.torch.checkpoints import Checkpoints
from qsync_opt.runtimes.torch.ddp import process_group
from qsync_opt.runtimes.torch.execution import applied_plan, apply
from qsync_opt.runtimes.torch.job import PlanAdapter, PlanningOptions, auto_plan

ROOMY = 1 << 30


class Net(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(64, width), nn.Linear(width, width), nn.Linear(width, 4)

    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def loss_of(output):
    return nn.functional.cross_entropy(output.float(), torch.zeros(len(output), dtype=torch.int64))


def compute_ns(plan, device_type):
    """Forward and backward pass, without what the network takes."""
    return plan.solution.evaluation.devices[device_type].backward_end_ns


def follow(rank, folder):
    """Rank 1 loses memory before step 5 and gets it back before step 9; rank 0 gets slow before step 12."""
    model = Net()
    options = PlanningOptions(
        cache_dir=folder,
        job_file=f"{folder}/job.json",
        progress=False,
        memory=ROOMY,
        precisions=("BF16", "INT8", "FP32"),
        device_type=("big", "small")[rank],
        slack=9.0,  # without hurry all is in FP32, until memory is scarce
        compare=False,
        trial=False,
    )
    plan = auto_plan(model, torch.randn(512, 64), loss=loss_of, options=options)
    apply(model, plan)
    limit, factor = [ROOMY], [1.0]
    parallel = DistributedDataParallel(model)
    adapter = PlanAdapter(parallel, plan, options=options, every=2, memory=lambda: limit[0], speed=lambda: factor[0])
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    moves = []
    for step in range(14):
        if rank == 1 and step == 5:
            limit[0] = plan.memory_bytes["small"] - 4096
        if rank == 1 and step == 9:
            limit[0] = ROOMY
        if rank == 0 and step == 12:
            factor[0] = 2.0
        optimizer.zero_grad()
        loss_of(parallel(torch.randn(32, 64))).backward()
        optimizer.step()
        found = adapter.step()
        if found is not None:
            applied = applied_plan(model)
            moves.append(
                {
                    "step": step,
                    "digest": found.digest,
                    "applied": applied is not None and sorted(set(applied.precisions.values())),
                    "memory": found.memory_bytes["small"],
                }
            )
    weights = torch.cat([p.detach().flatten() for p in model.parameters()]).double().sum().item()
    slower = rank == 0 and compute_ns(adapter.plan, "big") > 1.9 * compute_ns(plan, "big")
    if rank == 1:
        limit[0] = 1 << 16
    try:
        for _ in range(2):
            adapter.step()
        said = ""
    except QSyncError as error:
        said = f"{type(error).__name__}: {error}"
    limit[0], factor[0] = ROOMY, float("nan") if rank else 1.0
    Checkpoints(f"{folder}/run", parallel).save(1)
    other = Net(96) if rank else Net()
    return {
        "models": refused(lambda: Checkpoints(f"{folder}/run", other).load()),
        "unusable": refused(lambda: [adapter.step() for _ in range(2)]),
        "options": refused(
            lambda: auto_plan(
                Net(), torch.randn(512, 64), options=PlanningOptions(job_file=f"{folder}/job.json" if rank else None)
            )
        ),
        "moves": moves,
        "weights": weights,
        "needed": plan.memory_bytes["small"],
        "slower": slower,
        "said": said,
    }


def refused(work):
    try:
        work()
    except QSyncError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def restart(rank, folder, device_type, width=128):
    """Plan from the file of an earlier start; measuring is made impossible."""
    told = []
    logging.getLogger("qsync_opt").addHandler(handler := logging.Handler())
    handler.emit = lambda record: told.append(record.getMessage())

    def forbidden(*_, **__):
        raise AssertionError("measured again")

    sys.modules[auto_plan.__module__].capture_model = forbidden
    options = PlanningOptions(
        cache_dir=folder, job_file=f"{folder}/job.json", memory=ROOMY, device_type=device_type, slack=9.0, trial=False
    )
    try:
        plan = auto_plan(Net(width), torch.randn(512, 64), loss=loss_of, options=options)
    except (AssertionError, QSyncError) as error:
        return {"said": str(error), "told": told}
    return {"digest": plan.digest, "types": sorted(plan.plan.devices), "worthwhile": plan.worthwhile}


def main(rank, world_size, port, case, folder):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    logging.getLogger("qsync_opt").setLevel(logging.INFO)
    with process_group(rank, world_size, port, timeout_s=200):
        if case == "follow":
            seen = follow(rank, folder)
            seen["again"] = restart(rank, folder, ("big", "small")[rank])
        else:
            seen = {
                "left": restart(rank, folder, "small"),
                "unknown": restart(rank, folder, "other"),
                "model": restart(rank, folder, "small", width=96),
            }
    sys.stdout.write(json.dumps(seen) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5])
