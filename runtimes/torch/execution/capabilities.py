"""Precisions of a torch device and of each kind of operator on it."""

from __future__ import annotations

import torch

from qsync_opt.kernels import backend, ops
from qsync_opt.numerics import PrecisionFormats, formats_for


def device_formats(device: torch.device | str) -> dict[str, PrecisionFormats]:
    """Precisions of a device with their border formats, from the coarsest to the finest.

    ``cpu``: INT8, BF16, FP32. ``cuda`` by compute capability: 7.0 FP16, FP32; 7.5 also INT8; 8.0 also BF16 and TF32;
    8.9 also FP8.

    Raises:
        UnsupportedError: The device is neither, or is not there.
    """
    return formats_for(backend.device_precisions(device), backend.half_format(device))


def operator_precisions(op_type: str, device: torch.device | str) -> tuple[str, ...]:
    """Precisions in which an operator of this kind can run on a device; fixed and unknown kinds: FP32 alone."""
    return ops.precisions_of(op_type, device)
