"""Whether a graph of a million nodes goes through the whole system on two workers, and in how much memory.

A stochastic block model is drawn, split by METIS and written as parts. Two processes load their parts, train two epochs
of a GCN in 8 bits, build the problem of their traced ranges, plan every message, and train two epochs more under the
plan. Each step's seconds and each process's peak of resident memory are recorded; nothing is asserted on them, and on a
machine that does other work the seconds say little.

    nice python benchmarks/message_scale.py        # writes benchmarks/results/messages-scale.json
    python benchmarks/message_scale.py --nodes 5000 --output /tmp/smoke.json
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.distributed as dist
from links import records_of_ranks
from results_head import processors, results_head

import qsync_opt
from qsync_opt.io import write_json
from qsync_opt.messages import Plan
from qsync_opt.runtimes.torch.ddp import broadcast_json, gather_json
from qsync_opt.runtimes.torch.messages import (
    MessageOptions,
    NodeClassifier,
    TrainingOptions,
    block_graph,
    full_graph,
    load_part,
    part_file,
    partition_graph,
)

HERE = Path(__file__).parent
WORKERS = 2
EPOCHS = 2


def peak_bytes() -> int:
    """Peak of this process's resident memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def worker(rank: int, address: str, output: str, settings: dict[str, Any]) -> None:
    """One rank; rank 0 writes the records."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=WORKERS)
    part = load_part(part_file(Path(settings["folder"]), rank))
    options = TrainingOptions(hidden=settings["hidden"], epochs=EPOCHS)
    torch.manual_seed(0)
    model = NodeClassifier(options, part.x.shape[1], 1 + settings["classes"])
    full = full_graph(model, part, options=MessageOptions(replan_steps=0))
    optimizer = torch.optim.Adam(model.parameters(), lr=options.rate)
    steps: list[dict[str, Any]] = []

    def train(label: str) -> None:
        for _ in range(EPOCHS):
            began = time.perf_counter()
            optimizer.zero_grad()
            loss = full.loss(full())
            loss.backward()
            optimizer.step()
            value = loss.detach().clone()
            dist.all_reduce(value)
            sent = sum(each.wire_bytes for each in full.directions())
            step = {"what": "epoch", "widths": label, "seconds": time.perf_counter() - began, "sent_bytes": sent}
            steps.append({**step, "loss": float(value) / WORKERS})

    train("8 bits")
    problem = full.build_problem()
    found: dict[str, Any] = {}
    if rank == 0:
        began = time.perf_counter()
        solution = qsync_opt.solve(problem)
        seconds = time.perf_counter() - began
        steps.append({"what": "plan", "messages": problem.num_messages, "seconds": seconds, "gap": solution.gap})
        found = solution.plan.to_json()
    full.use(Plan.from_json(broadcast_json(found)))
    train("planned")
    accuracy = full.accuracy(part.test_mask)
    own = {
        "own": part.own, "central": part.central, "halo": part.halo.numel(), "edges": part.edge_index.shape[1],
        "peak_bytes": peak_bytes(),
    }  # fmt: skip
    everyone = gather_json(own)
    if rank == 0:
        steps += [{"what": "worker", "rank": number, **each} for number, each in enumerate(everyone)]
        Path(output).write_text(json.dumps([*steps, {"what": "accuracy", "test_accuracy": accuracy}]))
    dist.barrier()
    os._exit(0)  # gloo's threads may wait for a peer that has left


def main() -> None:
    """Measure and write the file."""
    if sys.argv[1:2] == ["--worker"]:
        rank, address, output, _, settings = sys.argv[2:]
        worker(int(rank), address, output, json.loads(settings))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1_000_000)
    parser.add_argument("--degree", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=16)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "messages-scale.json")
    arguments = parser.parse_args()
    records: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        graph = block_graph(arguments.nodes, degree=arguments.degree, mixing=0.1, dim=16)
        drawn = time.perf_counter()
        parts = partition_graph(graph, WORKERS)
        split = time.perf_counter()
        for part in parts:
            part.save(part_file(Path(folder), part.rank))
        size = {"nodes": graph.num_nodes, "edges": graph.edge_index.shape[1], "peak_bytes": peak_bytes()}
        records.append({"what": "partition", **size, "draw_s": drawn - began, "split_s": split - drawn})
        print(records[0], flush=True)
        settings = {"folder": folder, "hidden": arguments.hidden, "classes": int(graph.y.max())}
        del graph, parts
        records += records_of_ranks(
            __file__, "loopback", [json.dumps(settings)], port=0, gigabits=None, timeout_s=7200
        )  # fmt: skip
    epochs = [each for each in records if each["what"] == "epoch"]
    finished = len(epochs) == 2 * EPOCHS and all(math.isfinite(each["loss"]) for each in epochs)
    peak = max(each["peak_bytes"] for each in records if "peak_bytes" in each)
    asked = [
        {
            "what": f"partition, plan and epochs of a stochastic block model of {arguments.nodes} nodes, end to end",
            "asked": "works", "measured": float(finished), "met": finished,
            "note": f"at most {peak / 2**30:.2f} GiB in one process; loss {epochs[0]['loss']:.3f} to "
            f"{epochs[-1]['loss']:.3f} in {len(epochs)} epochs",
        }
    ]  # fmt: skip
    head = results_head(processors(), {"torch": torch.__version__})
    write_json(arguments.output, {**head, "asked": asked, "records": records})
    for each in [*records, *asked]:
        print(each)


if __name__ == "__main__":
    main()
