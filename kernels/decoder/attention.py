"""Attention of the newest token of each sequence with what comes before it, as one kernel of a card.

Axes: S sequences, G heads, D numbers of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qsync_opt.kernels.compilation import library
from qsync_opt.kernels.decoder.rows import on_card, plain_rotate_into_pages
from qsync_opt.kernels.paged_attention import explain, paged_attention

_UNIT = "paged_attention"
_MOST_SHARED = 16
"""Heads of queries that share one of keys; `kRows` of the kernel."""


def rotate_and_attend(
    heads: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots_S: Tensor,
    pool: Tensor,
    table_SP: Tensor,
    contexts_S: Tensor,
    *,
    scale: float,
    window: int | None = None,
    scales: Tensor | None = None,
    high_halves: bool = False,
) -> Tensor | None:
    """`rotate_into_pages` of one new token of each sequence, and its `paged_attention`.

    Args:
        heads: Queries, keys and values of each token, shape (S, G, D), each row of heads contiguous.
        cos: As of `rotate_into_pages`.
        sin: As of `rotate_into_pages`.
        slots_S: As of `rotate_into_pages`: the places of the positions that the sequences' contexts end with.
        pool: As of `rotate_into_pages`. What the other positions hold, table and contexts were complete before the
            operation that computes ``heads`` began.
        table_SP: As of `paged_attention`.
        contexts_S: As of `paged_attention`.
        scale: As of `paged_attention`.
        window: As of `paged_attention`.
        scales: As of `rotate_into_pages`.
        high_halves: As of `paged_attention`.

    Returns:
        The bits that both give, shape (S, heads of queries, D); None where no kernel does this for these types and
        sizes: then nothing is written.

    Raises:
        RuntimeError: On a card, shapes, types or places of tensors that do not belong together.
    """
    kept = heads.dtype if scales is None else torch.uint8
    shared = (heads.shape[1] - 2 * pool.shape[1]) // pool.shape[1]
    if len(heads) != len(contexts_S) or pool.dtype is not kept or not 1 <= shared <= _MOST_SHARED:
        return None
    if not on_card(heads, cos, sin) or explain(heads.device, heads.dtype, heads.shape[-1]):
        return None
    run = library.operator(_UNIT, "turn_and_attend", heads.device, "auto")
    result: Tensor = run(
        heads, cos.contiguous(), sin.contiguous(), slots_S, pool, scales, table_SP, contexts_S, scale, window or 0,
        high_halves,
    )  # fmt: skip
    return result


def _plain(
    heads: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    pool: Tensor,
    scales: Tensor | None,
    table: Tensor,
    contexts: Tensor,
    scale: float,
    window: int,
    high_halves: bool,
) -> Tensor:
    rotated = plain_rotate_into_pages(heads, cos, sin, slots, pool, scales)
    return paged_attention(
        rotated[:, : -pool.shape[1]], pool, table, contexts, scale=scale, window=window or None, scales=scales,
        high_halves=high_halves, backend="reference",
    )  # fmt: skip


library.define(
    "turn_and_attend(Tensor heads, Tensor cos, Tensor sin, Tensor slots, Tensor(a!) pool, Tensor(b!)? scales, "
    "Tensor table, Tensor contexts, float scale, int window, bool high_halves) -> Tensor",
    unit=_UNIT,
    plain=_plain,
    fake=lambda heads, cos, sin, slots, pool, *others: heads.new_empty(
        (heads.shape[0], heads.shape[1] - 2 * pool.shape[1], heads.shape[2])
    ),
)
