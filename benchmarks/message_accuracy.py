"""What messages in fewer bits do to gradients and to accuracy, on one graph split over two workers.

For each seed (of weights, dropout and rounding) a GCN is trained in 8 bits for a while, so that ranges are traced, and
plans are made whose exchanges have the bytes of uniform 2, 4 and 8 bits: links cost a nanosecond per byte and nothing
is hidden, so that no time of this machine matters. Then, at the weights reached, each subject's gradient is compared
with the exact one of the same dropout: its mean squared error over that gradient's square, over a few draws. It is the
variance of subjects that are unbiased, and holds the bias of the one that is not: rows and gradients one epoch late.
Subjects of equal bytes: uniform 4 bits, the plan (exchanges weighed by measured sensitivities), one for which exchanges
count alike (the default), the plan's widths in random order, the mended grouping of the paper, and an eighth of FP32's
rows. Last, the plan and FP32 train from the start, and their accuracies are compared.

Graphs are ``blocks`` (a small stochastic block model) and those of `message_graphs`.

    nice python benchmarks/message_accuracy.py debian        # writes benchmarks/results/messages-debian.json
    nice python benchmarks/message_accuracy.py wordnet       # writes benchmarks/results/messages-wordnet.json
    python benchmarks/message_accuracy.py blocks --seeds 1 --epochs 5 --output /tmp/smoke.json
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
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
from results_head import processors, results_head

import qsync_opt
from qsync_opt.io import write_json
from qsync_opt.messages import Plan, Problem, by_bytes, evaluate, in_rounds, uniform_plan
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
TRAINED = ("FP32", "planned")
EQUAL = ("uniform 4", "alike", "random", "grouped", "sampled", "late")
"""Subjects that the plan is compared with: all but the last send its bytes, and that one FP32's."""
GROUPED_S = 10.0
DRAWS = 8
UNMEASURED = ("planned 2", "planned 8")
"""Plans of which only the variance of the messages is recorded."""
LATEST = 4
"""Weights of the last epochs of tracing that are kept: late messages are those of other weights."""

Weights = dict[str, torch.Tensor]


def traced(part: Part, options: TrainingOptions, epochs: int) -> tuple[Problem, Problem, Any, list[Weights]]:
    """Problem of a short training run with measured sensitivities and one without, model, and latest weights."""
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
    alike = Problem.from_json(broadcast_json(full.build_problem().to_json()))
    full.measure_sensitivities()
    problem = Problem.from_json(broadcast_json(full.build_problem().to_json()))
    full.close()
    return problem, alike, model, latest


def plan_by_bytes(problem: Problem, bits: int, method: str = "default", **options: Any) -> Plan | None:
    """The plan that has as many bytes as this uniform width."""
    plan = qsync_opt.solve(by_bytes(problem, bits), method, **options).plan
    return None if plan is None else in_rounds(plan, problem)


def plans(problem: Problem, alike: Problem) -> dict[str, Plan]:
    """Plans of the same bytes as uniform ones, the same on every rank: rank 0 solves."""
    found: dict[str, Any] = {}
    if dist.get_rank() == 0:
        for bits in BUDGETS:
            name = "planned" if bits == 4 else f"planned {bits}"
            found[name] = plan_by_bytes(problem, bits).to_json()
        found["alike"] = plan_by_bytes(alike, 4).to_json()
        rng = np.random.default_rng(0)
        planned = Plan.from_json(found["planned"])
        found["random"] = Plan(
            bits={n: [[rng.permutation(p) for p in group] for group in r] for n, r in planned.bits.items()}
        ).to_json()
        grouped = plan_by_bytes(problem, 4, "grouped", time_limit_s=GROUPED_S)
        if grouped is not None:
            found["grouped"] = grouped.to_json()
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

    problem, alike, model, weights = traced(part, options, settings["traced_epochs"])
    runs: dict[str, tuple[TrainingOptions, Plan | None]] = {"FP32": (uniform(32), None)}
    runs["uniform 4"] = uniform(4), None
    found = plans(problem, alike)
    runs |= {name: (uniform(8), plan) for name, plan in found.items()}
    runs |= {name: (uniform(32, **other), None) for name, other in OTHER.items()}
    exact = gradients(part, uniform(32), model, weights[-2:], None, 1)[0]
    common = {"graph": settings["graph"], "seed": options.seed}
    records: list[dict[str, Any]] = []
    widths = found | {f"uniform {bits}": uniform_plan(problem, bits) for bits in BUDGETS}
    for name, plan in widths.items():
        at = evaluate(problem, plan)
        each = {"variance": at.variance, "mean_bits": at.mean_bits, "bytes": at.message_bytes}
        records.append({"what": "plan", **common, "subject": name, **each})
    for name, (chosen, plan) in runs.items():
        if name in UNMEASURED:
            continue
        is_late = name == "late"
        draws = 1 if is_late or name == "FP32" else DRAWS
        each = gradients(part, chosen, model, weights if is_late else weights[-2:], plan, draws)
        errors = [float((g - exact).square().sum() / exact.square().sum()) for g in each]
        error = statistics.mean(errors)
        records.append({"what": "gradient", **common, "subject": name, "error": error, "errors": errors})
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
    for peer in EQUAL:
        if peer in error_of:
            ratio = statistics.mean(error_of[peer]) / statistics.mean(error_of["planned"])
            note = "all of FP32's bytes" if peer == "late" else "equal bytes"
            what = f"squared error of the gradient with {peer} over that with the plan, {graph}"
            add(what, ">= 1 at equal bytes", ratio, ratio >= 1, note)
    variance = by_subject("plan", "variance")
    pairs = [*((name, "planned") for name in ("uniform 4", "alike", "random", "grouped")),
             *((f"uniform {bits}", f"planned {bits}") for bits in BUDGETS if bits != 4)]  # fmt: skip
    for peer, own in pairs:
        if peer in variance:
            ratio = statistics.mean(variance[peer]) / statistics.mean(variance[own])
            what = f"variance of the messages with {peer} over that with the plan of as many bytes, {graph}"
            add(what, ">= 1", ratio, ratio >= 1, f"{len(variance[peer])} seeds")
    return rows


def main() -> None:
    """Measure and write the file."""
    if sys.argv[1:2] == ["--worker"]:
        rank, address, output, _, settings = sys.argv[2:]
        worker(int(rank), address, output, json.loads(settings))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graph", choices=("blocks", "debian", "wordnet"))
    parser.add_argument("--nodes", type=int, default=1500, help="of the stochastic block model")
    parser.add_argument("--hidden", type=int, default=16)
    parser.add_argument("--rate", type=float, default=0.03)
    parser.add_argument("--traced-epochs", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=20)
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
        **results_head(processors(), {"torch": torch.__version__}),
        "settings": settings | shape,
        "asked": asked_rows(records),
        "records": records,
    }
    write_json(arguments.output or HERE / "results" / f"messages-{arguments.graph}.json", data)
    for each in data["asked"]:
        print(f"{each['what']}: asked {each['asked']}, measured {each['measured']} ({each['note']})")


if __name__ == "__main__":
    main()
