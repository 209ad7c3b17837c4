"""Quantization to 8 bits: formats, random bits, quantizers of tensors and matrices, and the cache of weight codes.

The compiled operators equal their plain PyTorch implementations bit for bit.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.kernels.quantize.formats import E4M3, E5M2, FORMATS, INT8, PRECISIONS, amax, format_of, scale_from
    from qsync_opt.kernels.quantize.operators import (
        BLOCK,
        GRANULARITIES,
        ROUNDINGS,
        UNIT,
        QuantizedMatrix,
        dequantize_matrix,
        drawing,
        plain_by_amax,
        quantize_by_amax,
        quantize_matrix,
        quantize_unchecked,
        spread,
    )
    from qsync_opt.kernels.quantize.quantize import (
        INT8_MAX,
        Quantized,
        dequantize,
        quantize_fp8,
        quantize_int8,
        rescaled,
    )
    from qsync_opt.kernels.quantize.random_bits import call_steps, random_words, signed, stepped_key, stream_key
    from qsync_opt.kernels.quantize.weight_cache import cached_bytes, clear_weights, once_per_step
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "BLOCK", "E4M3", "E5M2", "FORMATS", "GRANULARITIES", "INT8", "INT8_MAX", "PRECISIONS", "ROUNDINGS", "UNIT",
    "Quantized", "QuantizedMatrix", "amax", "cached_bytes", "call_steps", "clear_weights", "dequantize",
    "dequantize_matrix", "drawing", "format_of", "once_per_step", "plain_by_amax", "quantize_by_amax", "quantize_fp8",
    "quantize_int8", "quantize_matrix", "quantize_unchecked", "random_words", "rescaled", "scale_from", "signed",
    "spread", "stepped_key", "stream_key",
]  # fmt: skip
