"""A batch of prompts through the stages of a plan: prefilled in some micro-batches, decoded in others.

This is the schedule that plans are evaluated by: all prompts at once, the same number of new tokens each. For requests
that come and go see `qsync_opt.runtimes.torch.serving.engine`.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from qsync_opt.errors import ProblemError
from qsync_opt.runtimes.torch.serving.stage import Progress, StageModel, check_prompts
from qsync_opt.runtimes.torch.serving.steps import GREEDY, Step, pages_of
from qsync_opt.runtimes.torch.serving.workers import LocalWorkers, StageOptions, StageProcesses, Workers
from qsync_opt.serving import Plan

OnTokens = Callable[[slice, Sequence[int]], None]
"""Called with the rows of a micro-batch and the next token of each."""


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


def microbatch_rows(sequences: int, parts: int) -> list[slice]:
    """The rows of each of ``parts`` micro-batches, as equal as they can be; fewer where there are fewer rows."""
    parts = min(parts, sequences)
    borders = [sequences * k // parts for k in range(parts + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(borders)]


class _Sequences:
    """Prompts with what was generated, and the pages that each has."""

    def __init__(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
        self.prompts = prompts
        self.new: list[list[int]] = [[] for _ in prompts]
        self.pages: list[tuple[int, ...]] = []
        first = 1
        for prompt in prompts:
            count = pages_of(len(prompt) + new_tokens)
            self.pages.append(tuple(range(first, first + count)))
            first += count
        self.all_pages = first

    def step(self, number: int, rows: slice) -> Step:
        """The next pass of some rows."""
        tokens, starts = [], []
        for prompt, new in zip(self.prompts[rows], self.new[rows], strict=True):
            tokens.append(tuple(prompt) if not new else (new[-1],))
            starts.append(0 if not new else len(prompt) + len(new) - 1)
        return Step(
            number=number,
            tokens=tuple(tokens),
            starts=tuple(starts),
            pages=tuple(self.pages[rows]),
            choices=(GREEDY,) * len(tokens),
        )


def generate(
    workers: Workers,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    prefill: int,
    decode: int,
    on_tokens: OnTokens | None = None,
) -> Generation:
    """Continue each prompt greedily; see `Pipeline.generate`."""
    if new_tokens < 1:
        raise ProblemError(f"new_tokens is {new_tokens}, but it must be at least 1")
    check_prompts(prompts, workers.config.vocabulary)
    sequences = _Sequences(prompts, new_tokens)
    workers.reserve(sequences.all_pages)
    numbers = itertools.count()

    def collect(rows: slice) -> None:
        tokens = workers.result().tokens
        for new, token in zip(sequences.new[rows], tokens, strict=True):
            new.append(token)
        if on_tokens is not None:
            on_tokens(rows, tokens)

    started = time.perf_counter()
    parts = microbatch_rows(len(prompts), prefill)
    for rows in parts:
        workers.submit(sequences.step(next(numbers), rows))
    for rows in parts:
        collect(rows)
    first = time.perf_counter()
    waiting: deque[slice] = deque()
    if new_tokens > 1:
        for rows in microbatch_rows(len(prompts), decode):
            workers.submit(sequences.step(next(numbers), rows))
            waiting.append(rows)
    while waiting:
        rows = waiting.popleft()
        collect(rows)
        if len(sequences.new[rows.start]) < new_tokens:
            workers.submit(sequences.step(next(numbers), rows))
            waiting.append(rows)
    ended = time.perf_counter()
    ends = workers.config.end_tokens
    return Generation(
        tokens=tuple(tuple(_until_end(new, ends)) for new in sequences.new),
        prefill_s=first - started,
        decode_s=ended - first if new_tokens > 1 else math.nan,
    )


def _until_end(tokens: Sequence[int], ends: Sequence[int]) -> Iterator[int]:
    return itertools.takewhile(lambda token: token not in ends, tokens)


class Pipeline(StageProcesses):
    """The stages of a plan, running on this machine, for batches; a context manager.

    Args:
        model: A model folder or a ``.gguf`` file.
        plan: A serving plan for that model.
        dtype: Type of hidden states, caches and norms.
        threads: Threads of each stage, in the plan's order; one each by default.
        timeout_s: Longest wait for a result; loading has ten times that.
        kv_bits: 8 for caches of 8 bits; None: as ``dtype``.
        head: Weight scheme of the head; None: as ``dtype``.
        devices: torch's device of each stage; all on the CPU by default.
        progress: Told of every loaded group.
        started: Told of the number of every process before it loads.

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
        kv_bits: int | None = None,
        head: str | None = None,
        devices: Sequence[str] | None = None,
        progress: Progress | None = None,
        started: Callable[[int], None] | None = None,
    ) -> None:
        options = StageOptions(
            dtype=dtype, threads=threads, timeout_s=timeout_s, kv_bits=kv_bits, head=head, devices=devices
        )
        super().__init__(model, plan, options, progress=progress, started=started)

    def __enter__(self) -> Pipeline:
        return self

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
        parts = (prefill or len(prompts), decode or len(self.plan.stages))
        return generate(self, prompts, new_tokens, prefill=parts[0], decode=parts[1], on_tokens=on_tokens)


def generate_here(
    stages: Sequence[StageModel], prompts: Sequence[Sequence[int]], new_tokens: int, *, parts: int = 1
) -> list[list[int]]:
    """Continue prompts with stages that are all in this process; for tests and tools."""
    result = generate(LocalWorkers(stages), prompts, new_tokens, prefill=parts, decode=parts)
    return [list(tokens) for tokens in result.tokens]
