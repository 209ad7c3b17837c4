"""Convolutions of quantized operands.

`scaled_convolution` is the forward and both backward passes.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.kernels.convolution.scaled import MAX_TERMS, scaled_conv2d
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "MAX_TERMS",
    "scaled_conv2d",
]
