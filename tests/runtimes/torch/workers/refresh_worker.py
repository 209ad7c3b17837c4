"""One worker of the refresh test: rank 0 in FP32 decides, rank 1 trains under a plan; prints what it saw as JSON."""

import dataclasses
import json
import random
import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from qsync_opt.errors import ModelError, NotReadyError, ProblemError
from qsync_opt.runtimes.torch.checkpoints import PlanState
from qsync_opt.runtimes.torch.ddp import broadcast_json, gather_json, process_group, require_agreement
from qsync_opt.runtimes.torch.execution import applied_plan, apply
from qsync_opt.runtimes.torch.job import PlanRefresher
from qsync_opt.testing import chain
from qsync_opt.training import Plan


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.c = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.c(torch.tanh(self.a(x))).float(), y)


def renamed_chain():
    """The chain of three, of which two are this model's operators and one is nobody's."""
    problem = chain().problem
    names = {"a": "a/linear", "b": "c/linear"}
    device = problem.devices[0]
    kept = [o for o in problem.operators if o.name in names]
    operators = tuple(
        dataclasses.replace(o, name=names[o.name], inputs=tuple(names[u] for u in o.inputs)) for o in kept
    )
    tables = {names[name]: device.operators[name] for name in names}
    return dataclasses.replace(
        problem,
        operators=operators,
        latency_limit_ns=10**9,
        devices=(dataclasses.replace(device, operators=tables, memory_limit_kib=10**6),),
    )


def batch(generator):
    return torch.randn(8, 16, generator=generator), torch.randint(4, (8,), generator=generator)


def broken(statistics):
    raise ProblemError("limits changed")


def train(rank, world_size, port):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Net()
    plan = Plan(problem="chain", devices={"T4": {"a/linear": "BF16", "c/linear": "BF16"}})
    seen = {}
    with process_group(rank, world_size, port, timeout_s=200):
        planned = rank == 1
        if planned:
            apply(model, plan, "T4")
        parallel = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
        refresh = PlanRefresher(
            parallel, plan, "T4" if planned else None, make_problem=lambda statistics: renamed_chain(), every=2
        )
        generator = torch.Generator().manual_seed(rank)
        moved = []
        for _ in range(4):
            entering = batch(generator)
            optimizer.zero_grad()
            parallel(*entering).backward()
            optimizer.step()
            moved.append(refresh.step(entering))
        seen["moved"], seen["plan"] = moved, {d: dict(p) for d, p in refresh.plan.devices.items()}
        applied = applied_plan(parallel)
        seen["precisions"] = {} if applied is None else applied.precisions
        seen["weights"] = torch.cat([p.detach().flatten() for p in model.parameters()]).double().sum().item()
        failing = PlanRefresher(parallel, refresh.plan, "T4" if planned else None, make_problem=broken, every=1)
        try:
            failing.step(entering)
        except (ProblemError, NotReadyError) as error:
            seen["said"] = str(error)
        odd = PlanRefresher(
            parallel, refresh.plan, "T4" if planned else None, make_problem=lambda statistics: {}["T4"], every=1
        )
        try:
            odd.step(entering)
        except (
            KeyError,
            NotReadyError,
        ) as error:  # what a user's own function raises must not leave the others waiting
            seen["odd"] = str(error)
        try:
            require_agreement("the number", rank, "set it alike")
        except ModelError as error:
            seen["differs"] = str(error)
        kept = PlanState(parallel, all_ranks=True)
        states = broadcast_json(kept.state_dict())  # as rank 0 writes them to a file that all read
        kept.load_state_dict(states)
        seen["kept"] = [state["precisions"] for state in states["ranks"]]
        long = random.Random(rank).choices("abc", k=1000 * (rank + 1))
        gathered = gather_json(long)
        assert [len(part) for part in gathered] == [1000, 2000]
        assert gathered[rank] == long
        assert broadcast_json({"from": rank}, source=1) == {"from": 1}
    sys.stdout.write(json.dumps(seen) + "\n")


if __name__ == "__main__":
    train(*map(int, sys.argv[1:]))
