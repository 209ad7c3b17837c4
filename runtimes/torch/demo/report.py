"""What the demo found: tables on the screen and the same as a Markdown file."""

from __future__ import annotations

import importlib.metadata
import platform
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from qsync_opt.io import write_text
from qsync_opt.runtimes.torch.demo.settings import INFERENCE, TRAINER, WORKERS, DemoOptions
from qsync_opt.training import Evaluation, Plan, Problem, Solution, evaluate, uniform_plan

Row = Sequence[str]


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


def _table(title: str, header: Row, rows: Iterable[Row]) -> Table:
    table = Table(title=title, title_justify="left")
    for position, name in enumerate(header):
        table.add_column(name, justify="left" if position == 0 else "right")
    for row in rows:
        table.add_row(*row)
    return table


def _markdown(header: Row, rows: Iterable[Row]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _error(predicted: float, measured: float) -> str:
    return f"{100 * (predicted - measured) / measured:+.1f} %"


SOLVED_HEADER = ("method", "sensitivity", "bound", "gap", "iteration ms", "memory MiB", "status", "seconds")


def solved_rows(problem: Problem, solved: Iterable[Solution]) -> list[Row]:
    """Methods side by side, and the uniform plans that need no solver."""
    rows = [
        _solved_row(s.method, s.evaluation, s.bound, s.gap, s.termination.value, s.build_seconds + s.solve_seconds)
        for s in solved
        if s.evaluation is not None
    ]
    for label, precision in (("uniform FP32", "FP32"), ("uniform lowest", None)):
        evaluation = evaluate(problem, uniform_plan(problem, precision))
        status = "fits" if evaluation.feasible else "breaks a limit"
        rows.append(_solved_row(label, evaluation, None, None, status, None))
    return rows


def _solved_row(
    label: str, evaluation: Evaluation, bound: float | None, gap: float | None, status: str, seconds: float | None
) -> Row:
    return (
        label,
        f"{evaluation.objective:.4g}",
        "" if bound is None else f"{bound:.4g}",
        "" if gap is None else f"{100 * gap:.2f} %",
        f"{evaluation.iteration_ns / 1e6:.1f}",
        f"{evaluation.memory_kib[INFERENCE] / 1024:.1f}",
        status,
        "" if seconds is None else f"{seconds:.2f}",
    )


PLAN_HEADER = ("operator", "precision", "sensitivity", "forward + backward ms")


def plan_rows(problem: Problem, plan: Plan) -> list[Row]:
    """The plan operator by operator, with what the chosen precision costs."""
    device = problem.device(INFERENCE)
    rows: list[Row] = []
    for operator in problem.adjustable:
        precision = plan.devices[INFERENCE][operator.name]
        cost = device.operators[operator.name][precision]
        time_ms = (cost.forward_ns + cost.backward_ns) / 1e6
        rows.append((operator.name, precision, f"{cost.sensitivity:.3g}", f"{time_ms:.2f}"))
    return rows


MEASURED_HEADER = ("run", "worker", "predicted ms", "measured ms", "error", "predicted MiB", "measured MiB", "error")


def measured_rows(result: DemoResult) -> list[Row]:
    """Predicted beside measured: each worker alone (no communication, processor time) and the pair (wall clock)."""
    rows: list[Row] = []
    for label, run in result.measured.items():
        evaluation = evaluate(result.whole, with_trainer(result.whole, run.plan))
        for worker in WORKERS:
            device = evaluation.devices[worker]
            predicted_ms = (device.backward_end_ns + result.whole.optimizer_ns) / 1e6
            measured_ms = 1e3 * run.alone_s[worker]
            predicted_mib, measured_mib = device.memory_kib / 1024, run.peak_bytes[worker] / 2**20
            rows.append(
                (
                    label,
                    worker,
                    f"{predicted_ms:.1f}",
                    f"{measured_ms:.1f}",
                    _error(predicted_ms, measured_ms),
                    f"{predicted_mib:.1f}",
                    f"{measured_mib:.1f}",
                    _error(predicted_mib, measured_mib),
                )
            )
        predicted_ms, measured_ms = evaluation.iteration_ns / 1e6, 1e3 * run.pair_s
        error = _error(predicted_ms, measured_ms)
        rows.append((label, "both (DDP)", f"{predicted_ms:.1f}", f"{measured_ms:.1f}", error, "", "", ""))
    return rows


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


LOSS_HEADER = ("run", "first loss", "last loss (mean of 10)", "held-out loss")


def loss_rows(result: DemoResult) -> list[Row]:
    """Training loss of the first worker and held-out loss, in nats per byte."""
    return [
        (
            label,
            f"{run.losses[0]:.3f}",
            f"{sum(run.losses[-10:]) / len(run.losses[-10:]):.4f}",
            f"{run.held_out_loss:.4f}",
        )
        for label, run in result.measured.items()
    ]


def print_solved(console: Console, problem: Problem, solved: Iterable[Solution]) -> None:
    """Show methods side by side."""
    console.print(_table("greedy beside exact", SOLVED_HEADER, solved_rows(problem, solved)))


def print_plan(console: Console, problem: Problem, plan: Plan) -> None:
    """Show the plan operator by operator."""
    chosen = Counter(plan.devices[INFERENCE].values())
    summary = ", ".join(f"{count} x {precision}" for precision, count in chosen.most_common())
    console.print(_table(f"plan of the inference device: {summary}", PLAN_HEADER, plan_rows(problem, plan)))


def result_json(result: DemoResult) -> dict[str, Any]:
    """Everything that the tables show, as plain JSON data: times in nanoseconds, memory in bytes, losses in nats."""
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
    return {
        "format": "qsync-demo/1",
        "seconds": result.seconds,
        "processor_seconds": result.processor_seconds,
        "steps": result.options.steps,
        "latency_limit_ns": result.problem.latency_limit_ns,
        "memory_limit_kib": result.problem.device(INFERENCE).memory_limit_kib,
        "solved": [solution.to_json() for solution in result.solved],
        "plan": result.plan.to_json(),
        "runs": runs,
    }


def write_report(folder: Path, result: DemoResult, console: Console) -> None:
    """Show what was measured and write ``report.md``."""
    console.print(_table("predicted beside measured", MEASURED_HEADER, measured_rows(result)))
    if words := others_words(result):
        console.print(f"  {words}")
    console.print(_table("training", LOSS_HEADER, loss_rows(result)))
    device, model = result.problem.device(INFERENCE), result.options.model
    parts = [
        "# Demo report\n",
        f"A GPT of {model.layers} layers and width {model.width}, trained for {result.options.steps} steps on the "
        "sources of Python's standard library by two workers with one thread each: `trainer` in FP32, `inference` "
        "under the plan.\n",
        f"torch {importlib.metadata.version('torch')}, Python {platform.python_version()}, {platform.machine()}; "
        f"{result.seconds:.0f} s in all, {result.processor_seconds:.0f} s of processor time.\n",
        f"Memory budget of `inference`: {device.memory_limit_kib / 1024:.1f} MiB. Latency limit: "
        f"{result.problem.latency_limit_ns / 1e6:.1f} ms.\n",
        "## Solved\n",
        _markdown(SOLVED_HEADER, solved_rows(result.problem, result.solved)),
        "## Predicted beside measured\n",
        "Workers alone in processor time, the pair by the wall clock"
        + (f": {words}.\n" if (words := others_words(result)) else ".\n"),
        _markdown(MEASURED_HEADER, measured_rows(result)),
        "## Training\n",
        "Losses are in nats per byte; the held-out text was not trained on.\n",
        _markdown(LOSS_HEADER, loss_rows(result)),
        "## Plan\n",
        _markdown(PLAN_HEADER, plan_rows(result.problem, result.plan)),
        "## Files\n",
        "`plan.json`, `problem.json`, `trace.json` (open it in https://ui.perfetto.dev), `plan-uniform-lowest.json`, "
        "`profile-*.json`, `graph.json`, `statistics.json`.\n",
    ]
    write_text(folder / "report.md", "\n".join(parts))
    console.print(
        f"  {result.seconds:.0f} s in all, {result.processor_seconds:.0f} s of processor time; "
        f"wrote {folder}/plan.json, problem.json, trace.json, report.md"
    )
