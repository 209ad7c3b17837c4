"""Which of several candidates to take, from times of rounds in which they took turns."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

Rounds = Sequence[Mapping[int, float]]
"""By round: candidate to time."""
_AGREEING = 0.85
"""Share of rounds that must fall on the same side of the tolerance for a comparison to be decided: 4 of 4, 6 of 7."""


def paired_times(rounds: Rounds) -> dict[int, float]:
    """Time of each candidate from rounds in which candidates take turns; what slows a whole round cancels out.

    The reference is the fastest of the candidates with the most turns, by its median. Others take as many times as
    long as the median of their ratios to it within common rounds. A candidate that took only the first turn is compared
    with the fastest of that round, so that one that was dropped for being slow stays as much slower.

    Args:
        rounds: All candidates take part in the first.
    """
    turns = {i: [times[i] for times in rounds if i in times] for times in rounds for i in times}
    if not turns:
        return {}
    most = max(map(len, turns.values()))
    median = {i: statistics.median(times) for i, times in turns.items() if len(times) == most}
    reference = min(median, key=median.__getitem__)
    paired = {
        i: median[reference] * statistics.median(_ratios(rounds, i, reference))
        for i, times in turns.items()
        if len(times) > 1 or i == reference
    }
    first = rounds[0]
    quickest = min(paired.keys() & first.keys(), key=first.__getitem__)
    return {i: paired[i] if i in paired else paired[quickest] * first[i] / first[quickest] for i in turns}


def least_sensitive(times: Mapping[int, float], sensitivities: Mapping[int, float], tolerance: float) -> int:
    """The least sensitive candidate of those that take at most ``tolerance`` times as long as the fastest."""
    limit = tolerance * min(times.values())
    return min((i for i, time in times.items() if time <= limit), key=lambda i: (sensitivities[i], times[i]))


def undecided(rounds: Rounds, sensitivities: Mapping[int, float], tolerance: float) -> list[int]:
    """Candidates to time again because noise leaves the choice of `least_sensitive` open; none if it is decided.

    The chosen candidate and every less sensitive one are compared with their fastest rival. Where rounds disagree on
    whether the tolerance is kept, both take another turn.
    """
    times = paired_times(rounds)
    if len(times) < 2:
        return []
    order = {i: (sensitivities[i], time) for i, time in times.items()}
    chosen = least_sensitive(times, sensitivities, tolerance)
    again: set[int] = set()
    for index in times:
        if order[index] > order[chosen]:
            continue
        rival = min((other for other in times if other != index), key=times.__getitem__)
        ratios = _ratios(rounds, index, rival)
        slower = sum(ratio > tolerance for ratio in ratios) / len(ratios)
        if max(slower, 1 - slower) < _AGREEING:
            again |= {index, rival}
    return sorted(again)


def _ratios(rounds: Rounds, index: int, other: int) -> list[float]:
    """Time of one candidate over that of another, by common round."""
    return [times[index] / times[other] for times in rounds if index in times and other in times]
