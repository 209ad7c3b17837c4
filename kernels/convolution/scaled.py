"""INT8 convolutions of images with scales, bias and activation fused: the operator ``qsync_opt::scaled_conv2d``.

The result is ``activation(sums * (x_scale * weight_scale) + bias)``: exact integer sums, the rest formed in FP32 step
by step, rounded once to the output's type, so that every implementation gives the same bits. On CUDA the kernels are
our own: implicit products whose patches the copy engine gathers (sm_90a), the same on ``mma.sync`` (from sm_75 on,
any geometry), one thread per result for groups of few channels. 16-bit convolutions and the gradients of an INT8
convolution stay with cuDNN, through torch.

Axis letters: N samples, H W input rows and columns, C input channels, K output channels, R S kernel rows and columns,
P Q output rows and columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qsync_opt.errors import UnsupportedError
from qsync_opt.kernels.compilation import library
from qsync_opt.kernels.matmul import exact_convolution

ACTIVATIONS = ("none", "relu")
OUTPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# The largest number of products of two codes whose sum surely fits INT32.
MAX_TERMS = ((1 << 31) - 1) // (127 * 127)


def _output_sizes(sizes_HW: Sequence[int], taps_RS: Sequence[int], *geometry: Sequence[int]) -> list[int]:
    per_dim = zip(sizes_HW, taps_RS, *geometry, strict=True)
    return [(size + 2 * p - d * (taps - 1) - 1) // s + 1 for size, taps, s, p, d in per_dim]


def _plain(x_NHWC: Tensor, weight_KRSC: Tensor, x_scale: Tensor, weight_scale: Tensor, *others: Any) -> Tensor:
    """The operator in plain PyTorch: the specification."""
    bias, stride, padding, dilation, groups, activation, out_dtype = others[:7]
    if x_NHWC.numel() == 0:
        return _fake(x_NHWC, weight_KRSC, x_scale, weight_scale, *others)
    geometry = (tuple(stride), tuple(padding), tuple(dilation), False, (0, 0), groups)
    x_NCHW, weight_KCRS = x_NHWC.permute(0, 3, 1, 2), weight_KRSC.permute(0, 3, 1, 2)
    sums_NPQK = exact_convolution(x_NCHW, weight_KCRS, geometry, "reference").permute(0, 2, 3, 1)
    result: Tensor = sums_NPQK.to(torch.float32).mul_(x_scale.reshape(-1, 1, 1, 1) * weight_scale.reshape(-1))
    if bias is not None:
        result.add_(bias)
    if activation == "relu":
        result.relu_()
    return result.to(out_dtype).contiguous()


def _fake(x_NHWC: Tensor, weight_KRSC: Tensor, *others: Any) -> Tensor:
    p, q = _output_sizes(x_NHWC.shape[1:3], weight_KRSC.shape[1:3], *others[3:6])
    return x_NHWC.new_empty((x_NHWC.shape[0], p, q, weight_KRSC.shape[0]), dtype=others[8])


_scaled_conv2d = library.define(
    "scaled_conv2d(Tensor x, Tensor weight, Tensor x_scale, Tensor weight_scale, Tensor? bias, int[] stride, "
    "int[] padding, int[] dilation, int groups, str activation, ScalarType out_dtype, int tile=-1) -> Tensor",
    unit="convolution",
    plain=_plain,
    fake=_fake,
)


def _check_operands(x: Tensor, weight: Tensor, groups: int) -> None:
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor.dim() != 4 or tensor.dtype is not torch.int8:
            raise UnsupportedError(
                f"scaled_conv2d: {name} of shape {tuple(tensor.shape)} and {tensor.dtype}; "
                "needed are INT8 codes of four dimensions, (N, C, H, W) and (K, C / groups, R, S)"
            )
    channels, (outputs, inner, rows, columns) = x.shape[1], weight.shape
    if groups < 1 or inner * groups != channels or outputs % groups or min(inner, rows, columns, outputs) < 1:
        raise UnsupportedError(
            f"scaled_conv2d: {channels} channels and a weight of shape {tuple(weight.shape)} do not fit "
            f"{groups} groups; needed is (K, C / groups, R, S) with K a multiple of groups, none of them 0"
        )
    if inner * rows * columns > MAX_TERMS:
        raise UnsupportedError(
            f"scaled_conv2d: sums of {inner * rows * columns} products may leave INT32; at most {MAX_TERMS} are safe"
        )


def _check_factors(x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, bias: Tensor | None) -> None:
    allowed = {"x_scale": (x_scale, {1, x.shape[0]}), "weight_scale": (weight_scale, {1, weight.shape[0]})}
    if bias is not None:
        allowed["bias"] = (bias, {weight.shape[0]})
    for name, (factor, counts) in allowed.items():
        if factor.numel() not in counts or not factor.is_floating_point():
            raise UnsupportedError(
                f"scaled_conv2d: {name} has {factor.numel()} elements of {factor.dtype}; "
                f"needed are {' or '.join(map(str, sorted(counts)))} of a floating type"
            )
        if factor.device != x.device:
            raise UnsupportedError(f"scaled_conv2d: {name} is on {factor.device}, x on {x.device}; move one of them")


def _check_geometry(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> None:
    for name, pair, minimum in (("stride", stride, 1), ("padding", padding, 0), ("dilation", dilation, 1)):
        if len(pair) != 2 or min(pair) < minimum:
            raise UnsupportedError(f"scaled_conv2d: {name} {tuple(pair)}; needed are two integers from {minimum}")
    p, q = _output_sizes(x.shape[2:], weight.shape[2:], stride, padding, dilation)
    if min(p, q) < 1:
        raise UnsupportedError(
            f"scaled_conv2d: a kernel of {tuple(weight.shape[2:])} does not fit an input of {tuple(x.shape[2:])} with "
            f"padding {tuple(padding)} and dilation {tuple(dilation)}"
        )
    if x.shape[0] * p * q >= 1 << 31:
        raise UnsupportedError(
            f"scaled_conv2d: {x.shape[0] * p * q} output pixels; at most {(1 << 31) - 1} fit, split the batch"
        )


def _factor(factor: Tensor, count: int | None = None) -> Tensor:
    """Factors in a row, in FP32; one factor repeated ``count`` times."""
    flat = factor.reshape(-1).to(torch.float32)
    return (flat if count is None else flat.expand(count)).contiguous()


def scaled_conv2d(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
    activation: str = "none",
    out_dtype: torch.dtype = torch.bfloat16,
    tile: int = -1,
) -> Tensor:
    """``activation(conv2d(x, weight) * x_scale * weight_scale + bias)`` of INT8 codes.

    Args:
        x: Codes, int8, shape (N, C, H, W); copied unless it is channels-last.
        weight: Codes, int8, shape (K, C / groups, R, S); copied unless it is channels-last.
        x_scale: One scale, or one per sample (N elements in any shape).
        weight_scale: One scale, or one per output channel (K elements in any shape).
        bias: K elements, or None.
        stride: Steps of the kernel in rows and columns.
        padding: Zeros around the input, in rows and columns, on either side.
        dilation: Distance of the kernel's taps in rows and columns.
        groups: Blocks of channels that are convolved apart.
        activation: ``"none"`` or ``"relu"``.
        out_dtype: BF16, FP16 or FP32.
        tile: On sm_90a the tile of the table in ``convolution_sm90.cu`` to use, for tuning; -1 takes the one that is
            tuned for the shape or estimated to be fastest.

    Returns:
        Shape (N, K, P, Q), channels-last.

    Raises:
        UnsupportedError: Shapes, types, devices or options that do not fit.

    Source: ours.
    """
    _check_operands(x, weight, groups)
    _check_factors(x, weight, x_scale, weight_scale, bias)
    _check_geometry(x, weight, stride, padding, dilation)
    if weight.device != x.device:
        raise UnsupportedError(f"scaled_conv2d: the weight is on {weight.device}, x on {x.device}; move one of them")
    if activation not in ACTIVATIONS:
        raise UnsupportedError(f"scaled_conv2d: activation {activation!r}; allowed are {', '.join(ACTIVATIONS)}")
    if out_dtype not in OUTPUT_DTYPES:
        raise UnsupportedError(f"scaled_conv2d: out_dtype {out_dtype}; allowed are BF16, FP16 and FP32")
    if x.device.type == "cuda":
        library.activate("convolution")
    x_NHWC = x.permute(0, 2, 3, 1).contiguous()
    weight_KRSC = weight.permute(0, 2, 3, 1).contiguous()
    factors = (_factor(x_scale), _factor(weight_scale, weight.shape[0]), None if bias is None else _factor(bias))
    result: Tensor = _scaled_conv2d(
        x_NHWC, weight_KRSC, *factors, list(stride), list(padding), list(dilation), groups, activation, out_dtype, tile
    )
    return result.permute(0, 3, 1, 2)
