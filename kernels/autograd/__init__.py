"""Differentiable operators in low precision, made of quantization and products.

`ops` of the package above registers them.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.kernels.autograd import convolution_eight, float_modes, fp8, products_half
    from qsync_opt.kernels.autograd.convolution_eight import phases
    from qsync_opt.kernels.autograd.feed_forward_block import feed_forward
    from qsync_opt.kernels.autograd.float_modes import EIGHT_BITS, differentiated_once, fp32_mode
    from qsync_opt.kernels.autograd.linear_layer import linear
    from qsync_opt.kernels.autograd.products_half import (
        convolution,
        convolution_slices,
        product_slices,
        scaled_convolution,
    )
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "EIGHT_BITS",
    "convolution",
    "convolution_eight",
    "convolution_slices",
    "differentiated_once",
    "feed_forward",
    "float_modes",
    "fp8",
    "fp32_mode",
    "linear",
    "phases",
    "product_slices",
    "products_half",
    "scaled_convolution",
]
