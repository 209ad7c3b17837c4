"""A step of two unequal workers: joint local batches and precisions beside equal batches; predicted, bound, measured.

python benchmarks/hybrid_step.py [--device cpu|cuda] [--batch 16] [--share 0.25] [--memory "2 GiB"]

Two processes train one GPT in ``DistributedDataParallel``. On a CPU worker 0 has more threads than worker 1. On a card
worker 1 is a green context of a share of the multiprocessors, with a cap on its memory: on the second card over NCCL,
or, where there is only one, beside worker 0 in a green context of the rest, over gloo. Costs are measured at two local
batches by `auto_plan`, and the problem of local batches and precisions is solved with a bound. Every way is then
trained for some steps with `global_mean`. Writes ``benchmarks/results/hybrid-step.json``.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from predictor_partition import partition
from results_head import results_head
from torch.nn.parallel import DistributedDataParallel

import qsync_opt
from qsync_opt.io import write_json
from qsync_opt.runtimes.torch.ddp import broadcast_json, free_port, gather_json, process_group
from qsync_opt.runtimes.torch.demo import Gpt, GptConfig
from qsync_opt.training import (
    Plan,
    SharesPlan,
    SharesProblem,
    build_shares_problem,
    evaluate_shares,
    fastest_shares,
    uniform_plan,
)

HERE = Path(__file__).resolve().parent
SIZES = {"cpu": GptConfig(context=32, width=64, heads=1, layers=1), "cuda": GptConfig(width=1024, heads=16, layers=8)}
TYPES = ("large", "small")
ASKED = 0.1
"""Most that the predicted time of a step may be off."""
SLACK = 0.02
BLOCKS, STEPS = 5, 4
LIMIT_S = {"cpu": 900, "cuda": 280}
"""Seconds after which the workers are given up, by kind of device."""


class Worker:
    """One rank: its device, its model and its part of a card."""

    def __init__(self, rank: int, arguments: argparse.Namespace) -> None:
        self.rank, self.kind, self.arguments = rank, TYPES[rank], arguments
        self.device = torch.device("cpu")
        self.multiprocessors: int | None = None
        if arguments.device == "cuda":
            cards = torch.cuda.device_count()
            self.device = torch.device("cuda", min(rank, cards - 1))
            torch.cuda.set_device(self.device)
            whole = torch.cuda.get_device_properties(self.device).multi_processor_count
            part = max(8, round(whole * arguments.share / 8) * 8)
            self.multiprocessors = part if rank else None if cards > 1 else (whole - part) // 8 * 8
            if rank and arguments.memory:
                total = torch.cuda.get_device_properties(self.device).total_memory
                torch.cuda.set_per_process_memory_fraction(wanted_bytes(arguments.memory) / total)
        else:
            torch.set_num_threads(1 if rank else arguments.threads)
        self.config = SIZES[arguments.device]

    def model(self) -> Gpt:
        """The same model on all ranks."""
        torch.manual_seed(0)
        return Gpt(self.config).to(self.device)

    def batch(self, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens, and themselves as labels."""
        generator = torch.Generator().manual_seed(self.rank)
        shape = (samples, self.config.context)
        tokens = torch.randint(0, self.config.vocabulary, shape, generator=generator).to(self.device)
        return tokens, tokens

    def measured(self, samples: int, cache: str) -> Any:
        """The training problem of the job at a local batch, on rank 0."""
        model = self.model()
        options = qsync_opt.PlanningOptions(
            precisions=("BF16", "INT8") if self.device.type == "cuda" else ("BF16",),
            costs="steps",
            probes=0,
            memory=None if self.device.type == "cuda" or not self.rank else self.arguments.memory,
            device_type=self.kind,
            cache_dir=cache,
            compare=False,
            trial=False,
            slack=9.0,
            profile_seconds=8.0 if self.device.type == "cuda" else 1.0,
            progress=False,
        )
        plan = qsync_opt.auto_plan(
            model, self.batch(samples), optimizer=torch.optim.AdamW(model.parameters()), options=options
        )
        return plan.problem

    def step_ms(self, batches: Mapping[str, int], precisions: Plan) -> float:
        """Median milliseconds of a step on the slower worker."""
        model = self.model()
        own = precisions.devices[self.kind]
        if set(own.values()) - {"FP32"}:
            qsync_opt.apply(model, dict(own))
        parallel = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        samples, total = batches[self.kind], sum(batches.values())
        inputs = self.batch(samples)

        def step() -> None:
            optimizer.zero_grad()
            loss = parallel(*inputs)
            qsync_opt.global_mean(loss, samples, total=total).backward()
            optimizer.step()

        for _ in range(3):
            step()
        blocks = []
        for _ in range(BLOCKS):
            gather_json(0)  # all begin together
            self._wait()
            began = time.perf_counter()
            for _ in range(STEPS):
                step()
            self._wait()
            blocks.append(max(gather_json((time.perf_counter() - began) / STEPS * 1e3)))
        return statistics.median(blocks)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def wanted_bytes(text: str) -> int:
    """Bytes of a quantity such as ``"2 GiB"``."""
    number, unit = text.split()
    return int(float(number) * {"MiB": 2**20, "GiB": 2**30}[unit])


