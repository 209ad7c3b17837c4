"""One of two workers in network namespaces of their own: predicts a training step from its parts, and measures it."""

import json
import os
import statistics
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from qsync_opt.model import Role
from qsync_opt.runtimes.torch.capture import capture
from qsync_opt.runtimes.torch.ddp import measure_collectives
from qsync_opt.runtimes.torch.demo import Gpt, GptConfig
from qsync_opt.runtimes.torch.execution import apply
from qsync_opt.runtimes.torch.steps import RecordingOptions, Stepper, profile_steps
from qsync_opt.runtimes.torch.support import TrainingExample
from qsync_opt.steps import StepPredictor, bucket_borders, bucket_segments, network_tails
from qsync_opt.training import BucketOptions, gradient_buckets

CAP = 256 * 1024


def build(group):
    torch.manual_seed(0)
    model = Gpt(GptConfig(vocabulary=64, context=16, width=128, heads=2, layers=2)).train()
    tokens = torch.randint(0, 64, (2, 16))
    graph = capture(model, (tokens, tokens))
    wrapped = DistributedDataParallel(model, process_group=group, bucket_cap_mb=CAP / 2**20)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    return graph, Stepper(TrainingExample(model=wrapped, args=(tokens, tokens)), optimizer)


def main(rank: int, address: str, output: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=2)
    solo = [dist.new_group([r]) for r in range(2)][rank]
    graph, alone = build(solo)
    costs = profile_steps(
        alone.example,
        graph,
        alone.optimizer,
        precisions=["BF16"],
        mixed=0,
        options=RecordingOptions(warm_up=3, repeats=3, traced=1),
        progress=False,
    )
    collective = measure_collectives((1 << 12, 1 << 16, 1 << 18, 1 << 20), repeats=3)
    # With a cap of the user's own, the first bucket has that size too.
    buckets = gradient_buckets(graph, BucketOptions(first_bytes=CAP, cap_bytes=CAP))
    predictor = StepPredictor(graph, costs, bucket_borders(graph, buckets))
    plan = {operator.name: "BF16" if rank else "FP32" for operator in graph.by_role(Role.ADJUSTABLE)}
    tails = network_tails([collective.ns(b.num_bytes) for b in buckets], bucket_segments(graph, buckets))
    step = predictor.plan(plan)
    slowest = torch.tensor([predictor.steady_ns(step, tails), predictor.steady_ns(step)], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    _, together = build(None)
    apply(together.example.model, plan, graph=graph)
    for _ in range(3):
        together.step()
    measured = statistics.median(together.steady_ns(3) for _ in range(3))
    sizes = together.example.model._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    if rank == 0:
        found = {
            "predicted_ns": float(slowest[0]),
            "predicted_without_network_ns": float(slowest[1]),
            "measured_ns": measured,
            "network_ns": tails[0][1],
            "predicted_buckets": [bucket.num_bytes for bucket in buckets],
            "actual_buckets": [int(size) for size in sizes.split(",")],
            "collective": collective.to_json(),
            "parameter_bytes": sum(p.spec.num_bytes for p in graph.parameters),
        }
        output.write_text(json.dumps(found))
    dist.barrier()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
    sys.stdout.flush()
    os._exit(0)  # nothing is taken down: a group of gloo may wait for a peer that has left
