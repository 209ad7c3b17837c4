"""Continuous batching: requests join and leave running micro-batches between any two passes.

A request is admitted when a place is free and pages for its prompt and all its new tokens are, so that nothing that
runs can run out of memory; others wait, up to a limit. Running requests are spread over as many micro-batches as there
are stages, each with at most one pass under way, which keeps every stage busy. A micro-batch prefills what it was given
since its last pass, else it decodes.

Where drafts are allowed, drafted tokens are passed along with a request's last one, and count as far as the model
chooses the same: tokens, drawn ones too, are those of plain decoding, up to rounding.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from qsync_opt.decoding import Judged
from qsync_opt.errors import NotReadyError, ProblemError
from qsync_opt.runtimes.torch.decoding import TextIndex
from qsync_opt.runtimes.torch.serving.speculation import LONGEST, LOOKUP, PLAIN, Cycle, Speculation
from qsync_opt.runtimes.torch.serving.stage import check_prompts
from qsync_opt.runtimes.torch.serving.steps import (
    GREEDY,
    SELF_DRAFTS,
    Choice,
    PageStore,
    SelfDraft,
    Step,
    drafting,
    pages_of,
)
from qsync_opt.runtimes.torch.serving.workers import Result, StageError, Workers


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
    """

    context: int = 4096
    running: int = 32
    waiting: int = 128
    cached: int = 16384
    prefill: int = 2048
    microbatches: int = 1

    def __post_init__(self) -> None:
        for name in ("context", "running", "cached", "prefill", "microbatches"):
            if getattr(self, name) < 1:
                raise ProblemError(f"{name} is {getattr(self, name)}, but it must be at least 1")
        if self.waiting < 0:
            raise ProblemError(f"waiting is {self.waiting}, but it must be at least 0")
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
        drafts: Most tokens that are drafted for it in a pass; None: as the engine says.
    """

    prompt: Sequence[int]
    new_tokens: int
    listener: Callable[[Update], None]
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    ends: Collection[int] = ()
    drafts: int | None = None
    pages: tuple[int, ...] = ()
    tokens: list[int] = field(default_factory=list)
    cancelled: bool = False
    submitted_s: float = 0.0
    _random: random.Random | None = None
    _noises: deque[int] = field(default_factory=deque)
    _index: TextIndex | None = None
    _foretold: list[int] | None = None
    _agreed: int = 0
    _judged: int = 0

    def choices(self, count: int) -> list[Choice]:
        """How the next ``count`` tokens are chosen; a token is chosen in the same way however often it is asked for."""
        if self.temperature == 0:
            return [GREEDY] * count
        if self._random is None:
            self._random = random.Random(self.seed)
        while len(self._noises) < count:
            self._noises.append(self._random.getrandbits(32))
        return [Choice(self.temperature, self.top_p, noise) for noise in itertools.islice(self._noises, count)]

    def extend(self, token: int) -> None:
        """Add a new token."""
        self.tokens.append(token)
        if self._noises:
            self._noises.popleft()

    def lookup(self, most: int) -> list[int]:
        """What followed the latest tokens earlier in the text."""
        return self._indexed(len(self.tokens)).following(most)

    def _indexed(self, count: int) -> TextIndex:
        """The index of the prompt and so many new tokens; it never had more."""
        if self._index is None:
            self._index = TextIndex()
            self._index.extend(self.prompt)
        self._index.extend(itertools.islice(self.tokens, len(self._index) - len(self.prompt), count))
        return self._index

    def judge_lookup(self, new: int, longest: int, *, alone: bool) -> Iterator[tuple[int, bool]]:
        """Positions of drafts that look-up would have made and the latest ``new`` tokens judge: whether they are right.

        Such drafts follow each other as if they had run: the token at a wrong one, or after a whole one, is the
        verifier's. Where there is nothing to look up, a request that is alone would decode plainly, so that this says
        nothing; in a batch it would be rejected.
        """
        if self._judged != len(self.tokens) - new:
            self._foretold = None  # tokens in between were not watched
        self._judged = len(self.tokens)
        for place in range(len(self.tokens) - new, len(self.tokens)):
            if self._foretold is None:
                self._foretold, self._agreed = self._indexed(place).following(longest), 0
            if self._agreed == longest:
                self._foretold = None
                continue
            right = self._foretold[self._agreed : self._agreed + 1] == [self.tokens[place]]
            if self._foretold or not alone:
                yield self._agreed, right
            if right:
                self._agreed += 1
            else:
                self._foretold = None


@dataclass(slots=True)
class Counts:
    """What has happened so far; times in seconds."""

    finished: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    prefill_passes: int = 0
    decode_passes: int = 0
    drafts: int = 0
    drafted: list[int] = field(default_factory=lambda: [0] * LONGEST)
    accepted: list[int] = field(default_factory=lambda: [0] * LONGEST)
    first_token_s: float = 0.0
    first_tokens: int = 0

    def add_draft(self, drafted: int, accepted: int) -> None:
        """Count a sequence's draft by position."""
        self.drafts += 1
        for position in range(drafted):
            self.drafted[position] += 1
            self.accepted[position] += position < accepted


