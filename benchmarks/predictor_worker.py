"""One worker of the predictor's benchmark: profiles itself, then trains with the other, case by case."""

from __future__ import annotations

import contextlib
import datetime
import gzip
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from predictor_cases import CAPTURED, FIXED, Combination, in_turn, plans
from predictor_measuring import (
    BLOCK_NS,
    Worker,
    agreed,
    capture_passes,
    clean,
    compiling_seconds,
    gathered,
    measure,
    stepper_of,
)
from predictor_partition import partition, refused
from predictor_peers import torch_estimates
from predictor_pinning import cores_of, pin_threads, without_collection
from predictor_prediction import MS, Predictor, said
from predictor_records import records_json
from torch._inductor.async_compile import AsyncCompile

import qsync_opt
from qsync_opt.kernels import ops
from qsync_opt.model import OpGraph, Role
from qsync_opt.runtimes.torch.ddp import CollectiveCost, measure_collectives, measure_slowdown, process_group
from qsync_opt.runtimes.torch.execution import ApplyOptions, apply, device_formats, undo
from qsync_opt.runtimes.torch.steps import RecordingOptions, Stepper, compiled_inside, record_steps
from qsync_opt.runtimes.torch.support import TrainingExample
from qsync_opt.steps import StepCosts, nearest_available

SPREAD = 0.02
"""Blocks of a case that differ by more are measured again."""
_FOR_RECORDING = 0.6
"""Share of the time left after which no mixed plan is begun to be recorded where plans are compiled."""
SIZES = tuple(1 << k for k in range(14, 29, 2))


def try_precisions(worker: Worker, combination: Combination, graph: OpGraph, count: int | None) -> None:
    """Find out which precisions do not run on this rank's device, and note them."""
    key = f"{combination.subject.name} on {count or 'whole'}"
    if key in worker.refused or count is None:
        return
    model, kwargs = combination.subject.build(worker.device)
    example = TrainingExample(model=model, kwargs=kwargs)

    def attempt(precision: str) -> Callable[[], None]:
        def run() -> None:
            available = precisions_of(combination, graph, worker.device, ())
            apply(model, {n: nearest_available(a, precision) for n, a in available.items()}, graph=graph)
            try:
                example.forward().backward()
            finally:
                undo(model)
                model.zero_grad()

        return run

    names = combination.allowed(device_formats(worker.device))
    worker.refused[key] = refused(worker.device, count, {name: attempt(name) for name in names})
    if "TF32" in worker.refused[key]:  # convolutions outside of plans use it by default
        torch.backends.cudnn.allow_tf32 = False
    if worker.refused[key]:
        worker.say(key, "refuses", worker.refused[key])


def profile(worker: Worker, combination: Combination, graph: OpGraph, count: int | None) -> dict[str, Any]:
    """Record this rank's steps on its own; what was recorded before is not recorded again."""
    key = f"{combination.subject.name} on {count or 'whole'}"
    if key in worker.costs:
        return {}
    failed = worker.refused.get(key, {})
    clean(worker.device)
    start = time.perf_counter()
    stepper = stepper_of(worker, combination, worker.solo)
    hardware = torch.cuda.get_device_name(worker.device) if worker.device.type == "cuda" else "cpu"
    name = None if count is None else f"{hardware}, {count}-SM partition"

    def quiet(_done: int, _total: int, label: str) -> None:
        worker.pinned = pin_threads(worker.cores, worker.device)
        if combination.compiled:  # what takes how long: every plan is compiled
            worker.say("recording", label)

    with without_collection():
        records = record_steps(
            stepper.example,
            graph,
            stepper.optimizer,
            precisions=[p for p in combination.allowed(device_formats(worker.device)) if p not in failed],
            mixed=2,
            options=RecordingOptions(
                warm_up=2, repeats=max(3, min(10, round(0.5e9 / stepper.steady_ns(2)))), traced=1, rounds=3
            ),
            progress=quiet,  # before every plan
            name=name,
            compiled=combination.compiled,
            # Compiling takes longer than all else: mixed plans must leave time for cases.
            budget_s=_FOR_RECORDING * max(0.0, worker.deadline - start) if combination.compiled else None,
        )
    worker.costs[key] = records.fit(graph)
    seconds = time.perf_counter() - start
    checks = worker.costs[key].checks
    if worker.keep is not None:
        path = worker.keep / f"records-{key.replace(' ', '-')}-r{worker.rank}.json.gz"
        path.write_bytes(gzip.compress(json.dumps(records_json(records)).encode(), 6))
    worker.say(
        key,
        f"profiled in {seconds:.1f} s; residuals",
        [f"{c.plan} {100 * c.time_error:+.1f}% {100 * c.memory_error:+.1f}%" for c in checks],
    )
    return {
        "what": key,
        "compiled": combination.compiled,
        "seconds": seconds,
        "pinned": worker.pinned,
        "partition": None if count is None else {"multiprocessors": count, "refused": failed},
        "plans": [
            {
                "plan": c.plan,
                "time_error": c.time_error,
                "memory_error": c.memory_error,
                "measured_ms": c.measured_ns / MS,
            }
            for c in checks
        ],
    }


