"""One of two workers on two cards that train with captured passes inside DistributedDataParallel."""

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from qsync_opt.kernels import KernelOptions
from qsync_opt.runtimes.torch.ddp import process_group
from qsync_opt.runtimes.torch.execution import ApplyOptions, CapturedPasses, LossScaler, applied_plan, apply, graphed
from qsync_opt.runtimes.torch.job import PlanningOptions, auto_plan

WIDTH, ROWS = 128, 64
NAMES = ("a/linear", "b/linear", "c/linear")
MIXED = ({"a/linear": "FP32", "b/linear": "BF16", "c/linear": "BF16"}, dict.fromkeys(NAMES, "INT8"))
HALF = (dict.fromkeys(NAMES, "FP32"), dict.fromkeys(NAMES, "FP16"))


class Net(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 16)
        self.norm, self.dropout = nn.BatchNorm1d(WIDTH), nn.Dropout(dropout)

    def forward(self, x, labels):
        x = self.norm(torch.tanh(self.a(x)))
        x = self.c(self.dropout(torch.tanh(self.b(x)))).float()
        return nn.functional.cross_entropy(x, labels)


class Case:
    """A model under this rank's plan; captured from its first pass on, by hand, or not at all."""

    def __init__(self, how, plans=MIXED, ddp=None, model=Net):
        torch.manual_seed(0)
        self.rank = dist.get_rank()
        self.device = torch.device("cuda", self.rank)
        self.model = model().to(self.device)
        kernels = KernelOptions(rounding="nearest")
        apply(self.model, plans[self.rank], options=ApplyOptions(kernels=kernels, captured=how == "first pass"))
        self.parallel = DistributedDataParallel(self.model, device_ids=[self.rank], **(ddp or {}))
        if how == "by hand":
            graphed(self.parallel, self.batch(0))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def batch(self, step):
        source = torch.Generator().manual_seed(2 * step + self.rank)
        x = torch.randn(ROWS, WIDTH, generator=source).to(self.device)
        return {"x": x, "labels": (x[:, 0] > 0).long()}

    def loss(self, step):
        return self.parallel(**self.batch(step))

    def run(self, steps=10, accumulate=1):
        losses = []
        for step in range(steps):
            last = step % accumulate == accumulate - 1
            if last:
                loss = self.loss(step)
                loss.backward()
                nn.utils.clip_grad_norm_(self.parallel.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
            else:
                with self.parallel.no_sync():
                    loss = self.loss(step)
                    loss.backward()
            losses.append(loss.item())
        graphs = applied_plan(self.model).interception.graphs
        return {
            "losses": losses,
            "weights": torch.cat([p.detach().flatten().double() for p in self.model.parameters()]).sum().item(),
            "replayed": isinstance(graphs, CapturedPasses) and graphs.replayed,
        }


def ways(**settings):
    return {how: Case(how, **settings).run() for how in ("eager", "first pass", "by hand")}


def plain(folder):
    return ways()


def bucket_views(folder):
    return ways(ddp={"gradient_as_bucket_view": True})


def static_graph(folder):
    return ways(ddp={"static_graph": True})


def unused_parameters(folder):
    return ways(ddp={"find_unused_parameters": True})


def one_rank_alone(folder):
    return {how: Case(how if dist.get_rank() else "eager").run() for how in ("eager", "first pass")}


def accumulated(folder):
    return {how: Case(how).run(12, accumulate=3) for how in ("eager", "first pass")}


def scaled(folder):
    """One rank in FP16: its first steps overflow, and all ranks skip them."""
    results = {}
    for how in ("eager", "first pass"):
        case = Case(how, HALF)
        scaler = LossScaler(case.parallel, init_scale=2.0**30)
        scales, losses = [], []
        for step in range(30):
            case.optimizer.zero_grad()
            loss = case.loss(step)
            scaler.scale(loss).backward()
            scaler.step(case.optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            losses.append(loss.item())
        results[how] = {**case.run(1), "losses": losses, "scales": scales}
    return results


def planned(folder):
    """`auto_plan` times captured passes, and a plan with them trains."""
    torch.manual_seed(0)
    rank = dist.get_rank()
    model = Net(dropout=0.1).to(torch.device("cuda", rank))
    batch = Case("eager").batch(0)
    options = PlanningOptions(
        cache_dir=f"{folder}/measurements", progress=False, profile_seconds=2, capture=True, least_gain=0.0
    )
    plan = auto_plan(model, batch, options=options)
    apply(model, plan)
    parallel = DistributedDataParallel(model, device_ids=[rank])
    scaler = LossScaler(parallel)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(parallel(**batch)).backward()
        scaler.step(optimizer)
        scaler.update()
    timed = (
        [] if plan.model is None else [mode.label for own in plan.model.modes.values() for mode in own if mode.pass_ns]
    )
    applied = applied_plan(model)
    return {
        "timed": timed,
        "digest": plan.digest,
        "captured": bool(plan.captured),
        "replayed": bool(applied and applied.interception.graphs and applied.interception.graphs.generation),
        "weights": torch.cat([p.detach().flatten().double() for p in model.parameters()]).sum().item(),
    }


CASES = [plain, bucket_views, static_graph, unused_parameters, one_rank_alone, accumulated, scaled, planned]


def main(rank, world_size, port, folder, backend):
    torch.set_num_threads(1)
    torch.cuda.set_device(rank)
    results = {}
    with process_group(rank, world_size, port, timeout_s=200, backend=backend):
        for case in CASES:
            results[case.__name__] = case(folder)
            print(case.__name__, file=sys.stderr, flush=True)
    sys.stdout.write(json.dumps(results) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5])
