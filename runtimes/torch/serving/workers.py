"""What carries passes out: all stages in this process, or a process for each.

Passes go to every stage by a pipe, in one order; hidden states go from stage to stage over NCCL where each stage has a
card of its own, else over gloo, and the chosen tokens from the last stage back by its pipe. The caller learns within a
bounded time if a stage has ended.
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import queue
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from qsync_opt.errors import ProblemError, QSyncError
from qsync_opt.runtimes.torch.serving.allocator import (
    give_back_freed_memory,
    memory_beside_torch,
    reuse_freed_memory,
)
from qsync_opt.runtimes.torch.serving.config import DecoderConfig
from qsync_opt.runtimes.torch.serving.stage import Progress, StageModel, check_plan
from qsync_opt.runtimes.torch.serving.steps import Step, drafted
from qsync_opt.runtimes.torch.serving.weights import open_model
from qsync_opt.serving import Plan

_SENDS = 4
"""Passes that the next stage may be behind."""
_CHANNELS = 4
"""Of NCCL between two cards, at most."""


class StageError(QSyncError):
    """A stage has ended, or did not answer in time."""


class Result(NamedTuple):
    """The next token of each sequence of a pass; for `Step.every` of each token, and what the model drafted itself."""

    number: int
    tokens: tuple[int, ...]
    drafted: tuple[int, ...] = ()


def _run(stage: StageModel, step: Step, x: torch.Tensor | None) -> tuple[torch.Tensor, tuple[int, ...]]:
    """A pass through a stage, with what it drafted before."""
    if step.draft is None:
        return stage.run(step, x), ()
    step = stage.draft(step)
    return stage.run(step), tuple(token for tokens in step.tokens for token in tokens[1:])


def _refused_by_all(refusals: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """What no stage can draft cheaper, with the reason of the first."""
    return {draft: reason for draft, reason in refusals[0].items() if all(draft in other for other in refusals)}


class Workers(Protocol):
    """Stages that carry out passes in the order in which they are submitted."""

    config: DecoderConfig
    stage_count: int
    draft_refusals: Mapping[str, str]
    """Why drafts by the model itself cannot gain, by draft; others may."""

    def reserve(self, pages: int) -> None:
        """Have so many empty pages on every stage, page 0 included."""

    def submit(self, step: Step) -> None:
        """Begin a pass.

        Raises:
            StageError: The stages have ended.
        """

    def result(self) -> Result:
        """Wait for the result of the oldest pass that has none.

        Raises:
            StageError: A stage ended, or did not answer in time.
        """

    def close(self) -> None:
        """End all stages."""


def run_step(workers: Workers, step: Step) -> Result:
    """The result of a pass and its drafts: where the model is several stages, drafted tokens cross all of them."""

    def carry_out(one: Step) -> Result:
        workers.submit(one)
        return workers.result()

    if step.draft is not None and workers.stage_count > 1:
        step = drafted(step, lambda ahead: carry_out(ahead).tokens)
    return carry_out(step)


class LocalWorkers:
    """Stages in this process, one after another."""

    def __init__(self, stages: Sequence[StageModel]) -> None:
        self.config = stages[0].config
        self.stage_count = len(stages)
        self.draft_refusals: Mapping[str, str] = _refused_by_all([stage.draft_refusals for stage in stages])
        self._stages = stages
        self._results: deque[Result] = deque()

    def reserve(self, pages: int) -> None:
        """See `Workers.reserve`."""
        for stage in self._stages:
            stage.reserve(pages)

    def submit(self, step: Step) -> None:
        """See `Workers.submit`."""
        x, drafted = _run(self._stages[0], step, None)
        for stage in self._stages[1:]:
            x = stage.run(step, x)
        self._results.append(Result(step.number, tuple(x.tolist()), drafted))

    def result(self) -> Result:
        """See `Workers.result`."""
        return self._results.popleft()

    def close(self) -> None:
        """Nothing to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOptions:
    """How stages run.

    Attributes:
        dtype: Type of hidden states, caches, norms and ends.
        kv_bits: 8 for caches of 8 bits; None: as ``dtype``.
        head: Weight scheme of the head; None: as ``dtype``.
        threads: Threads of each stage, in the plan's order; one each by default.
        devices: torch's device of each stage, such as ``cuda:0``; all on the CPU by default.
        capture: Replay decoding, and the judging of drafts, from CUDA graphs on cards.
        reproducible: See `StageModel`.
        timeout_s: Longest wait for a result; loading has ten times that.
    """

    dtype: torch.dtype = torch.float32
    kv_bits: int | None = None
    head: str | None = None
    threads: Sequence[int] | None = None
    devices: Sequence[str] | None = None
    capture: bool = True
    reproducible: bool = False
    timeout_s: float = 120.0