def run_worker(
    rank: int,
    port: int,
    device_type: str,
    combinations: list[Combination],
    graphs: Path | None,
    deadline_s: float,
    output: Path,
    keep: Path | None,
    workers: int,
    peers_s: float,
) -> None:
    """Entry of one process."""
    torch.set_num_threads(1 if device_type == "cpu" else 4)
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    with process_group(rank, workers, port, backend="nccl" if device_type == "cuda" else "gloo", timeout_s=150.0):
        groups = [dist.new_group([r]) for r in range(workers)]
        worker = Worker(
            rank=rank,
            device=device,
            solo=groups[rank],
            deadline=time.perf_counter() + deadline_s,
            peers_s=peers_s,
            keep=keep,
            cores=cores_of(rank, workers) if device_type == "cuda" else [],
        )
        if any(combination.compiled for combination in combinations):
            AsyncCompile.warm_pool()  # its processes take the cores that this one has when it starts them
        if worker.cores:
            os.sched_setaffinity(0, worker.cores)
        collective = measure_collectives(SIZES, device=device) if workers > 1 else None
        found: dict[str, Any] = {
            "date": datetime.date.today().isoformat(),
            "device": device_type,
            "hardware": f"{workers} x {name_of(device)}",
            "workers": workers,
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "collectives": None if collective is None else collective.to_json(),
            "slowdowns": {},
            "profiles": [],
            "baselines": [],
            "cases": [],
            "skipped": [],
        }
        for combination in combinations:
            if agreed(worker, time.perf_counter() - worker.deadline) > 0:
                found["skipped"].append(combination.name)
                continue
            try:
                run_combination(worker, combination, combination.subject.graph(graphs), collective, found, output)
            except (RuntimeError, qsync_opt.QSyncError) as error:
                if workers > 1:  # the other one waits in a collective
                    raise
                found["skipped"].append(f"{combination.name}: {type(error).__name__}: {str(error)[:300]}")
                worker.say(found["skipped"][-1])
        if workers == 1:
            compare_with_torch(worker, combinations, graphs, found, output)
        elif device_type == "cuda":  # the worker under the plan asks them, rank 0 writes
            if rank == 0:
                output.write_text(json.dumps(found))
            cases = gathered(found["cases"] if rank == 0 else None, device)[0]
            if rank == workers - 1:
                compare_with_torch(worker, combinations, graphs, {"cases": cases}, None)
            found["cases"] = gathered(cases if rank == workers - 1 else None, device)[workers - 1]
        if rank == 0:
            output.write_text(json.dumps(found))


