"""Hadamard rotations of activations: every block of consecutive inputs times the normalized Hadamard matrix.

An input that stands out among its block is spread over all of it, so that a row rounded with one scale loses less.
The matrix is its own inverse; a weight whose inputs were rotated before it was rounded (`pack`) gives the same products
with rotated activations as the weight itself with plain ones, up to rounding.

The plain implementation computes in FP64 and rounds once. Compiled code adds in FP32 in one order for any number of
rows, so that a row's result does not depend on the others.

Axis letters: N rows, K inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qsync_opt.errors import UnsupportedError
from qsync_opt.kernels.compilation import library
from qsync_opt.kernels.quantize import quantize_matrix
from qsync_opt.kernels.weight_only import host
from qsync_opt.kernels.weight_only.host import UNIT
from qsync_opt.kernels.weight_only.layout import ROTATIONS, rotated_inputs
from qsync_opt.kernels.weight_only.rounding import EIGHT_BITS, RoundedRows, round_rows


def _plain_rotate(x: Tensor, block: int) -> Tensor:
    return rotated_inputs(x, block).to(x.dtype)


def _plain_rotate_and_round(x: Tensor, block: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rotated = _plain_rotate(x.float(), block)
    codes, scale, _ = quantize_matrix(rotated, dtype, granularity="row", rounding="nearest", backend="reference")
    return codes, scale.view(-1)


library.define(
    "weight_only_rotate(Tensor x, int block) -> Tensor",
    unit=UNIT,
    plain=_plain_rotate,
    fake=lambda x, block: torch.empty_like(x, memory_format=torch.contiguous_format),
)
library.define(
    "weight_only_rotate_and_round(Tensor x, int block, ScalarType dtype) -> (Tensor, Tensor)",
    unit=UNIT,
    plain=_plain_rotate_and_round,
    fake=lambda x, block, dtype: (x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[:1], dtype=torch.float32)),
)


def rotate(x: Tensor, block: int, *, backend: str = "auto") -> Tensor:
    """``x`` with each block of inputs times the normalized Hadamard matrix, rounded once to the type of ``x``.

    Args:
        x: BF16, FP16, FP32 or FP64, shape (..., K) with K a multiple of the block.
        block: 64 or 128.
        backend: As for `linear`.

    Raises:
        UnsupportedError: Another block, or inputs that it does not divide.

    Source: QuaRot, NeurIPS 2024, for rotations before activations are rounded; by blocks, which refuses no size, as in
        DuQuant, NeurIPS 2024.
    """
    if block not in ROTATIONS:
        raise UnsupportedError(f"block is {block!r}, but allowed are {', '.join(map(str, ROTATIONS))}")
    if x.dim() == 0 or x.shape[-1] % block:
        raise UnsupportedError(
            f"x has the shape {tuple(x.shape)}, but its last dimension must be a multiple of {block}"
        )
    rows = x.reshape(-1, x.shape[-1])
    if backend == "reference" or x.dtype is torch.float64:
        return _plain_rotate(rows, block).view(x.shape)
    if x.device.type == "cpu" and not isinstance(host.functions(), str):
        return host.rotate(rows, block).to(x.dtype).view(x.shape)
    rotated: Tensor = library.operator(UNIT, "weight_only_rotate", x.device, backend)(rows.contiguous(), block)
    return rotated.view(x.shape)


def rotate_and_round(rows: Tensor, block: int, activations: str, backend: str = "auto") -> RoundedRows:
    """The rows of a matrix (N, K), each block of inputs rotated unless ``block`` is 0, rounded to codes.

    Rotated numbers are not rounded in between.

    Args:
        rows: BF16, FP16, FP32 or FP64.
        block: 0, 64 or 128, which divides K.
        activations: ``"A8"``, ``"F8"`` or ``"A4"``.
        backend: As for `linear`.
    """
    if not block:
        return round_rows(rows, activations, backend)
    if rows.device.type == "cuda" and activations in EIGHT_BITS and backend != "reference":
        turning = library.operator(UNIT, "weight_only_rotate_and_round", rows.device, backend)
        codes, scale = turning(rows.contiguous(), block, EIGHT_BITS[activations])
        return RoundedRows(codes, scale.view(-1, 1), rows.dtype)
    wide = rows if rows.dtype is torch.float64 else rows.float()
    return round_rows(rotate(wide, block, backend=backend), activations, backend)._replace(dtype=rows.dtype)