@dataclass(frozen=True, slots=True)
class _Setup:
    rank: int
    port: int
    model: str
    plan: dict[str, Any]  # as JSON: read-only mappings cannot be sent
    device: str
    threads: int
    options: StageOptions
    between_cards: bool


class _Arriving(NamedTuple):
    """Hidden states of the stage before, of some tokens, that are on their way over gloo, or that NCCL is to fetch."""

    rank: int
    tokens: int
    hidden: int
    dtype: torch.dtype
    work: Any = None
    x: torch.Tensor | None = None

    def wait(self, device: torch.device) -> torch.Tensor:
        """The hidden states; on a card, what is computed next waits for them and the host does not."""
        if self.x is not None:
            self.work.wait()
            return self.x.to(device)
        x = torch.empty((self.tokens, self.hidden), dtype=self.dtype, device=device)
        dist.recv(x, self.rank - 1)
        return x


@dataclass(slots=True)
class _Links:
    """What a stage has from the one before and sends to the next; nothing where the pipeline is one stage."""

    rank: int
    stages: int
    between_cards: bool
    sent: deque[tuple[Any, torch.Tensor]] = field(default_factory=deque)

    def send(self, tensor: torch.Tensor) -> None:
        """Send without waiting, so that the next pass can begin, unless the receiver is far behind."""
        # The next pass may write its result where this one's is.
        kept = tensor.clone() if self.between_cards else tensor.contiguous().cpu().view(torch.uint8)
        self.sent.append((dist.isend(kept, self.rank + 1), kept))
        # A send over gloo is never completed until somebody waits for it; on a card, the stream of passes waits.
        while len(self.sent) > _SENDS:
            self.sent.popleft()[0].wait()

    def expect(self, order: Step | int | None, hidden: int, dtype: torch.dtype) -> _Arriving | None:
        """Let the hidden states of a pass come; None on the first stage, or if the order is no pass."""
        if self.rank == 0 or not isinstance(order, Step):
            return None
        tokens = sum(order.counts)
        if self.between_cards:
            return _Arriving(self.rank, tokens, hidden, dtype)
        x = torch.empty((tokens, hidden), dtype=dtype)
        return _Arriving(self.rank, tokens, hidden, dtype, dist.irecv(x.view(torch.uint8), self.rank - 1), x)


_Order = Step | int | None
"""A pass, the number of pages to make, or None: end."""


def _orders(
    pipe: connection.Connection, links: _Links, hidden: int, dtype: torch.dtype
) -> Callable[[], tuple[_Order, _Arriving | None]]:
    """What gives a stage its next order, with what comes for it from the stage before.

    gloo sends when the receiver is ready: where hidden states come over it, a thread takes the next order and lets them
    come while this one's are computed, also where the order comes meanwhile.
    """

    def take() -> tuple[_Order, _Arriving | None]:
        order = pipe.recv()
        return order, links.expect(order, hidden, dtype)

    if links.rank == 0 or links.between_cards:
        return take
    ahead: queue.Queue[tuple[_Order, _Arriving | None] | Exception] = queue.Queue(maxsize=1)

    def listen() -> None:
        order: _Order = 0
        while order is not None:
            try:
                order, arriving = take()
                ahead.put((order, arriving))
            except Exception as failure:
                ahead.put(failure)
                return

    def from_thread() -> tuple[_Order, _Arriving | None]:
        entry = ahead.get()
        if isinstance(entry, Exception):
            raise entry
        return entry

    threading.Thread(target=listen, name="orders", daemon=True).start()
    return from_thread


def _nccl_options(timeout: datetime.timedelta) -> Any:
    """As many channels as hidden states need: each has buffers on the card."""
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.config.max_ctas = _CHANNELS
    return options


