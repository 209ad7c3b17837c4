"""One of two workers of the production tests: runs cases of ordinary training under different plans.

Rank 0 runs its planned operators in FP32 and BF16, rank 1 in INT8. Every case returns what its test compares. On two
cards, with NCCL, there are cases more.
"""

import json
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from qsync_opt.errors import QSyncError, UnsupportedError
from qsync_opt.runtimes.torch.checkpoints import Checkpoints
from qsync_opt.runtimes.torch.ddp import process_group
from qsync_opt.runtimes.torch.execution import LossScaler, applied_plan, apply
from qsync_opt.training import Plan

MIXED = (
    {"a/linear": "FP32", "b/linear": "BF16", "c/linear": "FP32"},
    dict.fromkeys(("a/linear", "b/linear", "c/linear"), "INT8"),
)
HALF = (MIXED[0], dict.fromkeys(MIXED[1], "FP16"))
DEVICE = [torch.device("cpu")]
FULL = (dict.fromkeys(MIXED[1], "FP32"),) * 2


class Net(nn.Module):
    def __init__(self, dropout=0.0, norm=False):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4)
        self.norm = nn.BatchNorm1d(32) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        x = self.norm(torch.tanh(self.a(x)))
        return self.c(self.dropout(torch.tanh(self.b(x))))


class Case:
    """A model under this rank's plan inside DistributedDataParallel."""

    def __init__(self, plans=MIXED, model=None, ddp=None, lr=0.2):
        torch.manual_seed(0)
        self.rank = dist.get_rank()
        self.model = (Net() if model is None else model()).to(DEVICE[0])
        apply(self.model, plans[self.rank])
        self.parallel = DistributedDataParallel(self.model, **(ddp or {}))
        self.optimizer = torch.optim.SGD([p for p in self.model.parameters() if p.requires_grad], lr=lr, momentum=0.9)

    def loss(self, step, rows=16, model=None):
        source = torch.Generator().manual_seed(2 * step + self.rank)
        x = torch.randn(rows, 16, generator=source).to(DEVICE[0])
        output = (self.parallel if model is None else model)(x).float()
        return nn.functional.cross_entropy(output, (x[:, 0] > 0).long())

    def step(self, step, model=None):
        self.optimizer.zero_grad()
        loss = self.loss(step, model=model)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def run(self, steps=20, model=None):
        losses = [self.step(step, model) for step in range(steps)]
        return {"first": sum(losses[:5]), "last": sum(losses[-5:]), "weights": self.weights()}

    def weights(self):
        return torch.cat([p.detach().flatten().double() for p in self.model.parameters()]).sum().item()


def plain(folder):
    return Case().run()


def ddp_options(folder):
    results = {}
    for name in ("static_graph", "find_unused_parameters", "gradient_as_bucket_view"):
        results[name] = Case(ddp={name: True}).run(6)["weights"]
    return results


def unused_branch(folder):
    class Branches(Net):
        training_branch = True

        def forward(self, x):
            y = torch.tanh(self.a(x))
            return self.c(torch.tanh(self.b(y)) if self.training_branch else y)

    case = Case(model=Branches, ddp={"find_unused_parameters": True})
    case.step(0)
    case.model.training_branch = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case.parallel(torch.zeros(2, 16, device=DEVICE[0]))
    case.step(1)
    return {
        "weights": case.weights(),
        "unused": case.model.b.weight.grad is None or not case.model.b.weight.grad.any().item(),
    }


def accumulation(folder):
    """Two halves with no_sync between them are one whole, on full precision to the last bits but rounding."""
    case = Case(FULL, ddp={"gradient_as_bucket_view": True})
    whole = Case(FULL)
    source = torch.Generator().manual_seed(case.rank)
    x = torch.randn(16, 16, generator=source).to(DEVICE[0])
    with case.parallel.no_sync():
        case.parallel(x[:8]).square().sum().backward()
    case.parallel(x[8:]).square().sum().backward()
    whole.parallel(x).square().sum().backward()
    pairs = list(zip(case.model.parameters(), whole.model.parameters(), strict=True))
    mixed = Case()
    with mixed.parallel.no_sync():
        mixed.loss(0).backward()
    mixed.loss(1).backward()
    mixed.optimizer.step()
    return {
        "error": max(((a.grad - b.grad).norm() / b.grad.norm()).item() for a, b in pairs),
        "weights": mixed.weights(),
    }


def clipping(folder):
    case = Case()
    case.optimizer.zero_grad()
    (1000 * case.loss(0)).backward()
    before = nn.utils.clip_grad_norm_(case.parallel.parameters(), 0.5).item()
    after = torch.cat([p.grad.flatten() for p in case.model.parameters()]).norm().item()
    case.optimizer.step()
    return {"before": before, "after": after, "weights": case.weights()}


