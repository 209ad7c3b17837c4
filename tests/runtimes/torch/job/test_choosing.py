"""What is chosen by times, recorded or made up: the least sensitive of those that are as fast as any."""

import random
import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qsync_opt.runtimes.torch.job import (
    ExecutionMode,
    choose_by_passes,
    choose_by_steps,
    expected_step_ns,
    least_sensitive,
    paired_times,
    undecided,
    uniform_times,
)

HUGE = 1 << 60
TOLERANCE = 1.018


def mode(name, pass_ns, sensitivity, needed_bytes=0, captured=False):
    precision = "BF16" if name == "plan" else name.split()[0]
    return ExecutionMode(
        name=name,
        precisions={"a/linear": precision},
        sensitivity=sensitivity,
        pass_ns=pass_ns,
        needed_bytes=needed_bytes,
        captured=captured,
    )


FAST = (mode("FP32", 60, 0.0), mode("BF16 autocast", 30, 1.0), mode("INT8", 50, 9.0), mode("plan", 45, 0.5))
SLOW = (mode("FP32", 280, 0.0), mode("BF16 autocast", 80, 1.0), mode("INT8", 75, 9.0), mode("plan", 74, 3.0))


def by_passes(modes, limits=None, **options):
    return {n: m.label for n, m in choose_by_passes(modes, limits or dict.fromkeys(modes, HUGE), **options).items()}


def test_by_passes_who_waits_computes_in_full_precision():
    assert by_passes({"fast": FAST, "slow": SLOW}) == {"fast": "FP32", "slow": "plan"}
    assert by_passes({"fast": FAST, "slow": SLOW}, slack=0.1) == {"fast": "FP32", "slow": "BF16 autocast"}


def test_by_passes_nobody_waits_with_sized_batches():
    sized = by_passes({"fast": FAST, "slow": SLOW}, workers={"fast": 1, "slow": 2})
    assert sized == {"fast": "BF16 autocast", "slow": "plan"}


def test_what_has_no_room_is_not_taken():
    tight = (mode("FP32", 60, 0.0, None), mode("BF16 autocast", 70, 1.0, 90), mode("plan", 65, 2.0, 110))
    assert by_passes({"one": tight}, {"one": 120}) == {"one": "plan"}
    assert by_passes({"one": tight}, {"one": 100}) == {"one": "BF16 autocast"}
    assert choose_by_passes({"one": tight}, {"one": 80}) is None


def test_captured_passes_are_taken_on_all_device_types_and_only_where_nothing_else_is_as_fast():
    launched, quick = mode("BF16 autocast", 30, 1.0), mode("BF16 autocast", 20, 1.0, captured=True)
    assert by_passes({"a": [launched, quick]}) == {"a": "BF16 autocast, captured"}
    slow, fine = mode("FP32", 40, 0.5), mode("FP32", 20, 0.5, captured=True)
    assert by_passes({"a": [launched, quick], "b": [slow]}) == {"a": "BF16 autocast", "b": "FP32"}
    both = by_passes({"a": [launched, quick], "b": [slow, fine]})
    assert both == {"a": "BF16 autocast, captured", "b": "FP32, captured"}
    assert by_passes({"a": [launched, replace(quick, pass_ns=30)]}) == {"a": "BF16 autocast"}
    assert by_passes({"a": [launched, replace(quick, needed_bytes=None)]}) == {"a": "BF16 autocast"}


@st.composite
def clusters(draw):
    return {
        device: tuple(
            mode(name, draw(st.integers(1, 1000)), draw(st.integers(0, 9)) * 1.0)
            for name in ("FP32", "BF16 autocast", "INT8", "plan")
        )
        for device in ("one", "two", "three")[: draw(st.integers(1, 3))]
    }


@given(clusters())
def test_by_passes_nothing_uniform_is_faster_nor_as_fast_and_less_sensitive(modes):
    limits = dict.fromkeys(modes, HUGE)
    chosen = choose_by_passes(modes, limits)
    chosen_ns, uniform = max(m.pass_ns for m in chosen.values()), uniform_times(modes, limits)
    assert chosen_ns <= 1.02 * min(uniform.values())
    for name, time in uniform.items():
        if time <= min(uniform.values()) and time <= chosen_ns:
            there = sum(m.sensitivity for own in modes.values() for m in own if m.name == name)
            assert sum(m.sensitivity for m in chosen.values()) <= there