def _meeting_point(port: int | None = None) -> Any:
    """Where stages find each other: the store that listens at a port, or a new one with its ``port``."""
    return dist.TCPStore("127.0.0.1", port or 0, is_master=port is None, wait_for_workers=False)  # type: ignore[attr-defined]


def _stage_process(setup: _Setup, pipe: connection.Connection) -> None:
    """The life of a stage: load, say so, then run passes until the caller goes."""
    torch.set_num_threads(setup.threads)
    reuse_freed_memory()
    if setup.device.startswith("cuda"):
        torch.cuda.set_device(torch.device(setup.device).index or 0)
    plan, options = Plan.from_json(setup.plan), setup.options
    links = _Links(setup.rank, len(plan.stages), setup.between_cards)
    try:
        config, source = open_model(setup.model)
        stage = StageModel(
            config,
            source,
            plan.stages[setup.rank],
            plan.schemes,
            dtype=options.dtype,
            device=setup.device,
            kv_bits=options.kv_bits,
            head=options.head,
            capture=options.capture,
            reproducible=options.reproducible,
            progress=lambda done, total, name: pipe.send(("loading", done, total, name)),
        )
        if links.stages > 1:
            timeout = datetime.timedelta(seconds=options.timeout_s)
            dist.init_process_group(
                "nccl" if setup.between_cards else "gloo",
                pg_options=_nccl_options(timeout) if setup.between_cards else None,
                store=_meeting_point(setup.port),
                rank=setup.rank,
                world_size=links.stages,
                timeout=timeout,
            )
        give_back_freed_memory()
        pipe.send(("ready", stage.bytes, stage.draft_refusals))
        next_order = _orders(pipe, links, config.hidden, stage.dtype)
        while True:
            order, arriving = next_order()
            if order is None:
                break
            if isinstance(order, int):
                before = stage.cache_bytes
                stage.reserve(order)
                if stage.cache_bytes != before:
                    # What stood between the earlier pages does not add to what new passes need.
                    give_back_freed_memory()
                pipe.send(("reserved", stage.cache_bytes, memory_beside_torch(stage.device)))
                continue
            x, drafted = _run(stage, order, None if arriving is None else arriving.wait(stage.device))
            if stage.last:
                pipe.send(("result", Result(order.number, tuple(x.tolist()), drafted)))
            else:
                links.send(x)
    except (EOFError, KeyboardInterrupt, BrokenPipeError):  # the caller has gone
        pass
    except Exception as failure:
        with contextlib.suppress(OSError):
            detail = str(failure) if isinstance(failure, QSyncError) else traceback.format_exc(limit=3)
            pipe.send(("failed", detail))
    finally:
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()


