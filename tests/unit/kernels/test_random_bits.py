import pytest
import torch

from qsync_opt.kernels.random_bits import centred_noise, random_words, stream_key

CPU = torch.device("cpu")


def _mix(value):
    mask = (1 << 64) - 1

    def shifted(number, bits):  # copies the sign, as torch does
        return ((number - (1 << 64) if number >> 63 else number) >> bits) & mask

    value = ((value ^ shifted(value, 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ shifted(value, 27)) * 0x94D049BB133111EB) & mask
    value ^= value >> 31
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


def test_streams_differ_by_seed_offset_and_number():
    keys = {stream_key(s, o, n) for s in range(4) for o in range(4) for n in range(4)}
    assert len(keys) == 64
    words = torch.stack([random_words(key, 0, 4096, CPU) for key in keys])
    assert words.unique().numel() == words.numel()
