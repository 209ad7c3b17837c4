"""Drafts: by the target's own weights at lower precision, in its own cache, or looked up in the text so far."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from qsync_opt.errors import UnsupportedError
from qsync_opt.runtimes.torch.decoding.cache import RaggedCache
from qsync_opt.runtimes.torch.decoding.models import LanguageModel
from qsync_opt.runtimes.torch.decoding.sampling import Sampling, draw


class Drafts(NamedTuple):
    """Drafted tokens (B, L), how many of them each sequence has, and the distributions (B, L, V) they were drawn from.

    ``probabilities_BLV`` is None where each draft was certain: it stands for all probability on the token.
    """

    tokens_BL: Tensor
    lengths_B: Tensor
    probabilities_BLV: Tensor | None


class Drafter(Protocol):
    """Proposes tokens."""

    def draft(
        self,
        texts: Sequence[Sequence[int]],
        lengths_B: Tensor,
        cache: RaggedCache,
        sampling: Sampling,
        generator: torch.Generator | None,
    ) -> Drafts:
        """Propose the tokens that follow each text.

        Args:
            texts: All tokens of each sequence; the last one is not in the cache yet.
            lengths_B: Most drafts of each sequence.
            cache: The target's cache. Slots from its lengths on may be written; verification overwrites them.
            sampling: How the target's tokens are chosen.
            generator: Of random numbers.
        """
        ...


class ModelDrafter:
    """Drafts by a model that shares the target's cache: the target itself at lower precision.

    Args:
        model: The model, such as the target.
        precision: Makes the context that it runs in, such as ``lambda: activations(module, "A8")``.

    Source: QSPEC, EMNLP 2025.
    """

    def __init__(
        self,
        model: LanguageModel,
        precision: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self.model = model
        self.precision = precision

    def draft(
        self,
        texts: Sequence[Sequence[int]],
        lengths_B: Tensor,
        cache: RaggedCache,
        sampling: Sampling,
        generator: torch.Generator | None,
    ) -> Drafts:
        """See `Drafter.draft`; sequences of shorter drafts run along, and their further tokens are ignored."""
        length = int(lengths_B.max())
        token_B = torch.tensor([text[-1] for text in texts], device=lengths_B.device)
        tokens, probabilities = [], []
        with self.precision():
            for step in range(length):
                positions = (cache.lengths_B + step)[:, None]
                logits_BV = self.model.logits(token_B[:, None], positions, cache)[:, -1]
                if sampling.greedy:
                    token_B = logits_BV.argmax(-1)
                else:
                    probabilities.append(sampling.probabilities(logits_BV))
                    token_B = draw(probabilities[-1], generator)
                tokens.append(token_B)
        return Drafts(torch.stack(tokens, 1), lengths_B, torch.stack(probabilities, 1) if probabilities else None)


class TextIndex:
    """Where the endings of a growing text stood in it before; adding a token and finding what followed takes no scan.

    Args:
        longest: Most tokens of an ending.
        shortest: Least tokens of it.
    """

    def __init__(self, longest: int = 3, shortest: int = 1) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._text: list[int] = []
        self._followed: dict[tuple[int, ...], int] = {}

    def __len__(self) -> int:
        return len(self._text)

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens to the text."""
        for token in tokens:
            for ending in self._endings():
                self._followed[ending] = len(self._text)
            self._text.append(token)

    def following(self, length: int) -> list[int]:
        """At most ``length`` tokens that followed the latest earlier occurrence of the longest ending that has one."""
        for ending in self._endings():
            if (place := self._followed.get(ending)) is not None:
                return self._text[place : place + length]
        return []

    def _endings(self) -> Iterator[tuple[int, ...]]:
        return (tuple(self._text[-size:]) for size in self._sizes if size <= len(self._text))


class LookupDrafter:
    """Drafts what followed the last occurrence of the text's latest tokens in the text itself.

    Args:
        longest: Most tokens that must agree; fewer are tried where so many do not occur.
        shortest: Least tokens that must agree.

    Raises:
        UnsupportedError: Less than one token, or the longest is shorter than the shortest.

    Source: A. Saxena, "Prompt lookup decoding", 2023.
    """

    def __init__(self, longest: int = 3, shortest: int = 1) -> None:
        if not 1 <= shortest <= longest:
            raise UnsupportedError(
                f"longest is {longest} and shortest {shortest}, but 1 <= shortest <= longest must hold"
            )
        self.longest = longest
        self.shortest = shortest

    def find(self, text: Sequence[int], length: int) -> list[int]:
        """At most ``length`` tokens that followed the latest earlier occurrence of the text's last tokens."""
        index = TextIndex(self.longest, self.shortest)
        index.extend(text)
        return index.following(length)

    def draft(
        self,
        texts: Sequence[Sequence[int]],
        lengths_B: Tensor,
        cache: RaggedCache,
        sampling: Sampling,
        generator: torch.Generator | None,
    ) -> Drafts:
        """See `Drafter.draft`; a sequence without an earlier occurrence has no draft."""
        proposals = [self.find(text, int(most)) for text, most in zip(texts, lengths_B, strict=True)]
        width = max(map(len, proposals))
        rows = [proposal + [0] * (width - len(proposal)) for proposal in proposals]
        device = lengths_B.device
        tokens_BL = torch.tensor(rows, dtype=torch.int64, device=device).view(len(rows), width)
        return Drafts(tokens_BL, torch.tensor([len(p) for p in proposals], device=device), None)
