"""How much of a training step's progress does noise in the gradient cost Adam? The unit of the indicator ``progress``.

A step of Adam (AdamW, and those like it) moves weight ``w`` by ``eta * m / sqrt(v)``: ``m`` the mean of the recent
gradients, ``v`` the mean of their squares. To first order it lowers the loss by ``eta * sum(mean^2 / sqrt(v))``. Noise
of variance ``s`` that rounding adds to the gradient of ``w`` raises ``v`` by ``s`` and leaves the mean alone, so that
what the step gains becomes

    eta * sum(mean^2 / sqrt(v + s))  =  eta * sum(mean^2 / sqrt(v)) - eta * sum(mean^2 / sqrt(v) * s / (2 v)) + ...

Noise dilutes the signal: the step stays as long as before (Adam sees to that), and less of it points downhill. That the
step also scatters more is of second order in ``eta``: against dilution it is smaller by ``eta * n * sqrt(v)``, with n
the number of terms that the loss is a mean of, which is a thousandth in the models measured here. With the share of the
signal in a gradient's square, ``mean^2 / v``, taken as equal everywhere, what is lost is the share

    sum(s / (2 sqrt(v))) / sum(sqrt(v))

of the step's progress; ``v`` is the mean over each parameter's elements, since the square of one element in one batch
says little about it. It is a pure number and adds up over operators: 0.02 for a whole plan means that training needs
about 2 % more steps, which may be compared with the time that the plan saves.

Two things follow, and both are otherwise for SGD, whose steps grow with the noise (``qsync_opt.expected_loss``): noise
counts by how large it is *beside the gradient of the same parameter*, so that parameters with small gradients count as
much as others; and what rounding does in the backward pass counts in full, as no loss at a single step shows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from qsync_opt.errors import ProblemError


def progress_lost(
    added_variance: Sequence[float], mean_square: Sequence[float], elements: Sequence[int] | None = None
) -> float:
    """Share of a step's progress that noise costs Adam, to first order.

    Args:
        added_variance: Per parameter (or weight), the variance that noise adds to its gradient, mean over its elements.
        mean_square: Per parameter, the mean square of its gradient's elements; where it is 0 nothing is lost.
        elements: Per parameter; by default 1 each.

    Returns:
        ``sum(s / (2 sqrt(v))) / sum(sqrt(v))`` over all elements.

    Raises:
        ProblemError: The sequences differ in length, a value is negative or not finite, or all gradients are 0.

    Source:
        Ours; see the module's text.
    """
    counts = [1] * len(mean_square) if elements is None else list(elements)
    if not len(added_variance) == len(mean_square) == len(counts):
        raise ProblemError(
            f"{len(added_variance)} variances, {len(mean_square)} mean squares and {len(counts)} numbers of elements: "
            "one of each per parameter is needed"
        )
    for value in (*added_variance, *mean_square, *counts):
        if not 0 <= value < math.inf:
            raise ProblemError(f"{value!r} is among the moments of a gradient: finite numbers of at least 0 are needed")
    progress = sum(n * math.sqrt(v) for v, n in zip(mean_square, counts, strict=True))
    if not progress > 0:
        raise ProblemError("all gradients are 0: there is no progress to lose")
    lost = sum(
        n * s / (2 * math.sqrt(v)) for s, v, n in zip(added_variance, mean_square, counts, strict=True) if v > 0
    )
    return lost / progress
