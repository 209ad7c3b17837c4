"""The controller of speculation is as good as is asked by the simulated clock, on some of its regimes."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")
FIRST, REGIMES = 7_000_000, 60


@pytest.fixture(scope="module")
def simulation():
    sys.path.insert(0, BENCHMARKS)
    import decoding_simulation

    yield decoding_simulation
    sys.path.remove(BENCHMARKS)


def test_a_change_of_the_text_is_answered_within_64_cycles(simulation):
    changes = [simulation.one_change(seed) for seed in range(FIRST, FIRST + REGIMES)]
    in_time = [change["cycles"] <= 64 for change in changes if change["loss_if_kept"] > 0.05]
    assert len(in_time) > 20
    assert sum(in_time) >= 0.92 * len(in_time)


def test_the_controller_is_near_the_best_and_never_far_below_plain(simulation):
    regimes = [simulation.one_regime(seed) for seed in range(FIRST, FIRST + REGIMES)]
    assert min(regime["controller"] for regime in regimes) >= 0.99
    assert sum(regime["controller_loss"] <= 0.03 for regime in regimes) >= 0.95 * REGIMES
    assert max(1 / regime["controller"] - 1 for regime in regimes if regime["best"] == 1.0) < 0.005