def loss_scaling(folder):
    """Gradients of one rank overflow where the all-reduce does not see it: all must skip."""
    case = Case()
    automatic = LossScaler(case.parallel).is_enabled()
    scaler = LossScaler(case.parallel, enabled=True, init_scale=2.0**10, growth_interval=2)
    seen = {"automatic": automatic, "scales": [], "skipped": [], "skipped_by_fused": []}
    reference = Case()
    for step in range(4):
        case.optimizer.zero_grad()
        with case.parallel.no_sync():
            scaler.scale(case.loss(2 * step) / 2).backward()
        scaler.scale(case.loss(2 * step + 1) / 2).backward()
        if step == 1 and case.rank == 1:
            case.model.a.weight.grad[0, 0] = float("inf")
        before = case.weights()
        if step != 2:  # step 2 leaves the unscaling to step()
            scaler.unscale_(case.optimizer)
            norm = nn.utils.clip_grad_norm_(case.model.parameters(), 1.0)
        scaler.step(case.optimizer)
        scaler.update()
        seen["skipped"].append(case.weights() == before)
        seen["scales"].append(scaler.get_scale())
        if step == 0:
            reference.optimizer.zero_grad()
            with reference.parallel.no_sync():
                (reference.loss(0) / 2).backward()
            (reference.loss(1) / 2).backward()
            unscaled = nn.utils.clip_grad_norm_(reference.model.parameters(), 1.0)
            seen["norm_error"] = abs(norm.item() / unscaled.item() - 1)
    seen["weights"] = case.weights()
    fresh = LossScaler(case.parallel, enabled=True)
    Checkpoints(folder + "/scaler", case.parallel, case.optimizer, scaler=scaler).save(4)
    Checkpoints(folder + "/scaler", case.parallel, case.optimizer, scaler=fresh).load()
    seen["restored"] = fresh.state_dict() == scaler.state_dict()
    # One kernel that skips by itself where it is told of an overflow, so that the host need not wait.
    fused = torch.optim.AdamW(case.model.parameters(), 1e-2, fused=True)
    for overflow in (True, False):
        fused.zero_grad()
        fresh.scale(case.loss(9)).backward()
        if overflow and case.rank == 1:
            case.model.a.weight.grad[0, 0] = float("inf")
        before = case.weights()
        fresh.step(fused)
        fresh.update()
        seen["skipped_by_fused"].append(case.weights() == before)
    seen["weights_by_fused"] = case.weights()
    return seen


def normalization(folder):
    """Dropout, and BatchNorm whose buffers DistributedDataParallel takes from rank 0; evaluation repeats itself."""
    case = Case(model=lambda: Net(dropout=0.2, norm=True))
    result = case.run()
    case.model.eval()
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(7)).to(DEVICE[0])
    result["repeats"] = torch.equal(case.model(x), case.model(x))
    return result


class Tied(Net):
    def __init__(self):
        super().__init__()
        self.c = nn.Linear(32, 32)
        self.c.weight = self.b.weight
        self.a.requires_grad_(False)


def tied_and_frozen(folder):
    case = Case(model=Tied)
    model = case.model
    frozen = model.a.weight.clone()
    result = case.run(6)
    return {
        "weights": result["weights"],
        "frozen": torch.equal(frozen, model.a.weight),
        "tied": model.c.weight is model.b.weight,
    }


def several_optimizers(folder):
    case = Case()
    first, second = (
        torch.optim.AdamW(case.model.a.parameters(), 1e-2),
        torch.optim.SGD([*case.model.b.parameters(), *case.model.c.parameters()], 0.1),
    )
    for step in range(4):
        case.loss(step).backward()
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
    return {"weights": case.weights()}


class Recomputed(Net):
    """Checkpoints its first layer as a module and its second as a plain function."""

    def __init__(self, how=None, function=False):
        super().__init__(dropout=0.2)
        self.how, self.function = how, function

    def forward(self, x):
        if self.how is None:
            return super().forward(x)
        x = torch.tanh(checkpoint(self.a, x, **self.how))
        inner = (lambda y: torch.tanh(self.b(y))) if self.function else self.b
        x = checkpoint(inner, x, **self.how)
        return self.c(self.dropout(x if self.function else torch.tanh(x)))


def activation_checkpointing(folder):
    """Recomputing rounds as the first time did: gradients are equal to the last bit."""
    results = {}
    for name, how, function in (
        ("reentrant", {"use_reentrant": True}, False),
        ("modules", {"use_reentrant": False}, False),
        ("function", {"use_reentrant": False}, True),
    ):
        weights = []
        for chosen in (None, how):
            case = Case(model=lambda chosen=chosen, function=function: Recomputed(chosen, function))
            source = torch.Generator().manual_seed(case.rank)
            for _ in range(3):
                x = torch.randn(8, 16, generator=source).to(DEVICE[0]).requires_grad_()
                case.optimizer.zero_grad()
                case.parallel(x).float().square().sum().backward()
                case.optimizer.step()
            weights.append(case.weights())
        results[name] = weights
    return results


