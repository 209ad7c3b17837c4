"""The compiled functions for CPUs, on tensors."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from qsync_opt.kernels.compilation import host
from qsync_opt.kernels.weight_only.layout import TILE, PackedWeight

UNIT = "weight_only"


@functools.cache
def functions() -> ctypes.CDLL | str:
    """The compiled functions for CPUs, or why there are none."""
    loaded = host.load(UNIT)
    if not isinstance(loaded, str):
        pointer, count, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        weight = (count, count, count, number, pointer, number)  # tiles, blocks, group in blocks, bits, y, threads
        loaded.qsync_weight_only_linear.argtypes = [pointer, count, number, pointer, pointer, *weight]
        loaded.qsync_weight_only_unpack.argtypes = [number, pointer, pointer, *weight]
        loaded.qsync_weight_only_rotate.argtypes = [pointer, count, number, number]
        for name in ("linear", "unpack", "rotate"):
            getattr(loaded, f"qsync_weight_only_{name}").restype = None
    return loaded


def _call(name: str, packed: PackedWeight, y: Tensor, *first: Any) -> Tensor:
    high, wide = packed.codes.shape[:2]
    weight = (packed.codes.data_ptr(), packed.scales.data_ptr(), high, wide, packed.group // TILE, packed.bits)
    getattr(functions(), name)(*first, *weight, y.data_ptr(), torch.get_num_threads())
    return y


def _kept(dtype: torch.dtype) -> torch.dtype:
    """The type that compiled code reads and writes in place of another."""
    return dtype if dtype is torch.bfloat16 else torch.float32


def linear(x: Tensor, packed: PackedWeight) -> Tensor:
    """The product on the CPU in BF16 where ``x`` is, else in FP32; sums are FP32, and padded outputs are cut off."""
    kept = _kept(x.dtype)
    x = x.to(kept).contiguous()
    y = torch.empty((x.shape[0], packed.codes.shape[0] * TILE), dtype=kept)
    first = (x.data_ptr(), x.shape[0], kept is torch.bfloat16)
    return _call("qsync_weight_only_linear", packed, y, *first)[:, : packed.out_features]


def unpack(packed: PackedWeight, dtype: torch.dtype) -> Tensor:
    """The padded weight on the CPU, as its codes say: codes times scales in FP32, rounded to the type."""
    high, wide = packed.codes.shape[:2]
    kept = _kept(dtype)
    y = torch.empty((high * TILE, wide * TILE), dtype=kept)
    return _call("qsync_weight_only_unpack", packed, y, kept is torch.bfloat16).to(dtype)


def rotate(x: Tensor, block: int) -> Tensor:
    """Rotated rows in FP32; a copy."""
    y = x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    loaded = functions()
    assert not isinstance(loaded, str), loaded
    loaded.qsync_weight_only_rotate(y.data_ptr(), y.numel() // block, block, torch.get_num_threads())
    return y
