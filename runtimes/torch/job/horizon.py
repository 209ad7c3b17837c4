"""What an optimizer is about to do with noise in its gradient, as the indicator ``loss`` wants to know it."""

from __future__ import annotations

import torch

from qsync_opt.errors import ProblemError, UnsupportedError
from qsync_opt.sensitivity.expected_loss import horizon_of
from qsync_opt.sensitivity.statistics import ModelStatistics


def divides_by_squares(optimizer: torch.optim.Optimizer) -> bool:
    """Whether steps are divided by the root of the gradient's recent squares: Adam and those like it."""
    return all("betas" in group for group in optimizer.param_groups)


def noise_horizon(
    optimizer: torch.optim.Optimizer,
    *,
    steps: int,
    statistics: ModelStatistics | None = None,
    learning_rate: float | None = None,
) -> float:
    """The ``horizon`` of ``sensitivities(kind="loss")`` for the coming steps of an optimizer.

    Args:
        optimizer: Adam or one like it (with ``betas``), or SGD (with ``momentum``).
        steps: To come.
        statistics: For SGD, whose steps grow with the gradient: of two batches or more.
        learning_rate: Root mean square over the steps; by default that of the optimizer's first group, as it is now.

    Returns:
        The factor by which the gradient's variance counts.

    Raises:
        UnsupportedError: Another kind of optimizer; steps or rate out of range.
        ProblemError: SGD without the gradient noise of statistics.

    Source:
        Ours; see ``qsync_opt.sensitivity.expected_loss``.
    """
    group = optimizer.param_groups[0]
    rate = float(group["lr"] if learning_rate is None else learning_rate)
    if divides_by_squares(optimizer):
        return horizon_of(learning_rate=rate, steps=steps)
    if "momentum" not in group:
        raise UnsupportedError(
            f"the optimizer is {type(optimizer).__name__}: a horizon is known for Adam and those like it, and for SGD; "
            "for another pass sensitivities(horizon=...) yourself"
        )
    noise = None if statistics is None else statistics.gradient_noise
    if noise is None:
        raise ProblemError(
            "the horizon of SGD needs the mean square of the gradient: pass statistics= of two batches or more"
        )
    elements = sum(p.numel() for g in optimizer.param_groups for p in g["params"] if p.requires_grad)
    return horizon_of(
        learning_rate=rate,
        steps=steps,
        momentum=float(group["momentum"]),
        mean_square_gradient=noise.mean_square_norm / elements,
    )