FINE, COARSE = {"a": mode("BF16 autocast", 50, 1.0)}, {"a": mode("INT8", 50, 9.0)}


def test_by_steps_the_less_sensitive_of_equals_is_taken_and_a_faster_one_otherwise():
    assert choose_by_steps([(COARSE, 100.0), (FINE, 101.5)]) == FINE
    assert choose_by_steps([(COARSE, 95.0), (FINE, 100.0)]) == COARSE
    assert choose_by_steps([(COARSE, 95.0), (FINE, 100.0)], slack=0.05) == FINE
    assert choose_by_steps([(COARSE, 99.0), (FINE, 100.0)], sized=True) == COARSE  # there the fastest is wanted
    assert choose_by_steps([(COARSE, 99.8), (FINE, 100.0)], sized=True) == FINE


def test_what_a_compiled_step_takes_beside_its_passes_is_what_a_captured_one_does():
    launched, captured = {"a": mode("INT8", 50, 9.0)}, {"a": mode("INT8", 45, 9.0, captured=True)}
    compiled = {"a": replace(mode("BF16 autocast", 40, 1.0), compiled=True)}
    assert expected_step_ns(compiled, [(launched, 65.0), (captured, 49.0)], 7.0) == 44.0
    assert expected_step_ns(compiled, [(launched, 65.0)], 7.0) == 55.0
    assert expected_step_ns(compiled, [], 7.0) == 47.0
    assert expected_step_ns(launched, [(captured, 49.0)], 7.0) == 57.0
    assert expected_step_ns(captured, [(captured, 49.0)], 7.0) == 49.0


def test_by_steps_captured_passes_must_gain_something():
    captured = {"a": mode("INT8", 49, 9.0, captured=True)}
    assert choose_by_steps([(FINE, 100.0), (captured, 97.5)]) == FINE
    assert choose_by_steps([(FINE, 100.0), (captured, 95.0)]) == captured
    finer = {"a": mode("FP32", 49, 0.0, captured=True)}
    assert choose_by_steps([(FINE, 100.0), (finer, 99.6)]) == FINE
    assert choose_by_steps([(FINE, 100.0), (finer, 96.0), (captured, 95.0)]) == finer
    assert choose_by_steps([(FINE, 100.0), (captured, 99.0)], sized=True) == captured


candidates = st.dictionaries(st.integers(0, 5), st.floats(1.0, 2.0), min_size=1)


@given(candidates, st.data())
def test_what_is_chosen_is_as_fast_as_any_and_nothing_as_fast_is_less_sensitive(times, data):
    sensitivities = {i: data.draw(st.integers(0, 3)) * 1.0 for i in times}
    chosen = least_sensitive(times, sensitivities, TOLERANCE)
    assert times[chosen] <= TOLERANCE * min(times.values())
    for index, time in times.items():
        assert time > TOLERANCE * min(times.values()) or sensitivities[index] >= sensitivities[chosen]


def test_what_slows_a_whole_round_decides_nothing():
    rounds = [{0: 100.0, 1: 101.0, 2: 130.0}, {0: 150.0, 1: 151.5}, {0: 90.0, 1: 90.9}]
    assert paired_times(rounds) == {0: 100.0, 1: pytest.approx(101.0), 2: pytest.approx(130.0)}
    assert paired_times([{0: 5.0, 1: 7.0}]) == {0: 5.0, 1: 7.0}
    assert paired_times([]) == {}


def test_noise_in_one_round_does_not_decide():
    calm = [{0: 100.0, 1: 101.0}] * 6
    for outlier in ({0: 100.0, 1: 140.0}, {0: 60.0, 1: 101.0}, {0: 140.0, 1: 101.0}):
        assert least_sensitive(paired_times([outlier, *calm]), {0: 9.0, 1: 1.0}, TOLERANCE) == 1
    slower = [{0: 100.0, 1: 105.0}] * 6
    for outlier in ({0: 140.0, 1: 105.0}, {0: 100.0, 1: 80.0}):
        assert least_sensitive(paired_times([outlier, *slower]), {0: 9.0, 1: 1.0}, TOLERANCE) == 0


