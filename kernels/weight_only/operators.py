"""Products with packed weights: ``qsync_opt::weight_only_linear``, ``_linear_int8``, ``_unpack``, and their choice.

The plain implementations compute in FP64 and round once: they are the specification. Compiled code multiplies codes and
activations exactly and adds in FP32 (on cards W4A8 in int32), which on 4096 inputs is within 2e-6 of the sum of the
terms' magnitudes, before the result is rounded to its type.

Axis letters: N rows, K inputs, M outputs.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from qsync_opt.errors import UnsupportedError
from qsync_opt.kernels.compilation import host, library
from qsync_opt.kernels.quantize import quantize_matrix
from qsync_opt.kernels.weight_only.layout import TILE, PackedWeight, ordered_codes

UNIT = "weight_only"
BACKENDS = ("auto", "compiled", "reference")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_CARD_DTYPES = (torch.bfloat16, torch.float16)
_FEW_ROWS = {"cuda": 32, "cpu": 64}
"""Rows up to which packed weights are multiplied directly; more are multiplied by unpacked ones."""
_OLDEST_CARD = (8, 0)


def _weight_MK(codes: Tensor, scales: Tensor, bits: int, group: int, dtype: torch.dtype) -> Tensor:
    """Code times scale, padded, each product formed in ``dtype``."""
    codes_MK = ordered_codes(codes, bits).to(dtype)
    spread_MK = scales.t().to(dtype).repeat_interleave(group, 1)[:, : codes_MK.shape[1]]
    return codes_MK.mul_(spread_MK)


def _plain_linear(x: Tensor, codes: Tensor, scales: Tensor, bits: int, group: int, outputs: int) -> Tensor:
    weight_MK = _weight_MK(codes, scales, bits, group, torch.float64)
    return (x.double() @ weight_MK[:outputs].t()).to(x.dtype)


def _plain_linear_int8(
    x: Tensor, x_scales: Tensor, codes: Tensor, scales: Tensor, group: int, outputs: int, dtype: torch.dtype
) -> Tensor:
    product = _plain_linear(x.double(), codes, scales, 4, group, outputs)
    return product.mul_(x_scales.double().view(-1, 1)).to(dtype)


def _plain_unpack(codes: Tensor, scales: Tensor, bits: int, group: int, dtype: torch.dtype) -> Tensor:
    return _weight_MK(codes, scales, bits, group, torch.float32).to(dtype)


library.define(
    "weight_only_linear(Tensor x, Tensor codes, Tensor scales, int bits, int group, int outputs) -> Tensor",
    unit=UNIT,
    plain=_plain_linear,
    fake=lambda x, codes, scales, bits, group, outputs: x.new_empty((x.shape[0], outputs)),
)
library.define(
    "weight_only_linear_int8(Tensor x, Tensor x_scales, Tensor codes, Tensor scales, int group, int outputs, "
    "ScalarType dtype) -> Tensor",
    unit=UNIT,
    plain=_plain_linear_int8,
    fake=lambda x, x_scales, codes, scales, group, outputs, dtype: x.new_empty((x.shape[0], outputs), dtype=dtype),
)
library.define(
    "weight_only_unpack(Tensor codes, Tensor scales, int bits, int group, ScalarType dtype) -> Tensor",
    unit=UNIT,
    plain=_plain_unpack,
    fake=lambda codes, scales, bits, group, dtype: codes.new_empty(
        (codes.shape[0] * TILE, codes.shape[1] * TILE), dtype=dtype
    ),
)


@functools.cache
def _host() -> ctypes.CDLL | str:
    """The compiled functions for CPUs, or why there are none."""
    functions = host.load(UNIT)
    if not isinstance(functions, str):
        pointer, count, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        weight = (count, count, count, number, pointer, number)  # tiles, blocks, group in blocks, bits, y, threads
        functions.qsync_weight_only_linear.argtypes = [pointer, count, pointer, pointer, *weight]
        functions.qsync_weight_only_unpack.argtypes = [pointer, pointer, *weight]
        functions.qsync_weight_only_linear.restype = functions.qsync_weight_only_unpack.restype = None
    return functions


def _host_call(name: str, packed: PackedWeight, y: Tensor, *first: Any) -> Tensor:
    high, wide = packed.codes.shape[:2]
    weight = (packed.codes.data_ptr(), packed.scales.data_ptr(), high, wide, packed.group // TILE, packed.bits)
    getattr(_host(), name)(*first, *weight, y.data_ptr(), torch.get_num_threads())
    return y


def _host_linear(x: Tensor, packed: PackedWeight) -> Tensor:
    """FP32 product on the CPU, padded outputs cut off."""
    x = x.float().contiguous()
    y = torch.empty((x.shape[0], packed.codes.shape[0] * TILE))
    return _host_call("qsync_weight_only_linear", packed, y, x.data_ptr(), x.shape[0])[:, : packed.out_features]


def _host_unpack(packed: PackedWeight) -> Tensor:
    """The padded weight in FP32 on the CPU."""
    high, wide = packed.codes.shape[:2]
    return _host_call("qsync_weight_only_unpack", packed, torch.empty((high * TILE, wide * TILE)))


@functools.cache
def _refusal(device: torch.device) -> str:
    """Why compiled products do not run on a device, or nothing."""
    if device.type == "cpu":
        functions = _host()
        return functions if isinstance(functions, str) else ""
    if device.type != "cuda":
        return f"there is no kernel for {device.type}"
    if torch.cuda.get_device_capability(device) < _OLDEST_CARD:
        return f"{device} is older than compute capability {'.'.join(map(str, _OLDEST_CARD))}"
    return library.reason(UNIT)


def explain(device: torch.device | str = "cpu") -> str:
    """Why compiled products do not run on a device, with what to install; empty if they do."""
    return _refusal(torch.device(device))


def unpack(packed: PackedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weight that the codes stand for, shape (outputs, inputs), each number rounded once to ``dtype``.

    Raises:
        UnsupportedError: ``dtype`` is no floating type that products run in.
    """
    if dtype not in _DTYPES:
        raise UnsupportedError(f"dtype is {dtype}, but allowed are {', '.join(map(str, _DTYPES))}")
    arguments = (packed.codes, packed.scales, packed.bits, packed.group)
    if dtype is torch.float64:
        padded = _weight_MK(*arguments, dtype)
    elif packed.device.type == "cpu" and not _refusal(packed.device):
        padded = _host_unpack(packed).to(dtype)
    else:
        padded = library.operator(UNIT, "weight_only_unpack", packed.device, "auto")(*arguments, dtype)
    return padded[: packed.out_features, : packed.in_features]