class StageProcesses:
    """The stages of a plan as processes of this machine; `Workers`, and a context manager.

    Args:
        model: A model folder or a ``.gguf`` file.
        plan: A serving plan for that model.
        options: How the stages run.
        progress: Told of every loaded group of any stage.
        started: Told of the number of every process before it loads.

    Raises:
        ProblemError: The plan is for another model, or an option does not fit it.
        StageError: A stage could not load.

    Source: ours.
    """

    def __init__(
        self,
        model: str,
        plan: Plan,
        options: StageOptions | None = None,
        *,
        progress: Progress | None = None,
        started: Callable[[int], None] | None = None,
    ) -> None:
        options = options or StageOptions()
        self.config, _ = open_model(model)
        check_plan(plan, self.config)
        self.plan, self.options = plan, options
        count = len(plan.stages)
        threads, devices = options.threads or [1] * count, options.devices or ["cpu"] * count
        for name, values in (("threads", threads), ("devices", devices)):
            if len(values) != count:
                raise ProblemError(f"{name} has {len(values)} entries, but the plan has {count} stages")
        self.stage_count = count
        self.draft_refusals: Mapping[str, str] = {}
        refusals: list[dict[str, str]] = [{} for _ in range(count)]
        self._broken: str | None = None
        self._store: Any = None
        self._pipes: list[connection.Connection] = []
        self._processes: list[Any] = []
        self.weight_bytes: list[int] = [0] * count
        self.cache_bytes: list[int] = [0] * count
        self.beside_bytes: list[int] = [0] * count
        context = multiprocessing.get_context("spawn")
        # Listens from now on: while stages load, another program could take a port that was only looked up.
        if count > 1:
            self._store = _meeting_point()
        port = 0 if self._store is None else self._store.port
        cards = {device for device in devices if device.startswith("cuda:")}
        between_cards = count > 1 and len(cards) == count and dist.is_nccl_available()
        try:
            for rank in range(count):
                own, other = context.Pipe()
                setup = _Setup(
                    rank, port, str(model), plan.to_json(), devices[rank], threads[rank], options, between_cards
                )
                process = context.Process(
                    target=_stage_process, args=(setup, other), daemon=True, name=f"stage {plan.stages[rank].device}"
                )
                process.start()
                if started is not None and process.pid is not None:
                    started(process.pid)
                other.close()
                self._pipes.append(own)
                self._processes.append(process)
            loaded, total = [0] * count, sum(len(stage.groups) for stage in plan.stages)
            for rank, message in self._until("ready", 10 * options.timeout_s):
                if message[0] == "loading":
                    loaded[rank] = message[1]
                    if progress is not None:
                        progress(sum(loaded), total, f"{plan.stages[rank].device}: {message[3]}")
                elif message[0] == "ready":
                    self.weight_bytes[rank] = message[1]
                    refusals[rank] = message[2]
            self.draft_refusals = _refused_by_all(refusals)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> StageProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process number of each stage."""
        return tuple(process.pid for process in self._processes)

    @property
    def broken(self) -> str | None:
        """Why the stages can serve no more, or None."""
        return self._broken

    def reserve(self, pages: int) -> None:
        """See `Workers.reserve`."""
        self._tell(pages)
        for rank, message in self._until("reserved", self.options.timeout_s):
            self.cache_bytes[rank], self.beside_bytes[rank] = message[1:]

    def submit(self, step: Step) -> None:
        """See `Workers.submit`."""
        self._tell(step)

    def result(self) -> Result:
        """See `Workers.result`."""
        last = len(self._pipes) - 1
        for rank, message in self._until("result", self.options.timeout_s, {last}):
            if rank == last and message[0] == "result":
                result: Result = message[1]
                return result
        raise self._fail("the last stage has gone")

    def _tell(self, order: Step | int) -> None:
        if self._broken is not None:
            raise StageError(f"the stages can serve no more: {self._broken}")
        for pipe in self._pipes:
            try:
                pipe.send(order)
            except OSError:
                raise self._fail(self._ended() or "a stage has ended") from None

    def _ended(self) -> str | None:
        """Which stage has ended, if one has."""
        for rank, process in enumerate(self._processes):
            if process.exitcode is not None:
                return f"stage {rank} on {self.plan.stages[rank].device!r} ended with exit code {process.exitcode}"
        return None

    def _until(
        self, final: str, timeout_s: float, ranks: set[int] | None = None
    ) -> Iterator[tuple[int, tuple[Any, ...]]]:
        """Messages of all stages until each of ``ranks`` (all by default) has sent a ``final`` one."""
        left = set(range(len(self._pipes))) if ranks is None else ranks
        sentinels = [process.sentinel for process in self._processes]
        while left:
            ready = connection.wait([*self._pipes, *sentinels], timeout_s)
            if not ready:
                raise self._fail(f"no stage answered for {timeout_s:g} s")
            heard = False
            for rank, pipe in enumerate(self._pipes):
                if pipe not in ready:
                    continue
                try:
                    message = pipe.recv()
                except (EOFError, OSError):
                    continue  # its process has ended, which is said below
                heard = True
                if message[0] == "failed":
                    raise self._fail(f"stage {rank} on {self.plan.stages[rank].device!r} failed: {message[1]}")
                if message[0] == final:
                    left.discard(rank)
                yield rank, message
            if not heard:
                for process in self._processes:
                    if process.sentinel in ready:
                        process.join(1)
                raise self._fail(self._ended() or "a stage has closed its pipe")

    def _fail(self, reason: str) -> StageError:
        self._broken = " ".join(reason.split())
        self.close()
        return StageError(f"{self._broken}; the stages are closed, start them again")

    def close(self) -> None:
        """End all stages."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        if self._broken is None:
            self._broken = "they were closed"
        else:
            for process in self._processes:
                process.kill()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()
        self._store = None
