"""The communication hook: each gradient bucket of ``DistributedDataParallel`` is reduced under its planned scheme.

The hook returns a future at once. With NCCL everything is queued on a stream of its own, and the host never waits.
Other backends block the thread that calls them, so one thread of the hook's own reduces bucket after bucket, in a
process group of its own: waiting inside callbacks of the same group can deadlock.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from qsync_opt.errors import ModelError, ProblemError, UnsupportedError
from qsync_opt.gradients import BucketStatistics, GradientScheme, Plan, RecordedReductions, scheme
from qsync_opt.kernels.gradients import Codec
from qsync_opt.runtimes.torch.ddp import naming_lost_ranks, require_agreement, together
from qsync_opt.runtimes.torch.gradients.records import StepRecords
from qsync_opt.runtimes.torch.gradients.statistics import bucket_statistics
from qsync_opt.runtimes.torch.gradients.transports import Reducer

_ADVICE = "give all ranks the same plan, seed and implementation"


class GradientCompression:
    """State of the hook; `compress_gradients` makes one.

    ``step`` counts reduced steps and is part of the random key, so that a job that resumes with the saved state draws
    what it would have drawn. ``elements`` are the sizes of the buckets, in their order, once a step has shown them.
    """

    def __init__(self, plan: Plan | GradientScheme | str, *, seed: int, group: Any, backend: str) -> None:
        self.group = group
        self.workers = dist.get_world_size(group)
        self.step = 0
        self.elements: tuple[int, ...] | None = None
        self._seen: list[int] = []
        self._records = StepRecords()
        self._schemes: tuple[GradientScheme, ...] | GradientScheme = scheme("FP32")
        self._plan: Plan | None = None
        self._codec = Codec(backend)
        self._seed = seed
        self.use(plan)
        self._direct = "nccl" in dist.get_backend(group)
        self._executor: concurrent.futures.ThreadPoolExecutor | None = None
        self._stream: torch.cuda.Stream | None = None
        own = group
        if not self._direct and self.workers > 1:
            ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
            own = dist.new_group(ranks, use_local_synchronization=True, backend=dist.get_backend(group))
            self._executor = concurrent.futures.ThreadPoolExecutor(1, "qsync-gradients")
        self._reducer = Reducer(group=own, seed=seed, codec=self._codec)

    @property
    def seed(self) -> int:
        """Seed of the random streams, the same on all ranks."""
        return self._seed

    def use(self, plan: Plan | GradientScheme | str) -> None:
        """Reduce by another plan from the next step on; every rank must call it.

        Raises:
            ProblemError: The plan was made for another number of workers.
            UnsupportedError: An unknown scheme, or one whose sums would overflow with so many workers.
            ModelError: The ranks' plans differ.
            NotReadyError: On the ranks whose plan is right, if that of another is not.
        """
        chosen = together(lambda: schemes_of(plan, self.workers), self.group)
        agreed = {
            "schemes": [each.name for each in chosen] if isinstance(chosen, tuple) else chosen.name,
            "elements": list(plan.elements) if isinstance(plan, Plan) and plan.elements is not None else None,
            "seed": self._seed,
        }
        require_agreement("the compression of gradients", agreed, _ADVICE, self.group)
        self._schemes, self._plan = chosen, plan if isinstance(plan, Plan) else None

    def close(self) -> None:
        """End the thread that reduces and its process group, on all ranks; a job that ends need not call it."""
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None
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
        require_agreement("the state of gradient compression", [seed, step], _ADVICE, self.group)
        self._seed = self._reducer.seed = seed
        self.step = step

    def sampling(self) -> contextlib.AbstractContextManager[None]:
        """Collect statistics of all steps in the block, which are reduced plainly; `statistics` returns them."""
        return self._records.sample()

    def statistics(self) -> tuple[BucketStatistics, ...]:
        """Statistics of each bucket, the mean of the sampled steps.

        Raises:
            NotReadyError: No step was sampled after DDP had settled its buckets.
        """
        return self._records.statistics()

    def recording(self) -> contextlib.AbstractContextManager[None]:
        """Note when each bucket is ready, begins and ends in all steps of the block; `recorded` returns it."""
        return self._records.record()

    def recorded(self) -> RecordedReductions:
        """What `recording` noted on this rank; its first step only says when the second one begins.

        Raises:
            NotReadyError: Fewer than two steps were recorded after DDP had settled its buckets, or there is one worker.
        """
        return self._records.recorded(self.workers, self.elements)

    def hook(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Reduce one bucket; ``DistributedDataParallel`` calls it."""
        gradient, index = bucket.buffer(), bucket.index()
        # DDP regroups its buckets after the first step, when it knows the order of gradients.
        settled = self.elements is not None
        sample = settled and self._records.sampling
        chosen = self._scheme_of(index, gradient) if settled and not sample else scheme("FP32")
        step = self.step
        record = self._records.step_at(index, gradient.device) if settled and self._records.recording else None
        ready_ns = time.perf_counter_ns()
        self._count(index, gradient.numel(), bucket.is_last())
        if self.workers == 1 and not sample:
            done: torch.futures.Future[Tensor] = torch.futures.Future()
            done.set_result(gradient)
            return done

        def reduce() -> None:
            start_ns = time.perf_counter_ns()
            before = gradient.clone() if sample else gradient
            with naming_lost_ranks():
                self._reducer.reduce(gradient, chosen, step, index)
                if sample:
                    self._records.add_sample(index, bucket_statistics(before, gradient, group=self._reducer.group))
            if record is not None:
                record.append((chosen.name, ready_ns, start_ns, time.perf_counter_ns()))

        if self._executor is not None:
            return self._in_thread(gradient, reduce)
        return self._on_stream(gradient, reduce)

    def _scheme_of(self, index: int, gradient: Tensor) -> GradientScheme:
        if not isinstance(self._schemes, tuple):
            return self._schemes
        advice = "(bucket_cap_mb and the parameters that need gradients decide them)"
        return planned_scheme(self._schemes, self._plan, index, gradient.numel(), f"DDP {advice}")

    def _count(self, index: int, elements: int, last: bool) -> None:
        self._seen = [*self._seen, elements] if index else [elements]
        if last:
            self.elements = tuple(self._seen)
            self.step += 1

    def _on_stream(self, gradient: Tensor, reduce: Any) -> torch.futures.Future[Tensor]:
        device = gradient.device
        if device.type != "cuda":
            result: torch.futures.Future[Tensor] = torch.futures.Future()
            reduce()
            result.set_result(gradient)
            return result
        self._stream = self._stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[device])
        with torch.cuda.stream(self._stream):
            gradient.record_stream(self._stream)
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
        self._stream = self._stream or torch.cuda.Stream(gradient.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            gradient.record_stream(self._stream)
            yield


def planned_scheme(
    schemes: Sequence[GradientScheme], plan: Plan | None, index: int, elements: int, layout: str
) -> GradientScheme:
    """The scheme of a bucket, which must be one of those that the plan was made for.

    Raises:
        ModelError: There are more buckets, or this one has another size.
    """
    advice = f"make a plan for the buckets of {layout}"
    if index >= len(schemes):
        raise ModelError(f"a bucket number {index} is reduced, but the plan has {len(schemes)}; {advice}")
    sizes = None if plan is None else plan.elements
    if sizes is not None and sizes[index] != elements:
        raise ModelError(f"bucket {index} has {elements} elements, but the plan was made for {sizes[index]}; {advice}")
    return schemes[index]


def schemes_of(plan: Plan | GradientScheme | str, workers: int) -> tuple[GradientScheme, ...] | GradientScheme:
    """The schemes of a plan, or the one of all buckets."""
    if not isinstance(plan, Plan):
        chosen = scheme(plan)
        _check_workers(chosen, workers)
        return chosen
    if plan.workers is not None and plan.workers != workers:
        raise ProblemError(
            f"the plan was made for {plan.workers} workers, but {workers} reduce here: scales and variances depend on "
            "the number; make a plan for this job"
        )
    schemes = tuple(scheme(name) for name in plan.schemes.values())
    for each in schemes:
        _check_workers(each, workers)
    return schemes


def _check_workers(each: GradientScheme, workers: int) -> None:
    if not each.supports(workers):
        raise UnsupportedError(
            f"scheme {each.name!r} would overflow with {workers} workers; take one of more bits, or a two-shot scheme"
        )


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
