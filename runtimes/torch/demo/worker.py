"""One worker of the demo: captures the model, profiles its device type, and trains under (or without) a plan."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from qsync_opt.model import save_graph
from qsync_opt.runtimes.torch.capture import CapturedModel, capture_model
from qsync_opt.runtimes.torch.ddp import RESULT, measure_all_reduce, process_group
from qsync_opt.runtimes.torch.demo.model import Batches, Gpt, standard_library_text
from qsync_opt.runtimes.torch.demo.settings import INFERENCE, TRAINER, WORKERS, DemoOptions
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


class Worker:
    """What a worker keeps from one phase to the next; each phase returns its result as plain data."""

    def __init__(self, rank: int, connection: Connection, folder: Path, options: DemoOptions) -> None:
        self._rank, self._name = rank, WORKERS[rank]
        self._connection, self._folder, self._options = connection, folder, options
        self._captured: CapturedModel | None = None

    def capture(self) -> str:
        """Capture the model; the first worker writes the graph, whose path is returned."""
        self._captured = capture_model(self._model(), self._batches(seed=0).next(), name="demo-gpt")
        path = self._folder / "graph.json"
        if self._rank == 0:
            save_graph(self._captured.graph, path)
        return str(path)

    def measure(self) -> dict[str, Any]:
        """Measure the network and the operators; the trainer, which has one precision only, then the statistics.

        Both workers are busy meanwhile, as they will be in training.
        """
        assert self._captured is not None, "the phase before is capture"
        network = measure_all_reduce()
        dist.barrier()
        result = {**network._asdict(), "profile": self._profile(self._captured)}
        if self._name == TRAINER:
            result["statistics"] = self._statistics(self._captured)
        dist.barrier()
        return result

    def train(self, label: str, plan: Path | None) -> dict[str, Any]:
        """Train, this worker under the plan if it is the inference device: first alone, then with the other."""
        steps, batches = self._options.steps, self._batches(seed=1000 * (self._rank + 1))
        alone_s, others_share = self._time_alone(self._model(plan), batches)
        bare = self._model(plan)
        model = DistributedDataParallel(bare)
        optimizer = self._optimizer(bare)
        losses, seconds = [], []
        for step in range(steps):
            batch = batches.next()
            start = time.perf_counter()
            losses.append(_iterate(model, optimizer, batch))
            seconds.append(time.perf_counter() - start)
            if self._rank == 0:
                self._report(step + 1, steps, f"{label}, loss {losses[-1]:.3f}")
        example = TrainingExample(model=model, args=batches.next())
        result = {
            "alone_s": alone_s,
            "others_share": others_share,
            "pair_s": statistics.median(seconds[WARM_UP_STEPS:]),
            "losses": tuple(losses),
            "peak_bytes": measure_iteration(example, optimizer, repeats=1, warm_up=0).peak_memory_bytes,
            "held_out_loss": self._held_out_loss(bare) if self._rank == 0 else None,
        }
        dist.barrier()
        return result

    def _model(self, plan: Path | None = None) -> Gpt:
        torch.manual_seed(self._options.seed)
        model = Gpt(self._options.model)
        if plan is not None and self._name == INFERENCE:
            apply(model, load_plan(plan), INFERENCE)
        return model

    def _optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self._options.learning_rate)

    def _batches(self, *, seed: int, held_out: bool = False) -> Batches:
        options = self._options
        text = _texts()[held_out]
        return Batches(text, batch=options.batch, context=options.model.context, seed=options.seed + seed)

    def _report(self, done: int, total: int, label: str) -> None:
        self._connection.send(("progress", (done, total, label)))

    def _profile(self, captured: CapturedModel) -> str:
        model = self._model()
        profiled = profile(
            captured,
            "cpu",
            precisions=None if self._name == INFERENCE else ("FP32",),
            optimizer=self._optimizer(model),
            example=TrainingExample(model=model, args=self._batches(seed=0).next()),
            cache_dir=self._folder / "cache",
            progress=self._report,
            repeats=PROFILE_REPEATS,
        )
        path = self._folder / f"profile-{self._name}.json"
        profiled.save(path)
        return str(path)

    def _statistics(self, captured: CapturedModel) -> str:
        batches = self._batches(seed=7)

        def counted() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            for done in range(STATISTICS_BATCHES):
                self._report(done, STATISTICS_BATCHES, "statistics of gradients")
                yield batches.next()
            self._report(STATISTICS_BATCHES, STATISTICS_BATCHES, "statistics of gradients")

        path = self._folder / "statistics.json"
        save_statistics(collect_statistics(self._model(), counted(), graph=captured.graph, probes=1), path)
        return str(path)

    def _time_alone(self, model: nn.Module, batches: Batches) -> tuple[float, float]:
        """Time iterations without communication, while the other worker does the same.

        Returns:
            Median seconds of an iteration by the clock that profiles use (processor time, as each worker has one
            thread), and the part of the wall-clock time in which other processes had the processor.
        """
        optimizer, clock = self._optimizer(model), cpu_clock()
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

    def _held_out_loss(self, trained: nn.Module) -> float:
        """Mean loss of the trained weights on text that was not trained on, in FP32 by a plain model."""
        plain = self._model()
        plain.load_state_dict(trained.state_dict())
        plain.eval()
        batches = self._batches(seed=1, held_out=True)
        with torch.no_grad():
            return statistics.fmean(float(plain(*batches.next())) for _ in range(HELD_OUT_BATCHES))


@functools.cache
def _texts() -> tuple[torch.Tensor, torch.Tensor]:
    return standard_library_text()


def _iterate(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
    loss = model(*batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def serve(rank: int, connection: Connection, port: int, folder: Path, options: DemoOptions) -> None:
    """Do the work that is received, a phase's name and arguments, until there is none."""
    torch.set_num_threads(1)
    worker = Worker(rank, connection, folder, options)
    with process_group(rank, len(WORKERS), port, timeout_s=WAIT_S):
        for phase, *arguments in iter(connection.recv, None):
            connection.send((RESULT, getattr(worker, phase)(*arguments)))
