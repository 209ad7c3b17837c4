"""The next tokens from scores: the most likely ones, or drawn with given random numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qsync_opt.runtimes.torch.serving.steps import Choice


def choose(scores_SV: torch.Tensor, choices: Sequence[Choice]) -> torch.Tensor:
    """The next token of each sequence, int64 (S,); -1 where the scores hold NaN.

    A drawn token is the one with the largest probability over an exponential random number of its own. It has the
    probability that the scores say, depends on no other sequence and on no state, and scores that are nearly the same
    nearly always give the same token for the same ``noise``: those of two distributions at total variation distance d
    agree with probability (1 - d) / (1 + d) at least.

    Source: M. Daliri, C. Musco, A. Suresh, "Coupling without communication and drafter-invariant speculative decoding",
        ISIT 2025.
    """
    top, tokens = scores_SV.max(-1)
    for row, choice in enumerate(choices):
        if choice.temperature > 0:
            tokens[row] = _draw(scores_SV[row], choice)
    return tokens.masked_fill_(top.isnan(), -1)  # NaN counts as the largest


def _draw(scores_V: torch.Tensor, choice: Choice) -> torch.Tensor:
    probabilities = (scores_V.float() / choice.temperature).softmax(-1)
    if choice.top_p < 1:
        ordered, order = probabilities.sort(descending=True)
        dropped = ordered.cumsum(-1) - ordered >= choice.top_p
        probabilities = probabilities.index_fill(-1, order[dropped], 0.0)
    generator = torch.Generator(scores_V.device).manual_seed(choice.noise)
    return (probabilities / torch.empty_like(probabilities).exponential_(generator=generator)).argmax()
