"""Predicted epochs from times of steps in several widths."""

import numpy as np
import pytest

pytest.importorskip("torch")

from qsync_opt.messages import Exchange, Pair, Problem, evaluate, uniform_plan, variance_factor
from qsync_opt.runtimes.torch.messages import StepTimes, predict_epoch
from qsync_opt.runtimes.torch.messages.links import Codec

WIDTHS = (2, 8, 32)
CODEC = Codec(call_ns=(1000.0, 2000.0), number_ns=dict.fromkeys(WIDTHS, (1.0, 2.0)))


def problem():
    pairs = tuple(Pair(source=i, target=1 - i, fixed_ns=1000, ns_per_byte=100.0, beta=np.ones(50)) for i in (0, 1))
    exchange = Exchange(name="forward first", dim=16, rounds=(pairs,), hidden_ns=20_000)
    return Problem(
        name="two workers", time_limit_ns=None, variance_weight=1.0, time_weight=1.0,
        bits={str(bits): variance_factor(bits) for bits in WIDTHS}, exchanges=(exchange,),
    )  # fmt: skip


def step_times(bits, compute_s, codec_s):
    waiting_s = evaluate(problem(), uniform_plan(problem(), bits)).waiting_ns / 1e9
    return StepTimes(waiting_s, compute_s, codec_s, (CODEC, CODEC))


def epoch(bits, *times):
    return predict_epoch(problem(), uniform_plan(problem(), bits), *times)


def test_steps_that_wait_longer_and_shorter_are_interpolated():
    narrow, wide = step_times(2, 1.0, 0.1), step_times(32, 3.0, 0.4)
    between = step_times(8, 0.0, 0.0).exposed_s
    assert narrow.exposed_s < between < wide.exposed_s
    share = (between - narrow.exposed_s) / (wide.exposed_s - narrow.exposed_s)
    predicted = epoch(8, wide, narrow)
    assert predicted.compute_s == pytest.approx(1.0 + 2.0 * share)
    widths_s = 1e-9 * (1000 + 2000 + (1 + 2) * 16 * 50)  # packing 50 rows of 16 numbers, and unpacking as many
    assert predicted.codec_s == pytest.approx(0.1 + 0.3 * share + widths_s)
    assert predicted.exposed_s == between
    assert epoch(8, narrow, wide) == predicted


@pytest.mark.parametrize("bits", WIDTHS)
def test_one_measurement_is_that_of_every_plan(bits):
    assert epoch(bits, step_times(8, 1.0, 0.1)).compute_s == 1.0


def test_beyond_what_was_measured_the_nearest_counts():
    times = step_times(2, 1.0, 0.1), step_times(8, 2.0, 0.1)
    assert epoch(32, *times).compute_s == 2.0
    assert epoch(2, *times[1:]).compute_s == 2.0