def ways(anchors: Mapping[int, Any], batch: int) -> tuple[dict[str, tuple[SharesProblem, SharesPlan]], dict[str, Any]]:
    """Each way's problem and plan, and what the methods say of the joint problem."""
    total = 2 * batch
    joint = build_shares_problem(anchors, total, slack=SLACK, time_limit_s=20)
    equal = build_shares_problem(
        anchors, total, candidates={kind: (batch,) for kind in TYPES}, slack=SLACK, time_limit_s=20
    )
    solutions = {method: qsync_opt.solve(joint, method, time_limit_s=20) for method in ("default", "exact")}
    quickest = fastest_shares(joint, time_limit_s=20)
    solved = qsync_opt.solve(equal)
    best = solutions["default"]
    assert best.plan is not None, best.reason
    assert quickest is not None
    plans = {"joint plan": (joint, best.plan)}
    full = uniform_plan(joint.first, "FP32")
    plans["equal batches, FP32"] = (equal, SharesPlan(batches=dict.fromkeys(TYPES, batch), precisions=full))
    if solved.plan is not None:
        plans["equal batches, plan"] = (equal, solved.plan)
    facts = {
        "global_batch": total,
        "slack": SLACK,
        "fastest_ms": quickest.iteration_ns / 1e6,
        "fastest_bound_ms": quickest.bound_ns / 1e6,
        **{method: solution.to_json() for method, solution in solutions.items()},
    }
    return plans, facts


def work(rank: int, port: int, arguments: argparse.Namespace, folder: Path) -> None:
    """One worker: measure, agree on the plans of rank 0, train every way."""
    if not rank:  # what planning does, for whoever watches
        logging.basicConfig(level=logging.INFO, format="%(relativeCreated)8d ms %(name)s: %(message)s")
    worker = Worker(rank, arguments)
    separate = arguments.device == "cuda" and torch.cuda.device_count() > 1
    with (
        process_group(rank, 2, port, backend="nccl" if separate else "gloo", timeout_s=LIMIT_S[arguments.device]),
        partition(worker.device, worker.multiprocessors),
    ):
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as cache:
            sizes = (arguments.batch // 2, arguments.batch)
            anchors = {samples: worker.measured(samples, cache) for samples in sizes}
        measuring_s = time.perf_counter() - began
        sent, facts, planned = None, {}, {}
        if not rank:
            planned, facts = ways(anchors, arguments.batch)
            sent = {name: plan.to_json() for name, (_, plan) in planned.items()}
        records = []
        for name, data in broadcast_json(sent).items():
            plan = SharesPlan.from_json(data)
            measured_ms = worker.step_ms(plan.batches, plan.precisions)
            if not rank:
                problem = planned[name][0]
                evaluation = evaluate_shares(replace(problem, latency_limit_ns=2**60), plan)
                records.append(
                    {
                        "way": name,
                        "batches": dict(plan.batches),
                        "predicted_ms": evaluation.iteration_ns / 1e6,
                        "measured_ms": measured_ms,
                        "error": evaluation.iteration_ns / 1e6 / measured_ms - 1,
                        "sensitivity": evaluation.objective,
                        "memory_kib": dict(evaluation.memory_kib),
                        "precisions": {
                            kind: {each: list(own.values()).count(each) for each in sorted(set(own.values()))}
                            for kind, own in plan.precisions.devices.items()
                        },
                    }
                )
                print(json.dumps(records[-1]), flush=True)
        multiprocessors = gather_json(worker.multiprocessors)
        if not rank:
            content = {**facts, "measuring_s": measuring_s, "multiprocessors": multiprocessors, "records": records}
            write_json(folder / "result.json", content)
        dist.barrier()


def asked(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Predicted beside measured steps, the bound, and the joint plan beside equal batches."""
    by_way = {record["way"]: record for record in content["records"]}
    joint = by_way["joint plan"]
    rows = [
        {
            "what": "joint plan: predicted over measured time of a step",
            "asked": f"within {ASKED:.0%}",
            "measured": round(joint["error"], 3),
            "met": abs(joint["error"]) <= ASKED,
            "note": f"{joint['predicted_ms']:.2f} ms predicted, {content['fastest_bound_ms']:.2f} ms the bound of any "
            f"joint plan, {joint['measured_ms']:.2f} ms measured",
        },
        {
            "what": "joint plan: sensitivity by the default method over the proved bound",
            "asked": "<= 1.01",
            "measured": round((joint["sensitivity"] or 1e-300) / (content["exact"]["bound"] or 1e-300), 5),
            "met": joint["sensitivity"] <= 1.01 * content["exact"]["bound"] + 1e-300,
            "note": f"exact ended {content['exact']['termination']}",
        },
    ]
    for other in ("equal batches, FP32", "equal batches, plan"):
        if other in by_way:
            ratio = joint["measured_ms"] / by_way[other]["measured_ms"]
            rows.append(
                {
                    "what": f"joint plan: measured time of a step over that of {other}",
                    "asked": "< 1",
                    "measured": round(ratio, 3),
                    "met": ratio < 1,
                    "note": f"local batches {joint['batches']}",
                }
            )
    return rows


def main() -> None:
    """Start both workers and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=16, help="local batch where all are equal")
    parser.add_argument("--share", type=float, default=0.25, help="of a card's multiprocessors, for worker 1")
    parser.add_argument("--threads", type=int, default=2, help="of worker 0 on a CPU; worker 1 has one")
    parser.add_argument("--memory", help="limit of worker 1, such as '2 GiB'")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "hybrid-step.json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        rank, port, folder = arguments.worker.split(",", 2)
        work(int(rank), int(port), arguments, Path(folder))
        return
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        workers = [
            subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--worker", f"{rank},{port},{folder}"], cwd=HERE)
            for rank in range(2)
        ]
        try:
            statuses = [worker.wait(LIMIT_S[arguments.device]) for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
        if any(statuses):
            sys.exit(f"the workers ended with {statuses}")
        content = json.loads((Path(folder) / "result.json").read_text())
    on_card = arguments.device == "cuda"
    write_json(
        arguments.output,
        {
            **results_head(
                f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if on_card else platform.machine(),
                {"torch": torch.__version__},
            ),
            "asked": asked(content),
            **content,
        },
    )


if __name__ == "__main__":
    main()
