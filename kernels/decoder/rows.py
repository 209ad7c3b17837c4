"""Norms, rotary positions and gates.

On cards each is one kernel, by torch or compiled by it. On CPUs compiled loops take BF16 and FP32, compute in
FP32 and round once; a row's result then has the same bits in any batch. Other types, processors without a compiler and
gradients take the plain formulas.

Axes: N rows, G heads, D numbers of a head or a row.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from qsync_opt.errors import UnsupportedError
from qsync_opt.kernels.compilation import host

UNIT = "decoder"
_DTYPES = (torch.bfloat16, torch.float32)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """``x / sqrt(mean(x**2) + epsilon) * weight`` over the last axis, computed in FP32, in the type of ``x``.

    Args:
        x: Shape (N, D) or (N, G, D).
        weight: Shape (D,).
        epsilon: Added to the mean square.

    Raises:
        UnsupportedError: The shapes do not fit.
    """
    if x.dim() not in (2, 3) or weight.shape != x.shape[-1:]:
        raise UnsupportedError(
            f"x has the shape {tuple(x.shape)} and weight {tuple(weight.shape)}, but they must be (N, D) or (N, G, D), "
            "and (D,)"
        )
    if x.device.type == "cuda":
        return F.rms_norm(x.to(weight.dtype), weight.shape, weight, epsilon).to(x.dtype)
    if (loops := _loops_for(x, weight)) is None:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon) * weight).to(x.dtype)
    weight = weight.float().contiguous()
    x, rows = _rows(x)
    y = x.new_empty(x.shape)
    loops.qsync_decoder_rms_norm(*rows, weight.data_ptr(), epsilon, y.data_ptr(), torch.get_num_threads())
    return y


def rotate_positions(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads with both halves of each turned by the angles of its row.

    Args:
        x: Shape (N, G, D).
        cos: Shape (N, 1, D), of the type of ``x``.
        sin: As ``cos``.

    Raises:
        UnsupportedError: The shapes or types do not fit, or D is odd.
    """
    angles = (x.shape[0], 1, x.shape[-1])
    if x.dim() != 3 or x.shape[-1] % 2 or any(each.shape != angles or each.dtype is not x.dtype for each in (cos, sin)):
        raise UnsupportedError(
            f"x has the shape {tuple(x.shape)}, cos {tuple(cos.shape)} and sin {tuple(sin.shape)}, in {x.dtype}, "
            f"{cos.dtype} and {sin.dtype}, but they must be (N, G, D) with an even D, and (N, 1, D) twice, of one type"
        )
    if x.device.type == "cuda":
        return _by_torch(_rotate)(x, cos, sin)
    if (loops := _loops_for(x, cos, sin)) is None:
        return _rotate(x, cos, sin)
    cos, sin = cos.contiguous(), sin.contiguous()
    x, rows = _rows(x)
    y = x.new_empty(x.shape)
    loops.qsync_decoder_rotate(*rows, cos.data_ptr(), sin.data_ptr(), y.data_ptr(), torch.get_num_threads())
    return y


def gelu_gate(x: Tensor) -> Tensor:
    """GELU, by its formula with tanh, of the first half of each row (N, 2 D), times the second half.

    Raises:
        UnsupportedError: This is no shape of two halves.
    """
    return _gate(x, _gelu_gate, by_gelu=True)


def silu_gate(x: Tensor) -> Tensor:
    """SiLU of the first half of each row (N, 2 D), times the second half.

    Raises:
        UnsupportedError: This is no shape of two halves.
    """
    return _gate(x, _silu_gate, by_gelu=False)


def _gate(x: Tensor, plain: Callable[[Tensor], Tensor], *, by_gelu: bool) -> Tensor:
    if x.dim() != 2 or x.shape[1] % 2:
        raise UnsupportedError(f"x has the shape {tuple(x.shape)}, but it must be (N, 2 D)")
    if x.device.type == "cuda":
        return _by_torch(plain)(x)
    if (loops := _loops_for(x)) is None:
        return plain(x)
    x = x.contiguous()
    rows, size = x.shape[0], x.shape[1] // 2
    y = x.new_empty((rows, size))
    bf16 = x.dtype is torch.bfloat16
    loops.qsync_decoder_gate(bf16, x.data_ptr(), rows, size, by_gelu, y.data_ptr(), torch.get_num_threads())
    return y


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def _gelu_gate(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def _silu_gate(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


@functools.cache
def _by_torch(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function of elementwise operations as one kernel, compiled at its first call."""
    return torch.compile(function, dynamic=True, fullgraph=True)


@functools.cache
def _loops() -> ctypes.CDLL | None:
    """The compiled loops for CPUs; None without a compiler."""
    loaded = host.load(UNIT)
    if isinstance(loaded, str):
        return None
    pointer, count, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    rows = (number, pointer, count, count, count, count, count)
    loaded.qsync_decoder_rms_norm.argtypes = [*rows, pointer, ctypes.c_float, pointer, number]
    loaded.qsync_decoder_rotate.argtypes = [*rows, pointer, pointer, pointer, number]
    loaded.qsync_decoder_gate.argtypes = [number, pointer, count, count, number, pointer, number]
    for name in ("rms_norm", "rotate", "gate"):
        getattr(loaded, f"qsync_decoder_{name}").restype = None
    return loaded


def _loops_for(x: Tensor, *others: Tensor) -> ctypes.CDLL | None:
    """The compiled loops, where they are for tensors of this type and device and nobody asks for a gradient."""
    tensors = (x, *others)
    if x.dtype not in _DTYPES or any(each.device.type != "cpu" for each in tensors):
        return None
    return None if torch.is_grad_enabled() and any(each.requires_grad for each in tensors) else _loops()


def _rows(x: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
    """A tensor (N, D) or (N, G, D) with contiguous rows, and the arguments that describe it; it must outlive them."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    heads, head_step = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
    where = (x.data_ptr(), x.shape[0], heads, x.stride(0), head_step, x.shape[-1])
    return x, (x.dtype is torch.bfloat16, *where)
