"""Stages as processes: hidden states go over gloo, tokens come back to the first stage, and answers to the caller.

The prompts are prefilled in ``prefill`` micro-batches and decoded in ``decode`` ones, greedily. A micro-batch is a
range of rows of one batch, so both phases share their caches. Every process knows the schedule; the caller only waits,
and learns within a bounded time if a stage has ended.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import multiprocessing
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from qsync_opt.errors import ProblemError, QSyncError
from qsync_opt.runtimes.torch.serving.groups import Rows
from qsync_opt.runtimes.torch.serving.stage import Batch, StageModel, check_plan, microbatch_rows
from qsync_opt.runtimes.torch.serving.weights import open_model
from qsync_opt.serving import Plan

OnTokens = Callable[[slice, Sequence[int]], None]
"""Called with the rows of a micro-batch and the next token of each."""


class StageError(QSyncError):
    """A stage has ended, or did not answer in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """New tokens by prompt, without what follows an end token, and seconds of both phases."""

    tokens: tuple[tuple[int, ...], ...]
    prefill_s: float
    decode_s: float

    @property
    def new_tokens(self) -> int:
        """Number of new tokens."""
        return sum(map(len, self.tokens))


@dataclass(frozen=True, slots=True)
class _Work:
    batch: Batch
    new_tokens: int
    prefill: int
    decode: int


@dataclass(frozen=True, slots=True)
class _Setup:
    rank: int
    port: int
    model: str
    plan: dict[str, Any]  # as JSON: read-only mappings cannot be sent
    dtype: torch.dtype
    threads: int
    timeout_s: float


