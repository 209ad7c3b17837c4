"""Statistics of the benchmark: reliability of ranks, paired differences."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from rank_correlation import spearman


def standard_error(values: Sequence[float]) -> float:
    """Of the mean; infinite for a single value."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf


def paired(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Mean of ``a - b`` over pairs, and its standard error."""
    differences = [x - y for x, y in zip(a, b, strict=True)]
    return statistics.fmean(differences), standard_error(differences)


def reliability(repeats: Sequence[Sequence[float]]) -> float | None:
    """How well the means of many repeats would rank-correlate with those of as many fresh ones.

    Split-half: Spearman between the means of even and of odd repeats, carried to full length by Spearman-Brown. The
    square root of it bounds what even a perfect indicator can reach.

    Args:
        repeats: One sequence per operator, all of one length.
    """
    halves = [spearman_half(repeats, start) for start in (0, 1)]
    found = spearman(*halves)
    return None if found is None else 2 * found / (1 + found) if found > 0 else found


def spearman_half(repeats: Sequence[Sequence[float]], start: int) -> list[float]:
    """Mean of every second repeat, per operator."""
    return [statistics.fmean(values[start::2]) for values in repeats]


def ceiling(reliability_found: float | None) -> float | None:
    """The rank correlation that a perfect indicator would show against means of that reliability."""
    return None if reliability_found is None else math.sqrt(max(0.0, reliability_found))


def share_within(ratios: Sequence[float], low: float, high: float) -> float:
    """Share of the values in [low, high]."""
    return sum(low <= ratio <= high for ratio in ratios) / len(ratios)


def recovered(lowest: float, full: float, plan: float) -> float | None:
    """Share of the gap between uniform-lowest and full precision that a plan closes; None where there is no gap."""
    return None if lowest == full else (lowest - plan) / (lowest - full)
