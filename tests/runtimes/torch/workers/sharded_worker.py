"""One worker of the tests of compressed FSDP: what it saw goes to the last line of its output, as JSON."""

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from qsync_opt.errors import QSyncError
from qsync_opt.runtimes.torch.ddp import process_group
from qsync_opt.runtimes.torch.gradients import compress_sharded_gradients


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 51), nn.Tanh(), nn.Linear(51, 30), nn.Tanh(), nn.Linear(30, 3))


def sharded(size):
    model, mesh = network(), init_device_mesh("cpu", (size,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def gradients(model, rank, scale=1.0):
    x = torch.randn(8, 20, generator=torch.Generator().manual_seed(rank))
    model.zero_grad()
    (scale * model(x).square().mean()).backward()
    return [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]


def flat(tensors):
    return torch.cat([t.flatten() for t in tensors])


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
        draws = torch.stack([flat(gradients(model, rank)) for _ in range(200)])
        spread = draws.std(0) / 200**0.5
        result["bias"] = float(((draws.mean(0) - plain).abs() / spread.clamp(min=1e-9)).median())
        errors = {}
        for name, call in (
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
        dist.barrier()
    print(json.dumps(result))


main()
