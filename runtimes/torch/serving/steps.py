"""One pass of a micro-batch through the stages: which tokens, where they stand, and which pages their caches have.

A page holds the keys and values of a fixed number of consecutive positions. Sequences of a pass are laid end to end, so
that nothing is padded. Page 0 belongs to nobody: rows that only fill a captured graph write there.

Axes: N tokens of the pass, S sequences, P pages of the longest sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from qsync_opt.kernels import paged_attention
from qsync_opt.kernels.weight_only import WIDE
from qsync_opt.runtimes.torch.serving.config import Rotary

PAGE = paged_attention.PAGE
"""Positions in a page."""
SCRATCH = 0
"""The page that belongs to no sequence."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How a token is chosen: the most likely one at ``temperature`` 0, else drawn with random numbers from ``noise``.

    The seed belongs to the token's place in its answer, so that stages keep no random state, and a draft and the pass
    that judges it draw with the same numbers.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    noise: int = 0


GREEDY = Choice()


class Precision(NamedTuple):
    """How a pass computes with the one copy of weights and caches.

    Attributes:
        activations: Of packed weights whose scheme does not round them, as `qsync_opt.kernels.weight_only` names them.
        high_halves: Read of caches of 8 bits the upper four only.
    """

    activations: str = WIDE
    high_halves: bool = False


FULL = Precision()
"""As schemes and caches say."""
SELF_DRAFTS: Mapping[str, Precision] = {
    "A8": Precision("A8"),
    "F8": Precision("F8"),
    "K4": Precision(high_halves=True),
    "A8K4": Precision("A8", high_halves=True),
}
"""The precision of each draft that the model computes itself, by the draft's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfDraft:
    """Tokens that the model drafts at a lower precision before a pass judges them.

    Attributes:
        lengths: Drafted tokens of each sequence.
        precision: Of the drafting passes; weights and caches are those of the judging pass.
    """

    lengths: tuple[int, ...]
    precision: Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A pass, as it is sent to all stages.

    Attributes:
        number: Of the pass; results carry it.
        tokens: The new tokens of each sequence.
        starts: Position of each sequence's first new token: so many positions are cached already.
        pages: The pages of each sequence in order; they reach at least to its last new token.
        choices: How each token is chosen, in the order of the tokens that they follow.
        every: Choose the token after every token, not only after the last of each sequence: drafts are judged by that.
        draft: What the model itself drafts first; ``choices`` count drafted tokens, ``tokens`` do not hold them yet.
        precision: Of this pass.
        wipe: Pages whose content is set to zero before the pass.
    """

    number: int
    tokens: tuple[tuple[int, ...], ...]
    starts: tuple[int, ...]
    pages: tuple[tuple[int, ...], ...]
    choices: tuple[Choice, ...]
    every: bool = False
    draft: SelfDraft | None = None
    precision: Precision = FULL
    wipe: tuple[int, ...] = ()

    @property
    def counts(self) -> tuple[int, ...]:
        """New tokens of each sequence."""
        return tuple(map(len, self.tokens))

    @property
    def decodes(self) -> bool:
        """Whether every sequence has one new token."""
        return all(len(tokens) == 1 for tokens in self.tokens)


