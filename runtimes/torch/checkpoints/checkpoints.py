"""Checkpoints of a job under a plan: weights by the plain model's names, the plan, and the position of its rounding.

Tensors are safetensors, the rest is JSON: reading a checkpoint executes nothing. Every rank writes a share, and reads
the boxes that it holds now, so that a checkpoint of any number of ranks, sharded or not, is loaded by any other.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

import qsync_opt
from qsync_opt.checkpoints import (
    Manifest,
    begin,
    file_facts,
    finish,
    flush,
    remove_older,
    restore,
    step_folder,
    steps_in,
    verify,
    verify_file,
    verify_sizes,
)
from qsync_opt.errors import ModelError, NotInstalledError, ProblemError, first_line
from qsync_opt.io import check_integer, decode, encode, read_json, write_json
from qsync_opt.runtimes.torch.checkpoints.loader import require_reshardable
from qsync_opt.runtimes.torch.checkpoints.memory import Ring
from qsync_opt.runtimes.torch.checkpoints.reading import Reader
from qsync_opt.runtimes.torch.checkpoints.resuming import (
    RankState,
    Resumed,
    decide,
    digest_of_ranks,
    in_present_order,
    plan_of_ranks,
    require_same_operators,
    resume_plan,
)
from qsync_opt.runtimes.torch.checkpoints.staging import Background, Staging
from qsync_opt.runtimes.torch.checkpoints.state import Collected, JobState, Sizes, Values, join_state, sizes_of_old
from qsync_opt.runtimes.torch.checkpoints.storage import (
    RankFile,
    WritePlan,
    WritePlanner,
    saved_sizes,
    write_file,
)
from qsync_opt.runtimes.torch.ddp import (
    broadcast_json,
    companion_group,
    digest,
    fingerprint,
    gather_json,
    gather_together,
    naming_lost_ranks,
    require_equal,
    together,
    world,
)
from qsync_opt.runtimes.torch.job import JobPlan
from qsync_opt.runtimes.torch.support import no_collection

OLD_FORMAT, CHECKPOINT_FORMAT = "qsync-checkpoint/1", "qsync-checkpoint/2"
STATE = "state.json"
_LOGGER = logging.getLogger(__name__)
T = TypeVar("T")


class Checkpoints:
    """Checkpoints of one job in one folder, which all its ranks can read and write.

    Every rank creates one and calls :meth:`save` (or :meth:`save_in_background`) and :meth:`load` at the same places. A
    checkpoint has the
    ``state_dict`` of the model, the optimizers and other objects, the precisions of every rank with their hash, the
    position of its rounding in the random stream, and torch's random states of every rank. It has no gradients: save
    after the optimizer's step, not while they accumulate. Buffers that differ between ranks are saved as rank 0 has
    them, as ``DistributedDataParallel`` continues with these.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
        *,
        plan: JobPlan | None = None,
        keep: int = 2,
        **others: Any,
    ) -> None:
        """Take the folder and what checkpoints contain; nothing is read or written yet.

        Args:
            folder: Of this job alone; created if it is missing.
            model: With or without a plan, also inside ``DistributedDataParallel`` or ``torch.compile``.
            optimizer: One, several, or none.
            plan: From `auto_plan` for this start of the job. It tells whether the checkpoint's plan still fits into
                memory, and names the device type of ranks without a plan because none was worthwhile.
            keep: How many checkpoints stay.
            others: Other objects with ``state_dict`` and ``load_state_dict`` (a scheduler, a scaler) by name. Their
                states must be equal on all ranks.

        Raises:
            NotInstalledError: xxhash is missing.
            ModelError: One of ``others`` has no ``state_dict``.
            ProblemError: ``keep`` is below 1.
        """
        if importlib.util.find_spec("xxhash") is None:
            raise NotInstalledError("xxhash is missing, which checkpoints need: pip install 'qsync-opt[torch]'")
        check_integer(keep, "keep", minimum=1)
        for name, other in others.items():
            if not (hasattr(other, "state_dict") and hasattr(other, "load_state_dict")):
                raise ModelError(
                    f"{name} is a {type(other).__name__}: what has state_dict() and load_state_dict() can be kept"
                )
        self._folder = Path(folder)
        self._model = model
        several = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        optimizers = [_bare_optimizer(each) for each in several]
        self._others = others
        self._state = JobState(model, optimizers, others)
        self._plan = plan
        self._keep = keep
        self._optimizers = optimizers
        self._planner = WritePlanner()
        self._staging = Staging()
        self._ring = Ring()
        self._background = Background()
        self._group: Any = None
        self._hooks: list[Any] = []

    @property
    def steps(self) -> list[int]:
        """Steps of which there is a checkpoint, ascending."""
        return steps_in(self._folder)

    def save(self, step: int) -> Path:
        """Write a checkpoint, whole or, if writing fails or is interrupted, not at all.

        Args:
            step: Number of training steps done. A checkpoint of the same step is replaced.

        Returns:
            The checkpoint's folder.

        Raises:
            ProblemError: It cannot be written (for example, the disk is full); the older checkpoints are unchanged.
            ModelError: Some state cannot be written to a file.
            NotReadyError: Another rank failed; the text repeats its error.
        """
        self.wait()
        job = self._begin(step)
        self._commit(job, lambda: () if job.file is None else self._ring.chunks(job.file, job.parts))
        return step_folder(self._folder, step)

    def save_in_background(self, step: int) -> None:
        """Begin a checkpoint of the state as it is now, and return while it is still copied and written.

        Parameters and the optimizers' states are copied while the next forward and backward pass runs, which does not
        change them; the copy ends before an optimizer's step begins. All else (buffers, random states, other objects)
        is copied at once. The copy is then written on a thread. Host memory for one copy of what this rank writes is
        kept for the next save (`staged_bytes`). A second call first waits for the first one's checkpoint.

        Parameters may be changed by optimizers' steps only; before anything else changes them, call `wait_for_copy`.
        Call `wait` before the process group is destroyed.

        Args:
            step: Number of training steps done. A checkpoint of the same step is replaced.

        Raises:
            ProblemError: This checkpoint, or the one begun before, cannot be written; the older ones are unchanged.
            ModelError: Some state cannot be written to a file.
            NotReadyError: Another rank failed; the text repeats its error.
        """
        self.wait()
        group = self._message_group(needed=True)  # training goes on beside the thread: messages must not meet
        if not self._hooks:
            self._hooks = [
                optimizer.register_step_pre_hook(lambda *_: self._staging.finish()) for optimizer in self._optimizers
            ]
        with no_collection():  # what is made here would set off several, for which training would wait
            job = self._begin(step, group)

            def copy() -> None:
                if job.file is not None:
                    later = [name in job.collected.stable for name, _ in job.file.boxes]
                    self._staging.begin(job.file, job.parts, later)

            together(copy, group)

        def write() -> None:
            self._staging.copy()
            try:
                self._commit(job, self._staging.chunks, group)
            except BaseException as failure:
                _LOGGER.error("%s", failure)  # noqa: TRY400 (it is raised again, with its trace, by wait)
                raise

        self._background.start(write)

    def wait(self) -> None:
        """Wait for the checkpoint that `save_in_background` began, if any.

        Raises:
            ProblemError: It cannot be written (for example, the disk is full); the older checkpoints are unchanged.
            NotReadyError: Another rank failed; the text repeats its error.
        """
        self._background.wait()

    def wait_for_copy(self) -> None:
        """Wait until the copy that `save_in_background` began holds all, so that anything may change parameters.

        An optimizer's step does so by itself. On a GPU the current stream waits, not the host.

        Raises:
            NotReadyError: A copy failed.
        """
        self._staging.finish()

    @property
    def saving(self) -> bool:
        """Whether the checkpoint that `save_in_background` began is still being written by this rank."""
        return self._background.running

    @property
    def staged_bytes(self) -> int:
        """Host memory of this rank that is kept: a copy of what it writes in the background, 48 MiB for `save`."""
        return self._staging.num_bytes + self._ring.num_bytes

    def _begin(self, step: int, group: Any = None) -> _Job:
        """Agree on a save, plan who writes what, and create the folder."""
        rank, _ = world()
        collected: Collected | None = None

        def facts() -> dict[str, Any]:
            nonlocal collected
            check_integer(step, "step")
            collected = self._state.collect(rank)
            return {
                "job": fingerprint({"step": step, "model": collected.shapes}),
                "others": {name: digest(value) for name, value in collected.values.others.items()},
                "rank": encode(RankState.of(self._model, rank, self._plan)),
                "known": self._planner.knows(collected.entries),
            }

        of_ranks = gather_together(facts, group)  # once, as training waits for every message
        assert collected is not None
        require_equal(
            "the step or the model to be saved",
            [each["job"] for each in of_ranks],
            "save the same model at the same step on all ranks",
        )
        _require_equal_others([each["others"] for each in of_ranks])
        ranks = [decode(RankState, each["rank"], f"rank {number}") for number, each in enumerate(of_ranks)]
        known = all(each["known"] for each in of_ranks)
        layout = self._planner.plan(collected.entries, rank, known=known, group=group)
        create = _attempting(step, lambda: None if rank else str(begin(self._folder, step)))
        temporary = Path(gather_together(create, group)[0])
        plan = plan_of_ranks(ranks)
        state = _State(
            step=step,
            versions={"qsync_opt": qsync_opt.__version__, "torch": torch.__version__},
            plan=None if plan is None else plan.to_json(),
            digest=digest_of_ranks(ranks),
            memory_bytes={} if self._plan is None else self._plan.memory_bytes,
            ranks=tuple(ranks),
            values=collected.values,
        )
        return _Job(
            step=step,
            temporary=temporary,
            collected=collected,
            state=state,
            layout=layout,
            file=layout.files[rank],
            parts=self._planner.parts(collected.tensors),
        )

    def _commit(self, job: _Job, chunks: Callable[[], Iterable[memoryview]], group: Any = None) -> None:
        """Write this rank's part and, once all ranks have, publish the checkpoint."""
        rank, _ = world()

        def write() -> dict[str, Any]:
            facts = {}
            if job.file is not None:
                facts[job.file.name] = write_file(job.temporary, job.file, chunks())
            if rank == 0:
                write_json(job.temporary / STATE, encode(job.state, version=CHECKPOINT_FORMAT))
                flush(job.temporary / STATE)
                facts |= file_facts(job.temporary, [STATE])
            return encode(Manifest(files=facts))

        written = gather_json(together(_attempting(job.step, write), group), group)
        facts = {name: fact for part in written for name, fact in decode(Manifest, part, "rank").files.items()}

        def publish() -> None:
            if rank == 0:
                finish(job.temporary, job.step, facts, job.layout.tensors)

        together(_attempting(job.step, publish), group)
        if rank == 0:
            remove_older(self._folder, job.step, self._keep)

    def load(self, step: int | None = None, *, plan: str = "checkpoint", model_only: bool = False) -> Resumed | None:
        """Resume from a checkpoint, if there is one.

        If the job has as many ranks of the same device types as before, the checkpoint's plan is applied, and training
        continues as if it had not stopped: bit for bit on a CPU. On another cluster, or where the checkpoint's plan no
        longer fits into memory, the present plan stays, and the result says what changed.

        Args:
            step: Of the checkpoint; None: the last one.
            plan: ``"present"`` keeps the present plan also on the same cluster.
            model_only: Load only parameters and buffers; the present plan stays.

        Returns:
            What was done, equal on all ranks; None if ``step`` is None and the folder has no checkpoint.

        Raises:
            ProblemError: There is no checkpoint of that step, or it is damaged: nothing was loaded, and the text names
                an older one.
            ModelError: It is of another model; the text names the first parameters or operators that differ.
            NotReadyError: Another rank failed; the text repeats its error.
        """
        if plan not in ("checkpoint", "present"):
            raise ProblemError(f"plan is {plan!r}: allowed are 'checkpoint' and 'present'")
        self.wait()
        rank, _ = world()
        chosen = broadcast_json(together(lambda: self._chosen(step) if rank == 0 else None))
        if chosen is None:
            return None
        path = step_folder(self._folder, chosen)
        manifest, state = together(lambda: self._checked(path))
        present = self._ranks()
        together(lambda: None if model_only else require_reshardable(self._others, len(state.ranks)))
        together(lambda: require_same_operators(state.ranks, present, state.versions))
        saved = in_present_order(state.ranks, present)
        tight = broadcast_json(self._tight(state.memory_bytes) if rank == 0 else None)
        resumed = decide(chosen, saved, present, tight, "present" if model_only else plan)
        where = f"the checkpoint {str(path)!r}"
        old = not manifest.tensors
        sizes: Sizes = together(lambda: sizes_of_old(path, where) if old else saved_sizes(manifest, where))
        tensors, values = together(lambda: self._state.wanted(sizes, state.values, rank, model_only, where))
        reader = None if old else together(lambda: Reader(path, manifest, tensors))
        if reader is not None:
            reads, group = reader.plan(), self._message_group(needed=world()[1] > 1 and not _on_gloo())
            together(lambda: self._advising(path, lambda: reader.fetch(reads, group)))

        def read() -> None:
            with _translated(f"{where} was not loaded"):
                if reader is None:
                    _load_old(path, tensors)
                else:
                    reader.copy()
            self._state.load(tensors, values, rank, model_only, where)

        together(read)
        if not model_only:
            together(lambda: resume_plan(self._model, rank, saved, resumed))
        if rank == 0:
            _LOGGER.log(logging.WARNING if resumed.replanned else logging.INFO, "%s", resumed.describe())
        return resumed

    def _message_group(self, *, needed: bool) -> Any:
        """A gloo group of all ranks, created once; None, the default group, if not needed or there is one rank."""
        if needed and self._group is None and world()[1] > 1:
            self._group = companion_group(backend="gloo")
        return self._group if needed else None

    def _ranks(self) -> list[RankState]:
        own = RankState.of(self._model, world()[0], self._plan)
        return [decode(RankState, state, f"rank {rank}") for rank, state in enumerate(gather_json(encode(own)))]

    def _chosen(self, step: int | None) -> int | None:
        restore(self._folder)
        steps = self.steps
        if step is None:
            return steps[-1] if steps else None
        if step not in steps:
            present = ", ".join(map(str, steps)) or "none"
            raise ProblemError(f"there is no checkpoint of step {step} in {str(self._folder)!r}: there are {present}")
        return step

    def _checked(self, path: Path) -> tuple[Manifest, _State]:
        """The manifest and the JSON part of a checkpoint; of old ones each rank compares a share of all bytes."""

        def check() -> tuple[Manifest, _State]:
            manifest = verify_sizes(path)
            if manifest.tensors:
                fact = manifest.files.get(STATE)
                if fact is None:
                    raise ProblemError(f"the checkpoint {str(path)!r} lacks {STATE!r}")
                verify_file(path, STATE, fact)
            else:
                verify(path, *world())
            return manifest, state_of(path)

        return self._advising(path, check)

    def _advising(self, path: Path, check: Callable[[], T]) -> T:
        """Run a check of a checkpoint; its error names an older one."""
        try:
            return check()
        except ProblemError as failure:
            older = [step for step in self.steps if step_folder(self._folder, step) != path]
            advice = f"load(step={older[-1]}) takes an older one" if older else "there is no other one"
            raise ProblemError(f"{failure}; nothing was loaded: {advice}, or remove the folder") from failure

    def _tight(self, needed_bytes: Mapping[str, int]) -> list[str]:
        """Device types in whose memory the checkpoint's plan does not fit now, as far as rank 0 knows their limits."""
        if self._plan is None or self._plan.model is None:
            return []
        limits = self._plan.model.limits_bytes
        return [name for name, needed in needed_bytes.items() if name in limits and needed > limits[name]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    step: int
    versions: Mapping[str, str]
    plan: Any
    digest: str
    memory_bytes: Mapping[str, int]
    ranks: tuple[RankState, ...]
    values: Values


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """One save: what this rank holds, and what it writes of it."""

    step: int
    temporary: Path
    collected: Collected
    state: _State
    layout: WritePlan
    file: RankFile | None
    parts: Sequence[Tensor]
    """The values of the boxes of the file, not copied."""


def _on_gloo() -> bool:
    return str(dist.get_backend()) == "gloo"


def _bare_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer inside Accelerate's wrapper, which has no hooks."""
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, torch.optim.Optimizer) else optimizer


