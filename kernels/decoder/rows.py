"""Norms, rotary positions and gates.

Each is one pass that computes in FP32 and rounds once: on cards a kernel, for BF16, FP16 and FP32 in vectors that 8
divides, on CPUs a compiled loop, for BF16 and FP32. A row's result then has the same bits in any batch. Other types and
sizes, machines without a compiler and gradients take the plain formulas.

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
from qsync_opt.kernels.compilation import host, library
from qsync_opt.kernels.paged_attention import put_into_pages
from qsync_opt.kernels.weight_only import EIGHT_BITS, TILE, RoundedRows, rotate_and_round

UNIT = "decoder"
_DTYPES = {"cpu": (torch.bfloat16, torch.float32), "cuda": (torch.bfloat16, torch.float16, torch.float32)}
_ROTATED = (64, 128, 256)
"""Numbers of a head that cards rotate; the cases of `run_rotation` of the kernel."""
_VECTOR = 8
"""Numbers that a thread of a card reads at a time; `kVector` of the kernel."""
_LONGEST = 16384
"""Numbers of a vector that cards norm; `kMostHeld * kMostThreads * kVector` of the kernel."""


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
    if _norms_on_card(x, weight):
        normed: Tensor = library.operator(UNIT, "decoder_norm", x.device, "auto")(x, weight, epsilon)
        return normed
    if (loops := _loops_for(x, weight)) is None:
        return _norm(x, weight, epsilon)
    weight = weight.float().contiguous()
    x, rows = _rows(x)
    y = x.new_empty(x.shape)
    loops.qsync_decoder_rms_norm(*rows, weight.data_ptr(), epsilon, y.data_ptr(), torch.get_num_threads())
    return y


def add_rms_norm(x: Tensor, added: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The sum of two matrices (N, D) of one type, and its `rms_norm`, of which it is the second.

    Raises:
        UnsupportedError: The shapes or types do not fit.
    """
    if x.dim() != 2 or added.shape != x.shape or added.dtype is not x.dtype:
        raise UnsupportedError(
            f"x has the shape {tuple(x.shape)} in {x.dtype} and what is added {tuple(added.shape)} in {added.dtype}, "
            "but they must be (N, D) of one type"
        )
    if _norms_on_card(x, weight, added):
        add = library.operator(UNIT, "decoder_add_norm", x.device, "auto")
        both: tuple[Tensor, Tensor] = add(x.contiguous(), added.contiguous(), weight, epsilon)
        return both
    total = x + added
    return rms_norm(total, weight, epsilon), total


def add_rms_norm_and_round(
    x: Tensor, added: Tensor, weight: Tensor, epsilon: float, *, rotation: int, activations: str
) -> tuple[RoundedRows, Tensor] | None:
    """`add_rms_norm` with the normed rows as codes for products with packed weights, as one kernel of a card.

    Args:
        x: As of `add_rms_norm`.
        added: As of `add_rms_norm`.
        weight: As of `add_rms_norm`.
        epsilon: As of `add_rms_norm`.
        rotation: Of the packed weight: 0, 64 or 128.
        activations: ``"A8"`` or ``"F8"``, as of `qsync_opt.kernels.weight_only.linear`.

    Returns:
        The same bits as `add_rms_norm` and then rotating and rounding; None where no kernel does this for these types
        and sizes.
    """
    fits = x.shape[-1] % TILE == 0 and activations in EIGHT_BITS
    if not (fits and _norms_on_card(x, weight, added)):
        return None
    run = library.operator(UNIT, "decoder_add_norm_and_round", x.device, "auto")
    codes, scale, total = run(x.contiguous(), added.contiguous(), weight, epsilon, rotation, EIGHT_BITS[activations])
    return RoundedRows(codes, scale, x.dtype), total


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
    if x.shape[-1] in _ROTATED and on_card(x, cos, sin):
        turn = library.operator(UNIT, "decoder_rotate", x.device, "auto")
        rotated: Tensor = turn(x, cos.contiguous(), sin.contiguous())
        return rotated
    if (loops := _loops_for(x, cos, sin)) is None:
        return _rotate(x, cos, sin)
    cos, sin = cos.contiguous(), sin.contiguous()
    x, rows = _rows(x)
    y = x.new_empty(x.shape)
    loops.qsync_decoder_rotate(*rows, cos.data_ptr(), sin.data_ptr(), y.data_ptr(), torch.get_num_threads())
    return y


def rotate_into_pages(
    heads: Tensor, cos: Tensor, sin: Tensor, slots_N: Tensor, pool: Tensor, scales: Tensor | None = None
) -> Tensor | None:
    """`rotate_positions` of queries and keys, and the way of keys and values into pages, as one kernel of a card.

    Args:
        heads: Queries, keys and values of each token, shape (N, G, D).
        cos: As of `rotate_positions`.
        sin: As of `rotate_positions`.
        slots_N: Where in the pages a token's key and value go, int64.
        pool: Pages of keys and values (2, heads of keys, slots, D), which are written: of the type of the heads, or
            uint8 for codes in halves, as `qsync_opt.kernels.paged_attention.in_halves` makes them.
        scales: Of codes (2, heads of keys, slots, 1), FP32, which are written: the largest magnitude over 127.

    Returns:
        The rotated queries and keys; None where no kernel does this for these types and sizes: then nothing is written.

    Raises:
        RuntimeError: On a card, shapes, types or places of tensors that do not belong together.
    """
    kept = heads.dtype if scales is None else torch.uint8
    if heads.shape[-1] not in _ROTATED or pool.dtype is not kept or not on_card(heads, cos, sin):
        return None
    into_pages = library.operator(UNIT, "decoder_rotate_into_pages", heads.device, "auto")
    rotated: Tensor = into_pages(heads, cos.contiguous(), sin.contiguous(), slots_N, pool, scales)
    return rotated


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
    if x.shape[1] % (2 * _VECTOR) == 0 and on_card(x):
        result: Tensor = library.operator(UNIT, "decoder_gate", x.device, "auto")(x.contiguous(), by_gelu)
        return result
    if (loops := _loops_for(x)) is None:
        return plain(x)
    x = x.contiguous()
    rows, size = x.shape[0], x.shape[1] // 2
    y = x.new_empty((rows, size))
    bf16 = x.dtype is torch.bfloat16
    loops.qsync_decoder_gate(bf16, x.data_ptr(), rows, size, by_gelu, y.data_ptr(), torch.get_num_threads())
    return y


