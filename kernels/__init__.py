"""Operators in eight bits and half precision, compiled for CUDA or by a plain reference.

`ops` holds the operators, `layers` the modules, and `KernelOptions` says how they run.
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
    "CONVOLUTIONS",
    "PRODUCTS",
    "ConvolutionCall",
    "KernelOptions",
    "backend",
    "convolution_call",
    "layers",
    "ops",
    "product_call",
    "reference",
]
