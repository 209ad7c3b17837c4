"""Storage of numbers of each format in ONNX tensors."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, numpy_helper

from qsync_opt.errors import UnsupportedError
from qsync_opt.runtimes.onnxruntime.prepared import Array

ELEMENT_TYPE = {"FP32": TensorProto.FLOAT, "FP16": TensorProto.FLOAT16, "BF16": TensorProto.BFLOAT16}
"""ONNX element type of each floating-point format."""
TYPE_TEXT = {"FP32": "tensor(float)", "FP16": "tensor(float16)", "BF16": "tensor(bfloat16)"}
"""The same in the spelling of operator schemas."""
WEIGHT_LEVEL = 63
"""Largest 8-bit code of a weight.

Processors without dot-product instructions add pairs of products of 8-bit codes in 16 bits: 2 x 255 x 127 overflows
there silently, 2 x 255 x 63 does not. One bit is given up so that every processor gives the same result.
"""


def stored(values: Array, name: str, number_format: str, *, label: str | None = None) -> TensorProto:
    """FP32 values as a tensor of a format, rounded to nearest, ties to even; ``label`` names it in errors.

    Raises:
        UnsupportedError: A finite value is beyond the largest of the format.
    """
    if number_format == "FP32":
        return numpy_helper.from_array(values, name)
    if number_format == "FP16":
        with np.errstate(over="ignore"):
            half = values.astype(np.float16)
        lost = np.isinf(half) & np.isfinite(values)
        if lost.any():
            worst = float(np.abs(values[lost]).max())
            raise UnsupportedError(
                f"weight {label or name!r} holds {worst:g}, but the largest number in FP16 is 65504; "
                "keep its operator in FP32"
            )
        return numpy_helper.from_array(half, name)
    return TensorProto(
        name=name, data_type=TensorProto.BFLOAT16, dims=values.shape, raw_data=bfloat16_bits(values).tobytes()
    )


def bfloat16_bits(values: Array) -> Array:
    """The upper halves of FP32 numbers after rounding to nearest, ties to even; a NaN stays one."""
    bits = np.ascontiguousarray(values, dtype="<f4").view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    result: Array = np.where(np.isnan(values), np.uint16(0x7FC0), rounded).astype("<u2")
    return result


def weight_codes(values: Array, axis: int | None) -> tuple[Array, Array]:
    """Signed 8-bit codes of a weight and their scales, one per index of ``axis`` (None: one for the whole tensor).

    Raises:
        UnsupportedError: A value is not finite.
    """
    if not np.isfinite(values).all():
        raise UnsupportedError("a weight holds values that are not finite, which have no 8-bit codes")
    others = None if axis is None else tuple(i for i in range(values.ndim) if i != axis)
    largest = np.abs(values).max(axis=others, keepdims=True, initial=0.0)
    scale = np.where(largest > 0, largest / WEIGHT_LEVEL, 1.0).astype(np.float32)
    # A subnormal scale can come out as zero, or make codes beyond the largest level.
    scale = np.where(scale > 0, scale, 1.0).astype(np.float32)
    codes = np.clip(np.rint(values / scale), -WEIGHT_LEVEL, WEIGHT_LEVEL).astype(np.int8)
    flat: Array = scale.reshape(-1) if axis is not None else scale.reshape(())
    return codes, flat