def linear(
    x: Tensor,
    packed: PackedWeight,
    bias: Tensor | None = None,
    *,
    activation_bits: int = 16,
    reproducible: bool = False,
    backend: str = "auto",
) -> Tensor:
    """``x @ weight.T + bias`` with a packed weight; for inference, it has no gradient.

    A few rows are multiplied by the packed weight directly, which reads it once; many rows by the unpacked weight.

    Args:
        x: BF16, FP16, FP32 or FP64, shape (..., inputs), on the device of the weight.
        packed: The weight.
        bias: Shape (outputs,).
        activation_bits: 16: ``x`` as it is. 8: each row is rounded to INT8 with a scale of its own, as drafts do; with
            8-bit weights on a card the codes are multiplied as 16-bit numbers.
        reproducible: Multiply any number of rows as few are: a row's result then has the same bits in any batch on the
            same device.
        backend: ``"auto"``, ``"compiled"`` (compiled code or an error) or ``"reference"`` (FP64, rounded once).

    Returns:
        Shape (..., outputs), of the type of ``x``.

    Raises:
        UnsupportedError: Arguments that do not fit, or compiled code is asked for and cannot run.
    """
    _check(x, packed, activation_bits, backend)
    missing = -x.shape[-1] % TILE
    padded = torch.nn.functional.pad(x, (0, missing)) if missing else x  # padding by nothing would copy
    rows = padded.reshape(-1, packed.codes.shape[1] * TILE)
    if rows.shape[0] == 0:
        product = rows.new_empty((0, packed.out_features))
    elif activation_bits == 8:
        product = _linear_8(rows, packed, reproducible, backend)
    else:
        product = _linear_16(rows, packed, reproducible, backend)
    product = product.view(*x.shape[:-1], packed.out_features)
    return product if bias is None else product + bias.to(product.dtype)


