"""Exact products of INT8 codes, by the fastest instructions of the device, and oneDNN's fused operators on CPU.

Axis letters: B batch, N rows, K contraction, M columns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qsync_opt.errors import UnsupportedError
from qsync_opt.kernels.matmul.half import matrix_product
from qsync_opt.kernels.quantize import INT8_MAX, Quantized

_ZERO_POINT = 128


def _per_channel(scale: Tensor, channels: int) -> Tensor:
    return scale.reshape(-1).expand(channels).contiguous()


def _ending(channels: int, bias: Tensor | None, dtype: torch.dtype) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Arguments of oneDNN: zero points of the weight, bias; scale and zero point of the result, type, no activation."""
    zero_points = torch.zeros(channels, dtype=torch.int32)
    return (zero_points, None if bias is None else bias.to(torch.float32)), (1.0, 0, dtype, "none", [], "")


def linear(a: Quantized, b: Quantized, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``(a.codes @ b.codes) * a.scale * b.scale + bias`` in ``dtype`` (BF16 or FP32); INT32 sums are scaled in FP32.

    ``a`` is (N, K) with one scale, ``b`` (K, M) in any layout with one scale or (1, M).
    """
    columns = b.codes.shape[1]
    shift, ending = _ending(columns, bias, dtype)
    weight = b.codes.to_mkldnn(), _per_channel(b.scale, columns)
    result: Tensor = torch.ops.onednn.qlinear_pointwise(
        a.codes.contiguous(), a.scale.item(), 0, *weight, *shift, *ending
    )
    return result


def convolution(
    x: Quantized, weight: Quantized, bias: Tensor | None, geometry: tuple[Any, ...], dtype: torch.dtype
) -> Tensor:
    """Convolution of codes with scales and bias applied, in ``dtype``; the result is channels-last in memory.

    ``x`` has one scale, ``weight`` one or one per output channel; ``geometry`` is not transposed.
    """
    sizes = (*map(list, geometry[:3]), geometry[5])
    channels = weight.codes.shape[0]
    scales = _per_channel(weight.scale, channels)
    # The operator takes unsigned activations; shifting by the zero point is flipping the top bit.
    unsigned = x.codes.contiguous().view(torch.uint8) ^ _ZERO_POINT
    if unsigned.dim() == 4:
        unsigned = unsigned.contiguous(memory_format=torch.channels_last)
    codes = weight.codes.contiguous()
    packed = torch.ops.onednn.qconv_prepack(codes, scales, 1.0, _ZERO_POINT, *sizes, list(unsigned.shape))
    shift, ending = _ending(channels, bias, dtype)
    result: Tensor = torch.ops.onednn.qconv_pointwise(
        unsigned, x.scale.item(), _ZERO_POINT, packed, scales, *shift, *sizes, *ending
    )
    return result


def _extreme_codes(*shape: int) -> Tensor:
    codes = torch.full(shape, INT8_MAX, dtype=torch.int8)
    codes[1::2] = -INT8_MAX
    return codes


def _is_exact(run: Callable[[], Tensor], expected: Tensor) -> bool:
    try:
        return torch.equal(run(), expected)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False


@functools.cache
def has_onednn_linear() -> bool:
    """Whether the fused linear operator exists and is exact for the largest codes."""
    a = Quantized(_extreme_codes(4, 64), torch.ones(1, 1))
    b = Quantized(_extreme_codes(8, 64).t(), torch.ones(1, 8))
    return _is_exact(lambda: linear(a, b, None, torch.float32), a.codes.float() @ b.codes.float())


@functools.cache
def has_onednn_convolution() -> bool:
    """Whether the fused convolution exists and is exact for the largest codes."""
    x = Quantized(_extreme_codes(2, 8, 5, 5), torch.ones(1, 1, 1, 1))
    weight = Quantized(_extreme_codes(4, 8, 3, 3), torch.ones(4, 1, 1, 1))
    geometry = ((1, 1), (1, 1), (1, 1), False, (0, 0), 1)
    expected = F.conv2d(x.codes.float(), weight.codes.float(), padding=1)
    return _is_exact(lambda: convolution(x, weight, None, geometry, torch.float32), expected)


# FP32 sums of products of codes are exact while they stay below 2**24, FP64 sums below 2**53.
_FP32_EXACT_TERMS = (1 << 24) // (INT8_MAX * INT8_MAX)


@functools.cache
def _has_native_product(device: torch.device) -> bool:
    if device.type not in ("cpu", "cuda"):
        return False
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (7, 5):
        return False
    # Instructions that add two 8-bit products in 16 bits (x86 before VNNI) would saturate.
    a_NK = torch.full((32, 64), INT8_MAX, dtype=torch.int8, device=device)
    b_KM = torch.full((64, 32), INT8_MAX, dtype=torch.int8, device=device)
    b_KM[:, 1::2] = -INT8_MAX
    expected = b_KM[:1].to(torch.int32).expand(32, 32) * (64 * INT8_MAX)
    return _is_exact(lambda: torch._int_mm(a_NK, b_KM), expected)


@torch.compiler.assume_constant_result
def has_native_product(device: torch.device) -> bool:
    """Whether the device has an exact product of INT8 matrices in INT32."""
    return _has_native_product(device)


def _float_product(a: Tensor, b: Tensor) -> Tensor:
    """Exact sums in FP32, or in INT32 where there are more terms than FP32 adds exactly: block by block."""
    if a.device.type != "cpu" and a.shape[-1] > _FP32_EXACT_TERMS:
        return torch.matmul(a.to(torch.float64), b.to(torch.float64)).to(torch.int32)
    if a.shape[-1] <= _FP32_EXACT_TERMS:
        return matrix_product(a.to(torch.float32), b.to(torch.float32))
    total: Tensor | None = None
    for start in range(0, a.shape[-1], _FP32_EXACT_TERMS):
        terms = slice(start, start + _FP32_EXACT_TERMS)
        part = torch.matmul(a[..., terms].to(torch.float32), b[..., terms, :].to(torch.float32)).to(torch.int32)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


def _cuda_product(a_NK: Tensor, b_KM: Tensor) -> Tensor:
    # cuBLASLt wants more than 16 rows, K and M in multiples of 8, and b column-major; zeros change nothing.
    (n, k), m = a_NK.shape, b_KM.shape[1]
    rows, depth, columns = max(17 - n, 0), -k % 8, -m % 8
    a = F.pad(a_NK, (0, depth, 0, rows)) if depth or rows else a_NK
    b = F.pad(b_KM.t(), (0, depth, 0, columns)) if depth or columns else b_KM.t()
    return torch._int_mm(a.contiguous(), b.contiguous().t())[:n, :m]


def _cpu_product(a_NK: Tensor, b_KM: Tensor, out: Tensor | None = None) -> Tensor:
    # torch._int_mm writes nothing where a row or column of codes has both strides 1, as a transposed view can have.
    a, b = (codes.view(-1).view(codes.shape) if codes.is_contiguous() else codes for codes in (a_NK, b_KM))
    return torch._int_mm(a, b) if out is None else torch._int_mm(a, b, out=out)


def code_sums(a: Tensor, b: Tensor, backend: str = "auto") -> Tensor:
    """`int8_mm` or `int8_bmm`; sums of FP32 arithmetic stay in FP32 where they are exact, which saves a pass."""
    plain = backend == "reference" or (backend == "auto" and not has_native_product(a.device))
    if plain and a.device.type == "cpu" and min(a.numel(), b.numel()) > 0:
        return _float_product(a, b)
    return (int8_mm if a.dim() == 2 else int8_bmm)(a, b, backend)


def int8_mm(a_NK: Tensor, b_KM: Tensor, backend: str = "auto") -> Tensor:
    """Exact product of two INT8 matrices.

    Args:
        a_NK: Codes, int8, shape (N, K).
        b_KM: Codes, int8, shape (K, M).
        backend: ``"auto"``, ``"compiled"`` (integer hardware or an error) or ``"reference"`` (float arithmetic on
            integer values: FP32, of more than 1040 terms in blocks, because their partial sums are exact).

    Returns:
        int32, shape (N, M).

    Raises:
        UnsupportedError: ``"compiled"`` where the device has no exact integer product.
    """
    if a_NK.numel() == 0 or b_KM.numel() == 0:
        return torch.zeros((a_NK.shape[0], b_KM.shape[1]), dtype=torch.int32, device=a_NK.device)
    native = backend != "reference" and has_native_product(a_NK.device)
    if backend == "compiled" and not native:
        raise UnsupportedError(
            f"backend 'compiled': {a_NK.device} has no exact INT8 product; use 'auto' or 'reference'"
        )
    if not native:
        return _float_product(a_NK, b_KM).to(torch.int32)
    return (_cuda_product if a_NK.device.type == "cuda" else _cpu_product)(a_NK, b_KM)


def int8_bmm(a_BNK: Tensor, b_BKM: Tensor, backend: str = "auto") -> Tensor:
    """Exact product of two batches of INT8 matrices: int32, shape (B, N, M); see :func:`int8_mm`.

    On CUDA, up to 1040 terms, the codes are multiplied as FP16 with FP32 sums (exact, one launch instead of B).
    """
    batch, rows, terms = a_BNK.shape
    columns = b_BKM.shape[2]
    if min(a_BNK.numel(), b_BKM.numel()) == 0:
        return torch.zeros((batch, rows, columns), dtype=torch.int32, device=a_BNK.device)
    native = has_native_product(a_BNK.device)
    if backend == "reference" or (backend == "auto" and not native):
        return _float_product(a_BNK, b_BKM).to(torch.int32)
    if a_BNK.device.type == "cuda" and terms <= _FP32_EXACT_TERMS and backend == "auto":
        product = torch.bmm(a_BNK.to(torch.float16), b_BKM.to(torch.float16), out_dtype=torch.float32)
        return product.to(torch.int32)
    if a_BNK.device.type == "cpu" and native:
        sums = torch.empty((batch, rows, columns), dtype=torch.int32)
        for a_NK, b_KM, out_NM in zip(a_BNK, b_BKM, sums, strict=True):
            _cpu_product(a_NK, b_KM, out_NM)
        return sums
    return torch.stack([int8_mm(a_NK, b_KM, backend) for a_NK, b_KM in zip(a_BNK, b_BKM, strict=True)])


def _windows(x: Tensor, kernel: tuple[int, ...], geometry: tuple[Any, ...]) -> Tensor:
    """Patches of a padded input as a view: (N, spatial output..., C, kernel...)."""
    stride, padding, dilation = geometry[:3]
    windows = F.pad(x, [edge for p in reversed(padding) for edge in (p, p)]) if any(padding) else x
    for dim, (taps, step, distance) in enumerate(zip(kernel, stride, dilation, strict=True), start=2):
        windows = windows.unfold(dim, distance * (taps - 1) + 1, step)[..., ::distance]
    return windows.movedim(1, x.dim() - 1)


def _patch_convolution(x: Tensor, weight: Tensor, geometry: tuple[Any, ...], backend: str) -> Tensor:
    groups = geometry[5]
    outputs = []
    for x_group, weight_group in zip(x.chunk(groups, 1), weight.chunk(groups, 0), strict=True):
        windows = _windows(x_group, tuple(weight.shape[2:]), geometry)
        spatial = windows.shape[1 : x.dim() - 1]
        rows = windows.reshape(x.shape[0] * spatial.numel(), -1)
        sums = int8_mm(rows, weight_group.reshape(weight_group.shape[0], -1).t(), backend)
        outputs.append(sums.view(x.shape[0], *spatial, -1).movedim(-1, 1))
    return outputs[0] if groups == 1 else torch.cat(outputs, 1)


def convolution_sums(x: Tensor, weight: Tensor, geometry: tuple[Any, ...], backend: str = "auto") -> Tensor:
    """`exact_convolution`; sums of FP32 arithmetic stay in FP32 where they are less than half a unit from exact."""
    if x.device.type == "cpu" and backend != "compiled":
        return _float_convolution(x, weight, geometry)
    return exact_convolution(x, weight, geometry, backend)


def _float_convolution(x: Tensor, weight: Tensor, geometry: tuple[Any, ...]) -> Tensor:
    """Exact sums in INT32; or in FP32, to be rounded, where there are no more terms than FP32 adds exactly.

    Some convolutions on processors are computed by transforms: their FP32 sums are not quite integers.
    """

    def convolve(channels: slice, dtype: torch.dtype) -> Tensor:
        return torch.convolution(x[:, channels].to(dtype), weight[:, channels].to(dtype), None, *geometry)

    terms, channels = weight[0].numel(), weight.shape[1]
    if terms <= _FP32_EXACT_TERMS:
        return convolve(slice(None), torch.float32)
    block = _FP32_EXACT_TERMS * channels // terms
    if geometry[5] > 1 or block == 0:
        return convolve(slice(None), torch.float64).round_().to(torch.int32)
    total = convolve(slice(block), torch.float32).round_().to(torch.int32)
    for start in range(block, channels, block):
        total.add_(convolve(slice(start, start + block), torch.float32).round_().to(torch.int32))
    return total


def exact_convolution(x: Tensor, weight: Tensor, geometry: tuple[Any, ...], backend: str = "auto") -> Tensor:
    """Exact convolution of INT8 codes.

    Args:
        x: Codes (N, C, spatial...), int8.
        weight: Codes (M, C / groups, kernel...), int8.
        geometry: stride, padding, dilation, transposed (must be False), output padding, groups.
        backend: As for :func:`int8_mm`. CPUs convolve integer-valued floats (FP32, of more than 1040 terms in blocks of
            channels; FP64 where groups or single channels have more) unless ``"compiled"`` is asked for; CUDA copies
            the patches and multiplies them as INT8.

    Returns:
        int32, shape (N, M, spatial output...).
    """
    if backend == "compiled" or (backend == "auto" and x.device.type == "cuda" and has_native_product(x.device)):
        return _patch_convolution(x, weight, geometry, backend)
    if x.device.type == "cpu":
        return _float_convolution(x, weight, geometry).round().to(torch.int32)
    # Off the CPU, FP32 convolutions may be computed by transforms that are not exact on integers.
    return torch.convolution(x.double(), weight.double(), None, *geometry).round_().to(torch.int32)