@dataclass(slots=True, eq=False)
class Layout:
    """A pass as tensors on a stage's device.

    Attributes:
        numbers: What the tensors of numbers below are parts of, one after another, int64.
        tokens_N: Token numbers, int64.
        positions_N: Position of each token in its sequence, int64.
        slots_N: Where each token's keys and values go: page times positions per page plus position in the page, int64.
        contexts_S: Positions of each sequence after the pass, int64.
        table_SP: Pages of each sequence, filled up with page 0, int64.
        last_S: The last token of each sequence among the N.
        counts: New tokens of each sequence; empty if each has as many.
        starts: Cached positions of each sequence; empty with ``counts``.
        precision: See `Step`.
        pieces: Rows among the N that are computed together where results must not depend on what else is in a pass: a
            whole prompt, or one token. Empty: all are.
    """

    numbers: torch.Tensor
    tokens_N: torch.Tensor
    positions_N: torch.Tensor
    slots_N: torch.Tensor
    contexts_S: torch.Tensor
    last_S: torch.Tensor
    table_SP: torch.Tensor
    counts: tuple[int, ...]
    starts: tuple[int, ...]
    precision: Precision = FULL
    pieces: tuple[slice, ...] = ()
    _angles: dict[Rotary, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    _seen: dict[int | None, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        step: Step,
        device: torch.device,
        *,
        rows: int = 0,
        width: int = 0,
        tokens: int = 0,
        reproducible: bool = False,
    ) -> Layout:
        """The layout of a pass.

        Args:
            step: The pass.
            device: Of the tensors.
            rows: A pass whose sequences have as many tokens may be filled up to so many sequences.
            width: Least pages of a sequence in the table.
            tokens: Fill every sequence up to so many new tokens by ones before its own, which see nothing of it and
                whose keys and values go to page 0, of which no token of a sequence sees anything.
            reproducible: Divide it into ``pieces``.
        """
        lines, sequences = max(len(step.counts), rows), len(step.counts)
        own, starts = np.ones(lines, np.int64), np.zeros(lines, np.int64)
        own[:sequences], starts[:sequences] = step.counts, step.starts
        counts = np.full(lines, tokens) if tokens else own
        contexts, ends = starts + own, np.cumsum(counts)
        width = max(width, -(-int(contexts.max()) // PAGE))
        table = np.full((lines, width), SCRATCH)
        for line, pages, context in zip(table, step.pages, contexts, strict=False):
            used = -(-int(context) // PAGE)
            line[:used] = pages[:used]
        at = np.repeat(np.arange(lines), counts)
        places = np.arange(len(at)) - (ends - own)[at]  # among the tokens of the sequence itself
        is_own = places >= 0
        positions = np.where(is_own, starts[at] + places, 0)
        slots = np.where(is_own, table[at, positions // PAGE], SCRATCH) * PAGE + positions % PAGE
        numbers = np.zeros(len(at), np.int64)
        numbers[is_own & (at < sequences)] = np.fromiter(
            itertools.chain.from_iterable(step.tokens), np.int64, sum(step.counts)
        )
        # One transfer for all numbers.
        flat = torch.from_numpy(np.concatenate([numbers, positions, slots, contexts, ends - 1, table.ravel()]))
        alike = (step.decodes or tokens > 0) and not reproducible
        return cls(
            **_parts(flat.to(device, non_blocking=True), len(at), lines),
            counts=() if alike else step.counts,
            starts=() if alike else step.starts,
            precision=step.precision,
            pieces=tuple(_pieces(step)) if reproducible else (),
        )

    def apart(self, compute: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """A function of rows, piece by piece where results must not depend on the rest of the pass."""
        if len(self.pieces) < 2:
            return compute(x)
        return torch.cat([compute(x[piece]) for piece in self.pieces])

    def to(self, device: torch.device) -> Layout:
        """The same with numbers of its own on a device."""
        parts = _parts(self.numbers.to(device, copy=True), len(self.tokens_N), len(self.contexts_S))
        return Layout(**parts, counts=self.counts, starts=self.starts, precision=self.precision, pieces=self.pieces)

    def copy_(self, other: Layout) -> None:
        """Take the numbers of another layout of the same shape."""
        self.numbers.copy_(other.numbers, non_blocking=True)

    def forget(self) -> None:
        """Compute anew what layers share."""
        self._angles.clear()
        self._seen.clear()

    def angles(
        self, rotary: Rotary, frequencies: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine (N, 1, head size) of the rotary positions; computed once for layers that share them."""
        if rotary not in self._angles:
            angles = self.positions_N[:, None].float() * frequencies
            angles = torch.cat([angles, angles], dim=-1)[:, None]
            self._angles[rotary] = self.apart(torch.cos, angles).to(dtype), self.apart(torch.sin, angles).to(dtype)
        return self._angles[rotary]

    def seen(self, window: int | None, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """For decoding: the pages (S, W) that a layer with this sliding window reads, and what is added to scores.

        The second is (1, S, 1, W * PAGE): 0 where a position is seen, else minus infinity.
        """
        if window not in self._seen:
            table = self.table_SP
            offsets = torch.arange(table.shape[1] * PAGE, device=table.device)
            low = torch.zeros_like(self.contexts_S) if window is None else (self.contexts_S - window).clamp_min(0)
            if window is not None and (width := -(-window // PAGE) + 1) < table.shape[1]:
                first_S = low // PAGE
                columns = first_S[:, None] + torch.arange(width, device=table.device)
                table = table.gather(1, columns.clamp_max(table.shape[1] - 1))
                # A page that is clamped stands beyond the context.
                positions = first_S[:, None] * PAGE + offsets[: width * PAGE]
            else:
                positions = offsets[None]
            hidden = (positions >= self.contexts_S[:, None]) | (positions < low[:, None])
            mask = torch.zeros(hidden.shape, dtype=dtype, device=table.device).masked_fill_(hidden, -torch.inf)
            self._seen[window] = table, mask[None, :, None]
        return self._seen[window]


def _parts(numbers: torch.Tensor, tokens: int, sequences: int) -> dict[str, Any]:
    """The numbers of a layout and their parts, by the names that it has for them."""
    sizes = {"tokens_N": tokens, "positions_N": tokens, "slots_N": tokens, "contexts_S": sequences, "last_S": sequences}
    *parts, table = torch.split(numbers, [*sizes.values(), len(numbers) - sum(sizes.values())])
    return {"numbers": numbers, **dict(zip(sizes, parts, strict=True)), "table_SP": table.view(sequences, -1)}


def drafting(step: Step) -> Generator[Step, Sequence[int], Step]:
    """The passes that draft for a step: each is answered by the tokens that it chose; returns the judging pass.

    The drafts' keys and values stand where that pass writes its own.

    Source: QSPEC, EMNLP 2025, for drafts by the same weights into the same cache.
    """
    assert step.draft is not None, "the step drafts nothing"
    lengths, texts = step.draft.lengths, [list(tokens) for tokens in step.tokens]
    begins = [0, *itertools.accumulate(length + 1 for length in lengths)]
    for done in range(max(lengths)):
        rows = [row for row, length in enumerate(lengths) if length > done]
        chosen = yield Step(
            number=step.number,
            tokens=tuple((texts[row][-1],) for row in rows),
            starts=tuple(step.starts[row] + done for row in rows),
            pages=tuple(step.pages[row] for row in rows),
            choices=tuple(step.choices[begins[row] + done] for row in rows),
            precision=step.draft.precision,
            wipe=step.wipe if done == 0 else (),
        )
        for row, token in zip(rows, chosen, strict=True):
            texts[row].append(max(token, 0))  # where scores hold NaN any token is as good: it is judged
    return replace(step, tokens=tuple(map(tuple, texts)), draft=None, wipe=())


def drafted(step: Step, run: Callable[[Step], Sequence[int]]) -> Step:
    """The pass that judges what a step drafts; ``run`` carries out the passes of `drafting` and gives their tokens."""
    passes = drafting(step)
    ahead = next(passes)
    while True:
        try:
            ahead = passes.send(run(ahead))
        except StopIteration as end:
            judging: Step = end.value
            return judging


def _pieces(step: Step) -> Iterator[slice]:
    """A prompt as a whole, what follows it token by token."""
    end = 0
    for count, start in zip(step.counts, step.starts, strict=True):
        begin, end = end, end + count
        yield from [slice(begin, end)] if start == 0 else (slice(n, n + 1) for n in range(begin, end))


class PageStore:
    """Numbers of free pages; taken and given back by the scheduler."""

    def __init__(self, pages: int) -> None:
        self.total = pages - 1
        self._free = list(range(pages - 1, SCRATCH, -1))

    @property
    def used(self) -> int:
        """Pages that are taken."""
        return self.total - len(self._free)

    def take(self, positions: int) -> tuple[int, ...] | None:
        """Pages for so many positions, or None where too few are free."""
        count = pages_of(positions)
        if count > len(self._free):
            return None
        return tuple(self._free.pop() for _ in range(count))

    def give_back(self, pages: tuple[int, ...]) -> None:
        """Free pages again."""
        self._free.extend(reversed(pages))


def pages_of(positions: int) -> int:
    """Pages that so many positions need."""
    return -(-positions // PAGE)
