"""Checkpoints of ``torch.distributed.checkpoint``: made from those of this package, and loaded into a job.

Both use the names of ``torch.distributed.checkpoint.state_dict``: ``model.<parameter>``, and
``optimizer.state.<parameter>.<key>``.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from qsync_opt.checkpoints import verify_sizes
from qsync_opt.errors import ModelError, NotReadyError, ProblemError, first_line
from qsync_opt.runtimes.torch.checkpoints.checkpoints import state_of
from qsync_opt.runtimes.torch.checkpoints.reading import Reader
from qsync_opt.runtimes.torch.checkpoints.state import MODEL, join_state
from qsync_opt.runtimes.torch.checkpoints.storage import saved_sizes
from qsync_opt.runtimes.torch.ddp import world
from qsync_opt.runtimes.torch.support import bare_model


def export_checkpoint(path: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Write a checkpoint as one of ``torch.distributed.checkpoint``, in one process and in its memory.

    It gets the model, the optimizers (as one, like ``get_state_dict``), and the other objects by their names. Plans and
    random states have no place there.

    Args:
        path: Folder of one checkpoint, such as ``run-1/step-00000020``.
        target: Folder to write.

    Raises:
        ProblemError: The checkpoint is damaged, of the first format, or cannot be written.
        NotReadyError: There is a process group.
    """
    if world()[1] > 1:
        raise NotReadyError("export_checkpoint works in one process: call it in a script of its own")
    folder = Path(path)
    where = f"the checkpoint {os.fspath(path)!r}"
    manifest = verify_sizes(folder)
    if not manifest.tensors:
        raise ProblemError(f"{where} is of the first format, which torch.distributed.checkpoint reads as it is")
    values = state_of(folder).values
    sizes = saved_sizes(manifest, where)
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in sizes.items()}
    reader = Reader(folder, manifest, tensors)
    reader.fetch(reader.plan())
    reader.copy()
    plain = {name.removeprefix(f"{MODEL}."): t for name, t in tensors.items() if name.startswith(f"{MODEL}.")}
    optimizers = [join_state(value, tensors, where) for value in values.optimizers]
    state = {
        "model": plain,
        "optimizer": {
            "state": {name: entry for each in optimizers for name, entry in each["state"].items()},
            "param_groups": [group for each in optimizers for group in each["param_groups"]],
        },
        **join_state(values.others, tensors, where),
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        try:
            save(state, checkpoint_id=target, no_dist=True)
        except (CheckpointException, OSError) as failure:
            raise ProblemError(f"{os.fspath(target)!r} cannot be written: {first_line(failure)}") from failure


def import_checkpoint(
    source: str | os.PathLike[str],
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
) -> None:
    """Load a checkpoint of ``torch.distributed.checkpoint`` into a model and its optimizers, sharded or not.

    It must hold what ``get_state_dict`` gives, under ``model`` and ``optimizer``. Such files may contain pickles: load
    them only from where you trust. `Checkpoints.save` then makes one of this package of it.

    Args:
        source: Its folder; every rank calls this.
        model: Also inside ``DistributedDataParallel`` or ``torch.compile``.
        optimizers: One, several or none.

    Raises:
        ModelError: The checkpoint is of another model, or has no state of the optimizers.
        ProblemError: The folder is no such checkpoint.
    """
    own = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    plain = bare_model(model)
    where = f"the checkpoint {os.fspath(source)!r}"
    if not (Path(source) / ".metadata").is_file():
        raise ProblemError(f"{where} has no .metadata: give a folder that torch.distributed.checkpoint.save wrote")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        model_state, optimizer_state = get_state_dict(plain, own)
        state: dict[str, Any] = {"model": model_state, **({"optimizer": optimizer_state} if own else {})}
        try:
            load(state, checkpoint_id=source, no_dist=world()[1] == 1)
        except CheckpointException as failure:
            _, (cause, _) = next(iter(failure.failures.items()))
            if isinstance(cause, OSError):
                raise ProblemError(f"{where} cannot be read: {first_line(cause)}") from failure
            text = f"{where} does not fit: {first_line(cause)}; build the model and optimizers that were saved"
            raise ModelError(text) from failure
        except OSError as failure:
            raise ProblemError(f"{where} cannot be read: {first_line(failure)}") from failure
        set_state_dict(plain, own, model_state_dict=model_state, optim_state_dict=state.get("optimizer", {}))