def _norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon) * weight).to(x.dtype)


def _add_norm(x: Tensor, added: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    total = x + added
    return _norm(total, weight, epsilon), total


def _add_norm_and_round(
    x: Tensor, added: Tensor, weight: Tensor, epsilon: float, rotation: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    normed, total = _add_norm(x, added, weight, epsilon)
    activations = next(name for name, code in EIGHT_BITS.items() if code is dtype)
    rounded = rotate_and_round(normed, rotation, activations, "reference")
    return rounded.codes, rounded.scale, total


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def plain_rotate_into_pages(
    heads: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, pool: Tensor, scales: Tensor | None
) -> Tensor:
    """The specification of `rotate_into_pages`."""
    kv_heads = pool.shape[1]
    rotated = _rotate(heads[:, :-kv_heads], cos, sin)
    put_into_pages(pool, scales, slots, rotated[:, -kv_heads:], heads[:, -kv_heads:])
    return rotated


def _gelu_gate(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def _silu_gate(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


library.define(
    "decoder_norm(Tensor x, Tensor weight, float epsilon) -> Tensor",
    unit=UNIT,
    plain=_norm,
    fake=lambda x, weight, epsilon: x.new_empty(x.shape),
)
library.define(
    "decoder_add_norm(Tensor x, Tensor added, Tensor weight, float epsilon) -> (Tensor, Tensor)",
    unit=UNIT,
    plain=_add_norm,
    fake=lambda x, added, weight, epsilon: (x.new_empty(x.shape), x.new_empty(x.shape)),
)
library.define(
    "decoder_add_norm_and_round(Tensor x, Tensor added, Tensor weight, float epsilon, int rotation, ScalarType dtype) "
    "-> (Tensor, Tensor, Tensor)",
    unit=UNIT,
    plain=_add_norm_and_round,
    fake=lambda x, added, weight, epsilon, rotation, dtype: (
        x.new_empty(x.shape, dtype=dtype),
        x.new_empty((x.shape[0], 1), dtype=torch.float32),
        x.new_empty(x.shape),
    ),
)
library.define(
    "decoder_gate(Tensor x, bool by_gelu) -> Tensor",
    unit=UNIT,
    plain=lambda x, by_gelu: (_gelu_gate if by_gelu else _silu_gate)(x),
    fake=lambda x, by_gelu: x.new_empty((x.shape[0], x.shape[1] // 2)),
)
library.define(
    "decoder_rotate(Tensor heads, Tensor cos, Tensor sin) -> Tensor",
    unit=UNIT,
    plain=_rotate,
    fake=lambda heads, cos, sin: heads.new_empty(heads.shape),
)
library.define(
    "decoder_rotate_into_pages(Tensor heads, Tensor cos, Tensor sin, Tensor slots, Tensor(a!) pool, "
    "Tensor(b!)? scales) -> Tensor",
    unit=UNIT,
    plain=plain_rotate_into_pages,
    fake=lambda heads, cos, sin, slots, pool, scales: heads.new_empty(
        (heads.shape[0], heads.shape[1] - pool.shape[1], heads.shape[2])
    ),
)


def _norms_on_card(x: Tensor, weight: Tensor, *others: Tensor) -> bool:
    return x.shape[-1] <= _LONGEST and weight.dtype in (x.dtype, torch.float32) and on_card(x, weight, *others)


def on_card(*tensors: Tensor) -> bool:
    """Whether a card's kernel takes tensors of vectors as they lie, and nobody asks for a gradient."""
    for each in tensors:
        if each.device.type != "cuda" or each.dtype not in _DTYPES["cuda"] or each.shape[-1] % _VECTOR:
            return False
        if each.stride(-1) != 1 or any(step % _VECTOR for step in each.stride()[:-1]) or each.data_ptr() % 16:
            return False
    return not (torch.is_grad_enabled() and any(each.requires_grad for each in tensors))


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
    if x.dtype not in _DTYPES["cpu"] or any(each.device.type != "cpu" for each in tensors):
        return None
    return None if torch.is_grad_enabled() and any(each.requires_grad for each in tensors) else _loops()


def _rows(x: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
    """A tensor (N, D) or (N, G, D) with contiguous rows, and the arguments that describe it; it must outlive them."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    heads, head_step = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
    where = (x.data_ptr(), x.shape[0], heads, x.stride(0), head_step, x.shape[-1])
    return x, (x.dtype is torch.bfloat16, *where)
