"""The demo from end to end: capture, measure, plan, train, compare, report.

All that needs torch is done by the workers, so this process does not load it and the first line is shown at once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from qsync_opt.cluster import Cluster, DeviceRole, DeviceType, Network
from qsync_opt.costs import DeviceProfile, load_profile
from qsync_opt.errors import SolverError
from qsync_opt.model import OpGraph, Role, load_graph
from qsync_opt.runtimes.host import free_port
from qsync_opt.runtimes.torch.ddp import Workers
from qsync_opt.runtimes.torch.demo.report import (
    DemoResult,
    Measured,
    plan_table,
    solved_table,
    with_trainer,
    write_report,
)
from qsync_opt.runtimes.torch.demo.settings import INFERENCE, TRAINER, WORKERS, DemoOptions
from qsync_opt.sensitivity import load_statistics, sensitivities
from qsync_opt.training import Plan, Problem, build_problem, evaluate, replay, solve, uniform_plan, write_trace

WORKER_MODULE = "qsync_opt.runtimes.torch.demo.worker"
TRAINER_MEMORY_BYTES = 64 << 30
"""The trainer's budget is no constraint of the demo."""


def run_demo(folder: Path, options: DemoOptions, console: Console) -> DemoResult:
    """Run every step, print what it finds, and write the files.

    Args:
        folder: Where ``problem.json``, ``plan.json``, ``trace.json``, ``report.md`` and the profiles go.
        options: Sizes.
        console: Where to print.

    Returns:
        Everything that was predicted and measured.

    Raises:
        WorkerError: A worker process failed.
        ProblemError: No plan fits (the demo's budget lies between what two known plans need, so this is a fault).
    """
    folder.mkdir(parents=True, exist_ok=True)
    started, worked = time.perf_counter(), _processor_seconds()
    with Workers(WORKER_MODULE, free_port(), folder, options, count=len(WORKERS), log_folder=folder) as workers:
        run = _Run(folder, console, workers)
        with _step(console, "1/5 Capture: PyTorch in training mode -> ONNX -> operator graph"):
            graph = run.capture()
        with _step(console, "2/5 Measure: every operator at every precision, on both workers at once, and gradients"):
            profiles, network, table = run.measure(graph)
        with _step(console, "3/5 Problem and plan"):
            problem, whole = _problems(graph, profiles, network, table, options.memory_share)
            problem.save(folder / "problem.json")
            _print_limits(problem, console)
            solved = [solve(problem, method=method, time_limit_s=60) for method in ("greedy", "exact")]
            console.print(solved_table(problem, solved).shown())
            plan = solved[0].plan
            if plan is None:
                raise SolverError(f"method {solved[0].method!r} found no plan: {solved[0].reason}")
            console.print(plan_table(problem, plan).shown())
            write_trace(folder / "trace.json", replay(whole, with_trainer(whole, plan)))
        with _step(
            console, f"4/5 Train: {options.steps} steps on two workers (DistributedDataParallel, gloo), three times"
        ):
            plans = {"FP32": None, "plan": plan, "uniform lowest": uniform_plan(problem)}
            measured = {label: run.train(label, used) for label, used in plans.items()}
    with _step(console, "5/5 Report"):
        result = DemoResult(
            options=options,
            problem=problem,
            whole=whole,
            solved=tuple(solved),
            plan=plan,
            measured=measured,
            seconds=time.perf_counter() - started,
            processor_seconds=_processor_seconds() - worked,
        )
        write_report(folder, result, console)
    return result


def _processor_seconds() -> float:
    return sum(os.times()[:4])


@contextmanager
def _step(console: Console, title: str) -> Iterator[None]:
    console.rule(f"[bold]{title}", align="left")
    started = time.perf_counter()
    yield
    console.print(f"  [dim]{time.perf_counter() - started:.1f} s[/dim]")


