"""``qsync_opt::paged_attention``: its specification, and the choice of compiled code.

The plain implementation computes in FP64 and rounds once. Compiled code sums exact products in FP32, in an order that
depends on the positions that a token sees alone: its result has the same bits in any batch, and beside other tokens of
its sequence. Weights are the sum of two numbers of the type.

Axis letters: N tokens, S sequences, H heads, D numbers of a head, P pages of a sequence.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from qsync_opt.errors import UnsupportedError
from qsync_opt.kernels.compilation import library
from qsync_opt.kernels.paged_attention.codes import from_halves

UNIT = "paged_attention"
PAGE = 16
"""Positions of a page; `kPage` of the kernel."""
_DTYPES = (torch.bfloat16, torch.float16)
_SIZES = (64, 128, 256)
_OLDEST_CARD = (8, 0)


def _plain(
    q: Tensor,
    pool: Tensor,
    scales: Tensor | None,
    table: Tensor,
    contexts: Tensor,
    scale: float,
    window: int,
    high_halves: bool,
    settled: bool,
) -> Tensor:
    _, kv_heads, slots, size = pool.shape
    sequences, tokens = len(table), len(q) // max(1, len(table))

    def gather(numbers: Tensor) -> Tensor:
        pages = numbers.reshape(2, kv_heads, slots // PAGE, PAGE, -1)[:, :, table]
        return pages.reshape(2, kv_heads, sequences, table.shape[1] * PAGE, -1).transpose(1, 2).double()

    if scales is None:
        keys, values = gather(pool)
    else:
        codes = from_halves(pool[..., : size // 2], upper=True) if high_halves else from_halves(pool)
        keys, values = gather(codes) * gather(scales)
    queries = q.double().view(sequences, tokens, kv_heads, -1, size).transpose(1, 2)  # (S, kv, T, group, D)
    positions = torch.arange(keys.shape[2], device=q.device)
    ends = contexts[:, None] - torch.arange(tokens - 1, -1, -1, device=q.device)  # (S, T)
    seen = positions < ends[..., None]
    if window > 0:
        seen &= positions >= ends[..., None] - window
    scores = torch.einsum("sktgd,skpd->sktgp", queries, keys) * scale
    scores = scores.masked_fill(~seen[:, None, :, None], -torch.inf)
    # What no token sees may be anything, NaN too.
    values = values.masked_fill(~seen.any(1)[:, None, :, None], 0.0)
    result = torch.einsum("sktgp,skpd->sktgd", scores.softmax(-1), values)
    return result.transpose(1, 2).reshape(q.shape).to(q.dtype)


library.define(
    "paged_attention(Tensor q, Tensor pool, Tensor? scales, Tensor table, Tensor contexts, float scale, int window, "
    "bool high_halves, bool settled) -> Tensor",
    unit=UNIT,
    plain=_plain,
    fake=lambda q, *others: q.new_empty(q.shape),
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
    q_NHD: Tensor,
    pool: Tensor,
    table_SP: Tensor,
    contexts_S: Tensor,
    *,
    scale: float,
    window: int | None = None,
    scales: Tensor | None = None,
    high_halves: bool = False,
    settled: bool = False,
    backend: str = "auto",
) -> Tensor:
    """What the newest tokens of each sequence attend to, as many of each: a token sees itself and what is before it.

    Args:
        q_NHD: Queries of the tokens, those of one sequence in order, then those of the next; BF16 or FP16 for compiled
            code, each row of heads contiguous.
        pool: Keys and values (2, heads of keys, pages times 16, D), of the type of the queries, or codes in halves,
            uint8. Consecutive queries share a head of keys.
        table_SP: Pages of each sequence in order, int64; those behind its context are not read.
        contexts_S: Positions of each sequence, the newest included, int64; at least 1. Of more tokens than these, the
            first see nothing, and what is given for them is NaN.
        scale: Of scores.
        window: Most positions that a token sees, the newest ones; None: all.
        scales: Of codes (2, heads of keys, pages times 16, 1), FP32.
        high_halves: Read the first half of the codes of each head only.
        settled: Pages, table and contexts were complete before the operation before this one began, but for the keys
            and values of the newest tokens: a card then begins to read while that operation ends.
        backend: ``"auto"``, ``"compiled"`` (compiled code or an error) or ``"reference"`` (FP64, rounded once).

    Returns:
        (N, H, D), of the type of the queries.

    Raises:
        UnsupportedError: Arguments that do not fit, or compiled code is asked for and cannot run.

    Source: PagedAttention (SOSP 2023); sequences are split as in Flash-Decoding (2023).
    """
    size, heads, kv_heads = q_NHD.shape[-1], q_NHD.shape[1], pool.shape[1]
    kept = q_NHD.dtype if scales is None else torch.uint8
    if pool.shape[0] != 2 or pool.shape[3] != size or pool.dtype is not kept or heads % kv_heads:
        raise UnsupportedError(
            f"q is {tuple(q_NHD.shape)} in {q_NHD.dtype} and the pages are {tuple(pool.shape)} in {pool.dtype}, but "
            f"these must be (2, heads of keys, slots, size) in {kept}, of the same size, and heads a multiple"
        )
    if scales is not None and scales.shape != (*pool.shape[:3], 1):
        raise UnsupportedError(
            f"scales have the shape {tuple(scales.shape)}, but the pages need {(*pool.shape[:3], 1)}"
        )
    if high_halves and scales is None:
        raise UnsupportedError("high_halves is set, but only codes of 8 bits, with scales, have upper halves")
    if len(table_SP) == 0 or len(q_NHD) % len(table_SP):
        raise UnsupportedError(
            f"q has {len(q_NHD)} tokens of {len(table_SP)} sequences, but there must be as many of each"
        )
    library.check_backend(backend)
    if window is not None and window < 1:
        raise UnsupportedError(f"window is {window}, but it must be at least 1, or None")
    reason = explain(q_NHD.device, q_NHD.dtype, size)
    if backend == "compiled" and reason:
        raise UnsupportedError(f"backend 'compiled': {reason}")
    plain = backend == "reference" or bool(reason)
    run = _plain if plain else library.operator(UNIT, "paged_attention", q_NHD.device, backend)
    result: Tensor = run(q_NHD, pool, scales, table_SP, contexts_S, scale, window or 0, high_halves, settled)
    return result
