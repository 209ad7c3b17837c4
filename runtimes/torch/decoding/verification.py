"""Which drafted tokens are kept, and the token that follows them.

Axis letters: B sequences, L draft positions, V vocabulary. Sequence b has ``lengths_B[b]`` drafts; what stands behind
them is padding and never looked at. Targets have one position more than drafts: that after the last draft.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qsync_opt.errors import ModelError
from qsync_opt.runtimes.torch.decoding.sampling import draw


class Verified(NamedTuple):
    """How many drafts of each sequence are kept, and the target's token after them; int64, shape (B,)."""

    accepted_B: Tensor
    next_B: Tensor


def _leading(agree_BL: Tensor, lengths_B: Tensor) -> Tensor:
    """Length of the agreeing prefix."""
    valid_BL = torch.arange(agree_BL.shape[1], device=agree_BL.device) < lengths_B[:, None]
    return (agree_BL & valid_BL).long().cumprod(1).sum(1)


def _check_logits(logits: Tensor) -> None:
    if bool(logits.isnan().any()):
        raise ModelError(
            "the model's logits hold NaN, so that no token can be chosen; check its weights and the format of "
            "activations"
        )


def verify_greedily(drafts_BL: Tensor, logits_BLV: Tensor, lengths_B: Tensor) -> Verified:
    """Keep the drafts that are the target's most likely tokens, up to the first that is not.

    Args:
        drafts_BL: Drafted tokens, int64, shape (B, L).
        logits_BLV: The target's logits at the positions of the drafts and one more, shape (B, L + 1, V).
        lengths_B: How many drafts each sequence has, int64.

    Raises:
        ModelError: The logits hold NaN.

    Source: Leviathan et al., "Fast inference from transformers via speculative decoding", ICML 2023.
    """
    _check_logits(logits_BLV)
    target_BL = logits_BLV.argmax(-1)
    accepted_B = _leading(drafts_BL == target_BL[:, :-1], lengths_B)
    return Verified(accepted_B, target_BL.gather(1, accepted_B[:, None]).squeeze(1))


def verify_sampled(
    drafts_BL: Tensor, drafted_BLV: Tensor, target_BLV: Tensor, lengths_B: Tensor, generator: torch.Generator | None
) -> Verified:
    """Keep each draft x with probability min(1, p(x) / q(x)); the first refused is drawn anew from (p - q)+.

    The tokens that come out have exactly the target's distribution p, whatever q drafted them.

    Args:
        drafts_BL: Drafted tokens, int64, shape (B, L), drawn from ``drafted_BLV``.
        drafted_BLV: The drafts' distributions q, shape (B, L, V).
        target_BLV: The target's distributions p at those positions and one more, shape (B, L + 1, V).
        lengths_B: How many drafts each sequence has, int64.
        generator: Of the random numbers, on the device of the tensors; None: torch's own.

    Raises:
        ModelError: The distributions hold NaN.

    Source: Leviathan et al. (ICML 2023), Algorithm 1; Chen et al., arXiv 2302.01318, Algorithm 2.
    """
    _check_logits(target_BLV)
    _check_logits(drafted_BLV)
    drafted_BLV = drafted_BLV.to(target_BLV.dtype)
    p_BL = target_BLV[:, :-1].gather(2, drafts_BL[..., None]).squeeze(2)
    q_BL = drafted_BLV.gather(2, drafts_BL[..., None]).squeeze(2)
    chance_BL = torch.rand(p_BL.shape, generator=generator, device=p_BL.device, dtype=p_BL.dtype)
    # Without division: q may be 0 in the padding.
    accepted_B = _leading(chance_BL * q_BL < p_BL, lengths_B)
    rows = torch.arange(len(accepted_B), device=accepted_B.device)
    target_BV = target_BLV[rows, accepted_B]
    refused_B = accepted_B < lengths_B
    # After the last draft nothing is subtracted.
    padded_BLV = torch.nn.functional.pad(drafted_BLV, (0, 0, 0, 1))
    rest_BV = (target_BV - padded_BLV[rows, accepted_B] * refused_B[:, None]).clamp_min_(0)
    # Where p and q are equal but for rounding, a draft that is refused nevertheless leaves nothing.
    rest_BV = torch.where(rest_BV.sum(1, keepdim=True) > 0, rest_BV, target_BV)
    return Verified(accepted_B, draw(rest_BV, generator))
