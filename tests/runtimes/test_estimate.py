import math
import time
from collections.abc import Iterator

import pytest

from qsync_opt.runtimes import MAX_ROUNDS, Rounds, steady_medians


def _rounds(medians: list[float]) -> tuple[Iterator[float], list[float]]:
    used: list[float] = []

    def values() -> Iterator[float]:
        for value in medians:
            used.append(value)
            yield value

    return values(), used


def test_two_rounds_that_agree_are_enough() -> None:
    source, used = _rounds([100_000, 101_000, 5])

    def run_round() -> list[tuple[float]]:
        median = next(source)
        return [(median * 0.9,), (median,), (median * 7,)]

    assert steady_medians(run_round) == (100_500,)
    assert len(used) == 2


def test_a_disturbed_round_is_left_out() -> None:
    source, used = _rounds([300_000, 100_000, 250_000, 102_000, 1])
    assert steady_medians(lambda: [(next(source),)]) == (101_000,)
    assert len(used) == 4


def test_every_column_has_to_settle() -> None:
    first, _ = _rounds([100_000] * 3)
    second, used = _rounds([100_000, 200_000, 100_000])
    assert steady_medians(lambda: [(next(first), next(second))]) == (100_000, 100_000)
    assert len(used) == 3


def test_restless_times_end_after_so_many_rounds() -> None:
    source, used = _rounds([1e6 * 2**i for i in range(20)])
    assert steady_medians(lambda: [(next(source),)]) == (1.5e6,)
    assert len(used) == MAX_ROUNDS


@pytest.mark.parametrize("pair", [(10.0, 900.0), (0.0, 0.0)])
def test_times_below_the_resolution_agree(pair: tuple[float, float]) -> None:
    source, used = _rounds([*pair, 5.0])
    steady_medians(lambda: [(next(source),)])
    assert len(used) == 2


def test_at_the_deadline_the_rounds_so_far_count() -> None:
    source, used = _rounds([300_000, 100_000])
    rounds = Rounds(deadline=time.monotonic() - 1)
    assert rounds.medians(lambda: [(next(source),)]) == (300_000,)
    assert (len(used), rounds.was_cut, rounds.disagreement) == (1, True, 0.0)


def test_rounds_that_never_agree_are_reported() -> None:
    source, _ = _rounds([1e6 * 2**i for i in range(20)])
    rounds = Rounds()
    rounds.medians(lambda: [(next(source),)])
    assert (rounds.was_cut, rounds.disagreement) == (False, 0.5)
    rounds.medians(lambda: [(1e6,)])
    assert rounds.disagreement == 0.5  # the worst of all columns and measurements


@pytest.mark.parametrize(("left_s", "runs"), [(math.inf, 6), (3000.0, 6), (700.0, 2), (-1.0, 1)])
def test_runs_per_round_leave_time_for_three_rounds(left_s: float, runs: int) -> None:
    rounds = Rounds(deadline=time.monotonic() + left_s)
    assert rounds.runs(6, 100.0) == runs
    assert (rounds.was_cut, rounds.run_s) == (runs < 6, 100.0)
