"""Decoding of a batch, plain or speculative, until every sequence has ended."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from qsync_opt.decoding import AcceptanceCounts, Graph
from qsync_opt.errors import UnsupportedError
from qsync_opt.io import near_match
from qsync_opt.runtimes.torch.decoding.cache import RaggedCache
from qsync_opt.runtimes.torch.decoding.drafting import Drafter, Drafts
from qsync_opt.runtimes.torch.decoding.models import LanguageModel
from qsync_opt.runtimes.torch.decoding.sampling import Sampling, draw
from qsync_opt.runtimes.torch.decoding.verification import Verified, verify_greedily, verify_sampled


class Policy(Protocol):
    """Says before each cycle which draft runs and how long it is; `qsync_opt.decoding.Controller` is one."""

    def choose(self) -> Graph:
        """The draft of the next cycle."""
        ...

    def observe(self, accepted: Sequence[int]) -> None:
        """Learn how many drafts each sequence accepted."""
        ...


class FixedPolicy:
    """The same draft and length in every cycle; plain decoding for length 0."""

    def __init__(self, draft: str | None, length: int) -> None:
        if length < 0 or (length and draft is None):
            raise UnsupportedError(
                f"length is {length!r} of draft {draft!r}, but it must be at least 0 and a draft named"
            )
        self._graph = Graph(draft=draft if length else None, length=length, cycle_ns=0)

    def choose(self) -> Graph:
        """The draft of every cycle."""
        return self._graph

    def observe(self, accepted: Sequence[int]) -> None:
        """Nothing is learned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What was generated.

    Attributes:
        tokens: The new tokens of each sequence, its stop token included.
        cycles: Passes of the target after the prompts.
        cycle_tokens: Of each cycle, how many tokens each running sequence got.
        acceptance: Per draft, what became of its tokens by draft position.
        caches: The cache of each sequence as it ended, layer by layer; empty unless asked for.
    """

    tokens: tuple[tuple[int, ...], ...]
    cycles: int
    cycle_tokens: tuple[tuple[int, ...], ...]
    acceptance: Mapping[str, AcceptanceCounts]
    caches: tuple[list[tuple[Tensor, Tensor]], ...] = ()


class _Counter:
    """Counts of judged and accepted drafts by position."""

    def __init__(self) -> None:
        self.judged: list[int] = []
        self.accepted: list[int] = []

    def add(self, accepted: int, length: int) -> None:
        for counts in (self.judged, self.accepted):
            counts.extend([0] * (length - len(counts)))
        for position in range(min(accepted + 1, length)):
            self.judged[position] += 1
            self.accepted[position] += position < accepted


def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    drafters: Mapping[str, Drafter] | None = None,
    policy: Policy | None = None,
    lengths: Sequence[int] | None = None,
    longest: int = 16,
    sampling: Sampling | None = None,
    stop: Collection[int] = (),
    generator: torch.Generator | None = None,
    device: torch.device | str = "cpu",
    keep_caches: bool = False,
) -> Generation:
    """Continue each prompt, several tokens per pass where drafts are accepted.

    Greedy tokens are those of plain decoding (up to rounding that depends on the shape of a batch); sampled tokens have
    its distribution.

    Args:
        model: The target.
        prompts: Tokens of each sequence, at least one.
        new_tokens: Most new tokens of each.
        drafters: By the names that the policy uses.
        policy: Chooses draft and length before each cycle; None: plain decoding.
        lengths: Most drafts of each sequence, whatever the policy says; None: as it says.
        longest: Longest draft that the policy may choose; the cache has room for it.
        sampling: How tokens are chosen; greedily by default.
        stop: A sequence ends with any of these tokens, also inside a draft.
        generator: Of random numbers, on the device.
        device: Where tokens live, the model's.
        keep_caches: Return the caches.

    Raises:
        UnsupportedError: No or empty prompts, unusable numbers, or the policy names an unknown draft.
        ModelError: The model's logits hold NaN.

    Source: QSPEC (EMNLP 2025) for the shared cache, Leviathan et al. (ICML 2023) for verification.
    """
    _check(prompts, new_tokens, lengths)
    sampling, policy = sampling or Sampling(), policy or FixedPolicy(None, 0)
    batch = _Batch(prompts, new_tokens, lengths, frozenset(stop), torch.device(device))
    cache = model.new_cache(len(prompts), max(map(len, prompts)) + new_tokens + longest + 1)
    _prefill(model, cache, batch)
    counters: dict[str, _Counter] = {}
    cycle_tokens: list[tuple[int, ...]] = []
    caches: dict[int, list[tuple[Tensor, Tensor]]] = {}
    while batch.running:
        graph = policy.choose()
        if graph.length > longest:
            raise UnsupportedError(f"the policy chose {graph.length} drafts, but the cache has room for {longest}")
        drafts = _draft(batch, graph, drafters or {}, cache, sampling, generator)
        verified = _verify(model, batch, drafts, cache, sampling, generator)
        accepted, width = verified.accepted_B.tolist(), drafts.lengths_B.tolist()
        if graph.draft is not None:
            counter = counters.setdefault(graph.draft, _Counter())
            for count, length in zip(accepted, width, strict=True):
                counter.add(count, length)
        # Sequences that had fewer drafts than the graph say nothing of the missing ones.
        whole = [count for count, length in zip(accepted, width, strict=True) if length == graph.length]
        if whole:
            policy.observe(whole)
        cache.cut(cache.lengths_B + 1 + verified.accepted_B)
        cycle_tokens.append(batch.extend(drafts, verified))
        _remove_ended(batch, cache, caches if keep_caches else None)
    return Generation(
        tokens=tuple(tuple(text[len(prompt) :]) for text, prompt in zip(batch.texts, prompts, strict=True)),
        cycles=len(cycle_tokens),
        cycle_tokens=tuple(cycle_tokens),
        acceptance={
            name: AcceptanceCounts(accepted=tuple(counter.accepted), judged=tuple(counter.judged))
            for name, counter in counters.items()
        },
        caches=tuple(caches[row] for row in sorted(caches)),
    )


def _check(prompts: Sequence[Sequence[int]], new_tokens: int, lengths: Sequence[int] | None) -> None:
    if not prompts or not all(map(len, prompts)):
        raise UnsupportedError("prompts is empty or holds an empty one, but each needs at least one token")
    if new_tokens < 1:
        raise UnsupportedError(f"new_tokens is {new_tokens!r}, but it must be at least 1")
    if lengths is not None and (len(lengths) != len(prompts) or min(lengths) < 0):
        raise UnsupportedError(f"lengths is {list(lengths)}, but one number of at least 0 per prompt is needed")


class _Batch:
    """The sequences and which of them still run, by index; rows of the cache are the running ones."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
        lengths: Sequence[int] | None,
        stop: frozenset[int],
        device: torch.device,
    ) -> None:
        self.texts = [list(prompt) for prompt in prompts]
        self.ends = [len(prompt) + new_tokens for prompt in prompts]
        self.lengths = lengths
        self.stop = stop
        self.device = device
        self.running = list(range(len(prompts)))

    def most_drafts(self, length: int) -> list[int]:
        """Drafts of each running sequence: no more than it may still get, less the verifier's token."""
        return [
            min(
                length, self.ends[row] - len(self.texts[row]) - 1, length if self.lengths is None else self.lengths[row]
            )
            for row in self.running
        ]

    def extend(self, drafts: Drafts, verified: Verified) -> tuple[int, ...]:
        """Add accepted drafts and the token after them, up to the first stop token; returns how many were added."""
        added = []
        for b, row in enumerate(self.running):
            new = [*drafts.tokens_BL[b, : int(verified.accepted_B[b])].tolist(), int(verified.next_B[b])]
            end = next((i + 1 for i, token in enumerate(new) if token in self.stop), len(new))
            self.texts[row] += new[:end]
            added.append(end)
        return tuple(added)

    def ended(self, row: int) -> bool:
        return len(self.texts[row]) >= self.ends[row] or self.texts[row][-1] in self.stop


