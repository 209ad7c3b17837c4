"""16-bit products on processors without 16-bit instructions: FP32 products of the same values.

A 16-bit product is specified as FP32 sums of exact products, rounded once. FP32 arithmetic on values that are kept in
16 bits gives just that: memory is saved on every processor, and no processor falls to instructions that it lacks.
"""

from __future__ import annotations

import functools
import os
import platform

import torch
from torch import Tensor

_X86 = ("x86_64", "amd64")
# Settings of oneDNN that leave its 16-bit instructions unused.
_ONEDNN_WITHOUT = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI")


@functools.cache
def _has_half_units() -> bool:
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():  # false too where ATEN_CPU_CAPABILITY asks for less
        return False
    if os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper() in _ONEDNN_WITHOUT:
        return False
    # With AVX-512 alone oneDNN computes around FP32 itself, more slowly.
    return platform.machine().lower() not in _X86 or torch.cpu._is_avx512_bf16_supported() or _has_matrix_units()


def _has_matrix_units() -> bool:
    return torch.cpu._is_amx_tile_supported()


@torch.compiler.assume_constant_result
def has_half_units(device: torch.device) -> bool:
    """Whether a device multiplies BF16 by instructions of its own: cards, and processors with AVX512-BF16 or AMX."""
    return device.type != "cpu" or _has_half_units()


@torch.compiler.assume_constant_result
def has_half_attention(device: torch.device) -> bool:
    """Whether torch's fused attention is faster in 16 bits: on cards, and processors with matrix units."""
    return device.type != "cpu" or (_has_half_units() and _has_matrix_units())


def product_dtype(device: torch.device, half: torch.dtype) -> torch.dtype:
    """Type that operands of products in the 16-bit format ``half`` are read into: FP32 on devices without units."""
    return half if has_half_units(device) else torch.float32


def matrix_product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of two matrices or two batches of as many, without the steps by which torch finds out which."""
    return torch.bmm(a, b) if a.dim() == 3 else torch.mm(a, b)


def half_matmul(a: Tensor, b: Tensor, half: torch.dtype) -> Tensor:
    """``a @ b`` rounded to ``half``; operands in that format, or in FP32 as `product_dtype` says."""
    dtype = product_dtype(a.device, half)
    return matrix_product(a.to(dtype), b.to(dtype)).to(half)
