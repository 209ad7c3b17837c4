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

from qsync_opt.kernels.autograd.float_modes import fp32_mode
from qsync_opt.runtimes.torch.sensitivity.product_forms import ConvolutionForm, MatrixForm, ProductForm
from qsync_opt.runtimes.torch.sensitivity.reductions import norm, norms

NEAREST_FORMATS = {"BF16": torch.bfloat16, "FP16": torch.float16}
"""Formats that operands and gradients are cast to, rounding to nearest."""
_CHUNK = 1 << 22
"""Elements of a gradient at most that are looked at together."""


def _rounded(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    if scale == 1.0:
        return x.to(dtype)
    return (x * scale).to(dtype).to(x.dtype).mul_(1.0 / scale)


def _some_columns(g: Tensor) -> Iterator[Tensor]:
    """Columns of (P, N, M), some at a time."""
    yield from torch.split(g, max(1, _CHUNK * g.shape[2] // max(1, g.numel())), 2)


def weight_gradient_errors(form: ProductForm, g: Tensor, loss_scale: float) -> dict[str, Tensor]:
    """Error of the second operand's gradient per format, before that gradient is itself rounded.

    Args:
        form: Of the product, with its operands in FP32.
        g: Gradient of the result, as the form lays it out; what the result is multiplied by is left out.
        loss_scale: By which gradients are multiplied while they are rounded.

    Returns:
        Format to the root of the squared error, on the device; not finite where a format cannot hold the operands.

    Source:
        Ours.
    """
    with fp32_mode("matmul", "tf32"), fp32_mode("conv", "tf32"):  # errors need no more than three digits
        if isinstance(form, MatrixForm):
            errors = _matrix_errors(form, g, loss_scale)
        else:
            assert isinstance(form, ConvolutionForm)
            errors = iter(norms(list(_convolution_errors(form, g, loss_scale))))
        return dict(zip(NEAREST_FORMATS, errors, strict=True))


def _matrix_errors(form: MatrixForm, g: Tensor, loss_scale: float) -> Iterator[Tensor]:
    for dtype in NEAREST_FORMATS.values():
        error_x = form.first.to(dtype) - form.first
        norms = []
        for part in _some_columns(g):
            low = _rounded(part, dtype, loss_scale).to(part.dtype)
            error = torch.bmm(error_x.mT, low)
            error.baddbmm_(form.first.mT, low.sub_(part))
            norms.append(norm(error))
        yield norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def _convolution_errors(form: ConvolutionForm, g: Tensor, loss_scale: float) -> Iterator[Tensor]:
    def weight(x: Tensor, g: Tensor) -> Tensor:
        found: Tensor = torch.ops.aten.convolution_backward(
            g, x, form.second, None, *form.geometry, [False, True, False]
        )[1]
        return found

    for dtype in NEAREST_FORMATS.values():
        low = _rounded(g, dtype, loss_scale).to(g.dtype)
        error = weight(form.first.to(dtype) - form.first, low)
        yield error.add_(weight(form.first, low.sub_(g)))
