"""Where two ways of decoding first give different tokens, and how near the model's scores of these were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from qsync_opt.errors import ProblemError
from qsync_opt.runtimes.torch.serving.stage import StageModel
from qsync_opt.runtimes.torch.serving.steps import GREEDY, Layout, Step, pages_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first different token of two answers to a prompt.

    Attributes:
        prompt: Its number.
        position: Of the token in the answers.
        token: Of the first answer.
        other: Of the second.
        margin: The model's score of ``token`` less that of ``other``, by a pass over the text before them: near 0 where
            rounding decides between the two.
        spread: Standard deviation of all scores there, which says what is near.
    """

    prompt: int
    position: int
    token: int
    other: int
    margin: float
    spread: float


def first_differences(
    stages: Sequence[StageModel],
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    others: Sequence[Sequence[int]],
) -> tuple[Difference, ...]:
    """The first difference of every pair of answers that differ; one that only ends sooner has none.

    Args:
        stages: The whole model, in this process; what its caches hold is lost.
        prompts: Token numbers.
        answers: New tokens of each prompt, such as by plain decoding.
        others: New tokens of each prompt, such as with speculation.

    Raises:
        ProblemError: There are not as many answers as prompts.

    Source: ours.
    """
    if not len(prompts) == len(answers) == len(others):
        raise ProblemError(
            f"there are {len(prompts)} prompts, {len(answers)} answers and {len(others)} others, but each prompt "
            "needs one of both"
        )
    found = []
    for number, (prompt, tokens, rest) in enumerate(zip(prompts, answers, others, strict=True)):
        pairs = zip(tokens, rest, strict=False)
        position = next((place for place, (one, other) in enumerate(pairs) if one != other), None)
        if position is None:
            continue
        scores_V = _scores(stages, [*prompt, *tokens[:position]])
        found.append(
            Difference(
                prompt=number,
                position=position,
                token=tokens[position],
                other=rest[position],
                margin=float(scores_V[tokens[position]] - scores_V[rest[position]]),
                spread=float(scores_V.std()),
            )
        )
    return tuple(found)


def _scores(stages: Sequence[StageModel], text: Sequence[int]) -> torch.Tensor:
    """The scores (V,) of the token after a text."""
    pages = tuple(range(1, 1 + pages_of(len(text))))
    step = Step(number=0, tokens=(tuple(text),), starts=(0,), pages=(pages,), choices=(GREEDY,))
    x = None
    for stage in stages:
        stage.reserve(len(pages) + 1)
        layout = Layout.of(step, stage.device)
        x = stage.hidden(layout.tokens_N if x is None else x.to(stage.device), layout)
    assert x is not None
    return stages[-1].scores(x[-1:])[0].double()
