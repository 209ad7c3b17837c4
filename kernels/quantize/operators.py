"""The operators ``qsync_opt::quantize``, ``quantize_by_amax`` and ``dequantize`` on matrices.

The plain implementations below are the specification; CUDA gives the same scales and codes bit for bit, except that the
codes of a slice that holds NaN or an infinity mean nothing anywhere (its scale is NaN, and so is all computed from it).

Axis letters: N rows, K columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qsync_opt.errors import UnsupportedError
from qsync_opt.kernels.compilation import library
from qsync_opt.kernels.options import KernelOptions
from qsync_opt.kernels.quantize.formats import amax, codes_of, factor_of, format_of, scale_from
from qsync_opt.kernels.quantize.random_bits import signed, stream_key

BLOCK = 128
UNIT = "quantize"
GRANULARITIES = ("tensor", "row", "channel", "block")
ROUNDINGS = ("nearest", "stochastic")
_DIMS: dict[str, tuple[int, ...] | None] = {"tensor": None, "row": (1,), "channel": (0,)}
_SOURCES = (torch.float32, torch.bfloat16, torch.float16)


class QuantizedMatrix(NamedTuple):
    """Codes (N, K), FP32 scales, and, on request, the codes transposed, (K, N) and dense.

    Scales are (1, 1) per tensor, (N, 1) per row, (1, K) per channel (column), (N, ceil(K / 128)) per block.
    """

    codes: Tensor
    scale: Tensor
    transposed: Tensor | None


def spread(scale: Tensor, rows: int, columns: int) -> Tensor:
    """Scales of any granularity so that they broadcast against (rows, columns): blocks are repeated."""
    if scale.shape[1] in (1, columns):
        return scale
    return scale.repeat_interleave(BLOCK, 1)[:, :columns]


def _block_amax(x: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % BLOCK))
    return amax(padded.view(x.shape[0], -(-x.shape[1] // BLOCK), BLOCK), (2,)).squeeze(2)


def _quantize(x: Tensor, format: torch.dtype, granularity: str, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Plain PyTorch: ``codes = round(x * factor_of(scale))``; element (n, k) draws noise number n K + k."""
    largest = _block_amax(x) if granularity == "block" else amax(x, _DIMS[granularity])
    return _codes(x, scale_from(largest, format_of(format)), format, *others)


