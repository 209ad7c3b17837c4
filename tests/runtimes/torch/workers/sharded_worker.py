"""One worker of the tests of compressed FSDP: what it saw goes to the last line of its output, as JSON."""

import json
import os
import sys
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from qsync_opt.errors import QSyncError
from qsync_opt.gradients import Plan, fit_reductions, plan_reductions, uniform_plan
from qsync_opt.runtimes.torch.ddp import broadcast_json, process_group
from qsync_opt.runtimes.torch.gradients import compress_sharded_gradients


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 51), nn.Tanh(), nn.Linear(51, 30), nn.Tanh(), nn.Linear(30, 3))


def sharded(size, **options):
    model, mesh = network(), init_device_mesh("cpu", (size,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def gradients(model, rank, scale=1.0):
    x = torch.randn(8, 20, generator=torch.Generator().manual_seed(rank))
    model.zero_grad()
    (scale * model(x).square().mean()).backward()
    return [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]


def flat(tensors):
    return torch.cat([t.flatten() for t in tensors])


def planned(rank, size):
    """Recorded and sampled steps of sharded gradients become a model of steps and a plan, which is carried out."""
    model = sharded(size)
    state = compress_sharded_gradients(model, "FP32", seed=4)
    plain = flat(gradients(sharded(size), rank))
    equal = torch.equal(flat(gradients(model, rank)), plain)
    with state.sampling():
        for _ in range(2):
            gradients(model, rank)
    records = []
    for name in ("FP32", "two8"):
        state.use(name)
        with state.recording():
            for _ in range(3):
                gradients(model, rank)
        records.append(state.recorded())
    fitted = fit_reductions(records)
    statistics = state.statistics()
    found = plan_reductions(fitted, statistics).to_json() if rank == 0 else None
    plan = Plan.from_json(broadcast_json(found))
    mixed = uniform_plan("two8", fitted.elements, size)
    mixed = replace(mixed, schemes={**mixed.schemes, "b1": "FP32"})
    state.use(mixed)
    with state.recording():
        for _ in range(3):
            last = flat(gradients(model, rank))
    return {
        "equal": equal, "elements": state.elements, "sampled": [each.elements for each in statistics],
        "steps": [len(each.steps) for each in records], "plan": [*plan.schemes.values()], "workers": plan.workers,
        "noise": min(each.noise for each in statistics), "predicted": fitted.predict(plan)[-1].end_ns,
        "mixed": [each.scheme for each in state.recorded().usual()],
        "close": float((last - plain).norm() / plain.norm()),
    }  # fmt: skip


def laid_out_otherwise(rank, size):
    model = sharded(size)
    compress_sharded_gradients(model, uniform_plan("two8", [17, 18], size))
    gradients(model, rank)


def main():
    rank, size, port = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    with process_group(rank, size, port, timeout_s=100):
        plain = flat(gradients(sharded(size), rank))
        result = {}
        for name in ("two8", "two-fp8", "BF16"):
            model = sharded(size)
            state = compress_sharded_gradients(model, name, seed=4)
            first = flat(gradients(model, rank))
            saved = state.state_dict()
            second = flat(gradients(model, rank))
            state.load_state_dict(saved)
            again = flat(gradients(model, rank))
            result[name] = {
                "error": float((first - plain).norm() / plain.norm()), "fresh": not torch.equal(first, second),
                "resumed": torch.equal(second, again), "sum": float(first.double().sum()),
            }  # fmt: skip
        model = sharded(size)
        compress_sharded_gradients(model, "two8")
        spoiled = flat(gradients(model, rank, torch.inf if rank == 0 else 1.0))
        result["spoiled"] = bool(spoiled.isfinite().all())
        # Many draws: the mean of unbiased rounding is the plain gradient.
        state = compress_sharded_gradients(model, "two8", seed=1)
        draws = torch.stack([flat(gradients(model, rank)) for _ in range(60)])
        spread = draws.std(0) / 60**0.5
        result["bias"] = float(((draws.mean(0) - plain).abs() / spread.clamp(min=1e-9)).median())
        result["planned"] = planned(rank, size)
        errors = {}
        for name, call in (
            ("workers", lambda: compress_sharded_gradients(model, uniform_plan("two8", [8], size + 1))),
            ("scheme of one", lambda: compress_sharded_gradients(model, ("two8", "sum8")[rank])),
            ("layout", lambda: laid_out_otherwise(rank, size)),
            ("sum", lambda: compress_sharded_gradients(model, "sum8")),
            ("exponential", lambda: compress_sharded_gradients(model, "exponential")),
            ("plain", lambda: compress_sharded_gradients(network(), "two8")),
            ("unlike", lambda: compress_sharded_gradients(model, "two8", seed=rank)),
        ):
            try:
                call()
            except QSyncError as failure:
                errors[name] = f"{type(failure).__name__}: {failure}"
        result["errors"] = errors
        model = sharded(size, reshard_after_forward=False)  # or FSDP's own all-gather would fail first
        compress_sharded_gradients(model, "two8")
        loss = model(torch.randn(8, 20)).square().mean()
        dist.barrier()
        if rank == 0:  # the last worker ends without a word
            try:
                loss.backward()
            except Exception as failure:
                result["lost"] = str(failure)
            result["untouched"] = all(p.grad is None for p in list(model.parameters())[-2:])
        print(json.dumps(result), flush=True)
        os._exit(0)


main()
