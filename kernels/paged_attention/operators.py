"""``qsync_opt::paged_attention``: its specification, and the choice of compiled code.

The plain implementation computes in FP64 and rounds once. Compiled code forms products and sums in FP32, in an order
that depends on a sequence alone: its result has the same bits in any batch.

Axis letters: S sequences, H heads, D numbers of a head, P pages of a sequence.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from qsync_opt.errors import UnsupportedError
from qsync_opt.kernels.compilation import library

UNIT = "paged_attention"
PAGE = 16
"""Positions of a page; `kPage` of the kernel."""
_DTYPES = (torch.bfloat16, torch.float16)
_SIZES = (64, 128, 256)
_OLDEST_CARD = (8, 0)


def _plain(q: Tensor, pool: Tensor, table: Tensor, contexts: Tensor, scale: float, window: int) -> Tensor:
    _, kv_heads, slots, size = pool.shape
    pages = pool.view(2, kv_heads, slots // PAGE, PAGE, size)[:, :, table]
    keys, values = pages.reshape(2, kv_heads, *table.shape[:1], -1, size).transpose(1, 2).double()
    queries = q.double().view(q.shape[0], kv_heads, -1, size)
    positions, ends = torch.arange(keys.shape[2], device=q.device), contexts[:, None]
    seen = positions < ends
    if window > 0:
        seen &= positions >= ends - window
    scores = (queries @ keys.transpose(2, 3) * scale).masked_fill(~seen[:, None, None], -torch.inf)
    # What is not seen may be anything, NaN too.
    values = values.masked_fill(~seen[:, None, :, None], 0.0)
    result: Tensor = scores.softmax(-1) @ values
    return result.view(q.shape).to(q.dtype)


library.define(
    "paged_attention(Tensor q, Tensor pool, Tensor table, Tensor contexts, float scale, int window) -> Tensor",
    unit=UNIT,
    plain=_plain,
    fake=lambda q, pool, table, contexts, scale, window: q.new_empty(q.shape),
)


@functools.cache
def explain(device: torch.device, dtype: torch.dtype, size: int) -> str:
    """Why compiled code does not serve heads of a size in a type on a device, or nothing."""
    if device.type == "cuda":
        if dtype not in _DTYPES:
            return f"the type is {dtype}, and kernels are for {', '.join(map(str, _DTYPES))}"
        if size not in _SIZES:
            return f"heads have {size} numbers, and kernels are for {', '.join(map(str, _SIZES))}"
    return library.refusal(UNIT, device, _OLDEST_CARD)


def paged_attention(
    q_SHD: Tensor,
    pool: Tensor,
    table_SP: Tensor,
    contexts_S: Tensor,
    *,
    scale: float,
    window: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """What the newest token of each sequence attends to.

    Args:
        q_SHD: Queries; BF16 or FP16 for compiled code, each row of heads contiguous.
        pool: Keys and values (2, heads of keys, pages times 16, D), of the type of the queries. Consecutive queries
            share a head of keys.
        table_SP: Pages of each sequence in order, int64; those behind its context are not read.
        contexts_S: Positions of each sequence, the newest included, int64; at least 1.
        scale: Of scores.
        window: Most positions that are seen, the newest ones; None: all.
        backend: ``"auto"``, ``"compiled"`` (compiled code or an error) or ``"reference"`` (FP64, rounded once).

    Returns:
        (S, H, D), of the type of the queries.

    Raises:
        UnsupportedError: Arguments that do not fit, or compiled code is asked for and cannot run.

    Source: PagedAttention (SOSP 2023); sequences are split as in Flash-Decoding (2023).
    """
    size, heads, kv_heads = q_SHD.shape[-1], q_SHD.shape[1], pool.shape[1]
    if pool.shape[0] != 2 or pool.shape[3] != size or pool.dtype is not q_SHD.dtype or heads % kv_heads:
        raise UnsupportedError(
            f"q is {tuple(q_SHD.shape)} in {q_SHD.dtype} and the pages are {tuple(pool.shape)} in {pool.dtype}, but "
            "these must be (2, heads of keys, slots, size), in the same type and of the same size, and heads a multiple"
        )
    library.check_backend(backend)
    if window is not None and window < 1:
        raise UnsupportedError(f"window is {window}, but it must be at least 1, or None")
    reason = explain(q_SHD.device, q_SHD.dtype, size)
    if backend == "compiled" and reason:
        raise UnsupportedError(f"backend 'compiled': {reason}")
    plain = backend == "reference" or bool(reason)
    run = _plain if plain else library.operator(UNIT, "paged_attention", q_SHD.device, backend)
    result: Tensor = run(q_SHD, pool, table_SP, contexts_S, scale, window or 0)
    return result
