"""One worker of ``runtime.py``: runs a part and, on rank 0, writes a record per line."""

from __future__ import annotations

import faulthandler
import json
import logging
import signal
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parent))

from runtime_in_turn import in_turn
from runtime_throughput import throughput
from runtime_training import Batch, Run, Task, Worker, everywhere, gpt, kinds
from torch import nn

import qsync_opt
from qsync_opt.runtimes.torch.ddp import broadcast_json, process_group
from qsync_opt.runtimes.torch.job import ExecutionMode, JobPlan, plan_job

# A plan of BF16 alone is handed out to run under autocast; operator by operator it may be asked for.
OVERHEADS = (("FP32", None, None), ("BF16", torch.bfloat16, "BF16"), ("BF16", torch.bfloat16, None))


def alone(
    worker: Worker, make: Callable[[], nn.Module], batch: Batch, precision: str, autocast: str | None
) -> ExecutionMode:
    """A plan of one precision."""
    graph = qsync_opt.capture(make().to(worker.device), (), batch)
    precisions = everywhere(kinds(graph), precision, worker.device)
    return ExecutionMode(name=precision, precisions=precisions, autocast=autocast)


def peak(worker: Worker, name: str) -> None:
    """Memory that a step needs at its peak, in a process that has done nothing else; the step's part names a case."""
    make, batch = gpt(worker)
    number, label = int(name[0]), name[1:]
    precision, autocast, carried_out = OVERHEADS[number]
    plan = alone(worker, make, batch, precision, carried_out)  # by both, so that both start from the same
    run = Run(worker, make, batch, **({"plan": plan} if label == "plan" else {"autocast": autocast}))
    run.timed(3)
    worker.write(case=name, peak_bytes=max(run.peaks(), default=0))
    run.close()


def overhead(worker: Worker, name: str) -> None:
    make, batch = gpt(worker)
    rounds, steps = (40, 5) if worker.device.type == "cuda" else (100, 3)
    for precision, autocast, carried_out in OVERHEADS:
        plan = alone(worker, make, batch, precision, carried_out)
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
        )


def _ratio(worked: dict[str, list[float]]) -> float:
    """Processor time of the plan over that of plain training: what a busy host does not blur."""
    return statistics.median(b / a for a, b in zip(worked["plain"], worked["plan"], strict=True))


