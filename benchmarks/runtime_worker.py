"""One worker of ``runtime.py``: runs a part and, on rank 0, writes a record per line."""

from __future__ import annotations

import contextlib
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import qsync_opt
from qsync_opt.graph import Role
from qsync_opt.runtimes.torch.agreement import broadcast_json, gather_json
from qsync_opt.runtimes.torch.apply import applied_plan, apply, undo
from qsync_opt.runtimes.torch.capabilities import operator_precisions
from qsync_opt.runtimes.torch.ddp import process_group
from qsync_opt.runtimes.torch.demo.model import Gpt, GptConfig
from qsync_opt.runtimes.torch.device_memory import memory_budget
from qsync_opt.runtimes.torch.example_models import example
from qsync_opt.runtimes.torch.job_plan import JobPlan
from qsync_opt.runtimes.torch.measure import default_loss

BATCHES = {"bert-base": 32, "gpt2": 32, "resnet50": 64, "vit-base": 32}
BLOCK_S, BLOCKS = 0.5, 4
"""Seconds of steps that are timed together, and how often; the median counts."""
SMALL_BATCH = 4  # of the small models that stand for these on a CPU
Batch = dict[str, Tensor]


class Worker:
    """Device, rank and what they need: built once per process."""

    def __init__(
        self, part: str, device: str, rank: int, world: int, sms: int, memory: str, output: str, cache: str
    ) -> None:
        self.rank, self.world, self.sms = rank, world, sms
        self.partition = rank == world - 1 and device == "cuda" and part == "throughput"
        self.output = Path(output)
        self.cache = Path(cache)
        self.device = torch.device(device, rank) if device == "cuda" else torch.device("cpu")
        self.memory: str | None = memory if self.partition else None
        if device == "cuda":
            torch.cuda.set_device(self.device)
            if self.partition:
                total = torch.cuda.get_device_properties(self.device).total_memory
                limit = memory_budget(self.device, memory)
                torch.cuda.set_per_process_memory_fraction(limit / total, self.device)
        else:
            torch.set_num_threads(1)

    @contextlib.contextmanager
    def compute(self) -> Iterator[None]:
        """On the partition: everything runs on a stream of a context with that many multiprocessors."""
        if not self.partition:
            yield
            return
        context = torch.cuda.GreenContext.create(num_sms=self.sms, device_id=self.device.index)
        with torch.cuda.stream(context.Stream()):
            yield

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def write(self, **record: Any) -> None:
        if self.rank == 0:
            print(json.dumps(record), flush=True)
            with open(self.output, "a", encoding="utf-8") as stream:
                stream.write(json.dumps(record) + "\n")

    def memory_bytes(self) -> int:
        """Of this process now: what torch has allocated on the card, or the resident set."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
        return pages * 4096

    def options(self, name: str) -> qsync_opt.PlanningOptions:
        kinds = ("whole", f"partition of {self.sms} SMs") if self.device.type == "cuda" else ("first", "second")
        return qsync_opt.PlanningOptions(
            cache_dir=self.cache / "measurements",
            job_file=self.cache / f"{name}-{self.device.type}-{self.world}.json",
            device_type=kinds[1 if self.partition or (self.rank and self.device.type == "cpu") else 0],
            memory=self.memory or (None if self.device.type == "cuda" else "4 GiB"),
            least_gain=0.0,
            progress=False,
        )


class Run:
    """A model in DistributedDataParallel with its optimizer, and one way to compute."""

    def __init__(
        self,
        worker: Worker,
        make: Callable[[], nn.Module],
        batch: Batch,
        *,
        plan: Any = None,
        autocast: torch.dtype | None = None,
        tf32: bool = False,
        weight: float = 1.0,
    ) -> None:
        torch.manual_seed(0)
        self.worker, self.batch, self.autocast, self.tf32, self.weight = worker, batch, autocast, tf32, weight
        self.model = make().to(worker.device)
        if plan is not None:
            apply(self.model, plan)
        self.parallel: nn.Module = self.model
        if worker.world > 1:
            ids = [worker.device.index] if worker.device.type == "cuda" else None
            self.parallel = DistributedDataParallel(self.model, device_ids=ids, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)
        self.scaler = qsync_opt.LossScaler(self.model, enabled=True) if autocast is torch.float16 else None
        if self.scaler is None:
            scaler = qsync_opt.LossScaler(self.model)
            self.scaler = scaler if scaler.is_enabled() else None

    def loss(self, model: nn.Module) -> Tensor:
        kind = self.worker.device.type
        if kind == "cuda":
            backends: Any = torch.backends
            backends.cuda.matmul.fp32_precision = backends.cudnn.conv.fp32_precision = "tf32" if self.tf32 else "ieee"
        with torch.autocast(kind, dtype=self.autocast) if self.autocast else contextlib.nullcontext():
            return self.weight * default_loss(model(**self.batch))

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss = self.loss(self.parallel)
        if self.scaler is None:
            loss.backward()
            self.optimizer.step()
            return
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def timed(self, steps: int) -> float:
        """Seconds per step on the slowest worker."""
        if self.worker.world > 1:
            dist.barrier()
        self.worker.wait()
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.worker.wait()
        return max(gather_json((time.perf_counter() - began) / steps))

    def alone_s(self, steps: int) -> float:
        """Seconds of this worker's forward and backward pass, without waiting for the other."""
        synchronized = getattr(self.parallel, "no_sync", contextlib.nullcontext)
        times = []
        # Everything that a step will need is there from the first one on, so that what does not fit shows here.
        with synchronized():
            self.loss(self.parallel).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for _ in range(steps + 1):
            self.worker.wait()
            began = time.perf_counter()
            with synchronized():
                self.loss(self.parallel).backward()
            self.worker.wait()
            times.append(time.perf_counter() - began)
        self.optimizer.zero_grad()
        return statistics.median(times[1:])

    def peaks(self) -> list[int]:
        """Bytes that one step needs on every worker; none on a CPU, where the resident set is no measure."""
        if self.worker.device.type != "cuda":
            return []
        self.worker.wait()
        torch.cuda.reset_peak_memory_stats(self.worker.device)
        self.step()
        self.worker.wait()
        return list(gather_json(torch.cuda.max_memory_allocated(self.worker.device)))

    def close(self) -> None:
        if applied_plan(self.model) is not None:
            undo(self.model)  # a model under a plan refers to itself
        self.__dict__.clear()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def gpt(worker: Worker) -> tuple[Callable[[], nn.Module], Batch]:
    on_card = worker.device.type == "cuda"
    config = (
        GptConfig(width=768, heads=12, layers=12, context=512)
        if on_card
        else GptConfig(width=128, layers=2, context=32)
    )
    tokens = torch.randint(0, config.vocabulary, (8, config.context), device=worker.device)
    return lambda: Gpt(config), dict(zip(("tokens_BS", "targets_BS"), (tokens, tokens), strict=True))


