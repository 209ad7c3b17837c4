"""Intervals around predictions from the errors of predictions that were held out."""

from __future__ import annotations

import math

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
    logs = np.asarray(scores)
    tail = (1 - COVERAGE) / 2
    rank = min(1.0, math.ceil((len(logs) + 1) * (1 - tail)) / len(logs))
    low = -float(np.quantile(-logs, rank, method="higher"))
    high = float(np.quantile(logs, rank, method="higher"))
    return min(0.0, low), max(0.0, high)
