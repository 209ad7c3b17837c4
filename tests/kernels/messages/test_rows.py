import numpy as np
import pytest

pytest.importorskip("torch")
import torch

from qsync_opt.errors import UnsupportedError
from qsync_opt.kernels.messages import PACKED, WIDTHS, pack_rows, row_bytes, row_key, unpack_rows
from qsync_opt.messages import variance_factor

SHAPES = ((0, 4), (1, 1), (3, 7), (5, 33), (17, 64), (40, 256))


def rows_of(shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((shape[0] + 3, shape[1]), generator=generator) * torch.exp(torch.randn(1, generator=generator) * 5)
    x[: shape[0] // 3] += 1e4
    x[-1] = 0.1  # constant, and not a BF16 number
    x[-2] = 0.0
    index = torch.randperm(x.shape[0], generator=generator)
    return x, index


def round_trip(x, index, bits, key, backend="auto"):
    out = torch.full_like(x, -7.0)
    unpack_rows(pack_rows(x, index, bits, key, backend=backend), index, out, bits, backend=backend)
    return out


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", [*PACKED, 16])
def test_compiled_loops_equal_the_reference_bit_for_bit(shape, bits):
    pytest.importorskip("numba")
    x, index = rows_of(shape, bits)
    if shape[0] > 4:
        x[1, 0], x[2, -1], x[3, 0] = torch.nan, torch.inf, 3e38
        x[3, -1] = -3e38
    wire = pack_rows(x, index, bits, 11, backend="compiled")
    assert torch.equal(wire, pack_rows(x, index, bits, 11, backend="reference"))
    assert wire.shape == (x.shape[0], row_bytes(shape[1], bits))
    outs = [torch.zeros_like(x) for _ in range(2)]
    for out, backend in zip(outs, ("compiled", "reference"), strict=True):
        unpack_rows(wire, index, out, bits, backend=backend)
    assert torch.equal(outs[0].view(torch.int32), outs[1].view(torch.int32))


@pytest.mark.parametrize("bits", WIDTHS)
def test_every_width_is_unbiased_with_the_stated_variance(bits):
    """Means of 4,000 draws; 4.5 standard errors of the least fortunate of 96 entries."""
    x, _ = rows_of((3, 16), 5)
    x[:, 0] *= 3
    draws, index = 4000, torch.arange(x.shape[0])
    samples = torch.stack([round_trip(x, index, bits, row_key(3, bits, k)) for k in range(draws)]).double()
    errors = samples - x.double()
    variance = errors.var(0)
    low = (x.amin(1) - x.amin(1).abs() * 2**-7).double()  # the zero point may lie that much lower
    spread = (x.amax(1).double() - low)[:, None]
    step = spread * variance_factor(bits) ** 0.5 * (1 + 2**-7) if bits != 16 else x.double().abs() * 2**-7
    # Ten draws' worth of a step: an entry next to a code is rounded the other way too rarely for its variance to show.
    assert (errors.mean(0).abs() <= 4.5 * (variance / draws).sqrt() + 10 * step / draws + 1e-7 * x.double().abs()).all()
    if bits == 16:
        assert (variance <= (x.double().abs() * 2**-7) ** 2 / 4 * 1.2 + 1e-30).all()
    else:
        assert (variance <= step**2 / 4 * 1.2).all()


def test_the_variance_of_random_rows_is_that_of_the_plan():
    """D step^2 / 6 a row: the expectation of f (1 - f) over a uniform fraction f is 1/6."""
    generator = torch.Generator().manual_seed(1)
    x = torch.rand((400, 64), generator=generator)
    index = torch.arange(400)
    for bits in (2, 4, 8):
        mean = sum(float((round_trip(x, index, bits, row_key(0, bits, k)) - x).square().sum()) for k in range(20)) / 20
        spread = x.amax(1) - x.amin(1)
        planned = float((spread**2).sum()) * 64 / 6 * variance_factor(bits)
        assert mean == pytest.approx(planned, rel=0.03)


def test_rows_that_are_not_finite_arrive_as_nan():
    x = torch.zeros(4, 8)
    x[0, 3], x[1, 0], x[2, 7] = torch.nan, torch.inf, -torch.inf
    for bits in PACKED:
        out = round_trip(x, torch.arange(4), bits, 0)
        assert out[:3].isnan().all() and not out[3].any()


@pytest.mark.parametrize("backend", ["compiled", "reference"])
@pytest.mark.parametrize("payload", [0x7FC00000, 0x7FFFFFFF, 0x7F800001, -1, -0x400000], ids=hex)
def test_nan_on_the_wire_has_one_form(payload, backend):
    if backend == "compiled":
        pytest.importorskip("numba")
    x = torch.tensor([[1.0, 0.0, -2.0, 3.0]])
    x.view(torch.int32)[0, 1] = payload
    for bits in PACKED:
        assert pack_rows(x, torch.arange(1), bits, 0, backend=backend)[0, :4].tolist() == [0xC0, 0x7F, 0xC0, 0x7F]
    for value in (x, x.nan_to_num(torch.inf), x.nan_to_num(-torch.inf)):
        wire = pack_rows(value, torch.arange(1), 16, 0)[0]
        assert wire.tolist() == [0x80, 0x3F, 0xC0, 0x7F, 0x00, 0xC0, 0x40, 0x40]


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0, 0)])
@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("backend", ["compiled", "reference"])
def test_nothing_is_sent_and_received(shape, bits, backend):
    if backend == "compiled":
        pytest.importorskip("numba")
    rows, dim = shape
    x, index = torch.ones(4, dim), torch.arange(rows)
    wire = pack_rows(x, index, bits, 1, backend=backend)
    assert wire.shape == (rows, row_bytes(dim, bits))
    unpack_rows(wire, index, x, bits, backend=backend)
    assert torch.equal(x, torch.ones(4, dim))


