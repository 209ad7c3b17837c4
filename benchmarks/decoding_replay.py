"""What a server would accept of a draft over answers that are known, without judging it anew.

Greedy answers are those of plain decoding whatever is drafted, so that a draft is right where it says what the answer
says. Each cycle drafts through the stage that would serve, several texts in one pass, into the text's own cache, and
then puts back what stood there: what the judging pass would have written, up to rounding. Drafts stop at the first
wrong token, for what follows is never looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from qsync_opt.decoding import AcceptanceCounts
from qsync_opt.runtimes.torch.decoding import TextIndex
from qsync_opt.runtimes.torch.serving import PAGE, Attention, Choice, Precision, StageModel, Step, pages_of

GREEDY = Choice()
AT_ONCE = 48


@dataclass(slots=True)
class Text:
    """A prompt with its answer, and how far cycles have come."""

    tokens: list[int]
    place: int  # of the last token that is known to a cycle
    pages: tuple[int, ...]
    agreed: list[int] = field(default_factory=list)


def replay_lookup(prompt: Sequence[int], new: Sequence[int], length: int) -> list[tuple[int, int]]:
    """Drafted and accepted tokens of each cycle that look-up would have over an answer that is known."""
    index, done, cycles = TextIndex(), 1, []
    index.extend([*prompt, new[0]])
    while done + length < len(new):
        draft = index.following(length)
        agreed = 0
        while agreed < len(draft) and draft[agreed] == new[done + agreed]:
            agreed += 1
        if draft:
            cycles.append((len(draft), agreed))
        index.extend(new[done : done + agreed + 1])
        done += agreed + 1
    return cycles


def fill(stage: StageModel, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> list[Text]:
    """The texts, with their keys and values in the stage's cache."""
    texts, page = [], 1
    for prompt, answer in zip(prompts, answers, strict=True):
        count = pages_of(len(prompt) + len(answer))
        texts.append(Text([*prompt, *answer], len(prompt), tuple(range(page, page + count))))
        page += count
    stage.reserve(page)
    for text in texts:
        prompt, new = tuple(text.tokens[: text.place]), tuple(text.tokens[text.place :])
        for tokens, start in ((prompt, 0), (new, len(prompt))):  # the answer reads the prompt from the cache
            stage.run(Step(number=start, tokens=(tokens,), starts=(start,), pages=(text.pages,), choices=(GREEDY,)))
    return texts


def _caches(stage: StageModel) -> Iterator[torch.Tensor]:
    for group in stage.groups:
        if isinstance(group, Attention) and group.cache is not None:
            yield from (pool for pool in (group.cache.codes, group.cache.scales) if pool is not None)


def _cycle(stage: StageModel, texts: Sequence[Text], precision: Precision, length: int) -> None:
    slots = [t.pages[p // PAGE] * PAGE + p % PAGE for t in texts for p in range(t.place, t.place + length)]
    kept = [(pool, pool[:, :, slots].clone()) for pool in _caches(stage)]
    agreed, right = [0] * len(texts), list(range(len(texts)))
    for done in range(length):
        step = Step(
            number=done,
            tokens=tuple((texts[row].tokens[texts[row].place + done],) for row in right),
            starts=tuple(texts[row].place + done for row in right),
            pages=tuple(texts[row].pages for row in right),
            choices=(GREEDY,) * len(right),
            precision=precision,
        )
        chosen = stage.run(step).tolist()
        expected = [texts[row].tokens[texts[row].place + done + 1] for row in right]
        right = [row for row, a, b in zip(right, chosen, expected, strict=True) if a == b]
        for row in right:
            agreed[row] += 1
        if not right:
            break
    for pool, values in kept:
        pool[:, :, slots] = values
    for text, count in zip(texts, agreed, strict=True):
        text.agreed.append(count)
        text.place += count + 1


def replay_self(
    stage: StageModel, texts: Sequence[Text], prompts: Sequence[Sequence[int]], precision: Precision, length: int,
    drafted: int,
) -> list[AcceptanceCounts]:  # fmt: skip
    """What became of the model's own drafts, by text, after so many drafted tokens in all, or at the texts' ends.

    Args:
        stage: The whole model, with the texts in its cache (`fill`).
        texts: Their cycles begin anew.
        prompts: Of the texts.
        precision: Of the draft.
        length: Drafted tokens of a cycle.
        drafted: Tokens at which it ends.
    """
    for text, prompt in zip(texts, prompts, strict=True):
        text.place, text.agreed = len(prompt), []
    while sum(len(text.agreed) for text in texts) * length < drafted:
        left = [text for text in texts if text.place + length + 1 < len(text.tokens)]
        if not left:
            break
        for begin in range(0, len(left), AT_ONCE):
            _cycle(stage, left[begin : begin + AT_ONCE], precision, length)
    return [AcceptanceCounts.of_cycles(text.agreed, length) for text in texts]