@dataclass(slots=True)
class _Links:
    """What a stage sends and receives; nothing where the pipeline is one stage."""

    rank: int
    stages: int
    pending: list[tuple[Any, torch.Tensor]] = field(default_factory=list)

    def send(self, tensor: torch.Tensor, target: int) -> None:
        """Send without waiting: two stages that wait for each other would stop."""
        tensor = tensor.contiguous()
        self.pending = [(work, kept) for work, kept in self.pending if not work.is_completed()]
        self.pending.append((dist.isend(tensor, target), tensor))

    def receive(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Receive into ``tensor``."""
        dist.recv(tensor, source)
        return tensor

    def finish(self) -> None:
        """Wait until everything is sent."""
        for work, _ in self.pending:
            work.wait()
        self.pending = []


def run_schedule(stage: StageModel, work: _Work, links: _Links, report: OnTokens) -> None:
    """Prefill and decode one batch on one stage; ``report`` gets the tokens on the last stage."""
    tokens_BT, padding_B = work.batch.tokens_BT, work.batch.padding_B
    sequences, length = tokens_BT.shape
    stage.reserve(sequences, length + work.new_tokens)
    newest_B = torch.zeros(sequences, dtype=torch.long)
    last = links.stages - 1

    def step(rows: slice, start: int, tokens: int) -> None:
        count = rows.stop - rows.start
        at = Rows(rows, start, padding_B[rows])
        if links.rank == 0:
            x = tokens_BT[rows] if start == 0 else newest_B[rows, None]
        else:
            shape = (count, tokens, stage.config.hidden)
            x = links.receive(torch.empty(shape, dtype=stage.dtype), links.rank - 1)
        x = stage.hidden(x, at)
        if links.rank < last:
            links.send(x, links.rank + 1)
            return
        following = stage.next_tokens(x)
        newest_B[rows] = following
        if last > 0:
            links.send(following, 0)
        report(rows, following.tolist())

    def collect(rows: slice) -> None:
        """The first stage takes what the last has chosen."""
        if links.rank == 0 and last > 0:
            newest_B[rows] = links.receive(torch.empty(rows.stop - rows.start, dtype=torch.long), last)

    waiting = microbatch_rows(sequences, work.prefill)
    for rows in waiting:
        step(rows, 0, length)
    for rows in waiting:
        collect(rows)
    parts = microbatch_rows(sequences, work.decode)
    for n in range(1, work.new_tokens):
        for rows in parts:
            if n > 1:
                collect(rows)
            step(rows, length + n - 1, 1)
    if work.new_tokens > 1:
        for rows in parts:
            collect(rows)
    links.finish()


def _stage_process(setup: _Setup, pipe: connection.Connection) -> None:
    """The life of a stage: load, say so, then serve batches until the caller goes."""
    torch.set_num_threads(setup.threads)
    plan = Plan.from_json(setup.plan)
    stages = len(plan.stages)
    try:
        config, source = open_model(setup.model)
        stage = StageModel(config, source, plan.stages[setup.rank], plan.schemes, dtype=setup.dtype)
        if stages > 1:
            dist.init_process_group(
                "gloo",
                init_method=f"tcp://127.0.0.1:{setup.port}",
                rank=setup.rank,
                world_size=stages,
                timeout=datetime.timedelta(seconds=setup.timeout_s),
            )
        pipe.send(("ready", stage.bytes))
        while True:
            work = pipe.recv()
            if work is None:
                break
            links = _Links(setup.rank, stages)
            run_schedule(stage, work, links, lambda rows, tokens: pipe.send(("tokens", rows, tokens)))
            pipe.send(("done",))
    except (EOFError, KeyboardInterrupt):  # the caller has gone
        pass
    except Exception as failure:
        with contextlib.suppress(OSError):
            detail = str(failure) if isinstance(failure, QSyncError) else traceback.format_exc(limit=3)
            pipe.send(("failed", detail))
    finally:
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()


class Pipeline:
    """The stages of a plan, running on this machine; a context manager.

    Args:
        model: A model folder or a ``.gguf`` file.
        plan: A serving plan for that model.
        dtype: Type of hidden states, caches and norms.
        threads: Threads of each stage, in the plan's order; one each by default.
        timeout_s: Longest wait for a sign of life while serving; loading has ten times that.

    Raises:
        ProblemError: The plan is for another model.
        StageError: A stage could not load.

    Source: ours.
    """

    def __init__(
        self,
        model: str,
        plan: Plan,
        *,
        dtype: torch.dtype = torch.float32,
        threads: Sequence[int] | None = None,
        timeout_s: float = 120.0,
    ) -> None:
        config, _ = open_model(model)
        check_plan(plan, config)
        self.config, self.plan = config, plan
        self._timeout_s = timeout_s
        threads = threads or [1] * len(plan.stages)
        if len(threads) != len(plan.stages):
            raise ProblemError(f"threads has {len(threads)} entries, but the plan has {len(plan.stages)} stages")
        context = multiprocessing.get_context("spawn")
        port = _free_port()
        self._pipes: list[connection.Connection] = []
        self._processes: list[Any] = []
        self._broken: str | None = None
        for rank, count in enumerate(threads):
            own, other = context.Pipe()
            setup = _Setup(rank, port, str(model), plan.to_json(), dtype, count, timeout_s)
            process = context.Process(
                target=_stage_process, args=(setup, other), daemon=True, name=f"stage {plan.stages[rank].device}"
            )
            process.start()
            other.close()
            self._pipes.append(own)
            self._processes.append(process)
        self.weight_bytes: list[int] = [0] * len(threads)
        try:
            for rank, message in self._messages(10 * timeout_s, "ready"):
                self.weight_bytes[rank] = message[1]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Pipeline:
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
        """Why the pipeline can serve no more, or None."""
        return self._broken

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
        *,
        prefill: int | None = None,
        decode: int | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Generation:
        """Continue each prompt greedily.

        Args:
            prompts: Token numbers; they may differ in length.
            new_tokens: New tokens by prompt, at least 1.
            prefill: Micro-batches of the prompts; by default one row each.
            decode: Micro-batches while decoding; by default as many as stages.
            on_tokens: Called as tokens come.

        Raises:
            ProblemError: A prompt is empty or has a token that the model does not know.
            StageError: A stage ended or did not answer in time; the pipeline is then closed.
        """
        if self._broken is not None:
            raise StageError(f"the pipeline can serve no more: {self._broken}")
        if new_tokens < 1:
            raise ProblemError(f"new_tokens is {new_tokens}, but it must be at least 1")
        batch = Batch.of(prompts, self.config.vocabulary)
        work = _Work(batch, new_tokens, prefill or len(prompts), decode or len(self._pipes))
        started = time.perf_counter()
        first = math.nan
        tokens: list[list[int]] = [[] for _ in prompts]
        for pipe in self._pipes:
            try:
                pipe.send(work)
            except OSError as failure:
                raise self._fail(f"a stage has ended ({failure})") from failure
        missing = len(prompts)
        for _, message in self._messages(self._timeout_s, "done"):
            if message[0] != "tokens":
                continue
            _, rows, values = message
            for row, value in zip(range(rows.start, rows.stop), values, strict=True):
                tokens[row].append(value)
                missing -= len(tokens[row]) == 1
            if missing == 0 and math.isnan(first):
                first = time.perf_counter()
            if on_tokens is not None:
                on_tokens(rows, values)
        ended = time.perf_counter()
        return Generation(
            tokens=tuple(tuple(self._until_end(row)) for row in tokens),
            prefill_s=first - started,
            decode_s=ended - first,
        )

    def _until_end(self, tokens: list[int]) -> Iterator[int]:
        for token in tokens:
            if token in self.config.end_tokens:
                return
            yield token

    def _messages(self, timeout_s: float, final: str) -> Iterator[tuple[int, tuple[Any, ...]]]:
        """Messages of all stages until each has sent a ``final`` one."""
        left = set(range(len(self._pipes)))
        sentinels = {process.sentinel: rank for rank, process in enumerate(self._processes)}
        while left:
            ready = connection.wait([*(self._pipes[rank] for rank in left), *sentinels], timeout_s)
            if not ready:
                raise self._fail(f"no stage answered for {timeout_s:g} s")
            heard = False
            for rank in sorted(left):
                pipe = self._pipes[rank]
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
            ended = [sentinels[item] for item in ready if isinstance(item, int)]
            if ended and not heard:
                code = self._processes[ended[0]].exitcode
                device = self.plan.stages[ended[0]].device
                raise self._fail(f"stage {ended[0]} on {device!r} ended with exit code {code}")

    def _fail(self, reason: str) -> StageError:
        self._broken = " ".join(reason.split())
        self.close()
        return StageError(f"{self._broken}; the pipeline is closed, start another one")

    def close(self) -> None:
        """End all stages."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        if self._broken is None:
            self._broken = "it was closed"
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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def generate_here(
    stages: Sequence[StageModel], prompts: Sequence[Sequence[int]], new_tokens: int, *, parts: int = 1
) -> list[list[int]]:
    """Continue prompts with stages that are all in this process, one micro-batch after another; for tests and tools."""
    batch = Batch.of(prompts, stages[0].config.vocabulary)
    sequences, length = batch.tokens_BT.shape
    for stage in stages:
        stage.reserve(sequences, length + new_tokens)
    result: list[list[int]] = [[] for _ in prompts]
    for rows in microbatch_rows(sequences, parts):
        x = batch.tokens_BT[rows]
        for n in range(new_tokens):
            at = Rows(rows, 0 if n == 0 else length + n - 1, batch.padding_B[rows])
            for stage in stages:
                x = stage.hidden(x, at)
            tokens = stages[-1].next_tokens(x)
            for row, token in zip(range(rows.start, rows.stop), tokens.tolist(), strict=True):
                result[row].append(token)
            x = tokens[:, None]
    return result
