"""Continuous batching: requests join and leave running micro-batches between any two passes.

A request is admitted when a place is free and pages for its prompt and all its new tokens are, so that nothing that
runs can run out of memory; others wait, up to a limit. Running requests are spread over as many micro-batches as there
are stages, each with at most one pass under way, which keeps every stage busy. A micro-batch prefills what it was given
since its last pass, else it decodes.

Where drafts are allowed, what followed the latest tokens earlier in a request's text is passed along with its last
token, and counts as far as the model would have chosen it: tokens are those of plain decoding, up to rounding.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from qsync_opt.errors import NotReadyError, ProblemError
from qsync_opt.runtimes.torch.decoding import LookupDrafter
from qsync_opt.runtimes.torch.serving.stage import check_prompts
from qsync_opt.runtimes.torch.serving.steps import Choice, PageStore, Step, pages_of
from qsync_opt.runtimes.torch.serving.workers import StageError, Workers


class FullError(NotReadyError):
    """As many requests wait as may."""


class Update(NamedTuple):
    """What a request's listener hears: a token, or the end with its reason, or an error."""

    token: int | None = None
    finish: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What an engine accepts.

    Attributes:
        context: Most tokens of a request, prompt and new ones.
        running: Most requests that run at once.
        waiting: Most requests that wait.
        cached: Positions that caches hold in all, rounded up to pages.
        prefill: Prompt tokens of a pass; a longer prompt has a pass of its own.
        microbatches: Micro-batches under way at once.
        drafts: Most tokens that are drafted for a greedy request in a pass; 0: none.
    """

    context: int = 4096
    running: int = 32
    waiting: int = 128
    cached: int = 16384
    prefill: int = 2048
    microbatches: int = 1
    drafts: int = 0

    def __post_init__(self) -> None:
        for name in ("context", "running", "cached", "prefill", "microbatches"):
            if getattr(self, name) < 1:
                raise ProblemError(f"{name} is {getattr(self, name)}, but it must be at least 1")
        for name in ("waiting", "drafts"):
            if getattr(self, name) < 0:
                raise ProblemError(f"{name} is {getattr(self, name)}, but it must be at least 0")
        if self.context > self.cached:
            raise ProblemError(
                f"a request may have {self.context} tokens, but caches hold {self.cached}; allow shorter requests or "
                "larger caches"
            )


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """A prompt to continue; ``listener`` hears each token and the end, in the engine's thread.

    Attributes:
        prompt: Token numbers.
        new_tokens: Most new tokens.
        listener: Called with every `Update`.
        temperature: 0: the most likely token.
        top_p: Draw from the most likely tokens that together reach this probability.
        seed: Of drawn tokens; the same seed draws the same ones.
        ends: Further tokens that end it, beside the model's.
    """

    prompt: Sequence[int]
    new_tokens: int
    listener: Callable[[Update], None]
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    ends: Collection[int] = ()
    pages: tuple[int, ...] = ()
    tokens: list[int] = field(default_factory=list)
    cancelled: bool = False
    submitted_s: float = 0.0
    _random: random.Random | None = None

    def choice(self) -> Choice:
        """How the next token is chosen."""
        if self.temperature == 0:
            return Choice()
        if self._random is None:
            self._random = random.Random(self.seed)
        return Choice(self.temperature, self.top_p, self._random.random())


@dataclass(slots=True)
class Counts:
    """What has happened so far; times in seconds."""

    finished: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    prefill_passes: int = 0
    decode_passes: int = 0
    drafted: int = 0
    accepted: int = 0
    first_token_s: float = 0.0
    first_tokens: int = 0


@dataclass(slots=True, eq=False)
class _Microbatch:
    fresh: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    under_way: bool = False

    @property
    def size(self) -> int:
        return len(self.fresh) + len(self.running)


class Engine:
    """Requests over `Workers`, from a thread of its own; a context manager.

    Args:
        workers: The stages; the engine closes them.
        limits: What is accepted.
        on_failure: Called once with the reason if the stages fail; all requests have then heard of it.
    """

    def __init__(
        self, workers: Workers, limits: EngineLimits | None = None, *, on_failure: Callable[[str], None] | None = None
    ) -> None:
        self.limits = limits or EngineLimits()
        self.config = workers.config
        self.counts = Counts()
        self.on_failure = on_failure
        self._workers = workers
        self._pages = PageStore(pages_of(self.limits.cached) + 1)
        self._waiting: deque[Request] = deque()
        self._microbatches = [_Microbatch() for _ in range(self.limits.microbatches)]
        self._under_way: deque[tuple[Step, _Microbatch, list[Request]]] = deque()
        self._drafter = LookupDrafter()
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._failure: str | None = None
        self._stopping = False
        workers.reserve(self._pages.total + 1)
        self._thread = threading.Thread(target=self._run, name="serving engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def failure(self) -> str | None:
        """Why nothing is served any more, or None."""
        return self._failure

    @property
    def running(self) -> int:
        """Requests that run."""
        return sum(batch.size for batch in self._microbatches)

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    @property
    def pages_used(self) -> int:
        """Pages that requests hold."""
        return self._pages.used

    @property
    def pages(self) -> int:
        """Pages that there are."""
        return self._pages.total

    def check(self, prompt: Sequence[int], new_tokens: int) -> None:
        """Refuse what can never be served.

        Raises:
            ProblemError: An unusable prompt, or too many tokens.
        """
        check_prompts([prompt], self.config.vocabulary)
        if new_tokens < 1:
            raise ProblemError(f"new tokens are {new_tokens}, but there must be at least 1")
        if len(prompt) + new_tokens > self.limits.context:
            raise ProblemError(
                f"the prompt has {len(prompt)} tokens and {new_tokens} new ones are asked for, but this server was "
                f"planned for {self.limits.context} in all; shorten the prompt or ask for fewer"
            )

    def submit(self, request: Request) -> None:
        """Let a request run or wait.

        Raises:
            ProblemError: It can never be served.
            FullError: As many requests wait as may.
            StageError: The stages have failed, or the engine is closed.
        """
        self.check(request.prompt, request.new_tokens)
        with self._changed:
            if self._failure is not None or self._stopping:
                raise StageError(self._failure or "the server is stopping")
            if len(self._waiting) >= self.limits.waiting and not self._fits_now(request):
                self.counts.refused += 1
                raise FullError(
                    f"{self.running} requests run and {len(self._waiting)} wait, and no more may; try again later"
                )
            request.submitted_s = time.perf_counter()
            self._waiting.append(request)
            self._changed.notify()

    def _fits_now(self, request: Request) -> bool:
        needed = pages_of(len(request.prompt) + request.new_tokens)
        free = self._pages.total - self._pages.used
        return not self._waiting and self.running < self.limits.running and needed <= free

    def cancel(self, request: Request) -> None:
        """Stop a request whose client has gone, and free its pages; nothing if it has ended."""
        with self._changed:
            request.cancelled = True
            self._changed.notify()

    def close(self) -> None:
        """Stop: requests that still run hear an error."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()
        self._workers.close()

    def _run(self) -> None:
        try:
            while self._prepare():
                for batch in self._microbatches:
                    if not batch.under_way:
                        self._begin(batch)
                if self._under_way:
                    self._end_oldest()
            self._end_all("the server is stopping")
        except StageError as failure:
            self._fail(str(failure))
        except BaseException as failure:
            self._fail(f"the engine failed: {failure!r}")
            raise

    def _prepare(self) -> bool:
        """Wait for something to do, drop what is cancelled and admit what fits; False to stop."""
        with self._changed:
            while not (self._stopping or self._waiting or self.running):
                self._changed.wait()
            if self._stopping:
                return False
            self._drop_cancelled()
            while self._waiting and self.running < self.limits.running:
                request = self._waiting[0]
                pages = self._pages.take(len(request.prompt) + request.new_tokens)
                if pages is None:
                    break
                request.pages = pages
                self._waiting.popleft()
                min(self._microbatches, key=lambda batch: batch.size).fresh.append(request)
        return True

    def _drop_cancelled(self) -> None:
        for request in [request for request in self._waiting if request.cancelled]:
            self._waiting.remove(request)
            self._finish(request, "cancelled")
        for batch in self._microbatches:
            if batch.under_way:  # its requests are dropped when the pass ends
                continue
            for members in (batch.fresh, batch.running):
                for request in [request for request in members if request.cancelled]:
                    members.remove(request)
                    self._finish(request, "cancelled")

    def _begin(self, batch: _Microbatch) -> None:
        """Submit the next pass of a micro-batch, if it has one."""
        drafts: list[list[int]] = []
        if batch.fresh:
            members = [batch.fresh.pop(0)]
            total = len(members[0].prompt)
            while batch.fresh and total + len(batch.fresh[0].prompt) <= self.limits.prefill:
                members.append(batch.fresh.pop(0))
                total += len(members[-1].prompt)
            batch.running.extend(members)
            self.counts.prefill_passes += 1
            self.counts.prompt_tokens += total
        elif batch.running:
            members = list(batch.running)
            self.counts.decode_passes += 1
            if self.limits.drafts:
                drafts = [self._draft(request) for request in members]
        else:
            return
        step = Step(
            number=next(self._numbers),
            tokens=tuple(
                (r.tokens[-1], *draft) if r.tokens else tuple(r.prompt)
                for r, draft in zip(members, drafts or [[]] * len(members), strict=True)
            ),
            starts=tuple(len(r.prompt) + len(r.tokens) - 1 if r.tokens else 0 for r in members),
            pages=tuple(r.pages for r in members),
            choices=tuple(r.choice() for r in members),
            every=any(drafts),
        )
        batch.under_way = True
        self._under_way.append((step, batch, members))
        self._workers.submit(step)

    def _draft(self, request: Request) -> list[int]:
        if request.temperature > 0:
            return []
        most = min(self.limits.drafts, request.new_tokens - len(request.tokens) - 1)
        return self._drafter.find([*request.prompt, *request.tokens], most)

    def _end_oldest(self) -> None:
        """Wait for the oldest pass and hand out its tokens."""
        result = self._workers.result()
        step, batch, members = self._under_way.popleft()
        if result.number != step.number:
            raise StageError(f"the stages answered pass {result.number}, but {step.number} was the oldest")
        now = time.perf_counter()
        tokens = iter(result.tokens)
        for request, passed in zip(members, step.tokens, strict=True):
            if not request.tokens:
                self.counts.first_token_s += now - request.submitted_s
                self.counts.first_tokens += 1
            new = [next(tokens)]
            if step.every:
                new += itertools.islice(tokens, len(passed) - 1)
                agreed = sum(itertools.takewhile(bool, (a == b for a, b in zip(passed[1:], new, strict=False))))
                self.counts.drafted += len(passed) - 1
                self.counts.accepted += agreed
                del new[agreed + 1 :]
            reason = self._extend(request, new)
            if reason is not None:
                with self._changed:
                    batch.running.remove(request)
                    self._finish(request, reason)
        batch.under_way = False

    def _extend(self, request: Request, new: Sequence[int]) -> str | None:
        """Hand out new tokens; why the request ends with them, if it does."""
        for token in new:
            request.tokens.append(token)
            self.counts.new_tokens += 1
            if request.cancelled:
                return "cancelled"
            if token in self.config.end_tokens or token in request.ends:
                return "stop"
            request.listener(Update(token=token))
            if len(request.tokens) >= request.new_tokens:
                return "length"
        return None

    def _finish(self, request: Request, reason: str, error: str | None = None) -> None:
        if request.pages:
            self._pages.give_back(request.pages)
            request.pages = ()
        self.counts.finished[reason] += 1
        request.listener(Update(finish=None if error else reason, error=error))

    def _end_all(self, reason: str) -> None:
        with self._changed:
            requests = list(self._waiting)
            self._waiting.clear()
            for batch in self._microbatches:
                requests += [*batch.fresh, *batch.running]
                batch.fresh.clear()
                batch.running.clear()
            for request in requests:
                self._finish(request, "failed", reason)

    def _fail(self, reason: str) -> None:
        with self._changed:
            self._failure = reason
        self._end_all(reason)
        if self.on_failure is not None:
            self.on_failure(reason)
