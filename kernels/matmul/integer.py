"""Exact products of INT8 codes: INT32 results from whatever the device multiplies fastest.

Axis letters: B batch, N rows, K contraction, M columns.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from qsync_opt.errors import UnsupportedError
from qsync_opt.kernels.quantize.quantize import INT8_MAX

# FP32 sums of products of codes are exact while they stay below 2**24, FP64 sums below 2**53.
_FP32_EXACT_TERMS = (1 << 24) // (INT8_MAX * INT8_MAX)


@functools.cache
def native_product_works(device_type: str, index: int | None) -> bool:
    """Whether ``torch._int_mm`` is exact on a device, tried once with the products that saturate 16-bit sums.

    Instructions that add two 8-bit products in 16 bits (x86 before VNNI) saturate on such inputs.
    """
    device = torch.device(device_type) if index is None else torch.device(device_type, index)
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (7, 5):
        return False
    if device.type not in ("cpu", "cuda"):
        return False
    a_NK = torch.full((32, 64), INT8_MAX, dtype=torch.int8, device=device)
    b_KM = torch.full((64, 32), INT8_MAX, dtype=torch.int8, device=device)
    b_KM[:, 1::2] = -INT8_MAX
    try:
        product = torch._int_mm(a_NK, b_KM)
    except (RuntimeError, NotImplementedError):
        return False
    expected = 64 * INT8_MAX * INT8_MAX
    return bool((product[:, 0] == expected).all()) and bool((product[:, 1] == -expected).all())


@torch.compiler.assume_constant_result
def has_native_product(device: torch.device) -> bool:
    """Whether the device multiplies INT8 matrices into INT32 by itself."""
    return native_product_works(device.type, device.index)


def _float_product(a: Tensor, b: Tensor) -> Tensor:
    dtype = torch.float32 if a.shape[-1] <= _FP32_EXACT_TERMS else torch.float64
    return torch.matmul(a.to(dtype), b.to(dtype)).to(torch.int32)


def _padded(x: Tensor, rows: int, columns: int) -> Tensor:
    if (rows, columns) == tuple(x.shape):
        return x
    return torch.nn.functional.pad(x, (0, columns - x.shape[1], 0, rows - x.shape[0]))


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _cuda_product(a_NK: Tensor, b_KM: Tensor) -> Tensor:
    # cuBLASLt wants more than 16 rows, K and M in multiples of 8, and b column-major; zeros change nothing.
    (n, k), m = a_NK.shape, b_KM.shape[1]
    k_padded, m_padded = _up(k, 8), _up(m, 8)
    a = _padded(a_NK, max(n, 17), k_padded).contiguous()
    b = _padded(b_KM.t(), m_padded, k_padded).contiguous().t()
    return torch._int_mm(a, b)[:n, :m]


def int8_mm(a_NK: Tensor, b_KM: Tensor, backend: str = "auto") -> Tensor:
    """Exact product of two INT8 matrices.

    Args:
        a_NK: Codes, int8, shape (N, K).
        b_KM: Codes, int8, shape (K, M).
        backend: ``"auto"``, ``"compiled"`` (integer hardware or an error) or ``"reference"`` (float arithmetic on
            integer values: FP32 up to 1040 terms, where every partial sum is exact, FP64 beyond).

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
        return _float_product(a_NK, b_KM)
    return _cuda_product(a_NK, b_KM) if a_NK.device.type == "cuda" else torch._int_mm(a_NK, b_KM)


def int8_bmm(a_BNK: Tensor, b_BKM: Tensor, backend: str = "auto") -> Tensor:
    """Exact product of two batches of INT8 matrices: int32, shape (B, N, M); see :func:`int8_mm`.

    On CUDA, up to 1040 terms, the codes are multiplied as FP16 with FP32 sums (exact, one launch instead of B).
    """
    batch, rows, terms = a_BNK.shape
    columns = b_BKM.shape[2]
    if min(a_BNK.numel(), b_BKM.numel()) == 0:
        return torch.zeros((batch, rows, columns), dtype=torch.int32, device=a_BNK.device)
    if backend == "reference":
        return _float_product(a_BNK, b_BKM)
    if a_BNK.device.type == "cuda" and terms <= _FP32_EXACT_TERMS and backend == "auto":
        product = torch.bmm(a_BNK.to(torch.float16), b_BKM.to(torch.float16), out_dtype=torch.float32)
        return product.to(torch.int32)
    if a_BNK.device.type == "cpu" and has_native_product(a_BNK.device):
        sums = torch.empty((batch, rows, columns), dtype=torch.int32)
        for a_NK, b_KM, out_NM in zip(a_BNK, b_BKM, sums, strict=True):
            torch._int_mm(a_NK, b_KM, out=out_NM)
        return sums
    return torch.stack([int8_mm(a_NK, b_KM, backend) for a_NK, b_KM in zip(a_BNK, b_BKM, strict=True)])


def _windows(x: Tensor, kernel: tuple[int, ...], geometry: tuple[Any, ...]) -> Tensor:
    """Patches of a padded input as a view: (N, spatial output..., C, kernel...)."""
    stride, padding, dilation = geometry[:3]
    edges = [edge for p in reversed(padding) for edge in (p, p)]
    padded = torch.nn.functional.pad(x, edges) if any(edges) else x.contiguous()
    out = [
        (size - d * (k - 1) - 1) // s + 1
        for size, d, k, s in zip(padded.shape[2:], dilation, kernel, stride, strict=True)
    ]
    steps = padded.stride()
    return padded.as_strided(
        (x.shape[0], *out, x.shape[1], *kernel),
        (
            steps[0],
            *(step * s for step, s in zip(steps[2:], stride, strict=True)),
            steps[1],
            *(step * d for step, d in zip(steps[2:], dilation, strict=True)),
        ),
    )


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


def exact_convolution(x: Tensor, weight: Tensor, geometry: tuple[Any, ...], backend: str = "auto") -> Tensor:
    """Exact convolution of INT8 codes.

    Args:
        x: Codes (N, C, spatial...), int8.
        weight: Codes (M, C / groups, kernel...), int8.
        geometry: stride, padding, dilation, transposed (must be False), output padding, groups.
        backend: As for :func:`int8_mm`. CPUs convolve integer-valued floats (FP32 up to 1040 terms, FP64 beyond) unless
            ``"compiled"`` is asked for; CUDA copies the patches and multiplies them as INT8.

    Returns:
        int32, shape (N, M, spatial output...).
    """
    if backend == "compiled" or (backend == "auto" and x.device.type == "cuda" and has_native_product(x.device)):
        return _patch_convolution(x, weight, geometry, backend)
    # Off the CPU, FP32 convolutions may be computed by transforms that are not exact on integers.
    exact = x.device.type == "cpu" and weight[0].numel() <= _FP32_EXACT_TERMS
    dtype = torch.float32 if exact else torch.float64
    return torch.convolution(x.to(dtype), weight.to(dtype), None, *geometry).round_().to(torch.int32)
