"""Products with packed weights: ``qsync_opt::weight_only_linear``, ``_linear_rounded``, ``_unpack``, and their choice.

The plain implementations compute in FP64 and round once: they are the specification. Compiled code multiplies codes and
activations exactly and adds in FP32 (on cards INT8 in int32), which on 4096 inputs is within 2e-6 of the sum of the
terms' magnitudes, before the result is rounded to its type.

Axis letters: N rows, K inputs, M outputs.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from qsync_opt.errors import UnsupportedError
from qsync_opt.kernels.compilation import library
from qsync_opt.kernels.weight_only import host
from qsync_opt.kernels.weight_only.host import UNIT
from qsync_opt.kernels.weight_only.layout import TILE, PackedWeight, ordered_codes, rotated_inputs
from qsync_opt.kernels.weight_only.rotation import rotate, rotate_and_round
from qsync_opt.kernels.weight_only.rounding import ACTIVATIONS, WIDE, RoundedRows

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_CARD_DTYPES = (torch.bfloat16, torch.float16)
_FEW_ROWS = {"cuda": 80, "cpu": 64}
"""Rows up to which packed weights are multiplied directly; more are multiplied by unpacked ones."""
_OLDEST_CARD = (8, 0)
_OLDEST_CARD_OF = {torch.int8: _OLDEST_CARD, torch.float8_e4m3fn: (8, 9)}
"""That multiplies codes of 8 bits as such."""


def _weight_MK(codes: Tensor, scales: Tensor, bits: int, group: int, dtype: torch.dtype) -> Tensor:
    """Code times scale, padded, each product formed in ``dtype``."""
    codes_MK = ordered_codes(codes, bits).to(dtype)
    spread_MK = scales.t().to(dtype).repeat_interleave(group, 1)[:, : codes_MK.shape[1]]
    return codes_MK.mul_(spread_MK)


def _plain_linear(x: Tensor, codes: Tensor, scales: Tensor, bits: int, group: int, outputs: int) -> Tensor:
    weight_MK = _weight_MK(codes, scales, bits, group, torch.float64)
    return (x.double() @ weight_MK[:outputs].t()).to(x.dtype)


def _plain_linear_rounded(
    x: Tensor, x_scales: Tensor, codes: Tensor, scales: Tensor, group: int, outputs: int, dtype: torch.dtype
) -> Tensor:
    product = _plain_linear(x.double(), codes, scales, 4, group, outputs)
    return product.mul_(x_scales.double().view(-1, 1)).to(dtype)


def _plain_linear_gated(
    x: Tensor, codes: Tensor, scales: Tensor, bits: int, group: int, outputs: int, by_gelu: bool
) -> Tensor:
    gate, up = _plain_linear(x, codes, scales, bits, group, outputs).float().chunk(2, -1)
    gate = F.gelu(gate, approximate="tanh") if by_gelu else F.silu(gate)
    return (gate * up).to(x.dtype)


def _plain_unpack(codes: Tensor, scales: Tensor, bits: int, group: int, dtype: torch.dtype) -> Tensor:
    return _weight_MK(codes, scales, bits, group, torch.float32).to(dtype)


library.define(
    "weight_only_linear(Tensor x, Tensor codes, Tensor scales, int bits, int group, int outputs) -> Tensor",
    unit=UNIT,
    plain=_plain_linear,
    fake=lambda x, codes, scales, bits, group, outputs: x.new_empty((x.shape[0], outputs)),
)
library.define(
    "weight_only_linear_gated(Tensor x, Tensor codes, Tensor scales, int bits, int group, int outputs, bool by_gelu) "
    "-> Tensor",
    unit=UNIT,
    plain=_plain_linear_gated,
    fake=lambda x, codes, scales, bits, group, outputs, by_gelu: x.new_empty((x.shape[0], outputs // 2)),
)
library.define(
    "weight_only_linear_rounded(Tensor x, Tensor x_scales, Tensor codes, Tensor scales, int group, int outputs, "
    "ScalarType dtype) -> Tensor",
    unit=UNIT,
    plain=_plain_linear_rounded,
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
def _card_refusal(device: torch.device, oldest: tuple[int, int]) -> str:
    return library.refusal(UNIT, device, oldest)


@functools.cache
def _refusal(device: torch.device) -> str:
    """Why compiled products do not run on a device, or nothing."""
    if device.type == "cpu":
        functions = host.functions()
        return functions if isinstance(functions, str) else ""
    return _card_refusal(device, _OLDEST_CARD)


def explain(device: torch.device | str = "cpu") -> str:
    """Why compiled products do not run on a device, with what to install; empty if they do."""
    return _refusal(torch.device(device))


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in _DTYPES:
        raise UnsupportedError(f"dtype is {dtype}, but allowed are {', '.join(map(str, _DTYPES))}")


def _stored(packed: PackedWeight, dtype: torch.dtype) -> Tensor:
    """What the codes stand for, rotated where they are, padded outputs cut off."""
    arguments = (packed.codes, packed.scales, packed.bits, packed.group)
    if dtype is torch.float64:
        padded = _weight_MK(*arguments, dtype)
    elif packed.device.type == "cpu" and not _refusal(packed.device):
        padded = host.unpack(packed, dtype)
    else:
        padded = library.operator(UNIT, "weight_only_unpack", packed.device, "auto")(*arguments, dtype)
    return padded[: packed.out_features]


def unpack(packed: PackedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weight that the codes stand for, shape (outputs, inputs), each number rounded once to ``dtype``.

    Raises:
        UnsupportedError: ``dtype`` is no floating type that products run in.
    """
    _check_dtype(dtype)
    if packed.rotation:
        padded = rotated_inputs(_stored(packed, torch.float64), packed.rotation).to(dtype)
    else:
        padded = _stored(packed, dtype)
    return padded[:, : packed.in_features]


