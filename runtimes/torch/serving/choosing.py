"""The next tokens from scores: the most likely ones, or drawn with given random numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qsync_opt.runtimes.torch.serving.steps import Choice


def choose(scores_SV: torch.Tensor, choices: Sequence[Choice]) -> torch.Tensor:
    """The next token of each sequence, int64 (S,).

    A drawn token is the first whose cumulative probability exceeds ``uniform`` times the total that ``top_p`` keeps,
    tokens ordered from the most likely one; so it depends on no other sequence and on no state.
    """
    tokens = scores_SV.argmax(-1)
    for row, choice in enumerate(choices):
        if choice.temperature == 0:
            continue
        ordered, order = (scores_SV[row].float() / choice.temperature).softmax(-1).sort(descending=True)
        sums = ordered.cumsum(-1)
        kept = sums.masked_fill(sums - ordered >= choice.top_p, 0.0)
        total = kept.max()
        index = torch.searchsorted(sums, choice.uniform * total, right=True)
        tokens[row] = order[index.clamp_max(int(kept.argmax()))]
    return tokens