_NO_TOKEN = (
    "the model's scores hold NaN, so that no token can be chosen; check its weights and the range of the computing type"
)


_WATCHED = 4
"""Requests of a micro-batch for which look-up is watched: enough to know it, and no more work for larger batches."""


def _most_drafts(request: Request, cycle: Cycle) -> int:
    """Drafts of a request in a cycle: what is drafted never goes beyond its pages."""
    most = min(cycle.length, request.new_tokens - len(request.tokens) - 1)
    return most if request.drafts is None else min(most, request.drafts)


@dataclass(slots=True, eq=False)
class _Microbatch:
    number: int
    fresh: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    under_way: bool = False

    @property
    def size(self) -> int:
        return len(self.fresh) + len(self.running)


class _Pass(NamedTuple):
    """A pass under way: what was submitted and for whom, and the cycle that a speculation, if asked, chose for it.

    ``known`` are the drafts of each member that are judged; ``drafting`` is what follows a pass that drafts.
    """

    step: Step
    batch: _Microbatch
    members: list[Request]
    cycle: Cycle
    asked: bool
    known: Sequence[Sequence[int]]
    drafting: Generator[Step, Sequence[int], Step] | None = None

    def drafts(self, result: Result) -> Sequence[Sequence[int]]:
        """The drafted tokens of each member."""
        if self.step.draft is None:
            return self.known or [()] * len(self.members)
        tokens = iter(result.drafted)
        return [tuple(itertools.islice(tokens, length)) for length in self.step.draft.lengths]