def _check(x: Tensor, packed: PackedWeight, activation_bits: int, backend: str) -> None:
    if backend not in BACKENDS:
        raise UnsupportedError(f"backend is {backend!r}, but allowed are {', '.join(BACKENDS)}")
    if activation_bits not in (8, 16):
        raise UnsupportedError(f"activation_bits is {activation_bits!r}, but allowed are 8 and 16")
    if x.dtype not in _DTYPES:
        raise UnsupportedError(f"x is {x.dtype}, but allowed are {', '.join(map(str, _DTYPES))}")
    if x.dim() == 0 or x.shape[-1] != packed.in_features:
        raise UnsupportedError(
            f"x has the shape {tuple(x.shape)}, but its last dimension must be the weight's {packed.in_features} inputs"
        )
    if x.device != packed.device:
        raise UnsupportedError(f"x is on {x.device} and the weight on {packed.device}; move one of them")
    if backend == "compiled" and (reason := _refusal(x.device)):
        raise UnsupportedError(f"backend 'compiled': {reason}")


def _runs_packed(rows: Tensor, reproducible: bool, backend: str) -> bool:
    """Whether the packed weight is multiplied by compiled code.

    Raises:
        UnsupportedError: Results must be reproducible and no compiled product of this type is.
    """
    types = _CARD_DTYPES if rows.device.type == "cuda" else (*_CARD_DTYPES, torch.float32)
    able = rows.dtype in types and not _refusal(rows.device)
    if reproducible and not able:
        reason = _refusal(rows.device) or f"products in {rows.dtype} are not compiled; use {types[0]}"
        raise UnsupportedError(f"reproducible results need compiled code on {rows.device}: {reason}")
    if backend == "compiled" and not able:
        raise UnsupportedError(f"backend 'compiled': allowed on {rows.device} are {', '.join(map(str, types))}")
    return able and (reproducible or rows.shape[0] <= _FEW_ROWS[rows.device.type])


def _linear_16(rows: Tensor, packed: PackedWeight, reproducible: bool, backend: str) -> Tensor:
    arguments = (packed.codes, packed.scales, packed.bits, packed.group, packed.out_features)
    if backend == "reference" or rows.dtype is torch.float64:
        return _plain_linear(rows, *arguments)
    if not _runs_packed(rows, reproducible, backend):
        return torch.nn.functional.linear(rows[:, : packed.in_features], unpack(packed, rows.dtype))
    if rows.device.type == "cpu":
        return _host_linear(rows, packed).to(rows.dtype)
    product: Tensor = library.operator(UNIT, "weight_only_linear", rows.device, backend)(rows.contiguous(), *arguments)
    return product


def _linear_8(rows: Tensor, packed: PackedWeight, reproducible: bool, backend: str) -> Tensor:
    source = rows.float() if rows.dtype is torch.float64 else rows
    codes, scale, _ = quantize_matrix(
        source,
        torch.int8,
        granularity="row",
        rounding="nearest",
        backend="reference" if backend == "reference" else "auto",
    )
    if backend == "reference" or rows.dtype is torch.float64:
        product = _linear_16(codes.double(), packed, False, "reference")
        return product.mul_(scale.double()).to(rows.dtype)
    if packed.bits == 4 and rows.device.type == "cuda" and _runs_packed(rows, reproducible, backend):
        few = library.operator(UNIT, "weight_only_linear_int8", rows.device, backend)
        arguments = (packed.codes, packed.scales, packed.group, packed.out_features)
        result: Tensor = few(codes, scale.reshape(-1), *arguments, rows.dtype)
        return result
    # Codes up to 127 are exact in any of the types.
    wide = torch.float32 if rows.device.type == "cpu" else rows.dtype
    return (_linear_16(codes.to(wide), packed, reproducible, backend).float() * scale).to(rows.dtype)
