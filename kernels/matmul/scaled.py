"""Products of 8-bit codes with their scales: ``act(a_scale * b_scale * (a @ b.T) + bias)``, rounded once.

Both operands are contiguous along the contraction: this is how 8-bit matrix instructions read them, and the only layout
that is native. With codes x (N, K) of an input, w (M, K) of a weight and g (N, M) of an output gradient:

    forward            scaled_mm(x, w)        codes as the quantizer writes them
    input gradient     scaled_mm(g, w_T)      w_T (K, M): the transposed codes of the weight
    weight gradient    scaled_mm(g_T, x_T)    g_T (M, N) and x_T (K, N): transposed codes of both

A transposed view of codes is refused: quantizers write the transposed copy in the pass that rounds.

Axis letters: B batch, N rows, K contraction, M columns, S blocks of 128 along K.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qsync_opt.errors import UnsupportedError
from qsync_opt.kernels.compilation import library
from qsync_opt.kernels.matmul.integer import int8_bmm
from qsync_opt.kernels.matmul.tiles import activate
from qsync_opt.kernels.quantize import amax

SCALE_BLOCK = 128
EPILOGUES = ("none", "relu", "gelu")
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_RESULTS = (torch.bfloat16, torch.float16, torch.float32)
# Products of codes as large as 128 * 128 add up to 2**31 after so many terms.
_INT32_TERMS = (1 << 31) // (128 * 128) - 1


def _blocks(depth: int) -> int:
    return -(-depth // SCALE_BLOCK)


def _check(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, epilogue: str, out_dtype: torch.dtype
) -> None:
    """Refuse what no implementation can do, by name."""
    for name, codes in (("a", a), ("b", b)):
        if codes.dtype is not torch.int8 and codes.dtype not in _FP8:
            raise UnsupportedError(
                f"scaled_mm: {name} is {codes.dtype}; allowed are int8, float8_e4m3fn and float8_e5m2"
            )
        if codes.dim() not in (2, 3):
            raise UnsupportedError(f"scaled_mm: {name} has {codes.dim()} dimensions; allowed are 2 and 3 (a batch)")
        if codes.shape[-1] > 1 and codes.stride(-1) != 1:
            raise UnsupportedError(
                f"scaled_mm: {name} is not contiguous along the contraction, its last dimension; "
                "pass codes written transposed"
            )
    if (a.dtype is torch.int8) != (b.dtype is torch.int8):
        raise UnsupportedError(f"scaled_mm: a is {a.dtype} and b {b.dtype}; both must be INT8, or both FP8")
    if a.dim() != b.dim() or a.shape[-1] != b.shape[-1] or a.shape[:-2] != b.shape[:-2]:
        raise UnsupportedError(
            f"scaled_mm: shapes {tuple(a.shape)} and {tuple(b.shape)}; needed are (.., N, K) and (.., M, K)"
        )
    for name, codes, scale in (("a_scale", a, a_scale), ("b_scale", b, b_scale)):
        batch = codes.shape[0] if codes.dim() == 3 else 1
        rows = batch * codes.shape[-2]
        allowed = (1, batch, rows, rows * _blocks(codes.shape[-1]))
        if scale.dtype is not torch.float32 or scale.numel() not in allowed:
            raise UnsupportedError(
                f"scaled_mm: {name} has {scale.numel()} elements of {scale.dtype}; allowed are float32 and 1, {batch} "
                f"(per matrix), {rows} (per row) or {allowed[3]} (per row and block of {SCALE_BLOCK})"
            )
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != b.shape[-2] or bias.dtype not in _RESULTS):
        raise UnsupportedError(
            f"scaled_mm: bias is {tuple(bias.shape)} of {bias.dtype}; "
            f"needed is ({b.shape[-2]},) of a 16- or 32-bit float"
        )
    if epilogue not in EPILOGUES:
        raise UnsupportedError(f"scaled_mm: epilogue {epilogue!r}; allowed are {', '.join(EPILOGUES)}")
    if out_dtype not in _RESULTS:
        raise UnsupportedError(f"scaled_mm: out_dtype {out_dtype}; allowed are bfloat16, float16 and float32")


def _by_row(scale: Tensor, codes: Tensor) -> Tensor:
    """A scale seen as (B, rows, 1), or (B, rows, S) where it has blocks."""
    batch, rows = codes.shape[:2]
    if scale.numel() in (1, batch):
        return scale.reshape(scale.numel(), 1, 1).expand(batch, rows, 1)
    return scale.reshape(batch, rows, 1 if scale.numel() == batch * rows else _blocks(codes.shape[2]))


def _sums(a_BNK: Tensor, b_BMK: Tensor) -> Tensor:
    """Sums of products of codes: exact for INT8, FP32 for FP8; shape (B, N, M)."""
    if a_BNK.dtype is not torch.int8:
        return torch.bmm(a_BNK.to(torch.float32), b_BMK.to(torch.float32).mT)
    if a_BNK.shape[-1] > _INT32_TERMS:
        return torch.bmm(a_BNK.to(torch.float64), b_BMK.to(torch.float64).mT)
    return int8_bmm(a_BNK, b_BMK.mT)


def _blocked_sums(a_BNK: Tensor, b_BMK: Tensor, a_scale_BNS: Tensor, b_scale_BMS: Tensor) -> Tensor:
    """Sums of blocks of 128 terms, each times its own two scales: FP32, shape (B, N, M)."""
    blocks = _blocks(a_BNK.shape[-1])
    a_scale_BNS, b_scale_BMS = a_scale_BNS.expand(-1, -1, blocks), b_scale_BMS.expand(-1, -1, blocks)
    total = a_scale_BNS.new_zeros((a_BNK.shape[0], a_BNK.shape[1], b_BMK.shape[1]))
    for block in range(blocks):
        terms = slice(block * SCALE_BLOCK, (block + 1) * SCALE_BLOCK)
        scale = a_scale_BNS[:, :, block, None] * b_scale_BMS[:, None, :, block]
        total += _sums(a_BNK[..., terms], b_BMK[..., terms]).to(torch.float32) * scale
    return total


def product(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    epilogue: str,
    out_dtype: torch.dtype,
    accurate: bool = False,
) -> tuple[Tensor, Tensor]:
    """The specification: result and what the activation was applied to, both (.., N, M) in ``out_dtype``.

    Sums of INT8 codes are exact; scales, bias and activation are FP32; one rounding. FP8 sums are accurate here.
    """
    del accurate
    _check(a, b, a_scale, b_scale, bias, epilogue, out_dtype)
    a_BNK, b_BMK = (a, b) if a.dim() == 3 else (a[None], b[None])
    a_scale, b_scale = _by_row(a_scale, a_BNK), _by_row(b_scale, b_BMK)
    if a_scale.shape[2] == b_scale.shape[2] == 1:
        result = _sums(a_BNK, b_BMK).to(torch.float32) * (a_scale * b_scale.mT)
    else:
        result = _blocked_sums(a_BNK, b_BMK, a_scale, b_scale)
    if bias is not None:
        result = result + bias.to(torch.float32)
    # A clone, because results of an operator may not share memory.
    activate_by = {"none": torch.clone, "relu": torch.relu, "gelu": torch.nn.functional.gelu}[epilogue]
    shape = (*a.shape[:-1], b.shape[-2])
    return activate_by(result).to(out_dtype).reshape(shape), result.to(out_dtype).reshape(shape)


def _plain_amax(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    result, _ = product(a, b, a_scale, b_scale, bias, "none", out_dtype)
    return result, amax(result, None).reshape(1)


def _empty(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[-2]), dtype=out_dtype)


_ARGUMENTS = (
    "(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor? bias, str epilogue, ScalarType out_dtype, "
    "bool accurate=False)"
)
_scaled_mm = library.define(
    f"scaled_mm{_ARGUMENTS} -> Tensor",
    unit="matmul",
    plain=lambda *arguments: product(*arguments)[0],
    fake=lambda a, b, *others: _empty(a, b, others[4]),
)
_scaled_mm_aux = library.define(
    f"scaled_mm_aux{_ARGUMENTS} -> (Tensor, Tensor)",
    unit="matmul",
    plain=product,
    fake=lambda a, b, *others: (_empty(a, b, others[4]), _empty(a, b, others[4])),
)
_scaled_mm_amax = library.define(
    "scaled_mm_amax(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor? bias, ScalarType out_dtype) -> "
    "(Tensor, Tensor)",
    unit="matmul",
    plain=_plain_amax,
    fake=lambda a, b, *others: (_empty(a, b, others[3]), a.new_empty((1,), dtype=torch.float32)),
)


def scaled_mm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    *,
    epilogue: str = "none",
    out_dtype: torch.dtype = torch.bfloat16,
    accurate: bool = False,
) -> Tensor:
    """Product of 8-bit codes, scaled, shifted, activated, rounded once.

    Args:
        a: Codes (N, K) or (B, N, K): int8, float8_e4m3fn or float8_e5m2, contiguous along K. Rows may be further apart
            than K; where that is no multiple of 16 bytes, Hopper cards copy the codes once (one pass over them).
        b: Codes (M, K) or (B, M, K), contiguous along K; INT8 if ``a`` is, else either FP8 type.
        a_scale: FP32: 1 element, one per matrix, per row, or per row and block of 128 along K.
        b_scale: The same for ``b``.
        bias: (M,) of a 16- or 32-bit float, added in FP32.
        epilogue: ``"none"``, ``"relu"`` or ``"gelu"`` (that of the normal distribution function).
        out_dtype: bfloat16, float16 or float32.
        accurate: FP8 on Hopper: add blocks of 128 products in FP32, instead of all in the tensor core's shortened
            FP32 (INT8 sums are exact either way).

    Returns:
        (N, M) or (B, N, M).

    Raises:
        UnsupportedError: Types, shapes or layouts that no implementation takes; the text names them.

    Source: ours.
    """
    _check(a, b, a_scale, b_scale, bias, epilogue, out_dtype)
    if a.is_cuda:
        activate()
    result: Tensor = _scaled_mm(a, b, a_scale, b_scale, bias, epilogue, out_dtype, accurate)
    return result


def scaled_mm_unchecked(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """`scaled_mm` without checks on the host, for operands that a quantizer has written (CUDA code checks them)."""
    if a.is_cuda:
        activate()
    result: Tensor = _scaled_mm(a, b, a_scale, b_scale, bias, "none", out_dtype)
    return result


def scaled_mm_aux(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    *,
    epilogue: str = "none",
    out_dtype: torch.dtype = torch.bfloat16,
    accurate: bool = False,
) -> tuple[Tensor, Tensor]:
    """The same, with what the activation was applied to: its gradient needs that. One launch, one more write.

    Returns:
        The result and the preactivation, both (N, M) or (B, N, M) in ``out_dtype``.

    Source: ours.
    """
    _check(a, b, a_scale, b_scale, bias, epilogue, out_dtype)
    if a.is_cuda:
        activate()
    result: tuple[Tensor, Tensor] = _scaled_mm_aux(a, b, a_scale, b_scale, bias, epilogue, out_dtype, accurate)
    return result


def scaled_mm_amax(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor]:
    """:func:`scaled_mm`, with the largest magnitude of its results: what quantizes them need not look for it.

    On Hopper cards the product finds it while it writes, where each operand has one scale, there is no bias and results
    have 16 bits; elsewhere a second pass reads the results.

    Returns:
        The result, and one FP32: the largest magnitude in it, NaN if one is NaN.

    Source: ours.
    """
    _check(a, b, a_scale, b_scale, bias, "none", out_dtype)
    if a.is_cuda:
        activate()
    result: tuple[Tensor, Tensor] = _scaled_mm_amax(a, b, a_scale, b_scale, bias, out_dtype)
    return result
