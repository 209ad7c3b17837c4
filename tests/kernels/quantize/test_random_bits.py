import numpy as np
import pytest
import torch

from qsync_opt.kernels.quantize.random_bits import centred_noise, random_words, stream_key

CPU = torch.device("cpu")


def _mix(value):
    mask = (1 << 64) - 1
    for _ in range(2):
        value = ((value ^ (value >> 32)) * 0xD6E8FEB86659FD93) & mask
    value ^= value >> 32
    return value - (1 << 64) if value >> 63 else value


def test_words_follow_the_formula():
    key = stream_key(1, 2, 3)
    expected = [_mix((key + i * 0x9E3779B97F4A7C15) & ((1 << 64) - 1)) for i in range(40)]
    assert random_words(key, 0, 40, CPU).tolist() == expected


@pytest.mark.parametrize("start", [0, 4, 1 << 20])
def test_a_word_depends_on_its_index_alone(start):
    key = stream_key(5, 0, 0)
    long = random_words(key, start, (1 << 14) + 100, CPU)  # beyond the cached piece
    assert torch.equal(long[:50], random_words(key, start, 50, CPU))
    assert torch.equal(long[100:], random_words(key, start + 100, 1 << 14, CPU))


def test_noise_is_odd_symmetric_and_even():
    noise = centred_noise(stream_key(0, 0, 0), 0, 1 << 20, CPU).to(torch.int64)
    assert bool((noise % 2 != 0).all())
    # Mean of 2**20 uniform values on +-2**15 has a standard deviation of 2**15 / sqrt(3) / 2**10 = 18.5.
    assert abs(noise.double().mean().item()) < 5 * 18.5
    assert noise.double().var().item() == pytest.approx((1 << 30) / 3, rel=0.01)
    lanes = noise.view(-1, 4).double()
    correlations = torch.corrcoef(lanes.T) - torch.eye(4)
    assert correlations.abs().max().item() < 0.01
    successive = torch.corrcoef(torch.stack([noise[:-4].double(), noise[4:].double()]))[0, 1]
    assert abs(successive.item()) < 0.01


def _splitmix(value):
    """The generator of G. Steele, D. Lea and C. Flood (OOPSLA 2014), one step from ``value``, in 64 bits."""
    value = np.uint64((value + 0x9E3779B97F4A7C15) & ((1 << 64) - 1))
    with np.errstate(over="ignore"):
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int(value ^ (value >> np.uint64(31)))


@pytest.mark.parametrize("numbers", [(0, 0, 0), (1, 2, 3), (2**63 - 1, 7, 1), (12345, 2**40, 9)])
def test_keys_are_three_steps_of_splitmix(numbers):
    assert _splitmix(0) == 0xE220A8397B1DCDAF  # the published first number of seed 0
    expected = 0
    for number in numbers:
        expected = _splitmix(expected + number)
    assert stream_key(*numbers) == expected


def test_streams_differ_by_seed_offset_and_number():
    keys = {stream_key(s, o, n) for s in range(4) for o in range(4) for n in range(4)}
    assert len(keys) == 64
    words = torch.stack([random_words(key, 0, 4096, CPU) for key in keys])
    assert words.unique().numel() == words.numel()


def test_a_flipped_bit_of_the_counter_flips_half_of_the_word():
    # The raw counters differ in one bit; each bit of the mixed words then differs in half of all cases.
    golden = 0x9E3779B97F4A7C15
    unit = pow(golden, -1, 1 << 64)  # golden * unit = 1: starts that move the counter by single bits
    for bit in range(0, 64, 7):
        here = random_words(stream_key(1, 1, 1), 0, 4096, CPU)
        there = random_words(stream_key(1, 1, 1), (unit << bit) % (1 << 64), 4096, CPU)
        flipped = (here ^ there)[:, None] >> torch.arange(64) & 1
        assert flipped.double().mean(0).sub(0.5).abs().max().item() < 6 * 0.5 / 64


def test_values_of_a_lane_are_equally_frequent():
    lanes = random_words(stream_key(3, 1, 4), 0, 1 << 20, CPU).view(torch.int16).view(-1, 4).to(torch.int64) + 32768
    for lane in lanes.T:
        counts = torch.bincount(lane, minlength=1 << 16).double()
        chi_square = ((counts - 16) ** 2 / 16).sum().item()
        # 65535 degrees of freedom: standard deviation of sqrt(2 * 65535) = 362.
        assert abs(chi_square - 65535) < 6 * 362
    pairs = lanes[:, :2] >> 8
    counts = torch.bincount(pairs[:, 0] * 256 + pairs[:, 1], minlength=1 << 16).double()
    assert abs(((counts - 16) ** 2 / 16).sum().item() - 65535) < 6 * 362
