"""What a torch device can compute in, and the formats at the borders of an operator there."""

from __future__ import annotations

import torch

from qsync_opt.kernels import backend, ops
from qsync_opt.precision import PrecisionFormats

# Which kinds of operators a plan may adjust.
ADJUSTABLE = ops.ADJUSTABLE


def formats_for(precisions: tuple[str, ...], half_format: str) -> dict[str, PrecisionFormats]:
    """Border formats of some precisions, given the 16-bit format of 8-bit operators.

    An operator in 16 or 32 bits answers, wants and delivers its own format (TF32: FP32 tensors). An 8-bit operator
    answers in the 16-bit format and runs backward in it.
    """
    borders = {"INT8": half_format, "FP8": half_format, "TF32": "FP32"}
    return {
        name: PrecisionFormats(
            output=borders.get(name, name),
            gradient_input=borders.get(name, name),
            gradient_output=borders.get(name, name),
        )
        for name in precisions
    }


def device_formats(device: torch.device | str) -> dict[str, PrecisionFormats]:
    """Precisions of a device with their border formats, from the coarsest to the finest.

    ``cpu``: INT8, BF16, FP32. ``cuda`` by compute capability: 7.0 FP16, FP32; 7.5 also INT8; 8.0 also BF16 and TF32;
    8.9 also FP8.

    Raises:
        UnsupportedError: A device that is neither.
    """
    return formats_for(backend.device_precisions(device), backend.half_format(device))


def operator_precisions(op_type: str, device: torch.device | str) -> tuple[str, ...]:
    """Precisions in which an operator of this kind can run on a device; fixed and unknown kinds: FP32 alone."""
    return ops.precisions_of(op_type, device)
