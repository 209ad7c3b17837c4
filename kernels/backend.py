"""Precisions of devices, and the implementations that run there."""

from __future__ import annotations

import functools

import torch

from qsync_opt.errors import UnsupportedError
from qsync_opt.kernels.compilation import UNITS, library
from qsync_opt.kernels.matmul import (
    has_half_attention,
    has_half_units,
    has_native_product,
    has_onednn_convolution,
    has_onednn_linear,
)
from qsync_opt.numerics import number_format

# The first compute capability with products in the format.
_CUDA_FROM: dict[str, tuple[int, int]] = {
    "INT8-BWD8": (7, 5),
    "INT8": (7, 5),
    "FP8-BWD8": (8, 9),
    "FP8": (8, 9),
    "BF16": (8, 0),
    "FP16": (7, 0),
    "TF32": (8, 0),
    "FP32": (0, 0),
}


def known_device(device: torch.device | str) -> torch.device:
    """The device that a name stands for.

    Raises:
        UnsupportedError: A device that is neither ``cpu`` nor ``cuda``, or a card that torch does not see.
    """
    try:
        known: torch.device | None = torch.device(device)
    except RuntimeError:
        known = None
    if known is None or known.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"device {str(device)!r}: plans can be made for cpu and cuda")
    if known.type == "cuda" and (known.index or 0) >= torch.cuda.device_count():
        raise UnsupportedError(
            f"device {str(known)!r}: torch sees {torch.cuda.device_count()} CUDA devices here; name one of them, or cpu"
        )
    return known


def device_precisions(device: torch.device | str) -> tuple[str, ...]:
    """Precisions in which operators can be planned on a device, from the coarsest to the finest.

    ``cpu``: INT8 with either backward pass, BF16, FP32. FP16 is left out: torch computes it there no faster than FP32
    (converting around FP32 arithmetic), so that it would only add error. ``cuda``: by compute capability.

    Raises:
        UnsupportedError: A device that is neither ``cpu`` nor ``cuda``, or a card that torch does not see.
    """
    device = known_device(device)
    if device.type == "cpu":
        return ("INT8-BWD8", "INT8", "BF16", "FP32")
    return cuda_precisions(torch.cuda.get_device_capability(device))


def default_precisions(device: torch.device | str) -> tuple[str, ...]:
    """Precisions that plans choose from by default: all of the device, on processors without 8-bit backward passes.

    There a quantizer costs more time than a narrower product gains.
    """
    wide = known_device(device).type == "cpu"
    return tuple(name for name in device_precisions(device) if not (wide and number_format(name).eight_bit_backward))


@functools.cache
def cuda_precisions(capability: tuple[int, int]) -> tuple[str, ...]:
    """Precisions of a CUDA card of some compute capability, from the coarsest to the finest."""
    return tuple(name for name, since in _CUDA_FROM.items() if capability >= since)


def half_format(device: torch.device | str) -> str:
    """The 16-bit format of results and backward passes of 8-bit operators on a device.

    BF16 where the device multiplies it (its range needs no loss scaling), else FP16.
    """
    return "BF16" if "BF16" in device_precisions(device) else "FP16"


def explain(device: torch.device | str) -> dict[str, str]:
    """By kind of operator, the implementation that ``backend="auto"`` runs on a device, and why.

    On processors ``product`` and ``attention`` are those in 16 bits; all other kinds are in 8 bits.

    On a card this call builds and loads the compiled kernels; where that fails, the text says why and what to install.
    """
    device = torch.device(device)
    precisions, native = device_precisions(device), has_native_product(device)
    product = "torch._int_mm" if native else "float products of integer values: no exact INT8 product on this device"
    result = dict.fromkeys(("linear", "convolution", "batched"), product)
    if device.type == "cpu":
        floats = "float convolution of integer values"
        for kind, has_fused, other in (
            ("linear", has_onednn_linear(), product),
            ("convolution", has_onednn_convolution(), floats),
        ):
            fused = "oneDNN, scales and bias fused (one activation scale per tensor); otherwise "
            result[kind] = (fused if has_fused else "oneDNN operator absent or inexact, hence ") + other
        for kind, has_units, units in (
            ("product", has_half_units(device), "BF16 instructions"),
            ("attention", has_half_attention(device), "BF16 matrix units"),
        ):
            result[kind] = units if has_units else f"FP32 arithmetic on 16-bit values: no {units} here"
        return result
    if native:
        result["convolution"] = "patches copied as INT8, then torch._int_mm"
    result["batched"] = "FP16 products with FP32 sums, exact up to 1040 terms, else torch._int_mm per matrix"
    if "FP8" in precisions:
        result["fp8"] = "torch._scaled_mm"
    in_torch = ("quantize", "gradients", "messages", "weight_only", "cross_entropy", "paged_attention")
    result.update(dict.fromkeys(in_torch, "plain PyTorch"))
    kinds = {"matmul": ("linear", "batched", "fp8")}
    for unit in UNITS:
        compiled, why = library.activate(unit), library.reason(unit)
        for kind in kinds.get(unit, (unit,)):
            if kind in result:
                result[kind] = "compiled CUDA kernels" if compiled else f"{result[kind]}; no compiled kernels: {why}"
    return result
