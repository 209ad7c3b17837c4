"""One worker of the test of compressed gradients over NCCL: what it saw goes to the last line, as JSON."""

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import qsync_opt
from qsync_opt.runtimes.torch.ddp import process_group


def net():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))).cuda()


def trained_gradients(model, rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    model.zero_grad(set_to_none=False)
    model(torch.randn(8, 64, generator=generator).cuda()).square().sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()]).clone()


def main(rank, world_size, port, backend):
    torch.cuda.set_device(rank)
    results = {}
    with process_group(rank, world_size, port, timeout_s=200, backend=backend):
        plain = DistributedDataParallel(net(), bucket_cap_mb=0.03)
        model = DistributedDataParallel(net(), bucket_cap_mb=0.03)
        compression = qsync_opt.compress_gradients(model, "FP32")
        expected = [trained_gradients(plain, rank, step) for step in range(4)]
        for step in range(3):
            results["equal"] = torch.equal(trained_gradients(model, rank, step), expected[step])
        for name in ("FP32", "sum8"):
            compression.use(name)
            with compression.recording():
                for step in range(4):
                    own = trained_gradients(model, rank, step)
            recorded = compression.recorded()
            both = [torch.empty_like(own) for _ in range(world_size)]
            dist.all_gather(both, own)
            results[name] = {
                "schemes": sorted({each.scheme for each in recorded.usual()}),
                "buckets": len(recorded.elements),
                "iteration_ns": recorded.iteration_ns,
                "alike": torch.equal(both[0], both[1]),
                "error": float((own - expected[3]).norm() / expected[3].norm()),
            }
    sys.stdout.write(json.dumps(results) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[5])
