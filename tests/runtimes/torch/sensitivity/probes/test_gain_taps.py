"""Sign changes of large rectifiers are estimated from some of their elements."""

import pytest
import torch

from qsync_opt.runtimes.torch.sensitivity.probes import GainTapper
from qsync_opt.runtimes.torch.sensitivity.probes import taps as gain_taps


def _flips(distances, squares):
    tapper = GainTapper(None, {})
    tapper.add_sign_changes("relu", distances, squares)
    _, flips = tapper.results(1)
    return flips["relu"][:-1], tapper.rectified


def test_a_sample_of_a_large_rectifier_stands_for_all(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    distances = torch.randn((8, 64, 28, 28), generator=generator).abs_().half()
    squares = torch.randn(distances.shape, generator=generator).square_()
    squares[:, 0] *= 20  # a channel that counts for more
    whole, rectified = _flips(distances, squares)
    monkeypatch.setattr(gain_taps, "_SIGN_SAMPLE", 1 << 17)
    some, sampled = _flips(distances, squares)
    assert some != whole
    # At the smallest ratios a thousandth of the elements changes its sign.
    assert some[2:] == pytest.approx(whole[2:], rel=0.05)
    assert sampled == rectified == {"relu": squares.numel()}
