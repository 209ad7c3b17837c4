"""What the demo measured: tables on the screen and the same as a Markdown file."""

from __future__ import annotations

import importlib.metadata
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from qsync_opt.io import write_text
from qsync_opt.runtimes.torch.demo.settings import INFERENCE, TRAINER, WORKERS, DemoOptions
from qsync_opt.training import Plan, Problem, Solution, evaluate, uniform_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One training run; losses are per step, in nats per byte. ``plan`` is the inference device's, None for FP32.

    ``alone_s`` is processor time, ``pair_s`` the wall clock's; ``others_share`` is the part of the wall clock's time in
    which other processes had the processors while each worker ran alone.
    """

    plan: Plan | None
    alone_s: Mapping[str, float]
    others_share: float
    pair_s: float
    peak_bytes: Mapping[str, int]
    losses: tuple[float, ...]
    held_out_loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """Everything predicted and measured. ``whole`` is the problem with the trainer as a device of its own."""

    options: DemoOptions
    problem: Problem
    whole: Problem
    solved: tuple[Solution, ...]
    plan: Plan
    measured: Mapping[str, Measured]
    seconds: float
    processor_seconds: float


def with_trainer(whole: Problem, plan: Plan | None) -> Plan:
    """A plan for both workers: the trainer in FP32, the inference device as planned (None: FP32)."""
    fp32 = {operator.name: "FP32" for operator in whole.adjustable}
    inference = fp32 if plan is None else plan.devices[INFERENCE]
    return Plan(problem=whole.name, devices={TRAINER: fp32, INFERENCE: inference})


class ReportTable(NamedTuple):
    """A table for the screen and for the report; its rows are as long as its header."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def shown(self) -> Table:
        """For the screen."""
        table = Table(title=self.title, title_justify="left")
        for position, name in enumerate(self.header):
            table.add_column(name, justify="right" if position else "left")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        """For the report, without the title."""
        lines = [self.header, ["---"] * len(self.header), *self.rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def solved_table(problem: Problem, solved: Sequence[Solution]) -> ReportTable:
    """Methods side by side, and the uniform plans that need no solver."""
    entries = []
    for s in solved:
        bound = "" if s.bound is None else f"{s.bound:.4g}"
        gap = "" if s.gap is None else f"{100 * s.gap:.2f} %"
        seconds = f"{s.build_seconds + s.solve_seconds:.2f}"
        entries.append((s.method, s.evaluation, bound, gap, s.termination.value, seconds))
    for label, precision in (("uniform FP32", "FP32"), ("uniform lowest", None)):
        evaluation = evaluate(problem, uniform_plan(problem, precision))
        entries.append((label, evaluation, "", "", "fits" if evaluation.feasible else "breaks a limit", ""))
    rows = [
        (
            label,
            f"{evaluation.objective:.4g}",
            bound,
            gap,
            f"{evaluation.iteration_ns / 1e6:.1f}",
            f"{evaluation.memory_kib[INFERENCE] / 1024:.1f}",
            status,
            seconds,
        )
        for label, evaluation, bound, gap, status, seconds in entries
        if evaluation is not None
    ]
    header = ("method", "sensitivity", "bound", "gap", "iteration ms", "memory MiB", "status", "seconds")
    return ReportTable("greedy beside exact", header, rows)


def plan_table(problem: Problem, plan: Plan) -> ReportTable:
    """The plan operator by operator, with what the chosen precision costs."""
    device, precisions = problem.device(INFERENCE), plan.devices[INFERENCE]
    rows = []
    for operator in problem.adjustable:
        cost = device.operators[operator.name][precisions[operator.name]]
        time_ms = (cost.forward_ns + cost.backward_ns) / 1e6
        rows.append((operator.name, precisions[operator.name], f"{cost.sensitivity:.3g}", f"{time_ms:.2f}"))
    summary = ", ".join(f"{count} x {precision}" for precision, count in Counter(precisions.values()).most_common())
    header = ("operator", "precision", "sensitivity", "forward + backward ms")
    return ReportTable(f"plan of the inference device: {summary}", header, rows)


def compared_runs(result: DemoResult) -> dict[str, dict[str, Any]]:
    """Each run, predicted beside measured: times in nanoseconds, memory in bytes, losses in nats, as JSON data.

    Each worker is alone (no communication, processor time), the pair is timed by the wall clock.
    """
    runs = {}
    for label, run in result.measured.items():
        evaluation = evaluate(result.whole, with_trainer(result.whole, run.plan))
        workers = {
            worker: {
                "predicted_ns": evaluation.devices[worker].backward_end_ns + result.whole.optimizer_ns,
                "measured_ns": round(1e9 * run.alone_s[worker]),
                "predicted_bytes": evaluation.memory_bytes[worker],
                "measured_bytes": run.peak_bytes[worker],
            }
            for worker in WORKERS
        }
        runs[label] = {
            "workers": workers,
            "predicted_ns": evaluation.iteration_ns,
            "measured_ns": round(1e9 * run.pair_s),
            "others_share": run.others_share,
            "first_loss": run.losses[0],
            "last_loss": run.losses[-1],
            "held_out_loss": run.held_out_loss,
        }
    return runs


def measured_table(result: DemoResult) -> ReportTable:
    """Predicted beside measured, as `compared_runs`."""

    def beside(entry: Mapping[str, float], kind: str, unit: float) -> tuple[str, str, str]:
        predicted, measured = entry[f"predicted_{kind}"], entry[f"measured_{kind}"]
        error = 100 * (predicted - measured) / measured
        return f"{predicted / unit:.1f}", f"{measured / unit:.1f}", f"{error:+.1f} %"

    rows: list[Sequence[str]] = []
    for label, run in compared_runs(result).items():
        for worker, entry in run["workers"].items():
            rows.append((label, worker, *beside(entry, "ns", 1e6), *beside(entry, "bytes", 2**20)))
        rows.append((label, "both (DDP)", *beside(run, "ns", 1e6), "", "", ""))
    header = ("run", "worker", "predicted ms", "measured ms", "error", "predicted MiB", "measured MiB", "error")
    return ReportTable("predicted beside measured", header, rows)


QUIET_SHARE = 0.05
"""What a system does by the side on a machine that nobody else uses."""


def others_words(result: DemoResult) -> str:
    """What to know about the measured times if other processes ran meanwhile; empty on a quiet machine."""
    share = max(run.others_share for run in result.measured.values())
    if share <= QUIET_SHARE:
        return ""
    return (
        f"other processes had the processors for up to {100 * share:.0f} % of the time; predictions are for a machine "
        "with nothing else to do, so the pair, timed by the wall clock, took longer"
    )


def loss_table(result: DemoResult) -> ReportTable:
    """Training loss of the first worker and held-out loss, in nats per byte."""
    rows = [
        (label, f"{run.losses[0]:.3f}", f"{fmean(run.losses[-10:]):.4f}", f"{run.held_out_loss:.4f}")
        for label, run in result.measured.items()
    ]
    return ReportTable("training", ("run", "first loss", "last loss (mean of 10)", "held-out loss"), rows)


def result_json(result: DemoResult) -> dict[str, Any]:
    """Everything that the tables show, as plain JSON data: times in nanoseconds, memory in bytes, losses in nats."""
    return {
        "format": "qsync-demo/1",
        "seconds": result.seconds,
        "processor_seconds": result.processor_seconds,
        "steps": result.options.steps,
        "latency_limit_ns": result.problem.latency_limit_ns,
        "memory_limit_kib": result.problem.device(INFERENCE).memory_limit_kib,
        "solved": [solution.to_json() for solution in result.solved],
        "plan": result.plan.to_json(),
        "runs": compared_runs(result),
    }


def write_report(folder: Path, result: DemoResult, console: Console) -> None:
    """Show what was measured and write ``report.md``."""
    measured, losses, words = measured_table(result), loss_table(result), others_words(result)
    console.print(measured.shown())
    if words:
        console.print(f"  {words}")
    console.print(losses.shown())
    device, model = result.problem.device(INFERENCE), result.options.model
    spent = f"{result.seconds:.0f} s in all, {result.processor_seconds:.0f} s of processor time"
    parts = [
        "# Demo report\n",
        f"A GPT of {model.layers} layers and width {model.width}, trained for {result.options.steps} steps on the "
        "sources of Python's standard library by two workers with one thread each: `trainer` in FP32, `inference` "
        "under the plan.\n",
        f"torch {importlib.metadata.version('torch')}, Python {platform.python_version()}, {platform.machine()}; "
        f"{spent}.\n",
        f"Memory budget of `inference`: {device.memory_limit_kib / 1024:.1f} MiB. Latency limit: "
        f"{result.problem.latency_limit_ns / 1e6:.1f} ms.\n",
        "## Solved\n",
        solved_table(result.problem, result.solved).markdown(),
        "## Predicted beside measured\n",
        f"Workers alone in processor time, the pair by the wall clock{f': {words}' if words else ''}.\n",
        measured.markdown(),
        "## Training\n",
        "Losses are in nats per byte; the held-out text was not trained on.\n",
        losses.markdown(),
        "## Plan\n",
        plan_table(result.problem, result.plan).markdown(),
        "## Files\n",
        "`plan.json`, `problem.json`, `trace.json` (open it in https://ui.perfetto.dev), `plan-uniform-lowest.json`, "
        "`profile-*.json`, `graph.json`, `statistics.json`.\n",
    ]
    write_text(folder / "report.md", "\n".join(parts))
    console.print(f"  {spent}; wrote {folder}/plan.json, problem.json, trace.json, report.md")
