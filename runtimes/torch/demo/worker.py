"""One worker of the demo: captures the model, profiles its device type, and trains under (or without) a plan.

Run as ``python -m qsync_opt.runtimes.torch.demo.worker PORT RANK``; reads the paths of its spec files from standard
input, reports through `launch.emit`, and keeps from one spec to the next what it has captured.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from qsync_opt.model import save_graph
from qsync_opt.runtimes.torch.capture import CapturedModel, capture_model
from qsync_opt.runtimes.torch.ddp import measure_all_reduce, process_group
from qsync_opt.runtimes.torch.demo.launch import emit
from qsync_opt.runtimes.torch.demo.model import Batches, Gpt, standard_library_text
from qsync_opt.runtimes.torch.demo.settings import INFERENCE, TRAINER, WORKERS, DemoOptions, WorkerSpec, load_spec
from qsync_opt.runtimes.torch.execution import apply
from qsync_opt.runtimes.torch.profiling import profile
from qsync_opt.runtimes.torch.sensitivity import collect_statistics
from qsync_opt.runtimes.torch.support import TrainingExample, cpu_clock, measure_iteration
from qsync_opt.sensitivity import save_statistics
from qsync_opt.training import load_plan

ALONE_STEPS = 12
PROFILE_REPEATS = 3
"""Half of what `profile` takes by default: there are rounds until two agree all the same."""
STATISTICS_BATCHES = 3
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


class Worker:
    """What a worker keeps from one phase to the next; each phase returns its result as plain JSON data."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._name = WORKERS[rank]
        self._captured: CapturedModel | None = None

    def run(self, spec: WorkerSpec) -> dict[str, Any]:
        """Do what a spec says."""
        phases = {"capture": self.capture, "measure": self.measure, "train": self.train}
        return phases[spec.phase](spec)

    def capture(self, spec: WorkerSpec) -> dict[str, Any]:
        """Capture the model; the first worker writes the graph."""
        batch = _batches(spec.options, seed=0).next()
        self._captured = capture_model(make_model(spec.options), batch, name="demo-gpt")
        path = spec.folder / "graph.json"
        if self.rank == 0:
            save_graph(self._captured.graph, path)
        return {"graph": str(path)}

    def measure(self, spec: WorkerSpec) -> dict[str, Any]:
        """Measure the network and the operators; the trainer, which has one precision only, then the statistics.

        Both workers are busy meanwhile, as they will be in training.
        """
        assert self._captured is not None, "the phase before is capture"
        network = measure_all_reduce()
        dist.barrier()
        result = {
            "latency_s": network.latency_s,
            "bandwidth_bytes_per_s": network.bandwidth_bytes_per_s,
            "network_residual": network.relative_residual,
            "profile": str(self._profile(spec, self._captured)),
        }
        if self._name == TRAINER:
            result["statistics"] = str(self._statistics(spec, self._captured))
        dist.barrier()
        return result

    def _profile(self, spec: WorkerSpec, captured: CapturedModel) -> Path:
        model = make_model(spec.options)
        profiled = profile(
            captured,
            "cpu",
            precisions=None if self._name == INFERENCE else ("FP32",),
            optimizer=make_optimizer(model, spec.options),
            example=TrainingExample(model=model, args=_batches(spec.options, seed=0).next()),
            cache_dir=spec.folder / "cache",
            progress=lambda done, total, label: emit("progress", done=done, total=total, label=label),
            repeats=PROFILE_REPEATS,
        )
        path = spec.folder / f"profile-{self._name}.json"
        profiled.save(path)
        return path

    def _statistics(self, spec: WorkerSpec, captured: CapturedModel) -> Path:
        batches = _batches(spec.options, seed=7)

        def counted() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            for done in range(STATISTICS_BATCHES):
                emit("progress", done=done, total=STATISTICS_BATCHES, label="statistics of gradients")
                yield batches.next()

        model = make_model(spec.options)
        statistics = collect_statistics(model, counted(), graph=captured.graph, probes=1)
        emit("progress", done=STATISTICS_BATCHES, total=STATISTICS_BATCHES, label="statistics of gradients")
        path = spec.folder / "statistics.json"
        save_statistics(statistics, path)
        return path

    def train(self, spec: WorkerSpec) -> dict[str, Any]:
        """Train, this worker under the plan if it is the inference device: first alone, then with the other."""
        options = spec.options
        batches = _batches(options, seed=1000 * (self.rank + 1))
        alone_s, others_share = _time_alone(options, self._planned(spec), batches)
        bare = self._planned(spec)
        model = DistributedDataParallel(bare)
        optimizer = make_optimizer(bare, options)
        losses, seconds = [], []
        for step in range(options.steps):
            batch = batches.next()
            start = time.perf_counter()
            losses.append(_iterate(model, optimizer, batch))
            seconds.append(time.perf_counter() - start)
            if self.rank == 0:
                emit("progress", done=step + 1, total=options.steps, label=f"{spec.label}, loss {losses[-1]:.3f}")
        example = TrainingExample(model=model, args=batches.next())
        memory = measure_iteration(example, optimizer, repeats=1, warm_up=0)
        result = {
            "alone_s": alone_s,
            "others_share": others_share,
            "pair_s": statistics.median(seconds[WARM_UP_STEPS:]),
            "losses": losses,
            "peak_bytes": memory.peak_memory_bytes,
            "memory_source": memory.memory_source,
        }
        if self.rank == 0:
            result["held_out_loss"] = _held_out_loss(spec, bare)
        dist.barrier()
        return result

    def _planned(self, spec: WorkerSpec) -> Gpt:
        model = make_model(spec.options)
        if spec.plan is not None and self._name == INFERENCE:
            apply(model, load_plan(spec.plan), INFERENCE)
        return model


