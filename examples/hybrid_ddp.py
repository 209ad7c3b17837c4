"""Two workers of different kinds train one model together: rank 0 in FP32, rank 1 under a plan, gradients averaged.

Both are processes of this machine that talk through gloo. On a cluster the same lines run on every host, with the
address of rank 0 and, on GPUs, the backend nccl.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from qsync_opt import Plan, apply, capture, load_plan
from qsync_opt.model import Role
from qsync_opt.runtimes.torch.ddp import free_port, process_group

WORKERS = ("trainer", "inference")
STEPS = 40


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(32, 16, generator=source)
    return x, x[:, :4].sum(dim=1, keepdim=True).sin()


def work(rank: int, port: int, plan_file: str) -> None:
    """What runs on every worker."""
    torch.set_num_threads(1)
    with process_group(rank, len(WORKERS), port):
        model = make_model()
        if WORKERS[rank] == "inference":
            apply(model, load_plan(plan_file), "inference")
        replica = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        losses = []
        for step in range(STEPS):
            x, y = batch(rank, step)
            loss = nn.functional.mse_loss(replica(x).float(), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        # Equal gradients everywhere keep the weights equal, bit for bit, although the workers compute differently.
        total = sum(float(parameter.detach().double().sum()) for parameter in model.parameters())
        # One write each: two processes share the terminal, and a line must not be broken by the other's.
        line = f"{WORKERS[rank]}: loss {losses[0]:.3f} > {losses[-1]:.3f}, sum of weights {total!r}\n"
        os.write(sys.stdout.fileno(), line.encode())


def make_plan(path: Path) -> None:
    """The inner layer in INT8, the others in BF16. A plan from `qsync_opt.solve` is saved and loaded the same way."""
    graph = capture(make_model(), batch(0, 0)[:1], name="regression")
    names = [operator.name for operator in graph.by_role(Role.ADJUSTABLE)]
    choices = {name: "INT8" if name.startswith("3") else "BF16" for name in names}
    plan = Plan(problem=graph.name, devices={"inference": choices})
    print(repr(plan), flush=True)
    plan.save(path)


def main() -> None:
    if len(sys.argv) > 1:
        work(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
        return
    with tempfile.TemporaryDirectory() as name:
        plan_file = Path(name) / "plan.json"
        make_plan(plan_file)
        port = free_port()
        commands = [[sys.executable, __file__, str(rank), str(port), str(plan_file)] for rank in range(len(WORKERS))]
        processes = [subprocess.Popen(command) for command in commands]
        if any(process.wait() for process in processes):
            raise SystemExit("a worker failed")


if __name__ == "__main__":
    main()