def soak(worker: Worker, name: str, total: int) -> None:
    make, batch = gpt(worker)
    options = worker.options(f"soak-{name}", precisions=("INT8", "BF16", "FP32"), capture=worker.device.type == "cuda")
    plan = qsync_opt.auto_plan(make().to(worker.device), batch, options=options)
    run = Run(worker, make, batch, plan=plan)
    ample, tight = budgets(plan, options)
    looks = total // 100
    # The budget of the last worker swings a little at every look, so that each plans anew, and now and then so much
    # that another plan is needed.
    limits = [round((tight if SQUEEZED[5 * i // looks] else ample) * (1.0 - 0.02 * (i % 2))) for i in range(looks + 1)]
    limit = [limits[0]]
    adapter = qsync_opt.PlanAdapter(
        run.parallel, plan, options=options, every=100, memory=lambda: limit[0], tolerance=0.001
    )
    blocks, moved = [], 0
    for number in range(looks):
        if worker.rank == worker.world - 1:
            limit[0] = limits[number + 1]
        predicted, taken = adapter.plan.expected_ns or adapter.plan.iteration_ns, adapter.plan.taken
        run.step()  # captures where a new plan asks for it
        adapter.step()
        worker.wait()
        began = time.perf_counter()
        for _ in range(98):
            run.step()
            adapter.step()
        worker.wait()
        measured_ns = (time.perf_counter() - began) / 98 * 1e9
        run.step()
        worker.wait()
        began = time.perf_counter()
        moved += adapter.step() is not None
        replan_s = time.perf_counter() - began
        block = {
            "ms": measured_ns / 1e6,
            "predicted_ms": predicted / 1e6,
            "replan_s": replan_s,
            "taken": dict(taken),
            "memory_bytes": worker.memory_bytes(),
            "resident_bytes": worker.resident_bytes(),
        }
        blocks.append(block)
        if len(blocks) % 5 == 0 or len(blocks) == looks:  # whatever comes, something is kept
            _write_soak(worker, name, adapter, blocks, moved)
    run.close()


SQUEEZED = (False, True, False, True, False, False)
"""Whether memory is short, by fifths of a soak, and at its very end."""


def budgets(plan: JobPlan, options: qsync_opt.PlanningOptions) -> tuple[int, int]:
    """Two memory limits: one with room for every way that was timed, and one that needs another plan, if there is."""
    made, kind = plan.model, plan.device_type
    ample = tight = int(1.5 * max(plan.memory_bytes.values()))
    if made is not None:
        needs = sorted({mode.needed_bytes for mode in made.modes.get(kind, ()) if mode.needed_bytes})
        ample = tight = int(1.2 * max([*needs, *plan.memory_bytes.values()]))
        for needed in needs:
            try:
                found = plan_job(made.with_memory({kind: int(1.03 * needed)}), kind, options)
            except qsync_opt.QSyncError as failure:
                print(f"no plan for {needed} bytes: {str(failure)[:120]}", flush=True)
                continue
            if dict(found.taken) != dict(plan.taken):
                tight = int(1.03 * needed)
                break
    ample, tight = broadcast_json([ample, tight])
    return ample, tight


def _write_soak(
    worker: Worker, name: str, adapter: qsync_opt.PlanAdapter, blocks: list[dict[str, Any]], moved: int
) -> None:
    rest = blocks[1:] or blocks  # the first warms up
    kinds: dict[str, list[dict[str, Any]]] = {}
    for block in rest:
        kinds.setdefault(json.dumps(block["taken"]), []).append(block)
    # Plans differ in time, so that blocks are compared with those of the same plan.
    drifts, errors = {}, {}
    for kind, same in kinds.items():
        third = max(1, len(same) // 3)
        first, last = (statistics.median(b["ms"] for b in part) for part in (same[:third], same[-third:]))
        drifts[kind] = last / first - 1
        errors[kind] = [
            statistics.median(b["predicted_ms"] / b["ms"] - 1 for b in part) for part in (same[:third], same[-third:])
        ]
    worker.write(
        model=name,
        workers=worker.world,
        steps=100 * len(blocks),
        replanned=len(blocks),
        plans_that_differed=moved,
        taken=dict(adapter.plan.taken),
        replan_s=statistics.median(b["replan_s"] for b in blocks),
        replan_s_most=max(b["replan_s"] for b in blocks),
        drift=max(drifts.values(), key=abs),
        drift_by_plan=drifts,
        prediction_error_by_plan=errors,
        memory_after_warm_up_bytes=rest[0]["memory_bytes"],
        memory_at_the_end_bytes=rest[-1]["memory_bytes"],
        memory_growth_bytes=rest[-1]["memory_bytes"] - rest[0]["memory_bytes"],
        resident_growth_bytes=rest[-1]["resident_bytes"] - rest[0]["resident_bytes"],
        blocks=blocks,
    )


class Watchdog(logging.Handler):
    """Ends the process, saying where it is, when nothing was logged for so long: others wait for it."""

    seconds = 50.0

    def emit(self, record: logging.LogRecord) -> None:
        """Begin to wait anew."""
        faulthandler.dump_traceback_later(self.seconds, exit=True)


def main() -> None:
    faulthandler.register(signal.SIGUSR1)
    logging.basicConfig(format="%(relativeCreated)d ms: %(message)s", level=logging.WARNING)
    logging.getLogger("qsync_opt").setLevel(logging.INFO)
    data = json.loads(sys.argv[1])
    if data["device"] == "cuda" and data["part"] == "throughput":
        logging.getLogger("qsync_opt").addHandler(Watchdog())
    given = data["precisions"] and tuple(data["precisions"])
    task = Task(**{**data, "multiprocessors": tuple(data["multiprocessors"]), "precisions": given})
    worker = Worker(task, int(sys.argv[2]))
    group = process_group(worker.rank, worker.world, task.port, backend=worker.backend, timeout_s=600)
    with group, worker.compute():
        if task.part == "overhead":
            overhead(worker, task.model)
        elif task.part == "peak":
            peak(worker, task.model)
        elif task.part == "soak":
            soak(worker, task.model, task.steps)
        elif worker.world == 1:
            in_turn(worker, task.model)
        else:
            throughput(worker, task.model)


if __name__ == "__main__":
    main()
