"""What messages in fewer bits do to gradients and to accuracy, on one graph split over two workers.

For each seed (of weights, dropout and rounding) a GCN is trained in 8 bits for a while, so that ranges are traced, and
plans are made whose exchanges have the bytes of uniform 2, 4 and 8 bits: links cost a nanosecond per byte and nothing
is hidden, so that no time of this machine matters. Then, at the weights reached, each subject's gradient is compared
with the exact one of the same dropout: its mean squared error over that gradient's square, over a few draws. It is the
variance of subjects that are unbiased, and holds the bias of the one that is not: rows and gradients one epoch late.
Subjects of equal bytes: uniform 4 bits, the plan, its widths in random order, the mended grouping of the paper, and an
eighth of FP32's rows. Last, some subjects train from the start, and their accuracy is compared with FP32's.

Graphs are ``blocks`` (a small stochastic block model) and those of `message_graphs`.

    nice python benchmarks/message_accuracy.py debian        # writes benchmarks/results/messages-debian.json
    nice python benchmarks/message_accuracy.py wordnet       # writes benchmarks/results/messages-wordnet.json
    python benchmarks/message_accuracy.py blocks --seeds 2 --epochs 10 --output /tmp/smoke.json
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import platform
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import torch
import torch.distributed as dist
from links import records_of_ranks
from results_head import results_head

import qsync_opt
from qsync_opt.io import write_json
from qsync_opt.messages import Plan, Problem, evaluate, uniform_plan
from qsync_opt.runtimes.torch.ddp import broadcast_json
from qsync_opt.runtimes.torch.messages import (
    NodeClassifier,
    Part,
    TrainingOptions,
    block_graph,
    full_graph,
    load_part,
    part_file,
    partition_graph,
    train,
)

HERE = Path(__file__).parent
WORKERS = 2
BUDGETS = (2, 4, 8)
OTHER = {"sampled": {"share": 1 / 8}, "late": {"late": True}}
TRAINED = ("FP32", "planned", "uniform 4", "uniform 2", "random", "sampled", "late")
EQUAL = ("uniform 4", "random", "grouped", "sampled", "late")
"""Subjects that the plan is compared with: all but the last send its bytes, and that one FP32's."""
GROUPED_S = 20.0
DRAWS = 4
LATEST = 4
"""Weights of the last epochs of tracing that are kept: late messages are those of other weights."""

Weights = dict[str, torch.Tensor]


def traced(part: Part, options: TrainingOptions, epochs: int) -> tuple[Problem, Any, list[Weights]]:
    """Problem of a short training run, its model, and its latest weights, the newest last."""
    torch.manual_seed(options.seed)
    classes = torch.tensor([int(part.y.max()) + 1])
    dist.all_reduce(classes, dist.ReduceOp.MAX)
    model = NodeClassifier(options, part.x.shape[1], int(classes))
    full = full_graph(model, part, options=replace(options.messages, initial_bits=8, replan_steps=0))
    optimizer = torch.optim.Adam(model.parameters(), lr=options.rate)
    latest: list[Weights] = []
    for _ in range(epochs):
        latest = [*latest[1 - LATEST :], copy.deepcopy(model.state_dict())]
        optimizer.zero_grad()
        full.loss(full()).backward()
        optimizer.step()
    problem = Problem.from_json(broadcast_json(full.build_problem().to_json()))
    full.close()
    return problem, model, latest


def by_bytes(problem: Problem, bits: int) -> Problem:
    """The problem with bytes in the place of time, as many as this uniform width has."""
    exchanges = tuple(
        replace(
            each, hidden_ns=0, ports=False,
            rounds=tuple(tuple(replace(p, fixed_ns=0, ns_per_byte=1.0) for p in group) for group in each.rounds),
        )
        for each in problem.exchanges
    )  # fmt: skip
    free = replace(problem, exchanges=exchanges, time_limit_ns=None, time_weight=1.0)
    limit = evaluate(free, uniform_plan(free, bits)).exposed_ns
    return replace(free, time_limit_ns=math.ceil(limit), time_weight=None)


