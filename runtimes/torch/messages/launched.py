"""Training over worker processes of this machine, one for each part of a folder, or over those of ``torchrun``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qsync_opt.errors import ProblemError
from qsync_opt.messages import Plan
from qsync_opt.runtimes.host import free_port
from qsync_opt.runtimes.torch.ddp import Workers
from qsync_opt.runtimes.torch.messages.partition import load_part
from qsync_opt.runtimes.torch.messages.training import Trained, TrainingOptions, train

WORKER_MODULE = "qsync_opt.runtimes.torch.messages.worker"


def part_file(folder: Path, rank: int) -> Path:
    """Where the part of a worker is."""
    return folder / f"part-{rank}.safetensors"


def count_parts(folder: Path) -> int:
    """How many parts a folder holds.

    Raises:
        ProblemError: None, or not all of those that belong together.
    """
    count = len(list(folder.glob("part-*.safetensors"))) if folder.is_dir() else 0
    if not count or not part_file(folder, 0).exists():
        raise ProblemError(f"{folder} holds no parts of a graph; write them: qsync-opt messages partition")
    parts = load_part(part_file(folder, 0)).parts
    missing = [rank for rank in range(parts) if not part_file(folder, rank).exists()]
    if missing or count != parts:
        raise ProblemError(
            f"{folder} holds {count} of {parts} parts; write all into an empty folder: qsync-opt messages partition"
        )
    return parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training run: options, a plan as file data, and whether to build the problem at the end."""

    options: TrainingOptions
    plan: dict[str, Any] | None = None
    with_problem: bool = False


@contextlib.contextmanager
def part_workers(folder: Path) -> Iterator[Callable[..., tuple[Trained, dict[str, Any] | None]]]:
    """One process for each part of a folder, each with one thread, for the time of a ``with`` block.

    Gives a function that trains: called with a `Run` and, optionally, a function of the finished epochs and all of
    them, it returns what was measured and the problem's file data, if that was wanted.

    Args:
        folder: Holds the parts; the workers' logs go there.

    Raises:
        ProblemError: The folder lacks parts.
        WorkerError: A worker stopped; the text says why.
    """
    world = count_parts(folder)
    with Workers(WORKER_MODULE, world, free_port(), folder, count=world, log_folder=folder) as workers:

        def train_run(
            run: Run, on_epoch: Callable[[int, int], None] = lambda epoch, epochs: None
        ) -> tuple[Trained, dict[str, Any] | None]:
            results = workers.run(run, lambda rank, progress: None if rank else on_epoch(*progress))
            first: tuple[Trained, dict[str, Any] | None] = results[0]
            return first

        yield train_run


def under_launcher() -> bool:
    """Whether ``torchrun`` or another launcher has started this process as one of several."""
    return all(key in os.environ for key in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def train_own_part(folder: Path, run: Run, device: str = "cpu") -> tuple[int, Trained]:
    """Train on the part of this process's rank, as one of a launcher's workers; returns the rank too.

    Raises:
        ProblemError: There is no such part.
    """
    import torch
    import torch.distributed as dist
    import torch.distributed.nn  # before the group, which its functions' default arguments would hold past its end

    rank = int(os.environ["RANK"])
    part = load_part(part_file(folder, rank))
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        plan = None if run.plan is None else Plan.from_json(run.plan)
        return rank, train(part.to(device), run.options, plan)[0]
    finally:
        dist.destroy_process_group()