@dataclass(frozen=True, slots=True)
class _Run:
    folder: Path
    console: Console
    workers: Workers

    def _do(self, *work: Any) -> list[Any]:
        columns = TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with Progress(*columns, console=self.console) as bars:
            tasks: dict[int, TaskID] = {}

            def show(rank: int, progress: tuple[int, int, str]) -> None:
                done, total, label = progress
                if rank not in tasks:
                    tasks[rank] = bars.add_task(WORKERS[rank], total=total)
                description = f"{WORKERS[rank]:<9} {label[:48]:<48}"
                bars.update(tasks[rank], completed=done, total=total, description=description)

            return self.workers.run(work, show)

    def capture(self) -> OpGraph:
        """Capture on every worker; the graph is the same on all."""
        graph = load_graph(self._do("capture")[0])
        roles = ", ".join(f"{len(graph.by_role(role))} {role}" for role in Role)
        self.console.print(f"  {len(graph)} operators ({roles}), {len(graph.parameters)} parameters")
        return graph

    def measure(self, graph: OpGraph) -> tuple[dict[str, DeviceProfile], Network, Mapping[str, Mapping[str, float]]]:
        """Profiles of both device types and the network; sensitivity of each operator in each precision."""
        results = dict(zip(WORKERS, self._do("measure"), strict=True))
        profiles = {name: load_profile(result["profile"]) for name, result in results.items()}
        first = results[TRAINER]
        # Two workers exchange two messages of half the size each: the fit is of the whole all-reduce.
        network = Network(
            latency_s=first["latency_s"] / 2,
            bandwidth_bytes_per_s=first["bandwidth_bytes_per_s"],
            source=f"measured between the workers, relative residual {first['relative_residual']:.2f}",
        )
        for name, profile in profiles.items():
            self.console.print(f"  {name}: {profile.describe()}")
        self.console.print(
            f"  network: {network.latency_s * 2e6:.0f} us + {network.bandwidth_bytes_per_s / 1e9:.2f} GB/s "
            f"({network.source})"
        )
        table = sensitivities(graph, load_statistics(first["statistics"]), profiles[INFERENCE].formats)
        return profiles, network, table

    def train(self, label: str, plan: Plan | None) -> Measured:
        """Train in FP32 or under a plan, which is written to a file for the workers."""
        path = None if plan is None else self.folder / ("plan.json" if label == "plan" else "plan-uniform-lowest.json")
        if plan is not None and path is not None:
            plan.save(path)
        results = dict(zip(WORKERS, self._do("train", label, path), strict=True))
        return Measured(
            plan=plan,
            alone_s={name: result["alone_s"] for name, result in results.items()},
            others_share=max(result["others_share"] for result in results.values()),
            pair_s=max(result["pair_s"] for result in results.values()),
            peak_bytes={name: result["peak_bytes"] for name, result in results.items()},
            losses=results[TRAINER]["losses"],
            held_out_loss=results[TRAINER]["held_out_loss"],
        )


def _problems(
    graph: OpGraph,
    profiles: Mapping[str, DeviceProfile],
    network: Network,
    table: Mapping[str, Mapping[str, float]],
    memory_share: float,
) -> tuple[Problem, Problem]:
    """The problem to solve, and the same with the trainer as a device of its own, for timelines and predictions."""
    precisions = tuple(profiles[INFERENCE].formats)

    def build(budget_bytes: int, role: DeviceRole, **limits: Any) -> Problem:
        roomy, fp32 = TRAINER_MEMORY_BYTES, ("FP32",)
        trainer = DeviceType(name=TRAINER, count=1, memory_limit_bytes=roomy, precisions=fp32, role=role)
        inference = DeviceType(name=INFERENCE, count=1, memory_limit_bytes=budget_bytes, precisions=precisions)
        cluster = Cluster(name="demo", devices=(trainer, inference), network=network)
        return build_problem(graph, profiles, table, cluster, **limits)

    # Only its memory is looked at, so nobody needs to find its latency limit.
    roomy = build(TRAINER_MEMORY_BYTES, DeviceRole.FIXED, latency_limit_ns=0)
    least, most = (evaluate(roomy, uniform_plan(roomy, p)).memory_bytes[INFERENCE] for p in ("INT8", "FP32"))
    budget_bytes = round(least + memory_share * (most - least))
    problem = build(budget_bytes, DeviceRole.FIXED)
    return problem, build(budget_bytes, DeviceRole.PLANNED, latency_limit_ns=problem.latency_limit_ns)


def _print_limits(problem: Problem, console: Console) -> None:
    device = problem.device(INFERENCE)
    evaluation = evaluate(problem, uniform_plan(problem, "FP32"))
    console.print(
        f"  memory budget of the inference device: {device.memory_limit_kib / 1024:.1f} MiB "
        f"(FP32 would need {evaluation.memory_bytes[INFERENCE] / 2**20:.1f} MiB)"
    )
    console.print(
        f"  latency limit: {problem.latency_limit_ns / 1e6:.1f} ms per iteration, that of the fastest plan that fits "
        f"(all FP32: {evaluation.iteration_ns / 1e6:.1f} ms)"
    )