def _batches(options: DemoOptions, *, seed: int, held_out: bool = False) -> Batches:
    text = _texts()[held_out]
    return Batches(text, batch=options.batch, context=options.model.context, seed=options.seed + seed)


@functools.cache
def _texts() -> tuple[torch.Tensor, torch.Tensor]:
    return standard_library_text()


def _iterate(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
    loss = model(*batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def _time_alone(options: DemoOptions, model: nn.Module, batches: Batches) -> tuple[float, float]:
    """Time iterations without communication, while the other worker does the same.

    Returns:
        Median seconds of an iteration by the clock that profiles use (processor time, as each worker has one thread),
        and the part of the wall-clock time in which other processes had the processor.
    """
    optimizer = make_optimizer(model, options)
    clock = cpu_clock()
    used_ns, passed_ns = [], []
    for _ in range(WARM_UP_STEPS + ALONE_STEPS):
        batch = batches.next()
        dist.barrier()
        wall_ns, start_ns = time.perf_counter_ns(), clock()
        _iterate(model, optimizer, batch)
        used_ns.append(clock() - start_ns)
        passed_ns.append(time.perf_counter_ns() - wall_ns)
    used_ns, passed_ns = used_ns[WARM_UP_STEPS:], passed_ns[WARM_UP_STEPS:]
    return statistics.median(used_ns) / 1e9, max(0.0, 1 - sum(used_ns) / sum(passed_ns))


def _held_out_loss(spec: WorkerSpec, trained: nn.Module) -> float:
    """Mean loss of the trained weights on text that was not trained on, in FP32 by a plain model."""
    plain = make_model(spec.options)
    plain.load_state_dict(trained.state_dict())
    plain.eval()
    batches = _batches(spec.options, seed=1, held_out=True)
    with torch.no_grad():
        return statistics.fmean(float(plain(*batches.next())) for _ in range(HELD_OUT_BATCHES))


def main(arguments: list[str]) -> None:
    """Do what the spec files say whose paths come on standard input."""
    port, rank = (int(argument) for argument in arguments)
    torch.set_num_threads(1)
    worker = Worker(rank)
    with process_group(rank, len(WORKERS), port, timeout_s=WAIT_S):
        for line in sys.stdin:
            emit("result", **worker.run(load_spec(line.removesuffix("\n"))))


if __name__ == "__main__":
    main(sys.argv[1:])