def test_keys_differ_by_every_part_and_give_the_same_bytes_again():
    keys = {row_key(seed, rank, step) for seed in range(3) for rank in range(3) for step in range(3)}
    assert len(keys) == 27 and all(-(2**63) <= key < 2**63 for key in keys)
    x, index = rows_of((6, 40))
    assert torch.equal(pack_rows(x, index, 4, 9), pack_rows(x, index, 4, 9))
    assert not torch.equal(pack_rows(x, index, 4, 9), pack_rows(x, index, 4, 10))


def test_every_bit_of_a_key_depends_on_every_bit_of_its_parts():
    flips = np.zeros((16, 64))
    for seed in range(200):
        for bit in range(16):
            changed = (row_key(seed, 3) ^ row_key(seed, 3 ^ (1 << bit))) & ((1 << 64) - 1)
            flips[bit] += [changed >> place & 1 for place in range(64)]
    assert flips.min() > 0.3 * 200 and flips.max() < 0.7 * 200  # five standard deviations


def test_without_a_compiler_compiled_loops_are_refused_and_the_reference_runs(monkeypatch):
    x, index = rows_of((6, 40))
    expected = pack_rows(x, index, 4, 9)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for bits in (4, 16):
        with pytest.raises(UnsupportedError, match="numba"):
            pack_rows(x, index, bits, 9, backend="compiled")
    for backend in ("auto", "reference"):
        assert torch.equal(pack_rows(x, index, 4, 9, backend=backend), expected)


def test_sizes_on_the_wire():
    assert [row_bytes(256, bits) for bits in (2, 8, 16, 32)] == [68, 260, 512, 1024]


def test_wrong_arguments_are_refused():
    x, index = torch.zeros(2, 4), torch.arange(2)
    with pytest.raises(UnsupportedError, match="3 bits"):
        pack_rows(x, index, 3, 0)
    with pytest.raises(UnsupportedError, match="float64"):
        pack_rows(x.double(), index, 2, 0)
    with pytest.raises(UnsupportedError, match="backend"):
        pack_rows(x, index, 2, 0, backend="fast")
    with pytest.raises(UnsupportedError, match="shape"):
        unpack_rows(torch.zeros(2, 3, dtype=torch.uint8), index, x, 2)
    for backend in ("auto", "reference"):
        with pytest.raises(IndexError):
            pack_rows(x, torch.tensor([5]), 2, 0, backend=backend)