def compiled(folder):
    results = {}
    for name in ("inside", "outside"):
        torch._dynamo.reset()
        case = Case()
        if name == "inside":
            case.parallel = DistributedDataParallel(torch.compile(case.model, backend="aot_eager"))
        else:
            case.parallel = torch.compile(case.parallel, backend="aot_eager")
        assert applied_plan(case.parallel) is applied_plan(case.model) is not None
        results[name] = case.run(8)
    return results


def sharded(folder):
    """Fully sharded: weights are gathered and gradients reduced in FP32, so that precisions may differ."""
    torch.manual_seed(0)
    model = Net().to(DEVICE[0])
    # Without a mesh, the card of a machine that has one would be taken.
    mesh = init_device_mesh(DEVICE[0].type, (2,))
    for layer in (model.a, model.b, model.c):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    rank = dist.get_rank()
    apply(model, MIXED[rank])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []

    def train(begin, end):
        for step in range(begin, end):
            source = torch.Generator().manual_seed(2 * step + rank)
            x = torch.randn(16, 16, generator=source).to(DEVICE[0])
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x).float(), (x[:, 0] > 0).long())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

    def total():
        return sum(p.full_tensor().double().sum().item() for p in model.parameters())

    checkpoints = Checkpoints(folder + "/sharded", model, optimizer)
    train(0, 8)
    checkpoints.save(8)
    saved = sum(p.full_tensor().double().sum().item() for p in model.parameters())
    train(8, 12)
    wanted = total()
    resumed = checkpoints.load()
    train(8, 12)
    # The sharded checkpoint is one of the plain model too.
    torch.manual_seed(1)
    alone = Net().to(DEVICE[0])
    Checkpoints(folder + "/sharded", alone).load(8, model_only=True)
    mixed = Net().to(DEVICE[0])
    fully_shard(mixed, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    try:
        apply(mixed, MIXED[rank])
        said = ""
    except UnsupportedError as error:
        said = str(error)
    return {
        "first": sum(losses[:4]),
        "last": sum(losses[-4:]),
        "weights": total(),
        "again": [total(), wanted],
        "step": resumed.step,
        "alone": sum(p.double().sum().item() for p in alone.parameters()) == saved,
        "said": said,
    }


def autocast(folder):
    case = Case()
    try:
        with torch.autocast(DEVICE[0].type, dtype=torch.bfloat16):
            case.model(torch.zeros(2, 16, device=DEVICE[0]))
    except QSyncError as error:
        return {"said": str(error), "weights": case.weights()}
    return {}


def half_precision(folder):
    """One rank in FP16: the scaler is on everywhere, because gradients are averaged."""
    case = Case(HALF)
    scaler = LossScaler(case.parallel, init_scale=2.0**30)
    scales = []
    for step in range(20):
        case.optimizer.zero_grad()
        scaler.scale(case.loss(step)).backward()
        scaler.step(case.optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return {"enabled": scaler.is_enabled(), "scales": scales, "weights": case.weights()}


def synchronized_normalization(folder):
    def model():
        return nn.SyncBatchNorm.convert_sync_batchnorm(Net(norm=True))

    case = Case(HALF, model=model)
    result = case.run()
    return {**result, "mean": case.model.norm.running_mean.double().sum().item()}


def disagreeing(folder):
    """Another width on one rank, then another step."""
    said = []
    for step, width in ((1, 4 + dist.get_rank()), (1 + dist.get_rank(), 4)):
        checkpoints = Checkpoints(folder + "/disagreeing", nn.Linear(4, width))
        try:
            checkpoints.save(step)
        except QSyncError as error:
            said.append(str(error))
    return {"said": said, "steps": checkpoints.steps}


def renumbered(folder):
    """A job that starts again with its workers the other way round."""

    def made(rank):
        devices = {"A": MIXED[0]} if rank == 0 else {"B": MIXED[1]}
        return apply(Net(), Plan(problem="by hand", devices=devices))

    Checkpoints(folder + "/renumbered", made(dist.get_rank())).save(1)
    model = made(1 - dist.get_rank())
    resumed = Checkpoints(folder + "/renumbered", model).load()
    return {"replanned": resumed.replanned, "own": applied_plan(model).precisions == MIXED[1 - dist.get_rank()]}


CASES = [
    plain, ddp_options, unused_branch, accumulation, clipping, loss_scaling, normalization, tied_and_frozen,
    several_optimizers, activation_checkpointing, sharded, autocast, compiled, disagreeing, renumbered,
]  # fmt: skip
ON_CARDS = [*CASES, half_precision, synchronized_normalization]


def main(rank, world_size, port, folder, backend):
    torch.set_num_threads(1)
    cases = CASES
    if backend == "nccl":
        torch.cuda.set_device(rank)
        DEVICE[0], cases = torch.device("cuda", rank), ON_CARDS
    results = {}
    with process_group(rank, world_size, port, timeout_s=200, backend=backend):
        for case in cases:
            results[case.__name__] = case(folder)
    sys.stdout.write(json.dumps(results) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5])