@given(st.data())
def test_what_was_dropped_after_the_first_round_stays_slower_whatever_the_pace_of_later_rounds(data):
    times = st.floats(0.5, 2.0)
    first = data.draw(st.dictionaries(st.integers(0, 5), times, min_size=2))
    near = [i for i, time in first.items() if time <= 1.06 * min(first.values())]
    later = [{i: data.draw(times) for i in near} for _ in range(data.draw(st.integers(0, 4)))]
    pace = data.draw(times)
    for rounds in ([first, *later], [first, *({i: pace * time for i, time in entry.items()} for entry in later)]):
        found = paired_times(rounds)
        assert found.keys() == first.keys()
        assert all(found[i] > min(found.values()) for i in first.keys() - near)


def test_rounds_that_disagree_ask_for_another_one():
    sensitivities = {0: 9.0, 1: 1.0, 2: 20.0}
    assert undecided([{0: 100.0, 1: 100.5, 2: 100.0}] * 4, sensitivities, TOLERANCE) == []
    assert undecided([{0: 100.0, 1: 105.0, 2: 101.0}] * 4, sensitivities, TOLERANCE) == []
    mixed = [{0: 100.0, 1: 100.5, 2: 101.0}, {0: 100.0, 1: 105.0, 2: 101.0}] * 2
    assert undecided(mixed, sensitivities, TOLERANCE) == [0, 1]  # the more sensitive one is of no interest
    assert undecided(mixed + [{0: 100.0, 1: 100.5}] * 12, sensitivities, TOLERANCE) == []
    restless = [{0: 100.0, 1: 99.0}, {0: 90.0, 1: 99.0}]
    assert undecided(restless, sensitivities, TOLERANCE) == [0, 1]  # the fastest beside the next
    assert undecided([{1: 99.0}], sensitivities, TOLERANCE) == undecided([], sensitivities, TOLERANCE) == []


# Steps of ViT-B in milliseconds on two H200s, one a part of 16 multiprocessors, as they followed each other: INT8 on
# both (three times), and 16-bit autocast.
RESTLESS = ([86.34, 86.37, 93.82, 90.55], [87.29, 88.7, 90.69, 91.72], [88.18, 89.17, 88.2, 97.71])
CALM = ([88.29, 88.25, 88.23, 88.34], [88.54, 88.43, 88.47, 88.6], [90.12, 90.09, 90.09, 90.21])
SENSITIVITIES = {0: 9.0, 1: 1.0, 2: 2.0}


def noise(rng, series, run):
    """Recorded rounds, ``run`` of them in a row, as shares of their median."""
    while True:
        one = rng.choice(series)
        start = rng.randrange(len(one) - run + 1)
        yield from (time / statistics.median(one) for time in one[start : start + run])


def chosen_shares(ratio, run, trials=400):
    """How often each candidate is chosen: a restless coarse one, and calm finer ones ``ratio`` times slower."""
    rng, counts = random.Random(7), [0, 0, 0]
    for _ in range(trials):
        streams = [noise(rng, RESTLESS, run), noise(rng, CALM, run), noise(rng, CALM, run)]
        true = (1.0, ratio, ratio)
        rounds = [{i: true[i] * next(streams[i]) for i in range(3)} for _ in range(4)]
        while len(rounds) < 17 and (again := undecided(rounds, SENSITIVITIES, TOLERANCE)):
            rounds.append({i: true[i] * next(streams[i]) for i in again})
        counts[least_sensitive(paired_times(rounds), SENSITIVITIES, TOLERANCE)] += 1
    return [count / trials for count in counts]


@pytest.mark.parametrize("run", [1, 2])
def test_with_recorded_noise_the_right_candidate_is_chosen(run):
    assert chosen_shares(0.97, run)[1] == 1.0
    assert chosen_shares(1.0, run)[1] > 0.95
    assert chosen_shares(1.05, run)[0] > 0.85
    assert chosen_shares(1.1, run)[0] > 0.99
