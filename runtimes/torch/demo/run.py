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
from qsync_opt.runtimes.torch.demo.launch import Event, Workers
from qsync_opt.runtimes.torch.demo.report import (
    DemoResult,
    Measured,
    print_plan,
    print_solved,
    with_trainer,
    write_report,
)
from qsync_opt.runtimes.torch.demo.settings import INFERENCE, TRAINER, WORKERS, DemoOptions, WorkerSpec
from qsync_opt.sensitivity import load_statistics, sensitivities
from qsync_opt.training import (
    Plan,
    Problem,
    Solution,
    build_problem,
    evaluate,
    replay,
    solve,
    uniform_plan,
    write_trace,
)

WORKER_MODULE = "qsync_opt.runtimes.torch.demo.worker"
TRAINER_MEMORY_BYTES = 64 << 30
"""The trainer's budget is no constraint of the demo."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiles:
    """What the workers measured: a profile per device type, and their network."""

    devices: Mapping[str, DeviceProfile]
    network: Network


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
    threads = [1] * len(WORKERS)
    with Workers(WORKER_MODULE, str(free_port()), threads=threads, log_folder=folder) as workers:
        run = _Run(folder, options, console, workers)
        with _step(console, "1/5 Capture: PyTorch in training mode -> ONNX -> operator graph"):
            graph = run.capture()
        with _step(console, "2/5 Measure: every operator at every precision, on both workers at once, and gradients"):
            profiles, table = run.measure(graph)
        with _step(console, "3/5 Problem and plan"):
            problem, whole = _problems(graph, profiles, table, options)
            problem.save(folder / "problem.json")
            _print_limits(problem, console)
            solved = [solve(problem, method=method, time_limit_s=60) for method in ("greedy", "exact")]
            print_solved(console, problem, solved)
            plan = _plan_of(solved[0])
            plan.save(folder / "plan.json")
            print_plan(console, problem, plan)
            write_trace(folder / "trace.json", replay(whole, with_trainer(whole, plan)))
        with _step(
            console, f"4/5 Train: {options.steps} steps on two workers (DistributedDataParallel, gloo), three times"
        ):
            measured = run.train_all(problem, plan)
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
    """Of this process and of those it has waited for."""
    return sum(os.times()[:4])


@contextmanager
def _step(console: Console, title: str) -> Iterator[None]:
    console.rule(f"[bold]{title}", align="left")
    started = time.perf_counter()
    yield
    console.print(f"  [dim]{time.perf_counter() - started:.1f} s[/dim]")


@dataclass(frozen=True, slots=True)
class _Run:
    """The parts of the demo that the workers do."""

    folder: Path
    options: DemoOptions
    console: Console
    workers: Workers

    def _do(self, phase: str, label: str, plan: Path | None = None) -> list[Event]:
        """Let both workers do a phase and show their progress, a bar for each that reports."""
        spec = WorkerSpec(phase=phase, folder=self.folder, label=label, options=self.options, plan=plan)
        path = self.folder / f"spec-{label.replace(' ', '-')}.json"
        spec.save(path)
        columns = TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with Progress(*columns, console=self.console) as bars:
            tasks: dict[int, TaskID] = {}

            def show(rank: int, event: Event) -> None:
                if rank not in tasks:
                    tasks[rank] = bars.add_task(WORKERS[rank], total=event["total"])
                description = f"{WORKERS[rank]:<9} {event['label'][:48]:<48}"
                bars.update(tasks[rank], completed=event["done"], total=event["total"], description=description)

            return self.workers.run(path, show)

    def capture(self) -> OpGraph:
        """Capture on every worker; the graph is the same on all."""
        graph = load_graph(self._do("capture", "capture")[0]["graph"])
        roles = ", ".join(f"{len(graph.by_role(role))} {role}" for role in Role)
        self.console.print(f"  {len(graph)} operators ({roles}), {len(graph.parameters)} parameters")
        return graph

    def measure(self, graph: OpGraph) -> tuple[Profiles, Mapping[str, Mapping[str, float]]]:
        """Profiles of both device types and the network; sensitivity of each operator in each precision."""
        results = self._do("measure", "measure")
        devices = {name: load_profile(result["profile"]) for name, result in zip(WORKERS, results, strict=True)}
        # Two workers exchange two messages of half the size each: the fit is of the whole all-reduce.
        network = Network(
            latency_s=results[0]["latency_s"] / 2,
            bandwidth_bytes_per_s=results[0]["bandwidth_bytes_per_s"],
            source=f"measured between the workers, relative residual {results[0]['network_residual']:.2f}",
        )
        for name, device in devices.items():
            self.console.print(f"  {name}: {device.describe()}")
        self.console.print(
            f"  network: {network.latency_s * 2e6:.0f} us + {network.bandwidth_bytes_per_s / 1e9:.2f} GB/s "
            f"({network.source})"
        )
        statistics = load_statistics(results[WORKERS.index(TRAINER)]["statistics"])
        table = sensitivities(graph, statistics, devices[INFERENCE].formats)
        return Profiles(devices=devices, network=network), table

    def train_all(self, problem: Problem, plan: Plan) -> Mapping[str, Measured]:
        """Train in FP32, under the plan and in the uniform lowest precision, both workers each time."""
        uniform = uniform_plan(problem)
        uniform.save(self.folder / "plan-uniform-lowest.json")
        runs: dict[str, tuple[Plan | None, Path | None]] = {
            "FP32": (None, None),
            "plan": (plan, self.folder / "plan.json"),
            "uniform lowest": (uniform, self.folder / "plan-uniform-lowest.json"),
        }
        measured: dict[str, Measured] = {}
        for label, (used, path) in runs.items():
            trainer, inference = self._do("train", label, path)
            measured[label] = Measured(
                plan=used,
                alone_s={TRAINER: trainer["alone_s"], INFERENCE: inference["alone_s"]},
                others_share=max(trainer["others_share"], inference["others_share"]),
                pair_s=max(trainer["pair_s"], inference["pair_s"]),
                peak_bytes={TRAINER: trainer["peak_bytes"], INFERENCE: inference["peak_bytes"]},
                losses=tuple(trainer["losses"]),
                held_out_loss=trainer["held_out_loss"],
            )
        return measured


def _cluster(profiles: Profiles, budget_bytes: int, trainer: DeviceRole) -> Cluster:
    precisions = tuple(profiles.devices[INFERENCE].formats)
    return Cluster(
        name="demo",
        devices=(
            DeviceType(
                name=TRAINER,
                count=1,
                memory_limit_bytes=TRAINER_MEMORY_BYTES,
                precisions=("FP32",),
                role=trainer,
            ),
            DeviceType(name=INFERENCE, count=1, memory_limit_bytes=budget_bytes, precisions=precisions),
        ),
        network=profiles.network,
    )


def _problems(
    graph: OpGraph, profiles: Profiles, table: Mapping[str, Mapping[str, float]], options: DemoOptions
) -> tuple[Problem, Problem]:
    """The problem to solve, and the same with the trainer as a device of its own, for timelines and predictions."""

    def build(budget_bytes: int, trainer: DeviceRole, **limits: Any) -> Problem:
        cluster = _cluster(profiles, budget_bytes, trainer)
        return build_problem(graph, profiles.devices, table, cluster, **limits)

    # Only its memory is looked at, so nobody needs to find its latency limit.
    roomy = build(TRAINER_MEMORY_BYTES, DeviceRole.FIXED, latency_limit_ns=0)
    needs = {
        precision: evaluate(roomy, uniform_plan(roomy, precision)).memory_bytes[INFERENCE]
        for precision in ("INT8", "FP32")
    }
    budget_bytes = round(needs["INT8"] + options.memory_share * (needs["FP32"] - needs["INT8"]))
    problem = build(budget_bytes, DeviceRole.FIXED)
    whole = build(budget_bytes, DeviceRole.PLANNED, latency_limit_ns=problem.latency_limit_ns)
    return problem, whole


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


def _plan_of(solution: Solution) -> Plan:
    if solution.plan is None:
        raise SolverError(f"method {solution.method!r} found no plan: {solution.reason}")
    return solution.plan
