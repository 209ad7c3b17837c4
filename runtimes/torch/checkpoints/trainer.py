"""Checkpoints of Hugging Face's Trainer by a callback, saved behind its training."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from qsync_opt.checkpoints import step_folder, steps_in
from qsync_opt.errors import NotReadyError, ProblemError
from qsync_opt.io import check_integer
from qsync_opt.runtimes.torch.checkpoints.checkpoints import Checkpoints, value_of
from qsync_opt.runtimes.torch.ddp import broadcast_json, together, world
from qsync_opt.runtimes.torch.job import JobPlan

_OF_PROCESSES = ("is_local_process_zero", "is_world_process_zero", "stateful_callbacks", "trial_params")
TRAINER = "trainer"


class TrainerCheckpoints(TrainerCallback):
    """Saves with `Checkpoints` every so many steps; the Trainer needs to save nothing (``save_strategy="no"``).

    Give it in ``callbacks``. To go on after an interruption, pass what `resume` returns to ``Trainer.train``, which
    then passes over the batches that were trained on. State of Python's and NumPy's random numbers is not kept.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        every: int,
        plan: JobPlan | None = None,
        keep: int = 2,
        background: bool = True,
    ) -> None:
        """Take where and how often to save; nothing is read or written yet.

        Args:
            folder: Of this job's checkpoints alone.
            every: Steps between saves; a last one is made when training ends.
            plan: As for `Checkpoints`.
            keep: How many checkpoints stay.
            background: Save behind the training.
        """
        check_integer(every, "every", minimum=1)
        self._folder, self._every, self._background = Path(folder), every, background
        self._options: dict[str, Any] = {"plan": plan, "keep": keep}
        self._checkpoints: Checkpoints | None = None
        self._progress = _Progress()
        self._resume_at: int | None = None

    def resume(self, model: nn.Module, place: str | os.PathLike[str]) -> str | None:
        """Prepare to go on from the last checkpoint; every rank calls it.

        Args:
            model: Of the Trainer.
            place: Folder that is written for the Trainer, on disk of all ranks. It holds how far training came; its
                weights are those of ``model`` now, as those of the checkpoint are loaded when training begins.

        Returns:
            What ``Trainer.train`` takes as ``resume_from_checkpoint``; None if there is no checkpoint.

        Raises:
            ProblemError: The checkpoint is damaged, or was not made by this callback.
        """
        rank, _ = world()
        steps = broadcast_json(steps_in(self._folder) if rank == 0 else None)
        if not steps:
            return None

        def write() -> None:
            if rank:
                return
            path = step_folder(self._folder, steps[-1])
            state = value_of(path, TRAINER)
            if state is None:
                raise ProblemError(
                    f"{str(path)!r} does not say how far the Trainer came: it was not saved by this class"
                )
            folder = Path(place)
            folder.mkdir(parents=True, exist_ok=True)
            TrainerState(**state).save_to_json(str(folder / "trainer_state.json"))
            weights = {name: value.detach().cpu().contiguous().clone() for name, value in model.state_dict().items()}
            save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

        together(write)
        self._resume_at = steps[-1]
        return os.fspath(place)

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: Any = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        **_: Any,
    ) -> None:
        """Save if it is time; at first, load the checkpoint that training resumes from.

        Batches have been drawn, and the steps before have been logged.
        """
        if self._checkpoints is not None:
            if state.global_step % self._every == 0:
                self._save(state)
            return
        others = {"scheduler": lr_scheduler, TRAINER: self._progress}
        self._checkpoints = Checkpoints(self._folder, model, optimizer, **self._options, **others)
        if self._resume_at is not None:
            if state.global_step != self._resume_at:
                raise NotReadyError(
                    f"the Trainer is at step {state.global_step}, and the checkpoint of step {self._resume_at}: pass "
                    "what resume() returned to Trainer.train"
                )
            self._checkpoints.load(self._resume_at)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Save the end, and wait for what is still written."""
        if self._checkpoints is None:
            return
        self._checkpoints.wait()
        if state.global_step not in self._checkpoints.steps:
            self._save(state)
            self._checkpoints.wait()

    def _save(self, state: TrainerState) -> None:
        assert self._checkpoints is not None  # a step has begun
        own = {name: value for name, value in dataclasses.asdict(state).items() if name not in _OF_PROCESSES}
        self._progress.state = broadcast_json(own)  # logged times differ between ranks
        if self._background:
            self._checkpoints.save_in_background(state.global_step)
        else:
            self._checkpoints.save(state.global_step)


class _Progress:
    """How far the Trainer came, in a checkpoint."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state
