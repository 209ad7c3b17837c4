"""What does rounding to nearest do to a weight gradient? Measured, because no variance can tell.

Equal numbers round to the same neighbour. Where rows of the operand or of the gradient are alike, their errors add up
in the sum over rows instead of cancelling; where a gradient underflows, the error is the number itself. Rounding to
nearest has no variance, only one error per batch, and what is taken here is its square, bias included:
``|Q(x)^T Q(g) - x^T g|^2``, summed over all weights, formed as ``(Q(x) - x)^T Q(g) + x^T (Q(g) - g)``.

Axis letters: P independent products, N rows, K contraction, M columns.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from qsync_opt.kernels.float_modes import fp32_mode
from qsync_opt.runtimes.torch.product_forms import ConvolutionForm, MatrixForm, ProductForm
from qsync_opt.runtimes.torch.reductions import square_sum

NEAREST_FORMATS = {"BF16": torch.bfloat16, "FP16": torch.float16}
"""Formats that operands and gradients are cast to, rounding to nearest."""
_CHUNK = 1 << 22
"""Elements of a gradient at most that are looked at together."""


def _rounded(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    if scale == 1.0:
        return x.to(dtype).to(x.dtype)
    return (x * scale).to(dtype).to(x.dtype).mul_(1.0 / scale)


def _some_columns(g: Tensor) -> Iterator[Tensor]:
    """Columns of (P, N, M), some at a time."""
    yield from torch.split(g, max(1, _CHUNK * g.shape[2] // max(1, g.numel())), 2)


def _convolution_weight(form: ConvolutionForm, x: Tensor, g: Tensor) -> Tensor:
    found: Tensor = torch.ops.aten.convolution_backward(g, x, form.second, None, *form.geometry, [False, True, False])[
        1
    ]
    return found


def weight_gradient_errors(form: ProductForm, g: Tensor, factor: float, loss_scale: float) -> dict[str, Tensor]:
    """Squared error of the second operand's gradient per format, before that gradient is itself rounded.

    Args:
        form: Of the product, with its operands in FP32.
        g: Gradient of the result, as the form lays it out.
        factor: By which the result is multiplied.
        loss_scale: By which gradients are multiplied while they are rounded.

    Returns:
        Format to a number on the device, 0 where a format cannot hold the operands.

    Source:
        Ours.
    """
    found = {}
    with fp32_mode("matmul", "tf32"), fp32_mode("conv", "tf32"):  # errors need no more than three digits
        for name, dtype in NEAREST_FORMATS.items():
            x = _rounded(form.first, dtype, 1.0)
            error_x = x - form.first
            if isinstance(form, MatrixForm):
                sums = []
                for part in _some_columns(g):
                    low = _rounded(part, dtype, loss_scale)
                    error = torch.bmm(error_x.mT, low)
                    error.baddbmm_(form.first.mT, low.sub_(part))
                    sums.append(square_sum(error))
                squares = torch.stack(sums).sum()
            else:
                assert isinstance(form, ConvolutionForm)
                low = _rounded(g, dtype, loss_scale)
                error = _convolution_weight(form, error_x, low)
                squares = square_sum(error.add_(_convolution_weight(form, form.first, low.sub_(g))))
            found[name] = squares.nan_to_num_(0.0, 0.0).mul_(factor**2)
    return found
