"""What kinds of operators keep for the backward pass and how they work, as far as an estimate needs to know.

Names are in lower case, so that torch's kinds and ONNX's operator types (``MatMul``) are found alike.
"""

from __future__ import annotations


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


PRODUCTS = _names("linear matmul mm bmm addmm baddbmm gemm conv conv1d conv2d conv3d")
"""Matrix products and convolutions that have 8-bit kernels."""
ATTENTION = _names("scaled_dot_product_attention attention")
LOOKUPS = _names("embedding gather")
"""Rows of a table by index, where the table is a parameter."""

SAVES_OUTPUT = _names("""
    relu relu6 sigmoid tanh softmax log_softmax logsoftmax hardsigmoid exp sqrt rsqrt reciprocal leaky_relu leakyrelu
    elu selu softsign
""")
"""Their derivative is a function of their result."""
SAVES_NOTHING = _names("""
    input constant constantofshape add sub rsub neg cat concat split chunk getitem gather slice select narrow pad
    transpose permute t expand tile repeat contiguous clone cast to mean reducemean sum reducesum averagepool avg_pool2d
    globalaveragepool adaptive_avg_pool1d adaptive_avg_pool2d reshape view flatten unflatten squeeze unsqueeze identity
    stack roll flip upsample resize depthtospace spacetodepth
""")
"""Linear in their inputs with constant coefficients, or mere movement: backward needs shapes only."""
BYTE_MASKS = _names("dropout")
"""They keep a mask of one byte per element of the result."""
INDEX_MASKS = _names("maxpool max_pool1d max_pool2d max_pool3d max_pool2d_with_indices globalmaxpool")
"""They keep their input and an index per element of the result."""