class Engine:
    """Requests over `Workers`, from a thread of its own; a context manager.

    Args:
        workers: The stages; the engine closes them.
        limits: What is accepted.
        speculation: What is drafted; None: nothing.
        on_failure: Called once with the reason if the stages fail; all requests have then heard of it.
    """

    def __init__(
        self,
        workers: Workers,
        limits: EngineLimits | None = None,
        *,
        speculation: Speculation | None = None,
        on_failure: Callable[[str], None] | None = None,
    ) -> None:
        self.speculation = speculation
        self.limits = limits or EngineLimits()
        self.config = workers.config
        self.counts = Counts()
        self.on_failure = on_failure
        self._workers = workers
        self._pages = PageStore(pages_of(self.limits.cached) + 1)
        self._waiting: deque[Request] = deque()
        self._microbatches = [_Microbatch(number) for number in range(self.limits.microbatches)]
        self._under_way: deque[_Pass] = deque()
        self._spoiled: list[int] = []
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
        cycle, asked = PLAIN, False
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
            if self.speculation is not None:
                asked = True
                context = max(len(r.prompt) + len(r.tokens) for r in members)
                cycle = self.speculation.choose(batch.number, len(members), context)
        else:
            return
        most = [_most_drafts(request, cycle) for request in members]
        looked_up: list[list[int]] = []
        if cycle.draft == LOOKUP:
            looked_up = [request.lookup(n) if n else [] for request, n in zip(members, most, strict=True)]
            lengths = list(map(len, looked_up))
        else:
            lengths = most
        itself = cycle.draft in SELF_DRAFTS and any(lengths)
        step = Step(
            number=next(self._numbers),
            tokens=tuple(
                (r.tokens[-1], *draft) if r.tokens else tuple(r.prompt)
                for r, draft in zip(members, looked_up or [[]] * len(members), strict=True)
            ),
            starts=tuple(len(r.prompt) + len(r.tokens) - 1 if r.tokens else 0 for r in members),
            pages=tuple(r.pages for r in members),
            choices=tuple(
                choice for r, length in zip(members, lengths, strict=True) for choice in r.choices(length + 1)
            ),
            every=any(lengths),
            draft=SelfDraft(lengths=tuple(lengths), precision=SELF_DRAFTS[str(cycle.draft)]) if itself else None,
            wipe=tuple(self._spoiled),
        )
        self._spoiled.clear()
        batch.under_way = True
        ahead = _Pass(step, batch, members, cycle, asked, looked_up)
        if itself and self._workers.stage_count > 1:
            drafts = drafting(step)
            ahead = ahead._replace(step=next(drafts), drafting=drafts)
        self._submit(ahead)

    def _submit(self, ahead: _Pass) -> None:
        self._under_way.append(ahead)
        self._workers.submit(ahead.step)

    def _draft_on(self, ended: _Pass, drafts: Generator[Step, Sequence[int], Step], tokens: Sequence[int]) -> None:
        """Submit the next drafting pass through several stages, or the one that judges what they drafted."""
        try:
            ahead = ended._replace(step=replace(drafts.send(tokens), number=next(self._numbers)))
        except StopIteration as end:
            judging: Step = replace(end.value, number=next(self._numbers))
            drafted = [drafts for _, *drafts in judging.tokens]
            ahead = ended._replace(step=judging, known=drafted, drafting=None)
        self._submit(ahead)

    def _end_oldest(self) -> None:
        """Wait for the oldest pass and hand out its tokens."""
        result = self._workers.result()
        ended = self._under_way.popleft()
        step, batch, members = ended.step, ended.batch, ended.members
        if result.number != step.number:
            raise StageError(f"the stages answered pass {result.number}, but {step.number} was the oldest")
        if ended.drafting is not None:
            self._draft_on(ended, ended.drafting, result.tokens)
            return
        now = time.perf_counter()
        tokens, observed = iter(result.tokens), []
        looked_up = ended.cycle.length if ended.cycle.draft == LOOKUP else 0
        longest = 0  # of the drafts of look-up that are watched
        if self.speculation is not None and ended.asked and (watched := self.speculation.watched) > looked_up:
            longest = watched
        judged: Counter[tuple[int, bool]] = Counter()
        watched_s = 0.0
        for row, (request, drafted) in enumerate(zip(members, ended.drafts(result), strict=True)):
            before = len(request.tokens)
            if not request.tokens:
                self.counts.first_token_s += now - request.submitted_s
                self.counts.first_tokens += 1
            new = [next(tokens), *itertools.islice(tokens, len(drafted))]
            agreed = sum(itertools.takewhile(bool, (a == b for a, b in zip(drafted, new, strict=False))))
            del new[agreed + 1 :]
            if drafted:
                self.counts.add_draft(len(drafted), agreed)
            if step.every and _most_drafts(request, ended.cycle) == ended.cycle.length:
                observed.append(agreed)  # one that had to be shorter says nothing of the missing tokens
            reason = self._extend(request, new)
            if longest and row < _WATCHED:
                began = time.perf_counter()
                judged.update(request.judge_lookup(len(request.tokens) - before, longest, alone=len(members) == 1))
                watched_s += time.perf_counter() - began
            if reason is not None:
                with self._changed:
                    batch.running.remove(request)
                    self._finish(request, reason, _NO_TOKEN if reason == "failed" else None)
        if self.speculation is not None and longest:
            positions = sorted({position for position, _ in judged if position >= looked_up})
            verdicts = [Judged(position, judged[position, True], judged[position, False]) for position in positions]
            self.speculation.watch(batch.number, verdicts, watched_s)
        if self.speculation is not None and ended.asked and (observed or not ended.cycle.length):
            self.speculation.observe(batch.number, observed or [0] * len(members))
        batch.under_way = False

    def _extend(self, request: Request, new: Sequence[int]) -> str | None:
        """Hand out new tokens; why the request ends with them, if it does."""
        for token in new:
            if token < 0:
                self._spoiled += request.pages
                return "failed"
            request.extend(token)
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
