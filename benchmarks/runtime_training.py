"""A worker of ``runtime.py`` and the training that its parts time: model, DistributedDataParallel and optimizer."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import qsync_opt
from qsync_opt.errors import NotReadyError
from qsync_opt.model import OpGraph, Role
from qsync_opt.numerics import number_format
from qsync_opt.runtimes.torch.ddp import gather_json
from qsync_opt.runtimes.torch.demo import Gpt, GptConfig
from qsync_opt.runtimes.torch.execution import ApplyOptions, applied_plan, apply, operator_precisions, undo
from qsync_opt.runtimes.torch.job import ExecutionMode
from qsync_opt.runtimes.torch.support import default_loss, memory_budget

Batch = dict[str, Tensor]
LOGGER = logging.getLogger("qsync_opt.benchmark")


LONG_S = 0.6
"""Seconds of passes after which no more of them are timed."""


def use_tf32(on: bool) -> None:
    """Whether plain FP32 products and convolutions run in TF32 from now on."""
    backends: Any = torch.backends
    backends.cuda.matmul.fp32_precision = "tf32" if on else "ieee"
    backends.cudnn.allow_tf32 = on


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What workers are to do: part, model, ``"cpu"`` or ``"cuda"``, multiprocessors of every worker (0: all of the
    card), memory limit of those that have a part of it, steps of a soak, port, when they were started, file of
    records, folder of measurements, whether the Multi-Process Service gives parts of cards, and the precisions that
    plans may use.
    """

    part: str
    model: str
    device: str
    multiprocessors: tuple[int, ...]
    memory: str
    steps: int
    port: int
    started: float
    output: str
    cache: str
    by_service: bool
    precisions: tuple[str, ...] | None = None


