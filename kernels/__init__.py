"""Operators in 8 bits, 16 bits, TF32 and FP32 with gradients, by compiled CUDA kernels or plain PyTorch.

`ops` runs one operator at one precision, `layers` has trainable modules, and `KernelOptions` says how they round.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.kernels import backend, layers, ops, reference
    from qsync_opt.kernels.arguments import CONVOLUTIONS, PRODUCTS, ConvolutionCall, convolution_call, product_call
    from qsync_opt.kernels.options import KernelOptions
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "CONVOLUTIONS", "PRODUCTS", "ConvolutionCall", "KernelOptions", "backend", "convolution_call", "layers", "ops",
    "product_call", "reference",
]  # fmt: skip