def _require_equal_others(digests: Sequence[Mapping[str, str]]) -> None:
    """Refuse other objects whose states differ between ranks, of which a checkpoint keeps one.

    Raises:
        ModelError: On all ranks; the text names the object.
    """
    for rank, own in enumerate(digests):
        for name in own.keys() | digests[0].keys():
            if own.get(name) != digests[0].get(name):
                raise ModelError(
                    f"the state of {name!r} is another one on rank {rank} than on rank 0, and a checkpoint keeps one "
                    "for any number of ranks: give an object whose state is equal on all ranks, such as ResumableLoader"
                )


def value_of(path: Path, name: str) -> Any:
    """What a checkpoint holds of one of its other objects, without its tensors; None if it has no such object.

    Raises:
        ProblemError: The checkpoint is damaged.
    """
    verify_sizes(path)
    value = state_of(path).values.others.get(name)
    return None if value is None else join_state(value, {}, f"the checkpoint {str(path)!r}")


def _attempting(step: int, work: Callable[[], T]) -> Callable[[], T]:
    def translated() -> T:
        with _translated(f"the checkpoint of step {step} was not written"):
            return work()

    return translated


def _load_old(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Read tensors of the first format, which ``torch.distributed.checkpoint`` wrote."""
    load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(path)), no_dist=world()[1] == 1)


def state_of(path: Path) -> _State:
    """The JSON part of a checkpoint, once it was verified.

    Raises:
        ProblemError: It is damaged, or not of the step that the folder says.
    """
    where = str(path / STATE)
    data = read_json(where, (OLD_FORMAT, CHECKPOINT_FORMAT))
    state = decode(_State, data, where, version=data["format"])
    if state.step != int(path.name.removeprefix("step-")):
        raise ProblemError(
            f"{where}: it is of step {state.step}, but the folder is named {path.name!r}: give the folder its name back"
        )
    if digest_of_ranks(state.ranks) != state.digest:
        raise ProblemError(f"{where}: the plan is not the one that was saved: its digest differs")
    return state


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    """Turn failures of the file system and of torch's checkpoints into this package's errors.

    torch's warning that there is no process group, which a job of one process does not need, is suppressed.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            with naming_lost_ranks():
                yield
    except CheckpointException as failure:
        rank, (cause, _) = next(iter(failure.failures.items()))
        if isinstance(cause, ProblemError | ModelError):
            raise cause from failure
        raise ProblemError(f"{what}: rank {rank}: {_reason(cause)}") from failure
    except OSError as failure:
        raise ProblemError(f"{what}: {_reason(failure)}") from failure


def _reason(cause: BaseException) -> str:
    if isinstance(cause, OSError):
        advice = "free space or give another folder; the older checkpoints are as they were"
        return f"{cause.strerror or cause}; {advice}"
    return f"{type(cause).__name__}: {first_line(cause)}"