def linear(
    x: Tensor | RoundedRows,
    packed: PackedWeight,
    bias: Tensor | None = None,
    *,
    activations: str = WIDE,
    reproducible: bool = False,
    backend: str = "auto",
) -> Tensor:
    """``x @ weight.T + bias`` with a packed weight; for inference, it has no gradient.

    A few rows are multiplied by the packed weight directly, which reads it once; many rows by the unpacked weight.

    Args:
        x: BF16, FP16, FP32 or FP64, shape (..., inputs), on the device of the weight; or rows (N, inputs) that are
            rotated where the weight is, and rounded, as `qsync_opt.kernels.decoder` makes them.
        packed: The weight.
        bias: Shape (outputs,).
        activations: Of what is not rounded yet. ``"A16"``: ``x`` as it is. ``"A8"``, ``"F8"``, ``"A4"``: each row is
            rounded to INT8, FP8 (E4M3) or 4 bits with a scale of its own, as drafts do. Cards multiply these codes with
            4-bit weights as INT8 and FP8; elsewhere codes are multiplied as wider numbers, which is as exact and no
            faster.
        reproducible: Multiply any number of rows as few are: a row's result then has the same bits in any batch on the
            same device.
        backend: ``"auto"``, ``"compiled"`` (compiled code or an error) or ``"reference"`` (FP64, rounded once).

    Returns:
        Shape (..., outputs), of the type of ``x``, or of what was rounded.

    Raises:
        UnsupportedError: Arguments that do not fit, or compiled code is asked for and cannot run.
    """
    library.check_backend(backend)
    source = x.codes if isinstance(x, RoundedRows) else x
    _check(source, x.dtype, packed, activations, backend)
    missing = -source.shape[-1] % TILE
    padded = F.pad(source, (0, missing)) if missing else source  # padding by nothing would copy
    rows = padded.reshape(-1, packed.codes.shape[1] * TILE)
    if rows.shape[0] == 0:
        product = rows.new_empty((0, packed.out_features), dtype=x.dtype)
    elif isinstance(x, RoundedRows):
        product = _rounded_linear(x._replace(codes=rows), packed, reproducible, backend)
    elif activations == WIDE:
        if packed.rotation:
            rows = rotate(rows, packed.rotation, backend=backend)
        product = _wide_linear(rows, packed, reproducible, backend)
    else:
        plain = backend == "reference" or rows.dtype is torch.float64
        codes = rotate_and_round(rows, packed.rotation, activations, "reference" if plain else backend)
        product = _rounded_linear(codes, packed, reproducible, backend)
    product = product.view(*source.shape[:-1], packed.out_features)
    return product if bias is None else product + bias.to(product.dtype)