def _codes(
    x: Tensor, scale: Tensor, format: torch.dtype, rounding: str, key: int, step: Tensor | None, transposed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    form = format_of(format)
    factor = spread(factor_of(scale, form, rounding), *x.shape)
    codes = codes_of(x.contiguous(), factor, form, rounding, key, step)
    copy = codes.view(torch.uint8).t().contiguous().view(format) if transposed else codes.new_empty(0)
    return codes, scale, copy


def plain_by_amax(x: Tensor, amax: Tensor, format: torch.dtype, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Plain PyTorch: ``quantize`` per tensor with a known largest magnitude."""
    return _codes(x, scale_from(amax.reshape(1, 1), format_of(format)), format, *others)


def _fake_quantize(x: Tensor, format: torch.dtype, granularity: str, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = x.shape
    high = rows if granularity in ("row", "block") else 1
    wide = {"channel": columns, "block": (columns + BLOCK - 1) // BLOCK}.get(granularity, 1)
    copy = x.new_empty((columns, rows) if others[-1] else (0,), dtype=format)
    return x.new_empty((rows, columns), dtype=format), x.new_empty((high, wide), dtype=torch.float32), copy


def _dequantize(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Plain PyTorch: the product with the scale is formed in FP32 and rounded once."""
    return codes.to(torch.float32).mul_(spread(scale, *codes.shape)).to(dtype)


for _schema, _plain, _fake in (
    (
        "quantize(Tensor x, ScalarType format, str granularity, str rounding, int key, Tensor? step, "
        "bool transposed) -> (Tensor, Tensor, Tensor)",
        _quantize,
        _fake_quantize,
    ),
    (
        "quantize_by_amax(Tensor x, Tensor amax, ScalarType format, str rounding, int key, Tensor? step, "
        "bool transposed) -> (Tensor, Tensor, Tensor)",
        plain_by_amax,
        lambda x, amax, format, *others: _fake_quantize(x, format, "tensor", *others),
    ),
    (
        "dequantize(Tensor codes, Tensor scale, ScalarType dtype) -> Tensor",
        _dequantize,
        lambda codes, scale, dtype: codes.new_empty(codes.shape, dtype=dtype),
    ),
):
    library.define(_schema, unit=UNIT, plain=_plain, fake=_fake)


def _check_choice(what: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UnsupportedError(f"{what}={value!r}: allowed are {', '.join(allowed)}")


def quantize_matrix(
    x: Tensor,
    format: torch.dtype,
    *,
    granularity: str = "tensor",
    rounding: str = "stochastic",
    key: int = 0,
    step: Tensor | None = None,
    transposed: bool = False,
    backend: str = "auto",
) -> QuantizedMatrix:
    """8-bit codes and scales of a matrix, without waiting for the device.

    Per row or block it is read once; per tensor or channel, or per row with the transposition, twice. The fast kernels
    want columns in multiples of 16 bytes and, for the transposition, rows in multiples of four; others run any layout.

    Args:
        x: FP32, BF16 or FP16, (N, K), any strides (read in place, not copied).
        format: ``torch.int8``, ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        granularity: One scale per ``"tensor"``, ``"row"``, ``"channel"`` (column) or ``"block"`` of 128 elements of a
            row.
        rounding: ``"nearest"`` (ties to even) or ``"stochastic"``.
        key: Of the random stream (:func:`~qsync_opt.kernels.quantize.random_bits.stream_key`).
        step: One int64 on the device of ``x`` that is mixed into the key; raised in place between the replays of a
            CUDA graph, it gives each its own noise.
        transposed: Also write the codes transposed; not for blocks, whose scales do not follow.
        backend: ``"auto"``, ``"compiled"`` (an error where CUDA code cannot run) or ``"reference"``.

    Returns:
        Codes and scales; the scale of a slice of zeros is the smallest normal number, of one with NaN or an infinity
        NaN.

    Raises:
        UnsupportedError: An argument that is not among those named above.

    Source: Stochastic rounding as in S. Gupta et al., "Deep learning with limited numerical precision", ICML 2015;
        kernels and noise are ours.
    """
    if x.dim() != 2 or x.dtype not in _SOURCES:
        raise UnsupportedError(
            f"quantize: a {x.dim()}-dimensional {x.dtype} tensor; a float32, bfloat16 or float16 matrix"
        )
    format_of(format)
    _check_choice("granularity", granularity, GRANULARITIES)
    _check_choice("rounding", rounding, ROUNDINGS)
    if transposed and granularity == "block":
        raise UnsupportedError("quantize: blocks have no transposed copy: quantize the transposed matrix by itself")
    return quantize_unchecked(
        x, format, granularity, rounding=rounding, key=key, step=step, backend=backend, transposed=transposed
    )


def drawing(options: KernelOptions, stream: int, rounding: str | None = None) -> dict[str, Any]:
    """Keyword arguments of the quantizers of matrices for one random stream of a call; ``rounding`` overrides."""
    key = stream_key(options.seed, options.offset, stream)
    rounding = options.rounding if rounding is None else rounding
    return {"rounding": rounding, "key": key, "step": options.step, "backend": options.backend}


def quantize_unchecked(
    x: Tensor,
    format: torch.dtype,
    granularity: str,
    *,
    rounding: str,
    key: int,
    step: Tensor | None,
    backend: str,
    transposed: bool = False,
) -> QuantizedMatrix:
    """`quantize_matrix` without its checks of arguments."""
    operator = library.operator(UNIT, "quantize", x.device, backend)
    codes, scale, copy = operator(x, format, granularity, rounding, signed(key), step, transposed)
    return QuantizedMatrix(codes, scale, copy if transposed else None)


def quantize_by_amax(
    x: Tensor,
    largest: Tensor,
    format: torch.dtype,
    *,
    rounding: str = "stochastic",
    key: int = 0,
    step: Tensor | None = None,
    transposed: bool = False,
    backend: str = "auto",
) -> QuantizedMatrix:
    """`quantize_matrix` per tensor in one pass, where the operator that wrote ``x`` has computed its largest magnitude.

    ``largest`` is FP32, one element on the device of ``x``: no magnitude in ``x`` may be above it.
    """
    if x.dim() != 2 or x.dtype not in _SOURCES or largest.numel() != 1 or largest.dtype is not torch.float32:
        raise UnsupportedError(
            f"quantize: a {x.dim()}-dimensional {x.dtype} tensor with {largest.numel()} magnitudes of {largest.dtype}; "
            "a float32, bfloat16 or float16 matrix with one of float32 is needed"
        )
    format_of(format)
    _check_choice("rounding", rounding, ROUNDINGS)
    operator = library.operator(UNIT, "quantize_by_amax", x.device, backend)
    codes, scale, copy = operator(x, largest, format, rounding, signed(key), step, transposed)
    return QuantizedMatrix(codes, scale, copy if transposed else None)


def dequantize_matrix(codes: Tensor, scale: Tensor, dtype: torch.dtype, *, backend: str = "auto") -> Tensor:
    """Values of codes (N, K) in FP32, BF16 or FP16: the product with the scale in FP32, rounded once.

    Raises:
        UnsupportedError: Another element type, or scales that do not belong to such codes.
    """
    format_of(codes.dtype)
    if codes.dim() != 2 or dtype not in _SOURCES:
        raise UnsupportedError(
            f"dequantize: {codes.dim()}-dimensional codes to {dtype}; a matrix to float32, bfloat16, float16"
        )
    rows, columns = codes.shape
    allowed = ((1, 1), (rows, 1), (1, columns), (rows, -(-columns // BLOCK)))
    if tuple(scale.shape) not in allowed:
        raise UnsupportedError(
            f"dequantize: scales {tuple(scale.shape)} of codes {rows, columns}: allowed are {allowed}"
        )
    result: Tensor = library.operator(UNIT, "dequantize", codes.device, backend)(codes, scale, dtype)
    return result
