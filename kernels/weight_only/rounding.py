"""Activations as products take them: as they are, or each row rounded to codes with a scale of its own.

| name | codes | scale of a row |
|---|---|---|
| A16 | none: 16 bits or wider, as they are | |
| A8 | INT8, -127 to 127 | largest magnitude / 127 |
| F8 | FP8 (E4M3) | largest magnitude / 448 |
| A4 | 4 bits, -7 to 7, in int8 | largest magnitude / 7 |
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qsync_opt.kernels.quantize import quantize_matrix

WIDE = "A16"
ACTIVATIONS = (WIDE, "A8", "F8", "A4")
EIGHT_BITS = {"A8": torch.int8, "F8": torch.float8_e4m3fn}
"""Types of codes of 8 bits, by activations."""
_LARGEST_4 = 7


class RoundedRows(NamedTuple):
    """Rows as codes.

    Attributes:
        codes: Shape (N, K), int8 or FP8 (E4M3).
        scale: Of each row, FP32, shape (N, 1); NaN where the row holds NaN or an infinity.
        dtype: What the rows were before, and results of products are.
    """

    codes: Tensor
    scale: Tensor
    dtype: torch.dtype


def round_rows(rows: Tensor, activations: str, backend: str = "auto") -> RoundedRows:
    """The rows of a matrix (N, K) rounded to nearest."""
    source = rows.float() if rows.dtype is torch.float64 else rows
    if activations in EIGHT_BITS:
        quantizer = "reference" if backend == "reference" else "auto"
        codes, scale, _ = quantize_matrix(
            source, EIGHT_BITS[activations], granularity="row", rounding="nearest", backend=quantizer
        )
        return RoundedRows(codes, scale.view(-1, 1), rows.dtype)
    source = source.float()
    scale = (source.abs().amax(1, keepdim=True) / _LARGEST_4).clamp_min(torch.finfo(torch.float32).tiny)
    codes = (source / scale).round_().nan_to_num_().clamp_(-_LARGEST_4, _LARGEST_4).to(torch.int8)
    return RoundedRows(codes, torch.where(scale.isfinite(), scale, torch.nan), rows.dtype)
