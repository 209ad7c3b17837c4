"""One worker of the hybrid test: rank 0 in FP32, rank 1 under a plan; prints what it saw as JSON."""

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from qsync_opt.runtimes.torch.ddp import measure_all_reduce, process_group
from qsync_opt.runtimes.torch.execution import apply, undo


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 128)
        self.body = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 600), nn.GELU())
        self.head = nn.Linear(600, 64)

    def forward(self, tokens):
        return self.head(self.body(self.embed(tokens)))


PLAN = {"embed/embedding": "BF16", "body.0/linear": "INT8", "body.3/linear": "BF16", "head/linear": "INT8"}


def train(rank, world_size, port):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Net()
    keys = list(model.state_dict())
    with process_group(rank, world_size, port, timeout_s=200):
        if rank == 1:
            apply(model, PLAN)
        parallel = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.5)
        generator = torch.Generator().manual_seed(rank)
        losses = []
        for _ in range(12):
            tokens = torch.randint(64, (32,), generator=generator)
            output = parallel(tokens)
            assert torch.equal(output, output.to(torch.bfloat16).float()) == (rank == 1)
            loss = nn.functional.cross_entropy(output, (tokens * 7 + 3) % 64)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        assert {g.dtype for g in grads.values()} == {torch.float32}
        digest = torch.cat([t.flatten() for t in (*grads.values(), *(p.detach() for p in model.parameters()))])
        both = [torch.empty_like(digest) for _ in range(world_size)]
        dist.all_gather(both, digest)
        assert list(model.state_dict()) == keys
        built = [int(size) for size in parallel._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")]
        if rank == 1:
            undo(parallel)
        measured = measure_all_reduce((1 << 12, 1 << 23), repetitions=3)
    return {
        "equal": torch.equal(both[0], both[1]),
        "losses": losses,
        "built": built,
        "bandwidth": measured.bandwidth_bytes_per_s,
    }


print(json.dumps(train(*(int(argument) for argument in sys.argv[1:]))))
