"""Statistics of the benchmark: reliability of ranks, paired differences."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence

from rank_correlation import spearman


def standard_error(values: Sequence[float]) -> float:
    """Of the mean; infinite for a single value."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf


def paired(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Mean of ``a - b`` over pairs, and its standard error."""
    differences = [x - y for x, y in zip(a, b, strict=True)]
    return statistics.fmean(differences), standard_error(differences)


def reliability(repeats: Sequence[Sequence[float]], splits: int = 200) -> float | None:
    """How well the means of many repeats would rank-correlate with those of as many fresh ones.

    Split-half: Spearman between the means of two halves of the repeats, averaged over random halves (one alone depends
    on where it is cut) and carried to full length by Spearman-Brown. The square root of it bounds what even a perfect
    indicator can reach.

    Args:
        repeats: One sequence per operator, all of one length of at least 2.
        splits: Random halves.
    """
    source, count = random.Random(0), len(repeats[0])
    if count < 2:
        return None
    found = []
    for _ in range(splits):
        order = source.sample(range(count), count)
        halves = [[statistics.fmean(values[i] for i in part) for values in repeats] for part in _halves(order)]
        found.append(spearman(*halves))
    known = [value for value in found if value is not None]
    if not known:
        return None
    mean = statistics.fmean(known)
    return 2 * mean / (1 + mean) if mean > 0 else mean


def _halves(order: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    middle = len(order) // 2
    return order[:middle], order[middle : 2 * middle]


def resampled(
    repeats: Sequence[Sequence[float]], predictions: Mapping[str, Sequence[float]], draws: int = 400
) -> dict[str, list[float]]:
    """Rank correlation of every prediction with means over repeats that are drawn with replacement (bootstrap).

    Every draw takes the same repeats for all predictions, so that differences between them can be formed.

    Args:
        repeats: One sequence per operator, all of one length.
        predictions: Name to one number per operator.
        draws: Of the bootstrap.
    """
    source, count = random.Random(1), len(repeats[0])
    found: dict[str, list[float]] = {name: [] for name in predictions}
    for _ in range(draws):
        chosen = source.choices(range(count), k=count)
        means = [statistics.fmean(values[i] for i in chosen) for values in repeats]
        for name, values in predictions.items():
            rank = spearman(values, means)
            if rank is not None:
                found[name].append(rank)
    return found


def ceiling(reliability_found: float | None) -> float | None:
    """The rank correlation that a perfect indicator would show against means of that reliability."""
    return None if reliability_found is None else math.sqrt(max(0.0, reliability_found))


def share_within(ratios: Sequence[float], low: float, high: float) -> float:
    """Share of the values in [low, high]."""
    return sum(low <= ratio <= high for ratio in ratios) / len(ratios)


def recovered(lowest: float, full: float, plan: float) -> float | None:
    """Share of the gap between uniform-lowest and full precision that a plan closes; None where there is no gap."""
    return None if lowest == full else (lowest - plan) / (lowest - full)