def _prefill(model: LanguageModel, cache: RaggedCache, batch: _Batch) -> None:
    """Write all tokens of the prompts but the last; shorter ones are padded, and the padding is overwritten later."""
    counts = [len(text) - 1 for text in batch.texts]
    width = max(counts)
    if width:
        padded = [text[:-1] + [text[-1]] * (width - count) for text, count in zip(batch.texts, counts, strict=True)]
        positions = torch.arange(width, device=batch.device).expand(len(counts), width)
        model.logits(torch.tensor(padded, device=batch.device), positions, cache)
    cache.cut(torch.tensor(counts, device=batch.device))


def _draft(
    batch: _Batch,
    graph: Graph,
    drafters: Mapping[str, Drafter],
    cache: RaggedCache,
    sampling: Sampling,
    generator: torch.Generator | None,
) -> Drafts:
    lengths = batch.most_drafts(graph.length)
    if graph.draft is None or not max(lengths):
        none = torch.zeros((len(batch.running), 0), dtype=torch.int64, device=batch.device)
        return Drafts(none, none.new_zeros(len(batch.running)), None)
    if graph.draft not in drafters:
        near = near_match(graph.draft, drafters)
        raise UnsupportedError(
            f"the policy chose draft {graph.draft!r}{near}; drafters has {', '.join(drafters) or 'none'}"
        )
    texts = [batch.texts[row] for row in batch.running]
    return drafters[graph.draft].draft(texts, torch.tensor(lengths, device=batch.device), cache, sampling, generator)