def plans(problem: Problem) -> dict[str, Plan]:
    """Plans of the same bytes as uniform ones, the same on every rank: rank 0 solves."""
    found: dict[str, Any] = {}
    if dist.get_rank() == 0:
        for bits in BUDGETS:
            name = "planned" if bits == 4 else f"planned {bits}"
            found[name] = qsync_opt.solve(by_bytes(problem, bits)).plan.to_json()
        rng = np.random.default_rng(0)
        planned = Plan.from_json(found["planned"])
        found["random"] = Plan(
            bits={n: [[rng.permutation(p) for p in group] for group in r] for n, r in planned.bits.items()}
        ).to_json()
        grouped = qsync_opt.solve(by_bytes(problem, 4), "grouped", time_limit_s=GROUPED_S)
        if grouped.plan is not None:
            found["grouped"] = grouped.plan.to_json()
    return {name: Plan.from_json(data) for name, data in broadcast_json(found).items()}


def gradients(
    part: Part, options: TrainingOptions, model: Any, weights: list[Weights], plan: Plan | None, draws: int
) -> list[torch.Tensor]:
    """Gradients at the last of the weights, one for each draw of the rounding, after a step at each of the others."""
    full = full_graph(model, part, plan, options=options.messages)
    result = []
    for step in range(len(weights) - 1 + draws):
        number = min(step, len(weights) - 1)
        model.load_state_dict(weights[number])
        model.zero_grad()
        torch.manual_seed(1000 * options.seed + number)  # dropout belongs to the weights
        full.loss(full()).backward()
        if number == len(weights) - 1:
            result.append(torch.cat([p.grad.flatten() for p in model.parameters()]).double())
    full.close()
    return result


def seed_records(part: Part, options: TrainingOptions, settings: dict[str, Any], rank: int) -> list[dict[str, Any]]:
    """Gradient errors and accuracies of all subjects with one seed."""

    def uniform(bits: int, **other: Any) -> TrainingOptions:
        return replace(options, messages=replace(options.messages, initial_bits=bits, replan_steps=0, **other))

    problem, model, weights = traced(part, options, settings["traced_epochs"])
    runs: dict[str, tuple[TrainingOptions, Plan | None]] = {"FP32": (uniform(32), None)}
    runs |= {f"uniform {bits}": (uniform(bits), None) for bits in BUDGETS}
    found = plans(problem)
    runs |= {name: (uniform(8), plan) for name, plan in found.items()}
    runs |= {name: (uniform(32, **other), None) for name, other in OTHER.items()}
    exact = gradients(part, uniform(32), model, weights[-2:], None, 1)[0]
    common = {"graph": settings["graph"], "seed": options.seed}
    records: list[dict[str, Any]] = []
    for name, (chosen, plan) in runs.items():
        is_late = name == "late"
        draws = 1 if is_late or name == "FP32" else DRAWS
        each = gradients(part, chosen, model, weights if is_late else weights[-2:], plan, draws)
        errors = [float((g - exact).square().sum() / exact.square().sum()) for g in each]
        record = {"what": "gradient", **common, "subject": name, "error": statistics.mean(errors), "errors": errors}
        widths = plan or (uniform_plan(problem, chosen.messages.initial_bits) if name not in OTHER else None)
        if widths is not None:
            at = evaluate(problem, widths)
            record |= {"variance": at.variance, "mean_bits": at.mean_bits, "bytes": at.message_bytes}
        records.append(record)
    for name in TRAINED:
        chosen, plan = runs[name]
        trained = train(part, chosen, plan)[0]
        records.append(
            {
                "what": "accuracy", **common, "subject": name, "test_accuracy": trained.test_accuracy,
                "val_accuracy": trained.val_accuracy, "loss": trained.losses[-1],
                "message_bytes": trained.message_bytes,
            }
        )  # fmt: skip
        if rank == 0:
            print(f"seed {options.seed}, {name}: {100 * trained.test_accuracy:.2f} %", flush=True)
    return records