def gated_linear(x: Tensor, packed: PackedWeight, *, by_gelu: bool, reproducible: bool = False) -> Tensor | None:
    """The first half of each row of ``x @ weight.T``, by SiLU or GELU (by tanh), times the second, as one kernel.

    Args:
        x: As of `linear`, not rounded.
        packed: The weight: rows of the gate, then as many of what it multiplies.
        by_gelu: GELU in place of SiLU.
        reproducible: As of `linear`.

    Returns:
        Shape (..., outputs / 2): what `linear` and then `qsync_opt.kernels.decoder.silu_gate` or ``gelu_gate`` give,
        but for the order of sums; None where no kernel does this for these types, rows and sizes.
    """
    rows = x.reshape(-1, x.shape[-1])
    padded = tuple(TILE * size for size in packed.codes.shape[:2])  # of which neither may differ from the weight's
    if not (x.is_cuda and len(rows) and padded == packed.shape == (packed.out_features, x.shape[-1])):
        return None
    if not _runs_packed(rows, x.dtype, reproducible, "auto"):
        return None
    if packed.rotation:
        rows = rotate(rows, packed.rotation)
    arguments = (packed.codes, packed.scales, packed.bits, packed.group, packed.out_features)
    run = library.operator(UNIT, "weight_only_linear_gated", x.device, "auto")
    product: Tensor = run(rows.contiguous(), *arguments, by_gelu)
    return product.view(*x.shape[:-1], packed.out_features // 2)


def _check(x: Tensor, dtype: torch.dtype, packed: PackedWeight, activations: str, backend: str) -> None:
    if activations not in ACTIVATIONS:
        raise UnsupportedError(f"activations is {activations!r}, but allowed are {', '.join(ACTIVATIONS)}")
    if dtype not in _DTYPES:
        raise UnsupportedError(f"x is {dtype}, but allowed are {', '.join(map(str, _DTYPES))}")
    if x.dim() == 0 or x.shape[-1] != packed.in_features:
        raise UnsupportedError(
            f"x has the shape {tuple(x.shape)}, but its last dimension must be the weight's {packed.in_features} inputs"
        )
    if x.device != packed.device:
        raise UnsupportedError(f"x is on {x.device} and the weight on {packed.device}; move one of them")
    if backend == "compiled" and (reason := _refusal(x.device)):
        raise UnsupportedError(f"backend 'compiled': {reason}")


def _runs_packed(rows: Tensor, dtype: torch.dtype, reproducible: bool, backend: str) -> bool:
    """Whether the packed weight is multiplied by compiled code, with results of a type.

    Raises:
        UnsupportedError: Results must be reproducible and no compiled product of this type is.
    """
    types = _CARD_DTYPES if rows.device.type == "cuda" else (*_CARD_DTYPES, torch.float32)
    able = dtype in types and not _refusal(rows.device)
    if reproducible and not able:
        reason = _refusal(rows.device) or f"products in {dtype} are not compiled; use {types[0]}"
        raise UnsupportedError(f"reproducible results need compiled code on {rows.device}: {reason}")
    if backend == "compiled" and not able:
        raise UnsupportedError(f"backend 'compiled': allowed on {rows.device} are {', '.join(map(str, types))}")
    return able and (reproducible or rows.shape[0] <= _FEW_ROWS[rows.device.type])


def _wide_linear(rows: Tensor, packed: PackedWeight, reproducible: bool, backend: str) -> Tensor:
    """The product with what the codes stand for; rows are rotated already where the codes are."""
    arguments = (packed.codes, packed.scales, packed.bits, packed.group, packed.out_features)
    if backend == "reference" or rows.dtype is torch.float64:
        return _plain_linear(rows, *arguments)
    if not _runs_packed(rows, rows.dtype, reproducible, backend):
        return F.linear(rows, _stored(packed, rows.dtype))
    if rows.device.type == "cpu":
        return host.linear(rows, packed).to(rows.dtype)
    product: Tensor = library.operator(UNIT, "weight_only_linear", rows.device, backend)(rows.contiguous(), *arguments)
    return product


def _multiplies_codes(rows: RoundedRows, packed: PackedWeight) -> bool:
    """Whether there are products of these codes and 4-bit ones."""
    device, oldest = rows.codes.device, _OLDEST_CARD_OF.get(rows.codes.dtype)
    return packed.bits == 4 and device.type == "cuda" and oldest is not None and not _card_refusal(device, oldest)


def _rounded_linear(rows: RoundedRows, packed: PackedWeight, reproducible: bool, backend: str) -> Tensor:
    codes, scale, dtype = rows
    if backend == "reference" or dtype is torch.float64:
        return _wide_linear(codes.double(), packed, False, "reference").mul_(scale.double()).to(dtype)
    if _multiplies_codes(rows, packed) and _runs_packed(codes, dtype, reproducible, backend):
        few = library.operator(UNIT, "weight_only_linear_rounded", codes.device, backend)
        arguments = (packed.codes, packed.scales, packed.group, packed.out_features)
        result: Tensor = few(codes.contiguous(), scale.reshape(-1), *arguments, dtype)
        return result
    # Codes are exact in any of the types.
    wider = torch.float32 if codes.device.type == "cpu" else dtype
    return (_wide_linear(codes.to(wider), packed, reproducible, backend).float() * scale).to(dtype)
