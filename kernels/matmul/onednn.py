"""INT8 products of CPUs with scales, bias and output conversion fused, through the oneDNN operators that torch ships.

The operators belong to torch's quantized inference and are not public API. Each is tried once against an exact
result before it is used; where it is absent or inexact the caller takes another path.

Axis letters: N rows or samples, K contraction, M columns or output channels, C input channels.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from qsync_opt.kernels.quantize.quantize import INT8_MAX, Quantized

_ZERO_POINT = 128


def _per_channel(scale: Tensor, channels: int) -> Tensor:
    return scale.reshape(-1).expand(channels).contiguous()


def linear(a: Quantized, b: Quantized, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``(a.codes @ b.codes) * a.scale * b.scale + bias`` in ``dtype`` (BF16 or FP32).

    Args:
        a: Codes (N, K), one scale.
        b: Codes (K, M) in any layout, one scale or (1, M).
        bias: (M,), any floating type, or None.
        dtype: Of the result; the sums are INT32 and scaled in FP32.

    Returns:
        Shape (N, M).
    """
    columns = b.codes.shape[1]
    zero_points = torch.zeros(columns, dtype=torch.int32)
    result: Tensor = torch.ops.onednn.qlinear_pointwise(
        a.codes.contiguous(),
        a.scale.item(),
        0,
        b.codes.to_mkldnn(),
        _per_channel(b.scale, columns),
        zero_points,
        None if bias is None else bias.to(torch.float32),
        1.0,
        0,
        dtype,
        "none",
        [],
        "",
    )
    return result


def convolution(
    x: Quantized, weight: Quantized, bias: Tensor | None, geometry: tuple[Any, ...], dtype: torch.dtype
) -> Tensor:
    """Convolution of codes with scales and bias applied, in ``dtype``; the result is channels-last in memory.

    Args:
        x: Codes (N, C, ...), one scale.
        weight: Codes (M, C / groups, ...), one scale or one per output channel.
        bias: (M,) or None.
        geometry: stride, padding, dilation, transposed (must be False), output padding, groups.
        dtype: Of the result.
    """
    stride, padding, dilation, _, _, groups = geometry
    channels = weight.codes.shape[0]
    scales = _per_channel(weight.scale, channels)
    spatial = x.codes.dim() - 2
    # The operator takes unsigned activations; shifting by the zero point is flipping the top bit.
    unsigned = x.codes.contiguous().view(torch.uint8) ^ _ZERO_POINT
    if spatial == 2:
        unsigned = unsigned.contiguous(memory_format=torch.channels_last)
    packed = torch.ops.onednn.qconv_prepack(
        weight.codes.contiguous(),
        scales,
        1.0,
        _ZERO_POINT,
        list(stride),
        list(padding),
        list(dilation),
        groups,
        list(unsigned.shape),
    )
    result: Tensor = torch.ops.onednn.qconv_pointwise(
        unsigned,
        x.scale.item(),
        _ZERO_POINT,
        packed,
        scales,
        torch.zeros(channels, dtype=torch.int32),
        None if bias is None else bias.to(torch.float32),
        list(stride),
        list(padding),
        list(dilation),
        groups,
        1.0,
        0,
        dtype,
        "none",
        [],
        "",
    )
    return result


def _extreme_codes(*shape: int) -> Tensor:
    codes = torch.full(shape, INT8_MAX, dtype=torch.int8)
    codes[1::2] = -INT8_MAX
    return codes


@functools.cache
def has_onednn_linear() -> bool:
    """Whether the fused linear operator exists and is exact for the largest codes (tried once)."""
    a = Quantized(_extreme_codes(4, 64), torch.ones(1, 1))
    b = Quantized(_extreme_codes(8, 64).t(), torch.ones(1, 8))
    try:
        result = linear(a, b, None, torch.float32)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return torch.equal(result, a.codes.float() @ b.codes.float())


@functools.cache
def has_onednn_convolution() -> bool:
    """Whether the fused convolution exists and is exact for the largest codes (tried once)."""
    x = Quantized(_extreme_codes(2, 8, 5, 5), torch.ones(1, 1, 1, 1))
    weight = Quantized(_extreme_codes(4, 8, 3, 3), torch.ones(4, 1, 1, 1))
    geometry = ((1, 1), (1, 1), (1, 1), False, (0, 0), 1)
    try:
        result = convolution(x, weight, None, geometry, torch.float32)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return torch.equal(result, torch.nn.functional.conv2d(x.codes.float(), weight.codes.float(), padding=1))