class Worker:
    """Device, rank and what they need: built once per process."""

    def __init__(self, task: Task, rank: int) -> None:
        self.rank, self.world, self.task = rank, len(task.multiprocessors), task
        self.output = Path(task.output)
        self.cache = Path(task.cache)
        self.sms = task.multiprocessors[rank]
        self.device = torch.device("cpu")
        if task.device == "cuda":
            self.device = torch.device("cuda", rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
            use_tf32(False)
        else:
            torch.set_num_threads(1)
        self.memory: str | None = None
        self.become(partition=task.part == "throughput" and self.sms > 0 and self.world > 1)
        text = self.output.read_text(encoding="utf-8") if self.output.exists() else ""
        self.known: dict[str, dict[str, Any]] = {
            record["configuration"]: record
            for line in text.splitlines()
            if "configuration" in (record := json.loads(line))
        }
        """What workers that ended early had measured, and what they ended in."""

    @property
    def backend(self) -> str:
        """NCCL has one rank per card at most."""
        return "nccl" if self.device.type == "cuda" and self.world <= torch.cuda.device_count() else "gloo"

    def become(self, *, partition: bool) -> None:
        """Be a partition of the card from now on, with little memory, or the whole of it; a CPU stays what it is."""
        self.partition = partition
        if self.device.type != "cuda":
            return
        self.memory = self.task.memory if partition else None
        sharing = -(-self.world // torch.cuda.device_count())  # workers on one card
        torch.cuda.set_per_process_memory_fraction(1.0 if sharing == 1 else 0.9 / sharing, self.device)
        if partition:
            total = torch.cuda.get_device_properties(self.device).total_memory
            # A little more than what is planned with: the share is rounded when it becomes bytes again.
            limit = memory_budget(self.device, self.memory) + 2**20
            torch.cuda.set_per_process_memory_fraction(limit / total, self.device)

    @contextlib.contextmanager
    def compute(self) -> Iterator[None]:
        """On the partition: everything runs on a stream of a context with that many multiprocessors."""
        if not self.partition or self.device.type != "cuda":
            yield
            return
        if self.task.by_service:
            found = torch.cuda.get_device_properties(self.device).multi_processor_count
            if abs(found - self.sms) > 2:
                raise NotReadyError(f"{self.sms} multiprocessors were asked for, but {found} are there")
            yield
            return
        context = torch.cuda.GreenContext.create(num_sms=self.sms, device_id=self.device.index)
        with torch.cuda.stream(context.Stream()):
            yield
            self.wait()

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def begin(self, configuration: str) -> None:
        """Say what is measured next, for whoever finds that this process is gone."""
        LOGGER.info("%s begins", configuration)
        if self.rank == 0:
            self.output.with_suffix(".begun").write_text(configuration, encoding="utf-8")

    def write(self, **record: Any) -> None:
        if self.rank == 0:
            print(json.dumps(record), flush=True)
            with open(self.output, "a", encoding="utf-8") as stream:
                stream.write(json.dumps(record) + "\n")

    def memory_bytes(self) -> int:
        """Of this process now: what torch has allocated on the card, or the resident set."""
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else self.resident_bytes()

    @staticmethod
    def resident_bytes() -> int:
        """Of this process in the host's memory now."""
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
        return pages * 4096

    @property
    def kind(self) -> str:
        """Name of this worker's device type."""
        if self.device.type == "cuda":
            return f"{self.sms} SMs" if self.partition else "whole"
        if self.partition and self.world > 2:
            return f"type {self.sms}"
        return ("first", "second")[self.partition]

    def options(self, name: str, **changes: Any) -> qsync_opt.PlanningOptions:
        settings = {
            "cache_dir": self.cache / "measurements",
            "job_file": self.cache / f"{name}-{self.device.type}-{self.world}-{self.kind}.json",
            "device_type": self.kind,
            "memory": self.memory or (None if self.device.type == "cuda" else "4 GiB"),
            "profile_seconds": 5.0,
            "precisions": self.task.precisions,
            "progress": lambda done, total, what: LOGGER.info("profile: %d of %d, %s", done, total, what),
        }
        return qsync_opt.PlanningOptions(**{**settings, **changes})


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """As torch makes it."""
    return torch.optim.AdamW(model.parameters(), 1e-4)


def fused_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """One kernel for all parameters, that looks by itself whether a scaled loss overflowed: the host need not wait.

    Nothing moves, and as much is computed.
    """
    return torch.optim.AdamW(model.parameters(), 0.0, fused=True)


class Run:
    """A model in DistributedDataParallel with its optimizer, and one way to compute."""

    def __init__(
        self,
        worker: Worker,
        make: Callable[[], nn.Module],
        batch: Batch,
        *,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
        **way: Any,
    ) -> None:
        """Begin to train, in a way as `go` takes it."""
        torch.manual_seed(0)
        self.worker, self._make = worker, make
        self.model = make().to(worker.device)
        self._apply(batch, **way)
        ids = [worker.device.index] if worker.device.type == "cuda" else None
        self.parallel = DistributedDataParallel(self.model, device_ids=ids, gradient_as_bucket_view=True)
        self.optimizer = optimizer(self.model)
        self.scaler: qsync_opt.LossScaler | None = None
        self.begin()

    def go(self, batch: Batch, **way: Any) -> None:
        """Compute in another way from now on, on another batch; model, wrapper and optimizer stay.

        `begin` must follow, on all workers.

        Args:
            batch: The worker's own.
            way: What is applied (``plan``), or what torch itself does (``autocast``, ``tf32``); ``weight`` of the loss.
        """
        self.leave()
        self._apply(batch, **way)

    def leave(self) -> None:
        """Take off what is applied, and give back what it held."""
        self.optimizer.zero_grad()
        captured = self._captured
        if applied_plan(self.model) is not None:
            undo(self.model)
        if captured:
            gc.collect()
            torch.cuda.empty_cache()

    def _apply(
        self,
        batch: Batch,
        *,
        plan: Any = None,
        autocast: torch.dtype | None = None,
        tf32: bool = False,
        weight: float = 1.0,
    ) -> None:
        self.batch, self.autocast, self.tf32, self.weight = batch, autocast, tf32, weight
        if isinstance(plan, ExecutionMode):
            apply(self.model, plan.precisions, options=ApplyOptions(autocast=plan.autocast, captured=plan.captured))
        elif plan is not None:
            apply(self.model, plan)

    @property
    def _captured(self) -> bool:
        applied = applied_plan(self.model)
        return applied is not None and applied.options.captured

    def begin(self) -> None:
        """Scale losses if any worker computes in FP16; parameters that are no numbers any more are put back."""
        with torch.no_grad():
            norms = torch._foreach_norm(list(self.model.parameters()))
            if not torch.isfinite(torch.stack(norms)).all():
                for own, first in zip(self.model.parameters(), self._make().parameters(), strict=True):
                    own.copy_(first)
                self.optimizer.state.clear()
        self.scaler = qsync_opt.LossScaler(self.model, enabled=True) if self.autocast is torch.float16 else None
        if self.scaler is None:
            scaler = qsync_opt.LossScaler(self.model)
            self.scaler = scaler if scaler.is_enabled() else None

    def loss(self, model: nn.Module) -> Tensor:
        kind = self.worker.device.type
        if kind == "cuda":
            use_tf32(self.tf32)
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
        gather_json(0)  # all begin together
        self.worker.wait()
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.worker.wait()
        return max(gather_json((time.perf_counter() - began) / steps))

    def alone_s(self, steps: int) -> float:
        """Seconds of this worker's forward and backward pass, without waiting for the other."""
        synchronized = self.parallel.no_sync
        times: list[float] = []
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
            if sum(times[1:]) > LONG_S:
                break
        self.optimizer.zero_grad()
        return statistics.median(times[1:])

    def cycle_s(self, steps: int) -> float:
        """Seconds of what this worker does by itself in a step: both passes and the optimizer."""
        with self.parallel.no_sync():
            for number in range(steps + 1):
                if number == 1:
                    self.worker.wait()
                    began = time.perf_counter()
                self.optimizer.zero_grad()
                self.loss(self.parallel).backward()
                self.optimizer.step()
        self.worker.wait()
        spent = (time.perf_counter() - began) / steps
        self.optimizer.zero_grad()
        return spent

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


def gpt(worker: Worker, *, layers: int = 12) -> tuple[Callable[[], nn.Module], Batch]:
    """The decoder of the demo: on a card as wide as GPT-2, on a CPU a small one."""
    config = GptConfig(width=128, layers=2, context=32)
    if worker.device.type == "cuda":
        config = GptConfig(width=768, heads=12, layers=layers, context=512)
    tokens = torch.randint(0, config.vocabulary, (8, config.context), device=worker.device)
    return lambda: Gpt(config), dict(zip(("tokens_BS", "targets_BS"), (tokens, tokens), strict=True))


def kinds(graph: OpGraph) -> list[tuple[str, str]]:
    """Names and kinds of the operators that a plan may adjust."""
    return [(operator.name, operator.op_type) for operator in graph.by_role(Role.ADJUSTABLE)]


def everywhere(operators: list[tuple[str, str]], precision: str, device: torch.device) -> dict[str, str]:
    """Every operator that can run in a precision in it, the others in the lowest that they have above it."""
    found = {}
    for name, kind in operators:
        present = {"FP32", *operator_precisions(kind, device)}
        above = [other for other in present if number_format(other).rank >= number_format(precision).rank]
        found[name] = min(above, key=lambda other: number_format(other).rank)
    return found
