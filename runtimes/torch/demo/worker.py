"""One worker of the demo: profiles its device type, or trains under (or without) a plan.

Run as ``python -m qsync_opt.runtimes.torch.demo.worker SPEC RANK``; reports through `launch.emit`.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from qsync_opt.plan import load_plan
from qsync_opt.runtimes.torch.apply import apply
from qsync_opt.runtimes.torch.capture import capture_model
from qsync_opt.runtimes.torch.ddp import measure_all_reduce, process_group
from qsync_opt.runtimes.torch.demo.launch import emit
from qsync_opt.runtimes.torch.demo.model import Gpt
from qsync_opt.runtimes.torch.demo.settings import INFERENCE, WORKERS, DemoOptions, WorkerSpec, load_spec
from qsync_opt.runtimes.torch.demo.text import Batches, standard_library_text
from qsync_opt.runtimes.torch.measure import TrainingExample, measure_iteration
from qsync_opt.runtimes.torch.profiler import profile

ALONE_STEPS = 12
HELD_OUT_BATCHES = 24
WARM_UP_STEPS = 3
WAIT_S = 900.0
"""How long a worker waits for the other: on a machine that does other work too, one may fall minutes behind."""


def make_model(options: DemoOptions) -> Gpt:
    """The same weights on every worker and in every run."""
    torch.manual_seed(options.seed)
    return Gpt(options.model)


def make_optimizer(model: nn.Module, options: DemoOptions) -> torch.optim.Optimizer:
    """AdamW, as the profile assumes."""
    return torch.optim.AdamW(model.parameters(), lr=options.learning_rate)


def _profile(spec: WorkerSpec, rank: int) -> dict[str, Any]:
    """Capture the model and measure its operators on this worker, at the same time as on the other."""
    options = spec.options
    model = make_model(options)
    text, _ = standard_library_text()
    batch = Batches(text, batch=options.batch, context=options.model.context, seed=options.seed).next()
    captured = capture_model(model, batch, name="demo-gpt")
    network = measure_all_reduce()
    dist.barrier()
    profiled = profile(
        captured,
        "cpu",
        precisions=None if WORKERS[rank] == INFERENCE else ("FP32",),
        optimizer=make_optimizer(model, options),
        example=TrainingExample(model=model, args=batch),
        cache_dir=spec.folder / "cache",
        progress=lambda done, total, label: emit("progress", done=done, total=total, label=label),
    )
    path = spec.folder / f"profile-{WORKERS[rank]}.json"
    profiled.save(path)
    dist.barrier()
    return {
        "profile": str(path),
        "latency_s": network.latency_s,
        "bandwidth_bytes_per_s": network.bandwidth_bytes_per_s,
        "network_residual": network.relative_residual,
    }


def _iterate(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
    loss = model(*batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def _time_alone(options: DemoOptions, model: nn.Module, batches: Batches) -> float:
    """Median seconds of one iteration without communication, while the other worker does the same."""
    optimizer = make_optimizer(model, options)
    seconds = []
    for step in range(WARM_UP_STEPS + ALONE_STEPS):
        batch = batches.next()
        dist.barrier()
        start = time.perf_counter()
        _iterate(model, optimizer, batch)
        if step >= WARM_UP_STEPS:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _held_out_loss(spec: WorkerSpec, trained: nn.Module, held_out: torch.Tensor) -> float:
    """Mean loss of the trained weights on text that was not trained on, in FP32 by a plain model."""
    options = spec.options
    plain = make_model(options)
    plain.load_state_dict(trained.state_dict())
    plain.eval()
    batches = Batches(held_out, batch=options.batch, context=options.model.context, seed=options.seed + 1)
    with torch.no_grad():
        return statistics.fmean(float(plain(*batches.next())) for _ in range(HELD_OUT_BATCHES))


def _planned(spec: WorkerSpec, rank: int) -> Gpt:
    model = make_model(spec.options)
    if spec.plan is not None and WORKERS[rank] == INFERENCE:
        apply(model, load_plan(spec.plan), INFERENCE)
    return model


def _train(spec: WorkerSpec, rank: int) -> dict[str, Any]:
    options = spec.options
    text, held_out = standard_library_text()
    batches = Batches(text, batch=options.batch, context=options.model.context, seed=1000 * (rank + 1) + options.seed)
    alone_s = _time_alone(options, _planned(spec, rank), batches)
    bare = _planned(spec, rank)
    model = DistributedDataParallel(bare)
    optimizer = make_optimizer(bare, options)
    losses, seconds = [], []
    for step in range(options.steps):
        batch = batches.next()
        start = time.perf_counter()
        losses.append(_iterate(model, optimizer, batch))
        seconds.append(time.perf_counter() - start)
        if rank == 0:
            emit("progress", done=step + 1, total=options.steps, label=f"{spec.label}, loss {losses[-1]:.3f}")
    example = TrainingExample(model=model, args=batches.next())
    memory = measure_iteration(example, optimizer, repeats=1, warm_up=0)
    result = {
        "alone_s": alone_s,
        "pair_s": statistics.median(seconds[WARM_UP_STEPS:]),
        "losses": losses,
        "peak_bytes": memory.peak_memory_bytes,
        "memory_source": memory.memory_source,
    }
    if rank == 0:
        result["held_out_loss"] = _held_out_loss(spec, bare, held_out)
    dist.barrier()
    return result


def main(arguments: list[str]) -> None:
    """Run the phase that the spec file names."""
    spec, rank = load_spec(arguments[0]), int(arguments[1])
    torch.set_num_threads(1)
    with process_group(rank, len(WORKERS), spec.port, timeout_s=WAIT_S):
        emit("result", **{"profile": _profile, "train": _train}[spec.phase](spec, rank))


if __name__ == "__main__":
    main(sys.argv[1:])