def _verify(
    model: LanguageModel,
    batch: _Batch,
    drafts: Drafts,
    cache: RaggedCache,
    sampling: Sampling,
    generator: torch.Generator | None,
) -> Verified:
    """One pass of the target over the last token of each sequence and its drafts, into the same slots."""
    last = torch.tensor([[batch.texts[row][-1]] for row in batch.running], device=batch.device)
    tokens_BT = torch.cat((last, drafts.tokens_BL), 1)
    positions_BT = cache.lengths_B[:, None] + torch.arange(tokens_BT.shape[1], device=batch.device)
    logits_BTV = model.logits(tokens_BT, positions_BT, cache)
    if sampling.greedy:
        return verify_greedily(drafts.tokens_BL, logits_BTV, drafts.lengths_B)
    target_BTV = sampling.probabilities(logits_BTV)
    if not drafts.tokens_BL.shape[1]:
        return Verified(drafts.lengths_B, draw(target_BTV[:, 0], generator))
    drafted_BLV = drafts.probabilities_BLV
    if drafted_BLV is None:
        drafted_BLV = torch.nn.functional.one_hot(drafts.tokens_BL, target_BTV.shape[-1]).to(target_BTV.dtype)
    return verify_sampled(drafts.tokens_BL, drafted_BLV, target_BTV, drafts.lengths_B, generator)


def _remove_ended(batch: _Batch, cache: RaggedCache, caches: dict[int, list[tuple[Tensor, Tensor]]] | None) -> None:
    going = [b for b, row in enumerate(batch.running) if not batch.ended(row)]
    if len(going) == len(batch.running):
        return
    if caches is not None:
        for b, row in enumerate(batch.running):
            if batch.ended(row):
                # A stop token inside a draft ends the text before the cache.
                cache.lengths_B[b] = min(int(cache.lengths_B[b]), len(batch.texts[row]) - 1)
                caches[row] = [(keys.clone(), values.clone()) for keys, values in cache.contents(b)]
    cache.select(torch.tensor(going, dtype=torch.int64, device=batch.device))
    batch.running = [batch.running[b] for b in going]
