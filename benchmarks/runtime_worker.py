"""One worker of ``runtime.py``: runs a part and, on rank 0, writes a record per line."""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parent))

from runtime_in_turn import in_turn
from runtime_throughput import throughput
from runtime_training import Run, Task, Worker, everywhere, gpt

import qsync_opt
from qsync_opt.runtimes.torch.ddp import process_group
from qsync_opt.runtimes.torch.job_ways import Way


def overhead(worker: Worker, name: str) -> None:
    make, batch = gpt(worker)
    rounds, steps = (40, 5) if worker.device.type == "cuda" else (20, 3)
    graph = qsync_opt.capture(make().to(worker.device), (), batch)
    entries = {precision: everywhere(graph, precision, worker.device) for precision in ("FP32", "BF16")}
    # A plan of BF16 alone is handed out to run under autocast; operator by operator it may be asked for.
    for precision, autocast, carried_out in (
        ("FP32", None, None),
        ("BF16", torch.bfloat16, "BF16"),
        ("BF16", torch.bfloat16, None),
    ):
        plan = Way(name=precision, precisions=entries[precision], autocast=carried_out)
        runs = {
            "plain": Run(worker, make, batch, autocast=autocast),
            "plan": Run(worker, make, batch, plan=plan),
        }
        times: dict[str, list[float]] = {label: [] for label in runs}
        worked: dict[str, list[float]] = {label: [] for label in runs}
        for run in runs.values():
            run.timed(steps)
        for index in range(rounds):  # in turn, and each first as often as the other
            for label in sorted(runs, reverse=bool(index % 2)):
                began = time.process_time()
                times[label].append(runs[label].timed(steps))
                worked[label].append(time.process_time() - began)
        for run in runs.values():
            run.close()
        peaks = {}
        for label in times:
            how: dict[str, Any] = {"plan": plan} if label == "plan" else {"autocast": autocast}
            run = Run(worker, make, batch, **how)
            run.timed(2)
            peaks[label] = max(run.peaks(), default=0)
            run.close()
        medians = {label: statistics.median(found) for label, found in times.items()}
        ratios = sorted(b / a for a, b in zip(times["plain"], times["plan"], strict=True))
        worker.write(
            model=name,
            precision=precision,
            carried_out="by torch.autocast" if carried_out else "operator by operator",
            plain_is="DDP in FP32" if autocast is None else "DDP under BF16 autocast",
            workers=worker.world,
            plain_ms=1e3 * medians["plain"],
            plan_ms=1e3 * medians["plan"],
            slower=statistics.median(ratios) - 1,
            slower_in_processor_time=_ratio(worked) - 1 if worker.device.type == "cpu" else None,
            slower_quartiles=[ratios[len(ratios) // 4] - 1, ratios[3 * len(ratios) // 4] - 1],
            plain_peak_bytes=peaks["plain"] or None,
            plan_peak_bytes=peaks["plan"] or None,
            more_memory=peaks["plan"] / peaks["plain"] - 1 if peaks["plain"] else None,
        )


def _ratio(worked: dict[str, list[float]]) -> float:
    """Processor time of the plan over that of plain training: what a busy host does not blur."""
    return statistics.median(b / a for a, b in zip(worked["plain"], worked["plan"], strict=True))


def soak(worker: Worker, name: str, total: int) -> None:
    make, batch = gpt(worker, layers=4)
    options = worker.options(f"soak-{name}", precisions=("INT8", "BF16", "FP32"))
    plan = qsync_opt.auto_plan(make().to(worker.device), batch, options=options)
    run = Run(worker, make, batch, plan=plan)
    needed = max(plan.memory_bytes.values())
    limit = [needed]
    # The budget of the last worker swings, so that every look finds something to plan for.
    adapter = qsync_opt.PlanAdapter(
        run.parallel, plan, options=options, every=100, memory=lambda: limit[0], tolerance=0.01
    )
    blocks, moved = [], 0
    for _ in range(total // 100):
        if worker.rank == worker.world - 1:
            limit[0] = int((1.5 if limit[0] < 1.4 * needed else 1.2) * needed)
        predicted, began = adapter.plan.expected_ns or adapter.plan.iteration_ns, time.perf_counter()
        for _ in range(99):
            run.step()
            adapter.step()
        worker.wait()
        measured_ns = (time.perf_counter() - began) / 99 * 1e9
        run.step()
        worker.wait()
        began = time.perf_counter()
        moved += adapter.step() is not None
        replan_s = time.perf_counter() - began
        blocks.append((measured_ns, predicted, replan_s, worker.memory_bytes(), worker.resident_bytes()))
        if len(blocks) % 5 == 0 or 100 * len(blocks) == total:  # whatever comes, something is kept
            _write_soak(worker, name, adapter, blocks, moved)
    run.close()


def _write_soak(
    worker: Worker,
    name: str,
    adapter: qsync_opt.PlanAdapter,
    blocks: list[tuple[float, int, float, int, int]],
    moved: int,
) -> None:
    rest = blocks[1:] or blocks  # the first warms up
    third = max(1, len(rest) // 3)
    first, last = (statistics.median(b[0] for b in part) for part in (rest[:third], rest[-third:]))
    worker.write(
        model=name,
        workers=worker.world,
        steps=100 * len(blocks),
        replanned=len(blocks),
        plans_that_differed=moved,
        taken=dict(adapter.plan.taken),
        replan_s=statistics.median(block[2] for block in blocks),
        replan_s_most=max(block[2] for block in blocks),
        first_third_ms=first / 1e6,
        last_third_ms=last / 1e6,
        drift=last / first - 1,
        predicted_ms=statistics.median(block[1] for block in rest) / 1e6,
        memory_after_warm_up_bytes=rest[0][3],
        memory_at_the_end_bytes=rest[-1][3],
        memory_growth_bytes=rest[-1][3] - rest[0][3],
        resident_growth_bytes=rest[-1][4] - rest[0][4],
        blocks_ms=[round(block[0] / 1e6, 3) for block in blocks],
        blocks_predicted_ms=[round(block[1] / 1e6, 3) for block in blocks],
    )


def main() -> None:
    data = json.loads(sys.argv[1])
    task = Task(**{**data, "multiprocessors": tuple(data["multiprocessors"])})
    worker = Worker(task, int(sys.argv[2]))
    group = process_group(worker.rank, worker.world, task.port, backend=worker.backend, timeout_s=600)
    with group, worker.compute():
        if task.part == "overhead":
            overhead(worker, task.model)
        elif task.part == "soak":
            soak(worker, task.model, task.steps)
        elif worker.world == 1:
            in_turn(worker, task.model)
        else:
            throughput(worker, task.model)


if __name__ == "__main__":
    main()
