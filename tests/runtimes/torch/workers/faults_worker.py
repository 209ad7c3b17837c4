"""The jobs of the fault tests: two workers each, with a checkpoint every few steps; one may be killed or hang.

This process loads torch once and forks the workers, which start at once then; it runs no operator itself, so that
they inherit no thread. What a worker saw goes to a file line by line, so that a killed one has told it too.
"""

import datetime
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from qsync_opt.runtimes.torch.checkpoints import Checkpoints
from qsync_opt.runtimes.torch.ddp import free_port, process_group
from qsync_opt.runtimes.torch.execution import apply

PLANS = ({"a/linear": "BF16", "b/linear": "FP32"}, {"a/linear": "INT8", "b/linear": "INT8"})
STEPS, EVERY, FAULT_STEP = 9, 3, 7
WAIT_S = 200.0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.dropout = nn.Linear(16, 64), nn.Linear(64, 4), nn.Dropout(0.2)

    def forward(self, x):
        return self.b(self.dropout(torch.tanh(self.a(x))))


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def hang(*_):
    time.sleep(3600)


def arm(fault, model, optimizer):
    """Let this worker fail in the step that begins now."""
    if fault == "forward":
        model.dropout.register_forward_pre_hook(die)
    elif fault == "hang":
        model.dropout.register_forward_pre_hook(hang)
    elif fault == "all-reduce":
        # The gradients of the last layer are on their way by then, those of the first are not.
        model.a.weight.register_hook(die)
    elif fault == "optimizer":
        optimizer.register_step_pre_hook(die)
    elif fault == "checkpoint":
        # Its tensors are written by then, and the folder has not got its name.
        sys.modules[Checkpoints.__module__].Manifest = lambda **_: die()


def train(rank, world_size, port, folder, fault):
    torch.manual_seed(rank)
    model = apply(Net(), PLANS[rank % 2])
    with (
        open(folder / f"told-{rank}.txt", "a", encoding="utf-8") as told,
        process_group(rank, world_size, port, timeout_s=WAIT_S),
    ):
        parallel = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(parallel.parameters(), 1e-2)
        kept = Checkpoints(folder / "checkpoints", parallel, optimizer)
        resumed = kept.load()
        for step in range(resumed.step if resumed else 0, STEPS):
            if fault and step == FAULT_STEP:
                if rank == 1:
                    arm(fault, model, optimizer)
                elif fault == "hang":
                    # What hangs is waited for until the timeout; who is gone is noticed at once.
                    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=2))
            source = torch.Generator().manual_seed(2 * step + rank)
            x = torch.randn(16, 16, generator=source)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(parallel(x).float(), (x[:, 0] > 0).long())
            loss.backward()
            optimizer.step()
            told.write(json.dumps([step, loss.item()]) + "\n")
            told.flush()
            if (step + 1) % EVERY == 0:
                kept.save(step + 1)


def worker(rank, port, folder, fault):
    """Run in a forked process, which it ends."""
    code = 1
    try:
        sys.stderr = open(folder / f"error-{rank}.txt", "w", encoding="utf-8")  # noqa: SIM115
        torch.set_num_threads(1)
        train(rank, 2, port, folder, fault)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def run(folder, fault):
    """One job: how its workers ended, and how long the one without the fault took to notice."""
    folder.mkdir(exist_ok=True)
    port, pids = free_port(), []
    for rank in range(2):
        pid = os.fork()
        if not pid:
            worker(rank, port, folder, fault)
        pids.append(pid)
    codes, hung = {}, False
    deadline = time.monotonic() + WAIT_S
    while len(codes) < 2:
        for rank, pid in enumerate(pids):
            if rank not in codes and (found := os.waitpid(pid, os.WNOHANG))[0]:
                codes[rank] = os.waitstatus_to_exitcode(found[1])
        if fault == "hang" and 0 in codes and 1 not in codes:
            hung = True
            os.kill(pids[1], signal.SIGKILL)
        if time.monotonic() > deadline:
            for rank in {0, 1} - codes.keys():
                os.kill(pids[rank], signal.SIGKILL)
        time.sleep(0.01)
    said = (folder / "error-0.txt").read_text(encoding="utf-8")
    return {"codes": [codes[0], codes[1]], "hung": hung, "late": time.monotonic() > deadline, "said": said}


if __name__ == "__main__":
    for line in sys.stdin:
        name, fault = json.loads(line)
        sys.stdout.write(json.dumps(run(Path(sys.argv[1]) / name, fault)) + "\n")
        sys.stdout.flush()
