"""How often drafts are accepted, and what drafting and judging cost, through the stages that will serve."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from qsync_opt.decoding import AcceptanceCounts, DraftMeasurement, Measurements, RegimeTimes
from qsync_opt.errors import ProblemError
from qsync_opt.runtimes.torch.serving.engine import Engine, EngineLimits, Request, Update
from qsync_opt.runtimes.torch.serving.speculation import LONGEST, LOOKUP, FixedSpeculation, Speculation
from qsync_opt.runtimes.torch.serving.steps import GREEDY, SELF_DRAFTS, SelfDraft, Step, pages_of
from qsync_opt.runtimes.torch.serving.workers import StageError, Workers, run_step

_LONGEST_WAIT_S = 3600.0


def random_prompts(vocabulary: int, count: int, tokens: int, seed: int = 0) -> list[list[int]]:
    """Prompts of random tokens, for where no text is at hand."""
    draw = random.Random(seed)
    return [[draw.randrange(vocabulary) for _ in range(tokens)] for _ in range(count)]


class _Kept:
    """Workers that an engine does not close."""

    def __init__(self, workers: Workers) -> None:
        self.config, self.stage_count, self.draft_refusals = workers.config, workers.stage_count, workers.draft_refusals
        self.reserve, self.submit, self.result = workers.reserve, workers.submit, workers.result

    def close(self) -> None:
        """Nothing."""


def answer(
    workers: Workers,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    speculation: Speculation | None = None,
    running: int = 8,
    ends: Sequence[int] = (),
    temperature: float = 0.0,
) -> tuple[list[list[int]], float]:
    """The new tokens of each prompt, and the seconds that all took; the workers stay open.

    Args:
        workers: They run nothing else.
        prompts: Token numbers.
        new_tokens: Of each prompt at most.
        speculation: What is drafted.
        running: Prompts at once.
        ends: Tokens that end an answer, beside the model's.
        temperature: 0: the most likely tokens; else a prompt's number is the seed.

    Raises:
        StageError: A stage, or a request, failed.
    """
    longest = max(map(len, prompts)) + new_tokens
    limits = EngineLimits(
        context=longest, cached=running * (longest + 16), running=running, waiting=len(prompts),
        microbatches=workers.stage_count,
    )  # fmt: skip
    tokens: list[list[int]] = [[] for _ in prompts]
    failures: list[str] = []
    left = threading.Semaphore(0)

    def listener(row: int) -> Callable[[Update], None]:
        def hear(update: Update) -> None:
            if update.token is not None:
                tokens[row].append(update.token)
                return
            if update.error is not None:
                failures.append(update.error)
            left.release()

        return hear

    with Engine(_Kept(workers), limits, speculation=speculation) as engine:
        began = time.perf_counter()
        for row, prompt in enumerate(prompts):
            engine.submit(Request(
                prompt=prompt, new_tokens=new_tokens, listener=listener(row), ends=ends, temperature=temperature,
                seed=row,
            ))  # fmt: skip
        for _ in prompts:
            if not left.acquire(timeout=_LONGEST_WAIT_S):
                raise StageError(f"no answer within {_LONGEST_WAIT_S:g} s")
        seconds = time.perf_counter() - began
    if failures:
        raise StageError(failures[0])
    return tokens, seconds


def measure_acceptance(
    workers: Workers, draft: str, length: int, prompts: Sequence[Sequence[int]], new_tokens: int
) -> list[AcceptanceCounts]:
    """What became of a draft's tokens by position, over the answer to each prompt, one at a time.

    Raises:
        ProblemError: An unknown draft or an unusable length.
        StageError: A stage failed.
    """
    counts = []
    for prompt in prompts:
        speculation = FixedSpeculation(draft, length)
        answer(workers, [prompt], new_tokens, speculation=speculation, running=1)
        counts.append(speculation.acceptance)
    return counts


def _step(sequences: int, tokens: int, context: int, longest: int, number: int, draft: SelfDraft | None = None) -> Step:
    """A pass over some tokens of each sequence behind a cached context."""
    each = pages_of(context + longest)
    length = tokens if draft is None else draft.lengths[0] + 1
    return Step(
        number=number,
        tokens=((1,) * tokens,) * sequences,
        starts=(context,) * sequences,
        pages=tuple(tuple(range(1 + row * each, 1 + (row + 1) * each)) for row in range(sequences)),
        choices=(GREEDY,) * (sequences * length),
        every=length > 1,
        draft=draft,
    )


def _median_ns(workers: Workers, steps: Mapping[str, Step], rounds: int) -> dict[str, int]:
    """Median nanoseconds of passes that take turns, after one round that warms up."""
    times: dict[str, list[int]] = {name: [] for name in steps}
    for _ in range(rounds + 1):
        for name, step in steps.items():
            began = time.perf_counter_ns()
            run_step(workers, step)
            times[name].append(time.perf_counter_ns() - began)
    return {name: round(statistics.median(taken[1:])) for name, taken in times.items()}


def measure_times(
    workers: Workers, drafts: Sequence[str], lengths: Sequence[int], batch: int, context: int, rounds: int = 5
) -> tuple[dict[int, int], dict[str, int]]:
    """Nanoseconds of a pass by its tokens per sequence, and of one drafted token by draft, in one regime.

    The time of a drafted token is that of a cycle of the longest length, less that of the pass that judges it.
    """
    longest = max(lengths)
    workers.reserve(batch * pages_of(context + longest + 1) + 1)
    steps = {
        str(tokens): _step(batch, tokens, context, longest + 1, 0)
        for tokens in (1, *(length + 1 for length in lengths))
    }
    for draft in drafts:
        if draft in SELF_DRAFTS:
            own = SelfDraft(lengths=(longest,) * batch, precision=SELF_DRAFTS[draft])
            steps[draft] = _step(batch, 1, context, longest + 1, 0, own)
    times = _median_ns(workers, steps, rounds)
    verify_ns = {int(name): time_ns for name, time_ns in times.items() if name.isdigit()}
    judging_ns = verify_ns[longest + 1]
    draft_ns = {draft: max(0, times[draft] - judging_ns) // longest if draft in times else 0 for draft in drafts}
    return verify_ns, draft_ns


def _can_gain(regime: RegimeTimes, draft: str, length: int) -> bool:
    verify_ns = regime.verify(length + 1)
    assert verify_ns is not None
    return length * regime.draft_ns[draft] + verify_ns < (length + 1) * regime.verify_ns[1]


def measure_speculation(
    workers: Workers,
    prompts: Sequence[Sequence[int]],
    *,
    name: str = "measured",
    batches: Sequence[int] = (1, 4),
    contexts: Sequence[int] = (128,),
    lengths: Sequence[int] = (1, 2, 4, 8),
    new_tokens: int = 64,
    rounds: int = 5,
    served: str = "",
    say: Callable[[str], None] | None = None,
) -> Measurements:
    """Times by batch and context, and acceptance over some prompts of every draft that may gain, as a file.

    Args:
        workers: They run nothing else, on a quiet machine.
        prompts: Of the kind that will be served; acceptance holds for such alone.
        name: Of the measurements.
        batches: Sequences of a pass.
        contexts: Cached tokens of each.
        lengths: Drafted tokens of a cycle.
        new_tokens: Of each prompt.
        rounds: Of every pass; the median counts.
        served: What `fingerprint` says, kept as ``x-model``.
        say: Called with a line before every step.

    Raises:
        ProblemError: A number is out of range.
        StageError: A stage failed.

    Source: ours.
    """
    for what, values in (("batches", batches), ("contexts", contexts), ("lengths", lengths), ("rounds", (rounds,))):
        if not values or min(values) < 1:
            raise ProblemError(f"{what} is {list(values)}, but each must be at least 1, and there must be one")
    if max(lengths) > LONGEST:
        raise ProblemError(f"lengths has {max(lengths)}, but a draft has {LONGEST} tokens at most")
    tell = say or (lambda text: None)
    drafts = [LOOKUP, *(draft for draft in SELF_DRAFTS if draft not in workers.draft_refusals)]
    for draft, reason in workers.draft_refusals.items():
        tell(f"{draft} is left out: {reason}")
    regimes: list[RegimeTimes] = []
    extras: dict[tuple[str, ...], Any] = {("x-model",): served} if served else {}
    for batch in batches:
        for context in contexts:
            regime = f"batch {batch}, context {context}"
            tell(f"timing {regime}")
            verify_ns, draft_ns = measure_times(workers, drafts, lengths, batch, context, rounds)
            regimes.append(
                RegimeTimes(
                    name=regime,
                    weight=1 / (len(batches) * len(contexts)),
                    verify_ns=dict(sorted(verify_ns.items())),
                    draft_ns=draft_ns,
                )
            )
            extras[("regimes", regime, "x-batch")] = batch
            extras[("regimes", regime, "x-context")] = context
    measured: dict[str, DraftMeasurement] = {}
    for draft in drafts:
        if not any(_can_gain(regime, draft, length) for regime in regimes for length in lengths):
            tell(f"{draft} would lose even if all its tokens were accepted, so that it is not tried")
            none = (0,) * max(lengths)
            measured[draft] = DraftMeasurement(memory_kib=0, accepted=none, judged=none)
            continue
        tell(f"counting what is accepted of {draft}")
        counts = measure_acceptance(workers, draft, max(lengths), prompts, new_tokens)
        measured[draft] = DraftMeasurement.of_sequences(0, counts)
    return Measurements(
        name=name,
        memory_kib=0,
        lengths=tuple(lengths),
        drafts=measured,
        regimes=tuple(regimes),
        extras=extras,
    )
