"""Convolutions of INT8 codes with scales, bias and activation fused.

Gradients are in `autograd`.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.kernels.convolution.scaled import MAX_TERMS, scaled_conv2d
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = ["MAX_TERMS", "scaled_conv2d"]
