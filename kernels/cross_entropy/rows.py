"""Cross-entropy of rows of logits, with the gradient written in the logits' place: each is read and written once.

The CUDA kernel sums in another order than the plain implementation and computes in FP32 (FP64 for FP64), so both agree
up to the rounding of these sums and of the exponential.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from qsync_opt.kernels.compilation import library

UNIT = "cross_entropy"


def cross_entropy_rows(
    logits: Tensor, target: Tensor, *, ignore_index: int, label_smoothing: float, gradient: bool, backend: str = "auto"
) -> Tensor:
    """The loss of each row, as ``F.cross_entropy(..., reduction="none")`` of the logits in FP32.

    Args:
        logits: (N, V) of any float type, contiguous; with ``gradient`` they are overwritten by the gradient of the sum
            of the losses, rounded to their type.
        target: (N,) int64, each a class or ``ignore_index``.
        ignore_index: Of rows that do not count: their loss and gradient are 0.
        label_smoothing: As in ``F.cross_entropy``.
        gradient: Whether the gradient is wanted.
        backend: As in `KernelOptions`.

    Returns:
        (N,) FP32, or FP64 for logits of that type.

    Raises:
        UnsupportedError: ``backend="compiled"``, and the CUDA code cannot run.

    Source: ours.
    """
    operator = library.operator(UNIT, "cross_entropy_rows", logits.device, backend)
    losses: Tensor = operator(logits, target, ignore_index, label_smoothing, gradient)
    return losses


def _sums(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype is torch.float64 else torch.float32


def _plain(logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, gradient: bool) -> Tensor:
    classes = logits.shape[1]
    logarithms = F.log_softmax(logits, 1, dtype=_sums(logits))
    ignored = (target == ignore_index).unsqueeze(1)
    index = target.unsqueeze(1).masked_fill(ignored, 0)
    losses = -(1 - label_smoothing) * logarithms.gather(1, index)
    if label_smoothing:
        losses -= label_smoothing / classes * logarithms.sum(1, keepdim=True)
    if gradient:
        slope = logarithms.exp_()
        if label_smoothing:
            slope -= label_smoothing / classes
        slope.scatter_add_(1, index, slope.new_full((1, 1), label_smoothing - 1).expand(index.shape))
        logits.copy_(slope.masked_fill_(ignored, 0))
    return losses.masked_fill_(ignored, 0).squeeze(1)


def _fake(logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, gradient: bool) -> Tensor:
    return logits.new_empty(logits.shape[:1], dtype=_sums(logits))


library.define(
    "cross_entropy_rows(Tensor(a!) logits, Tensor target, int ignore_index, float label_smoothing, bool gradient) -> "
    "Tensor",
    unit=UNIT,
    plain=_plain,
    fake=_fake,
)
