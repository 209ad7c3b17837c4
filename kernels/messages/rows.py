"""Rows of embeddings as messages, and back.

A packed row is its zero point and step in BF16 (two bytes each), then its codes, the first in the lowest bits of a
byte. The zero point is the row's least entry rounded down and the step rounded up, and entries are rounded with these
rounded values, so that sender and receiver agree and rounding is unbiased:

    code = min(max(floor((x - zero) / step + u), 0), 2^bits - 1)

with u uniform among the odd multiples of 2^-16 between 0 and 1.

A row that holds NaN or infinity, or whose range overflows, has NaN as its zero point and step.
16 bits are BF16 with unbiased rounding, 32 bits the entries themselves. NaN in BF16 is 0x7FC0 on the wire, and so is an
entry of 16 bits that is infinite.

Source: AdaQP (MLSys 2023), section 3.1; the released code sends BF16 parameters after rounding with FP32 ones (a bias)
    and does not clamp (an overflow into neighbouring codes), which is mended here.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from qsync_opt.errors import UnsupportedError
from qsync_opt.kernels.compilation import library
from qsync_opt.kernels.quantize import random_words, signed

UNIT = "messages"
PACKED = (1, 2, 4, 8)
WIDTHS = (*PACKED, 16, 32)
_NAN = 0x7FC0
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIER = 0xD6E8FEB86659FD93
_MASK = (1 << 64) - 1


def row_key(seed: int, *parts: int) -> int:
    """Key of a random stream from a seed and further integers, such as rank, exchange and step; an int64."""
    value = 0
    for part in (seed, *parts):
        value = (value + _GOLDEN + (part & _MASK)) & _MASK
        for _ in range(2):
            value = ((value ^ (value >> 32)) * _MULTIPLIER) & _MASK
        value ^= value >> 32
    return signed(value)


def row_bytes(dim: int, bits: int) -> int:
    """Bytes of one message of ``dim`` numbers.

    Raises:
        UnsupportedError: No such width.
    """
    if bits not in WIDTHS:
        raise UnsupportedError(f"width is {bits!r} bits, but allowed are {', '.join(map(str, WIDTHS))}")
    return 4 + (dim * bits + 7) // 8 if bits in PACKED else dim * bits // 8


def _bits(shape: tuple[int, int], key: int, device: torch.device) -> Tensor:
    """16 random bits of each entry, int32 of a shape; four entries share a word, from the second of the stream on."""
    entries = shape[0] * shape[1]
    words = random_words(key, 1, -(-entries // 4), device)
    return (words.view(torch.int16)[:entries].to(torch.int32) & 0xFFFF).view(shape)


def _bf16_toward(value: Tensor, up: bool) -> Tensor:
    """FP32 rounded to BF16 toward plus or minus infinity, still as FP32."""
    raw = value.contiguous().view(torch.int32)
    away = raw >= 0 if up else raw < 0
    return torch.where(away, raw + 0xFFFF, raw).bitwise_and(-0x10000).view(torch.float32)


def _pack_plain(x: Tensor, index: Tensor, bits: int, key: int) -> Tensor:
    rows, dim = index.numel(), x.shape[1]
    gathered = x.index_select(0, index)
    if not rows or not dim:
        return x.new_zeros((rows, row_bytes(dim, bits)), dtype=torch.uint8)
    if bits == 16:
        noise = _bits((rows, dim), key, x.device)
        upper = (gathered.view(torch.int32) + noise) >> 16
        return torch.where(torch.isfinite(gathered), upper, _NAN).to(torch.int16).view(torch.uint8)
    levels, per_byte = (1 << bits) - 1, 8 // bits
    low, high = gathered.amin(1), gathered.amax(1)
    zero = _bf16_toward(low, up=False)
    spread = high - zero
    bad = ~torch.isfinite(spread)
    # A tensor as divisor: by a number, cards multiply with its reciprocal, which rounds differently.
    step = _bf16_toward(spread / torch.full_like(spread, levels), up=True)
    bad |= ~torch.isfinite(step)
    nan = torch.full_like(zero, torch.nan)
    zero, step = torch.where(bad, nan, zero), torch.where(bad, nan, step)
    noise = (_bits((rows, dim), key, x.device) | 1).to(torch.float32) * 2.0**-16
    scaled = torch.floor((gathered - zero[:, None]) / step[:, None] + noise)
    scaled = torch.where((step > 0)[:, None], scaled, torch.zeros_like(scaled)).clamp_(0, levels)
    codes = torch.nn.functional.pad(scaled.to(torch.int32), (0, -dim % per_byte)).view(rows, -1, per_byte)
    shifts = torch.arange(0, 8, bits, dtype=torch.int32, device=x.device)
    packed = (codes << shifts).sum(-1).to(torch.uint8)
    header = torch.stack([zero, step], 1).to(torch.bfloat16).view(torch.uint8)
    # NaN has many forms, and devices convert to different ones.
    header = torch.where(bad[:, None], header.new_tensor([_NAN & 0xFF, _NAN >> 8] * 2)[None, :], header)
    return torch.cat([header, packed], 1)


def _unpack_plain(wire: Tensor, index: Tensor, out: Tensor, bits: int) -> None:
    rows, dim = index.numel(), out.shape[1]
    if not rows or not dim:
        return
    if bits == 16:
        out.index_copy_(0, index, wire.view(torch.bfloat16).to(torch.float32))
        return
    header = wire[:, :4].contiguous().view(torch.bfloat16).to(torch.float32)
    shifts = torch.arange(0, 8, bits, dtype=torch.int32, device=wire.device)
    codes = (wire[:, 4:, None].to(torch.int32) >> shifts) & ((1 << bits) - 1)
    values = codes.view(rows, -1)[:, :dim].to(torch.float32) * header[:, 1:] + header[:, :1]
    out.index_copy_(0, index, values)


def _pack_fake(x: Tensor, index: Tensor, bits: int, key: int) -> Tensor:
    return x.new_empty((index.numel(), row_bytes(x.shape[1], bits)), dtype=torch.uint8)


def _unpack_fake(wire: Tensor, index: Tensor, out: Tensor, bits: int) -> None:
    return None


library.define("pack_rows(Tensor x, Tensor index, int bits, int key) -> Tensor", unit=UNIT, plain=_pack_plain,
               fake=_pack_fake)  # fmt: skip
library.define("unpack_rows(Tensor wire, Tensor index, Tensor(a!) out, int bits) -> ()", unit=UNIT,
               plain=_unpack_plain, fake=_unpack_fake)  # fmt: skip


def _check(x: Tensor, index: Tensor, bits: int, backend: str) -> None:
    if x.dtype != torch.float32 or x.dim() != 2:
        raise UnsupportedError(
            f"rows have the type {x.dtype} and shape {tuple(x.shape)}, but FP32 (rows, dim) is needed"
        )
    if index.dtype != torch.int64 or index.dim() != 1:
        raise UnsupportedError(
            f"index has the type {index.dtype} and {index.dim()} dimensions; int64 (rows,) is needed"
        )
    library.check_backend(backend)
    row_bytes(x.shape[1], bits)


def _loops(device: torch.device, backend: str) -> bool:
    """Whether the compiled loops for CPUs are to run.

    Raises:
        UnsupportedError: They were asked for and numba is missing.
    """
    if device.type != "cpu" or backend == "reference":
        return False
    if importlib.util.find_spec("numba") is not None:
        return True
    if backend == "compiled":
        raise UnsupportedError("backend 'compiled' needs numba on a CPU: pip install 'qsync-opt[solvers]'")
    return False


def pack_rows(x: Tensor, index: Tensor, bits: int, key: int, *, backend: str = "auto") -> Tensor:
    """Gather rows and pack them.

    Args:
        x: FP32, shape (nodes, dim).
        index: Which rows, int64, shape (rows,).
        bits: One of `WIDTHS`.
        key: Of the random stream (`row_key`); the same key gives the same bytes on every device.
        backend: ``"reference"`` (plain PyTorch), ``"compiled"`` (refuses where there is no compiled code) or
            ``"auto"``.

    Returns:
        Bytes, shape (rows, `row_bytes`).

    Raises:
        UnsupportedError: Another type, shape, width or backend.
    """
    _check(x, index, bits, backend)
    if bits == 32:
        return x.index_select(0, index).view(torch.uint8)
    if bits == 16 and _loops(x.device, backend):
        from qsync_opt.kernels.messages.loops import pack_bf16_loop

        rounded = torch.empty((index.numel(), x.shape[1]), dtype=torch.int16)
        source = x.detach().contiguous().view(torch.int32).numpy()
        pack_bf16_loop(source, index.contiguous().numpy(), key & _MASK, rounded.numpy())
        return rounded.view(torch.uint8)
    if _loops(x.device, backend):
        from qsync_opt.kernels.messages.loops import pack_loop

        out = torch.empty((index.numel(), row_bytes(x.shape[1], bits)), dtype=torch.uint8)
        pack_loop(x.detach().contiguous().numpy(), index.contiguous().numpy(), bits, key & _MASK, out.numpy())
        return out
    result: Tensor = library.operator(UNIT, "pack_rows", x.device, backend)(
        x.contiguous(), index.contiguous(), bits, key
    )
    return result


def unpack_rows(wire: Tensor, index: Tensor, out: Tensor, bits: int, *, backend: str = "auto") -> None:
    """Write unpacked rows into ``out[index]``.

    Args:
        wire: Bytes, shape (rows, `row_bytes`).
        index: Where each row goes, int64, shape (rows,), without repetition.
        out: FP32, shape (nodes, dim), contiguous.
        bits: One of `WIDTHS`.
        backend: See `pack_rows`.

    Raises:
        UnsupportedError: Another type, shape, width or backend.
    """
    _check(out, index, bits, backend)
    if tuple(wire.shape) != (index.numel(), row_bytes(out.shape[1], bits)) or wire.dtype != torch.uint8:
        raise UnsupportedError(
            f"packed rows have the type {wire.dtype} and shape {tuple(wire.shape)}, but uint8 "
            f"{(index.numel(), row_bytes(out.shape[1], bits))} is needed"
        )
    if bits >= 16 and wire.storage_offset() % 4:  # numbers are read whole
        wire = wire.clone()
    if bits == 32:
        out.index_copy_(0, index, wire.contiguous().view(torch.float32))
    elif bits == 16 and out.device.type == "cpu":
        _unpack_plain(wire.contiguous(), index, out, bits)
    elif _loops(out.device, backend):
        from qsync_opt.kernels.messages.loops import unpack_loop

        unpack_loop(wire.contiguous().numpy(), index.contiguous().numpy(), bits, out.detach().numpy())
    else:
        library.operator(UNIT, "unpack_rows", out.device, backend)(wire.contiguous(), index.contiguous(), out, bits)
