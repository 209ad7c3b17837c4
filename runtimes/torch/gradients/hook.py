"""The communication hook: each gradient bucket of ``DistributedDataParallel`` is reduced under its planned scheme.

The hook returns a future at once. With NCCL everything is queued on a stream of its own, and the host never waits.
Other backends block the thread that calls them, so one thread of the hook's own reduces bucket after bucket, in a
process group of its own: waiting inside callbacks of the same group can deadlock.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from qsync_opt.errors import ProblemError, UnsupportedError
from qsync_opt.gradients import Computation, GradientScheme, Plan, Transport, scheme
from qsync_opt.kernels.gradients import Codec
from qsync_opt.runtimes.torch.ddp import companion_group, naming_lost_ranks, require_agreement, together
from qsync_opt.runtimes.torch.gradients.planned import ADVICE, PlannedReductions
from qsync_opt.runtimes.torch.gradients.statistics import bucket_statistics
from qsync_opt.runtimes.torch.gradients.transports import Reducer
from qsync_opt.runtimes.torch.support import synchronize, time_mark

_PAUSES_S = (0.005, 0.02, 0.08)
"""Pauses after which a step is timed: what is lost grows with them up to about the longest."""


class GradientCompression(PlannedReductions):
    """State of the hook; `compress_gradients` makes one.

    ``step`` counts reduced steps and is part of the random key, so that a job that resumes with the saved state draws
    what it would have drawn. DDP settles its buckets after its first step.
    """

    what = "gradients"
    layout = "DDP (bucket_cap_mb and the parameters that need gradients decide them)"

    def __init__(self, plan: Plan | GradientScheme | str, *, seed: int, group: Any, backend: str) -> None:
        super().__init__(workers=dist.get_world_size(group), seed=seed, group=group)
        self.step = 0
        self._seen: list[int] = []
        self._idle = False
        self._codec = Codec(backend)
        self.use(plan)
        self._direct = "nccl" in dist.get_backend(group)
        self._executor: concurrent.futures.ThreadPoolExecutor | None = None
        self._stream: torch.cuda.Stream | None = None
        own = group
        if not self._direct and self.workers > 1:
            own = companion_group(group)
            self._executor = concurrent.futures.ThreadPoolExecutor(1, "qsync-gradients")
        self._reducer = Reducer(group=own, seed=seed, codec=self._codec)

    @property
    def seed(self) -> int:
        """Seed of the random streams, the same on all ranks."""
        return self._seed

    @contextlib.contextmanager
    def idle(self) -> Iterator[None]:
        """Reduce nothing within the block, to time steps without reductions: every rank keeps its own gradients.

        Unlike ``no_sync``, DDP does all else that it does for each bucket.
        """
        self._idle = True
        try:
            yield
        finally:
            self._idle = False

    def computation(self, step: Callable[[], object], steps: int, device: torch.device | str = "cpu") -> Computation:
        """Time steps that reduce nothing; every rank must call it.

        Args:
            step: Runs a forward and a backward pass of the model on ``device``.
            steps: How many are timed, after one that is not.
            device: Where the gradients are.

        Returns:
            Means over steps, of the slowest worker: among other steps, and after pauses, as steps wait for reductions.
        """
        device = torch.device(device)

        def seconds(count: int, pause_s: float = 0.0) -> float:
            synchronize(device)
            time.sleep(pause_s)
            began = time.perf_counter()
            for _ in range(count):
                step()
            synchronize(device)
            return time.perf_counter() - began

        def slowest_ns(spent_s: Sequence[float]) -> list[int]:
            means = torch.tensor([each / steps for each in spent_s], dtype=torch.float64, device=device)
            dist.all_reduce(means, op=dist.ReduceOp.MAX, group=self.group)
            return [round(1e9 * each) for each in means.tolist()]

        with self.idle():
            step()
            dist.barrier(self.group)
            (alone_ns,) = slowest_ns([seconds(steps)])
            dist.barrier(self.group)
            # In turn, so that a busy moment does not fall on one of them.
            each_s = [[seconds(1, pause_s) for pause_s in (0.0, *_PAUSES_S)] for _ in range(steps)]
            at_once_ns, *after_ns = slowest_ns([sum(column) for column in zip(*each_s, strict=True)])
        later_ns = {round(1e9 * p): max(0, own - at_once_ns) for p, own in zip(_PAUSES_S, after_ns, strict=True)}
        return Computation(alone_ns=alone_ns, later_ns=later_ns)

    def close(self) -> None:
        """End the thread that reduces, and its process group if all ranks are in it; all call it, or none."""
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None
            # Torch names a group of some ranks after how many groups there are. If this one went, the next would have
            # its name, and might wait for the addresses at which this one listened.
            if self.workers == dist.get_world_size():
                dist.destroy_process_group(self._reducer.group)

    def state_dict(self) -> dict[str, int]:
        """What decides the random keys of the next steps."""
        return {"seed": self._seed, "step": self.step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue where `state_dict` was taken; every rank must call it.

        Raises:
            ProblemError: Other keys or values than those of `state_dict`.
            ModelError: The ranks' states differ.
        """

        def checked() -> tuple[int, int]:
            if set(state) != {"seed", "step"} or not all(type(value) is int for value in state.values()):
                raise ProblemError(
                    f"the state of gradient compression is {dict(state)!r}, but seed and step are needed"
                )
            return state["seed"], state["step"]

        seed, step = together(checked, self.group)
        require_agreement("the state of gradient compression", [seed, step], ADVICE, self.group)
        self._seed = self._reducer.seed = seed
        self.step = step

    def hook(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Reduce one bucket; ``DistributedDataParallel`` calls it."""
        gradient, index = bucket.buffer(), bucket.index()
        # DDP regroups its buckets after the first step, when it knows the order of gradients.
        settled = self.elements is not None
        sample = settled and self._records.sampling
        chosen = self._scheme_of(index, gradient.numel()) if settled and not sample else scheme("FP32")
        step = self.step
        record = self._records.step_at(index) if settled and self._records.recording else None
        ready = None if record is None else time_mark(gradient.device)
        self._count(index, gradient.numel(), bucket.is_last())
        if self._idle or (self.workers == 1 and not sample):
            done: torch.futures.Future[Tensor] = torch.futures.Future()
            done.set_result(gradient)
            return done

        def note(start: Any) -> None:
            if record is not None:
                record.append((chosen.name, ready, start, time_mark(gradient.device)))

        if self._direct and gradient.is_cuda and chosen.transport is Transport.PLAIN and not sample:
            return self._plainly(gradient, None if record is None else lambda: note(ready))

        def reduce() -> None:
            start = None if record is None else time_mark(gradient.device)
            before = gradient.clone() if sample else gradient
            with naming_lost_ranks():
                self._reducer.reduce(gradient, chosen, step, index)
                if sample:
                    self._records.add_sample(index, bucket_statistics(before, gradient, group=self._reducer.group))
            note(start)

        if self._executor is not None:
            return self._in_thread(gradient, reduce)
        return self._on_stream(gradient, reduce)

    def _count(self, index: int, elements: int, last: bool) -> None:
        self._seen = [*self._seen, elements] if index else [elements]
        if last:
            self.elements = tuple(self._seen)
            self.step += 1

    def _plainly(self, gradient: Tensor, ended: Callable[[], None] | None) -> torch.futures.Future[Tensor]:
        """NCCL's own mean, with as little of the host's time as there can be."""
        with naming_lost_ranks():
            work = self.group.allreduce([gradient], _mean_options())
        if ended is not None:  # only then does what follows on this stream wait
            with torch.cuda.stream(self._own_stream(gradient.device)):
                work.wait()
                ended()
        future: torch.futures.Future[Tensor] = work.get_future().then(_first)
        return future

    def _on_stream(self, gradient: Tensor, reduce: Any) -> torch.futures.Future[Tensor]:
        device = gradient.device
        if device.type != "cuda":
            result: torch.futures.Future[Tensor] = torch.futures.Future()
            reduce()
            result.set_result(gradient)
            return result
        stream = self._own_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[device])
        with torch.cuda.stream(stream):
            gradient.record_stream(stream)
            reduce()
            future.set_result(gradient)  # who waits for it waits for this stream
        return future

    def _in_thread(self, gradient: Tensor, reduce: Any) -> torch.futures.Future[Tensor]:
        on_card = gradient.device.type == "cuda"
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[gradient.device] if on_card else None)
        ready = torch.cuda.Event() if on_card else None  # type: ignore[no-untyped-call]
        if ready is not None:
            ready.record(torch.cuda.current_stream(gradient.device))

        def work() -> None:
            try:
                with torch.no_grad(), self._side_stream(gradient, ready):
                    reduce()
                    future.set_result(gradient)
            except Exception as failure:  # whoever waits must hear of it
                future.set_exception(failure)  # type: ignore[arg-type]

        assert self._executor is not None
        self._executor.submit(work)
        return future

    @contextlib.contextmanager
    def _side_stream(self, gradient: Tensor, ready: torch.cuda.Event | None) -> Iterator[None]:
        if ready is None:
            yield
            return
        stream = self._own_stream(gradient.device)
        with torch.cuda.stream(stream):
            stream.wait_event(ready)
            gradient.record_stream(stream)
            yield

    def _own_stream(self, device: torch.device) -> torch.cuda.Stream:
        self._stream = self._stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._stream


@functools.cache
def _mean_options() -> Any:
    """Of an all-reduce that gives the mean, which NCCL has."""
    options: Any = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.AVG
    return options


def _first(future: torch.futures.Future[list[Tensor]]) -> Tensor:
    """DDP takes a tensor."""
    return future.value()[0]


def _run_hook(state: GradientCompression, bucket: Any) -> torch.futures.Future[Tensor]:
    return state.hook(bucket)


# DDP reads the annotation of the second parameter.
_run_hook.__annotations__ = {
    "bucket": dist.GradBucket,  # type: ignore[attr-defined]
    "return": torch.futures.Future[Tensor],
}


def compress_gradients(
    model: DistributedDataParallel,
    plan: Plan | GradientScheme | str,
    *,
    seed: int = 0,
    backend: str = "auto",
) -> GradientCompression:
    """Reduce the gradients of a ``DistributedDataParallel`` model under a plan; every rank must call it.

    The first step after this call is reduced plainly, because DDP regroups its buckets after its first step. Steps
    inside ``no_sync`` are not reduced at all, as always; the accumulated gradient is compressed once.

    Args:
        model: The wrapped model. Its own process group is used.
        plan: A compression plan, whose k-th scheme is that of the k-th bucket, or one scheme for all buckets, by name
            (``"sum8"``) or as an object.
        seed: Of the random rounding, the same on all ranks.
        backend: Of the codec: ``"auto"``, ``"compiled"`` or ``"reference"``.

    Returns:
        The state of the hook: save its ``state_dict()`` in checkpoints, change plans by ``use``, sample statistics.

    Raises:
        UnsupportedError: This is no DDP model, a scheme is unknown, or its sums would overflow with so many workers.
        ProblemError: The plan was made for another number of workers.
        ModelError: The ranks were given different plans or seeds. In training: the buckets are not those of the plan.
        NotReadyError: On the ranks whose plan is right, if that of another is not; or a rank does not answer.

    Source: the interface of DDP's communication hooks; the schemes are described in `qsync_opt.gradients.Scheme`.
    """
    if not isinstance(model, DistributedDataParallel):
        raise UnsupportedError(
            f"the model is a {type(model).__name__}, but gradients are compressed in DistributedDataParallel; wrap it"
        )
    state = GradientCompression(plan, seed=seed, group=model.process_group, backend=backend)
    model.register_comm_hook(state, _run_hook)
    return state
