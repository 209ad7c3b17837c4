"""Full-graph training of a GNN over two workers and links of limited speed, in planned widths and in others.

Two processes, one thread each, train a GCN on a stochastic block model, each on its part. Links of so many Gbit/s are
pairs of network namespaces (root and ``tc`` are needed), and what a plain connection carries over each is measured
first. Two graphs: of ``cut`` most nodes have neighbours elsewhere, so that nothing hides an exchange; of ``local`` few
do. For each link a calibrating run in 4 bits measures ranges, links, packing and computation, and some epochs in FP32
what computation takes after long waits; from them every subject's epoch is predicted and printed. Only then subjects
are measured in the same processes, one after another: FP32, BF16, uniform 8, 4 and 2 bits, the plan of ``threshold``,
its widths in random order (the same bytes a pair), the mended grouping of the paper, all with the exposed time of
uniform 4 bits as limit; FP32 one epoch late; and an eighth of FP32's rows, drawn anew in each epoch (the bytes of
uniform 4 bits).

Exchanges of FP32, BF16, uniform 4 bits and the plan are measured alone too, in turn, packed and from a common start:
in an epoch, what an exchange takes is also the wait for a worker that computes longer. Accuracy and gradients are those
of `message_accuracy`, a million nodes those of `message_scale`.

    python benchmarks/messages.py                        # writes benchmarks/results/messages.json
    python benchmarks/messages.py --links 1 --nodes 500 --epochs 8 --output /tmp/smoke.json
    python benchmarks/messages.py --join first.json second.json         # of links measured one by one
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import torch
import torch.distributed as dist
from links import plain_bytes_s, records_of_ranks
from results_head import processors, results_head

import qsync_opt
from qsync_opt.io import write_json
from qsync_opt.messages import Plan, Problem, evaluate, uniform_plan
from qsync_opt.runtimes.torch.ddp import broadcast_json
from qsync_opt.runtimes.torch.messages import (
    NodeClassifier,
    StepTimes,
    TrainingOptions,
    block_graph,
    full_graph,
    partition_graph,
    predict_epoch,
    train,
)

HERE = Path(__file__).parent
WORKERS = 2
UNIFORM = {"FP32": 32, "BF16": 16, "uniform 8": 8, "uniform 4": 4, "uniform 2": 2}
PLANNED = ("planned", "random", "grouped")
OTHER = {"late": {"late": True}, "sampled": {"share": 1 / 8}}
"""Subjects that send FP32 but not every row in every step; no plan describes them."""
GROUPED_S = 10.0
ALONE = ("FP32", "BF16", "uniform 4", "planned")
ALONE_REPEATS = 15
CALIBRATION_EPOCHS = {4: 66, 32: 26}
"""Width to epochs in it; the problem is that of the first."""
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "4000000000",
    "MALLOC_TRIM_THRESHOLD_": "8000000000",
    "MALLOC_TOP_PAD_": "67108864",
    "MALLOC_ARENA_MAX": "1",
}
"""Memory that a tensor leaves stays with the process (glibc). By default large tensors get new pages each time: epochs
take a fifth longer, and runs of the same epoch on an idle machine differ by a quarter."""
LOCAL_LINK = "0.1"
"""Of the graph whose exchanges computation can hide: in FP32 it cannot there, in fewer bits it can."""


def shuffled(plan: Plan) -> Plan:
    """The widths of every pair in random order: the same bytes and times."""
    rng = np.random.default_rng(0)
    return Plan(bits={n: [[rng.permutation(pair) for pair in group] for group in r] for n, r in plan.bits.items()})


def plans(problem: Problem, wanted: tuple[str, ...]) -> dict[str, Plan]:
    """The plans of a problem, the same on every rank: rank 0 solves."""
    result: dict[str, Any] = {}
    if dist.get_rank() == 0:
        planned = qsync_opt.solve(problem)
        result["planned"] = planned.plan.to_json()
        result["random"] = shuffled(planned.plan).to_json()
        if "grouped" in wanted:
            grouped = qsync_opt.solve(problem, "grouped", time_limit_s=GROUPED_S)
            if grouped.plan is not None:
                result["grouped"] = grouped.plan.to_json()
    return {name: Plan.from_json(data) for name, data in broadcast_json(result).items() if name in wanted}


def calibrate(part: Any, options: TrainingOptions) -> tuple[Problem, list[StepTimes]]:
    """Problem and times of the steps of calibrating runs, the same on every rank."""
    torch.manual_seed(options.seed)
    classes = torch.tensor([int(part.y.max()) + 1])
    dist.all_reduce(classes, dist.ReduceOp.MAX)
    model = NodeClassifier(options, part.x.shape[1], int(classes))
    bits, *others = CALIBRATION_EPOCHS
    full = full_graph(model, part, options=replace(options.messages, initial_bits=bits, replan_steps=0))
    optimizer = torch.optim.Adam(model.parameters(), lr=options.rate)

    def run(epochs: int) -> None:
        for _ in range(epochs):
            optimizer.zero_grad()
            full.loss(full()).backward()
            optimizer.step()

    run(CALIBRATION_EPOCHS[bits])
    full.measure_sensitivities()
    problem = Problem.from_json(broadcast_json(full.build_problem().to_json()))
    times = [full.step_times(problem)]
    for width in others:
        full.use(uniform_plan(problem, width))
        run(CALIBRATION_EPOCHS[width])
        times.append(full.step_times(problem))
    full.close()
    return problem, times


def subjects(
    part: Any, options: TrainingOptions, wanted: Sequence[str], place: str, rounds: int = 1
) -> list[dict[str, Any]]:
    """Every subject's record; what is predicted of all is printed before any of them is measured."""

    def uniform(bits: int, **other: Any) -> TrainingOptions:
        return replace(options, messages=replace(options.messages, initial_bits=bits, replan_steps=0, **other))

    train(part, uniform(32))  # the processes have the memory that they keep from now on
    problem, times = calibrate(part, options)
    runs: dict[str, tuple[TrainingOptions, Plan | None, Plan]] = {}
    for name in wanted:
        if name in UNIFORM:
            runs[name] = uniform(UNIFORM[name]), None, uniform_plan(problem, UNIFORM[name])
    for name, plan in plans(problem, tuple(name for name in wanted if name in PLANNED)).items():
        runs[name] = uniform(8), plan, plan
    predicted = {name: predict_epoch(problem, plan, *times) for name, (_, _, plan) in runs.items()}
    if dist.get_rank() == 0:
        for name, epoch in predicted.items():
            print(f"{place}, {name}: predicted epoch {1e3 * epoch.epoch_s:.2f} ms, {epoch}", flush=True)
    for name in wanted:
        if name in OTHER:
            runs[name] = uniform(32, **OTHER[name]), None, uniform_plan(problem, 32)
    trained: dict[str, list[dict[str, Any]]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, (chosen, plan, _) in runs.items():
            trained[name].append(measured(train(part, chosen, plan)[0]))
    records = [
        {"what": "alone", "subject": name, "seconds": statistics.median(times), "seconds_of_repeats": times}
        for name, times in alone(part, options, {name: runs[name][2] for name in ALONE if name in runs}).items()
    ]
    for name, (_, _, widths) in runs.items():
        record = {"what": "link", "subject": name, **trained[name][0]}
        for key in TIMES:
            record[key] = statistics.mean(each[key] for each in trained[name])
        record["exposed_s_by_exchange"] = {
            exchange: statistics.mean(each["exposed_s_by_exchange"][exchange] for each in trained[name])
            for exchange in record["exposed_s_by_exchange"]
        }
        record["epoch_s_of_rounds"] = [each["epoch_s"] for each in trained[name]]
        if name in predicted:
            found = evaluate(problem, widths)
            record |= {
                "variance": found.variance,
                "mean_bits": found.mean_bits,
                "predicted": asdict(predicted[name]) | {"epoch_s": predicted[name].epoch_s},
                "links": [[pair.fixed_ns, pair.ns_per_byte] for pair in problem.exchanges[0].pairs],
                "hidden_ns": {each.name: each.hidden_ns for each in problem.exchanges},
                "exchange_ns": dict(found.exchange_ns),
            }
        records.append(record)
    return records


def alone(part: Any, options: TrainingOptions, plans: dict[str, Plan]) -> dict[str, list[float]]:
    """Seconds of all exchanges of an epoch, one after another, of the slower worker; plans are measured in turn."""
    classes = torch.tensor([int(part.y.max()) + 1])
    dist.all_reduce(classes, dist.ReduceOp.MAX)
    model = NodeClassifier(options, part.x.shape[1], int(classes))
    full = full_graph(model, part, options=replace(options.messages, initial_bits=32, replan_steps=0))
    full.loss(full()).backward()  # layers know their widths after one pass
    exchanges = [layer.exchange for layer in full.layers[1:] if layer.exchange is not None]
    everything = torch.arange(part.halo.numel())
    rows = [(torch.randn(part.own, e.forward.dim), torch.randn(part.halo.numel(), e.forward.dim)) for e in exchanges]

    def exchange_all() -> None:
        for each, (own, halo) in zip(exchanges, rows, strict=True):
            for x, index, way in ((own, each.send, each.forward), (halo, everything, each.backward)):
                each.land(each.launch(x, index, way), way.dim)

    seconds: dict[str, list[float]] = {name: [] for name in plans}
    for _ in range(ALONE_REPEATS):
        for name, plan in plans.items():
            full.use(plan)
            exchange_all()  # where rows go is found once
            dist.barrier()
            began = time.perf_counter()
            exchange_all()
            took = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            seconds[name].append(float(took))
    full.close()
    return seconds


TIMES = ("epoch_s", "exchange_s", "exposed_s", "codec_s")


def measured(trained: Any) -> dict[str, Any]:
    """What a run took and reached."""
    kept = {key: value for key, value in trained.to_json().items() if key not in ("losses", "predicted_exposed_s")}
    return {**kept, "loss": trained.losses[-1]}


def worker(rank: int, address: str, output: str, link: str, settings: dict[str, Any]) -> None:
    """One rank; rank 0 writes the records."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=WORKERS)
    graph_name = settings["graph"]
    if graph_name == "cut":
        graph = block_graph(settings["nodes"], degree=10, mixing=0.6, dim=64)
    else:
        graph = block_graph(2 * settings["nodes"], degree=10, mixing=0.03, dim=64)
    options = TrainingOptions(epochs=settings["epochs"], hidden=settings["hidden"])
    part = partition_graph(graph, WORKERS)[rank]
    names = (*UNIFORM, *PLANNED, *OTHER) if graph_name == "cut" else ("FP32", "planned", "late")
    found = subjects(part, options, names, f"{graph_name}, {link} Gbit/s", settings["rounds"])
    records = [{"link": link, "graph": graph_name, **record} for record in found]
    if rank == 0:
        Path(output).write_text(json.dumps(records))
    dist.barrier()
    os._exit(0)  # gloo's threads may wait for a peer that has left


def measure(link: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Records of one graph over one link."""
    os.environ.update(ALLOCATOR)
    return records_of_ranks(__file__, link, [json.dumps(settings)], port=29557, gigabits=float(link), timeout_s=7200)


class Asked:
    """Rows of what was set as a target."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def row(self, what: str, target: str, measured: float | None, met: bool, note: str = "") -> None:
        """Add a row; the measured value is rounded."""
        value = None if measured is None else round(measured, 4)
        self.rows.append({"what": what, "asked": target, "measured": value, "met": met, "note": note})

    def links(self, records: list[dict[str, Any]]) -> None:
        """What plain connections carry."""
        for record in records:
            if record["what"] == "limiter":
                error = abs(record["bytes_s"] * 8 / record["bits_s"] - 1)
                what = f"a plain connection against the limit of {record['link']} Gbit/s"
                self.row(what, "within 3 %", error, error <= 0.03)

    def link(self, own: dict[str, dict[str, Any]], times: dict[str, float], place: str) -> None:
        """Times of the subjects of one link, on the graph whose exchanges nothing hides."""
        exact, half, planned = own["FP32"], own["BF16"], own["planned"]
        share = exact["exposed_s"] / exact["epoch_s"]
        note = f"FP32 waits for messages in {share:.0%} of its epoch"

        def exchange(record: dict[str, Any]) -> float:
            return record["exchange_s"] + record["codec_s"]

        ratio = exchange(exact) / exchange(planned)
        what = f"exchange of the plan against FP32, with packing and the wait for the other worker, {place}"
        self.row(what, ">= 2.2 at 1 Gbit/s", ratio, ratio >= 2.2, note)
        ratio = times["FP32"] / times["planned"]
        what = f"exchange of the plan against FP32, with packing, from a common start, {place}"
        ms = ", ".join(f"{name} {1e3 * value:.1f} ms" for name, value in times.items())
        self.row(what, ">= 2.2 at 1 Gbit/s", ratio, ratio >= 2.2, ms)
        for peer, least in ((exact, 1.8), (half, 1.2)):
            ratio = peer["epoch_s"] / planned["epoch_s"]
            what = f"epoch of the plan against {peer['subject']}, {place}"
            self.row(what, f">= {least} where exchanges take 70 %", ratio, ratio >= least, note)
        self.predictions(own, place)
        peers = [name for name in ("random", "grouped", "uniform 4") if name in own]
        least = min(own[name]["variance"] for name in peers)
        ratio = least / planned["variance"] if planned["variance"] else None
        what = f"least variance of {', '.join(peers)} against the plan's, {place}"
        self.row(what, ">= 1 at equal time", ratio, ratio is None or ratio >= 1)

    def predictions(self, own: dict[str, dict[str, Any]], place: str) -> None:
        """Predicted epochs against the measured ones."""
        errors = {
            name: record["predicted"]["epoch_s"] / record["epoch_s"] - 1
            for name, record in own.items()
            if "predicted" in record
        }
        error = abs(errors["planned"])
        note = ", ".join(f"{name} {100 * value:+.0f} %" for name, value in errors.items())
        self.row(f"predicted epoch of the plan, {place}", "within 10 %", error, error <= 0.1, note)
        worst = max(map(abs, errors.values()))
        self.row(f"predicted epochs of all subjects, {place}: the worst", "within 10 %", worst, worst <= 0.1)

    def hidden(self, own: dict[str, dict[str, Any]], place: str) -> None:
        """What is waited for of the exchanges that a plan says to be hidden."""
        planned, exact = own["planned"], own["FP32"]
        names = [name for name, spent in planned["exchange_ns"].items() if spent <= planned["hidden_ns"][name]]
        spent_s = sum(planned["exchange_ns"][name] for name in names) / 1e9
        exposed_s = sum(planned["exposed_s_by_exchange"][name] for name in names)
        share = exposed_s / spent_s if names else None
        note = (
            f"{1e3 * exposed_s:.2f} of {1e3 * spent_s:.2f} ms of {', '.join(names) or 'none'}; of all exchanges "
            f"{1e3 * planned['exposed_s']:.2f} ms, {1e3 * planned['predicted']['exposed_s']:.2f} as the plan says; "
            f"FP32 {1e3 * exact['exposed_s']:.2f} ms"
        )
        what = f"share that is waited for of the exchanges that the plan says to be hidden, {place}"
        self.row(what, "<= 0.05", share, share is not None and share <= 0.05, note)
        self.predictions(own, place)

    def crossover(self, records: dict[str, dict[str, dict[str, Any]]]) -> None:
        """The link speed from which on FP32 has the shorter epoch than uniform 4 bits."""
        speeds = sorted(records, key=float)
        if len(speeds) < 2:
            return
        found = {}
        for kind in ("measured", "predicted"):
            gains = []
            for speed in speeds:
                pair = [records[speed][name] for name in ("FP32", "uniform 4")]
                exact, narrow = ((r if kind == "measured" else r["predicted"])["epoch_s"] for r in pair)
                gains.append(math.log(exact / narrow))
            ends = [(k, a, b) for k, (a, b) in enumerate(itertools.pairwise(gains)) if a > 0 >= b]
            if ends:
                k, above, below = ends[0]
                low, high = (math.log(float(speeds[i])) for i in (k, k + 1))
                found[kind] = math.exp(low + (high - low) * above / (above - below))
        what = "link speed at which uniform 4 bits and FP32 take equally long: predicted against measured"
        if len(found) < 2:
            note = "between the measured links there is no such speed" + "".join(
                f"; {kind} {value:.3g} Gbit/s" for kind, value in found.items()
            )
            self.row(what, "within 20 %", None, False, note)
        else:
            error = abs(found["predicted"] / found["measured"] - 1)
            note = f"{found['predicted']:.3g} and {found['measured']:.3g} Gbit/s, between links in logarithms"
            self.row(what, "within 20 %", error, error <= 0.2, note)


def main() -> None:
    """Measure and write the file."""
    if sys.argv[1:2] == ["--worker"]:
        rank, address, output, link, settings = sys.argv[2:]
        worker(int(rank), address, output, link, json.loads(settings))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", default="0.1,1,10", help="Gbit/s")
    parser.add_argument("--nodes", type=int, default=4000)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=20, help="of each subject and link")
    parser.add_argument("--rounds", type=int, default=6, help="runs of each subject whose times are averaged")
    parser.add_argument("--join", type=Path, nargs="+", help="outputs for single links whose records are joined")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    settings = {key: getattr(arguments, key) for key in ("nodes", "hidden", "epochs", "rounds")}
    records: list[dict[str, Any]] = []
    asked = Asked()
    links = arguments.links.split(",")
    if arguments.join:
        parts = [json.loads(path.read_text()) for path in arguments.join]
        settings, records = parts[0]["settings"], [record for part in parts for record in part["records"]]
        links = [record["link"] for record in records if record["what"] == "limiter"]
    else:
        for link in links:
            bits_s = float(link) * 1e9
            records.append({"what": "limiter", "link": link, "bits_s": bits_s, "bytes_s": plain_bytes_s(float(link))})
            records += measure(link, settings | {"graph": "cut"})
        if LOCAL_LINK in links:
            records += measure(LOCAL_LINK, settings | {"graph": "local"})
    asked.links(records)
    by_link: dict[str, dict[str, dict[str, Any]]] = {}
    times: dict[str, dict[str, float]] = {}
    for record in records:
        if record["what"] == "link":
            by_link.setdefault(f"{record['graph']} {record['link']}", {})[record["subject"]] = record
        elif record["what"] == "alone":
            times.setdefault(f"{record['graph']} {record['link']}", {})[record["subject"]] = record["seconds"]
    for link in links:
        asked.link(by_link[f"cut {link}"], times[f"cut {link}"], f"{link} Gbit/s")
    if LOCAL_LINK in links:
        asked.hidden(by_link[f"local {LOCAL_LINK}"], f"{LOCAL_LINK} Gbit/s")
    asked.crossover({link: by_link[f"cut {link}"] for link in links})
    output = arguments.output or HERE / "results" / "messages.json"
    data = {
        **results_head(processors(), {"torch": torch.__version__}),
        "settings": settings,
        "asked": asked.rows,
        "records": records,
    }
    write_json(output, data)
    for each in data["asked"]:
        print(f"{each['what']}: asked {each['asked']}, measured {each['measured']} ({each['note']})")


if __name__ == "__main__":
    main()
