"""Intervals around predictions from the errors of predictions that were held out."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

COVERAGE = 0.9
"""Share of times inside their intervals."""


def conformal_ends(scores: ArrayLike) -> tuple[float, float]:
    """Both ends, each missed by half of what the interval may miss; zero is always inside.

    Args:
        scores: Logarithms of measured over predicted times, shape (N,), N at least 1.

    Source: Barber et al., "Predictive inference with the jackknife+" (2021).
    """
    tail = (1 - COVERAGE) / 2
    # Of N + 1 exchangeable values the last one is below the k-th smallest with probability k / (N + 1).
    low, high = np.quantile(np.asarray(scores), (tail, 1 - tail), method="weibull")
    return min(0.0, float(low)), max(0.0, float(high))