def name_of(device: torch.device) -> str:
    """Of the card, or of the processor's kind."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def precisions_of(
    combination: Combination, graph: OpGraph, device: torch.device, refused: Collection[str]
) -> dict[str, tuple[str, ...]]:
    """Precisions that plans may give each adjustable operator; those refused do not run on the device."""
    allowed = [p for p in combination.allowed(device_formats(device)) if p not in refused]
    return {
        o.name: tuple(p for p in allowed if ops.supports(o.op_type, p, device)) for o in graph.by_role(Role.ADJUSTABLE)
    }


def run_combination(
    worker: Worker,
    combination: Combination,
    graph: OpGraph,
    collective: CollectiveCost | None,
    found: dict[str, Any],
    output: Path,
) -> None:
    """Profile what is new, then predict and measure every case."""
    last = dist.get_world_size() - 1
    count = combination.multiprocessors if worker.rank == last else None
    key = f"{combination.subject.name} on {count or 'whole'}"
    try_precisions(worker, combination, graph, count)
    clean(worker.device)
    with partition(worker.device, count):
        # On the stream that trains: on a part of a card an all-reduce may find multiprocessors of its own.
        share = 0.0 if collective is None else measure_slowdown(collective, device=worker.device)
        slowdowns = [float(told) for told in gathered(share, worker.device)]
        profiled = profile(worker, combination, graph, count)
        found["profiles"] += [p for p in gathered(profiled, worker.device) if p]
        failed = gathered(worker.refused.get(key, {}), worker.device)[-1]
        both = [StepCosts.from_json(data, "worker") for data in gathered(worker.costs[key].to_json(), worker.device)]
        available = precisions_of(combination, graph, worker.device, failed)
        cases = plans(combination, graph, available)
        # A process group of NCCL keeps the buckets of a model that is gone until its next collective.
        dist.all_reduce(torch.zeros(1, device=worker.device), group=worker.solo)
        clean(worker.device)
        before = torch.cuda.memory_allocated(worker.device) if worker.device.type == "cuda" else 0
        stepper = stepper_of(worker, combination, None)
        predictor = Predictor(graph, both, collective, combination, device_formats(worker.device), failed, slowdowns)
        if worker.rank == 0:
            found["slowdowns"][f"{combination.subject.name} {combination.cluster}"] = slowdowns
            worker.say("computation beside all-reduces takes longer by", slowdowns, "of their time")
        if combination.solve:
            try:
                solved = gathered(predictor.solve() if worker.rank == 0 else None, worker.device)[0]
            except qsync_opt.QSyncError as error:
                solved = gathered(None, worker.device)[0]
                worker.say("no solver's plan:", error)
            if solved:
                cases["solver's"] = solved
        cases |= {f"{label}{CAPTURED}": cases[label] for label in combination.captured if label in cases}
        everything = precisions_of(combination, graph, worker.device, ())
        fixed = {n: nearest_available(a, FIXED) for n, a in everything.items()}
        measured: dict[str, list[list[dict[str, Any]]]] = {}
        # Every case twice, far apart: what the host's speed changes by meanwhile is seen as the spread. Where that is
        # more than an error that matters, up to four times.
        eager = [label for label in cases if not label.endswith(CAPTURED)]
        captured = [label for label in cases if label.endswith(CAPTURED)]
        rounds = [(0, label) for label in eager] + [(1, label) for label in eager[::-1]]
        if combination.compiled:  # compiling again for the second block would take longer than all steps do
            eager.sort(key=in_turn)
            rounds = [(2, label) for label in eager]
        rounds += [(0, label) for label in captured] + [(1, label) for label in captured[::-1]]
        while rounds:
            again, label = rounds.pop(0)
            if agreed(worker, time.perf_counter() - worker.deadline) > 0:
                found["skipped"].append(f"{combination.name} {label}, round {again + 1}")
                continue
            plan = cases[label]
            first = plan if combination.multiprocessors is None else fixed
            mine = plan if worker.rank == last else first
            apply(stepper.example.model, mine, graph=graph, options=ApplyOptions())
            compiling = compiled_inside(stepper.example.model) if combination.compiled else contextlib.nullcontext()
            try:
                with compiling:
                    refusal = capture_passes(worker, stepper) if label.endswith(CAPTURED) else ""
                    if combination.compiled:
                        worker.say(label, compiling_seconds(stepper))
                    durations = [BLOCK_NS / 2] * 2 if combination.compiled else [BLOCK_NS]
                    blocks = [] if refusal else [measure(worker, stepper, block_ns) for block_ns in durations]
            finally:
                undo(stepper.example.model)
            if refusal:
                found["skipped"].append(f"{combination.name} {label}: {refusal}")
                continue
            spread = 0.0
            for block in blocks:
                block["peak"] = max(0, block["peak"] - before)
                told = gathered(block, worker.device)
                if worker.rank == 0:
                    measured.setdefault(label, []).append(told)
            if worker.rank == 0:
                case = predictor.case(label, [first, plan][-last - 1 :], measured[label])
                found["cases"] = [c for c in found["cases"] if c["key"] != case["key"]] + [case]
                output.write_text(json.dumps(found))
                if again or worker.device.type == "cpu":
                    worker.say(said(combination, case))
                spread = case["spread"]
            if again in (1, 2) and not combination.compiled and agreed(worker, spread) > SPREAD:
                rounds.append((again + 1, label))
        if combination.solve and worker.device.type == "cuda" and not combination.compiled:
            for name, dtype in (("BF16 autocast", torch.bfloat16), ("FP16 autocast", torch.float16)):
                autocast(worker, combination, stepper, name, dtype, found)
        del stepper
        clean(worker.device)
    if worker.rank == 0:
        output.write_text(json.dumps(found))


def compare_with_torch(
    worker: Worker, combinations: list[Combination], graphs: Path | None, found: dict[str, Any], output: Path | None
) -> None:
    """Put what torch's estimators say beside uniform cases, while there is time: one of each combination, then more."""
    waiting = []
    for combination in combinations:
        if combination.compiled:
            continue
        own = [case for case in found["cases"] if case["key"].startswith(f"{combination.name} uniform")]
        own.sort(key=lambda case: ("BF16" not in case["plan"], "TF32" not in case["plan"]))
        waiting += [(rank, combination, case) for rank, case in enumerate(own) if "8" not in case["plan"]]
    for _, combination, case in sorted(waiting, key=lambda entry: entry[0]):
        if time.perf_counter() > worker.deadline + worker.peers_s:
            return
        graph = combination.subject.graph(graphs)
        key = f"{combination.subject.name} on {combination.multiprocessors or 'whole'}"
        available = precisions_of(combination, graph, worker.device, worker.refused.get(key, {}))
        plan = {name: nearest_available(p, case["plan"].removeprefix("uniform ")) for name, p in available.items()}
        whole = combination.multiprocessors is None
        with partition(worker.device, combination.multiprocessors):
            case |= torch_estimates(combination.subject, graph, plan, worker.device, whole=whole)
        if output is not None:
            output.write_text(json.dumps(found))
        worker.say(case["key"], {key: value for key, value in case.items() if key.startswith("torch")})
        clean(worker.device)


def autocast(
    worker: Worker, combination: Combination, stepper: Stepper, name: str, dtype: torch.dtype, found: dict[str, Any]
) -> None:
    """Throughput under plain autocast on rank 1, TF32 on rank 0: what a plan must not fall behind."""
    example = stepper.example
    torch.backends.cuda.matmul.allow_tf32 = worker.rank == 0

    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cuda", dtype=dtype, enabled=worker.rank == 1):
            return example.model(*args, **kwargs)

    class Cast(torch.nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs)

    wrapped = TrainingExample(model=Cast(), args=example.args, kwargs=example.kwargs)
    other = Stepper(wrapped, stepper.optimizer)
    other.device = stepper.device
    steps = measure(worker, other)["steps"]
    torch.backends.cuda.matmul.allow_tf32 = False
    if worker.rank == 0:
        row = {
            "model": combination.subject.name,
            "cluster": combination.cluster,
            "what": name,
            "measured_ms": statistics.median(steps) / MS,
        }
        found["baselines"].append(row)
        worker.say(row)
