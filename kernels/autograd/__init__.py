"""Products and convolutions with gradients: INT8, FP8, and FP32 or TF32 by choice.

Codes come from `quantize`, products of codes from `matmul` and `convolution`.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.kernels.autograd import convolution_parts, feed_forward_block, float_modes, half_values
    from qsync_opt.kernels.autograd.chunked_loss import (
        check_loss_arguments,
        chunk_rows,
        linear_cross_entropy,
    )
    from qsync_opt.kernels.autograd.convolutions import convolution, convolution_slices, scaled_convolution
    from qsync_opt.kernels.autograd.derivatives import EIGHT_BITS, differentiated_once
    from qsync_opt.kernels.autograd.feed_forward_block import feed_forward
    from qsync_opt.kernels.autograd.float_modes import fp32_mode
    from qsync_opt.kernels.autograd.products import Operand, linear, product, product_slices, quantize_operand
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "EIGHT_BITS", "Operand", "check_loss_arguments", "chunk_rows", "convolution", "convolution_parts",
    "convolution_slices", "differentiated_once", "feed_forward", "feed_forward_block", "float_modes", "fp32_mode",
    "half_values", "linear", "linear_cross_entropy", "product", "product_slices", "quantize_operand",
    "scaled_convolution",
]  # fmt: skip
