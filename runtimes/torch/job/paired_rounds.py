"""Ways that took turns: what is as fast as the fastest, and what must take another turn before that is known?

Rounds differ by more than ways do (a host that is busy, a card that is shared), and some ways differ from themselves
by 4 % from round to round. So ways are compared within each round, by a sign test: it asks nothing of how times are
spread, and one round that was far off counts no more than any other.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence

Rounds = Sequence[Mapping[int, float]]
"""By round: candidate to time."""
LEVEL = 0.07
"""A way is shown to be slower, or as fast, if chance alone says so no more often: 4 rounds of 4, 7 of 8, 11 of 14."""
_ALIKE = 0.995
"""What takes at least such a share of another one's time is not faster."""


def paired_medians(rounds: Rounds) -> dict[int, float]:
    """Median time of some candidates that took turns, without what slowed all of a round.

    Args:
        rounds: Candidate to time. Those that are in all rounds are compared within each of them.
    """
    if not rounds:
        return {}
    steady = [index for index in rounds[0] if all(index in entry for entry in rounds)]
    found = {
        index: statistics.median(entry[index] for entry in rounds if index in entry)
        for index in {i for entry in rounds for i in entry}
    }
    if len(steady) < 2:
        return found
    pace = [statistics.geometric_mean(entry[index] for index in steady) for entry in rounds]
    usual = statistics.median(pace)
    for index in steady:
        found[index] = usual * statistics.median(entry[index] / own for entry, own in zip(rounds, pace, strict=True))
    return found


def paired_times(rounds: Rounds) -> dict[int, float]:
    """The same where some took more turns than others: all beside the one that took most, within common rounds.

    Args:
        rounds: Candidate to time.
    """
    turns = {index: [entry[index] for entry in rounds if index in entry] for entry in rounds for index in entry}
    if not turns:
        return {}
    steady = max(turns, key=lambda index: (len(turns[index]), -index))
    usual = statistics.median(turns[steady])
    found = {}
    for index, times in turns.items():
        ratios = _ratios(rounds, index, steady)
        found[index] = usual * statistics.median(ratios) if ratios else statistics.median(times)
    return found


def times_of_race(rounds: Rounds, captured: Collection[int] = ()) -> dict[int, float]:
    """The same for a race: what took only the first turn was slower then, and is as much slower still.

    Without this a host that is busier in later rounds would have what left the race seem the fastest.

    Args:
        rounds: Candidate to time, the first of all candidates.
        captured: Candidates that take no further turn however fast they are; theirs is the time of the first.

    Returns:
        Of candidates without further turns, as many times the time of the first round's fastest that has some as it
        was in that round; the times of the first round if there is no other.
    """
    later = {index for entry in rounds[1:] for index in entry}
    if not later:
        return dict(rounds[0]) if rounds else {}
    found = paired_times([{i: ns for i, ns in entry.items() if i in later} for entry in rounds])
    first = rounds[0]
    fastest = min(later & first.keys(), key=lambda i: first[i])
    pace = found[fastest] / first[fastest]
    return {i: found[i] if i in later else ns if i in captured else pace * ns for i, ns in first.items()}


def shown(ratios: Sequence[float], most: float) -> bool | None:
    """Whether one way is shown to be slower than another by more than it may be; None: neither that nor the contrary.

    Args:
        ratios: Its time over the other's, by round.
        most: What the ratio may be.

    Source:
        The sign test (Dixon and Mood, JASA 41, 1946), one-sided at `LEVEL` for either answer.
    """
    over = sum(ratio > most for ratio in ratios)
    if _by_chance(len(ratios), over) <= LEVEL:
        return True
    return False if _by_chance(len(ratios), len(ratios) - over) <= LEVEL else None


def least_sensitive_as_fast(
    times: Mapping[int, float], sensitivities: Mapping[int, float], rounds: Rounds, most: float
) -> int:
    """The least sensitive candidate of those that take at most so many times as long as the fastest.

    What rounds show counts; where they leave it open, the median of the ratios within rounds; without common rounds,
    the times.

    Args:
        times: Of every candidate, at least one.
        sensitivities: Of the same; of equals the faster is taken.
        rounds: Turns, as far as they took some.
        most: At least 1.
    """
    slower: list[int] = []
    for index, fastest in _in_order(times, sensitivities):
        if index == fastest:
            return index
        if _is_like(index, slower, rounds):
            continue
        ratios = _ratios(rounds, index, fastest)
        found = shown(ratios, most)
        if found is None:
            found = (statistics.median(ratios) if ratios else times[index] / times[fastest]) > most
        if not found:
            return index
        slower.append(index)
    return min(times, key=lambda index: times[index])


def undecided(rounds: Rounds, sensitivities: Mapping[int, float], most: float) -> list[int]:
    """Who should take another turn: the fastest, and the least sensitive that may be as fast; none if that is known.

    Others, which are more sensitive, would not be taken in either case. Where the least sensitive is the fastest itself
    as far as one can see, the next fastest takes turns with it.

    Args:
        rounds: Turns until now; candidates without any are left out.
        sensitivities: By candidate; the least sensitive of those as fast as any is wanted, of equals the faster.
        most: As in `least_sensitive_as_fast`.
    """
    times = paired_times(rounds)
    slower: list[int] = []
    in_order = _in_order(times, sensitivities)
    for place, (index, fastest) in enumerate(in_order):
        if index == fastest:
            others = [other for other, _ in in_order[place + 1 :]]
            rival = min(others, key=lambda other: times[other], default=index)
        elif _is_like(index, slower, rounds):
            continue
        else:
            rival = fastest
        found = rival != index and shown(_ratios(rounds, index, rival), most)
        if found is None:
            return sorted((index, rival))
        if not found or index == fastest:
            break
        slower.append(index)
    return []


def _in_order(times: Mapping[int, float], sensitivities: Mapping[int, float]) -> list[tuple[int, int]]:
    """From the least sensitive on, each with the fastest of all."""
    fastest = min(times, key=lambda index: times[index], default=0)
    return [(index, fastest) for index in sorted(times, key=lambda i: (sensitivities[i], times[i]))]


def _is_like(index: int, slower: Sequence[int], rounds: Rounds) -> bool:
    """Whether it is no faster than one that is too slow: another trial of the same would only be another chance."""
    return any((ratios := _ratios(rounds, index, other)) and statistics.median(ratios) > _ALIKE for other in slower)


def _ratios(rounds: Rounds, index: int, other: int) -> list[float]:
    return [entry[index] / entry[other] for entry in rounds if index in entry and other in entry]


def _by_chance(rounds: int, count: int) -> float:
    """How often a fair coin shows as many heads, or more."""
    return math.fsum(math.comb(rounds, heads) for heads in range(count, rounds + 1)) / 2.0**rounds