def worker(rank: int, address: str, output: str, settings: dict[str, Any]) -> None:
    """One rank; rank 0 writes the records."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=WORKERS)
    part = load_part(part_file(Path(settings["folder"]), rank))
    records = []
    for seed in range(settings["seeds"]):
        options = TrainingOptions(
            epochs=settings["epochs"], hidden=settings["hidden"], rate=settings["rate"], seed=seed, dropout=0.3
        )
        options = replace(options, messages=replace(options.messages, seed=seed))
        records += seed_records(part, options, settings, rank)
        if rank == 0:
            Path(output).write_text(json.dumps(records))
    dist.barrier()
    os._exit(0)  # gloo's threads may wait for a peer that has left


def asked_rows(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was asked for, beside what the records say."""
    rows: list[dict[str, Any]] = []

    def add(what: str, target: str, measured: float, met: bool, note: str) -> None:
        rows.append({"what": what, "asked": target, "measured": round(measured, 4), "met": met, "note": note})

    def by_subject(what: str, key: str) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for record in records:
            if record["what"] == what and key in record:
                found.setdefault(record["subject"], []).append(record[key])
        return found

    graph = records[0]["graph"]
    reached = by_subject("accuracy", "test_accuracy")
    for name in TRAINED[1:]:
        losses = [100 * (a - b) for a, b in zip(reached["FP32"], reached[name], strict=True)]
        lost = statistics.mean(losses)
        error = statistics.stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 else math.nan
        note = f"{len(losses)} seeds, standard error {error:.2f}; FP32 has {100 * statistics.mean(reached['FP32']):.2f}"
        add(f"points of accuracy that {name} loses to FP32, {graph}", "<= 0.3", lost, lost <= 0.3, note)
    error_of = by_subject("gradient", "error")
    variance = by_subject("gradient", "variance")
    pairs = [(name, "planned") for name in EQUAL] + [(f"uniform {b}", f"planned {b}") for b in BUDGETS if b != 4]
    for peer, own in pairs:
        if peer not in error_of:
            continue
        ratio = statistics.mean(error_of[peer]) / statistics.mean(error_of[own])
        note = "all of FP32's bytes" if peer == "late" else "equal bytes"
        if peer in variance:
            predicted = statistics.mean(variance[peer]) / statistics.mean(variance[own])
            note += f"; variance of the messages by the plan: {predicted:.3g}"
        add(f"squared error of the gradient with {peer} over that with {own}, {graph}", ">= 1", ratio, ratio >= 1, note)
    return rows


def main() -> None:
    """Measure and write the file."""
    if sys.argv[1:2] == ["--worker"]:
        rank, address, output, _, settings = sys.argv[2:]
        worker(int(rank), address, output, json.loads(settings))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graph", choices=("blocks", "debian", "wordnet"))
    parser.add_argument("--nodes", type=int, default=1500, help="of the stochastic block model")
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--rate", type=float, default=0.02)
    parser.add_argument("--traced-epochs", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    keys = ("graph", "nodes", "hidden", "rate", "traced_epochs", "epochs", "seeds")
    settings = {key: getattr(arguments, key) for key in keys}
    if arguments.graph == "blocks":
        graph = block_graph(arguments.nodes, mixing=0.5, noise=5.0)
    else:
        from message_graphs import read_graph

        graph = read_graph(arguments.graph)
    with tempfile.TemporaryDirectory() as folder:
        parts = partition_graph(graph, WORKERS)
        for part in parts:
            part.save(part_file(Path(folder), part.rank))
        records = records_of_ranks(
            __file__, "loopback", [json.dumps(settings | {"folder": folder})], port=0, gigabits=None, timeout_s=14400
        )
    shape = {
        "nodes": graph.num_nodes, "edges": graph.edge_index.shape[1], "classes": int(graph.y.max()) + 1,
        "sends": [part.send.numel() for part in parts],
    }  # fmt: skip
    data = {
        **results_head(f"{platform.machine()}, {os.cpu_count()} processors", {"torch": torch.__version__}),
        "settings": settings | shape,
        "asked": asked_rows(records),
        "records": records,
    }
    write_json(arguments.output or HERE / "results" / f"messages-{arguments.graph}.json", data)
    for each in data["asked"]:
        print(f"{each['what']}: asked {each['asked']}, measured {each['measured']} ({each['note']})")


if __name__ == "__main__":
    main()