def everywhere(model: nn.Module, batch: Batch, precision: str, device: torch.device) -> dict[str, str]:
    """Every operator that can run in a precision in it, the others in FP32."""
    graph = qsync_opt.capture(model, (), batch)
    names = {operator.name: operator.op_type for operator in graph.by_role(Role.ADJUSTABLE)}
    return {n: precision if precision in operator_precisions(kind, device) else "FP32" for n, kind in names.items()}


def overhead(worker: Worker, name: str) -> None:
    make, batch = gpt(worker)
    rounds, steps = (20, 10) if worker.device.type == "cuda" else (20, 3)
    plans = {p: everywhere(make().to(worker.device), batch, p, worker.device) for p in ("FP32", "BF16")}
    for precision, autocast in (("FP32", None), ("BF16", torch.bfloat16)):
        runs = {
            "plain": Run(worker, make, batch, autocast=autocast),
            "plan": Run(worker, make, batch, plan=plans[precision]),
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
            found = {"plan": plans[precision]} if label == "plan" else {"autocast": autocast}
            run = Run(worker, make, batch, **found)
            run.timed(2)
            peaks[label] = max(run.peaks(), default=0)
            run.close()
        medians = {label: statistics.median(found) for label, found in times.items()}
        ratios = sorted(b / a for a, b in zip(times["plain"], times["plan"], strict=True))
        worker.write(
            model=name,
            precision=precision,
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
    make, batch = gpt(worker)
    options = replace(worker.options(f"soak-{name}"), trial=False)
    plan = qsync_opt.auto_plan(make().to(worker.device), batch, options=options)
    run = Run(worker, make, batch, plan=plan)
    needed = max(plan.memory_bytes.values())
    limit = [needed]
    # The budget of the last worker swings, so that every look finds something to plan for.
    adapter = qsync_opt.PlanAdapter(
        run.parallel, plan, options=options, every=100, memory=lambda: limit[0], tolerance=0.01
    )
    blocks = []
    for _ in range(total // 100):
        if worker.rank == worker.world - 1:
            limit[0] = int((1.5 if limit[0] < 1.4 * needed else 1.2) * needed)
        predicted, began = adapter.plan.iteration_ns, time.perf_counter()
        for _ in range(99):
            run.step()
            adapter.step()
        worker.wait()
        measured_ns = (time.perf_counter() - began) / 99 * 1e9
        run.step()
        worker.wait()
        began = time.perf_counter()
        adapter.step()
        blocks.append((measured_ns, predicted, time.perf_counter() - began, worker.memory_bytes()))
    rest = blocks[1:] or blocks  # the first warms up
    third = max(1, len(rest) // 3)
    first, last = (statistics.median(b[0] for b in part) for part in (rest[:third], rest[-third:]))
    worker.write(
        model=name,
        workers=worker.world,
        steps=100 * len(blocks),
        replanned=len(blocks),
        replan_s=statistics.median(block[2] for block in blocks),
        replan_s_most=max(block[2] for block in blocks),
        first_third_ms=first / 1e6,
        last_third_ms=last / 1e6,
        drift=last / first - 1,
        predicted_ms=statistics.median(block[1] for block in rest) / 1e6,
        memory_after_warm_up_bytes=rest[0][3],
        memory_at_the_end_bytes=rest[-1][3],
        memory_growth_bytes=rest[-1][3] - rest[0][3],
    )
    run.close()


def rows(kwargs: dict[str, Any], count: int, device: torch.device) -> Batch:
    """A batch of so many samples, from an example's."""
    return {name: x[torch.arange(count) % len(x)].to(device) for name, x in kwargs.items()}


def shares(speeds: list[float], total: int) -> list[int]:
    """Whole samples per worker, as their speeds are, none without any; together ``total``."""
    found = [max(1, round(total * speed / sum(speeds))) for speed in speeds]
    found[found.index(max(found))] += total - sum(found)
    return found


def throughput(worker: Worker, name: str) -> None:
    """Every plain way first, then the plan: a record as soon as it is there, sensitivities in one of their own."""
    small = worker.device.type == "cpu"
    chosen = example(name, small=small)
    per_worker = SMALL_BATCH if small else BATCHES[name]
    total = per_worker * worker.world
    label_of_model = name + (" (small)" if small else "")

    def make() -> nn.Module:
        torch.manual_seed(0)
        return example(name, small=small).model

    batch = rows(dict(chosen.kwargs), per_worker, worker.device)
    speeds: dict[str, float] = {}

    def measure(label: str, counts: list[int] | None = None, **how: Any) -> None:
        """Samples per second; where it does not run, a record that says why."""
        local = batch if counts is None else rows(dict(chosen.kwargs), counts[worker.rank], worker.device)
        weight = 1.0 if counts is None else worker.world * counts[worker.rank] / total
        said, seconds, alone = "", 0.0, 0.0
        run = None
        try:
            run = Run(worker, make, local, weight=weight, **how)
            alone = run.alone_s(3)
        except (torch.cuda.OutOfMemoryError, qsync_opt.QSyncError) as failure:
            said = f"rank {worker.rank}: {str(failure).splitlines()[0][:120]}"
        failed = [text for text in gather_json(said) if text]
        peaks: list[int] = []
        if not failed and run is not None:
            steps = broadcast_json(max(2, min(20, int(BLOCK_S / run.timed(2)))))
            seconds = statistics.median(run.timed(steps) for _ in range(BLOCKS))
            peaks = run.peaks()
        speeds[label] = total / seconds if seconds else 0.0
        worker.write(
            model=label_of_model,
            configuration=label,
            samples_per_s=speeds[label] or None,
            step_ms=1e3 * seconds or None,
            local_batches=counts or [per_worker] * worker.world,
            alone_ms=[1e3 * t for t in gather_json(alone)],
            peak_bytes=peaks or None,
            failure="; ".join(failed) or None,
        )
        if run is not None:
            run.close()

    def by_speed(**how: Any) -> list[int]:
        """Local batches for which all workers take as long, found in two rounds."""
        counts = [per_worker] * worker.world
        for _ in range(2):
            run = Run(worker, make, rows(dict(chosen.kwargs), counts[worker.rank], worker.device), **how)
            found = [n / t for n, t in zip(counts, gather_json(run.alone_s(5)), strict=True)]
            run.close()
            counts = broadcast_json(shares(found, total))
        return counts

    ways: dict[str, dict[str, Any]] = {"FP32": {}}
    if not small:
        ways["TF32"] = {"tf32": True}
        ways["FP16 autocast"] = {"autocast": torch.float16}
    ways["BF16 autocast"] = {"autocast": torch.bfloat16}
    for precision in ("INT8",) if small else ("INT8", "FP8"):
        ways[f"uniform {precision}"] = {"plan": everywhere(make().to(worker.device), batch, precision, worker.device)}
    for label, how in ways.items():
        measure(label, **how)
    best = broadcast_json(max(ways, key=lambda label: speeds[label]))
    measure(f"local batches by speed, {best}", by_speed(**ways[best]), **ways[best])
    began = time.perf_counter()
    plan: JobPlan = qsync_opt.auto_plan(make().to(worker.device), batch, options=worker.options(name))
    worker.write(
        model=label_of_model,
        planning_s=time.perf_counter() - began,
        predicted_ms=plan.iteration_ns / 1e6,
        reason=plan.reason,
        sensitivities={**{other.name: other.sensitivity for other in plan.alternatives}, "plan": plan.sensitivity},
    )
    measure("plan", plan=plan)
    measure("local batches by speed, plan", by_speed(plan=plan), plan=plan)


def main() -> None:
    part, name, device, port, world, output, sms, memory, steps, cache, rank = sys.argv[1:]
    worker = Worker(part, device, int(rank), int(world), int(sms), memory, output, cache)
    backend = "nccl" if device == "cuda" else "gloo"
    with process_group(int(rank), int(world), int(port), backend=backend, timeout_s=600), worker.compute():
        if part == "overhead":
            overhead(worker, name)
        elif part == "soak":
            soak(worker, name, int(steps))
        else:
            throughput(worker, name)


if __name__ == "__main__":
    main()
