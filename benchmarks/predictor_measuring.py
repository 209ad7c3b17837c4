"""How a worker of the predictor's benchmark measures: in step with the other, and by itself."""

from __future__ import annotations

import gc
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from predictor_cases import Combination
from predictor_pinning import pin_threads, stolen_s, without_collection
from torch.nn.parallel import DistributedDataParallel

import qsync_opt
from qsync_opt.runtimes.torch.execution import graphed
from qsync_opt.runtimes.torch.steps import Stepper
from qsync_opt.runtimes.torch.support import TrainingExample
from qsync_opt.steps import StepCosts

BLOCK_NS = 0.9e9
"""About how long a block of steps takes; every case is measured in two, far apart."""
_STAGES = (
    "_compile.compile_inner",
    "aot_trace_joint_graph",
    "min_cut_rematerialization_partition",
    "_recursive_joint_graph_passes",
    "_recursive_post_grad_passes",
    "GraphLowering.run",
    "Scheduler.__init__",
    "Scheduler.codegen",
    "async_compile.wait",
    "compile_fx_inner",
    "backward._backward_impl",
)


@dataclass(slots=True)
class Worker:
    """What a rank keeps over the run."""

    rank: int
    device: torch.device
    solo: Any
    deadline: float
    peers_s: float = 25.0
    keep: Path | None = None
    cores: list[int] = field(default_factory=list)
    pinned: dict[str, int] | None = None
    refused: dict[str, dict[str, str]] = field(default_factory=dict)
    costs: dict[str, StepCosts] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)

    def say(self, *words: object) -> None:
        """Print with the time since the start."""
        print(f"[{time.perf_counter() - self.started:6.1f} r{self.rank}]", *words, flush=True)


def clean(device: torch.device) -> None:
    """Give everything back, so that memory is that of the next case alone."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def stepper_of(worker: Worker, combination: Combination, group: Any) -> Stepper:
    """The model with AdamW, and DistributedDataParallel around it where there is another worker; a few steps done."""
    model, kwargs = combination.subject.build(worker.device)
    wrapped = model
    if dist.get_world_size() > 1:
        ids = [worker.device.index] if worker.device.type == "cuda" else None
        wrapped = DistributedDataParallel(model, device_ids=ids, process_group=group, broadcast_buffers=False)
    optimizer = torch.optim.AdamW(wrapped.parameters(), foreach=True)
    stepper = Stepper(TrainingExample(model=wrapped, kwargs=kwargs), optimizer)
    for _ in range(3):  # DistributedDataParallel settles its buckets, libraries load themselves
        stepper.step()
    worker.pinned = pin_threads(worker.cores, worker.device)
    return stepper


def compiling_seconds(stepper: Stepper) -> str:
    """What the first step of a compiled model takes, and stages of it that torch counts; some are inside others."""
    start = time.perf_counter()
    stepper.step()
    stepper.synchronize()
    whole = time.perf_counter() - start
    stages = {name: sum(times) for name, times in torch._dynamo.utils.compilation_time_metrics.items()}
    told = [f"{name.rpartition('.')[2]} {stages[name]:.1f}" for name in _STAGES if name in stages]
    return f"compiled in {whole:.1f} s: {', '.join(told)}"


def measure(worker: Worker, stepper: Stepper, block_ns: float = BLOCK_NS) -> dict[str, Any]:
    """Nanoseconds of each of some steps that follow without waiting, and what tells who set their pace.

    All ranks are in step. ``host`` has the host's nanoseconds by phase in steps that begin on an idle device, ``unit``
    those of a small fixed piece of work on the host.
    """
    worker.pinned = pin_threads(worker.cores, worker.device)
    for _ in range(2):
        stepper.step()
    rough = agreed(worker, stepper.steady_ns(2))
    if worker.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(worker.device)
    stolen = stolen_s()
    with without_collection():
        unit = stepper.host_unit_ns()
        dist.barrier()
        steps = stepper.paced_ns(max(4, min(30, round(block_ns / rough))))
        unit = (unit + stepper.host_unit_ns()) / 2
        host, _ = stepper.host_ns(max(2, min(7, round(block_ns / 2 / rough))))
    peak = torch.cuda.max_memory_allocated(worker.device) if worker.device.type == "cuda" else 0
    return {"steps": steps, "peak": peak, "unit": unit, "host": host, "stolen_s": round(stolen_s() - stolen, 2)}


def agreed(worker: Worker, value: float) -> float:
    """The largest of all ranks."""
    tensor = torch.tensor([value], dtype=torch.float64, device=worker.device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor)


def gathered(value: Any, device: torch.device) -> list[Any]:
    """JSON data of all ranks."""
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([text.numel()], device=device))
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: text.numel()] = text
    texts = [torch.zeros_like(padded) for _ in sizes]
    dist.all_gather(texts, padded)
    return [json.loads(bytes(t[: int(n)].cpu().tolist())) for t, n in zip(texts, sizes, strict=True)]


def capture_passes(worker: Worker, stepper: Stepper) -> str:
    """Capture the planned model's passes on every rank; or why that cannot be done on some."""
    refusal = ""
    try:
        graphed(stepper.example.model, stepper.example.kwargs)
    except (RuntimeError, qsync_opt.QSyncError) as error:
        refusal = f"{type(error).__name__}: {str(error)[:200]}"
        worker.say("not captured:", refusal)
    told = gathered(refusal, worker.device)
    return next((text for text in told if text), "")
